//! What people set: order, cancelling, limits, offline, secrets of their own.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use deltafin::hub::Class;
use deltafin::hub::Hub;
use deltafin::hub::HubError;
use deltafin::hub::HubOptions;
use deltafin::hub::SourceAddress;
use deltafin::hub::Token;

use crate::kit::Client;
use crate::kit::REPO;
use crate::kit::TOKEN;
use crate::kit::assert_right;
use crate::kit::eventually;
use crate::kit::options;
use crate::kit::repo;
use crate::kit::span;
use crate::kit::token;
use crate::support::Config;
use crate::support::Fault;
use crate::support::Listener;
use crate::support::Rule;
use crate::support::TestHub;
use crate::support::Throttle;

const MIB: u64 = 1 << 20;

fn server() -> TestHub {
    TestHub::virtual_file(REPO, 5, 16 << 30)
}

fn slow(server: &TestHub, total: u64) {
    server.slow(Throttle {
        total: Some(total),
        ..Throttle::default()
    });
}

#[test]
fn demand_goes_before_downloads_and_downloads_before_guesses() {
    let server = server();
    let client = Client::of(&server);
    client.check(&server, 0, 10);
    server.forget();
    slow(&server, 4 * MIB);
    let mut pending = Vec::new();
    for (n, class) in [(0, Class::Hint), (1, Class::Bulk), (2, Class::Demand)] {
        for i in 0..8u64 {
            let at = (n * 100 + i) * MIB;
            pending.push(client.start(span(at, at + 200_000), class));
        }
        if class == Class::Hint {
            eventually("two guesses", || server.ledger().ranges() >= 2);
            assert_eq!(
                client.hub.stats().lanes,
                2,
                "guesses hold at most half of four lanes"
            );
        }
    }
    let firsts = |server: &TestHub| -> Vec<u64> {
        let ledger = server.ledger();
        let range =
            |e: &crate::support::Entry| e.header("range")?[6..].split('-').next()?.parse().ok();
        ledger
            .on(Listener::Cdn)
            .filter_map(range)
            .map(|first: u64| first / (100 * MIB))
            .collect()
    };
    for pending in pending {
        pending.wait().unwrap();
    }
    let order = firsts(&server);
    let last = |class| order.iter().rposition(|c| *c == class).unwrap();
    assert!(last(2) < last(1) && last(1) < last(0), "{order:?}");
    let first_demand = order.iter().position(|c| *c == 2).unwrap();
    let hints_before = order[..first_demand].iter().filter(|c| **c == 0).count();
    assert!(hints_before <= 2, "{order:?}");
}

#[test]
fn a_guess_steps_back_for_demand_and_keeps_what_it_got() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    options.lanes_max = 1;
    options.timing.idle = Duration::from_secs(30);
    options.timing.speed_min = 0;
    let client = Client::with(options);
    server.fault(
        Rule::on(Listener::Cdn)
            .fault(Fault::StallAfter(300_000))
            .times(1),
    );
    let guess = client.start(span(0, MIB), Class::Hint);
    eventually("the stall", || client.hub.stats().body_bytes >= 300_000);
    client.check(&server, 5 * MIB, 5 * MIB + 1_000);
    assert_right(&server, &guess.wait().unwrap(), 0, MIB);
    let ledger = server.ledger();
    let rest = ledger.on(Listener::Cdn).last().unwrap();
    assert_eq!(
        rest.header("range").unwrap(),
        format!("bytes=300000-{}", MIB - 1)
    );
    assert_eq!(client.hub.stats().wasted_bytes, 0);
}

#[test]
fn a_guess_that_comes_true_is_promoted_and_not_fetched_twice() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    options.lanes_max = 1;
    let client = Client::with(options);
    slow(&server, MIB);
    let first = client.start(span(0, 300_000), Class::Demand);
    let bulk = client.start(span(MIB, MIB + 300_000), Class::Bulk);
    let guess = client.start(span(2 * MIB, 2 * MIB + 1_000), Class::Hint);
    guess.ticket().promote(Class::Demand);
    guess.wait().unwrap();
    assert_eq!(
        client.hub.stats().sources[0].spans,
        2,
        "it waited for the download"
    );
    bulk.wait().unwrap();
    first.wait().unwrap();
    assert_eq!(server.ledger().ranges(), 3);
}

#[test]
fn fault_49_a_dropped_ticket_closes_its_connection_at_once() {
    let server = server();
    let client = Client::of(&server);
    server.fault(Rule::on(Listener::Cdn).fault(Fault::StallAfter(1_000)));
    let running: Vec<_> = (0..4u64)
        .map(|i| client.start(span(i * MIB, i * MIB + MIB), Class::Demand))
        .collect();
    let waiting = client.start(span(9 * MIB, 10 * MIB), Class::Demand);
    eventually("four stalls", || client.hub.stats().body_bytes >= 4_000);
    let before = server.open_connections();
    let started = Instant::now();
    assert!(matches!(waiting.cancel(), Err(HubError::Cancelled)));
    for running in running {
        assert!(matches!(running.cancel(), Err(HubError::Cancelled)));
    }
    eventually("closed", || server.open_connections() + 4 <= before);
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(client.hub.stats().lanes, 0);
    server.heal();
    client.check(&server, 0, MIB);
}

