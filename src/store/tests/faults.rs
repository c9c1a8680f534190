//! Every single disk operation fails once, and the plug is pulled after every single one.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::dice::Dice;
use super::sim::Fault;
use super::sim::SimDisk;
use super::support::LEN;
use super::support::content;
use super::support::key;
use super::support::model;
use super::support::put;
use crate::store::Area;
use crate::store::Budget;
use crate::store::CoreState;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::ModelStore;
use crate::store::Policy;
use crate::store::Store;
use crate::store::StoreError;
use crate::store::StoreOptions;
use crate::store::SyncBehind;
use crate::store::VerifyOptions;
use crate::store::Waited;
use crate::store::model::digest_of;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

const BUDGET: u64 = 4 * LEN;
const CORE: CorePart = CorePart::Layer(0);

pub(super) fn open(disk: &SimDisk) -> Result<Store, StoreError> {
    open_by(disk, Policy::Lru)
}

fn open_by(disk: &SimDisk, policy: Policy) -> Result<Store, StoreError> {
    let options = StoreOptions {
        home: PathBuf::from("/home"),
        budget: Budget::Limit(BUDGET),
        reserve: 0,
        policy,
        keep_heat: true,
    };
    Store::open_on(options, Arc::new(disk.clone()), SyncBehind::Never)
}

fn core_bytes() -> Vec<u8> {
    (0..3000u32).map(|i| (i % 251) as u8).collect()
}

/// Asks for an expert and brings it if it is missing. Whatever the disk does, the bytes are right.
pub(super) fn demand(model: &ModelStore, key: ExpertKey) {
    for _ in 0..20 {
        match model.lookup(key, LEN) {
            Lookup::Hit(lease) => match lease.read() {
                Ok(bytes) => return assert!(bytes == content(key), "{key}: wrong bytes served"),
                Err(_) => continue,
            },
            Lookup::Miss(slot) => {
                slot.fill(content(key), digest_of(&content(key)), "test");
                return;
            }
            Lookup::Filling(wait) => match wait.wait(Duration::ZERO) {
                Waited::Filled(bytes) => return assert_eq!(bytes, content(key)),
                Waited::Again => continue,
                Waited::Late(slot) => {
                    slot.fill(content(key), digest_of(&content(key)), "test");
                    return;
                }
            },
        }
    }
    panic!("{key}: looked up 20 times, and never got anywhere");
}

fn append_core(model: &ModelStore, upto: usize) -> Result<(), StoreError> {
    let bytes = core_bytes();
    if let CoreState::Partial(mut writer) = model.core(CORE, bytes.len() as u64)? {
        let done = writer.done() as usize;
        if done < upto {
            writer.append(&bytes[done..upto])?;
        }
        if upto == bytes.len() {
            writer.finish("test")?;
        }
    }
    Ok(())
}

/// Brings an expert of a model without a limit piece by piece, up to somewhere.
fn install(store: &Store, upto: usize) -> Result<(), StoreError> {
    let commit = "9876543210987654321098765432109876543210".parse().unwrap();
    let model = store.model(&"org/whole".parse().unwrap(), &commit);
    model.set_unlimited(true)?;
    let bytes = content(key(1));
    match model.lookup(key(1), LEN) {
        Lookup::Hit(lease) => {
            if let Ok(found) = lease.read() {
                assert!(found == bytes, "wrong bytes served");
            }
        }
        Lookup::Miss(slot) => {
            let Ok(mut writer) = slot.grow() else {
                return Ok(());
            };
            let done = writer.done() as usize;
            if bytes[done..upto.max(done)]
                .chunks(70)
                .all(|crumb| writer.append(crumb).is_ok())
                && writer.missing() == 0
            {
                writer.finish("test");
            }
        }
        Lookup::Filling(_) => {}
    }
    Ok(())
}

