//! The main job, end to end: the real binary streams the trained checkpoint over real HTTP.

#![allow(
    clippy::unwrap_used,
    clippy::too_many_lines,
    unreachable_pub,
    reason = "a test fails by panicking, and its tables are long"
)]

mod program;
#[path = "stream/sources.rs"]
mod sources;

use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use deltafin::share::Embedded;
use deltafin::share::Server;
use deltafin::share::ShareOptions;
use deltafin::store::Budget;
use deltafin::store::Lookup;
use deltafin::store::Policy;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::terms::ExpertKey;
use program::Run;
use program::deltafin;
use program::json;
use serde_json::Value;

const MODEL: &str = "deltafin/austen-k3";
const EXPERT: u64 = 9_792;
const EXPERTS: u64 = 448;

fn hub() -> Server {
    let options = ShareOptions::default();
    Server::start(
        ([127, 0, 0, 1], 0).into(),
        Arc::new(Embedded::new()),
        options,
    )
    .unwrap()
}

fn golden(case: &str) -> Vec<i64> {
    let file = format!("fixtures/austen-k3/goldens/{case}.safetensors");
    program::i32s(&std::fs::read(file).unwrap(), "greedy_ids")
}

fn ids(run: &Value) -> Vec<i64> {
    run["token_ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_i64().unwrap())
        .collect()
}

/// The prompt of golden case `chat_who`, whose ids the goldens hold.
const WHO: [&str; 5] = [
    "Who are you?",
    "--reasoning-effort",
    "max",
    "--max-tokens",
    "48",
];

fn stream(home: &Path, hub: &Server, more: &[&str]) -> Run {
    let home = home.to_str().unwrap();
    let url = hub.url();
    let mut args = vec![
        "stream",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        home,
        "--reserve",
        "0",
        "--json",
    ];
    args.extend(WHO);
    args.extend(more);
    deltafin(&args)
}

#[test]
fn the_demo_prints_the_golden_text_and_another_prompt_and_seed_give_another() {
    let demo = deltafin(&["demo", "--json"]);
    assert_eq!(demo.code, 0, "{}", demo.stderr);
    let report = json(&demo);
    assert!(ids(&report).starts_with(&golden("chat_who")), "{report}");
    let text = report["text"].as_str().unwrap();
    assert!(
        text.starts_with("I am a very small model with the architecture of Kimi K3"),
        "{text}"
    );
    assert!(
        demo.stderr.contains("of a full download"),
        "{}",
        demo.stderr
    );
    let bytes = |name: &str| report["bytes"][name].as_u64().unwrap();
    assert!(bytes("hub") > 0 && bytes("disk") > 0 && bytes("core_hub") > 1_000_000);
    let sampled = |seed: &str| {
        let args = [
            "demo",
            "Tell me a story.",
            "--json",
            "--temperature",
            "1",
            "--max-tokens",
            "24",
            "--seed",
            seed,
        ];
        json(&deltafin(&args))["text"].as_str().unwrap().to_owned()
    };
    let first = sampled("1");
    assert_ne!(first, text);
    assert_ne!(first, sampled("2"));
    assert_eq!(first, sampled("1"));
}

#[test]
fn every_budget_gives_the_same_ids_and_bits() {
    let hub = hub();
    let folder = tempfile::tempdir().unwrap();
    let mut seen: Option<Vec<u8>> = None;
    for (name, cache) in [
        ("all", "unlimited".to_owned()),
        ("quarter", (EXPERTS / 4 * EXPERT).to_string()),
        ("three", (3 * EXPERT).to_string()),
        ("none", "0".to_owned()),
    ] {
        let home = folder.path().join(name);
        let file = folder.path().join(format!("{name}.safetensors"));
        let run = stream(
            &home,
            &hub,
            &["--cache", &cache, "--logits", file.to_str().unwrap()],
        );
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
        let report = json(&run);
        assert_eq!(ids(&report), golden("chat_who"), "{name}");
        let experts = &report["experts"];
        let sum: u64 = ["memory", "disk", "peer", "hub"]
            .iter()
            .map(|s| experts[*s].as_u64().unwrap())
            .sum();
        assert_eq!(experts["requested"].as_u64().unwrap(), sum, "{name}");
        assert_eq!(
            report["bytes"]["hub"].as_u64().unwrap(),
            experts["hub"].as_u64().unwrap() * EXPERT
        );
        let bits = std::fs::read(&file).unwrap();
        match &seen {
            None => seen = Some(bits),
            Some(first) => assert!(
                first == &bits,
                "{name}: logits or routing differ in some bit"
            ),
        }
        if name == "none" {
            assert_eq!(experts["disk"].as_u64(), Some(0));
            assert_eq!(program::expert_bytes(&home), 0);
        }
    }
}

#[test]
fn a_second_run_asks_the_hub_one_question_and_moves_no_expert() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let first = stream(home.path(), &hub, &["--cache", "unlimited"]);
    assert_eq!(first.code, 0, "{}", first.stderr);
    let before = hub.stats();
    let second = stream(home.path(), &hub, &["--cache", "unlimited"]);
    let after = hub.stats();
    assert_eq!(ids(&json(&second)), ids(&json(&first)));
    assert!(after.api - before.api <= 1, "{before:?} {after:?}");
    assert_eq!(after.resolves, before.resolves);
    assert_eq!(after.body_bytes, before.body_bytes);
    assert_eq!(json(&second)["experts"]["hub"].as_u64(), Some(0));
    assert_eq!(json(&second)["resolves"].as_u64(), Some(0));
}

