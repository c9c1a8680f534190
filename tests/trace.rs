//! A routing trace as a person makes and uses it: `--trace`, then `cache simulate`.

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod program;
#[path = "trace/warm.rs"]
mod warm;

use std::path::Path;

use program::Run;
use program::deltafin;
use program::json;

fn demo(home: &Path, trace: &str, cache: &str) -> Run {
    let home = home.to_str().unwrap();
    deltafin(&[
        "demo",
        "--json",
        "--home",
        home,
        "--cache",
        cache,
        "--trace",
        trace,
        "--threads",
        "2",
    ])
}

fn simulate(trace: &str, more: &[&str]) -> Run {
    let mut args = vec!["cache", "simulate", "--trace", trace];
    args.extend(more);
    deltafin(&args)
}

#[test]
fn a_demo_is_traced_and_its_cache_is_simulated() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("routes");
    let trace = file.to_str().unwrap();
    let mut hits = 0;
    let mut uses = 0;
    for _ in 0..2 {
        let ran = demo(&home.path().join("store"), trace, "2MB");
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let report = json(&ran);
        let count = |name: &str| report["experts"][name].as_u64().unwrap();
        uses += count("requested");
        hits += count("memory") + count("disk");
    }
    let told = simulate(trace, &["--cache", "2MB", "--cache", "100MB", "--json"]);
    assert_eq!(told.code, 0, "{}", told.stderr);
    let told = json(&told);
    assert_eq!(told["uses"], uses);
    let small = &told["sizes"][0];
    let lru = &small["policies"][0];
    assert_eq!(lru["policy"], "LRU");
    // The disk alone: memory has kept what the disk had to let go.
    let alone = lru["hits"].as_u64().unwrap();
    assert!(0 < alone && alone < hits, "{alone}");
    assert!(small["bound_hits"].as_u64().unwrap() > alone);
    let all = &told["sizes"][1];
    let distinct = told["distinct"].as_u64().unwrap();
    for policy in all["policies"].as_array().unwrap() {
        assert_eq!(policy["hits"], uses - distinct, "{policy}");
    }
    let table = simulate(trace, &[]);
    assert!(table.stdout.contains("best possible"), "{}", table.stdout);
    assert_eq!(table.stdout.lines().count(), 8, "{}", table.stdout);
}

#[test]
fn what_is_no_trace_is_refused_and_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("diary");
    let path = file.to_str().unwrap();
    let missing = simulate(path, &[]);
    assert_eq!(missing.code, 5, "{}", missing.stderr);
    std::fs::write(&file, "dear diary\n").unwrap();
    let read = simulate(path, &[]);
    assert_eq!(read.code, 6, "{}", read.stderr);
    assert!(read.stderr.contains("line 1"), "{}", read.stderr);
    let written = demo(&home.path().join("store"), path, "2MB");
    assert_eq!(written.code, 6, "{}", written.stderr);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "dear diary\n");
    let other = concat!(
        r#"{"trace":"deltafin experts 1","model":"a/b","revision":"c","expert_bytes":9792}"#,
        "\n"
    );
    std::fs::write(&file, other).unwrap();
    let mixed = demo(&home.path().join("store"), path, "2MB");
    assert_eq!(mixed.code, 2, "{}", mixed.stderr);
    assert!(mixed.stderr.contains("a/b"), "{}", mixed.stderr);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), other);
}
