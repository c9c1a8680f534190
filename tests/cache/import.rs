//! `cache import`: other programs' downloads, in all the shapes in which they lie about.

use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use sha2::Digest as _;
use sha2::Sha256;
use tempfile::TempDir;

use crate::EXPERTS;
use crate::FOLDER;
use crate::MODEL;
use crate::SHARDS;
use crate::WHO;
use crate::assert_sound;
use crate::cache;
use crate::copy;
use crate::fetch;
use crate::golden;
use crate::ids;
use crate::model_folder;
use crate::program;
use crate::program::Run;
use crate::program::deltafin;
use crate::program::json;

const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

fn import(folder: &Path, home: &Path, more: &[&str]) -> Run {
    let mut args = vec!["import", folder.to_str().unwrap(), "--reserve", "0"];
    args.extend(more);
    cache(&args, home)
}

fn hex(bytes: &[u8]) -> String {
    let sum: [u8; 32] = Sha256::digest(bytes).into();
    sum.iter().map(|b| format!("{b:02x}")).collect()
}

fn sources() -> Vec<PathBuf> {
    program::files(Path::new(FOLDER))
}

/// A cache as Hugging Face's programs keep it; `change` may spoil a blob, whose name says what it
/// should be.
fn hf_cache(change: impl Fn(&str, &mut Vec<u8>)) -> TempDir {
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--deltafin--austen-k3");
    let snapshot = model.join("snapshots").join(COMMIT);
    for folder in [&snapshot, &model.join("blobs"), &model.join("refs")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(model.join("refs/main"), COMMIT).unwrap();
    for file in sources() {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        let mut bytes = std::fs::read(&file).unwrap();
        // Small files are named after git objects, which nobody has to prove.
        let blob = match name.ends_with(".safetensors") {
            true => hex(&bytes),
            false => format!("{name}.blob"),
        };
        change(&name, &mut bytes);
        std::fs::write(model.join("blobs").join(&blob), bytes).unwrap();
        let link = Path::new("../../blobs").join(blob);
        std::os::unix::fs::symlink(link, snapshot.join(name)).unwrap();
    }
    cache
}

fn runs_as_trained(home: &Path, model: &str) {
    let mut args = vec![
        "run",
        "--model",
        model,
        "--home",
        home.to_str().unwrap(),
        "--json",
    ];
    args.extend(WHO);
    let run = deltafin(&args);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(ids(&json(&run)), golden());
}

#[test]
fn a_cache_a_models_folder_in_it_and_a_snapshot_are_taken_over_and_proved() {
    let hf = hf_cache(|_, _| {});
    let model = hf.path().join("models--deltafin--austen-k3");
    let snapshot = model.join("snapshots").join(COMMIT);
    for folder in [hf.path(), &model, &snapshot] {
        let home = tempfile::tempdir().unwrap();
        let run = import(folder, home.path(), &[]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let report = json(&run);
        assert_eq!(report["model"], MODEL);
        assert_eq!(report["revision"], COMMIT);
        assert_eq!(report["experts"]["copied"], EXPERTS);
        assert_eq!(report["shards"]["whole"], SHARDS, "{report}");
        let stats = json(&cache(&["stats"], home.path()));
        assert_eq!(
            stats["models"][0]["levels"]["whole_shard"], EXPERTS,
            "{stats}"
        );
        runs_as_trained(home.path(), MODEL);
    }
}

#[test]
fn an_import_needs_no_network_and_asks_for_none() {
    let hf = hf_cache(|_, _| {});
    let (folder, home) = (hf.path(), tempfile::tempdir().unwrap());
    let args = [
        "cache",
        "import",
        folder.to_str().unwrap(),
        "--reserve",
        "0",
        "--home",
        home.path().to_str().unwrap(),
        "--json",
    ];
    if let Some(sockets) = program::sockets(&args) {
        assert_eq!(sockets, Vec::<String>::new());
    } else if let Some(run) = program::without_network(&args) {
        assert_eq!(run.code, 0, "{}", run.stderr);
    } else {
        println!("skipped: neither strace nor a network of its own is to be had here");
    }
}

#[test]
fn a_plain_folder_speaks_for_itself_and_is_believed_at_first_use() {
    let home = tempfile::tempdir().unwrap();
    let run = import(Path::new(FOLDER), home.path(), &["--dry-run"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["experts"]["missing"], EXPERTS);
    assert_eq!(
        program::expert_bytes(home.path()),
        0,
        "a dry run copies none"
    );
    let run = import(Path::new(FOLDER), home.path(), &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["model"], "local/model");
    assert_eq!(report["shards"]["unpublished"], SHARDS);
    runs_as_trained(home.path(), "local/model");
    let again = json(&import(Path::new(FOLDER), home.path(), &[]));
    assert_eq!(again["experts"]["missing"], 0, "{again}");
    assert_eq!(again["experts"]["copied"], 0, "{again}");
}

/// What `hf download --local-dir` leaves beside the files.
fn note(folder: &Path, commit: impl Fn(&str) -> String) {
    let notes = folder.join(".cache/huggingface/download");
    std::fs::create_dir_all(&notes).unwrap();
    let shards = sources().into_iter();
    for file in shards.filter(|file| file.extension().is_some_and(|e| e == "safetensors")) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let tag = hex(&std::fs::read(&file).unwrap());
        let text = format!("{}\n{tag}\n1764547200.25\n", commit(name));
        std::fs::write(notes.join(format!("{name}.metadata")), text).unwrap();
    }
}

#[test]
fn a_downloads_notes_name_its_commit_and_prove_its_shards() {
    let folder = tempfile::tempdir().unwrap();
    copy(Path::new(FOLDER), folder.path());
    note(folder.path(), |_| COMMIT.to_owned());
    let home = tempfile::tempdir().unwrap();
    let run = import(folder.path(), home.path(), &["--model", MODEL]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["revision"], COMMIT);
    assert_eq!(report["shards"]["whole"], SHARDS, "{report}");
    runs_as_trained(home.path(), MODEL);
    // Notes of two commits are notes of none.
    note(folder.path(), |name| match name.contains("00003") {
        true => COMMIT.replace('8', "7"),
        false => COMMIT.to_owned(),
    });
    let home = tempfile::tempdir().unwrap();
    let report = json(&import(folder.path(), home.path(), &["--model", MODEL]));
    assert_ne!(report["revision"], COMMIT);
    assert_eq!(report["shards"]["unpublished"], SHARDS, "{report}");
}

#[test]
fn a_shard_that_is_not_what_it_should_be_leaves_nothing_behind_and_a_sound_one_takes_its_place() {
    let spoil = |name: &str, bytes: &mut Vec<u8>| {
        if name.contains("00004") {
            let last = bytes.len() - 100;
            bytes[last] ^= 1;
        }
    };
    let (rotten, sound) = (hf_cache(spoil), hf_cache(|_, _| {}));
    type Bring = fn(&Path, &Path) -> Run;
    let imported: Bring = |from, home| import(from, home, &[]);
    let fetched: Bring = |from, home| fetch(home, from);
    // Where a report says how many files were removed, and how many experts came.
    let ways = [
        (imported, "/discarded", "/experts/copied"),
        (fetched, "/shards/discarded", "/experts/fetched"),
    ];
    for (bring, discarded, came) in ways {
        let home = tempfile::tempdir().unwrap();
        let run = bring(rotten.path(), home.path());
        assert_eq!(run.code, 6, "{}", run.stderr);
        assert!(run.stderr.contains("00004"), "{}", run.stderr);
        let report = json(&run);
        assert_eq!(report["shards"]["whole"], SHARDS - 1, "{report}");
        assert_eq!(report["shards"]["different"].as_array().unwrap().len(), 1);
        assert!(
            report.pointer(discarded).unwrap().as_u64() > Some(1),
            "{report}"
        );
        let stats = json(&cache(&["stats"], home.path()));
        let held = stats["models"][0]["experts"].as_u64().unwrap();
        assert!(held < EXPERTS, "{stats}");
        let run = bring(sound.path(), home.path());
        assert_eq!(run.code, 0, "{}", run.stderr);
        let report = json(&run);
        assert_eq!(
            report.pointer(came).unwrap(),
            EXPERTS - held,
            "the rest was sound"
        );
        assert_eq!(report["shards"]["whole"], SHARDS, "{report}");
        runs_as_trained(home.path(), MODEL);
    }
}

#[test]
fn an_import_that_is_killed_goes_on_and_what_is_gone_comes_again() {
    let home = tempfile::tempdir().unwrap();
    for wait in [5, 20, 40, 60, 80] {
        let mut command = program::command();
        command.args([
            "cache",
            "import",
            FOLDER,
            "--reserve",
            "0",
            "--model",
            MODEL,
        ]);
        command.arg("--home").arg(home.path());
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        let _ = child.kill();
        child.wait().unwrap();
    }
    let run = import(Path::new(FOLDER), home.path(), &["--model", MODEL]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_sound(home.path(), "killed");
    let experts = model_folder(home.path()).join("experts");
    std::fs::remove_dir_all(experts.join("002")).unwrap();
    std::fs::remove_file(model_folder(home.path()).join("core/001")).unwrap();
    let report = json(&import(Path::new(FOLDER), home.path(), &["--model", MODEL]));
    let gone = report["experts"]["missing"].as_u64().unwrap();
    assert!(gone > 0 && gone < EXPERTS, "{report}");
    assert_eq!(report["experts"]["copied"], gone, "no more than was gone");
    assert_sound(home.path(), "brought again");
}

#[test]
fn what_cannot_be_taken_over_is_told_with_the_reason_and_nothing_is_written() {
    let told = |run: &Run, code: i32, words: &[&str]| {
        assert_eq!(run.code, code, "{}", run.stderr);
        for word in words {
            assert!(
                run.stderr.contains(word),
                "`{word}` is not in: {}",
                run.stderr
            );
        }
        assert!(run.stderr.contains("hint: "), "{}", run.stderr);
    };
    let home = tempfile::tempdir().unwrap();
    let none = |home: &Path| assert_eq!(program::expert_bytes(home), 0);
    let partial = tempfile::tempdir().unwrap();
    copy(Path::new(FOLDER), partial.path());
    for shard in [2, 5] {
        let name = format!("model-{shard:05}-of-000009.safetensors");
        std::fs::remove_file(partial.path().join(name)).unwrap();
    }
    let run = import(partial.path(), home.path(), &[]);
    told(
        &run,
        3,
        &["2 of 9 shards", "model-00002-of-000009", "download"],
    );
    none(home.path());
    let cut = tempfile::tempdir().unwrap();
    copy(Path::new(FOLDER), cut.path());
    let shard = cut.path().join("model-00005-of-000009.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    told(&import(cut.path(), home.path(), &[]), 6, &["model-00005"]);
    none(home.path());
    let run = import(&partial.path().join(".."), home.path(), &[]);
    told(&run, 3, &["neither", "Hugging Face cache"]);
    let hf = hf_cache(|_, _| {});
    let run = import(hf.path(), home.path(), &["--revision", "dev"]);
    told(&run, 3, &["`dev`", "--revision"]);
    let other = hf.path().join("models--org--other/snapshots");
    std::fs::create_dir_all(other).unwrap();
    told(
        &import(hf.path(), home.path(), &[]),
        2,
        &["org/other", "--model"],
    );
    let home = home.path().to_str().unwrap();
    let run = deltafin(&[
        "cache",
        "import",
        FOLDER,
        "--home",
        home,
        "--reserve",
        "900TB",
    ]);
    told(
        &run,
        5,
        &["4.4 MB", "to be copied", "900.0 TB are reserved", "--cache"],
    );
    none(Path::new(home));
    let run = deltafin(&["cache", "import", "/nowhere/at/all", "--home", home]);
    told(&run, 3, &["/nowhere/at/all"]);
}

#[test]
fn a_shape_that_scatters_its_experts_is_taken_over_as_well() {
    let home = tempfile::tempdir().unwrap();
    let folder = Path::new("fixtures/tiny-k3-scattered");
    let run = import(folder, home.path(), &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report: Value = json(&run);
    assert_eq!(
        report["experts"]["copied"], report["experts"]["missing"],
        "{report}"
    );
    assert_eq!(cache(&["verify"], home.path()).code, 0);
}
