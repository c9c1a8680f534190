//! `cache manifest`: written from one store, held against others.

use std::path::Path;

use deltafin::store::Manifest;
use deltafin::store::ManifestError;
use serde_json::Value;
use tempfile::TempDir;

use crate::EXPERTS;
use crate::FOLDER;
use crate::MODEL;
use crate::WHO;
use crate::assert_sound;
use crate::cache;
use crate::copy;
use crate::expert_files;
use crate::fetch;
use crate::filled;
use crate::home;
use crate::program::Run;
use crate::program::deltafin;
use crate::program::json;
use crate::with;

fn write(home: &Path, file: &Path) -> Run {
    let file = file.to_str().unwrap();
    cache(&["manifest", "--write", file, "--model", MODEL], home)
}

fn check(home: &Path, file: &Path) -> Run {
    cache(&["manifest", "--check", file.to_str().unwrap()], home)
}

/// The manifest of [`filled`], in a folder of its own.
fn written() -> (TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("experts.manifest");
    let run = write(filled(), &file);
    assert_eq!(run.code, 0, "{}", run.stderr);
    (folder, file)
}

fn levels(home: &Path) -> Value {
    json(&cache(&["stats"], home))["models"][0]["levels"].clone()
}

#[test]
fn a_manifest_is_32_bytes_an_expert_and_proves_a_store() {
    let (_folder, file) = written();
    let bytes = std::fs::read(&file).unwrap();
    let manifest = Manifest::decode(&bytes).unwrap();
    assert_eq!(manifest.len() as u64, EXPERTS);
    assert_eq!(manifest.encode().unwrap(), bytes);
    let head = bytes.len() as u64 - 32 * (EXPERTS + 1);
    assert!(head < 500, "{head} bytes of head");
    let home = home();
    let run = check(home.path(), &file);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["proved"], EXPERTS, "{report}");
    assert_eq!(
        (&report["absent"], &report["removed"]),
        (&Value::from(0), &Value::from(Vec::<Value>::new()))
    );
    assert_eq!(levels(home.path())["manifest"], EXPERTS);
    let verified = json(&cache(&["verify"], home.path()));
    assert_eq!(verified["models"][0]["manifest"], EXPERTS);
    // What a proved store writes says how well it is proved, and is otherwise the same.
    let again = file.with_extension("again");
    let run = write(home.path(), &again);
    assert_eq!(json(&run)["level"], "manifest");
    let again = Manifest::decode(&std::fs::read(again).unwrap()).unwrap();
    assert_eq!(again.digests(), manifest.digests());
}

#[test]
fn a_store_that_holds_some_experts_is_proved_as_far_as_it_goes_and_lists_none() {
    let (folder, file) = written();
    let home = tempfile::tempdir().unwrap();
    let run = with("stream", home.path(), Path::new(FOLDER), &WHO);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let here = expert_files(home.path()).len() as u64;
    let run = check(home.path(), &file);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["proved"], here, "{report}");
    assert_eq!(report["absent"], EXPERTS - here, "{report}");
    let run = write(home.path(), &folder.path().join("none"));
    assert_eq!(run.code, 3, "{}", run.stderr);
    let words = format!(
        "{} of {EXPERTS} experts have never been here",
        EXPERTS - here
    );
    assert!(run.stderr.contains(&words), "{}", run.stderr);
    assert!(!folder.path().join("none").exists());
}

