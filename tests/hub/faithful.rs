//! A hub that behaves: few requests, right bytes.

use std::sync::Arc;

use deltafin::hub::Class;
use deltafin::hub::Hub;
use deltafin::terms::RepoId;

use crate::kit::Client;
use crate::kit::REPO;
use crate::kit::assert_right;
use crate::kit::eventually;
use crate::kit::options;
use crate::kit::span;
use crate::support::Config;
use crate::support::Content;
use crate::support::Listener;
use crate::support::Repo;
use crate::support::TestHub;

const MIB: u64 = 1 << 20;

#[test]
fn a_hundred_spans_cost_one_resolve_and_no_byte_too_many() {
    let server = TestHub::virtual_file(REPO, 1, 16 << 30);
    let client = Client::of(&server);
    let spans: Vec<(u64, u64)> = (0..100).map(|i| (i * 163_840_001, 100_000 + i)).collect();
    let pending: Vec<_> = spans
        .iter()
        .map(|(start, length)| client.start(span(*start, start + length), Class::Demand))
        .collect();
    for (pending, (start, length)) in pending.into_iter().zip(&spans) {
        assert_right(&server, &pending.wait().unwrap(), *start, start + length);
    }
    let ledger = server.ledger();
    ledger.assert_polite();
    assert_eq!(
        (ledger.api(), ledger.resolves(), ledger.ranges()),
        (2, 1, 100)
    );
    let useful: u64 = spans.iter().map(|(_, length)| length).sum();
    // The hub counts a moment after the client got the bytes.
    eventually("every byte counted once", || {
        server.ledger().expert_bytes_sent() == useful
    });
    assert!(
        ledger.connections(Listener::Cdn) <= 16,
        "connections are kept"
    );
    let stats = client.hub.stats();
    assert_eq!((stats.api, stats.resolves, stats.ranges), (2, 1, 100));
    assert_eq!((stats.body_bytes, stats.wasted_bytes), (useful, 0));
    assert_eq!(stats.sources[0].spans, 100);
}

#[test]
fn small_files_come_whole_through_redirects_and_are_checked() {
    let repo: RepoId = "test/tiny-k3".parse().unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny-k3");
    let server = TestHub::folder(repo.as_str(), folder);
    let hub = Hub::open(options(vec![server.source()], &server)).unwrap();
    let commit = hub.commit(&repo, "main").unwrap();
    assert_eq!(commit.as_str(), server.commit(repo.as_str()));
    let snapshot = hub.list(&repo, &commit).unwrap();
    for path in ["config.json", "model-00001-of-000010.safetensors"] {
        let bytes = hub.get(&snapshot, path, MIB).unwrap();
        assert_eq!(bytes, std::fs::read(format!("{folder}/{path}")).unwrap());
    }
    assert!(snapshot.files["config.json"].git_sha1.is_some());
    assert!(
        snapshot.files["model-00001-of-000010.safetensors"]
            .sha256
            .is_some()
    );
    server.ledger().assert_polite();
    let too_long = hub.get(&snapshot, "config.json", 10);
    assert!(too_long.unwrap_err().to_string().contains("at most 10"));
}

#[test]
fn a_commit_asks_nothing_and_a_branch_asks_once() {
    let server = TestHub::virtual_file(REPO, 1, MIB);
    let hub = Hub::open(options(vec![server.source()], &server)).unwrap();
    let repo: RepoId = REPO.parse().unwrap();
    let commit = hub.commit(&repo, "main").unwrap();
    assert_eq!(server.ledger().0.len(), 1);
    assert_eq!(hub.commit(&repo, commit.as_str()).unwrap(), commit);
    assert_eq!(server.ledger().0.len(), 1);
}

#[test]
fn files_prepared_are_resolved_once_and_ahead_of_need() {
    let mut repo = Repo::new(REPO);
    let names: Vec<Arc<str>> = (0..30).map(|i| format!("{i}.safetensors").into()).collect();
    for (seed, name) in (0..).zip(&names) {
        repo = repo.file(name, Content::Virtual { seed, size: MIB });
    }
    let server = TestHub::with(Config::default(), vec![repo]);
    let client = Client::of(&server);
    client.hub.prepare(&client.snapshot, names.clone());
    eventually("thirty resolves", || server.ledger().resolves() == 30);
    for name in &names {
        let mut first = span(0, 1_000);
        first.file = Arc::clone(name);
        client.start(first, Class::Demand).wait().unwrap();
    }
    assert_eq!(server.ledger().resolves(), 30);
    assert!(server.ledger().concurrency(Listener::Hub) <= 8);
}

#[test]
fn a_listing_of_many_pages_is_read_to_its_end() {
    let mut repo = Repo::new(REPO);
    for i in 0..25 {
        repo = repo.file(&format!("folder/{i}.json"), &b"{}"[..]);
    }
    let config = Config {
        page: 10,
        ..Config::default()
    };
    let server = TestHub::with(config, vec![repo]);
    let client = Client::of(&server);
    assert_eq!(client.snapshot.files.len(), 25);
    assert_eq!(server.ledger().api(), 1 + 3);
}

#[test]
fn a_model_in_a_strange_folder_name_is_found() {
    let name = "sub folder/ä+%.safetensors";
    let content = Content::Virtual {
        seed: 3,
        size: 2 * MIB,
    };
    let server = TestHub::with(Config::default(), vec![Repo::new(REPO).file(name, content)]);
    let client = Client::of(&server);
    let mut odd = span(5, 1005);
    odd.file = Arc::from(name);
    let arrived = client.start(odd, Class::Bulk).wait().unwrap();
    assert_eq!(arrived.bytes, server.expected(REPO, name, 5, 1005));
}
