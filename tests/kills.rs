//! kill -9 at random moments, and several processes on one store: what the hub's ledger says was moved.
//!
//! `DELTAFIN_KILLS` sets how many kills of each kind there are, `DELTAFIN_KILLS_SEED` their moments.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    unreachable_pub,
    reason = "a test fails by panicking, and its figures are small"
)]

mod program;
mod support;

use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use program::Run;
use program::deltafin;
use program::json;
use serde_json::Value;
use support::testhub::TestHub;
use support::testhub::Throttle;
use support::testhub::next_random;

const REPO: &str = "deltafin/austen-k3";
const FOLDER: &str = "fixtures/austen-k3/model";
/// Bytes of the model's shards, headers included.
const SHARDS: &str = "safetensors";

fn number(name: &str, otherwise: u64) -> u64 {
    let said = std::env::var(name).ok();
    said.map_or(otherwise, |value| value.parse().unwrap())
}

fn hub(rate: Option<u64>) -> TestHub {
    let hub = TestHub::folder(REPO, FOLDER);
    hub.slow(Throttle {
        total: rate,
        ..Throttle::default()
    });
    hub
}

fn shards() -> u64 {
    let files = program::files(Path::new(FOLDER)).into_iter();
    let shards = files.filter(|f| f.extension().is_some_and(|e| e == SHARDS));
    shards.map(|f| program::len(&f)).sum()
}

fn start(what: &str, home: &Path, hub: &TestHub, more: &[&str]) -> Child {
    command(what, home, hub, more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn command(what: &str, home: &Path, hub: &TestHub, more: &[&str]) -> Command {
    let mut command = program::command();
    command.args([what, "--model", REPO, "--hub", &hub.url(), "--json"]);
    command.args(["--reserve", "0", "--cache", "unlimited", "--home"]);
    command.arg(home).args(more);
    command
}

fn finish(what: &str, home: &Path, hub: &TestHub, more: &[&str]) -> Value {
    let run = Run::from(command(what, home, hub, more).output().unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    json(&run)
}

/// Kills a run at a random moment after its first byte of a body; `false` if it was done before.
fn killed(mut child: Child, hub: &TestHub, random: &mut u64, within: u64) -> bool {
    let before = hub.ledger().expert_bytes_sent();
    let patience = Instant::now();
    while hub.ledger().expert_bytes_sent() == before {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(patience.elapsed() < Duration::from_secs(60), "no byte came");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_micros(next_random(random) % (within * 1000)));
    let done = child.try_wait().unwrap().is_some();
    child.kill().unwrap();
    child.wait().unwrap();
    !done
}

/// Whatever came before is used: `(bytes moved, bytes needed, kills)` over as many homes as the kills need.
fn story(what: &str, rate: u64, within: u64, a_home: u64, more: &[&str]) -> (u64, u64, u64) {
    let kills = number("DELTAFIN_KILLS", 6);
    let mut random = number("DELTAFIN_KILLS_SEED", 1);
    let calm = tempfile::tempdir().unwrap();
    let (fast, slow) = (hub(None), hub(Some(rate)));
    let undisturbed = finish(what, calm.path(), &fast, more);
    let once = fast.ledger().expert_bytes_sent();
    let (mut done, mut homes) = (0, 0);
    // All stay until the end: where hundreds of files have just been removed, ext4 makes new ones so
    // slowly that the small experts of this model come faster than they can be written.
    let mut kept = Vec::new();
    while done < kills {
        let home = tempfile::tempdir().unwrap();
        homes += 1;
        for _ in 0..a_home.min(kills - done) {
            let child = start(what, home.path(), &slow, more);
            if !killed(child, &slow, &mut random, within) {
                break;
            }
            done += 1;
        }
        let last = finish(what, home.path(), &slow, more);
        assert_eq!(last["token_ids"], undisturbed["token_ids"]);
        let at = home.path().to_str().unwrap();
        let verified = deltafin(&["cache", "verify", "--home", at]);
        assert_eq!(verified.code, 0, "{}", verified.stderr);
        kept.push(home);
    }
    (slow.ledger().expert_bytes_sent(), homes * once, done)
}

#[test]
fn a_full_install_killed_again_and_again_moves_little_twice() {
    let (moved, needed, kills) = story("fetch", 12_000_000, 700, 2, &[]);
    let homes = needed / shards();
    // Undisturbed it moves each byte once, but for the heads of shards, which say where all others lie.
    let heads = needed - homes * shards();
    assert!(
        heads * 250 < needed,
        "{heads} of {needed} bytes moved twice"
    );
    let lost = moved.saturating_sub(needed) / kills;
    let ratio = moved as f64 / needed as f64;
    println!(
        "fetch: {kills} kills, {homes} homes, {moved} bytes moved, {needed} needed: {ratio:.3}; {lost} lost a kill"
    );
    assert!(ratio < 1.05, "{ratio:.3}");
}

#[test]
fn a_stream_killed_again_and_again_moves_what_was_in_flight_twice() {
    let prompt = ["Who are you?", "--max-tokens", "24"];
    let (moved, needed, kills) = story("stream", 6_000_000, 600, 3, &prompt);
    let lost = moved.saturating_sub(needed) / kills;
    println!("stream: {kills} kills, {moved} bytes moved, {needed} needed; {lost} lost a kill");
    assert!(lost < 800_000, "{lost} bytes lost a kill");
}

#[test]
fn two_streams_and_a_fetch_share_one_store() {
    let calm = tempfile::tempdir().unwrap();
    let prompts = [["Who are you?"], ["Where is the sea?"]];
    let alone: Vec<Value> = prompts
        .iter()
        .map(|prompt| {
            let more = [prompt[0], "--max-tokens", "24"];
            finish("stream", calm.path(), &hub(None), &more)
        })
        .collect();
    let home = tempfile::tempdir().unwrap();
    let slow = hub(Some(8_000_000));
    let fetch = start("fetch", home.path(), &slow, &[]);
    let streams: Vec<Child> = prompts
        .iter()
        .map(|prompt| {
            start(
                "stream",
                home.path(),
                &slow,
                &[prompt[0], "--max-tokens", "24"],
            )
        })
        .collect();
    for (child, alone) in streams.into_iter().zip(alone) {
        let run = Run::from(child.wait_with_output().unwrap());
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(json(&run)["token_ids"], alone["token_ids"]);
    }
    let run = Run::from(fetch.wait_with_output().unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let moved = slow.ledger().expert_bytes_sent() as f64 / shards() as f64;
    println!("two streams and a fetch: {moved:.3} times the shards' bytes");
    assert!(moved < 1.5, "{moved}");
    let at = home.path().to_str().unwrap();
    let verified = deltafin(&["cache", "verify", "--home", at]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
    let again = finish("fetch", home.path(), &slow, &["--dry-run"]);
    assert_eq!(again["experts"]["missing"], 0);
}
