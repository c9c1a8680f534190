//! Proxies as the environment names them, tried on the program itself: a process has one
//! environment, and the tests of this one share it.

use std::path::Path;
use std::process::Command;

use deltafin::hub::HubError;
use deltafin::hub::HubOptions;
use deltafin::hub::Proxy;

use crate::kit::Client;
use crate::kit::REPO;
use crate::kit::options;
use crate::kit::repo;
use crate::kit::token;
use crate::program;
use crate::program::Run;
use crate::support::Called;
use crate::support::Config;
use crate::support::Hosts;
use crate::support::Listener;
use crate::support::Repo;
use crate::support::TestHub;
use crate::support::proxy::Seen;
use crate::support::proxy::TestProxy;

const MODEL: &str = "test/tiny-k3";
const FOLDER: &str = "fixtures/tiny-k3";
const SECRET: &str = "pr0xy-s3cret";
/// `user:pr0xy-s3cret` as the header has it.
const ENCODED: &str = "dXNlcjpwcjB4eS1zM2NyZXQ=";

/// A hub by names that only a proxy can find.
fn named() -> TestHub {
    with(
        Hosts::Three,
        Called::Origins([
            "http://hub.invalid",
            "http://cdn.invalid",
            "http://other.invalid",
        ]),
    )
}

fn with(hosts: Hosts, called: Called) -> TestHub {
    let config = Config {
        hosts,
        called,
        ..Config::default()
    };
    TestHub::with(config, vec![Repo::folder(MODEL, FOLDER)])
}

