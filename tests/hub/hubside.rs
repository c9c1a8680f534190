//! What the hub itself does wrong: limits, signatures, redirects, refusals, listings.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use deltafin::hub::Class;
use deltafin::hub::Hub;
use deltafin::hub::HubError;
use deltafin::hub::HubOptions;
use deltafin::hub::Notice;
use deltafin::hub::Snapshot;
use deltafin::hub::SourceAddress;
use deltafin::hub::SystemClock;

use crate::kit::Client;
use crate::kit::FILE;
use crate::kit::Pending;
use crate::kit::REPO;
use crate::kit::TOKEN;
use crate::kit::assert_right;
use crate::kit::eventually;
use crate::kit::options;
use crate::kit::repo;
use crate::kit::span;
use crate::kit::token;
use crate::support::Access;
use crate::support::Config;
use crate::support::Content;
use crate::support::Fault;
use crate::support::Listener;
use crate::support::Personality;
use crate::support::Quota;
use crate::support::Repo;
use crate::support::Rule;
use crate::support::TestHub;

const MIB: u64 = 1 << 20;

fn two_files() -> Repo {
    let content = |seed| Content::Virtual { seed, size: MIB };
    Repo::new(REPO)
        .file(FILE, content(1))
        .file("other.safetensors", content(2))
}

fn server() -> TestHub {
    TestHub::with(Config::default(), vec![two_files()])
}

fn resolve(fault: Fault) -> Rule {
    Rule::on(Listener::Hub).path("/resolve/").fault(fault)
}

fn status(status: u16, headers: &[(&str, &str)], body: &str) -> Fault {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Fault::Status(status, headers.iter().map(own).collect(), body.to_owned())
}

fn other_file(client: &Client) -> Pending {
    let mut other = span(0, 1_000);
    other.file = "other.safetensors".into();
    client.start(other, Class::Demand)
}

/// A client whose own clock runs on while the server's is turned.
fn with_own_clock(server: &TestHub) -> Client {
    let mut options = options(vec![server.source()], server);
    options.clock = Arc::new(SystemClock::new());
    Client::with(options)
}

fn limited(client: &Client) -> Vec<u64> {
    let seconds = |n: &Notice| match n {
        Notice::RateLimited { seconds, .. } => Some(*seconds),
        _ => None,
    };
    client.heard.all().iter().filter_map(seconds).collect()
}

#[test]
fn fault_15_a_rate_limit_pauses_the_hub_and_not_the_transfers() {
    for (headers, seconds) in [
        (vec![("Retry-After", "42")], 43),
        (
            vec![
                ("RateLimit", "\"resolvers\";r=0;t=7"),
                ("Retry-After", "100"),
            ],
            8,
        ),
        (vec![("Retry-After", "Fri, 31 Dec 2100 23:59:59 GMT")], 310),
    ] {
        let server = server();
        let client = Client::of(&server);
        client.check(&server, 0, 1_000);
        server.fault(
            resolve(status(429, &headers, "slow down"))
                .path("other")
                .times(1),
        );
        let waiting = other_file(&client);
        eventually("a notice", || !limited(&client).is_empty());
        for i in 1..20 {
            client.check(&server, i * 1_000, i * 1_000 + 1_000);
        }
        assert_eq!(limited(&client), [seconds], "{headers:?}");
        assert_eq!(server.ledger().resolves(), 2, "asked before its time");
        server.clock().advance(seconds + 1);
        assert_eq!(waiting.wait().unwrap().bytes.len(), 1_000);
        assert_eq!(server.ledger().resolves(), 3);
    }
}

#[test]
fn an_allowance_used_up_is_waited_for_without_being_refused() {
    let config = Config {
        quota: Quota {
            api: 500,
            resolvers: 1,
        },
        ..Config::default()
    };
    let server = TestHub::with(config, vec![two_files()]);
    let client = Client::of(&server);
    client.check(&server, 0, 1_000);
    let waiting = other_file(&client);
    eventually("a notice", || !limited(&client).is_empty());
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(server.ledger().resolves(), 1, "asked with nothing left");
    server.clock().advance(301);
    waiting.wait().unwrap();
    assert!(server.ledger().0.iter().all(|e| e.status != 429));
}