#[test]
fn a_wrong_first_arrival_is_removed_and_the_right_one_takes_its_place() {
    let (_folder, file) = written();
    // The commit of a plain folder tells of headers, not of contents.
    let wrong = tempfile::tempdir().unwrap();
    copy(Path::new(FOLDER), wrong.path());
    let shard = wrong.path().join("model-00004-of-000009.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let home = tempfile::tempdir().unwrap();
    assert_eq!(fetch(home.path(), wrong.path()).code, 0);
    let run = check(home.path(), &file);
    assert_eq!(run.code, 6, "{}", run.stderr);
    let report = json(&run);
    assert_eq!(report["removed"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!(report["proved"], EXPERTS - 1, "{report}");
    let removed = report["removed"][0]["file"].as_str().unwrap();
    assert!(run.stderr.contains(removed), "{}", run.stderr);
    assert!(!Path::new(removed).exists());
    let again = fetch(home.path(), wrong.path());
    assert_eq!(
        again.code, 5,
        "the wrong bytes are not kept again: {}",
        again.stderr
    );
    assert!(!Path::new(removed).exists());
    let right = fetch(home.path(), Path::new(FOLDER));
    assert_eq!(right.code, 0, "{}", right.stderr);
    assert_sound(home.path(), "made good");
    assert_eq!(
        levels(home.path())["manifest"],
        EXPERTS,
        "proved when it arrived"
    );
}

#[test]
fn what_has_rotted_is_found_by_a_manifest_as_well() {
    let (_folder, file) = written();
    let home = home();
    let files = expert_files(home.path());
    std::fs::write(&files[7], b"short").unwrap();
    let mut bytes = std::fs::read(&files[100]).unwrap();
    bytes[5000] ^= 0x80;
    std::fs::write(&files[100], bytes).unwrap();
    let run = check(home.path(), &file);
    assert_eq!(run.code, 6, "{}", run.stderr);
    let report = json(&run);
    let removed = report["removed"].as_array().unwrap().iter();
    let removed: Vec<&str> = removed.map(|r| r["file"].as_str().unwrap()).collect();
    assert_eq!(
        removed,
        [files[7].to_str().unwrap(), files[100].to_str().unwrap()]
    );
    assert_eq!(fetch(home.path(), Path::new(FOLDER)).code, 0);
    assert_sound(home.path(), "fetched again");
}

#[test]
fn a_damaged_or_foreign_manifest_removes_nothing() {
    let (folder, file) = written();
    let sound = std::fs::read(&file).unwrap();
    let head = sound.len() - 32 * (EXPERTS as usize + 1);
    for at in (0..head).chain((head..sound.len()).step_by(97)) {
        let mut rotten = sound.clone();
        rotten[at] ^= 0x20;
        let refused = Manifest::decode(&rotten);
        assert!(refused.is_err(), "a flip at {at} is not seen");
        assert!(Manifest::decode(&sound[..at]).is_err(), "cut at {at}");
    }
    let later = [b"deltafin manifest 2\n".as_slice(), &sound[20..]].concat();
    assert_eq!(
        Manifest::decode(&later),
        Err(ManifestError::Version("2".to_owned()))
    );
    assert_eq!(Manifest::decode(b"{}"), Err(ManifestError::NotOne));
    let home = home();
    let before = expert_files(home.path());
    for rotten in [sound[..sound.len() - 32].to_vec(), later, b"{}".to_vec()] {
        let file = folder.path().join("rotten");
        std::fs::write(&file, rotten).unwrap();
        let run = check(home.path(), &file);
        assert_eq!(run.code, 6, "{}", run.stderr);
        assert!(run.stderr.contains("rotten"), "{}", run.stderr);
    }
    // One for a model that is not here.
    let tiny = tempfile::tempdir().unwrap();
    let tiny_home = tiny.path().to_str().unwrap();
    let run = deltafin(&[
        "cache",
        "import",
        "fixtures/tiny-k3",
        "--home",
        tiny_home,
        "--reserve",
        "0",
    ]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let other = folder.path().join("tiny");
    let other = other.to_str().unwrap();
    let run = cache(
        &["manifest", "--write", other, "--model", "local/tiny-k3"],
        tiny.path(),
    );
    assert_eq!(run.code, 0, "{}", run.stderr);
    let run = check(home.path(), Path::new(other));
    assert_eq!(run.code, 3, "{}", run.stderr);
    let run = check(home.path(), Path::new("/nowhere/at/all"));
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert_eq!(expert_files(home.path()), before);
    let run = deltafin(&["cache", "manifest"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
}
