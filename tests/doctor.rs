//! What `doctor` finds: in a store that is well, in one that is not, and at a hub with another clock.

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod program;
mod support;

use std::net::TcpListener;
use std::path::Path;
use std::path::PathBuf;

use program::Run;
use program::deltafin;
use program::json;
use serde_json::Value;
use support::testhub::TestHub;

const REPO: &str = "deltafin/austen-k3";
const EXPERT: u64 = 9_792;

fn at(home: &Path) -> &str {
    home.to_str().unwrap()
}

fn installed() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let fetched = deltafin(&[
        "fetch",
        "--model",
        "demo",
        "--reserve",
        "0",
        "--home",
        at(home.path()),
    ]);
    assert_eq!(fetched.code, 0, "{}", fetched.stderr);
    home
}

fn doctor(home: &Path, more: &[&str]) -> Run {
    let mut args = vec!["doctor", "--home", at(home), "--reserve", "0", "--json"];
    args.extend(more);
    deltafin(&args)
}

/// The findings on a subject: `(severity, found)`.
fn on(run: &Run, subject: &str) -> Vec<(String, String)> {
    let report = json(run);
    let all = report["findings"].as_array().unwrap().iter();
    let text = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    all.filter(|finding| finding["subject"] == subject)
        .map(|finding| (text(finding, "severity"), text(finding, "found")))
        .collect()
}

fn problem(run: &Run, subject: &str) -> String {
    assert_eq!(run.code, 1, "{}{}", run.stdout, run.stderr);
    let problems = json(run)["problems"].as_u64().unwrap();
    assert!(problems > 0);
    let found = on(run, subject).into_iter();
    let mut problems = found.filter(|(severity, _)| severity == "problem");
    problems
        .next()
        .unwrap_or_else(|| panic!("{}", run.stdout))
        .1
}

fn expert(home: &Path) -> PathBuf {
    let files = program::files(home).into_iter();
    let mut experts =
        files.filter(|f| f.to_string_lossy().contains("/experts/") && program::len(f) == EXPERT);
    experts.next().unwrap()
}

#[test]
fn a_store_that_is_well_is_said_to_be() {
    let home = installed();
    let run = doctor(home.path(), &["--offline", "--deep"]);
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    let model = on(&run, "model");
    assert_eq!(model.len(), 1);
    assert!(
        model[0].1.contains("all of it, 448 of 448 experts"),
        "{model:?}"
    );
    assert_eq!(on(&run, "damage")[0].0, "ok");
    assert_eq!(on(&run, "hub")[0].1, "not asked: offline");
    let people = deltafin(&[
        "doctor",
        "--home",
        at(home.path()),
        "--reserve",
        "0",
        "--offline",
    ]);
    assert_eq!(people.code, 0);
    assert!(
        people.stdout.starts_with("ok      home"),
        "{}",
        people.stdout
    );
}

#[test]
fn a_home_that_is_not_there_is_not_made_and_one_that_cannot_be_is_a_problem() {
    let home = tempfile::tempdir().unwrap();
    let later = home.path().join("a/b");
    let run = doctor(&later, &["--offline"]);
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    assert_eq!(on(&run, "home")[0].0, "note");
    assert!(!later.exists() && !home.path().join("a").exists());
    let file = home.path().join("file");
    std::fs::write(&file, "").unwrap();
    let run = doctor(&file, &["--offline"]);
    assert!(problem(&run, "home").contains("not a folder"));
    let run = doctor(&file.join("below"), &["--offline"]);
    assert_eq!(run.code, 1, "{}{}", run.stdout, run.stderr);
}

#[test]
fn what_is_missing_and_what_is_damaged_is_found_and_left_alone() {
    let home = installed();
    let cut = expert(home.path());
    let content = std::fs::read(&cut).unwrap();
    std::fs::write(&cut, &content[..100]).unwrap();
    let run = doctor(home.path(), &["--offline"]);
    let found = problem(&run, "model");
    assert!(found.contains("1 experts have a wrong size"), "{found}");
    let mut wrong = content;
    wrong[5_000] ^= 1;
    std::fs::write(&cut, &wrong).unwrap();
    assert_eq!(
        doctor(home.path(), &["--offline"]).code,
        0,
        "its size is right"
    );
    let run = doctor(home.path(), &["--offline", "--deep"]);
    let found = problem(&run, "damage");
    assert!(
        found.contains(cut.file_name().unwrap().to_str().unwrap()),
        "{found}"
    );
    assert!(cut.exists(), "nothing is repaired");
    let files = program::files(home.path()).into_iter();
    let mut core = files.filter(|f| f.to_string_lossy().contains("/core/"));
    std::fs::remove_file(core.next().unwrap()).unwrap();
    let run = doctor(home.path(), &["--offline"]);
    assert!(problem(&run, "model").contains("of the core are missing"));
}

#[test]
fn a_hub_that_answers_and_its_clock_are_told_and_one_that_does_not_is_a_problem() {
    let home = tempfile::tempdir().unwrap();
    let asked = |url: &str| doctor(home.path(), &["--hub", url, "--model", REPO]);
    let hub = TestHub::folder(REPO, "fixtures/austen-k3/model");
    let run = asked(&hub.url());
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    let answer = format!("{REPO} is at {:.10}", hub.commit(REPO));
    assert!(on(&run, "hub")[0].1.contains(&answer), "{}", run.stdout);
    assert_eq!(on(&run, "clock")[0].0, "ok");
    hub.clock().advance(60);
    let run = asked(&hub.url());
    assert_eq!(run.code, 0, "a minute is worth a word, no more");
    assert_eq!(on(&run, "clock")[0].0, "note");
    hub.clock().advance(7_200);
    let run = asked(&hub.url());
    let found = problem(&run, "clock");
    assert!(found.contains("s behind the hub's"), "{found}");
    let nobody = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let run = asked(&format!("http://{nobody}"));
    problem(&run, "hub");
}
