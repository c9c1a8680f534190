//! Connections, bounded in number and patience, for everything that serves HTTP here.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::pin::pin;
use std::sync::Arc;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::rt::TokioTimer;
use hyper_util::service::TowerToHyperService;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::io::ReadBuf;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::sync::watch;
use tokio::time::Sleep;

/// What one listener bears.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections at once; more wait in the system's queue.
    pub(crate) connections: usize,
    /// From the wish to read a request to the end of its headers: a client that drips its headers,
    /// and an idle kept-alive connection, live this long.
    pub(crate) headers: Duration,
    /// How long a client may take no byte of a reply.
    pub(crate) write_stall: Duration,
    /// Bytes of one request's headers.
    pub(crate) header_bytes: usize,
    /// How long running replies may take to end once stopped.
    pub(crate) farewell: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 256,
            headers: Duration::from_secs(60),
            write_stall: Duration::from_secs(60),
            header_bytes: 64 << 10,
            farewell: Duration::from_secs(5),
        }
    }
}

/// Serves `router` on `listener` until `stop` is ready; returns when the last connection ended or
/// the farewell is over.
///
/// Not `axum::serve`, which gives a client for ever to finish its headers and to take its reply:
/// a handful of such clients would hold every connection there is.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.headers)
        .max_buf_size(limits.header_bytes)
        .keep_alive(true);
    let places = Arc::new(Semaphore::new(limits.connections));
    let (ending, ended) = watch::channel(());
    let mut stop = pin!(stop);
    loop {
        let next = async {
            // The place comes first: what cannot be served is not accepted.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            () = &mut stop => break,
            next = next => next,
        };
        let Ok((stream, _)) = accepted else {
            // Out of descriptors, or the client is gone again. Accepting at once would spin.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        // Only a hint to the kernel: replies are small and wanted at once.
        let _ = stream.set_nodelay(true);
        let stream = TokioIo::new(Impatient::new(stream, limits.write_stall));
        let connection = http.serve_connection(stream, TowerToHyperService::new(router.clone()));
        let mut ended = ended.clone();
        tokio::spawn(async move {
            let mut connection = pin!(connection);
            let ended = async {
                // The sender is dropped at the end; both ways mean the same.
                let _ = ended.changed().await;
            };
            tokio::select! {
                // A client's broken connection is the client's affair.
                _ = connection.as_mut() => {}
                () = ended => {
                    connection.as_mut().graceful_shutdown();
                    let _ = connection.await;
                }
            }
            drop(place);
        });
    }
    drop(listener);
    drop(ended);
    drop(ending);
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    // Either every place is free again, or the farewell is over; both end the serving.
    let _ = tokio::time::timeout(limits.farewell, places.acquire_many(all)).await;
}

/// A stream whose writing fails when the other side takes nothing for too long.
struct Impatient {
    stream: TcpStream,
    stall: Duration,
    /// Runs while a write waits.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    fn new(stream: TcpStream, stall: Duration) -> Impatient {
        Impatient {
            stream,
            stall,
            patience: None,
        }
    }

    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let stall = self.stall;
        let patience = self
            .patience
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
        match patience.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Impatient {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.watch(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, parts);
        this.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
