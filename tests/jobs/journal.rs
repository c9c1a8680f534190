//! The journal and its states, under an engine of the trained checkpoint.

use std::ops::ControlFlow;
use std::path::Path;

use deltafin::engine::Engine;
use deltafin::engine::Event;
use deltafin::engine::Finish;
use deltafin::engine::Request;
use deltafin::jobs::Identity;
use deltafin::jobs::Job;
use deltafin::jobs::JobError;
use deltafin::jobs::Journal;
use deltafin::jobs::Keep;
use deltafin::jobs::Notice;
use deltafin::jobs::Outcome;
use deltafin::jobs::Ran;
use deltafin::jobs::Refusal;
use deltafin::jobs::generate;
use serde_json::json;

use crate::kit;

const KEEP: Keep = Keep {
    every: Some(std::time::Duration::ZERO),
    for_next_turn: false,
};

/// Runs until `stop_at` tokens are there; gives the generation and what the job had to say.
fn run(engine: &Engine, job: &mut Job, request: &Request, stop_at: usize) -> (Ran, Vec<String>) {
    let mut notices = Vec::new();
    let mut tokens = job.ids().len();
    let ran = generate(
        engine,
        job,
        request,
        KEEP,
        None,
        &mut |event| {
            tokens += usize::from(matches!(event, Event::Token { .. }));
            match tokens >= stop_at {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        },
        &mut |notice| {
            notices.push(match notice {
                Notice::Refused(_, refusal) => refusal.to_string(),
                Notice::Trouble(error) => panic!("{error}"),
                _ => String::new(),
            });
        },
    );
    (ran.unwrap(), notices)
}

fn state(home: &Path, job: &str) -> std::path::PathBuf {
    home.join("jobs-v1").join(job).join("state")
}

#[test]
#[expect(clippy::too_many_lines, reason = "one state, spoiled in turn")]
fn a_state_cut_flipped_or_of_something_else_is_refused_with_a_reason_and_computed_again() {
    let kit = kit::trained();
    let engine = &kit.engine;
    let identity = Identity::of(engine);
    let home = tempfile::tempdir().unwrap();
    let request = Request::new(kit::chat("Who are you?"), 24, kit::sampled(7));
    let (whole, _) = kit::run(engine, &request);

    let journal = Journal::open(home.path()).unwrap();
    let mut job = journal.create("test", json!({}), &identity).unwrap();
    let id = job.id().to_owned();
    let (first, _) = run(engine, &mut job, &request, 9);
    assert_eq!(first.generation.finish, Finish::Interrupted);
    drop(job);
    drop(journal);
    let kept = std::fs::read(state(home.path(), &id)).unwrap();

    let head = u32::from_le_bytes(kept[8..12].try_into().unwrap()) as usize;
    let flipped = |at: usize| {
        let mut bytes = kept.clone();
        bytes[at] ^= 1;
        bytes
    };
    let replaced = |from: &str, to: &str| {
        let text = String::from_utf8(kept[12..12 + head].to_vec()).unwrap();
        assert!(text.contains(from), "{text}");
        let text = text.replacen(from, to, 1);
        let mut bytes = kept[..8].to_vec();
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.extend(&kept[12 + head..]);
        bytes
    };
    let isa = engine.kernel().isa().name();
    let cases = [
        (
            "cut",
            kept[..kept.len() - 1].to_vec(),
            "bytes where its head says",
        ),
        (
            "cut in the head",
            kept[..100].to_vec(),
            "bytes where its head says",
        ),
        ("empty", Vec::new(), "not a state"),
        (
            "longer",
            [&kept[..], b"x"].concat(),
            "bytes where its head says",
        ),
        (
            "a value",
            flipped(12 + head + 1000),
            "do not fit its digest",
        ),
        (
            "its digest",
            flipped(kept.len() - 1),
            "do not fit its digest",
        ),
        ("another magic", flipped(0), "not a state"),
        (
            "another model",
            replaced("austen-k3", "austen-k4"),
            "its model is deltafin/austen-k4, not deltafin/austen-k3",
        ),
        (
            "another revision",
            replaced(&identity.revision, &"0".repeat(40)),
            "its revision is 0000",
        ),
        (
            "another arithmetic",
            replaced(&identity.arithmetic, &format!("{isa}-9")),
            "its arithmetic is",
        ),
        ("nothing wrong", kept.clone(), ""),
    ];
    for (what, bytes, reason) in cases {
        let copy = tempfile::tempdir().unwrap();
        let to = copy.path().join("jobs-v1").join(&id);
        std::fs::create_dir_all(&to).unwrap();
        for file in ["job.json", "ids"] {
            let from = home.path().join("jobs-v1").join(&id).join(file);
            std::fs::copy(from, to.join(file)).unwrap();
        }
        std::fs::write(to.join("state"), &bytes).unwrap();
        let journal = Journal::open(copy.path()).unwrap();
        let mut job = journal.get(&id).unwrap();
        assert_eq!(job.ids(), &whole.token_ids[..9]);
        let (ran, notices) = run(engine, &mut job, &request, usize::MAX);
        assert_eq!(kit::answer(&ran.generation), kit::answer(&whole), "{what}");
        if reason.is_empty() {
            assert!(notices.is_empty(), "{notices:?}");
            assert_eq!(ran.generation.computed_rows, 1, "only the last id's row");
            assert_eq!(ran.recomputed, 0);
        } else {
            assert!(
                notices.len() == 1 && notices[0].contains(reason),
                "{what}: {notices:?}"
            );
            assert_eq!(ran.generation.cached_tokens, 0, "{what}");
            assert_eq!(ran.recomputed, whole.prompt_ids.len() + 8, "{what}");
        }
    }
}

#[test]
fn ids_survive_a_cut_tail_zeros_and_a_new_turn_drops_them() {
    let home = tempfile::tempdir().unwrap();
    let identity = Identity {
        model: "a/b".to_owned(),
        revision: "0".repeat(40),
        arithmetic: "scalar-1".to_owned(),
    };
    let journal = Journal::open(home.path()).unwrap();
    let mut job = journal.create("test", json!({"n": 1}), &identity).unwrap();
    let id = job.id().to_owned();
    let ids: Vec<u32> = (0..100).map(|n| n * 37 % 64).collect();
    job.append(&ids).unwrap();
    let log = job.folder().join("ids");
    drop(job);
    let whole = std::fs::read(&log).unwrap();
    for (tail, kept) in [
        (whole[..795].to_vec(), 99),
        (whole[..8].to_vec(), 1),
        ([&whole[..], &[0; 64]].concat(), 100),
        ([&whole[..80], &[0; 720]].concat(), 10),
        // Bytes of another place are no tokens of this one.
        ([&whole[..80], &whole[88..]].concat(), 10),
    ] {
        std::fs::write(&log, tail).unwrap();
        let mut job = journal.get(&id).unwrap();
        assert_eq!(job.ids(), &ids[..kept]);
        job.append(&[5, 6]).unwrap();
        drop(job);
        let job = journal.get(&id).unwrap();
        assert_eq!(job.ids(), [&ids[..kept], &[5, 6]].concat());
    }
    std::fs::write(&log, &whole).unwrap();
    let mut job = journal.get(&id).unwrap();
    job.replace(json!({"n": 2}), &identity).unwrap();
    drop(job);
    // A stop between the two steps of a new turn leaves the old ids behind.
    std::fs::write(&log, &whole).unwrap();
    let job = journal.get(&id).unwrap();
    assert!(job.ids().is_empty());
    assert_eq!(job.request()["n"], 2);
}

#[test]
fn a_job_belongs_to_one_owner_and_ends_with_an_outcome() {
    let home = tempfile::tempdir().unwrap();
    let identity = Identity {
        model: "a/b".to_owned(),
        revision: "0".repeat(40),
        arithmetic: "scalar-1".to_owned(),
    };
    let journal = Journal::open(home.path()).unwrap();
    let mut job = journal
        .create_as("mine", "test", json!({}), &identity)
        .unwrap();
    let other = Journal::open(home.path()).unwrap();
    assert!(matches!(other.get("mine"), Err(JobError::Busy { .. })));
    assert!(matches!(other.remove("mine"), Err(JobError::Busy { .. })));
    assert!(other.look("mine").unwrap().running);
    assert_eq!(other.list("test").len(), 1);
    assert!(other.list("elsewhat").is_empty());
    job.append(&[1, 2, 3]).unwrap();
    job.finish(json!({"text": "yes"})).unwrap();
    drop(job);
    let listed = other.look("mine").unwrap();
    assert!(!listed.running);
    assert_eq!(listed.ids, [1, 2, 3]);
    assert_eq!(
        listed.outcome,
        Some(Outcome::Result(json!({"text": "yes"})))
    );
    other.get("mine").unwrap().remove().unwrap();
    assert!(matches!(other.get("mine"), Err(JobError::NotFound { .. })));
    for name in ["", "..", "a/b", ".x", "-x", "ä", &"x".repeat(65)] {
        let made = other.create_as(name, "test", json!({}), &identity);
        assert!(matches!(made, Err(JobError::Name { .. })), "{name}");
    }
    std::fs::create_dir_all(home.path().join("jobs-v1/broken")).unwrap();
    std::fs::write(home.path().join("jobs-v1/broken/job.json"), "{").unwrap();
    assert!(matches!(other.get("broken"), Err(JobError::Damaged { .. })));
    assert!(
        other.list("test").is_empty(),
        "one that is broken hides none"
    );
    other.remove("broken").unwrap();
    let refusal = deltafin::jobs::read_snapshot_head(&home.path().join("nothing"));
    assert!(matches!(refusal, Err(Refusal::Unreadable(_))));
}