/// Fill, evict, reopen, trim, fetch, verify.
fn story(disk: &SimDisk) -> Result<(), StoreError> {
    {
        let store = open(disk)?;
        let model = model(&store);
        model.write(Area::Meta, "config.json", b"{}")?;
        append_core(&model, 1000)?;
        install(&store, 555)?;
        (0..6).for_each(|n| demand(&model, key(n)));
        model.touch(&[key(3), key(2)]);
        model.ask(&[key(0), key(5), key(6)]);
        model.end_of_sweep();
        store.sync()?;
        demand(&model, key(6));
        append_core(&model, 2000)?;
    }
    let store = open_by(disk, Policy::Lfu)?;
    let model = model(&store);
    model.read(Area::Meta, "config.json")?;
    // One that was asked for is kept for something colder, or not at all.
    model.ask(&[key(0), key(12), key(13)]);
    demand(&model, key(12));
    demand(&model, key(13));
    [6, 2, 0].iter().for_each(|n| demand(&model, key(*n)));
    store.trim(2 * LEN)?;
    (7..10).for_each(|n| demand(&model, key(n)));
    append_core(&model, 3000)?;
    install(&store, LEN as usize)?;
    let all = VerifyOptions {
        every: 1,
        repair: true,
    };
    let verified = model.verify(all, &mut |_| ControlFlow::Continue(()))?;
    // A disk that cannot be read once has a file that cannot be read.
    assert!(
        verified.damaged.is_empty() || disk.happened(),
        "{verified:?}"
    );
    store.sync()?;
    [10, 11, 2].iter().for_each(|n| demand(&model, key(*n)));
    Ok(())
}

/// What must hold on a healthy disk after anything.
fn aftermath(disk: &SimDisk, what: &str) {
    let store = open(disk).unwrap_or_else(|e| panic!("{what}: cannot be opened: {e}"));
    disk.forget_most();
    let model = model(&store);
    for (key, len) in model.experts() {
        assert_eq!(len, LEN, "{what}: {key}");
        demand(&model, key);
    }
    let left: Vec<_> = disk.files(&model.folder().join("experts/tmp"));
    assert_eq!(left, [], "{what}: left behind");
    let claims = disk.files(Path::new("/home/locks/claims"));
    assert_eq!(claims, [], "{what}: left behind");
    for n in 20..26 {
        assert_eq!(put(&model, key(n)), Filled::Kept, "{what}: wedged at {n}");
    }
    append_core(&model, 3000).unwrap_or_else(|e| panic!("{what}: core: {e}"));
    // Brought, or gone on with; then found, and right.
    for _ in 0..2 {
        install(&store, LEN as usize).unwrap_or_else(|e| panic!("{what}: an install: {e}"));
    }
    let installed = disk.files(Path::new("/home/models-v1/org--whole"));
    let whole = installed
        .iter()
        .filter(|(path, len)| path.ends_with("experts/001/0001") && *len == LEN);
    assert_eq!(whole.count(), 1, "{what}: {installed:?}");
    let CoreState::Ready(path) = model.core(CORE, 3000).unwrap() else {
        panic!("{what}: the core was finished and is not ready");
    };
    let mut core = Vec::new();
    disk.edit(&path, |bytes| core = bytes.clone());
    assert!(core == core_bytes(), "{what}: the core is wrong");
    if let Some(bytes) = model.read(Area::Meta, "config.json").unwrap() {
        assert_eq!(bytes, b"{}", "{what}");
    }
    let files = disk.files(&model.folder().join("experts"));
    let bytes: u64 = files.iter().map(|(_, len)| len).sum();
    let counted = store.inner.enter(Duration::ZERO).unwrap().ledger.used();
    assert_eq!(counted, bytes, "{what}: {files:?}");
    assert!(disk.most() <= BUDGET, "{what}: {} bytes", disk.most());
    drop(model);
    drop(store);
    let lines = disk.files(Path::new("/home/locks"));
    let lines = lines
        .iter()
        .filter(|(p, _)| p.to_string_lossy().contains("/s-"));
    assert_eq!(lines.count(), 0, "{what}: somebody did not say good-bye");
    let store = open(disk).unwrap();
    assert_eq!(
        store.stats().distrusted,
        0,
        "{what}: a clean stop was not believed"
    );
}

/// Runs the story with a fault at every operation; `then` is what the machine does after it.
fn everywhere(fault: Fault, mut then: impl FnMut(&SimDisk, u64)) -> u64 {
    for n in 1.. {
        let disk = SimDisk::new();
        disk.plan(n, fault);
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| story(&disk)));
        let what = format!("{fault:?} at operation {n}");
        let Ok(told) = told else {
            panic!("{what}: after\n{}", disk.tail());
        };
        assert!(
            disk.most() <= BUDGET,
            "{what}: {} bytes\n{}",
            disk.most(),
            disk.tail()
        );
        if !disk.happened() {
            told.unwrap_or_else(|e| panic!("without a fault: {e}"));
            return n - 1;
        }
        then(&disk, n);
        let checked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| aftermath(&disk, &what)));
        assert!(checked.is_ok(), "{what}: after\n{}", disk.tail());
    }
    unreachable!("the story ends")
}

