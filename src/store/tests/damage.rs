//! Whatever happens to a file: it is found before it is used, reported, and made good.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::path::PathBuf;

use super::faults::demand;
use super::faults::open;
use super::sim::SimDisk;
use super::support::LEN;
use super::support::content;
use super::support::key;
use super::support::model;
use super::support::put;
use crate::store::Area;
use crate::store::Damage;
use crate::store::FileRecord;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::ModelStore;
use crate::store::NotKept;
use crate::store::SourceRecord;
use crate::store::Store;
use crate::store::Verified;
use crate::store::VerifyOptions;
use crate::store::disk::Disk;
use crate::store::disk::How;
use crate::store::table::Subject;

/// Where a disk's digest log lies.
fn log_of(disk: &SimDisk) -> PathBuf {
    let store = open(disk).unwrap();
    model(&store).folder().join("digests")
}

fn bytes_of(disk: &SimDisk, path: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    disk.edit(path, |bytes| all = bytes.clone());
    all
}

type Harm = (&'static str, fn(&SimDisk, &Path, &Path));

const HARMS: [Harm; 7] = [
    ("a bit flipped", |disk, path, _| {
        disk.edit(path, |bytes| bytes[500] ^= 0x10);
    }),
    ("truncated", |disk, path, _| {
        disk.edit(path, |bytes| bytes.truncate(999));
    }),
    ("empty", |disk, path, _| disk.edit(path, Vec::clear)),
    ("grown", |disk, path, _| {
        disk.edit(path, |bytes| bytes.push(0))
    }),
    ("zeroed", |disk, path, _| {
        disk.edit(path, |bytes| bytes.fill(0))
    }),
    ("another expert's", |disk, path, other| {
        let mut others = Vec::new();
        disk.edit(other, |bytes| others = bytes.clone());
        disk.edit(path, |bytes| *bytes = others);
    }),
    ("a folder", |disk, path, _| disk.replace_by_folder(path)),
];

fn expert(model: &ModelStore, expert: u16) -> PathBuf {
    model.folder().join(format!("experts/001/{expert:04}"))
}

/// A disk with four experts, all synced, whose process ended in order.
fn filled() -> SimDisk {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let model = model(&store);
    (0..4).for_each(|n| assert_eq!(put(&model, key(n)), Filled::Kept));
    disk
}

fn verify(model: &ModelStore, repair: bool) -> Verified {
    let options = VerifyOptions { every: 1, repair };
    model
        .verify(options, &mut |_| ControlFlow::Continue(()))
        .unwrap()
}

#[test]
fn verify_finds_every_kind_of_damage_and_repair_makes_room_for_a_new_fetch() {
    for (harm, harm_it) in HARMS {
        let disk = filled();
        let store = open(&disk).unwrap();
        let model = model(&store);
        let (path, other) = (expert(&model, 2), expert(&model, 3));
        assert_eq!(verify(&model, false).damaged, [], "{harm}: not yet");
        harm_it(&disk, &path, &other);
        let found = verify(&model, false);
        let paths: Vec<_> = found.damaged.iter().map(|(p, _)| p.clone()).collect();
        assert_eq!(paths, std::slice::from_ref(&path), "{harm}");
        assert_eq!(found.removed, 0, "{harm}: looked at only");
        let repaired = verify(&model, true);
        assert_eq!(repaired.removed, 1, "{harm}");
        assert_eq!(verify(&model, false).damaged, [], "{harm}: repaired");
        assert_eq!(put(&model, key(2)), Filled::Kept, "{harm}: fetched again");
        assert_eq!(verify(&model, false).first_use, 4, "{harm}");
    }
}

#[test]
fn damage_is_found_at_first_use_after_an_unclean_stop() {
    for (harm, harm_it) in HARMS {
        let disk = filled();
        let store = open(&disk).unwrap();
        let (path, other) = {
            let model = model(&store);
            (expert(&model, 2), expert(&model, 3))
        };
        disk.stop();
        drop(store);
        disk.killed();
        harm_it(&disk, &path, &other);
        let store = open(&disk).unwrap();
        let model = model(&store);
        (0..4).for_each(|n| demand(&model, key(n)));
        let stats = store.stats();
        assert!(stats.damaged + stats.distrusted >= 1, "{harm}: {stats:?}");
        (0..4).for_each(|n| demand(&model, key(n)));
        assert_eq!(verify(&model, false).damaged, [], "{harm}: made good");
    }
}

#[test]
fn what_was_compared_once_after_an_unclean_stop_is_believed_and_the_rest_is_not() {
    let disk = filled();
    let store = open(&disk).unwrap();
    disk.stop();
    drop(store);
    disk.killed();
    {
        let store = open(&disk).unwrap();
        demand(&model(&store), key(1)); // compared; the others are not
    }
    let store = open(&disk).unwrap(); // a clean stop lies between
    let model = model(&store);
    let path = expert(&model, 2);
    disk.edit(&path, |bytes| bytes[0] ^= 1);
    demand(&model, key(2));
    assert_eq!(
        store.stats().damaged,
        1,
        "still under suspicion after a clean stop"
    );
}

#[test]
fn a_digest_log_cut_anywhere_costs_experts_and_serves_none_unproved() {
    let origin = filled();
    let log = log_of(&origin);
    let whole = bytes_of(&origin, &log);
    for cut in 0..whole.len() {
        let disk = origin.fork();
        disk.edit(&log, |bytes| bytes.truncate(cut));
        let store = open(&disk).unwrap();
        let model = model(&store);
        let lines = whole[..cut].split(|b| *b == b'\n');
        let complete = lines
            .filter(|l| l.ends_with(b"}") && l.starts_with(b"{\"file\""))
            .count();
        let mut sound = 0;
        for n in 0..4 {
            match model.lookup(key(n), LEN) {
                Lookup::Hit(lease) => match lease.read() {
                    Ok(bytes) => {
                        assert!(bytes == content(key(n)), "cut at {cut}");
                        sound += 1;
                    }
                    Err(e) => assert!(e.refetch(), "cut at {cut}: {e}"),
                },
                other => panic!("cut at {cut}: {other:?}"),
            }
        }
        // A line whose newline alone is missing is as good as cut.
        assert!(
            sound == complete || sound + 1 == complete,
            "cut at {cut}: {sound} of {complete}"
        );
        (0..4).for_each(|n| demand(&model, key(n)));
        drop(model);
        drop(store);
        let store = open(&disk).unwrap();
        let model = super::support::model(&store);
        assert_eq!(verify(&model, false).damaged, [], "cut at {cut}: made good");
        assert_eq!(model.experts().len(), 4, "cut at {cut}");
    }
}

#[test]
fn a_scrub_finds_damage_one_expert_at_a_time() {
    let disk = filled();
    let store = open(&disk).unwrap();
    let model = model(&store);
    disk.edit(&expert(&model, 2), |bytes| bytes[0] ^= 1);
    let mut seen = Vec::new();
    let mut after = None;
    for _ in 0..5 {
        let step = model.scrub(after).unwrap().unwrap();
        after = Some(step.key);
        seen.push((step.key.expert, step.damage.is_some()));
    }
    let expected = [(0, false), (1, false), (2, true), (3, false), (0, false)];
    assert_eq!(seen, expected);
    assert!(!model.contains(key(2), LEN));
    assert_eq!(store.stats().damaged, 1);
}

#[test]
fn other_bytes_than_those_that_are_known_are_not_kept() {
    let disk = filled();
    let store = open(&disk).unwrap();
    let model = model(&store);
    store.trim(0).unwrap();
    let known = model.known(key(2)).unwrap();
    let Lookup::Miss(slot) = model.lookup(key(2), LEN) else {
        panic!("trimmed");
    };
    let other = content(key(3));
    let filled = slot.fill(
        other.clone(),
        crate::store::model::digest_of(&other),
        "mirror",
    );
    assert_eq!(filled, Filled::NotKept(NotKept::Conflict(known)));
    assert_eq!(put(&model, key(2)), Filled::Kept);
}

#[test]
fn a_disk_that_fills_up_costs_experts_and_leaves_nothing_partial() {
    for room in 0..3 * LEN {
        let disk = filled();
        let store = open(&disk).unwrap();
        let model = model(&store);
        store.trim(LEN).unwrap();
        disk.set_capacity(disk.used() + room);
        for n in 10..14 {
            demand(&model, key(n));
        }
        let experts = model.folder().join("experts");
        assert!(
            disk.files(&experts.join("tmp")).is_empty(),
            "room for {room}"
        );
        for (path, len) in disk.files(&experts) {
            assert_eq!(len, LEN, "room for {room}: {}", path.display());
        }
        let stats = store.stats();
        assert_eq!(stats.not_kept > 0, stats.trouble.is_some(), "{stats:?}");
        disk.set_capacity(1 << 40);
        assert_eq!(
            put(&model, key(20)),
            Filled::Kept,
            "room for {room}: room again"
        );
        assert_eq!(verify(&model, false).damaged, [], "room for {room}");
    }
}

#[test]
fn fault_46_a_disk_that_turns_read_only_serves_what_it_holds_and_stops_no_run() {
    let disk = filled();
    let store = open(&disk).unwrap();
    let model = model(&store);
    store.trim(2 * LEN).unwrap();
    let held = model.experts();
    disk.set_read_only(true);
    for _ in 0..3 {
        held.iter().for_each(|(key, _)| demand(&model, *key));
        model.touch(&[key(2)]);
    }
    assert_eq!(store.stats().hits, 6);
    for n in 10..14 {
        let Lookup::Miss(slot) = model.lookup(key(n), LEN) else {
            panic!("{n}: where from?");
        };
        let bytes = content(key(n));
        let digest = crate::store::model::digest_of(&bytes);
        let filled = slot.fill(bytes, digest, "test");
        assert!(matches!(filled, Filled::NotKept(_)), "{n}: {filled:?}");
    }
    let stats = store.stats();
    assert_eq!((stats.kept, stats.not_kept, stats.damaged), (0, 4, 0));
    let trouble = stats.trouble.unwrap_or_default();
    assert!(trouble.contains("experts are not kept"), "{trouble}");
    disk.set_read_only(false);
    assert_eq!(put(&model, key(20)), Filled::Kept);
    assert_eq!(verify(&model, false).damaged, []);
}

#[test]
fn fault_46_a_full_disk_keeps_nobody_from_what_is_there() {
    let disk = filled();
    disk.set_capacity(disk.used());
    let store = open(&disk).unwrap();
    let trouble = store.stats().trouble.unwrap_or_default();
    assert!(trouble.contains("the disk is full"), "{trouble}");
    let model = model(&store);
    (0..4).for_each(|n| demand(&model, key(n)));
    assert_eq!(store.stats().hits, 4);
    demand(&model, key(10));
    assert_eq!(store.stats().kept, 0);
}

#[test]
fn fault_46_a_full_disk_after_an_unclean_stop_keeps_nobody_from_what_is_there_either() {
    let disk = filled();
    let store = open(&disk).unwrap();
    disk.stop();
    drop(store);
    disk.killed();
    disk.set_capacity(disk.used());
    let suspects = |store: &Store| {
        let model = model(store);
        let told = |n| {
            let told = model.record().log.get(&Subject::Expert(key(n)));
            told.unwrap().unwrap().suspect
        };
        (0..4).filter(|n| told(*n)).count()
    };
    // Nobody can note that everything is to be looked at: each process knows it for itself.
    for _ in 0..2 {
        let store = open(&disk).unwrap();
        assert_eq!(suspects(&store), 4);
        (0..4).for_each(|n| demand(&model(&store), key(n)));
        assert_eq!((store.stats().hits, store.stats().damaged), (4, 0));
        let verified = verify(&model(&store), false);
        assert_eq!((verified.first_use, verified.damaged.len()), (4, 0));
    }
    disk.set_capacity(1 << 40);
    for left in [4, 3] {
        let store = open(&disk).unwrap();
        assert_eq!(suspects(&store), left, "noted, and each that was compared");
        demand(&model(&store), key(left as u16 - 1));
        assert_eq!(suspects(&store), left - 1);
    }
}

#[test]
fn an_expert_of_another_length_than_asked_for_is_damage() {
    let disk = filled();
    let store = open(&disk).unwrap();
    let model = model(&store);
    let expert = model.lookup(key(1), LEN + 1);
    assert!(matches!(expert, Lookup::Miss(_)), "{expert:?}");
    assert_eq!(store.stats().damaged, 1);
    let wrong = Damage::Length {
        expected: LEN + 1,
        actual: LEN,
    };
    assert_eq!(wrong.to_string(), "1000 bytes instead of 1001");
}

#[test]
fn damage_is_found_at_first_use_after_a_clean_stop_too() {
    for (harm, harm_it) in HARMS {
        let disk = filled();
        let (path, other) = {
            let store = open(&disk).unwrap();
            let model = model(&store);
            (expert(&model, 2), expert(&model, 3))
        };
        harm_it(&disk, &path, &other);
        let store = open(&disk).unwrap();
        let model = model(&store);
        (0..4).for_each(|n| demand(&model, key(n)));
        let stats = store.stats();
        // What has grown is over the budget, and may have been evicted for it.
        let found = stats.damaged == 1 || harm == "grown" && stats.evicted > 0;
        assert!(found && stats.distrusted == 0, "{harm}: {stats:?}");
        (0..4).for_each(|n| demand(&model, key(n)));
        assert_eq!(verify(&model, false).damaged, [], "{harm}: made good");
    }
}

#[test]
fn what_was_read_past_the_store_is_confirmed_or_condemned() {
    let disk = filled();
    let store = open(&disk).unwrap();
    let model = model(&store);
    let sound = model.lease(key(1), LEN).unwrap();
    assert!(!sound.is_checked(), "nobody has read it yet");
    sound.confirm(&content(key(1))).unwrap();
    assert!(sound.is_checked());
    let rotten = model.lease(key(2), LEN).unwrap();
    let refused = rotten.confirm(&content(key(3))).unwrap_err();
    assert!(refused.refetch(), "{refused}");
    assert!(!model.contains(key(2), LEN), "removed");
    let cut = model.lease(key(3), LEN).unwrap();
    assert!(cut.confirm(&content(key(3))[1..]).is_err());
}

#[test]
fn lines_without_a_fast_sum_are_held_against_the_digest_and_get_one() {
    let disk = filled();
    let log = log_of(&disk);
    // As an earlier version wrote them: no fast sum, no sum of the line.
    disk.edit(&log, |bytes| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        let old = text.lines().map(|line| {
            let end = line.find(",\"quick\"").or(line.find(",\"line\"")).unwrap();
            format!("{}}}\n", &line[..end])
        });
        *bytes = old.collect::<String>().into_bytes();
    });
    let path = {
        let store = open(&disk).unwrap();
        let model = model(&store);
        [0, 1, 3].iter().for_each(|n| demand(&model, key(*n)));
        assert_eq!(store.stats().damaged, 0);
        expert(&model, 2)
    };
    let text = String::from_utf8(bytes_of(&disk, &log)).unwrap();
    assert_eq!(text.matches("\"quick\"").count(), 3, "{text}");
    disk.edit(&path, |bytes| bytes[0] ^= 1);
    let store = open(&disk).unwrap();
    demand(&model(&store), key(2));
    assert_eq!(store.stats().damaged, 1, "by its digest alone");
}