#[test]
fn a_hub_that_is_dropped_tells_everybody_who_waits() {
    let server = server();
    let client = Client::of(&server);
    server.fault(Rule::on(Listener::Cdn).fault(Fault::StallAfter(1_000)));
    let pending: Vec<_> = (0..20u64)
        .map(|i| client.start(span(i * MIB, i * MIB + MIB), Class::Demand))
        .collect();
    eventually("a stall", || client.hub.stats().body_bytes >= 1_000);
    drop(client);
    for pending in pending {
        assert!(matches!(pending.wait(), Err(HubError::Cancelled)));
    }
}

#[test]
fn fault_50_offline_opens_no_socket() {
    let server = server();
    let known = Arc::clone(&Client::of(&server).snapshot);
    server.forget();
    let options = HubOptions {
        offline: true,
        ..options(vec![server.source()], &server)
    };
    let client = Client::knowing(options, &known);
    let open = server.open_connections();
    client.hub.prepare(&known, ["data.safetensors".into()]);
    for error in [
        client.range(0, 1_000).unwrap_err(),
        client.hub.commit(&repo(), "main").unwrap_err(),
        client.hub.list(&repo(), &known.commit).unwrap_err(),
        client
            .hub
            .get(&known, "data.safetensors", u64::MAX)
            .unwrap_err(),
    ] {
        assert!(matches!(error, HubError::Offline { .. }), "{error}");
        assert!(error.hint().unwrap().contains("--offline"));
    }
    // What was to be prepared had time enough to be asked for.
    std::thread::sleep(Duration::from_millis(100));
    assert!(server.ledger().0.is_empty());
    assert!(server.open_connections() <= open);
}

#[test]
fn a_rate_limit_is_kept_and_can_be_lifted() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    options.rate_bytes_per_s = Some(2 * MIB);
    let client = Client::with(options);
    let started = Instant::now();
    let pending: Vec<_> = (0..4u64)
        .map(|i| client.start(span(i * MIB, i * MIB + MIB / 2), Class::Bulk))
        .collect();
    for (i, pending) in (0..4u64).zip(pending) {
        assert_right(
            &server,
            &pending.wait().unwrap(),
            i * MIB,
            i * MIB + MIB / 2,
        );
    }
    assert!(
        started.elapsed() >= Duration::from_millis(900),
        "{:?}",
        started.elapsed()
    );
    client.hub.set_rate(None);
    let started = Instant::now();
    client.check(&server, 0, 8 * MIB);
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(client.hub.stats().retries, 0);
}

#[test]
fn a_limit_of_bytes_is_never_passed_and_can_be_raised() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    options.bytes_max = Some(3 * MIB);
    let client = Client::with(options);
    let pending: Vec<_> = (0..8u64)
        .map(|i| client.start(span(i * MIB, i * MIB + MIB), Class::Bulk))
        .collect();
    let outcomes: Vec<_> = pending.into_iter().map(crate::kit::Pending::wait).collect();
    let arrived = outcomes.iter().filter(|o| o.is_ok()).count();
    assert_eq!(arrived, 2, "the listing took a little of the third");
    let capped = |o: &&Result<_, HubError>| matches!(o, Err(HubError::CapReached { .. }));
    assert_eq!(outcomes.iter().filter(capped).count(), 6);
    let stats = client.hub.stats();
    assert!(stats.body_bytes + stats.meta_bytes <= 3 * MIB);
    client.hub.set_bytes_max(Some(20 * MIB));
    client.check(&server, 0, MIB);
}

#[test]
fn a_source_with_its_own_secret_gets_that_and_others_do_not() {
    let server = server();
    let other = TestHub::with(Config::default(), vec![]);
    let own = server.url().replace("http://", "http://:sharesecret@");
    let client = Client::with(HubOptions {
        token: token(),
        ..options(vec![SourceAddress::Http(own), other.source()], &server)
    });
    client.check(&server, 0, 1_000);
    let ledger = server.ledger();
    assert!(
        ledger
            .on(Listener::Hub)
            .all(|e| e.header("authorization") == Some("Bearer sharesecret"))
    );
    ledger.assert_polite();
    let shown = format!("{:?} {:?}", client.hub.stats(), client.heard.all());
    assert!(!shown.contains("sharesecret"), "{shown}");
    assert!(!format!("{:?}", SourceAddress::Http("http://:s3cret@nas/".into())).contains("s3cret"));
    assert!(!format!("{:?}", Token::new(TOKEN, "x")).contains(TOKEN));
}

#[test]
fn addresses_that_cannot_be_sources_are_refused_when_opened() {
    for address in [
        "ftp://x/y",
        "http://",
        "https://user:pw@ /x",
        "nowhere/at/all",
    ] {
        let refused = Hub::open(HubOptions {
            sources: vec![SourceAddress::parse(address)],
            ..HubOptions::default()
        });
        let error = refused.err().expect(address);
        assert!(matches!(error, HubError::Address { .. }), "{error}");
        assert!(!error.to_string().contains("pw"), "{error}");
    }
}
