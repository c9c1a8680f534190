//! A disk that is really full: a small file system of its own.

use std::path::Path;

use crate::EXPERT;
use crate::FOLDER;
use crate::WHO;
use crate::cache;
use crate::golden;
use crate::ids;
use crate::program;
use crate::program::json;
use crate::with;

/// Experts there is room for beside the core: far fewer than the answer needs.
const ROOM: u64 = 60;

/// What lies under `experts/`: whole experts, and anything else.
fn experts(home: &Path) -> (u64, Vec<std::path::PathBuf>) {
    let mut whole = 0;
    let mut other = Vec::new();
    for file in program::files(home) {
        let mut parts = file.components().rev().map(|part| part.as_os_str());
        let digits = |part: &std::ffi::OsStr, n| {
            let text = part.to_str().unwrap();
            text.len() == n && text.bytes().all(|b| b.is_ascii_digit())
        };
        let named = parts.next().is_some_and(|name| digits(name, 4))
            && parts.next().is_some_and(|layer| digits(layer, 3))
            && parts.next().is_some_and(|above| above == "experts");
        if named && program::len(&file) == EXPERT {
            whole += 1;
        } else if file.components().any(|part| part.as_os_str() == "experts") {
            other.push(file);
        }
    }
    (whole, other)
}

#[test]
fn a_disk_that_fills_up_is_told_once_and_the_answer_is_finished_from_memory() {
    let folder = tempfile::tempdir().unwrap();
    let roomy = tempfile::tempdir().unwrap();
    let core = with("fetch", roomy.path(), Path::new(FOLDER), &["--core"]);
    assert_eq!(core.code, 0, "{}", core.stderr);
    let pages = |file: &std::path::PathBuf| program::len(file).next_multiple_of(4096);
    let core: u64 = program::files(roomy.path()).iter().map(pages).sum();
    let size = core + ROOM * EXPERT.next_multiple_of(4096) + (64 << 10);
    let Some(_mount) = program::small_disk(folder.path(), &format!("{}k", size >> 10)) else {
        println!("skipped: a small file system cannot be mounted here");
        return;
    };
    let home = folder.path().join("home");
    let mut kept = 0;
    // The second run finds the disk as full as the first has left it. Some of what was there may have
    // made room for others since; nothing else may be missing.
    for round in 0..2 {
        let run = with("stream", &home, Path::new(FOLDER), &WHO);
        assert_eq!(run.code, 0, "round {round}: {}", run.stderr);
        let report = json(&run);
        assert_eq!(ids(&report), golden(), "round {round}");
        let needed = report["experts"]["disk"].as_u64().unwrap()
            + report["experts"]["hub"].as_u64().unwrap();
        assert!(needed > 2 * ROOM, "{needed} experts fill no disk");
        let said = run.stderr.matches("the disk is full").count();
        assert_eq!(said, 1, "round {round}: {}", run.stderr);
        let (whole, other) = experts(&home);
        assert_eq!(other, Vec::<std::path::PathBuf>::new(), "round {round}");
        assert!(whole >= ROOM / 2, "round {round}: {whole} experts kept");
        kept = whole;
        let verified = cache(&["verify"], &home);
        assert_eq!(verified.code, 0, "round {round}: {}", verified.stderr);
    }
    // With room again, what is missing is kept as if nothing had been.
    let grown = std::process::Command::new("mount")
        .args(["-o", "remount,size=64m"])
        .arg(folder.path())
        .status();
    assert!(grown.unwrap().success());
    let run = with("stream", &home, Path::new(FOLDER), &WHO);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(ids(&json(&run)), golden());
    assert!(!run.stderr.contains("the disk is full"), "{}", run.stderr);
    let (whole, other) = experts(&home);
    assert!(whole > kept, "{whole} after {kept}");
    assert!(other.is_empty(), "{other:?}");
    assert_eq!(cache(&["verify"], &home).code, 0);
}
