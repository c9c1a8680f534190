//! Certificates: good ones are believed, others are told apart from broken networks.

use std::io::Read as _;
use std::io::Write as _;
use std::net::TcpListener;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use deltafin::hub::Hub;
use deltafin::hub::HubError;
use deltafin::hub::HubOptions;
use deltafin::hub::SourceAddress;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;

use crate::kit::REPO;
use crate::kit::options;
use crate::kit::repo;
use crate::support::Config;
use crate::support::Repo;
use crate::support::TestHub;

const CA: &[u8] = include_bytes!("tls/ca.pem");
const GOOD: [&[u8]; 2] = [
    include_bytes!("tls/good.pem"),
    include_bytes!("tls/good.key.pem"),
];
const EXPIRED: [&[u8]; 2] = [
    include_bytes!("tls/expired.pem"),
    include_bytes!("tls/expired.key.pem"),
];
const ELSEWHERE: [&[u8]; 2] = [
    include_bytes!("tls/elsewhere.pem"),
    include_bytes!("tls/elsewhere.key.pem"),
];

/// TLS in front of a server, one connection a request. Returns its address and how many came.
fn in_front_of(
    server: &TestHub,
    [certificate, key]: [&'static [u8]; 2],
) -> (String, Arc<AtomicUsize>) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = vec![CertificateDer::from_pem_slice(certificate).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let config = Arc::new(config);
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("https://{}", socket.local_addr().unwrap());
    let upstream = server.url().trim_start_matches("http://").to_owned();
    let count = Arc::new(AtomicUsize::new(0));
    let came = Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in socket.incoming() {
            came.fetch_add(1, SeqCst);
            let tls = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let (Ok(stream), upstream) = (stream, upstream.clone()) else {
                return;
            };
            std::thread::spawn(move || {
                let mut client = rustls::StreamOwned::new(tls, stream);
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") {
                    match client.read(&mut byte) {
                        Ok(1) => head.push(byte[0]),
                        _ => return,
                    }
                }
                let mut upstream = TcpStream::connect(upstream).unwrap();
                upstream
                    .set_read_timeout(Some(Duration::from_millis(300)))
                    .unwrap();
                upstream.write_all(&head).unwrap();
                let mut reply = Vec::new();
                let _ = upstream.read_to_end(&mut reply);
                let _ = client.write_all(&reply);
                client.conn.send_close_notify();
                let _ = client.flush();
            });
        }
    });
    (address, count)
}

fn server() -> TestHub {
    let repo = Repo::new(REPO)
        .file("config.json", &b"{}"[..])
        .file("a.safetensors", &b"abc"[..]);
    TestHub::with(Config::default(), vec![repo])
}

fn open(server: &TestHub, address: String, ca: &[&[u8]]) -> Hub {
    let mut options = HubOptions {
        extra_ca_pem: ca.iter().map(|pem| pem.to_vec()).collect(),
        ..options(vec![SourceAddress::Http(address)], server)
    };
    options.timing.headers = Duration::from_secs(5);
    Hub::open(options).unwrap()
}

#[test]
fn a_certificate_of_a_companys_own_authority_is_believed_when_named() {
    let server = server();
    let (address, _) = in_front_of(&server, GOOD);
    let hub = open(&server, address, &[CA]);
    let commit = hub.commit(&repo(), "main").unwrap();
    let snapshot = hub.list(&repo(), &commit).unwrap();
    assert_eq!(&hub.get(&snapshot, "config.json", 10).unwrap()[..], b"{}");
    // The test hub's CDN is plain http: from https nobody is led there.
    let error = hub.get(&snapshot, "a.safetensors", 10).unwrap_err();
    assert!(
        error.to_string().contains("from https down to http"),
        "{error}"
    );
}

#[test]
fn fault_37_a_certificate_that_does_not_fit_is_not_tried_again() {
    for (pair, ca) in [
        (GOOD, &[][..]),
        (EXPIRED, &[CA][..]),
        (ELSEWHERE, &[CA][..]),
    ] {
        let server = server();
        let (address, came) = in_front_of(&server, pair);
        let error = open(&server, address, ca)
            .commit(&repo(), "main")
            .unwrap_err();
        assert!(
            matches!(error, HubError::Unreachable { attempts: 1, .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains("certificate") && text.contains("SSL_CERT_FILE"),
            "{text}"
        );
        assert_eq!(came.load(SeqCst), 1, "{text}");
        assert!(server.ledger().0.is_empty());
    }
}

#[test]
fn a_certificate_file_that_holds_none_is_refused_when_opened() {
    let nonsense =
        b"-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----\n".to_vec();
    let refused = Hub::open(HubOptions {
        extra_ca_pem: vec![nonsense],
        ..HubOptions::default()
    });
    assert!(matches!(refused, Err(HubError::Damaged { .. })));
}
