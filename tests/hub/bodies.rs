//! Bodies that break, lie or crawl. Numbers are those of the list of faults the client is built
//! against.

use std::time::Duration;

use deltafin::hub::Class;
use deltafin::hub::HubError;
use deltafin::hub::Notice;

use crate::kit::Client;
use crate::kit::REPO;
use crate::kit::assert_right;
use crate::kit::options;
use crate::kit::proven_span;
use crate::kit::span;
use crate::support::Fault;
use crate::support::Listener;
use crate::support::Rule;
use crate::support::TestHub;
use crate::support::Throttle;

const MIB: u64 = 1 << 20;
const START: u64 = 12_345;
const END: u64 = START + MIB;

fn server() -> TestHub {
    TestHub::virtual_file(REPO, 5, 16 << 30)
}

fn cdn(fault: Fault) -> Rule {
    Rule::on(Listener::Cdn).fault(fault)
}

/// First bytes asked of the CDN, request by request.
fn firsts(server: &TestHub) -> Vec<u64> {
    let first = |range: &str| {
        let (first, _) = range.strip_prefix("bytes=")?.split_once('-')?;
        first.parse().ok()
    };
    let ledger = server.ledger();
    ledger
        .on(Listener::Cdn)
        .filter_map(|e| first(e.header("range")?))
        .collect()
}

/// A client without the guard against drips, which would also end a silence.
fn without_speed_guard(server: &TestHub) -> Client {
    let mut options = options(vec![server.source()], server);
    options.timing.speed_min = 0;
    Client::with(options)
}

/// Plays `fault` once at byte `at` of a span; the span must go on from there.
fn goes_on_from(fault: Fault, at: u64, exact: bool) {
    let server = server();
    let client = without_speed_guard(&server);
    server.fault(cdn(fault.clone()).times(1));
    client.check(&server, START, END);
    let asked = firsts(&server);
    assert_eq!(asked.len(), 2, "{fault:?}: {asked:?}");
    if exact {
        assert_eq!(asked[1], START + at, "{fault:?} starts over");
    } else {
        assert!(asked[1] > START, "{fault:?} starts over");
    }
    assert!(client.hub.stats().wasted_bytes == 0);
    server.ledger().assert_polite();
}

#[test]
fn fault_1_a_server_that_never_answers_is_asked_again() {
    let server = server();
    let client = without_speed_guard(&server);
    server.fault(cdn(Fault::Hang).times(2));
    server.fault(
        Rule::on(Listener::Hub)
            .path("/resolve/")
            .fault(Fault::Hang)
            .times(2),
    );
    client.check(&server, START, END);
    assert_eq!(
        (server.ledger().resolves(), server.ledger().ranges()),
        (3, 3)
    );
}

#[test]
fn fault_2_a_body_that_stalls_goes_on_where_it_stopped() {
    goes_on_from(Fault::StallAfter(300_000), 300_000, true);
}

#[test]
fn fault_3_a_reset_connection_goes_on_where_it_stopped() {
    goes_on_from(Fault::ResetAfter(900_000), 900_000, false);
}

#[test]
fn fault_4_a_body_cut_short_goes_on_where_it_stopped() {
    goes_on_from(Fault::CutAfter(500_000), 500_000, true);
}

#[test]
fn fault_5_a_body_of_no_declared_length_that_ends_early_is_not_believed() {
    goes_on_from(Fault::CutUndeclared(500_000), 500_000, true);
}

#[test]
fn fault_6_a_chunked_body_cut_short_goes_on_where_it_stopped() {
    goes_on_from(Fault::CutChunked(500_000), 500_000, false);
}

#[test]
fn a_body_of_no_declared_length_that_is_whole_is_taken() {
    for fault in [Fault::Chunked, Fault::Undeclared] {
        let server = server();
        let client = Client::of(&server);
        server.fault(cdn(fault).times(1));
        client.check(&server, START, END);
        assert_eq!(server.ledger().ranges(), 1);
    }
}

#[test]
fn fault_7_a_body_longer_than_asked_for_is_dropped_whole() {
    for fault in [Fault::ExtraDeclared(10), Fault::ExtraUndeclared(10)] {
        let server = server();
        let client = Client::of(&server);
        let declared = matches!(fault, Fault::ExtraDeclared(_));
        server.fault(cdn(fault).times(1));
        client.check(&server, START, END);
        assert_eq!(firsts(&server), [START, START]);
        // A length that is wrong is seen before the body; one that is not stated, at its end.
        let read = client.hub.stats().body_bytes;
        assert_eq!(read == MIB, declared, "{read}");
    }
}

