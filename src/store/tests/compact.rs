//! A digest log that is rewritten says what it said before, whatever happens on the way.

use std::ops::ControlFlow;
use std::path::PathBuf;

use proptest::prelude::*;

use super::dice::Dice;
use super::faults::demand;
use super::faults::open;
use super::sim::Fault;
use super::sim::SimDisk;
use super::support::content;
use super::support::key;
use super::support::model;
use super::support::put;
use crate::store::Area;
use crate::store::Filled;
use crate::store::Level;
use crate::store::ModelStore;
use crate::store::VerifyOptions;
use crate::store::model::digest_of;
use crate::store::table::Known;
use crate::store::table::Line;
use crate::store::table::Mark;
use crate::store::table::Subject;
use crate::store::table::Table;
use crate::store::table::written;

fn log_of(disk: &SimDisk) -> PathBuf {
    let files = disk.files(&PathBuf::from("/home"));
    let mut logs = files.into_iter().map(|(path, _)| path);
    logs.find(|path| path.ends_with("digests")).unwrap()
}

fn lines(disk: &SimDisk) -> Vec<String> {
    let mut text = Vec::new();
    disk.edit(&log_of(disk), |bytes| text = bytes.clone());
    let text = String::from_utf8(text).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn about(lines: &[String], subject: &str) -> usize {
    let start = format!("{{\"file\":\"{subject}\"");
    lines.iter().filter(|l| l.starts_with(&start)).count()
}

/// Four experts, two that are gone, a small file that was written again and again: all of it synced.
fn long() -> SimDisk {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let model = model(&store);
    (0..6).for_each(|n| assert_eq!(put(&model, key(n)), Filled::Kept));
    for n in 0..400u32 {
        let text = n.to_string();
        model.write(Area::Meta, "a", text.as_bytes()).unwrap();
    }
    drop(model);
    drop(store);
    assert!(lines(&disk).len() > 800, "it must be long");
    disk
}

fn sound(model: &ModelStore) {
    let all = VerifyOptions {
        every: 1,
        repair: false,
    };
    let found = model.verify(all, &mut |_| ControlFlow::Continue(()));
    assert_eq!(found.unwrap().damaged, []);
    assert_eq!(model.read(Area::Meta, "a").unwrap().unwrap(), b"399");
    let experts = model.experts();
    let experts: Vec<u16> = experts.iter().map(|(key, _)| key.expert).collect();
    assert_eq!(experts, [2, 3, 4, 5]);
    (2..6).for_each(|n| demand(model, key(n)));
}

#[test]
fn a_long_log_is_rewritten_at_opening_and_nothing_is_forgotten() {
    let disk = long();
    {
        let store = open(&disk).unwrap();
        let short = lines(&disk);
        assert!(short.len() < 10, "{short:#?}");
        for n in 2..6 {
            assert_eq!(about(&short, &format!("experts/001/{n:04}")), 1);
        }
        assert_eq!(about(&short, "meta/a"), 1);
        assert_eq!(about(&short, "experts/001/0000"), 0, "it is gone");
        sound(&model(&store));
    }
    // What was synced before is known to be synced still.
    let store = open(&disk).unwrap();
    disk.stop();
    drop(store);
    disk.power_lost(&mut Dice(7));
    let store = open(&disk).unwrap();
    assert_eq!(store.stats().distrusted, 0);
    sound(&model(&store));
}

#[test]
fn a_stop_after_any_operation_leaves_the_old_lines_or_the_new_ones() {
    let origin = long();
    for power in [false, true] {
        for n in 1.. {
            let disk = origin.fork();
            disk.plan(n, Fault::Stop);
            let opened = open(&disk);
            let over = !disk.happened();
            drop(opened);
            match power {
                true => disk.power_lost(&mut Dice(n)),
                false => disk.killed(),
            }
            let store = open(&disk).unwrap_or_else(|e| panic!("{n}: {e}"));
            let stats = store.stats();
            assert_eq!((stats.distrusted, stats.damaged), (0, 0), "{n}");
            sound(&model(&store));
            drop(store);
            let short = lines(&disk);
            assert!(short.len() < 30, "{n}: {} lines", short.len());
            let left = disk.files(log_of(&disk).parent().unwrap());
            let left = left
                .iter()
                .filter(|(p, _)| p.to_string_lossy().ends_with(".tmp"));
            assert_eq!(left.count(), 0, "{n}: left behind");
            if over {
                assert!(n > 30, "{n} operations are too few");
                break;
            }
        }
    }
}

#[test]
fn a_disk_that_refuses_anywhere_costs_nothing() {
    let origin = long();
    for kind in [std::io::ErrorKind::StorageFull, std::io::ErrorKind::Other] {
        for n in 1.. {
            let disk = origin.fork();
            disk.plan(n, Fault::Fail(kind));
            let opened = open(&disk);
            let over = !disk.happened();
            if let Ok(store) = &opened {
                let model = model(store);
                (2..6).for_each(|n| demand(&model, key(n)));
                demand(&model, key(7));
            }
            drop(opened);
            disk.killed();
            let store = open(&disk).unwrap_or_else(|e| panic!("{n}: {e}"));
            let model = model(&store);
            for (key, _) in model.experts() {
                let lease = model.lease(key, 1000).unwrap();
                assert!(lease.read_verified().unwrap() == content(key), "{n}: {key}");
            }
            if over {
                break;
            }
        }
    }
}

#[test]
fn what_is_under_suspicion_stays_so() {
    let disk = long();
    // Not at this opening: the log has to be long when it is marked.
    let origin = lines(&disk).join("\n") + "\n";
    let store = open(&disk).unwrap();
    disk.edit(&log_of(&disk), |bytes| *bytes = origin.clone().into_bytes());
    disk.stop();
    drop(store);
    disk.killed();
    let store = open(&disk).unwrap();
    let short = lines(&disk);
    assert!(short.len() < 12, "{short:#?}");
    assert!(short.iter().any(|l| l.contains("unclean")), "{short:#?}");
    let model = model(&store);
    let told = |n| {
        let log = &model.record().log;
        log.get(&Subject::Expert(key(n))).unwrap().unwrap()
    };
    assert!((2..6).all(|n| told(n).suspect && told(n).synced));
    demand(&model, key(3));
    assert!(!told(3).suspect && told(4).suspect);
}

#[test]
fn a_running_process_rewrites_its_log_when_it_is_alone_and_goes_on_appending() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let first = model(&store);
    let other = open(&disk).unwrap();
    let fill = |from: u32| {
        for n in 0..400u32 {
            let text = (from + n).to_string();
            first.write(Area::Meta, "a", text.as_bytes()).unwrap();
        }
    };
    fill(0);
    demand(&first, key(1));
    assert!(lines(&disk).len() > 800, "another process is there");
    drop(other);
    demand(&first, key(2));
    assert!(lines(&disk).len() < 10, "{:#?}", lines(&disk));
    (3..5).for_each(|n| demand(&first, key(n)));
    fill(0);
    drop(first);
    drop(store);
    let store = open(&disk).unwrap();
    let model = model(&store);
    let all = VerifyOptions {
        every: 1,
        repair: false,
    };
    let found = model.verify(all, &mut |_| ControlFlow::Continue(()));
    let found = found.unwrap();
    assert_eq!((found.damaged.len(), found.files), (0, 5));
}