#[test]
fn fault_16_a_refusal_without_a_time_backs_off_by_itself() {
    let server = server();
    let client = Client::of(&server);
    let headers = [("RateLimit", "\"resolvers\";r=5;t=200")];
    server.fault(resolve(status(429, &headers, "")).times(2));
    client.check(&server, 0, 1_000);
    assert_eq!(server.ledger().resolves(), 3);
    assert!(limited(&client).is_empty());
}

#[test]
fn fault_17_a_busy_cdn_gets_half_the_lanes() {
    let server = server();
    let client = Client::of(&server);
    server.fault(Rule::on(Listener::Cdn).fault(status(429, &[], "")).times(1));
    client.check(&server, 0, 1_000);
    assert_eq!(client.hub.stats().sources[0].lanes_limit, 2);
}

#[test]
fn fault_18_a_burst_of_errors_is_outlasted() {
    for code in [500, 502, 503, 504, 408] {
        let server = server();
        let client = Client::of(&server);
        server.fault(
            Rule::on(Listener::Cdn)
                .fault(status(code, &[], ""))
                .times(4),
        );
        server.fault(resolve(status(code, &[], "")).times(4));
        client.check(&server, 0, 1_000);
        assert_eq!(
            (server.ledger().resolves(), server.ledger().ranges()),
            (5, 5)
        );
    }
}

#[test]
fn fault_19_a_hub_that_stays_broken_is_given_up_and_named() {
    let server = server();
    let client = Client::of(&server);
    server.fault(Rule::on(Listener::Cdn).fault(status(503, &[("X-Amz-Cf-Id", "abc123")], "")));
    let error = client.range(0, 1_000).unwrap_err().to_string();
    assert!(
        error.contains("6 attempts") && error.contains("503") && error.contains("abc123"),
        "{error}"
    );
    assert_eq!(server.ledger().ranges(), 6);
}

#[test]
fn fault_20_an_expired_signature_is_renewed_once_for_everybody() {
    let server = server();
    let client = with_own_clock(&server);
    client.check(&server, 0, 1_000);
    server.clock().advance(3_700);
    let pending: Vec<_> = (0..8u64)
        .map(|i| client.start(span(i * 1_000, i * 1_000 + 1_000), Class::Demand))
        .collect();
    for (i, pending) in (0..8u64).zip(pending) {
        assert_right(
            &server,
            &pending.wait().unwrap(),
            i * 1_000,
            i * 1_000 + 1_000,
        );
    }
    assert_eq!(server.ledger().resolves(), 2);
}

#[test]
fn a_signature_that_expires_in_mid_span_does_not_cost_what_had_come() {
    let server = server();
    let client = with_own_clock(&server);
    server.fault(
        Rule::on(Listener::Cdn)
            .fault(Fault::StallAfter(300_000))
            .times(1),
    );
    let pending = client.start(span(0, MIB), Class::Demand);
    eventually("the stall", || {
        server.ledger().expert_bytes_sent() >= 300_000
    });
    server.clock().advance(3_700);
    assert_right(&server, &pending.wait().unwrap(), 0, MIB);
    let ledger = server.ledger();
    let asked: Vec<_> = ledger
        .on(Listener::Cdn)
        .filter_map(|e| e.header("range"))
        .collect();
    let rest = format!("bytes=300000-{}", MIB - 1);
    assert_eq!(asked, [format!("bytes=0-{}", MIB - 1), rest.clone(), rest]);
    assert_eq!(client.hub.stats().wasted_bytes, 0);
}