/// Whatever stands in the log: nothing wrong is served, and what is lost is brought once more.
fn survives(disk: &SimDisk, what: &str) {
    let store = open(disk).unwrap_or_else(|e| panic!("{what}: {e}"));
    let made = model(&store);
    for n in 0..4 {
        if let Lookup::Hit(lease) = made.lookup(key(n), LEN) {
            match lease.read() {
                Ok(bytes) => assert!(bytes == content(key(n)), "{what}: wrong bytes"),
                Err(e) => assert!(e.refetch(), "{what}: {e}"),
            }
        }
        demand(&made, key(n));
    }
    drop(made);
    drop(store);
    let store = open(disk).unwrap();
    let made = model(&store);
    assert_eq!(verify(&made, false).damaged, [], "{what}: made good");
    assert_eq!(made.experts().len(), 4, "{what}");
}

#[test]
fn a_garbage_byte_anywhere_in_the_digest_log_condemns_no_expert_for_good() {
    let origin = filled();
    let log = log_of(&origin);
    let whole = bytes_of(&origin, &log);
    for at in 0..whole.len() {
        for garbage in [b'0', b'\n', b'"', 0xff] {
            if whole[at] != garbage {
                let disk = origin.fork();
                disk.edit(&log, |bytes| bytes[at] = garbage);
                survives(&disk, &format!("{garbage:#04x} at {at}"));
            }
        }
    }
}