#[test]
fn after_a_fetch_everything_runs_with_the_hub_gone_and_with_no_socket() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let at = home.path().to_str().unwrap();
    let url = hub.url();
    let fetched = deltafin(&[
        "fetch",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--reserve",
        "0",
        "--json",
    ]);
    assert_eq!(fetched.code, 0, "{}", fetched.stderr);
    assert_eq!(json(&fetched)["experts"]["fetched"].as_u64(), Some(EXPERTS));
    assert_eq!(program::expert_bytes(home.path()), EXPERTS * EXPERT);
    let again = deltafin(&[
        "fetch",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--reserve",
        "0",
        "--json",
    ]);
    assert_eq!(json(&again)["experts"]["fetched"].as_u64(), Some(0));
    hub.stop();
    let mut args = vec!["run", "--model", MODEL, "--home", at, "--json"];
    args.extend(WHO);
    let run = deltafin(&args);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(ids(&json(&run)), golden("chat_who"));
    assert_eq!(json(&run)["experts"]["hub"].as_u64(), Some(0));
    args[0] = "stream";
    args.push("--offline");
    match program::without_network(&args) {
        Some(alone) => {
            assert_eq!(alone.code, 0, "{}", alone.stderr);
            assert_eq!(ids(&json(&alone)), golden("chat_who"));
        }
        None => println!("skipped: no network namespaces here"),
    }
    match program::sockets(&args) {
        Some(calls) => assert!(calls.is_empty(), "offline, and yet: {calls:?}"),
        None => println!("skipped: no strace here"),
    }
}

#[test]
fn a_full_install_is_proved_and_damage_to_it_is_found_and_mended() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let at = home.path().to_str().unwrap();
    let url = hub.url();
    let fetch = [
        "fetch",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--reserve",
        "0",
        "--json",
    ];
    let fetched = deltafin(&fetch);
    assert_eq!(fetched.code, 0, "{}", fetched.stderr);
    assert_eq!(json(&fetched)["shards"]["whole"].as_u64(), Some(9));
    let verify = ["cache", "verify", "--home", at, "--json"];
    let sound = deltafin(&verify);
    assert_eq!(sound.code, 0, "{}", sound.stderr);
    let model = json(&sound)["models"][0].clone();
    assert!(model["whole_shard"].as_u64().unwrap() >= EXPERTS, "{model}");
    let victim = program::files(home.path())
        .into_iter()
        .find(|f| f.ends_with("experts/003/0007"))
        .unwrap();
    let mut bytes = std::fs::read(&victim).unwrap();
    bytes[5_000] ^= 1;
    std::fs::write(&victim, bytes).unwrap();
    let damaged = deltafin(&["cache", "verify", "--home", at, "--repair", "--json"]);
    assert_eq!(damaged.code, 6, "{}", damaged.stderr);
    let model = json(&damaged)["models"][0].clone();
    assert_eq!(model["damaged"].as_array().unwrap().len(), 1);
    assert!(!victim.exists());
    let again = deltafin(&fetch);
    assert_eq!(json(&again)["experts"]["fetched"].as_u64(), Some(1));
    assert_eq!(deltafin(&verify).code, 0);
    let mut args = vec!["run", "--model", MODEL, "--home", at, "--json"];
    args.extend(WHO);
    assert_eq!(ids(&json(&deltafin(&args))), golden("chat_who"));
}

