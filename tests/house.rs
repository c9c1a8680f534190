//! The house rules, checked. Each rule names the harm it prevents.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// Rooms from the ground up. A room may name rooms before it, never after.
const ORDER: &[&str] = &[
    "terms",
    "kernel",
    "checkpoint",
    "hub",
    "store",
    "text",
    "model",
    "residency",
    "engine",
    "jobs",
    "share",
    "server",
    "cli",
];

/// Neighbours that are in order and still must not meet.
const APART: &[(&str, &str)] = &[
    ("store", "hub"),     // a disk must be testable without a network
    ("text", "kernel"),   // words know nothing of arithmetic
    ("model", "hub"),     // the forward pass sees slices, not sockets,
    ("model", "store"),   // not files,
    ("model", "text"),    // and not words
    ("server", "kernel"), // HTTP must not learn about tensors
    ("server", "model"),
    ("server", "store"),
    ("server", "residency"),
];

/// Words and the rooms that may say them: (word, rooms, the harm elsewhere).
const HOMES: &[(&str, &[&str], &str)] = &[
    (
        "env::var",
        &["cli"],
        "a library that reads the environment cannot be tested in parallel",
    ),
    (
        "println!",
        &["cli"],
        "output has one owner, so --quiet and pipes work",
    ),
    (
        "arch::x86_64",
        &["kernel"],
        "intrinsics stay beside their scalar twin",
    ),
    (
        "tokio::",
        &["hub", "share", "server", "cli"],
        "async stays at the edges",
    ),
    (
        "crate::{",
        &[],
        "one path per line, so this test can read them",
    ),
    ("super::super", &[], "a way around the order"),
];

/// Words that a room's tests may say: they are read and run by hand, one after another if need be.
const TESTS_MAY: &[&str] = &["env::var", "println!"];

const FILE_LINES_MAX: usize = 600;

#[test]
fn rooms_face_downwards() {
    for file in sources() {
        let room = room_of(&file.path);
        for (n, line) in file.text.lines().enumerate() {
            for used in crate_paths(line) {
                let at = format!("{}:{}", file.path.display(), n + 1);
                let rank = |r: &str| ORDER.iter().position(|o| *o == r);
                let from = rank(&room).unwrap_or_else(|| panic!("{at}: no room `{room}` in ORDER"));
                let to = rank(used).unwrap_or_else(|| panic!("{at}: no room `{used}` in ORDER"));
                assert!(to <= from, "{at}: `{room}` may not look up to `{used}`");
                assert!(
                    !APART.contains(&(room.as_str(), used)),
                    "{at}: `{room}` may not meet `{used}`"
                );
            }
        }
    }
}

#[test]
fn files_stay_readable_in_one_sitting() {
    for file in sources() {
        let lines = file.text.lines().count();
        assert!(
            lines <= FILE_LINES_MAX,
            "{}: {lines} lines; split it",
            file.path.display()
        );
    }
}

#[test]
fn words_stay_home() {
    for file in sources() {
        for (word, home, why) in HOMES {
            let found = file
                .text
                .lines()
                .any(|l| !l.trim_start().starts_with("//") && l.contains(word));
            let tests = file.path.iter().any(|p| p == "tests") && TESTS_MAY.contains(word);
            let home = tests || home.contains(&room_of(&file.path).as_str());
            assert!(!found || home, "{}: `{word}`: {why}", file.path.display());
        }
    }
}

struct Source {
    path: PathBuf,
    text: String,
}

fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(Source {
                    text: fs::read_to_string(&path).unwrap(),
                    path,
                });
            }
        }
    }
    assert!(
        !found.is_empty(),
        "no sources: the rules would pass by seeing nothing"
    );
    found
}

/// `src/cache/index.rs` and `src/cache.rs` are both the room `cache`.
fn room_of(path: &Path) -> String {
    if path.ends_with("src/lib.rs") || path.ends_with("src/main.rs") {
        return "cli".to_owned(); // the map and the door may name every room
    }
    let inside = path
        .strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
        .unwrap();
    inside
        .iter()
        .next()
        .unwrap()
        .to_str()
        .unwrap()
        .trim_end_matches(".rs")
        .to_owned()
}

fn crate_paths(line: &str) -> impl Iterator<Item = &str> {
    line.split("crate::").skip(1).map(|rest| {
        let end = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        &rest[..end]
    })
}
