//! Limits met by many at once, clocks that disagree, and the other family of addresses.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use deltafin::hub::Class;
use deltafin::hub::HubOptions;
use deltafin::hub::Notice;
use deltafin::hub::SourceAddress;

use crate::kit::Client;
use crate::kit::FILE;
use crate::kit::Pending;
use crate::kit::REPO;
use crate::kit::TOKEN;
use crate::kit::assert_right;
use crate::kit::eventually;
use crate::kit::options;
use crate::kit::span;
use crate::kit::token;
use crate::support::Config;
use crate::support::Content;
use crate::support::Fault;
use crate::support::Hosts;
use crate::support::Ledger;
use crate::support::Listener;
use crate::support::Quota;
use crate::support::Repo;
use crate::support::Rule;
use crate::support::TestHub;
use crate::support::testhub::ipv6;

const MIB: u64 = 1 << 20;

fn server() -> TestHub {
    TestHub::virtual_file(REPO, 5, 16 << 30)
}

fn cdn(fault: Fault) -> Rule {
    Rule::on(Listener::Cdn).fault(fault)
}

fn status(status: u16, headers: &[(&str, &str)]) -> Fault {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Fault::Status(status, headers.iter().map(own).collect(), String::new())
}

fn limited(client: &Client) -> Vec<(String, u64)> {
    let told = |n: &Notice| match n {
        Notice::RateLimited { host, seconds, .. } => Some((host.clone(), *seconds)),
        _ => None,
    };
    client.heard.all().iter().filter_map(told).collect()
}

/// Demand for `n` small spans, apart from each other.
fn many(client: &Client, n: u64) -> Vec<Pending> {
    let start = |i: u64| client.start(span(i * MIB, i * MIB + 1_000), Class::Demand);
    (0..n).map(start).collect()
}

fn all_right(server: &TestHub, pending: Vec<Pending>) {
    for (i, pending) in (0..).zip(pending) {
        let arrived = pending.wait().unwrap();
        assert_right(server, &arrived, i * MIB, i * MIB + 1_000);
    }
}

fn refused(ledger: &Ledger) -> usize {
    ledger.0.iter().filter(|e| e.status == 429).count()
}

#[test]
fn a_storm_of_refusals_is_waited_out_by_all_and_does_not_end_in_a_stampede() {
    const FILES: usize = 20;
    const QUOTA: usize = 4;
    let mut repo = Repo::new(REPO);
    let names: Vec<Arc<str>> = (0..FILES)
        .map(|i| format!("{i}.safetensors").into())
        .collect();
    for (seed, name) in (0..).zip(&names) {
        repo = repo.file(name, Content::Virtual { seed, size: MIB });
    }
    let config = Config {
        quota: Quota {
            api: 500,
            resolvers: QUOTA as u64,
        },
        ..Config::default()
    };
    let server = TestHub::with(config, vec![repo]);
    let mut options = options(vec![server.source()], &server);
    // The gap between two who have waited: long beside a request, and short beside the test.
    options.timing.backoff = Duration::from_millis(250);
    let client = Client::with(options);
    client.hub.prepare(&client.snapshot, names.clone());
    // From the other end, so that those who wait wait for different files.
    let pending: Vec<Pending> = names
        .iter()
        .rev()
        .map(|name| {
            let mut first = span(0, 1_000);
            first.file = Arc::clone(name);
            client.start(first, Class::Demand)
        })
        .collect();
    let found = || {
        let ledger = server.ledger();
        let moved = ledger.on(Listener::Hub).filter(|e| e.status == 302);
        moved.count()
    };
    let mut windows = 0;
    let mut first_window = 0;
    loop {
        eventually("the window is used up", || {
            found() >= FILES || limited(&client).len() > windows
        });
        if found() >= FILES {
            break;
        }
        // Those who were on their way come in; then nobody asks before the time.
        std::thread::sleep(Duration::from_millis(150));
        let asked = server.ledger().resolves();
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(server.ledger().resolves(), asked, "asked before the time");
        windows += 1;
        assert_eq!(limited(&client).len(), windows, "told once a window");
        if first_window == 0 {
            first_window = refused(&server.ledger()).max(1);
        }
        server.clock().advance(301);
    }
    for pending in pending {
        assert_eq!(pending.wait().unwrap().bytes.len(), 1_000);
    }
    let ledger = server.ledger();
    let later = refused(&ledger).saturating_sub(first_window);
    // Let go together, twice as many as there is room for would come each time.
    assert!(
        later <= 2 * windows,
        "{later} refused in {windows} windows after the first"
    );
    assert!(windows >= FILES / QUOTA - 2, "{windows} windows");
}