#[test]
fn faults_8_and_12_wrong_bytes_are_fetched_again_and_told_of() {
    for fault in [
        Fault::FlipBit(1_000),
        Fault::Zeros(70_000),
        Fault::Shift(1),
        Fault::Shift(MIB as i64),
    ] {
        let server = server();
        let client = Client::of(&server);
        server.fault(cdn(fault.clone()).times(1));
        let arrived = client.proven(&server, START, END).unwrap();
        assert_right(&server, &arrived, START, END);
        let heard = client.heard.all();
        assert!(
            matches!(heard[..], [Notice::WrongBytes { .. }]),
            "{fault:?}: {heard:?}"
        );
        let ledger = server.ledger();
        let connections: Vec<u64> = ledger.on(Listener::Cdn).map(|e| e.connection).collect();
        assert_ne!(
            connections[0], connections[1],
            "over the connection that lied"
        );
        assert_eq!(client.hub.stats().wasted_bytes, MIB);
        assert_eq!(client.hub.stats().sources[0].wrong, 1);
    }
}

#[test]
fn a_source_that_gives_wrong_bytes_three_times_is_set_aside() {
    let server = server();
    let client = Client::of(&server);
    server.fault(cdn(Fault::FlipBit(0)));
    for _ in 0..2 {
        let refused = client.proven(&server, START, END);
        assert!(
            matches!(refused, Err(HubError::WrongContent { .. })),
            "{refused:?}"
        );
    }
    let asked = server.ledger().ranges();
    assert_eq!(asked, 3);
    let set_aside = |n: &Notice| matches!(n, Notice::SetAside { .. });
    assert_eq!(
        client.heard.all().iter().filter(|n| set_aside(n)).count(),
        1
    );
    server.heal();
    client.range(START, END).unwrap_err();
    assert_eq!(server.ledger().ranges(), asked, "asked although set aside");
    // Where a digest proves the bytes, and nobody else is left, it may try.
    let arrived = client.proven(&server, START, END).unwrap();
    assert_right(&server, &arrived, START, END);
}

#[test]
fn fault_9_a_server_that_ignores_range_costs_no_body() {
    let server = server();
    let client = Client::of(&server);
    server.fault(cdn(Fault::WholeFile));
    let error = client.range(START, END).unwrap_err();
    assert!(
        error.to_string().contains("does not support ranged reads"),
        "{error}"
    );
    assert_eq!(client.hub.stats().body_bytes, 0);
    assert_eq!(server.ledger().ranges(), 1);
    // What went into the sockets before they closed, of 16 GiB.
    assert!(server.ledger().expert_bytes_sent() < 64 * MIB);
}

#[test]
fn a_whole_file_in_reply_to_a_range_of_it_all_is_right() {
    let server = TestHub::virtual_file(REPO, 5, 3 * MIB);
    let client = Client::of(&server);
    server.fault(cdn(Fault::CutAfter(MIB)).times(1));
    server.fault(cdn(Fault::WholeFile));
    client.check(&server, 0, 3 * MIB);
    // A small file may be read from its start to get at its beginning.
    let small = TestHub::virtual_file(REPO, 5, MIB);
    let client = Client::of(&small);
    small.fault(cdn(Fault::WholeFile));
    client.check(&small, 0, 100_000);
    client.range(1, 100_000).unwrap_err();
}

#[test]
fn fault_10_a_slice_with_status_200_is_taken_where_a_digest_proves_it() {
    let server = server();
    let client = Client::of(&server);
    server.fault(cdn(Fault::SliceAs200));
    let arrived = client.proven(&server, START, END).unwrap();
    assert_right(&server, &arrived, START, END);
    assert!(
        client.range(START, END).is_err(),
        "nothing proves these bytes"
    );
}

