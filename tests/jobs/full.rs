//! A disk without room: said, waited for, and no answer the worse for it. On a small file system of its own, where
//! mounting one is allowed.

use std::fs;
use std::io::BufRead;
use std::io::BufReader;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use crate::batch::Place;
use crate::batch::answers;
use crate::batch::chat;
use crate::batch::forty;
use crate::batch::summary;
use crate::program;

fn requests() -> String {
    let line = |n: usize| chat(n, "Who are you?", json!({})) + "\n";
    (0..6).map(line).collect()
}

fn undisturbed() -> Vec<Value> {
    let place = Place::new(&requests());
    summary(&place.run(&[]));
    answers(&place.lines("out.jsonl"))
}

/// Runs the batch until it says that the disk is full, and lets `then` do something about it.
fn until_full(place: &Place, then: impl FnOnce(&mut std::process::Child)) -> (Option<i32>, String) {
    let mut child = program::command()
        .args(place.args(&["--sequences", "2"]))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = String::new();
    for line in lines.by_ref().map_while(Result::ok) {
        said.push_str(&line);
        said.push('\n');
        if line.contains("the disk is full") {
            then(&mut child);
            break;
        }
    }
    for line in lines.map_while(Result::ok) {
        said.push_str(&line);
        said.push('\n');
    }
    (child.wait().unwrap().code(), said)
}

#[test]
fn a_full_disk_under_output_or_journal_is_waited_for_and_a_kill_meanwhile_costs_nothing() {
    let wanted = undisturbed();
    for (folder, killed) in [
        ("out", false),
        ("out", true),
        ("home/jobs-v1", false),
        ("home/jobs-v1", true),
    ] {
        let mut place = Place::new(&requests());
        let small = place.path(folder);
        fs::create_dir_all(&small).unwrap();
        let Some(_mounted) = program::small_disk(&small, "64k") else {
            println!("no file system may be mounted here");
            return;
        };
        if folder == "out" {
            place.output = "out/out.jsonl";
        }
        let ballast = small.join("ballast");
        // Writes until nothing more fits.
        assert!(fs::write(&ballast, vec![0; 1 << 20]).is_err());
        let (code, said) = until_full(&place, |child| {
            std::thread::sleep(Duration::from_millis(300));
            assert!(child.try_wait().unwrap().is_none(), "it must wait");
            if killed {
                child.kill().unwrap();
            }
            fs::remove_file(&ballast).unwrap();
        });
        assert!(said.contains("the disk is full"), "{folder}: {said}");
        assert!(said.contains("nothing is lost"), "{folder}: {said}");
        if killed {
            assert_eq!(code, None, "{said}");
            summary(&place.run(&["--sequences", "2"]));
        } else {
            assert_eq!(code, Some(0), "{said}");
            assert!(said.contains("there is room again"), "{folder}: {said}");
        }
        assert_eq!(
            answers(&place.lines(place.output)),
            wanted,
            "{folder}, {killed}"
        );
    }
}

#[test]
fn who_asks_to_stop_while_the_disk_is_full_is_heard() {
    let place = Place::new(&requests());
    let small = place.path("home/jobs-v1");
    fs::create_dir_all(&small).unwrap();
    let Some(_mounted) = program::small_disk(&small, "64k") else {
        println!("no file system may be mounted here");
        return;
    };
    assert!(fs::write(small.join("ballast"), vec![0; 1 << 20]).is_err());
    let began = Instant::now();
    let (code, said) = until_full(&place, |child| program::signal(child, "TERM"));
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("jobs-v1"), "the file is named: {said}");
    assert!(said.contains("free space"), "and what to do: {said}");
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn tokens_that_the_journal_has_no_room_for_are_told_once_and_the_answers_are_the_same() {
    let wanted = undisturbed();
    let place = Place::new(&requests());
    let small = place.path("home/jobs-v1");
    fs::create_dir_all(&small).unwrap();
    // Room for a job's description, and for nothing that comes after it.
    let Some(_mounted) = program::small_disk(&small, "4k") else {
        println!("no file system may be mounted here");
        return;
    };
    let run = place.run(&["--sequences", "1"]);
    summary(&run);
    let told = run.stderr.matches("a stop now would cost more").count();
    assert_eq!(told, 1, "{}", run.stderr);
    assert!(
        run.stderr.contains("tokens cannot be kept"),
        "{}",
        run.stderr
    );
    assert_eq!(answers(&place.lines("out.jsonl")), wanted);
}

#[test]
fn an_output_that_is_a_link_stays_one_and_its_file_is_put_in_order() {
    let place = Place::new(&forty());
    let elsewhere = tempfile::tempdir().unwrap();
    let (link, file) = (place.path("out.jsonl"), elsewhere.path().join("answers"));
    std::os::unix::fs::symlink(&file, &link).unwrap();
    summary(&place.run(&["--sequences", "8"]));
    assert!(link.symlink_metadata().unwrap().is_symlink());
    let text = std::fs::read_to_string(&file).unwrap();
    let names: Vec<String> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| line["custom_id"].as_str().unwrap().to_owned())
        .collect();
    let wanted: Vec<String> = (0..40).map(|n| format!("request-{n}")).collect();
    assert_eq!(names, wanted);
}
