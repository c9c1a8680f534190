//! The store as its users see it: real folders, real threads, real processes.

#![expect(clippy::unwrap_used, reason = "a test may")]

#[path = "store/shape.rs"]
mod shape;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
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
use deltafin::store::Policy;
use deltafin::store::Slot;
use deltafin::store::Store;
use deltafin::store::StoreOptions;
use deltafin::store::Waited;
use deltafin::terms::Digest;
use deltafin::terms::ExpertKey;
use sha2::Digest as _;
use sha2::Sha256;

const LEN: u64 = 4096;
const COMMIT: &str = "0123456789012345678901234567890123456789";

fn open(home: &Path, budget: u64) -> Store {
    let budget = Budget::Limit(budget);
    Store::open(StoreOptions {
        home: home.to_owned(),
        budget,
        reserve: 0,
        policy: Policy::Lru,
        keep_heat: true,
    })
    .unwrap()
}

fn model(store: &Store) -> ModelStore {
    let commit = COMMIT.parse().unwrap();
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

/// Set in processes that this test starts, to the home they share.
const SHARED_HOME: &str = "DELTAFIN_TEST_SHARED_HOME";

fn start_process(home: &Path, budget: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_of_several_processes", "--nocapture"])
        .env(SHARED_HOME, home)
        .env("DELTAFIN_TEST_BUDGET", budget.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Does its work only where [`start_process`] has started it.
#[test]
fn one_of_several_processes() {
    let Some(home) = std::env::var_os(SHARED_HOME) else {
        return;
    };
    let budget = std::env::var("DELTAFIN_TEST_BUDGET").unwrap();
    let store = open(Path::new(&home), budget.parse().unwrap());
    let model = model(&store);
    for n in 0..400u16 {
        let key = key(n * 7 % 40);
        assert!(demand(&model, key) == content(key), "{key}: wrong bytes");
    }
    println!("kept={}", store.stats().kept);
}

fn kept(child: Child) -> u64 {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let number = text.split("kept=").nth(1).unwrap();
    number.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn processes_on_one_home_fetch_each_expert_once() {
    let home = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..3)
        .map(|_| start_process(home.path(), 1 << 30))
        .collect();
    let fetched: u64 = children.into_iter().map(kept).sum();
    assert_eq!(fetched, 40, "40 experts");
}

/// Two stores on one home are two processes to each other: every lock is taken anew by each.
#[test]
fn what_one_has_reserved_another_on_the_same_home_leaves_free() {
    let home = tempfile::tempdir().unwrap();
    let budget = 12 * LEN;
    let first = open(home.path(), budget);
    let writing = model(&first);
    let mut slots = Vec::new();
    for n in 0..6 {
        let Lookup::Miss(mut slot) = writing.lookup(key(n), LEN) else {
            panic!("an empty store has it");
        };
        slot.make_room().unwrap();
        slots.push(slot);
    }
    // It would count from nothing if it took the first for dead.
    let second = open(home.path(), budget);
    let other = model(&second);
    for n in 100..120 {
        assert_eq!(demand(&other, key(n)), content(key(n)));
    }
    let experts = other.folder().join("experts");
    assert_eq!(seen(&experts), 6 * LEN, "half of the budget is spoken for");
    for (n, slot) in (0..).zip(slots) {
        assert_eq!(fill(slot, key(n)), Filled::Kept);
        assert!(seen(&experts) <= budget);
    }
    assert_eq!(seen(&experts), budget);
}

#[test]
fn processes_on_one_home_keep_one_budget_even_if_one_is_killed() {
    let home = tempfile::tempdir().unwrap();
    let budget = 12 * LEN;
    let experts = home
        .path()
        .join("models-v1/org--name")
        .join(COMMIT)
        .join("experts");
    let mut victim = start_process(home.path(), budget);
    let mut others: Vec<Child> = (0..2).map(|_| start_process(home.path(), budget)).collect();
    let (mut looks, mut most) = (0, 0);
    while others.iter_mut().any(|c| c.try_wait().unwrap().is_none()) {
        most = most.max(seen(&experts));
        looks += 1;
        if looks == 10 {
            let _ = victim.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = victim.kill();
    victim.wait().unwrap();
    others
        .into_iter()
        .for_each(|child| assert!(kept(child) > 0));
    assert!(looks > 3, "looked {looks} times: proves nothing");
    let store = open(home.path(), budget);
    let model = model(&store);
    assert!(most <= budget, "saw {most} bytes of {budget}");
    assert!(model.experts().len() <= 12);
    for (key, _) in model.experts() {
        assert!(demand(&model, key) == content(key), "{key}");
    }
}
