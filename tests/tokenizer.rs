//! Token ids against the reference implementation of the rank file's format.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "the helpers of a test are a test"
)]

use std::env;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use deltafin::terms::TokenId;
use deltafin::text::Piece;
use deltafin::text::Tokenizer;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<TokenId>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn austen() -> Tokenizer {
    let file = |name| fs::read(root().join("fixtures/austen-k3/model").join(name)).unwrap();
    Tokenizer::new(&file("tiktoken.model"), &file("tokenizer_config.json")).unwrap()
}

/// Runs the reference; gives the folder of its answers. In CI the environment for it is made, and
/// not being able to is a failure; elsewhere only one that is there is used.
fn reference(folder: &str, options: &[&str]) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (venv, out) = (here.join("tokenizer-venv"), here.join(folder));
    let ci = env::var_os("CI").is_some();
    let run = Command::new("python3")
        .arg(root().join("scripts/tokenizer_parity.py"))
        .arg("--venv")
        .arg(&venv)
        .arg("--out")
        .arg(&out)
        .args(options)
        .args(ci.then_some("--install"))
        .status();
    if run.as_ref().is_ok_and(std::process::ExitStatus::success) {
        return Some(out);
    }
    let missing = match &run {
        Ok(status) => status.code() == Some(3),
        Err(_) => true,
    };
    assert!(missing && !ci, "tokenizer_parity.py failed: {run:?}");
    eprintln!(
        "SKIPPED: no tiktoken to compare with. Make it once: \
         python3 scripts/tokenizer_parity.py --install --venv {} --out {}",
        venv.display(),
        out.display()
    );
    None
}

fn compare(name: &str, tokenizer: &Tokenizer, folder: &Path, cases_min: usize) {
    let cases = fs::read_to_string(folder.join(name).with_extension("jsonl")).unwrap();
    let mut count = 0;
    for line in cases.lines() {
        let Case { text, ids } = serde_json::from_str(line).unwrap();
        let ours = tokenizer.encode(&text);
        if ours != ids {
            let at = ours.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            let before: String = String::from_utf8_lossy(&tokenizer.decode(&ids[..at])).into();
            let tail = before.chars().rev().take(30).collect::<Vec<_>>();
            let tail: String = tail.into_iter().rev().collect();
            panic!(
                "{name}, string {count}: after {tail:?} ours are {:?}, tiktoken's {:?}",
                &ours[at..ours.len().min(at + 8)],
                &ids[at..ids.len().min(at + 8)]
            );
        }
        assert_eq!(
            tokenizer.decode(&ids),
            text.as_bytes(),
            "{name}, string {count}"
        );
        count += 1;
    }
    assert!(count >= cases_min, "{name}: only {count} strings compared");
}

fn made(folder: &Path) -> Tokenizer {
    Tokenizer::new(&fs::read(folder.join("made.model")).unwrap(), b"{}").unwrap()
}

#[test]
fn ids_are_those_of_tiktoken_on_twenty_thousand_strings() {
    let Some(folder) = reference("tokenizer-parity", &[]) else {
        return;
    };
    compare("austen", &austen(), &folder, 20_000);
    compare("made", &made(&folder), &folder, 20_000);
}

#[test]
#[ignore = "a minute: every character of Unicode; run with --ignored"]
fn ids_are_those_of_tiktoken_for_every_character_of_unicode() {
    let Some(folder) = reference("tokenizer-characters", &["--all-characters"]) else {
        return;
    };
    compare("austen", &austen(), &folder, 8_000);
}

#[test]
#[ignore = "needs the real vocabulary: DELTAFIN_K3_TOKENIZER=folder of tiktoken.model and tokenizer_config.json"]
fn known_texts_have_known_ids_in_the_vocabulary_of_k3() {
    #[derive(Deserialize)]
    struct Golden {
        cases: Vec<Known>,
    }
    #[derive(Deserialize)]
    struct Known {
        markup: bool,
        text: String,
        ids: Vec<TokenId>,
    }
    let folder = PathBuf::from(env::var_os("DELTAFIN_K3_TOKENIZER").unwrap());
    let file = |name: &str| fs::read(folder.join(name)).unwrap();
    let tokenizer =
        Tokenizer::new(&file("tiktoken.model"), &file("tokenizer_config.json")).unwrap();
    let golden = fs::read(root().join("fixtures/goldens/tokenizer.json")).unwrap();
    let golden: Golden = serde_json::from_slice(&golden).unwrap();
    assert!(golden.cases.len() >= 13);
    for Known { markup, text, ids } in golden.cases {
        let piece = Piece { text, markup };
        let ours = tokenizer.encode_pieces(std::slice::from_ref(&piece));
        assert_eq!(ours, ids, "{piece:?}");
    }
}
