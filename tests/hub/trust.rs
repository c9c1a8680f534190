//! Certificates: good ones are believed, others are told apart from broken networks.

use std::time::Duration;

use deltafin::hub::Hub;
use deltafin::hub::HubError;
use deltafin::hub::HubOptions;
use deltafin::hub::SourceAddress;

use crate::kit::REPO;
use crate::kit::options;
use crate::kit::repo;
use crate::support::Config;
use crate::support::Listener;
use crate::support::Repo;
use crate::support::TestHub;
use crate::support::tls::Pair;
use crate::support::tls::TlsFront;

const CA: &[u8] = include_bytes!("tls/ca.pem");
const GOOD: Pair = [
    include_bytes!("tls/good.pem"),
    include_bytes!("tls/good.key.pem"),
];
const EXPIRED: Pair = [
    include_bytes!("tls/expired.pem"),
    include_bytes!("tls/expired.key.pem"),
];
const ELSEWHERE: Pair = [
    include_bytes!("tls/elsewhere.pem"),
    include_bytes!("tls/elsewhere.key.pem"),
];

fn in_front_of(server: &TestHub, pair: Pair) -> TlsFront {
    TlsFront::start(server.address_of(Listener::Hub), pair, &[])
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
    let front = in_front_of(&server, GOOD);
    let hub = open(&server, front.url(), &[CA]);
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
        let front = in_front_of(&server, pair);
        let error = open(&server, front.url(), ca)
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
        assert_eq!(front.came(), 1, "{text}");
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

/// A stream of the other protocol that is refused loses every request on it, and its windows starve
/// long ways; so the client must not let itself be led there.
#[test]
fn fault_39_http_2_is_never_agreed_on_nor_understood() {
    let server = server();
    let alpn = ["h2", "http/1.1"];
    let front = TlsFront::start(server.address_of(Listener::Hub), GOOD, &alpn);
    let hub = open(&server, front.url(), &[CA]);
    let commit = hub.commit(&repo(), "main").unwrap();
    hub.list(&repo(), &commit).unwrap();
    let agreed = front.agreed();
    assert!(agreed.len() >= 2, "{agreed:?}");
    assert!(
        agreed.iter().all(|p| p.as_deref() != Some(b"h2")),
        "{agreed:?}"
    );
    // A server that knows nothing else is an error in bounded time.
    let only = TlsFront::start(server.address_of(Listener::Hub), GOOD, &["h2"]);
    let hub = open(&server, only.url(), &[CA]);
    match hub.commit(&repo(), "main") {
        // No protocol was agreed on, and so the old one was spoken.
        Ok(_) => assert_eq!(only.agreed(), [None]),
        Err(error) => assert!(matches!(error, HubError::Unreachable { .. }), "{error}"),
    }
}
