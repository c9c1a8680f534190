//! Several sources: order, fail-over, and who is believed.

use std::sync::Arc;

use deltafin::hub::Class;
use deltafin::hub::HubError;
use deltafin::hub::Notice;
use deltafin::hub::SourceAddress;

use crate::kit::Client;
use crate::kit::FILE;
use crate::kit::REPO;
use crate::kit::assert_right;
use crate::kit::eventually;
use crate::kit::options;
use crate::kit::proven_span;
use crate::kit::span;
use crate::support::Config;
use crate::support::Content;
use crate::support::Fault;
use crate::support::Listener;
use crate::support::Personality;
use crate::support::Repo;
use crate::support::Rule;
use crate::support::TestHub;

const MIB: u64 = 1 << 20;

fn data() -> Repo {
    Repo::new(REPO).file(
        FILE,
        Content::Virtual {
            seed: 5,
            size: 8 * MIB,
        },
    )
}

fn hub() -> TestHub {
    TestHub::with(Config::default(), vec![data()])
}

fn neighbour() -> TestHub {
    let config = Config {
        share: true,
        ..Config::default()
    };
    TestHub::with(config, vec![data()])
}

/// The neighbour first, then the hub.
fn both(near: &TestHub, far: &TestHub) -> Client {
    Client::with(options(vec![near.source(), far.source()], far))
}

#[test]
fn the_first_source_serves_and_is_told_apart_as_a_neighbour() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    let arrived = client.range(0, MIB).unwrap();
    assert_right(&far, &arrived, 0, MIB);
    assert!(arrived.peer);
    assert_eq!(*arrived.source, *near.url());
    assert!(far.ledger().0.is_empty());
}

#[test]
fn a_neighbour_unplugged_in_mid_span_loses_no_byte() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    near.fault(
        Rule::on(Listener::Cdn)
            .fault(Fault::StallAfter(300_000))
            .times(1),
    );
    let pending = client.start(span(0, MIB), Class::Demand);
    eventually("the stall", || client.hub.stats().body_bytes >= 300_000);
    near.stop();
    let arrived = pending.wait().unwrap();
    assert_right(&far, &arrived, 0, MIB);
    assert!(!arrived.peer);
    let ledger = far.ledger();
    let asked = ledger
        .on(Listener::Cdn)
        .next()
        .unwrap()
        .header("range")
        .unwrap()
        .to_owned();
    assert_eq!(
        asked,
        format!("bytes=300000-{}", MIB - 1),
        "the hub went on from there"
    );
    // It rests now: the next span does not wait for it.
    client.check(&far, MIB, 2 * MIB);
    let down = client
        .heard
        .all()
        .iter()
        .filter(|n| matches!(n, Notice::Down { .. }))
        .count();
    assert_eq!(down, 1);
}

#[test]
fn a_neighbour_that_comes_back_is_asked_again() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    near.fault(
        Rule::on(Listener::Cdn)
            .fault(Fault::Status(503, vec![], String::new()))
            .times(6),
    );
    client.check(&far, 0, MIB);
    assert_eq!(client.hub.stats().sources[1].spans, 1);
    client.check(&far, 0, MIB);
    assert_eq!(client.hub.stats().sources[1].spans, 2, "it rests");
    far.clock().advance(6);
    client.check(&far, 0, MIB);
    assert_eq!(client.hub.stats().sources[0].spans, 1);
}

#[test]
fn what_a_neighbour_lacks_comes_from_the_hub_and_costs_it_nothing() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    let lacks = Fault::Status(404, vec![], "not here".to_owned());
    near.fault(Rule::on(Listener::Cdn).first_byte(0).fault(lacks));
    client.check(&far, 0, MIB);
    client.check(&far, MIB, 2 * MIB);
    let stats = client.hub.stats();
    assert_eq!((stats.sources[0].spans, stats.sources[1].spans), (1, 1));
    assert!(client.heard.all().is_empty());
}