#[test]
fn fault_11_a_content_range_that_is_not_ours_is_refused_before_the_body() {
    let size = 16u64 << 30;
    let last = END - 1;
    for wrong in [
        format!("bytes {}-{last}/{size}", START + 1),
        format!("bytes {START}-{}/{size}", last + 1),
        format!("bytes {START}-{last}/{}", size + 1),
        format!("bytes {START}-{last}/*"),
        "bytes */177".to_owned(),
        "nonsense".to_owned(),
        String::new(),
    ] {
        let server = server();
        let client = Client::of(&server);
        server.fault(cdn(Fault::ContentRange(wrong.clone())).times(1));
        client.check(&server, START, END);
        assert_eq!(
            client.hub.stats().body_bytes,
            MIB,
            "{wrong:?}: the body was read"
        );
        server.fault(cdn(Fault::ContentRange(wrong.clone())));
        let error = client.range(START, END).unwrap_err();
        assert!(
            matches!(error, HubError::Protocol { .. }),
            "{wrong:?}: {error}"
        );
        assert!(
            error.to_string().contains(&format!("{START}-{last}")),
            "{error}"
        );
        assert_eq!(server.ledger().ranges(), 2 + 3);
    }
}

#[test]
fn fault_13_a_range_refused_although_it_lies_inside_is_an_error_at_once() {
    let server = server();
    let client = Client::of(&server);
    let range = vec![(
        "Content-Range".to_owned(),
        format!("bytes */{}", 16u64 << 30),
    )];
    server.fault(cdn(Fault::Status(416, range, String::new())));
    let error = client.range(START, END).unwrap_err();
    assert!(error.to_string().contains("416"), "{error}");
    assert!(server.ledger().ranges() <= 2);
}

#[test]
fn fault_14_a_range_applied_to_something_else_is_asked_anew() {
    let server = server();
    let client = Client::of(&server);
    let range = vec![("Content-Range".to_owned(), "bytes */177".to_owned())];
    server.fault(cdn(Fault::Status(416, range, String::new())).times(1));
    client.check(&server, START, END);
    assert_eq!(server.ledger().resolves(), 2);
}

#[test]
fn fault_29_a_server_that_drips_is_left() {
    let server = server();
    let client = Client::of(&server);
    // The next attempt takes a moment to begin, and must get it.
    server.latency(Duration::from_millis(150));
    server.fault(cdn(Fault::Drip(1, 30)).times(1));
    client.check(&server, START, END);
    assert_eq!(server.ledger().ranges(), 2);
    assert!(
        firsts(&server)[1] > START,
        "what had dripped in was thrown away"
    );
}

#[test]
fn fault_30_one_slow_connection_among_many_gets_a_second_request() {
    let server = server();
    let client = Client::of(&server);
    server.slow(Throttle {
        per_connection: Some(4 * MIB),
        ..Throttle::default()
    });
    server.fault(cdn(Fault::Rate(90_000)).skip(5).times(1));
    let spans: Vec<(u64, u64)> = (0..24).map(|i| (i * 5 * MIB, i * 5 * MIB + MIB)).collect();
    let pending: Vec<_> = spans
        .iter()
        .map(|(s, e)| client.start(span(*s, *e), Class::Demand))
        .collect();
    for (pending, (start, end)) in pending.into_iter().zip(&spans) {
        assert_right(&server, &pending.wait().unwrap(), *start, *end);
    }
    let stats = client.hub.stats();
    assert_eq!((stats.hedges, stats.retries), (1, 0));
    assert!(server.ledger().expert_bytes_sent() <= 24 * MIB * 11 / 10);
}

#[test]
fn a_second_request_that_failed_is_not_waited_for_later() {
    let server = server();
    let client = Client::of(&server);
    for i in 0..5 {
        client.check(&server, i * MIB, i * MIB + 1_500_000);
    }
    // Stalled, doubled in vain, cut once more, and then well.
    let at = 50 * MIB;
    server.fault(cdn(Fault::StallAfter(1_000)).first_byte(at).times(1));
    let broken = Fault::Status(500, vec![], String::new());
    server.fault(cdn(broken).first_byte(at + 1_000).times(1));
    server.fault(cdn(Fault::CutAfter(500)).first_byte(at + 1_000).times(1));
    let pending = client.start(span(at, at + 200_000), Class::Demand);
    let arrived = pending.wait().unwrap();
    assert_right(&server, &arrived, at, at + 200_000);
    assert_eq!(client.hub.stats().hedges, 1);
    let last = firsts(&server)[5..].to_vec();
    assert_eq!(last, [at, at + 1_000, at + 1_000, at + 1_500]);
}