#[test]
fn a_digest_log_that_is_gone_or_a_folder_costs_experts_and_nothing_else() {
    let origin = filled();
    let log = log_of(&origin);
    let folder = origin.fork();
    folder.replace_by_folder(&log);
    survives(&folder, "a folder");
    let gone = origin.fork();
    gone.remove_file(&log).unwrap();
    survives(&gone, "gone");
    // Under a running process too: its next lines are not written into nowhere.
    let running = origin.fork();
    {
        let store = open(&running).unwrap();
        let model = model(&store);
        demand(&model, key(0));
        running.remove_file(&log).unwrap();
        store.trim(0).unwrap();
        (0..4).for_each(|n| assert_eq!(put(&model, key(n)), Filled::Kept));
    }
    let store = open(&running).unwrap();
    assert_eq!(verify(&model(&store), false).first_use, 4);
}

#[test]
fn a_folder_where_a_file_belongs_and_a_file_where_a_folder_does_are_put_away() {
    let disk = filled();
    let folder = {
        let store = open(&disk).unwrap();
        let model = model(&store);
        model.write(Area::Meta, "config.json", b"{}").unwrap();
        model.folder().to_owned()
    };
    for name in ["meta/config.json", "source.json"] {
        let disk = disk.fork();
        disk.replace_by_folder(&folder.join(name));
        let store = open(&disk).unwrap();
        let model = model(&store);
        assert_eq!(model.source().unwrap(), None);
        let read = model.read(Area::Meta, "config.json").unwrap();
        assert_eq!(read.is_some(), name != "meta/config.json");
        model.write(Area::Meta, "config.json", b"{}").unwrap();
        let record = SourceRecord {
            repo: model.repo().clone(),
            commit: model.commit().clone(),
            files: BTreeMap::new(),
            header_lens: BTreeMap::new(),
        };
        model.set_source(&record).unwrap();
        assert_eq!(model.source().unwrap(), Some(record));
    }
    for name in ["experts", "experts/001", "experts/tmp", "experts/part"] {
        let disk = disk.fork();
        let _ = disk.remove_tree(&folder.join(name));
        disk.open(&folder.join(name), How::CreateNew).unwrap();
        survives(&disk, name);
    }
}

#[test]
fn what_the_hub_said_is_not_believed_after_it_has_rotted() {
    let disk = filled();
    let path = {
        let store = open(&disk).unwrap();
        let model = model(&store);
        let file = FileRecord {
            size: 123_456,
            sha256: None,
        };
        let record = SourceRecord {
            repo: model.repo().clone(),
            commit: model.commit().clone(),
            files: BTreeMap::from([("a".to_owned(), file)]),
            header_lens: BTreeMap::new(),
        };
        model.set_source(&record).unwrap();
        model.folder().join("source.json")
    };
    disk.edit(&path, |bytes| {
        let at = bytes.iter().position(|b| *b == b'3').unwrap();
        bytes[at] = b'4';
    });
    let store = open(&disk).unwrap();
    let model = model(&store);
    let found = verify(&model, false);
    assert_eq!(found.damaged.len(), 1, "{found:?}");
    assert_eq!(model.source().unwrap(), None);
}