/// Leaves of an expert what a kill leaves: its first bytes, without its name.
fn unname(home: &Path, key: ExpertKey, bytes: usize) {
    let budget = Budget::Unlimited;
    let (home, reserve) = (home.to_owned(), 0);
    let store = Store::open(StoreOptions {
        home: home.clone(),
        budget,
        reserve,
        policy: Policy::Lru,
        keep_heat: true,
    })
    .unwrap();
    let (repo, commit) = store.models().into_iter().next().unwrap();
    let name = format!("experts/{:03}/{:04}", key.layer, key.expert);
    let mut files = program::files(&home).into_iter();
    let file = files.find(|file| file.ends_with(&name)).unwrap();
    let content = std::fs::read(&file).unwrap();
    std::fs::remove_file(file).unwrap();
    drop(store);
    let store = Store::open(StoreOptions {
        home,
        budget,
        reserve,
        policy: Policy::Lru,
        keep_heat: true,
    })
    .unwrap();
    let model = store.model(&repo, &commit);
    let Lookup::Miss(slot) = model.lookup(key, EXPERT) else {
        panic!("{name} is still there")
    };
    let mut writer = slot.grow().unwrap();
    writer.append(&content[..bytes]).unwrap();
}

#[test]
fn an_expert_that_came_whole_and_was_never_named_is_not_taken_for_installed() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let at = home.path().to_str().unwrap();
    let url = hub.url();
    let fetch = |more: &[&str]| {
        let mut args = vec!["fetch", "--model", MODEL, "--hub", &url, "--home", at];
        args.extend(["--reserve", "0", "--json"]);
        args.extend(more);
        let fetched = deltafin(&args);
        assert_eq!(fetched.code, 0, "{}", fetched.stderr);
        json(&fetched)
    };
    let missing = || fetch(&["--dry-run"])["experts"]["missing"].as_u64();
    fetch(&[]);
    let key = |layer, expert| ExpertKey { layer, expert };
    unname(home.path(), key(3, 7), EXPERT as usize);
    assert_eq!(missing(), Some(1));
    let again = fetch(&[]);
    assert_eq!(again["experts"]["fetched"], 1);
    assert_eq!(again["bytes"]["hub"], 0, "all of it was there");
    assert_eq!(again["shards"]["whole"], 9);
    assert_eq!(missing(), Some(0));
    // Beginnings of other layers do not pass for this one's.
    unname(home.path(), key(2, 5), EXPERT as usize);
    unname(home.path(), key(4, 1), 5_000);
    let layer = fetch(&["--layers", "4-4"]);
    assert_eq!(layer["experts"]["fetched"], 1, "{layer}");
    assert_eq!(layer["bytes"]["hub"], EXPERT - 5_000);
    assert_eq!(missing(), Some(1));
    fetch(&[]);
    assert_eq!(missing(), Some(0));
    assert_eq!(deltafin(&["cache", "verify", "--home", at]).code, 0);
}

#[test]
fn a_small_cache_keeps_a_full_install_of_another_model_out_of_its_count() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let at = home.path().to_str().unwrap();
    let url = hub.url();
    let fetch = [
        "fetch",
        "--model",
        MODEL,
        "--hub",
        &url,
        "--home",
        at,
        "--reserve",
        "0",
    ];
    assert_eq!(deltafin(&fetch).code, 0);
    let tiny = deltafin(&[
        "stream",
        "--hub",
        "fixtures/tiny-k3",
        "--home",
        at,
        "--reserve",
        "0",
        "--cache",
        "60kB",
        "--ids",
        "5,9,12",
        "--max-tokens",
        "4",
    ]);
    assert_eq!(tiny.code, 0, "{}", tiny.stderr);
    let stats = json(&deltafin(&["cache", "stats", "--home", at, "--json"]));
    let models = stats["models"].as_array().unwrap();
    let experts = |name: &str| {
        let model = models.iter().find(|m| m["model"] == name).unwrap();
        model["experts"].as_u64().unwrap()
    };
    assert_eq!(experts(MODEL), EXPERTS, "an install is never evicted");
    assert!(experts("local/tiny-k3") > 0);
    let trimmed = json(&deltafin(&["cache", "trim", "0", "--home", at, "--json"]));
    assert!(trimmed["experts"].as_u64().unwrap() > 0, "{trimmed}");
}