#[test]
fn a_cdn_that_asks_for_a_pause_gets_it_from_every_lane() {
    for (code, headers) in [
        (429, vec![("Retry-After", "30")]),
        (503, vec![("Retry-After", "30")]),
        (429, vec![("RateLimit", "\"bytes\";r=0;t=30")]),
    ] {
        let server = server();
        let client = Client::of(&server);
        client.check(&server, 0, 1_000);
        server.fault(cdn(status(code, &headers)).times(1));
        let first = client.start(span(0, 1_000), Class::Demand);
        let host = server.url_of(Listener::Cdn);
        eventually("a notice", || !limited(&client).is_empty());
        assert_eq!(limited(&client), [(host, 31)], "{code} {headers:?}");
        let others = many(&client, 20);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(server.ledger().ranges(), 2, "{code}: asked before the time");
        let waits = client.hub.stats();
        assert_eq!((waits.hedges, waits.retries), (0, 1), "{code}");
        server.clock().advance(32);
        assert_right(&server, &first.wait().unwrap(), 0, 1_000);
        all_right(&server, others);
        assert_eq!(server.ledger().ranges(), 2 + 21);
    }
}

#[test]
fn a_cdn_that_asks_for_a_long_pause_is_left_for_a_source_that_does_not() {
    let (first, second) = (server(), server());
    let client = Client::with(options(vec![first.source(), second.source()], &second));
    first.fault(cdn(status(429, &[("Retry-After", "200")])));
    for i in 0..8 {
        client.check(&second, i * MIB, i * MIB + 1_000);
    }
    assert_eq!(first.ledger().ranges(), 1);
    assert_eq!(client.hub.stats().sources[1].spans, 8);
}

#[test]
fn those_who_failed_together_do_not_come_back_together() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    options.timing.backoff = Duration::from_millis(600);
    options.timing.backoff_max = Duration::from_secs(8);
    let client = Client::with(options);
    server.fault(cdn(status(503, &[])).times(4));
    all_right(&server, many(&client, 4));
    let ledger = server.ledger();
    let again: Vec<Instant> = ledger.on(Listener::Cdn).skip(4).map(|e| e.at).collect();
    assert_eq!(again.len(), 4);
    let apart = *again.iter().max().unwrap() - *again.iter().min().unwrap();
    // Four draws of a uniform wait of at most 600 ms, seeded; without them it is a few ms.
    assert!(apart > Duration::from_millis(100), "{apart:?}");
}

#[test]
fn an_hour_between_the_clocks_changes_neither_signatures_nor_pauses() {
    for skew in [-3_600, 3_600] {
        let server = server();
        server.clock().skew(skew);
        let client = Client::of(&server);
        // A pause until a moment of the server's clock, asked for by the CDN and by the hub.
        let at = |seconds: u64| {
            crate::support::testhub::site::http_date(server.clock().server() + seconds)
        };
        client.check(&server, 0, 1_000);
        for listener in [Listener::Cdn, Listener::Hub] {
            if listener == Listener::Hub {
                // The address is too old now, so the hub is asked.
                server.clock().advance(3_500);
            }
            let refusal = status(429, &[("Retry-After", &at(40))]);
            server.fault(Rule::on(listener).fault(refusal).times(1));
            let told = limited(&client).len();
            let pending = client.start(span(0, 1_000), Class::Demand);
            eventually("a notice", || limited(&client).len() > told);
            let seconds = limited(&client)[told].1;
            assert!((39..=42).contains(&seconds), "{skew}: {seconds} s");
            server.clock().advance(60);
            assert_right(&server, &pending.wait().unwrap(), 0, 1_000);
        }
        let ledger = server.ledger();
        assert!(ledger.0.iter().all(|e| e.status != 403), "{skew}");
    }
}

