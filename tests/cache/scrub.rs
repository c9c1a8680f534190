//! The scrub of `serve` and `share`: what has rotted is found while nobody asks for anything.

use std::io::BufRead as _;
use std::io::BufReader;
use std::path::Path;
use std::process::Child;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use crate::EXPERT;
use crate::FOLDER;
use crate::MODEL;
use crate::expert_files;
use crate::home;
use crate::program;

/// Far more than the few steps it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ended with the test.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program and gives its lines on stderr as they come.
pub(crate) fn start(args: &[&str]) -> (Running, mpsc::Receiver<String>) {
    let mut command = program::command();
    command
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    (Running(child), receiver)
}

/// Three experts are left of the store, and one of them has lost a bit.
fn one_of_three_rots() -> (tempfile::TempDir, std::path::PathBuf) {
    let home = home();
    let files = expert_files(home.path());
    let (kept, gone) = files.split_at(3);
    gone.iter()
        .for_each(|file| std::fs::remove_file(file).unwrap());
    let mut bytes = std::fs::read(&kept[1]).unwrap();
    assert_eq!(bytes.len() as u64, EXPERT);
    bytes[100] ^= 0x10;
    std::fs::write(&kept[1], bytes).unwrap();
    let rotten = kept[1].clone();
    (home, rotten)
}

pub(crate) fn told(lines: &mpsc::Receiver<String>, what: &str) -> String {
    let mut seen = Vec::new();
    loop {
        let line = lines.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|e| panic!("{what}: {e}; so far {seen:#?}"));
        if line.contains(what) {
            return line;
        }
        seen.push(line);
    }
}

fn finds_it(home: &Path, rotten: &Path, args: &[&str]) {
    let sound: Vec<_> = expert_files(home)
        .into_iter()
        .filter(|f| f != rotten)
        .collect();
    let home = home.to_str().unwrap();
    let mut all = vec![args[0], "--home", home, "--model", MODEL, "--port", "0"];
    all.extend(["--reserve", "0", "--scrub", "1s"]);
    all.extend(&args[1..]);
    let (running, lines) = start(&all);
    let line = told(&lines, "damaged on disk");
    assert!(line.contains("layer") && line.contains("sha256"), "{line}");
    assert!(!rotten.exists(), "{line}");
    assert!(sound.iter().all(|file| file.exists()), "{line}");
    drop(running);
}

#[test]
fn a_server_that_nobody_asks_finds_what_has_rotted() {
    let (home, rotten) = one_of_three_rots();
    let hub = ["serve", "--hub", FOLDER, "--offline", "--threads", "1"];
    finds_it(home.path(), &rotten, &hub);
}

#[test]
fn a_share_that_nobody_asks_finds_what_has_rotted() {
    let (home, rotten) = one_of_three_rots();
    finds_it(home.path(), &rotten, &["share"]);
}

#[test]
fn a_share_told_not_to_leaves_it_for_whoever_reads_it() {
    let (home, rotten) = one_of_three_rots();
    let at = home.path().to_str().unwrap();
    let args = [
        "share", "--home", at, "--model", MODEL, "--port", "0", "--scrub", "0",
    ];
    let (running, lines) = start(&args);
    told(&lines, "Ctrl-C ends");
    // As long as the other two take at the least, twice.
    std::thread::sleep(Duration::from_secs(4));
    assert!(rotten.exists());
    drop(running);
}
