//! One install and every way to use it: each gives the same ids.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::FOLDER;
use crate::MODEL;
use crate::WHO;
use crate::golden;
use crate::ids;
use crate::program::Run;
use crate::program::deltafin;
use crate::program::json;
use crate::scrub::Running;
use crate::scrub::start;
use crate::scrub::told;

/// Starts a share and gives the URL at which it answers.
fn share(more: &[&str]) -> (Running, String) {
    let (running, lines) = start(&[&["share", "--port", "0", "--model", MODEL], more].concat());
    let line = told(&lines, "is shared at");
    let url = line.split("is shared at ").nth(1).unwrap();
    (running, url.split(';').next().unwrap().to_owned())
}

fn ask(what: &str, home: &Path, more: &[&str]) -> Value {
    let mut args = vec![what, "--model", MODEL, "--home", home.to_str().unwrap()];
    args.extend(["--reserve", "0", "--json"]);
    args.extend(more);
    args.extend(WHO);
    let run = deltafin(&args);
    assert_eq!(run.code, 0, "{what}: {}", run.stderr);
    let report = json(&run);
    assert_eq!(ids(&report), golden(), "{what} {more:?}");
    report
}

/// A Python with `huggingface_hub`; `None` where none can be had.
fn python() -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The one that the comparison with other clients has made, where it has.
    let made = here.join("target/parity-venv/bin/python");
    let has_it = |python: &Path| {
        let mut command = Command::new(python);
        let asked = command.args(["-c", "import huggingface_hub"]).output();
        asked.is_ok_and(|out| out.status.success())
    };
    if has_it(&made) {
        return Some(made);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients-hub");
    let setup = Command::new(here.join("scripts/clients/setup.sh"))
        .arg("hub")
        .arg(&folder)
        .output()
        .unwrap();
    let python = folder.join("bin/python");
    (setup.status.success() && has_it(&python)).then_some(python)
}

fn snapshot_download(python: &Path, url: &str, into: &Path) {
    let code = "import sys, huggingface_hub as hub; hub.snapshot_download(sys.argv[1], local_dir=sys.argv[2])";
    let out = Command::new(python)
        .args(["-c", code, MODEL])
        .arg(into)
        .env_remove("HF_TOKEN")
        .env("HF_ENDPOINT", url)
        .env("HF_HOME", into.with_extension("home"))
        .env("HF_HUB_DISABLE_XET", "1")
        .env("HF_HUB_DISABLE_TELEMETRY", "1")
        .env("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .unwrap();
    let run = Run::from(out);
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
}

#[test]
fn what_was_fetched_gives_the_same_ids_however_it_is_used() {
    let work = tempfile::tempdir().unwrap();
    let home = work.path().join("home");
    let at = home.to_str().unwrap();
    // A share of a folder publishes digests, so that the install is proved by them.
    let (hub, url) = share(&[FOLDER]);
    let args = ["fetch", "--model", MODEL, "--hub", &url, "--home", at];
    let run = deltafin(&[&args[..], &["--reserve", "0", "--json"]].concat());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let shards = &json(&run)["shards"];
    assert_eq!(shards["whole"], crate::SHARDS, "{shards}");

    let streamed = ask("stream", &home, &["--hub", &url]);
    assert_eq!(streamed["experts"]["hub"], 0, "all of it is here");
    drop(hub);
    ask("run", &home, &[]);

    let (shared, url) = share(&["--home", at]);
    let other = work.path().join("other");
    let streamed = ask("stream", &other, &["--hub", &url]);
    assert_eq!(streamed["experts"]["disk"], 0, "a home that had nothing");

    let Some(python) = python() else {
        println!("skipped: huggingface_hub is not to be had here");
        return;
    };
    let folder = work.path().join("downloaded");
    snapshot_download(&python, &url, &folder);
    drop(shared);
    let folder = folder.to_str().unwrap();
    let alone = work.path().join("alone");
    ask("stream", &alone, &["--hub", folder, "--offline"]);
    // Taken over, the folder itself is no longer needed.
    let taken = work.path().join("taken");
    let to = taken.to_str().unwrap();
    let args = ["cache", "import", folder, "--model", MODEL, "--home", to];
    let run = deltafin(&[&args[..], &["--reserve", "0", "--json"]].concat());
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(
        json(&run)["shards"]["whole"],
        crate::SHARDS,
        "{}",
        run.stdout
    );
    std::fs::remove_dir_all(folder).unwrap();
    ask("run", &taken, &[]);
}