#[test]
fn what_was_proved_of_an_expert_outlives_it_and_a_first_arrival_does_not() {
    let mut table = Table::default();
    let line = |n: u16, level| {
        let line = Line {
            subject: Subject::Expert(key(n)),
            known: Known {
                sha256: digest_of(&content(key(n))),
                length: 1000,
                level,
            },
            quick: Some(7),
            source: "test",
            checked: false,
        };
        written(&line, "me", u64::from(n), 0).unwrap()
    };
    table.replay(line(1, Level::FirstUse).as_bytes());
    table.replay(line(2, Level::WholeShard).as_bytes());
    table.replay(line(3, Level::Manifest).as_bytes());
    let text = table
        .rewritten(&|_, level| level > Level::FirstUse)
        .unwrap();
    let mut short = Table::default();
    short.replay(text.as_bytes());
    assert_eq!(short.tell(&Subject::Expert(key(1))), None);
    for n in [2, 3] {
        let subject = Subject::Expert(key(n));
        assert_eq!(short.tell(&subject), table.tell(&subject));
        assert!(short.tell(&subject).is_some());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Line(u16, u8, Level, bool, u8),
    Synced(u8, u64),
    Unclean,
    Forgotten(u16),
    Garbage(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let level = prop_oneof![
        Just(Level::FirstUse),
        Just(Level::WholeShard),
        Just(Level::Manifest)
    ];
    prop_oneof![
        6 => (0..6u16, 0..3u8, level, any::<bool>(), 0..3u8)
            .prop_map(|(e, bytes, level, checked, by)| Step::Line(e, bytes, level, checked, by)),
        2 => (0..3u8, 0..12u64).prop_map(|(by, n)| Step::Synced(by, n)),
        1 => Just(Step::Unclean),
        1 => (0..6u16).prop_map(Step::Forgotten),
        1 => any::<u8>().prop_map(Step::Garbage),
    ]
}

fn text_of(step: &Step, n: u64) -> Vec<u8> {
    let by = |by: &u8| format!("process {by}");
    match step {
        Step::Line(e, bytes, level, checked, who) => {
            let line = Line {
                subject: Subject::Expert(key(*e)),
                known: Known {
                    sha256: digest_of(&[*bytes]),
                    length: 1,
                    level: *level,
                },
                quick: (*bytes > 0).then_some(u64::from(*bytes)),
                source: "test",
                checked: *checked,
            };
            written(&line, &by(who), n, n).unwrap().into_bytes()
        }
        Step::Synced(who, n) => {
            let mark = Mark::Synced { by: by(who), n: *n };
            mark.written().unwrap().into_bytes()
        }
        Step::Unclean => Mark::Unclean.written().unwrap().into_bytes(),
        Step::Forgotten(e) => {
            let file = Subject::Expert(key(*e)).path();
            Mark::Forgotten { file }.written().unwrap().into_bytes()
        }
        Step::Garbage(byte) => vec![b'{', *byte, b'\n'],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_rewritten_log_tells_of_every_file_what_the_long_one_told(
        steps in proptest::collection::vec(step(), 0..60),
    ) {
        let mut long = Table::default();
        for (n, step) in steps.iter().enumerate() {
            long.replay(&text_of(step, n as u64 + 1));
        }
        let text = long.rewritten(&|_, _| true).unwrap();
        let mut short = Table::default();
        prop_assert_eq!(short.replay(text.as_bytes()), text.len());
        for e in 0..6 {
            let subject = Subject::Expert(key(e));
            prop_assert_eq!(short.tell(&subject), long.tell(&subject));
        }
        prop_assert_eq!(short.live(&|_, _| true), long.live(&|_, _| true));
        let again = short.rewritten(&|_, _| true).unwrap();
        prop_assert_eq!(again.len(), text.len());
    }
}
