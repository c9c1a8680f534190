//! `cache warm`, `fetch --trace` and `--heat`: what was used most comes first, within every limit, through every stop.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use deltafin::residency::Trace;
use deltafin::residency::hottest;
use deltafin::share::Embedded;
use deltafin::share::Server;
use deltafin::share::ShareOptions;
use deltafin::terms::ExpertKey;
use serde_json::Value;

use crate::program;
use crate::program::Run;
use crate::program::deltafin;
use crate::program::json;

const MODEL: &str = "deltafin/austen-k3";
const EXPERT: u64 = 9_792;

fn hub(link: Option<&str>) -> Server {
    let options = ShareOptions {
        link: link.map(|link| link.parse().unwrap()),
        ..ShareOptions::default()
    };
    let embedded = Arc::new(Embedded::new());
    Server::start(([127, 0, 0, 1], 0).into(), embedded, options).unwrap()
}

/// Slow enough that a command is still at work when it is met with something.
const SLOW: Option<&str> = Some("6mbit,2ms");

fn args<'a>(command: &[&'a str], home: &'a Path, url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = command.to_vec();
    args.extend(["--model", MODEL, "--hub", url, "--reserve", "0", "--json"]);
    args.extend(["--home", home.to_str().unwrap()]);
    args.extend(more);
    args
}

/// Runs a command that must succeed; its report.
fn done(command: &[&str], home: &Path, hub: &Server, more: &[&str]) -> Value {
    let url = hub.url();
    let run = deltafin(&args(command, home, &url, more));
    assert_eq!(run.code, 0, "{}", run.stderr);
    json(&run)
}

/// Interrupts a command when so many experts are here.
fn interrupted(command: &[&str], home: &Path, hub: &Server, more: &[&str], experts: usize) {
    let url = hub.url();
    let mut program = program::command();
    program.args(args(command, home, &url, more));
    let child = program.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let patience = Instant::now();
    while on_disk(home).len() < experts {
        assert!(patience.elapsed() < Duration::from_secs(120), "none came");
        std::thread::sleep(Duration::from_millis(5));
    }
    program::signal(&child, "INT");
    let run = Run::from(child.wait_with_output().unwrap());
    assert_eq!(run.code, 130, "{}", run.stderr);
}

/// The experts of the store, by their files.
fn on_disk(home: &Path) -> BTreeSet<ExpertKey> {
    let files = program::files(home);
    let keys = files.iter().filter_map(|file| {
        let mut names = file.iter().rev().map(|name| name.to_str().unwrap());
        let (expert, layer, folder) = (names.next()?, names.next()?, names.next()?);
        (folder == "experts").then_some(ExpertKey {
            layer: layer.parse().ok()?,
            expert: expert.parse().ok()?,
        })
    });
    keys.collect()
}

fn first(order: &[ExpertKey], count: usize) -> BTreeSet<ExpertKey> {
    order[..count].iter().copied().collect()
}

/// What the model was asked, traced.
fn traced(folder: &Path, hub: &Server) -> (String, Vec<ExpertKey>) {
    let trace = folder.join("trace");
    let file = trace.to_str().unwrap().to_owned();
    let asked = ["Who are you?", "--max-tokens", "24", "--trace", &file];
    let home = folder.join("traced");
    done(
        &["stream"],
        &home,
        hub,
        &[&asked[..], &["--cache", "unlimited"]].concat(),
    );
    let order = hottest(&Trace::read(&trace).unwrap());
    assert_eq!(on_disk(&home), first(&order, order.len()));
    (file, order)
}

