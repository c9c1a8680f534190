//! `deltafin cache`, and what becomes of damage: the real binary on real folders.

#![allow(
    clippy::unwrap_used,
    clippy::too_many_lines,
    unreachable_pub,
    reason = "a test fails by panicking, and its tables are long"
)]

#[path = "cache/damage.rs"]
mod damage;
#[path = "cache/full.rs"]
mod full;
#[path = "cache/import.rs"]
mod import;
#[path = "cache/manifest.rs"]
mod manifest;
mod program;
#[path = "cache/scrub.rs"]
mod scrub;
#[path = "cache/stats.rs"]
mod stats;
#[path = "cache/ways.rs"]
mod ways;

use std::path::Path;
use std::path::PathBuf;
use std::sync::OnceLock;

use program::Run;
use program::deltafin;
use program::json;
use serde_json::Value;
use tempfile::TempDir;

const MODEL: &str = "deltafin/austen-k3";
const FOLDER: &str = "fixtures/austen-k3/model";
const EXPERT: u64 = 9_792;
const EXPERTS: u64 = 448;
const SHARDS: u64 = 9;

/// The prompt of golden case `chat_who`, whose ids the goldens hold.
const WHO: [&str; 5] = [
    "Who are you?",
    "--reasoning-effort",
    "max",
    "--max-tokens",
    "12",
];

fn golden() -> Vec<i64> {
    let file = "fixtures/austen-k3/goldens/chat_who.safetensors";
    let mut ids = program::i32s(&std::fs::read(file).unwrap(), "greedy_ids");
    ids.truncate(12);
    ids
}

fn ids(report: &Value) -> Vec<i64> {
    let ids = report["token_ids"].as_array().unwrap().iter();
    ids.map(|id| id.as_i64().unwrap()).collect()
}

/// Runs a command on the small model with a home and a folder as hub, and nothing else.
fn with(what: &str, home: &Path, hub: &Path, more: &[&str]) -> Run {
    let (home, hub) = (home.to_str().unwrap(), hub.to_str().unwrap());
    let mut args = vec![what, "--model", MODEL, "--hub", hub, "--offline"];
    args.extend(["--home", home, "--reserve", "0", "--cache", "unlimited"]);
    args.push("--json");
    args.extend(more);
    deltafin(&args)
}

fn fetch(home: &Path, hub: &Path) -> Run {
    with("fetch", home, hub, &[])
}

fn cache(what: &[&str], home: &Path) -> Run {
    let mut args = vec!["cache"];
    args.extend(what);
    args.extend(["--home", home.to_str().unwrap(), "--json"]);
    deltafin(&args)
}

/// A store with all of the small model, made once.
fn filled() -> &'static Path {
    static FILLED: OnceLock<TempDir> = OnceLock::new();
    let home = FILLED.get_or_init(|| {
        let home = tempfile::tempdir().unwrap();
        let run = fetch(home.path(), Path::new(FOLDER));
        assert_eq!(run.code, 0, "{}", run.stderr);
        home
    });
    home.path()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// A copy of [`filled`] to do with as one likes.
fn home() -> TempDir {
    let home = tempfile::tempdir().unwrap();
    copy(filled(), home.path());
    home
}

/// The one commit's folder of a home.
fn model_folder(home: &Path) -> PathBuf {
    let models = home.join("models-v1").join(MODEL.replace('/', "--"));
    let mut commits = std::fs::read_dir(models).unwrap();
    commits.next().unwrap().unwrap().path()
}

/// The experts' files of a home, by layer, then expert.
fn expert_files(home: &Path) -> Vec<PathBuf> {
    let mut files = program::files(&model_folder(home).join("experts"));
    files.sort();
    files
}

fn assert_sound(home: &Path, what: &str) {
    let run = cache(&["verify"], home);
    assert_eq!(run.code, 0, "{what}: {}", run.stderr);
    let report = json(&run);
    assert_eq!(
        report["models"][0]["damaged"],
        serde_json::json!([]),
        "{what}"
    );
    for file in program::files(&model_folder(filled())) {
        let local = file.strip_prefix(filled()).unwrap();
        let kept = ["experts", "core", "meta", "headers"];
        if local.iter().any(|part| kept.iter().any(|k| part == *k)) {
            let same = std::fs::read(home.join(local)).unwrap() == std::fs::read(&file).unwrap();
            assert!(same, "{what}: {}", local.display());
        }
    }
}