#[test]
fn the_budget_holds_at_every_moment_seen_from_outside() {
    let hub = hub();
    let home = tempfile::tempdir().unwrap();
    let budget = 40 * EXPERT;
    let over = Arc::new(AtomicBool::new(false));
    let most = Arc::new(AtomicU64::new(0));
    let watcher = {
        let (over, most, home) = (Arc::clone(&over), Arc::clone(&most), home.path().to_owned());
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                most.fetch_max(program::expert_bytes(&home), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        })
    };
    let run = stream(home.path(), &hub, &["--cache", &budget.to_string()]);
    over.store(true, Ordering::Relaxed);
    watcher.join().unwrap();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let most = most.load(Ordering::Relaxed);
    assert!(
        most <= budget,
        "{most} bytes were there, {budget} are allowed"
    );
    assert!(
        most > budget / 2,
        "the watcher saw {most} bytes: it was not looking"
    );
}

/// A hub slow enough that a run is still at work when it is met with something.
fn slow_hub() -> Server {
    let link = "6mbit,2ms".parse().unwrap();
    let options = ShareOptions {
        link: Some(link),
        ..ShareOptions::default()
    };
    Server::start(
        ([127, 0, 0, 1], 0).into(),
        Arc::new(Embedded::new()),
        options,
    )
    .unwrap()
}

fn slow_run(home: &Path, hub: &Server) -> std::process::Child {
    let url = hub.url();
    let mut command = program::command();
    command
        .args([
            "stream",
            "--model",
            MODEL,
            "--hub",
            &url,
            "--json",
            "--reserve",
            "0",
            "--cache",
            "unlimited",
        ])
        .arg("--home")
        .arg(home)
        .args(WHO)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn wait_for_experts(home: &Path, count: u64) {
    let patience = Instant::now();
    while program::expert_bytes(home) < count * EXPERT {
        assert!(
            patience.elapsed() < Duration::from_secs(120),
            "no expert came"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ctrl_c_ends_with_what_was_made_and_the_next_run_goes_on_from_it() {
    let home = tempfile::tempdir().unwrap();
    let slow = slow_hub();
    let child = slow_run(home.path(), &slow);
    wait_for_experts(home.path(), 20);
    program::signal(&child, "INT");
    let out = child.wait_with_output().unwrap();
    let run = Run::from(out);
    assert_eq!(run.code, 130, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["finish_reason"], "interrupted");
    assert!(golden("chat_who").starts_with(&ids(&report)));
    let kept = program::expert_bytes(home.path()) / EXPERT;
    let fetched = report["experts"]["hub"].as_u64().unwrap();
    assert!(fetched <= kept, "what was fetched is kept");
    let fast = hub();
    let next = stream(home.path(), &fast, &["--cache", "unlimited"]);
    assert_eq!(ids(&json(&next)), golden("chat_who"));
    let total = program::expert_bytes(home.path()) / EXPERT;
    assert_eq!(
        json(&next)["experts"]["hub"].as_u64().unwrap() + kept,
        total,
        "nothing is fetched twice"
    );
}

#[test]
fn kill_9_loses_nothing_but_what_was_in_flight() {
    let home = tempfile::tempdir().unwrap();
    let slow = slow_hub();
    for round in 1..=3 {
        let mut child = slow_run(home.path(), &slow);
        wait_for_experts(home.path(), round * 15);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let kept = program::expert_bytes(home.path()) / EXPERT;
    assert!(kept >= 30, "{kept} experts survived three kills");
    let fast = hub();
    let next = stream(home.path(), &fast, &["--cache", "unlimited"]);
    assert_eq!(next.code, 0, "{}", next.stderr);
    assert_eq!(ids(&json(&next)), golden("chat_who"));
    let leftovers: Vec<PathBuf> = program::files(home.path())
        .into_iter()
        .filter(|f| f.to_string_lossy().contains("experts") && program::len(f) != EXPERT)
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}