#[test]
fn the_hottest_come_as_far_as_cache_and_limit_go_and_none_of_them_goes_for_another() {
    let (hub, folder) = (hub(None), tempfile::tempdir().unwrap());
    let (trace, order) = traced(folder.path(), &hub);
    let home = folder.path().join("home");
    let held = 100;
    let budget = (held * EXPERT + EXPERT / 2).to_string();
    let cache = ["--cache", &budget];
    // It is full already, of what another prompt has used last.
    let other = ["Tell me of the ball.", "--max-tokens", "16"];
    done(&["stream"], &home, &hub, &[&other[..], &cache].concat());
    let before = on_disk(&home);
    assert_eq!(before.len() as u64, held);
    let wanted = first(&order, 100);
    let lacking = wanted.difference(&before).count() as u64;
    assert!(lacking > 20 && lacking < held, "{lacking}");

    let warm = ["cache", "warm", "--trace", &trace];
    let dry = done(&warm, &home, &hub, &[&cache[..], &["--dry-run"]].concat());
    assert_eq!(
        (&dry["missing"], &dry["planned"]),
        (&lacking.into(), &lacking.into())
    );
    assert_eq!(dry["fetched"], 0);
    assert_eq!(on_disk(&home), before);

    let limit = ["--max-bytes", "100kB"];
    let some = done(&warm, &home, &hub, &[&cache[..], &limit].concat());
    let fetched = some["fetched"].as_u64().unwrap();
    assert_eq!(some["planned"], fetched);
    assert!(0 < fetched && fetched * EXPERT <= 100_000, "{some}");
    let here = on_disk(&home);
    assert_eq!(here.len() as u64, held);
    // The hottest of those that were missing, at the cost of nothing that is wanted.
    let mut missing = order[..100].iter().filter(|key| !before.contains(*key));
    let came: BTreeSet<_> = missing.by_ref().take(fetched as usize).copied().collect();
    let stayed = wanted.intersection(&before).copied();
    assert_eq!(&here & &wanted, came.into_iter().chain(stayed).collect());

    let rest = done(&warm, &home, &hub, &cache);
    assert_eq!(rest["fetched"], lacking - fetched);
    assert_eq!(on_disk(&home), wanted);
    assert_eq!(done(&warm, &home, &hub, &cache)["fetched"], 0);

    // It pays: beside a cache that begins empty.
    let who = ["Who are you?", "--max-tokens", "24"];
    let copy = folder.path().join("cold");
    let cold = done(&["stream"], &copy, &hub, &[&who[..], &cache].concat());
    let trim = ["cache", "trim", "490000", "--home", home.to_str().unwrap()];
    let warmed = done(&["stream"], &home, &hub, &[&who[..], &cache].concat());
    assert_eq!(warmed["token_ids"], cold["token_ids"]);
    let from_hub = |report: &Value| report["experts"]["hub"].as_u64().unwrap();
    assert!(from_hub(&warmed) < from_hub(&cold), "{warmed} {cold}");
    // Warmed anew, the coldest of it goes first, in whatever process.
    done(&warm, &home, &hub, &cache);
    let trimmed = deltafin(&trim);
    assert_eq!(trimmed.code, 0, "{}", trimmed.stderr);
    assert_eq!(on_disk(&home), first(&order, 50));
}

#[test]
fn a_stop_loses_nothing_and_the_next_run_goes_on_from_it() {
    let (quick, slow) = (hub(None), hub(SLOW));
    let folder = tempfile::tempdir().unwrap();
    let (trace, order) = traced(folder.path(), &quick);
    let home = folder.path().join("home");
    let warm = ["cache", "warm", "--trace", &trace];
    let cache = ["--cache", "unlimited"];
    interrupted(&warm, &home, &slow, &cache, 20);
    let kept = on_disk(&home).len();
    assert!((20..order.len()).contains(&kept), "{kept}");
    let rest = done(&warm, &home, &quick, &cache);
    assert_eq!(rest["fetched"], order.len() - kept);
    assert_eq!(on_disk(&home), first(&order, order.len()));
}

#[test]
fn the_idle_wait_until_nobody_fetches() {
    let (quick, slow) = (hub(None), hub(SLOW));
    let folder = tempfile::tempdir().unwrap();
    let (trace, order) = traced(folder.path(), &quick);
    let home = folder.path().join("home");
    let url = slow.url();
    let start = |command: &[&str], more: &[&str]| {
        let mut program = program::command();
        program.args(args(command, &home, &url, more));
        program.stdout(Stdio::piped()).stderr(Stdio::piped());
        program.spawn().unwrap()
    };
    let cache = ["--cache", "unlimited"];
    let other = ["Tell me of the ball.", "--max-tokens", "16"];
    let stream = start(&["stream"], &[&other[..], &cache].concat());
    let patience = Instant::now();
    while on_disk(&home).len() < 5 {
        assert!(patience.elapsed() < Duration::from_secs(120), "none came");
        std::thread::sleep(Duration::from_millis(5));
    }
    let warm = ["cache", "warm", "--idle", "--trace", &trace];
    let warm = start(&warm, &cache);
    let streamed = Run::from(stream.wait_with_output().unwrap());
    let here = on_disk(&home).len();
    assert_eq!(
        json(&streamed)["experts"]["hub"],
        here,
        "{}",
        streamed.stderr
    );
    let warmed = Run::from(warm.wait_with_output().unwrap());
    assert_eq!(warmed.code, 0, "{}", warmed.stderr);
    assert!(
        warmed.stderr.contains("while nobody else"),
        "{}",
        warmed.stderr
    );
    let fetched = json(&warmed)["fetched"].as_u64().unwrap();
    assert!(fetched > 0, "the other has used all of them");
    assert_eq!(on_disk(&home).len() as u64, here as u64 + fetched);
    assert!(on_disk(&home).is_superset(&first(&order, order.len())));
}