#[test]
fn a_neighbour_that_lies_is_set_aside_with_one_line_and_work_goes_on() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    near.fault(Rule::on(Listener::Cdn).fault(Fault::FlipBit(77)));
    for i in 0..4 {
        let (start, end) = (i * MIB, i * MIB + MIB);
        let arrived = client
            .start(proven_span(&far, start, end), Class::Demand)
            .wait()
            .unwrap();
        assert_right(&far, &arrived, start, end);
    }
    let stats = client.hub.stats();
    assert!(stats.sources[0].set_aside && !stats.sources[1].set_aside);
    assert_eq!(stats.sources[0].wrong, 3);
    let aside = client
        .heard
        .all()
        .iter()
        .filter(|n| matches!(n, Notice::SetAside { .. }))
        .count();
    assert_eq!(aside, 1);
}

#[test]
fn halves_of_different_files_are_never_joined() {
    // The neighbour has other bytes and says nothing of what they are.
    let config = Config {
        personality: Personality::StaticNginx,
        ..Config::default()
    };
    let wrong = Repo::new(REPO).file(
        FILE,
        Content::Virtual {
            seed: 6,
            size: 8 * MIB,
        },
    );
    let (near, far) = (TestHub::with(config, vec![wrong]), hub());
    let known = Arc::clone(&Client::of(&far).snapshot);
    let client = Client::knowing(options(vec![near.source(), far.source()], &far), &known);
    let cut = Fault::CutAfter(300_000);
    near.fault(Rule::on(Listener::Hub).method("GET").fault(cut).times(1));
    near.fault(Rule::on(Listener::Hub).method("GET").fault(Fault::Status(
        500,
        vec![],
        String::new(),
    )));
    let arrived = client.range(0, MIB).unwrap();
    assert_right(&far, &arrived, 0, MIB);
    assert_eq!(client.hub.stats().wasted_bytes, 300_000);
}

#[test]
fn a_paused_hub_is_not_waited_for_if_a_mirror_is_there() {
    let (first, second) = (hub(), hub());
    let client = both(&first, &second);
    let headers = vec![("Retry-After".to_owned(), "200".to_owned())];
    let limit = Fault::Status(429, headers, String::new());
    first.fault(Rule::on(Listener::Hub).path("/resolve/").fault(limit));
    client.check(&second, 0, MIB);
    client.check(&second, MIB, 2 * MIB);
    assert_eq!(client.hub.stats().sources[1].spans, 2);
    assert_eq!(first.ledger().resolves(), 1);
}

#[test]
fn a_server_without_ranges_hands_over_to_one_that_has_them() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    near.fault(Rule::on(Listener::Cdn).fault(Fault::WholeFile));
    client.check(&far, MIB, 2 * MIB);
    assert_eq!(client.hub.stats().sources[0].body_bytes, 0);
}

#[test]
fn when_all_fail_the_most_telling_reason_is_given() {
    let (near, far) = (neighbour(), hub());
    let client = both(&near, &far);
    near.fault(Rule::on(Listener::Cdn).fault(Fault::FlipBit(0)));
    far.fault(Rule::on(Listener::Cdn).fault(Fault::Status(404, vec![], String::new())));
    let refused = client
        .start(proven_span(&far, 0, MIB), Class::Demand)
        .wait();
    assert!(
        matches!(refused, Err(HubError::WrongContent { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_folder_and_a_hub_work_side_by_side() {
    let far = hub();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let known = Arc::clone(&Client::of(&far).snapshot);
    let sources = vec![
        SourceAddress::Folder(folder.path().to_owned()),
        far.source(),
    ];
    let client = Client::knowing(options(sources, &far), &known);
    // The folder is not at this commit, so it is not asked for its bytes.
    client.check(&far, 0, MIB);
    assert_eq!(client.hub.stats().sources[1].spans, 1);
}