#[test]
fn fault_22_a_short_signature_is_renewed_by_the_servers_clock() {
    for skew in [-7_200, -3_600, 3_600, 7_200] {
        let config = Config {
            signature_lasts: 600,
            ..Config::default()
        };
        let content = Content::Virtual { seed: 5, size: MIB };
        let server = TestHub::with(config, vec![Repo::new(REPO).file(FILE, content)]);
        server.clock().skew(skew);
        let client = Client::of(&server);
        client.check(&server, 0, 1_000);
        server.clock().advance(450);
        client.check(&server, 0, 1_000);
        assert_eq!(server.ledger().resolves(), 1, "{skew}: renewed too early");
        server.clock().advance(200);
        client.check(&server, 0, 1_000);
        assert_eq!(server.ledger().resolves(), 2, "{skew}");
        assert!(server.ledger().0.iter().all(|e| e.status != 403), "{skew}");
    }
}

#[test]
fn a_server_that_tells_no_time_is_asked_once_all_the_same() {
    for skew in [-3_600, 3_600, 36_000] {
        let server = server();
        server.clock().skew(skew);
        server.fault(Rule::on(Listener::Hub).fault(Fault::Header("Date".into(), String::new())));
        let client = Client::of(&server);
        for i in 0..10 {
            client.check(&server, i * MIB, i * MIB + 1_000);
        }
        assert_eq!(server.ledger().resolves(), 1, "{skew}");
        assert!(server.ledger().0.iter().all(|e| e.status != 403), "{skew}");
    }
}

#[test]
fn a_hub_on_ipv6_is_a_hub() {
    if !ipv6() {
        println!("skipped: this machine has no IPv6 loopback");
        return;
    }
    let config = Config {
        hosts: Hosts::V6,
        ..Config::default()
    };
    let content = Content::Virtual {
        seed: 5,
        size: 16 << 30,
    };
    let repo = Repo::new(REPO)
        .file(FILE, content)
        .file("config.json", &b"{}"[..]);
    let server = TestHub::with(config, vec![repo]);
    assert!(server.url().starts_with("http://[::1]:"));
    let client = Client::with(HubOptions {
        token: token(),
        ..options(vec![server.source()], &server)
    });
    server.fault(cdn(Fault::CutAfter(500)).times(1));
    client.check(&server, 0, 1_000);
    let small = client.hub.get(&client.snapshot, "config.json", 10).unwrap();
    assert_eq!(&small[..], b"{}");
    let ledger = server.ledger();
    let known = |e: &&crate::support::Entry| e.header("authorization").is_some();
    assert!(ledger.on(Listener::Hub).all(|e| known(&e)), "no token");
    ledger.assert_polite();
    ledger.assert_kept(TOKEN);
    assert_eq!(*client.range(0, 10).unwrap().source, *server.url());
    server.stop();
    let error = client.range(0, 1_000).unwrap_err().to_string();
    assert!(error.contains("http://[::1]:"), "{error}");
}

#[test]
fn fault_38_a_name_with_two_addresses_works_if_one_of_them_does() {
    for hosts in [Hosts::One, Hosts::V6] {
        if hosts == Hosts::V6 && !ipv6() {
            continue;
        }
        let config = Config {
            hosts,
            ..Config::default()
        };
        let content = Content::Virtual { seed: 5, size: MIB };
        let server = TestHub::with(config, vec![Repo::new(REPO).file(FILE, content)]);
        let port = server.address_of(Listener::Hub).port();
        let local = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", port)).unwrap();
        if !local
            .into_iter()
            .any(|a| a == server.address_of(Listener::Hub))
        {
            continue;
        }
        let source = SourceAddress::Http(format!("http://localhost:{port}"));
        let client = Client::with(options(vec![source], &server));
        client.check(&server, 0, 1_000);
    }
}

