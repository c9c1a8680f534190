//! Sessions and prefixes with the real program.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use crate::program;
use crate::program::Run;
use crate::program::deltafin;

fn args(home: &Path, more: &[&str]) -> Vec<String> {
    let home = home.to_str().unwrap();
    let flags = [
        "--model",
        "demo",
        "--reserve",
        "0",
        "--json",
        "--home",
        home,
    ];
    more.iter().chain(&flags).map(|a| (*a).to_owned()).collect()
}

fn run(home: &Path, more: &[&str]) -> Run {
    let args = args(home, more);
    deltafin(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn told(run: &Run) -> Value {
    assert_eq!(run.code, 0, "{}", run.stderr);
    program::json(run)
}

const TALK: [&str; 6] = [
    "--reasoning-effort",
    "max",
    "--temperature",
    "0.7",
    "--max-tokens",
    "40",
];

fn say<'a>(said: Option<&'a str>, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["stream"];
    args.extend(said);
    args.extend(["--session", "talk"]);
    args.extend(TALK);
    args.extend(more);
    args
}

fn stopped(home: &Path, more: &[&str], signals: &[&str], wait: Duration) -> Option<i32> {
    let mut child = program::command()
        .args(args(home, more))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(wait);
    for signal in signals {
        if child.try_wait().unwrap().is_none() {
            program::signal(&child, signal);
        }
    }
    child.wait().unwrap().code()
}

#[test]
fn a_session_goes_on_after_any_stop_as_if_there_had_been_none() {
    let seed = ["--seed", "11"];
    let undisturbed = tempfile::tempdir().unwrap();
    let first = told(&run(undisturbed.path(), &say(Some("Who are you?"), &seed)));
    let second = told(&run(undisturbed.path(), &say(Some("Tell me more."), &seed)));
    assert_ne!(first["token_ids"], second["token_ids"]);
    let cached = second["rows"]["cached"].as_u64().unwrap();
    let prompt = first["prompt_ids"].as_array().unwrap().len() as u64;
    assert!(
        cached >= prompt,
        "the second turn reads {cached} tokens from the state of the first"
    );

    let stops: [&[&str]; 4] = [&["KILL"], &["INT"], &["TERM"], &["INT", "INT"]];
    for (n, signals) in stops.into_iter().enumerate() {
        let home = tempfile::tempdir().unwrap();
        let mut wait = Duration::from_millis(300 + 120 * n as u64);
        let mut codes = Vec::new();
        let mut whole = false;
        let show = || run_plain(home.path(), &["sessions", "show", "talk", "--json"]);
        for _ in 0..3 {
            codes.push(stopped(
                home.path(),
                &say(Some("Who are you?"), &seed),
                signals,
                wait,
            ));
            wait = wait.mul_f64(1.3);
            if codes.last() == Some(&Some(0)) {
                break;
            }
            let expected = if signals[0] == "KILL" {
                None
            } else {
                Some(130)
            };
            assert_eq!(codes.last(), Some(&expected), "{signals:?}");
            // A stop may come between the reply's end and the process's: what is said then is new.
            let shown = show();
            whole = shown.code == 0 && program::json(&shown)["unfinished"] == false;
            if whole {
                break;
            }
        }
        if !whole && codes.last() != Some(&Some(0)) {
            assert_eq!(told(&show())["unfinished"], true);
            // With nothing said, or the same said again, the reply goes on.
            let said = (n % 2 == 0).then_some("Who are you?");
            let rest = told(&run(home.path(), &say(said, &[])));
            assert_eq!(
                rest["token_ids"], first["token_ids"],
                "{signals:?} {codes:?}"
            );
            assert_eq!(rest["text"], first["text"]);
        }
        let next = told(&run(home.path(), &say(Some("Tell me more."), &seed)));
        assert_eq!(next["prompt_ids"], second["prompt_ids"]);
        assert_eq!(next["token_ids"], second["token_ids"], "{signals:?}");
    }
}

fn run_plain(home: &Path, more: &[&str]) -> Run {
    let mut args = more.to_vec();
    args.extend(["--home", home.to_str().unwrap()]);
    deltafin(&args)
}

#[test]
fn sessions_are_listed_shown_exported_and_removed_and_belong_to_one_process() {
    let home = tempfile::tempdir().unwrap();
    let nothing = run(home.path(), &["stream", "--session", "talk"]);
    assert_eq!(nothing.code, 2, "{}", nothing.stderr);
    told(&run(
        home.path(),
        &say(Some("Hello!"), &["--system", "Be brief."]),
    ));
    let list = told(&run_plain(home.path(), &["sessions", "list", "--json"]));
    assert_eq!(list["sessions"][0]["name"], "talk");
    assert_eq!(list["sessions"][0]["messages"], 2);
    let export = told(&run_plain(home.path(), &["sessions", "export", "talk"]));
    assert_eq!(
        export["messages"][0],
        json!({"role": "system", "content": "Be brief."})
    );
    assert_eq!(export["messages"][1]["content"], "Hello!");
    let awaits = run(home.path(), &say(None, &[]));
    assert_eq!(awaits.code, 2, "{}", awaits.stderr);
    assert!(awaits.stderr.contains("awaits"), "{}", awaits.stderr);

    let journal = deltafin::jobs::Journal::sessions(home.path()).unwrap();
    let held = journal.get("talk").unwrap();
    let busy = run(home.path(), &say(Some("Me too"), &[]));
    assert_eq!(busy.code, 2, "{}", busy.stderr);
    assert!(
        busy.stderr.contains("in use by another process"),
        "{}",
        busy.stderr
    );
    drop(held);

    let gone = told(&run_plain(
        home.path(),
        &["sessions", "rm", "talk", "--json"],
    ));
    assert_eq!(gone["removed"], "talk");
    let missing = run_plain(home.path(), &["sessions", "show", "talk"]);
    assert_eq!(missing.code, 3, "{}", missing.stderr);
}

#[test]
fn a_prefix_made_in_one_store_serves_another_and_a_damaged_or_foreign_one_does_not() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let system = "You answer in one short sentence, and never about the weather.";
    let prompt = [
        "stream",
        "What do you do?",
        "--system",
        system,
        "--max-tokens",
        "8",
    ];
    let fresh = told(&run(there.path(), &prompt));
    assert_eq!(fresh["rows"]["cached"], 0);
    let make = ["prefix", "make", "brief", "--system", system];
    let made = told(&run(here.path(), &make));
    let tokens = made["tokens"].as_u64().unwrap();
    let file = here.path().join("brief.out");
    let file = file.to_str().unwrap();
    told(&run_plain(
        here.path(),
        &["prefix", "export", "brief", file, "--json"],
    ));
    let import = ["prefix", "import", file, "--name", "brief", "--json"];
    told(&run_plain(there.path(), &import));
    let list = told(&run_plain(there.path(), &["prefix", "list", "--json"]));
    assert_eq!(list["prefixes"][0]["tokens"], tokens);
    let short = told(&run(there.path(), &prompt));
    let rows = fresh["prompt_ids"].as_array().unwrap().len() as u64;
    assert_eq!(
        short["rows"],
        json!({"computed": rows - tokens, "cached": tokens})
    );
    assert_eq!(short["token_ids"], fresh["token_ids"]);
    assert!(tokens * 2 > rows, "{tokens} of {rows}");

    let bytes = std::fs::read(file).unwrap();
    let mut flipped = bytes.clone();
    flipped[bytes.len() / 2] ^= 4;
    for (what, bytes) in [
        ("flipped", &flipped[..]),
        ("cut", &bytes[..bytes.len() - 5]),
    ] {
        std::fs::write(file, bytes).unwrap();
        let refused = run_plain(there.path(), &import);
        assert_eq!(refused.code, 6, "{what}: {}", refused.stderr);
        // One that goes bad in the store is named, and the whole prompt is read.
        std::fs::write(there.path().join("prefixes-v1/brief.prefix"), bytes).unwrap();
        let whole = run(there.path(), &prompt);
        assert!(
            whole.stderr.contains("brief.prefix is not used"),
            "{}",
            whole.stderr
        );
        let whole = told(&whole);
        assert_eq!(whole["rows"]["cached"], 0, "{what}");
        assert_eq!(whole["token_ids"], fresh["token_ids"]);
    }
    let text = |from: &str, to: &str| {
        let head = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        let head = String::from_utf8(bytes[12..12 + head].to_vec()).unwrap();
        let new = head.replacen(from, to, 1);
        assert_eq!(new.len(), head.len());
        [&bytes[..12], new.as_bytes(), &bytes[12 + head.len()..]].concat()
    };
    let arithmetic = made["arithmetic"].as_str().unwrap();
    let other = format!("{}9", &arithmetic[..arithmetic.len() - 1]);
    for (foreign, reason) in [
        (text(arithmetic, &other), "its arithmetic is"),
        (
            text(made["revision"].as_str().unwrap(), &"1".repeat(40)),
            "and the store has",
        ),
    ] {
        std::fs::write(file, foreign).unwrap();
        let refused = run_plain(there.path(), &import);
        assert_eq!(refused.code, 6, "{}", refused.stderr);
        assert!(refused.stderr.contains(reason), "{}", refused.stderr);
    }
}

#[test]
fn a_chat_at_a_terminal_edits_commands_and_survives_what_happens_to_it() {
    let home = tempfile::tempdir().unwrap();
    let talked = std::process::Command::new("python3")
        .arg("tests/jobs/chat.py")
        .arg(env!("CARGO_BIN_EXE_deltafin"))
        .arg(home.path())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&talked.stderr);
    assert!(talked.status.success(), "{stderr}");
}

#[test]
fn a_prompt_may_be_piped_in() {
    use std::io::Write;
    let home = tempfile::tempdir().unwrap();
    let mut child = program::command()
        .args(args(
            home.path(),
            &["stream", "--max-tokens", "4", "--seed", "1"],
        ))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"Who are you?")
        .unwrap();
    let piped = told(&child.wait_with_output().unwrap().into());
    let typed = ["stream", "Who are you?", "--max-tokens", "4", "--seed", "1"];
    let typed = told(&run(home.path(), &typed));
    assert_eq!(piped["prompt_ids"], typed["prompt_ids"]);
    assert_eq!(piped["token_ids"], typed["token_ids"]);
}
