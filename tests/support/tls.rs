//! TLS in front of a server that has none.

use std::io;
use std::io::Read as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::net::TcpListener;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;

/// A certificate and its key, as PEM.
pub type Pair = [&'static [u8]; 2];

/// One request a connection. It ends with the process.
#[derive(Debug)]
pub struct TlsFront {
    address: SocketAddr,
    came: Arc<AtomicUsize>,
    agreed: Arc<Mutex<Vec<Option<Vec<u8>>>>>,
}

impl TlsFront {
    /// In front of `upstream`; offers the protocols of `alpn`, in this order, if there are any.
    pub fn start(upstream: SocketAddr, [certificate, key]: Pair, alpn: &[&str]) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = vec![CertificateDer::from_pem_slice(certificate).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(key).unwrap();
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|p| p.as_bytes().to_vec()).collect();
        let config = Arc::new(config);
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let front = TlsFront {
            address: socket.local_addr().unwrap(),
            came: Arc::default(),
            agreed: Arc::default(),
        };
        let (came, agreed) = (Arc::clone(&front.came), Arc::clone(&front.agreed));
        std::thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                came.fetch_add(1, SeqCst);
                let tls = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
                let agreed = Arc::clone(&agreed);
                // Who does not like the certificate goes away.
                std::thread::spawn(move || drop(pass_on(stream, tls, upstream, &agreed)));
            }
        });
        front
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Connections so far, failed ones included.
    pub fn came(&self) -> usize {
        self.came.load(SeqCst)
    }

    /// The protocol that each connection agreed on, in the order in which their requests came.
    pub fn agreed(&self) -> Vec<Option<Vec<u8>>> {
        self.agreed.lock().unwrap().clone()
    }
}

fn pass_on(
    stream: TcpStream,
    tls: rustls::ServerConnection,
    upstream: SocketAddr,
    agreed: &Mutex<Vec<Option<Vec<u8>>>>,
) -> io::Result<()> {
    let mut client = rustls::StreamOwned::new(tls, stream);
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let protocol = client.conn.alpn_protocol().map(<[u8]>::to_vec);
    agreed.lock().unwrap().push(protocol);
    let line = head.windows(2).position(|w| w == b"\r\n").unwrap_or(0) + 2;
    let mut upstream = TcpStream::connect(upstream)?;
    upstream.write_all(&head[..line])?;
    upstream.write_all(b"Connection: close\r\n")?;
    upstream.write_all(&head[line..])?;
    io::copy(&mut upstream, &mut client)?;
    client.conn.send_close_notify();
    client.flush()
}
