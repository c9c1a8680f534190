//! A model's bytes served to other machines, in the hub's own URL forms.
//!
//! Whatever downloads from a hub downloads from here, unmodified: a `resolve` URL answers with the
//! file's facts and a redirect to a second path, which stands for the CDN and alone serves bytes.
//! Four things can stand behind it, each a [`Backend`]: a store, complete or still growing
//! ([`Stored`]), a store that fetches what it lacks ([`ThroughStore`]), a folder in Hugging Face layout ([`Folder`]), and the small trained model inside
//! this binary ([`Embedded`]).
//!
//! ```text
//! /api/models/{repo}[/revision/{rev}]     name, commit, file names
//! /api/models/{repo}/tree/{rev}           files with size and sha256
//! /{repo}/resolve/{rev}/{path}            facts, and 302 to
//! /cdn/{repo}/{commit}/{path}?Expires=..&Signature=..    the bytes, by Range
//! ```

mod backend;
mod embedded;
mod folder;
pub(crate) mod guard;
mod link;
mod listen;
mod routes;
mod stored;
#[cfg(test)]
mod tests;
mod through;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use backend::Backend;
pub use backend::Content;
pub use backend::Entry;
pub use backend::Listing;
pub use embedded::Embedded;
pub use folder::Folder;
pub use guard::Secret;
pub use link::Link;
pub(crate) use listen::Limits;
pub(crate) use listen::serve;
pub use stored::Stored;
pub use through::ThroughStore;

/// What can go wrong before a share serves; afterwards every fault is a reply to one request.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {source}")]
    Bind {
        /// The address asked for.
        addr: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The serving thread or its randomness is not to be had.
    #[error("cannot start serving: {0}")]
    Start(std::io::Error),
    /// A folder or file to share cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The folder or file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A folder is there and holds no model.
    #[error("{} holds no config.json, so it is no model's folder", .0.display())]
    NoModel(PathBuf),
}

impl ShareError {
    /// What to do next.
    pub fn hint(&self) -> &'static str {
        match self {
            ShareError::Bind { .. } => "choose another --port, or stop what listens there",
            ShareError::Start(_) => "check the limits on threads and open files (ulimit -a)",
            ShareError::Read { .. } => "check that the path exists and may be read",
            ShareError::NoModel(_) => "name the folder that directly holds config.json",
        }
    }
}

/// How to serve.
pub struct ShareOptions {
    /// Asked of every client as a bearer token; `None` serves whoever can connect.
    pub token: Option<Secret>,
    /// Makes the link as slow as this, over all connections together; `None` leaves it as it is.
    pub link: Option<Link>,
    /// Connections served at once; further ones wait in the system's queue.
    pub connections_max: usize,
}

impl Default for ShareOptions {
    fn default() -> Self {
        ShareOptions {
            token: None,
            link: None,
            connections_max: 256,
        }
    }
}

/// What a share has answered so far.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    api: AtomicU64,
    resolves: AtomicU64,
    body_requests: AtomicU64,
    body_bytes: AtomicU64,
}

/// What a share has answered so far, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareStats {
    /// Requests for model information and file lists.
    pub api: u64,
    /// Requests to a `resolve` URL.
    pub resolves: u64,
    /// Requests for bytes.
    pub body_requests: u64,
    /// Bytes of files handed to the network.
    pub body_bytes: u64,
}

/// A share that is serving, on a thread of its own, until it is stopped or dropped.
pub struct Server {
    addr: SocketAddr,
    counters: Arc<Counters>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Listens on `addr` (port 0 takes a free one) and serves `backend` from a thread of its own.
    ///
    /// # Errors
    ///
    /// [`ShareError::Bind`] where the address is taken or not ours, [`ShareError::Start`] where
    /// the system gives no thread.
    pub fn start(
        addr: SocketAddr,
        backend: Arc<dyn Backend>,
        options: ShareOptions,
    ) -> Result<Server, ShareError> {
        let bind = |source| ShareError::Bind { addr, source };
        let listener = std::net::TcpListener::bind(addr).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("deltafin-share")
            .enable_all()
            .build()
            .map_err(ShareError::Start)?;
        let counters = Arc::new(Counters::default());
        let limits = Limits {
            connections: options.connections_max,
            ..Limits::default()
        };
        let router = routes::app(addr, backend, options, Arc::clone(&counters))
            .map_err(ShareError::Start)?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("deltafin-share".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    // The listener was bound above, so only a broken runtime fails here.
                    if let Ok(listener) = tokio::net::TcpListener::from_std(listener) {
                        let stopped = async move {
                            // A dropped handle stops as well as an explicit word.
                            let _ = stopped.await;
                        };
                        serve(listener, router, limits, stopped).await;
                    }
                });
                // Readers that hang in a file system must not hold up the end.
                runtime.shutdown_timeout(Duration::from_millis(200));
            })
            .map_err(ShareError::Start)?;
        Ok(Server {
            addr,
            counters,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The address served, with the port that was taken.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The base URL to give a client as its hub, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// What has been answered so far.
    pub fn stats(&self) -> ShareStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ShareStats {
            api: read(&self.counters.api),
            resolves: read(&self.counters.resolves),
            body_requests: read(&self.counters.body_requests),
            body_bytes: read(&self.counters.body_bytes),
        }
    }

    /// Takes no more connections, lets running replies end for a few seconds, and returns.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