/// Where the names of [`named`] are.
fn names(server: &TestHub) -> [(&'static str, std::net::SocketAddr); 2] {
    [
        ("hub.invalid", server.address_of(Listener::Hub)),
        ("cdn.invalid", server.address_of(Listener::Cdn)),
    ]
}

fn command(what: &str, home: &Path, hub: &str, env: &[(&str, &str)]) -> Command {
    let mut command = program::command();
    command.args([what, "--model", MODEL, "--hub", hub, "--json"]);
    command.args(["--reserve", "0", "--cache", "unlimited", "--home"]);
    command.arg(home).envs(env.iter().copied());
    command
}

/// Fetches the model into a home of its own.
fn fetch(hub: &str, env: &[(&str, &str)]) -> Run {
    let home = tempfile::tempdir().unwrap();
    let run = command("fetch", home.path(), hub, env).output().unwrap();
    Run::from(run)
}

fn all_by(proxy: &TestProxy, methods: &[&str]) -> bool {
    let fits = |s: &Seen| s.served && methods.contains(&s.method.as_str());
    proxy.seen().iter().all(fits)
}

#[test]
fn a_proxy_that_is_given_carries_hub_and_cdn_alike() {
    let server = TestHub::virtual_file(REPO, 5, 16 << 30);
    let proxy = TestProxy::start(&[]);
    let client = Client::with(HubOptions {
        proxy: Proxy::Url(proxy.url()),
        token: token(),
        ..options(vec![server.source()], &server)
    });
    client.check(&server, 0, 1_000);
    let through = |listener| proxy.served(&server.address_of(listener).to_string());
    assert_eq!(
        (through(Listener::Hub), through(Listener::Cdn)),
        (3, 1),
        "{:?}",
        proxy.seen()
    );
    server.ledger().assert_polite();
}

#[test]
fn every_variable_that_names_a_proxy_is_believed_for_hub_and_cdn() {
    for (name, scheme, methods) in [
        ("HTTP_PROXY", "http", &["GET", "HEAD"][..]),
        ("http_proxy", "http", &["GET", "HEAD"]),
        ("ALL_PROXY", "http", &["GET", "HEAD"]),
        ("ALL_PROXY", "socks5h", &["SOCKS"]),
        ("all_proxy", "socks5h", &["SOCKS"]),
    ] {
        let server = named();
        let proxy = TestProxy::start(&names(&server));
        let value = format!("{scheme}://{}", proxy.address());
        let run = fetch("http://hub.invalid", &[(name, &value)]);
        assert_eq!(run.code, 0, "{name}={value}: {}", run.stderr);
        let (hub, cdn) = (
            proxy.served("hub.invalid:80"),
            proxy.served("cdn.invalid:80"),
        );
        assert!(hub > 0 && cdn > 0, "{name}={value}: {:?}", proxy.seen());
        assert!(
            all_by(&proxy, methods),
            "{name}={value}: {:?}",
            proxy.seen()
        );
        server.ledger().assert_polite();
    }
}

#[cfg(feature = "tls")]
mod encrypted {
    use super::*;
    use crate::support::tls::Pair;
    use crate::support::tls::TlsFront;

    const CA: &str = "tests/hub/tls/names-ca.pem";
    const NAMES: Pair = [
        include_bytes!("tls/names.pem"),
        include_bytes!("tls/names.key.pem"),
    ];

    /// The hub by https, with what stands in front of its hub and its CDN.
    fn encrypted() -> (TestHub, [TlsFront; 2]) {
        let server = with(
            Hosts::Three,
            Called::Origins([
                "https://hub.invalid",
                "https://cdn.invalid",
                "https://other.invalid",
            ]),
        );
        let front = |listener| TlsFront::start(server.address_of(listener), NAMES, &[]);
        let fronts = [front(Listener::Hub), front(Listener::Cdn)];
        (server, fronts)
    }

    fn names([hub, cdn]: &[TlsFront; 2]) -> [(&'static str, std::net::SocketAddr); 2] {
        [
            ("hub.invalid", hub.address()),
            ("cdn.invalid", cdn.address()),
        ]
    }

    #[test]
    fn what_is_encrypted_goes_through_the_proxy_as_it_is() {
        for (name, scheme, method) in [
            ("HTTPS_PROXY", "http", "CONNECT"),
            ("https_proxy", "http", "CONNECT"),
            ("ALL_PROXY", "http", "CONNECT"),
            ("ALL_PROXY", "socks5h", "SOCKS"),
        ] {
            let (server, fronts) = encrypted();
            let proxy = TestProxy::start(&names(&fronts));
            let value = format!("{scheme}://{}", proxy.address());
            let env = [(name, value.as_str()), ("SSL_CERT_FILE", CA)];
            let run = fetch("https://hub.invalid", &env);
            assert_eq!(run.code, 0, "{name}={value}: {}", run.stderr);
            let (hub, cdn) = (
                proxy.served("hub.invalid:443"),
                proxy.served("cdn.invalid:443"),
            );
            assert!(hub > 0 && cdn > 0, "{name}={value}: {:?}", proxy.seen());
            assert!(
                all_by(&proxy, &[method]),
                "{name}={value}: {:?}",
                proxy.seen()
            );
            server.ledger().assert_polite();
        }
    }

    #[test]
    fn a_companys_own_authority_is_believed_only_if_ssl_cert_file_names_it() {
        let (server, fronts) = encrypted();
        let proxy = TestProxy::start(&names(&fronts));
        let run = fetch("https://hub.invalid", &[("HTTPS_PROXY", &proxy.url())]);
        assert_eq!(run.code, 4, "{}", run.stderr);
        assert!(run.stderr.contains("certificate"), "{}", run.stderr);
        assert!(run.stderr.contains("SSL_CERT_FILE"), "{}", run.stderr);
        assert!(server.ledger().0.is_empty());
        let env = [
            ("HTTPS_PROXY", proxy.url()),
            ("SSL_CERT_FILE", "no/such/file.pem".to_owned()),
        ];
        let env: Vec<(&str, &str)> = env.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let run = fetch("https://hub.invalid", &env);
        assert_ne!(run.code, 0);
        assert!(run.stderr.contains("no/such/file.pem"), "{}", run.stderr);
    }

    #[test]
    fn a_tunnels_credentials_stay_between_program_and_proxy() {
        let (server, fronts) = encrypted();
        let proxy = TestProxy::wanting(&format!("user:{SECRET}"), &names(&fronts));
        let good = format!("http://user:{SECRET}@{}", proxy.address());
        let env = [("HTTPS_PROXY", good.as_str()), ("SSL_CERT_FILE", CA)];
        let run = fetch("https://hub.invalid", &env);
        assert_eq!(run.code, 0, "{}", run.stderr);
        keeps_the_secret(&run);
        server.ledger().assert_kept(SECRET);
        server.ledger().assert_kept(ENCODED);
        let bad = format!("http://other:{SECRET}@{}", proxy.address());
        let before = proxy.seen().len();
        let env = [("HTTPS_PROXY", bad.as_str()), ("SSL_CERT_FILE", CA)];
        let run = fetch("https://hub.invalid", &env);
        assert_eq!(run.code, 4, "{}", run.stderr);
        assert!(run.stderr.contains("HTTPS_PROXY"), "{}", run.stderr);
        keeps_the_secret(&run);
        let after = proxy.seen().len();
        assert_eq!(after, before + 1, "asked again although refused");
    }
}

/// 0.0.0.0 is this machine, and yet no loopback address: a proxy would stand between.
#[test]
fn who_is_named_in_no_proxy_is_asked_directly() {
    for (name, value, through) in [
        ("NO_PROXY", "example.org", true),
        ("NO_PROXY", "0.0.0.0", false),
        ("no_proxy", "example.org, 0.0.0.0/8", false),
        // `*` means every name; of numbers it is this.
        ("NO_PROXY", "*,0.0.0.0/0", false),
    ] {
        let server = with(Hosts::One, Called::Host("0.0.0.0"));
        let proxy = TestProxy::start(&[]);
        let run = fetch(
            &server.url(),
            &[("HTTP_PROXY", &proxy.url()), (name, value)],
        );
        // A proxy may have no way there; what counts is who was asked.
        assert!(run.code == 0 || through, "{name}={value}: {}", run.stderr);
        let seen = proxy.seen();
        assert_eq!(!seen.is_empty(), through, "{name}={value}: {seen:?}");
        server.ledger().assert_polite();
    }
}

#[test]
fn this_machines_own_servers_are_asked_without_any_proxy() {
    let server = with(Hosts::Three, Called::Address);
    let proxy = TestProxy::start(&[]);
    let url = proxy.url();
    let env = [
        ("HTTP_PROXY", url.as_str()),
        ("ALL_PROXY", url.as_str()),
        ("http_proxy", url.as_str()),
    ];
    let run = fetch(&server.url(), &env);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(proxy.seen(), []);
}

fn keeps_the_secret(run: &Run) {
    for secret in [SECRET, ENCODED] {
        let told = format!("{}{}", run.stdout, run.stderr);
        assert!(!told.contains(secret), "{told}");
    }
}

#[test]
fn a_proxys_credentials_go_to_it_and_to_nobody_else() {
    let server = named();
    let proxy = TestProxy::wanting(&format!("user:{SECRET}"), &names(&server));
    let good = format!("http://user:{SECRET}@{}", proxy.address());
    let run = fetch("http://hub.invalid", &[("HTTP_PROXY", &good)]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    keeps_the_secret(&run);
    let known = format!("user:{SECRET}");
    let seen = proxy.seen();
    let own = |s: &Seen| s.credentials.as_deref() == Some(&known);
    assert!(seen.iter().all(own), "{seen:?}");
    let ledger = server.ledger();
    let told = |e: &crate::support::Entry| e.header("proxy-authorization").is_some();
    assert!(!ledger.0.iter().any(told));
    ledger.assert_kept(SECRET);
    ledger.assert_kept(ENCODED);
    // Refused, and out of reach.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = nobody.local_addr().unwrap();
    drop(nobody);
    for (value, words) in [
        (format!("http://wrong:{SECRET}@{}", proxy.address()), "407"),
        (format!("http://user:{SECRET}@{gone}"), "gave up"),
    ] {
        let run = fetch("http://hub.invalid", &[("HTTP_PROXY", &value)]);
        assert_eq!(run.code, 4, "{}", run.stderr);
        assert!(run.stderr.contains(words), "{}", run.stderr);
        assert!(run.stderr.contains("hint:"), "{}", run.stderr);
        keeps_the_secret(&run);
    }
    // One that the options name, not the environment.
    let asked = |url: String| {
        let hub = deltafin::hub::Hub::open(HubOptions {
            proxy: Proxy::Url(url),
            ..options(vec![server.source()], &server)
        });
        hub.and_then(|hub| hub.commit(&repo(), "main")).unwrap_err()
    };
    for url in [
        format!("http://wrong:{SECRET}@{}", proxy.address()),
        format!("http://user:{SECRET}@{gone}"),
        format!("nonsense://user:{SECRET}@{gone}"),
        format!("http://user:{SECRET}@"),
    ] {
        let error = asked(url);
        let text = format!("{error} {error:?} {:?}", error.hint());
        assert!(!text.contains(SECRET) && !text.contains(ENCODED), "{text}");
        assert!(!matches!(error, HubError::Cancelled), "{text}");
    }
}

#[test]
fn offline_opens_no_socket_whatever_proxies_are_named() {
    let traced = Command::new("strace").arg("-V").output();
    if !traced.is_ok_and(|o| o.status.success()) {
        println!("skipped: no strace here");
        return;
    }
    let server = named();
    let proxy = TestProxy::start(&names(&server));
    let url = proxy.url();
    for (what, more) in [("stream", &["--ids", "5"][..]), ("fetch", &[])] {
        let home = tempfile::tempdir().unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let env = [
            ("HTTP_PROXY", url.as_str()),
            ("HTTPS_PROXY", url.as_str()),
            ("ALL_PROXY", url.as_str()),
            ("HF_HUB_OFFLINE", "1"),
        ];
        let plain = command(what, home.path(), "http://hub.invalid", &env);
        let mut strace = Command::new("strace");
        strace.args(["-f", "-e", "trace=socket,connect,sendto", "-o"]);
        strace.arg(log.path()).arg(plain.get_program());
        strace.args(plain.get_args()).args(more).env_clear();
        for (name, value) in plain.get_envs() {
            if let Some(value) = value {
                strace.env(name, value);
            }
        }
        let run = Run::from(strace.output().unwrap());
        assert_eq!(run.code, 3, "{what}: {}", run.stderr);
        assert!(run.stderr.contains("hint:"), "{what}: {}", run.stderr);
        let calls = std::fs::read_to_string(log.path()).unwrap();
        let named = ["socket(", "connect(", "sendto("];
        let of_the_network = |line: &&str| named.iter().any(|call| line.contains(call));
        let calls: Vec<&str> = calls.lines().filter(of_the_network).collect();
        assert!(calls.is_empty(), "{what}: offline, and yet: {calls:?}");
    }
    assert_eq!(proxy.seen(), []);
}