#[test]
fn a_full_install_begins_with_what_a_trace_used_most() {
    let (quick, slow) = (hub(None), hub(SLOW));
    let folder = tempfile::tempdir().unwrap();
    let (trace, order) = traced(folder.path(), &quick);
    let home = folder.path().join("home");
    done(&["fetch", "--core"], &home, &quick, &[]);
    let fetch = ["fetch", "--trace", &trace];
    interrupted(&fetch, &home, &slow, &[], 20);
    let kept = on_disk(&home);
    // Eight are under way at once.
    assert!(kept.is_subset(&first(&order, kept.len() + 8)), "{kept:?}");
    let all = done(&fetch, &home, &quick, &[]);
    assert_eq!(all["experts"]["fetched"], 448 - kept.len());
    assert_eq!(all["shards"]["different"], serde_json::json!([]));
}

#[test]
fn a_trace_of_another_model_is_refused_before_anything_is_fetched() {
    let (hub, folder) = (hub(None), tempfile::tempdir().unwrap());
    let file = folder.path().join("trace");
    let other =
        r#"{"trace":"deltafin experts 1","model":"a/b","revision":"c","expert_bytes":9792}"#;
    std::fs::write(&file, format!("{other}\n")).unwrap();
    let (home, url) = (folder.path().join("home"), hub.url());
    let file = file.to_str().unwrap();
    for command in [
        ["cache", "warm", "--trace", file].as_slice(),
        &["fetch", "--trace", file],
    ] {
        let run = deltafin(&args(command, &home, &url, &[]));
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains("a/b"), "{}", run.stderr);
        assert_eq!(on_disk(&home), BTreeSet::new());
    }
}

#[test]
fn what_was_used_here_is_known_without_a_trace() {
    let (quick, slow) = (hub(None), hub(SLOW));
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home");
    let trace = folder.path().join("trace");
    let cache = |experts: u64| ["--cache".to_owned(), (experts * EXPERT + 1).to_string()];
    let (small, large) = (cache(30), cache(100));
    let with = |cache: &[String; 2], more: &[&'static str]| -> Vec<String> {
        let more = more.iter().map(|arg| (*arg).to_owned());
        cache.iter().cloned().chain(more).collect()
    };
    let run = |command: &[&str], home: &Path, more: Vec<String>| {
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        done(command, home, &quick, &more)
    };
    let warm = ["cache", "warm", "--heat"];
    assert_eq!(run(&warm, &home, with(&large, &[]))["used"], 0);
    // Two processes, by one policy and the other.
    let mut ids = Vec::new();
    for (cache, policy) in [(&small, "lru"), (&large, "lfu")] {
        let mut more = with(
            cache,
            &["Who are you?", "--max-tokens", "24", "--policy", policy],
        );
        more.extend(["--trace".to_owned(), trace.display().to_string()]);
        ids.push(run(&["stream"], &home, more)["token_ids"].clone());
    }
    assert_eq!(ids[0], ids[1]);
    let order = hottest(&Trace::read(&trace).unwrap());
    let warmed = run(&warm, &home, with(&large, &[]));
    assert_eq!(warmed["used"], order.len());
    assert_eq!(on_disk(&home), first(&order, 100));
    // What was chosen last holds: the hottest stay, although others come.
    let other = with(&large, &["Tell me of the ball.", "--max-tokens", "16"]);
    run(&["stream"], &home, other);
    let (now, wanted) = (on_disk(&home), first(&order, 100));
    assert_eq!(now.len(), 100);
    let stayed = now.intersection(&wanted).count();
    assert!(stayed > 50, "{stayed}");

    // A full install goes the same way, in the store that knows.
    let order: BTreeSet<ExpertKey> = on_disk(&home);
    done(&["fetch"], &home, &quick, &["--heat", "--dry-run"]);
    interrupted(&["fetch"], &home, &slow, &["--heat"], order.len() + 20);
    let done = done(&["fetch"], &home, &quick, &["--heat"]);
    assert_eq!(done["shards"]["different"], serde_json::json!([]));
    assert_eq!(on_disk(&home).len(), 448);
}