#[test]
fn an_address_is_renewed_before_it_expires() {
    let server = server();
    let client = Client::of(&server);
    client.check(&server, 0, 1_000);
    server.clock().advance(3_290);
    client.check(&server, 0, 1_000);
    assert_eq!(server.ledger().resolves(), 1, "renewed too early");
    server.clock().advance(20);
    client.check(&server, 0, 1_000);
    assert_eq!(server.ledger().resolves(), 2, "not renewed");
    assert!(server.ledger().0.iter().all(|e| e.status != 403));
}

#[test]
fn fault_21_a_fresh_signature_refused_ends_at_once_with_the_cdns_words() {
    let server = server();
    let client = Client::of(&server);
    let body = "Auth failed: invalid range https://x/y?Signature=SECRET&Policy=p";
    server.fault(Rule::on(Listener::Cdn).fault(status(403, &[], body)));
    let error = client.range(0, 1_000).unwrap_err();
    assert!(
        matches!(error, HubError::Refused { status: 403, .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains("Auth failed: invalid range"), "{text}");
    assert!(!text.contains("SECRET"), "{text}");
    assert_eq!(
        (server.ledger().resolves(), server.ledger().ranges()),
        (2, 2)
    );
}

#[test]
fn fault_22_a_wrong_clock_on_this_side_changes_nothing() {
    for skew in [-7_200, 7_200] {
        let server = server();
        server.clock().skew(skew);
        let client = Client::of(&server);
        client.check(&server, 0, 1_000);
        client.check(&server, 0, 1_000);
        assert_eq!(server.ledger().resolves(), 1);
        server.clock().advance(3_500);
        client.check(&server, 0, 1_000);
        assert_eq!(server.ledger().resolves(), 2);
        assert!(server.ledger().0.iter().all(|e| e.status != 403));
    }
}

/// Unsigned, so that any host of the test hub serves the same objects.
fn unsigned() -> TestHub {
    let config = Config {
        signed: false,
        ..Config::default()
    };
    TestHub::with(config, vec![two_files()])
}

fn with_token(server: &TestHub) -> Client {
    Client::with(HubOptions {
        token: token(),
        ..options(vec![server.source()], server)
    })
}

#[test]
fn fault_23_a_redirect_elsewhere_takes_no_credentials_along() {
    let server = unsigned();
    let commit = server.commit(REPO);
    let client = with_token(&server);
    let object = format!("/bridge/{REPO}/{commit}/{FILE}");
    let to = format!("{}{object}", server.url_of(Listener::Other));
    // From the CDN to another host, and straight from the hub; `//host` is an address too.
    server.fault(
        Rule::on(Listener::Cdn)
            .fault(Fault::Redirect(302, to.clone()))
            .times(1),
    );
    client.check(&server, 0, 1_000);
    let client = with_token(&server);
    let short = to.trim_start_matches("http:").to_owned();
    server.fault(resolve(Fault::Header("Location".into(), short)).times(1));
    client.check(&server, 0, 1_000);
    let ledger = server.ledger();
    assert_eq!(ledger.on(Listener::Other).count(), 2);
    assert!(
        ledger
            .on(Listener::Hub)
            .all(|e| e.header("authorization").is_some())
    );
    ledger.assert_polite();
    ledger.assert_kept(TOKEN);
}

#[test]
fn fault_24_redirects_to_nowhere_end_with_their_reason() {
    for (to, why) in [
        ("file:///etc/passwd", "not http"),
        ("ftp://example.org/x", "not http"),
        ("", "empty Location"),
        ("http://", "no address"),
        ("/test/data/resolve/loop/data.safetensors", "20 redirects"),
    ] {
        let server = server();
        let client = Client::of(&server);
        server.fault(resolve(Fault::Redirect(307, to.to_owned())));
        let error = client.range(0, 1_000).unwrap_err();
        assert!(error.to_string().contains(why), "{to:?}: {error}");
        assert!(server.ledger().0.len() < 30);
    }
    // And between content hosts.
    let server = unsigned();
    let client = Client::of(&server);
    let itself = format!("{}/around", server.url_of(Listener::Cdn));
    server.fault(Rule::on(Listener::Cdn).fault(Fault::Redirect(302, itself)));
    let error = client.range(0, 1_000).unwrap_err();
    assert!(error.to_string().contains("20 redirects"), "{error}");
    assert_eq!(server.ledger().ranges(), 20);
}

#[test]
fn fault_25_the_hubs_own_redirects_are_followed_with_the_token() {
    let config = Config {
        signed: false,
        ..Config::default()
    };
    let repo = two_files().access(Access::Private(TOKEN.to_owned()));
    let server = TestHub::with(config, vec![repo]);
    let renamed = Rule::on(Listener::Hub).path("/api/models/old/name");
    let api = |commit: &str| format!("/api/models/{REPO}/{commit}");
    let commit = server.commit(REPO);
    server.fault(
        renamed
            .clone()
            .path("old/name/revision")
            .fault(Fault::Redirect(301, api("revision/main"))),
    );
    let tree = api(&format!("tree/{commit}?recursive=true"));
    server.fault(
        renamed
            .path("old/name/tree")
            .fault(Fault::Redirect(308, server.url() + &tree)),
    );
    let hub = Hub::open(HubOptions {
        token: token(),
        ..options(vec![server.source()], &server)
    })
    .unwrap();
    let old = "old/name".parse().unwrap();
    let pinned = hub.commit(&old, "main").unwrap();
    assert_eq!(pinned.as_str(), commit);
    let listed = hub.list(&old, &pinned).unwrap();
    assert_eq!(listed.files.len(), 2);
    // Another spelling, as people type it.
    let spelled = Snapshot {
        repo: "Test/DATA".parse().unwrap(),
        ..listed
    };
    let client = Client::knowing(
        HubOptions {
            token: token(),
            ..options(vec![server.source()], &server)
        },
        &Arc::new(spelled),
    );
    client.check(&server, 0, 1_000);
    server.ledger().assert_polite();
    server.ledger().assert_kept(TOKEN);
}

#[test]
fn fault_26_a_branch_that_moves_does_not_move_what_was_pinned() {
    let server = server();
    let client = Client::of(&server);
    let before = server.expected(REPO, FILE, 0, 1_000);
    server.change(REPO, |repo| {
        repo.commit(
            FILE,
            Content::Virtual {
                seed: 99,
                size: MIB,
            },
        );
    });
    assert_ne!(before, server.expected(REPO, FILE, 0, 1_000));
    assert_eq!(client.range(0, 1_000).unwrap().bytes, before);
    let moved = client.hub.commit(&repo(), "main").unwrap();
    assert_ne!(moved, client.snapshot.commit);
}

#[test]
fn fault_27_content_changed_under_a_pinned_address_is_never_mixed_in() {
    let server = server();
    let client = Client::of(&server);
    server.fault(
        Rule::on(Listener::Cdn)
            .fault(Fault::StallAfter(300_000))
            .times(1),
    );
    let pending = client.start(span(0, MIB), Class::Demand);
    eventually("the stall", || {
        server.ledger().expert_bytes_sent() >= 300_000
    });
    server.change(REPO, |repo| {
        let commit = repo.main.clone();
        let fresh = two_files().file(
            FILE,
            Content::Virtual {
                seed: 99,
                size: MIB,
            },
        );
        let fresh = fresh.commits.into_values().next().unwrap();
        repo.commits.insert(commit, fresh);
    });
    let refused = pending.wait();
    assert!(
        matches!(refused, Err(HubError::WrongContent { .. })),
        "{refused:?}"
    );
    assert!(client.hub.stats().sources[0].set_aside);
}

#[test]
fn a_tag_that_changes_is_noticed_where_no_digest_is_pinned() {
    let config = Config {
        personality: Personality::StaticNginx,
        ..Config::default()
    };
    let server = TestHub::with(config, vec![two_files()]);
    let mut snapshot = Snapshot::clone(&Client::of(&self::server()).snapshot);
    snapshot.files.values_mut().for_each(|f| f.sha256 = None);
    let client = Client::knowing(options(vec![server.source()], &server), &Arc::new(snapshot));
    client.check(&server, 0, 1_000);
    let changed = Fault::Header("ETag".into(), "\"other\"".into());
    server.fault(Rule::on(Listener::Hub).method("GET").fault(changed));
    let refused = client.range(5_000, 6_000);
    assert!(
        matches!(refused, Err(HubError::WrongContent { .. })),
        "{refused:?}"
    );
}

#[test]
fn fault_28_a_commit_that_is_gone_says_so() {
    let server = server();
    let client = Client::of(&server);
    server.change(REPO, |repo| {
        let old = repo.main.clone();
        repo.commit(
            FILE,
            Content::Virtual {
                seed: 99,
                size: MIB,
            },
        );
        repo.commits.remove(&old);
    });
    let error = client.range(0, 1_000).unwrap_err();
    assert!(matches!(error, HubError::NotFound { .. }), "{error}");
    assert!(error.to_string().contains("gone from the hub"), "{error}");
    assert_eq!(server.ledger().resolves(), 1);
}

#[test]
fn fault_34_refusals_name_the_reason_and_the_tokens_origin_never_the_token() {
    let gated = || Access::Gated("hf_other".to_owned());
    for (access, secret, status, words) in [
        (gated(), None, 401, "is restricted"),
        (gated(), Some(TOKEN), 403, "is restricted"),
        (
            Access::Private("hf_other".to_owned()),
            None,
            401,
            "may be private, or not exist",
        ),
        (Access::Disabled, None, 403, "disabled"),
        (Access::Public, Some("bad"), 401, "Invalid credentials"),
    ] {
        let server = TestHub::with(Config::default(), vec![two_files().access(access.clone())]);
        let token = secret.and_then(|s| deltafin::hub::Token::new(s, "the file of the test"));
        let sent = token.is_some();
        let hub = Hub::open(HubOptions {
            token,
            ..options(vec![server.source()], &server)
        })
        .unwrap();
        let error = hub.commit(&repo(), "main").unwrap_err();
        assert!(
            matches!(error, HubError::Denied { status: s, .. } if s == status),
            "{access:?}: {error}"
        );
        let text = format!("{error} {error:?} {:?}", error.hint());
        let origin = if sent {
            "from the file of the test"
        } else {
            "no token was sent"
        };
        assert!(text.contains(words) && text.contains(origin), "{text}");
        assert!(!text.contains(TOKEN), "{text}");
        assert_eq!(server.ledger().0.len(), 1, "asked again although refused");
    }
    // With a token that is good, a missing repository is simply missing.
    let server = TestHub::with(Config::default(), vec![]);
    let hub = Hub::open(HubOptions {
        token: token(),
        ..options(vec![server.source()], &server)
    })
    .unwrap();
    let error = hub.commit(&repo(), "main").unwrap_err();
    assert!(matches!(error, HubError::NotFound { .. }), "{error}");
}

#[test]
fn fault_35_a_missing_shard_is_named_with_its_commit() {
    let server = server();
    let client = Client::of(&server);
    server.change(REPO, |repo| {
        repo.commits.get_mut(&repo.main).unwrap().remove(FILE);
    });
    let error = client.range(0, 1_000).unwrap_err().to_string();
    assert!(
        error.contains(FILE) && error.contains(client.snapshot.commit.as_str()),
        "{error}"
    );
    assert_eq!(server.ledger().resolves(), 1);
}

#[test]
fn fault_36_a_login_page_is_no_hub() {
    let server = server();
    let client = Client::of(&server);
    let page = status(
        200,
        &[("X-Repo-Commit", "")],
        "<html>Welcome to the hotel</html>",
    );
    server.fault(Rule::on(Listener::Hub).fault(page.clone()));
    for error in [
        client.range(0, 1_000).unwrap_err(),
        client.hub.commit(&repo(), "main").unwrap_err(),
    ] {
        assert!(matches!(error, HubError::NotAHub { .. }), "{error}");
        assert!(error.hint().unwrap().contains("login page"));
    }
    let listed = client.hub.list(&repo(), &client.snapshot.commit);
    assert!(
        matches!(listed, Err(HubError::Damaged { .. })),
        "{listed:?}"
    );
}

#[test]
fn fault_38_nobody_there_ends_in_bounded_time() {
    let server = server();
    let snapshot = Arc::clone(&Client::of(&server).snapshot);
    server.stop();
    for address in [server.url(), "http://no-such-host.invalid".to_owned()] {
        let source = SourceAddress::Http(address);
        let client = Client::knowing(options(vec![source], &server), &snapshot);
        let started = Instant::now();
        let error = client.range(0, 1_000).unwrap_err();
        assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(40));
        let error = client.hub.commit(&repo(), "main").unwrap_err();
        assert!(
            matches!(error, HubError::Unreachable { attempts: 6, .. }),
            "{error}"
        );
    }
}

#[test]
fn fault_43_sizes_out_of_this_world_allocate_nothing() {
    let server = server();
    let client = Client::of(&server);
    let huge = (1u64 << 63).to_string();
    server.fault(resolve(Fault::Header("X-Linked-Size".into(), huge.clone())).times(1));
    let refused = client.range(0, 1_000);
    assert!(
        matches!(refused, Err(HubError::WrongContent { .. })),
        "{refused:?}"
    );
    // A listing may claim anything; only what comes is kept.
    let text = format!(r#"[{{"type":"file","path":"config.json","size":{huge},"oid":""}}]"#);
    server.fault(
        Rule::on(Listener::Hub)
            .path("/tree/")
            .fault(status(200, &[], &text)),
    );
    let claimed = client.hub.list(&repo(), &client.snapshot.commit).unwrap();
    assert!(client.hub.get(&claimed, "config.json", 1 << 20).is_err());
    let declared = status(
        200,
        &[("Content-Length", &huge), ("X-Repo-Commit", "x")],
        "{}",
    );
    server.fault(Rule::on(Listener::Hub).path("/resolve/").fault(declared));
    client.hub.get(&client.snapshot, FILE, 1 << 30).unwrap_err();
}

#[test]
fn faults_10_and_44_mirrors_with_habits_of_their_own_are_served_from() {
    let known = Arc::clone(&Client::of(&server()).snapshot);
    for personality in [
        Personality::HfMirror,
        Personality::Olah,
        Personality::ModelScope,
        Personality::NoEtag,
        Personality::StaticNginx,
    ] {
        let config = Config {
            personality,
            ..Config::default()
        };
        let server = TestHub::with(config, vec![two_files().file("config.json", &b"{}"[..])]);
        let options = options(vec![server.source()], &server);
        let client = match personality {
            Personality::StaticNginx => Client::knowing(options, &known),
            _ => Client::with(options),
        };
        for i in 0..3 {
            let (start, end) = (i * 70_000, i * 70_000 + 50_000);
            let arrived = client.proven(&server, start, end).unwrap();
            assert_right(&server, &arrived, start, end);
        }
        if personality != Personality::StaticNginx {
            let small = client
                .hub
                .get(&client.snapshot, "config.json", 100)
                .unwrap();
            assert_eq!(&small[..], b"{}", "{personality:?}");
        }
    }
    // A redirect's Content-Length is that of its own text.
    let server = self::server();
    let client = Client::of(&server);
    server.fault(resolve(Fault::Header(
        "X-Linked-Size".into(),
        String::new(),
    )));
    client.check(&server, 0, 1_000);
    // One that cannot do ranges says so.
    let config = Config {
        personality: Personality::StaticPython,
        ..Config::default()
    };
    let python = TestHub::with(
        config,
        vec![Repo::new(REPO).file(
            FILE,
            Content::Virtual {
                seed: 1,
                size: 2 * MIB,
            },
        )],
    );
    let mut larger = Snapshot::clone(&known);
    larger.files.get_mut(FILE).unwrap().size = 2 * MIB;
    let client = Client::knowing(options(vec![python.source()], &python), &Arc::new(larger));
    let error = client.range(0, 1_000).unwrap_err().to_string();
    assert!(error.contains("does not support ranged reads"), "{error}");
}

#[test]
fn fault_45_pages_in_circles_end_and_foreign_pages_get_no_token() {
    let server = server();
    let client = Client::of(&server);
    let here = format!("<{}/api/models/{REPO}/tree/x>; rel=\"next\"", server.url());
    let page = status(200, &[("Link", &here)], "[]");
    server.fault(Rule::on(Listener::Hub).path("/tree/").fault(page));
    let error = client
        .hub
        .list(&repo(), &client.snapshot.commit)
        .unwrap_err();
    assert!(error.to_string().contains("circles"), "{error}");

    let server = self::server();
    let client = with_token(&server);
    let there = format!(
        "<{}/more?page=2>; rel=\"next\"",
        server.url_of(Listener::Other)
    );
    let page = status(200, &[("Link", &there)], "[]");
    server.fault(Rule::on(Listener::Hub).path("/tree/").fault(page));
    let entry = r#"[{"type":"file","path":"a.json","size":2,"oid":"0"}]"#;
    server.fault(Rule::on(Listener::Other).fault(status(200, &[], entry)));
    let listed = client.hub.list(&repo(), &client.snapshot.commit).unwrap();
    assert_eq!(listed.files.len(), 1);
    let ledger = server.ledger();
    assert_eq!(ledger.on(Listener::Other).count(), 1);
    assert!(
        ledger
            .on(Listener::Other)
            .all(|e| e.header("authorization").is_none())
    );
}

#[test]
fn a_listing_that_leads_out_of_the_repository_is_refused() {
    for path in [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../b",
        "a\\\\b",
        "",
        "a//b",
        "./a",
    ] {
        let server = server();
        let client = Client::of(&server);
        let text = format!(r#"[{{"type":"file","path":"{path}","size":1,"oid":"0"}}]"#);
        server.fault(
            Rule::on(Listener::Hub)
                .path("/tree/")
                .fault(status(200, &[], &text)),
        );
        let listed = client.hub.list(&repo(), &client.snapshot.commit);
        assert!(
            matches!(listed, Err(HubError::Damaged { .. })),
            "{path:?}: {listed:?}"
        );
    }
}

#[test]
fn small_files_that_come_damaged_are_asked_for_again() {
    let repo = Repo::new(REPO).file("config.json", &b"{\"a\": 1}"[..]);
    let server = TestHub::with(Config::default(), vec![repo]);
    let client = Client::of(&server);
    let cache = || Rule::on(Listener::Hub).path("/resolve-cache/");
    server.fault(cache().fault(Fault::FlipBit(3)).times(1));
    server.fault(cache().fault(Fault::CutUndeclared(4)).times(1));
    let bytes = client
        .hub
        .get(&client.snapshot, "config.json", 100)
        .unwrap();
    assert_eq!(&bytes[..], b"{\"a\": 1}");
    server.fault(cache().fault(Fault::FlipBit(3)));
    let error = client
        .hub
        .get(&client.snapshot, "config.json", 100)
        .unwrap_err();
    assert!(matches!(error, HubError::Damaged { .. }), "{error}");
}

#[test]
fn a_warning_of_the_hub_is_passed_on_once() {
    let server = server();
    server.fault(Rule::on(Listener::Hub).fault(Fault::Header(
        "X-HF-Warning".into(),
        "old; update soon".into(),
    )));
    let client = Client::of(&server);
    client.check(&server, 0, 1_000);
    let warnings = client.heard.all();
    assert!(
        matches!(&warnings[..], [Notice::Warning { message, .. }] if message.contains("update soon"))
    );
}
