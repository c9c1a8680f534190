//! The store as its users see it: real folders, real threads, real processes.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use deltafin::store::Budget;
use deltafin::store::Filled;
use deltafin::store::Lookup;
use deltafin::store::ModelStore;
use deltafin::store::NotKept;
use deltafin::store::Slot;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::store::Waited;
use deltafin::terms::Digest;
use deltafin::terms::ExpertKey;
use sha2::Digest as _;
use sha2::Sha256;

const LEN: u64 = 4096;

fn open(home: &Path, budget: u64) -> Store {
    let budget = Budget::Limit(budget);
    Store::open(StoreOptions {
        home: home.to_owned(),
        budget,
        reserve: 0,
    })
    .unwrap()
}

fn model(store: &Store) -> ModelStore {
    let commit = "0123456789012345678901234567890123456789".parse().unwrap();
    store.model(&"org/name".parse().unwrap(), &commit)
}

fn key(n: u16) -> ExpertKey {
    ExpertKey {
        layer: 1 + n / 100,
        expert: n % 100,
    }
}

/// An expert's bytes tell which expert it is.
fn content(key: ExpertKey) -> Bytes {
    let seed = [key.layer.to_le_bytes(), key.expert.to_le_bytes()].concat();
    seed.iter().copied().cycle().take(LEN as usize).collect()
}

fn fill(slot: Slot, key: ExpertKey) -> Filled {
    let bytes = content(key);
    let digest = Digest(Sha256::digest(&bytes).into());
    slot.fill(bytes, digest, "test")
}

/// Asks for an expert and brings it if it is missing, as a stream does.
fn demand(model: &ModelStore, key: ExpertKey) -> Bytes {
    loop {
        match model.lookup(key, LEN) {
            Lookup::Hit(lease) => match lease.read() {
                Ok(bytes) => return bytes,
                Err(e) if e.refetch() => continue,
                Err(e) => panic!("{e}"),
            },
            Lookup::Miss(slot) => {
                fill(slot, key);
                return content(key);
            }
            Lookup::Filling(wait) => match wait.wait(Duration::from_secs(20)) {
                Waited::Filled(bytes) => return bytes,
                Waited::Again => continue,
                Waited::Late(slot) => {
                    fill(slot, key);
                    return content(key);
                }
            },
        }
    }
}

/// Files below a folder: path and inode, with their bytes.
fn walk(folder: &Path, found: &mut BTreeMap<(PathBuf, u64), u64>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(m) if m.is_dir() => walk(&entry.path(), found),
            Ok(m) => {
                found.insert((entry.path(), m.ino()), m.len());
            }
            Err(_) => {} // gone since it was listed
        }
    }
}

/// Bytes of all experts and temporary files that certainly lay on the disk at one instant. One walk
/// proves nothing, for files come and go while it lasts; what two walks have both seen was there at
/// the end of the first.
fn seen(folder: &Path) -> u64 {
    let (mut first, mut second) = (BTreeMap::new(), BTreeMap::new());
    walk(folder, &mut first);
    walk(folder, &mut second);
    let both = first
        .iter()
        .filter_map(|(file, len)| Some(second.get(file)?.min(len)));
    both.sum()
}

#[test]
fn published_and_temporary_bytes_stay_within_the_budget_at_every_instant() {
    let home = tempfile::tempdir().unwrap();
    let budget = 10 * LEN;
    let store = open(home.path(), budget);
    let model = model(&store);
    let experts = model.folder().join("experts");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let onlooker = scope.spawn(|| {
            let (mut looks, mut most) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                most = most.max(seen(&experts));
                looks += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            (looks, most)
        });
        let workers: Vec<_> = (0..4u16)
            .map(|worker| {
                let model = &model;
                scope.spawn(move || {
                    for round in 0..300u16 {
                        let key = key((round * 7 + worker * 13) % 60);
                        assert_eq!(demand(model, key), content(key));
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        let (looks, most) = onlooker.join().unwrap();
        assert!(looks > 3, "looked {looks} times: proves nothing");
        assert!(
            most > budget / 2,
            "saw at most {most} bytes: nothing was kept"
        );
        assert!(most <= budget, "saw {most} bytes of {budget}");
    });
    assert!(store.stats().evicted > 50, "{:?}", store.stats());
}

#[test]
fn a_budget_of_nothing_keeps_nothing_and_fails_nothing() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), 0);
    let model = model(&store);
    let Lookup::Miss(slot) = model.lookup(key(1), LEN) else {
        panic!("an empty store has it");
    };
    assert_eq!(fill(slot, key(1)), Filled::NotKept(NotKept::Budget));
    assert_eq!(demand(&model, key(1)), content(key(1)));
    assert_eq!(seen(&model.folder().join("experts")), 0);
    assert_eq!(store.stats().trouble, None, "a choice is no trouble");
}

#[test]
fn threads_that_want_the_same_expert_share_one_fetch() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), 0);
    let model = model(&store);
    let Lookup::Miss(slot) = model.lookup(key(1), LEN) else {
        panic!("an empty store has it");
    };
    let model = Arc::new(model);
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| demand(&model, key(1))))
            .collect();
        std::thread::sleep(Duration::from_millis(20));
        fill(slot, key(1));
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), content(key(1)));
        }
    });
}