#[test]
fn fault_31_a_link_slow_for_everybody_is_only_slow() {
    let server = server();
    let client = Client::of(&server);
    server.slow(Throttle {
        per_connection: Some(100_000),
        ..Throttle::default()
    });
    let spans: Vec<(u64, u64)> = (0..8).map(|i| (i * MIB, i * MIB + 150_000)).collect();
    let pending: Vec<_> = spans
        .iter()
        .map(|(s, e)| client.start(span(*s, *e), Class::Demand))
        .collect();
    for (pending, (start, end)) in pending.into_iter().zip(&spans) {
        assert_right(&server, &pending.wait().unwrap(), *start, *end);
    }
    let stats = client.hub.stats();
    assert_eq!((stats.hedges, stats.retries, stats.wasted_bytes), (0, 0, 0));
    assert_eq!(server.ledger().ranges(), 8);
}

#[test]
fn a_span_slower_than_its_deadline_for_nothing_ends_and_one_that_moves_does_not() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    options.timing.deadline = Duration::from_millis(600);
    options.timing.idle = Duration::from_secs(20);
    options.timing.speed_min = 0;
    let client = Client::with(options);
    server.fault(cdn(Fault::StallAfter(100)).times(1));
    let error = client.range(START, START + 1_000).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    server.slow(Throttle {
        per_connection: Some(100_000),
        ..Throttle::default()
    });
    client.check(&server, START, START + 150_000);
}

#[test]
fn fault_33_lanes_that_stand_in_each_others_way_are_given_up() {
    let server = server();
    let client = Client::of(&server);
    server.slow(Throttle {
        total: Some(20 * MIB),
        collapse: Some((5, 200_000)),
        ..Throttle::default()
    });
    let pending: Vec<_> = (0..400u64)
        .map(|i| client.start(span(i * MIB, i * MIB + 100_000), Class::Bulk))
        .collect();
    crate::kit::eventually("lanes are halved", || {
        client
            .heard
            .all()
            .iter()
            .any(|n| matches!(n, Notice::Collapse { .. }))
    });
    server.forget();
    crate::kit::eventually("a hundred more spans", || server.ledger().ranges() >= 100);
    let after = server.ledger();
    let crowded = after
        .on(Listener::Cdn)
        .skip(10)
        .filter(|e| e.concurrent > 5)
        .count();
    assert!(crowded <= 1, "{crowded} requests came too many at a time");
    drop(pending);
}

#[test]
fn fault_40_connections_closed_after_each_reply_cost_nothing() {
    let server = server();
    let mut options = options(vec![server.source()], &server);
    // A machine so busy that a reply takes as long as the other tests allow is no closed connection.
    options.timing.speed_min = 0;
    options.timing.idle = Duration::from_secs(20);
    options.timing.headers = Duration::from_secs(20);
    let client = Client::with(options);
    server.fault(cdn(Fault::CloseAfter));
    for i in 0..300 {
        client.check(&server, i * MIB, i * MIB + 2_000);
    }
    assert_eq!(client.hub.stats().sources[0].failures, 0);
    assert_eq!(client.hub.stats().body_bytes, 300 * 2_000);
}

#[test]
fn fault_41_a_compressed_body_is_refused() {
    let server = server();
    let client = Client::of(&server);
    server.fault(cdn(Fault::Gzip));
    let error = client.range(START, END).unwrap_err();
    assert!(error.to_string().contains("compressed"), "{error}");
    assert_eq!(client.hub.stats().body_bytes, 0);
}

#[test]
fn fault_42_header_bombs_end_cleanly_and_are_not_asked_for_again() {
    for bomb in [Fault::HeaderBomb(1, 1 << 20), Fault::HeaderBomb(200, 10)] {
        let server = server();
        let client = Client::of(&server);
        server.fault(cdn(bomb));
        let error = client.range(START, END).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
        assert_eq!(server.ledger().ranges(), 1);
    }
}

#[test]
fn four_stuck_spans_in_a_hundred_do_not_hold_up_the_rest() {
    let server = server();
    let client = Client::of(&server);
    for at in [3, 20, 50, 97u64] {
        server.fault(cdn(Fault::StallAfter(5_000)).first_byte(at * MIB).times(1));
    }
    let pending: Vec<_> = (0..100u64)
        .map(|i| {
            client.start(
                proven_span(&server, i * MIB, i * MIB + 20_000),
                Class::Demand,
            )
        })
        .collect();
    for (i, pending) in (0..100u64).zip(pending) {
        assert_right(&server, &pending.wait().unwrap(), i * MIB, i * MIB + 20_000);
    }
    assert_eq!(server.ledger().ranges(), 104);
}
