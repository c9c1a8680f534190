//! Memory decides how long a token takes, never which: the real binary under every budget.

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking, and says where"
)]

#[path = "residency/group.rs"]
mod group;
mod program;

use std::path::Path;
use std::process::Command;

use group::Group;
use program::deltafin;
use program::json;
use serde_json::Value;

/// Runs a prompt of ids; gives the report and the bytes of the distributions.
fn run(model: &str, home: &Path, command: &str, more: &[&str]) -> (Value, Vec<u8>) {
    let logits = home.join("logits.safetensors");
    let mut args = vec![command, "--hub", model, "--home", home.to_str().unwrap()];
    let prompt = ["--ids", "5,9,12,7,300,41,8", "--max-tokens", "12", "--json"];
    args.extend(prompt);
    args.extend(["--logits", logits.to_str().unwrap()]);
    args.extend(more);
    let run = deltafin(&args);
    assert_eq!(run.code, 0, "{args:?}: {}", run.stderr);
    (json(&run), std::fs::read(logits).unwrap())
}

#[test]
fn every_budget_and_every_way_to_hold_the_core_give_the_same_bits() {
    let models = [
        "fixtures/tiny-k3",
        "fixtures/tiny-linear",
        "fixtures/austen-k3/model",
    ];
    for model in models {
        let home = tempfile::tempdir().unwrap();
        let (plain, logits) = run(model, home.path(), "stream", &["--core", "mmap"]);
        let ids = &plain["token_ids"];
        for more in [
            &["--ram", "0"][..],
            &["--ram", "0", "--threads", "1"],
            &["--ram", "34MB"],
            &["--ram", "36MB"],
            &["--ram", "38MB", "--cache", "0"],
            &["--ram", "41MB"],
            &["--core", "read"],
            &["--ram", "0", "--core", "mmap"],
            &["--ram", "auto"],
        ] {
            let (report, found) = run(model, home.path(), "stream", more);
            assert_eq!(&report["token_ids"], ids, "{model} {more:?}");
            assert!(found == logits, "{model} {more:?}: other distributions");
        }
    }
}

#[test]
fn what_does_not_stay_is_read_again_for_every_token_and_what_stays_is_not() {
    let model = "fixtures/austen-k3/model";
    let home = tempfile::tempdir().unwrap();
    let core = |more: &[&str]| {
        let (report, _) = run(model, home.path(), "stream", more);
        report["bytes"]["core_disk"].as_u64().unwrap()
    };
    let once = core(&["--core", "read"]);
    let always = core(&["--ram", "0"]);
    // One sweep over the prompt, eleven over what it became, all with the head.
    assert!(always > 10 * once, "{once} {always}");
    let some = core(&["--ram", "37MB"]);
    assert!(some < always * 3 / 4 && some > once, "{some} {always}");
}

#[test]
fn experts_that_were_just_used_stay_in_memory_whatever_the_disk_keeps() {
    let model = "fixtures/austen-k3/model";
    let home = tempfile::tempdir().unwrap();
    let experts = |more: &[&str]| run(model, home.path(), "stream", more).0["experts"].clone();
    let count = |experts: &Value, origin: &str| experts[origin].as_u64().unwrap();
    let kept = experts(&["--cache", "0"]);
    assert!(count(&kept, "memory") > 0, "{kept}");
    assert_eq!(count(&kept, "disk"), 0);
    let none = experts(&["--cache", "0", "--ram", "0"]);
    assert!(count(&none, "memory") < count(&kept, "memory"), "{none}");
    assert_eq!(count(&none, "requested"), count(&kept, "requested"));
}

/// A random model of 0.4 GB, far larger than the limits below; `None` where the program that writes it was not built.
fn synthetic(folder: &Path) -> Option<String> {
    let built = Path::new(env!("CARGO_BIN_EXE_deltafin")).parent()?;
    let program = built.join("examples/synth");
    if !program.is_file() {
        return None;
    }
    let model = folder.join("model").display().to_string();
    let shape = "--layers 4 --hidden 1792 --heads 14 --dense-inner 4608 --latent 896 --moe-inner 768 \
        --vocab 4096 --q-rank 512 --kv-rank 128 --experts 48";
    let mut command = Command::new(program);
    command.arg(&model).args(shape.split_whitespace());
    assert!(command.output().unwrap().status.success());
    Some(model)
}

#[test]
fn a_limit_that_the_system_keeps_is_kept_through_prompt_reply_and_eviction() {
    let limits = [170_000_000, 300_000_000];
    let tokens: usize = std::env::var("DELTAFIN_PROMPT_TOKENS").map_or(128, |n| n.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = synthetic(folder.path()) else {
        eprintln!("skipped: examples/synth is not built; `cargo test` without a filter builds it");
        return;
    };
    let home = folder.path().join("home").display().to_string();
    let ids: Vec<String> = (0..tokens).map(|n| (n * 13 % 3000).to_string()).collect();
    for limit in limits {
        let Some(group) = Group::new(limit) else {
            eprintln!("skipped: this process may not make control groups that limit memory");
            return;
        };
        let mut command = program::command();
        command.args(["stream", "--hub", &model, "--home", &home, "--reserve", "0"]);
        command.args([
            "--cache",
            "60MB",
            "--ids",
            &ids.join(","),
            "--max-tokens",
            "8",
            "--json",
        ]);
        let held = group.run(&mut command);
        let told = String::from_utf8_lossy(&held.output.stderr);
        assert!(
            !held.killed,
            "at {limit}: {} bytes resident; {told}",
            held.most
        );
        assert!(held.output.status.success(), "at {limit}: {told}");
        let report: Value = serde_json::from_slice(&held.output.stdout).unwrap();
        let budget = report["memory"]["budget"].as_u64().unwrap();
        assert!(budget < limit, "{budget}");
        assert!(
            held.most <= budget + budget / 50,
            "{} bytes resident of {budget}",
            held.most
        );
        // The disk keeps a third of the experts, so some had to go; and the prompt took several sweeps.
        assert!(
            report["experts"]["hub"].as_u64().unwrap() > 3 * 144,
            "{report}"
        );
    }
}