#[test]
fn fault_40_a_kept_connection_that_is_closed_unanswered_costs_nobody_anything() {
    let server = server();
    let client = Client::of(&server);
    client.check(&server, 0, 1_000);
    for i in 0..50 {
        server.fault(cdn(Fault::Vanish).times(1));
        client.check(&server, i * MIB, i * MIB + 1_000);
    }
    assert_eq!(client.hub.stats().sources[0].failures, 0);
    assert_eq!(server.ledger().ranges(), 1 + 2 * 50);
}

#[test]
fn fault_39_a_server_that_speaks_http_2_unasked_is_garbage_and_asked_again() {
    let server = server();
    let client = Client::of(&server);
    // SETTINGS, RST_STREAM and GOAWAY, as they stand on the wire.
    let mut frames = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    frames.extend([0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 7]);
    frames.extend([0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
    server.fault(cdn(Fault::Garbage(frames.clone())).times(2));
    client.check(&server, 0, 1_000);
    assert_eq!(server.ledger().ranges(), 3);
    server.fault(cdn(Fault::Garbage(frames)));
    client.range(0, 1_000).unwrap_err();
    assert!(
        server.ledger().ranges() < 40,
        "{}",
        server.ledger().ranges()
    );
}

#[test]
fn fault_43_a_small_file_that_does_not_end_is_not_read_to_its_end() {
    let repo = Repo::new(REPO).file("config.json", &b"{}"[..]);
    let server = TestHub::with(Config::default(), vec![repo]);
    let client = Client::of(&server);
    let before = client.hub.stats().meta_bytes;
    let endless = Rule::on(Listener::Hub).path("/resolve-cache/");
    server.fault(endless.fault(Fault::ExtraUndeclared(8 * MIB)));
    let error = client
        .hub
        .get(&client.snapshot, "config.json", 1 << 30)
        .unwrap_err();
    assert!(error.to_string().contains("more than 3 bytes"), "{error}");
    let read = client.hub.stats().meta_bytes - before;
    assert!(read < 4 * MIB, "{read} bytes of 24 MiB were read");
}

#[test]
fn fault_32_a_long_way_is_filled_by_more_lanes() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    // What is measured over must be long beside the way.
    options.timing.speed_window = Duration::from_secs(3);
    options.timing.warm = Duration::from_secs(60);
    let client = Client::with(options);
    client.check(&server, 0, 1_000);
    server.latency(Duration::from_millis(300));
    server.jitter(Duration::from_millis(60));
    server.slow(crate::support::Throttle {
        total: Some(4_000_000),
        ..crate::support::Throttle::default()
    });
    // A lane's span takes the link 50 ms and its way 330 ms: four lanes fill half of it.
    let length = 200_000;
    let start = |i: u64| client.start(span(i * MIB, i * MIB + length), Class::Bulk);
    let pending: Vec<Pending> = (0..150).map(start).collect();
    eventually("lanes grow", || {
        client.hub.stats().sources[0].lanes_limit >= 12
    });
    let done = client.hub.stats().body_bytes;
    server.link();
    eventually("forty more spans", || {
        client.hub.stats().body_bytes >= done + 40 * length
    });
    let link = server.link();
    let share = link.queued as f64 / link.bytes as f64;
    assert!(
        share >= 0.8,
        "the link was busy for {share:.2} of its bytes"
    );
    let stats = client.hub.stats();
    assert_eq!((stats.retries, stats.hedges, stats.wasted_bytes), (0, 0, 0));
    let connections = server.ledger().connections(Listener::Cdn);
    assert!(connections <= 17, "{connections} connections");
    drop(pending);
}