#[test]
fn no_single_failure_breaks_a_promise() {
    let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::Other];
    for kind in kinds {
        let operations = everywhere(Fault::Fail(kind), |disk, _| disk.killed());
        assert!(
            operations > 300,
            "{operations} operations: the story is too short"
        );
    }
}

#[test]
fn a_kill_after_any_operation_breaks_no_promise() {
    everywhere(Fault::Stop, |disk, _| disk.killed());
}

#[test]
fn a_power_loss_after_any_operation_breaks_no_promise() {
    for seed in 0..3 {
        everywhere(Fault::Stop, |disk, n| {
            disk.power_lost(&mut Dice(seed * 1_000_003 + n));
        });
    }
}

#[test]
fn a_power_loss_while_clearing_up_after_another_breaks_no_promise() {
    everywhere(Fault::Stop, |disk, n| {
        let mut dice = Dice(n);
        disk.power_lost(&mut dice);
        disk.plan(1 + dice.below(60), Fault::Stop);
        let _ = open(disk);
        disk.power_lost(&mut dice);
    });
}

#[test]
fn a_kill_loses_nothing_that_was_published() {
    let disk = SimDisk::new();
    {
        let store = open(&disk).unwrap();
        let model = model(&store);
        (0..4).for_each(|n| demand(&model, key(n)));
        disk.plan(1, Fault::Stop); // before it can say good-bye
        assert!(open(&disk).is_err());
    }
    disk.killed();
    let store = open(&disk).unwrap();
    assert_eq!(model(&store).experts().len(), 4);
    assert_eq!(store.stats().distrusted, 0);
}

#[test]
fn a_power_loss_loses_what_was_not_synced_and_nothing_else() {
    for seed in 0..20 {
        let disk = SimDisk::new();
        {
            let store = open(&disk).unwrap();
            let model = model(&store);
            (0..2).for_each(|n| demand(&model, key(n)));
            store.sync().unwrap();
            (2..4).for_each(|n| demand(&model, key(n)));
            disk.plan(1, Fault::Stop);
            assert!(open(&disk).is_err());
        }
        disk.power_lost(&mut Dice(seed));
        let store = open(&disk).unwrap();
        let experts = model(&store).experts();
        let experts: Vec<u16> = experts.iter().map(|(key, _)| key.expert).collect();
        assert_eq!(experts, [0, 1], "seed {seed}");
    }
}

/// Where locks are granted to everybody each process takes the other for dead, sweeps its files and
/// takes over its claims. That may cost downloads and the budget, and no wrong byte.
#[test]
fn fault_48_two_processes_where_locks_do_nothing_serve_no_wrong_byte() {
    for seed in 0..10 {
        let disk = SimDisk::new();
        disk.without_locks();
        let stores = [open(&disk).unwrap(), open(&disk).unwrap()];
        std::thread::scope(|scope| {
            for (n, store) in (0..).zip(&stores) {
                let disk = &disk;
                scope.spawn(move || {
                    let model = model(store);
                    let mut dice = Dice(seed * 2 + n);
                    for round in 0..150 {
                        let expert = u16::try_from(dice.below(9)).unwrap();
                        demand(&model, key(expert));
                        // A third comes and goes, and clears up as it sees fit.
                        if round % 50 == 49 {
                            drop(open(disk));
                        }
                    }
                });
            }
        });
        drop(stores);
        let store = open(&disk).unwrap();
        let model = model(&store);
        (0..9).for_each(|n| demand(&model, key(n)));
        let all = VerifyOptions {
            every: 1,
            repair: false,
        };
        let verified = model.verify(all, &mut |_| ControlFlow::Continue(()));
        assert_eq!(verified.unwrap().damaged, [], "seed {seed}");
        // Written aside, then named: nobody has ever seen a part of one.
        assert_eq!(disk.shortest(), Some(LEN), "seed {seed}");
    }
}
