//! Experts that go by heat, and heat that outlives a process.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use super::support::LEN;
use super::support::content;
use super::support::key;
use super::support::model;
use super::support::open_by;
use super::support::put;
use super::support::stored;
use crate::store::Budget;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::Lookups;
use crate::store::ModelStore;
use crate::store::NotKept;
use crate::store::Policy;
use crate::store::Store;
use crate::store::model::digest_of;

fn open(home: &Path, experts: u64) -> Store {
    open_by(home, Budget::Limit(experts * LEN), Policy::Lfu, true)
}

/// One layer of a sweep, as it is computed: asks for all, then brings what is not here.
fn sweep(model: &ModelStore, experts: &[u16]) -> Vec<Filled> {
    let keys: Vec<_> = experts.iter().copied().map(key).collect();
    model.ask(&keys);
    let missing = keys.iter().filter(|key| !model.contains(**key, LEN));
    let filled = missing.map(|key| put(model, *key)).collect();
    model.touch(&keys);
    model.end_of_sweep();
    filled
}

fn heat_file(home: &Path) -> Vec<u8> {
    let folder = "models-v1/org--name/0123456789012345678901234567890123456789";
    fs::read(home.join(folder).join("heat")).unwrap_or_default()
}

#[test]
fn what_is_used_most_stays_and_restarts_change_nothing() {
    let home = tempfile::tempdir().unwrap();
    {
        let store = open(home.path(), 3);
        let model = model(&store);
        for _ in 0..3 {
            sweep(&model, &[1, 2]);
        }
        sweep(&model, &[2, 3]);
        // 3 was used once, as was 4, and earlier.
        assert_eq!(sweep(&model, &[4]), [Filled::Kept]);
        assert_eq!(stored(&model), [1, 2, 4]);
        assert_eq!(model.hottest(), [2, 1, 4, 3].map(key));
    }
    let store = open(home.path(), 3);
    let model = model(&store);
    assert_eq!(model.hottest(), [2, 1, 4, 3].map(key));
    assert_eq!(sweep(&model, &[5]), [Filled::Kept], "for 4");
    // It has not lost its past, and is worth more than one use.
    assert_eq!(sweep(&model, &[4]), [Filled::Kept], "for 5");
    assert_eq!(sweep(&model, &[6]), [Filled::NotKept(NotKept::Colder)]);
    assert_eq!(stored(&model), [1, 2, 4]);
    assert_eq!((store.stats().colder, store.stats().not_kept), (1, 0));
    assert_eq!(store.stats().trouble, None, "nobody is to blame");
    // A smaller budget keeps the hottest.
    store.set_budget(Budget::Limit(LEN)).unwrap();
    assert_eq!(stored(&model), [2]);
}

#[test]
fn lookups_are_told_while_their_process_works_on() {
    let home = tempfile::tempdir().unwrap();
    let first = open(home.path(), 3);
    let used = model(&first);
    // As if half a minute had gone by.
    first.inner.heat_kept.store(0, Relaxed);
    sweep(&used, &[1, 2]);
    let told = |model: &ModelStore| {
        let held = model.held().unwrap();
        held.values()
            .map(|held| held.lookups)
            .fold(Lookups::default(), Lookups::plus)
    };
    let misses = |misses| Lookups { hits: 0, misses };
    assert_eq!(told(&used), misses(2));
    {
        let second = open(home.path(), 3);
        let other = model(&second);
        assert_eq!(told(&other), misses(2), "kept at the end of the sweep");
        sweep(&other, &[3]);
        assert_eq!(told(&other), misses(3));
    }
    // Nothing is counted twice, by whoever ends.
    assert_eq!(told(&used), misses(3));
    drop((used, first));
    assert_eq!(told(&model(&open(home.path(), 3))), misses(3));
}

#[test]
fn the_order_of_arrival_decides_nothing() {
    // Each arrives with another past; all orders leave the same three.
    let orders = [[3, 4, 5, 6], [6, 5, 4, 3], [5, 3, 6, 4], [4, 6, 3, 5]];
    let mut left = Vec::new();
    for order in orders {
        let home = tempfile::tempdir().unwrap();
        let store = open(home.path(), 3);
        let model = model(&store);
        for past in [&[6][..], &[6, 4], &[6, 4, 3], &[1], &[2, 7]] {
            model.ask(&past.iter().copied().map(key).collect::<Vec<_>>());
            model.end_of_sweep();
        }
        put(&model, key(7));
        put(&model, key(1));
        put(&model, key(2));
        // What the layer uses and is here does not go for what it uses and is not.
        model.ask(&[1, 3, 4, 5, 6].map(key));
        for expert in order {
            put(&model, key(expert));
        }
        left.push(stored(&model));
    }
    assert_eq!(left, [[1, 4, 6]; 4]);
}

#[test]
fn what_is_on_its_way_is_neither_forgotten_nor_in_the_way() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), 1);
    let model = model(&store);
    let slot = |expert| match model.lookup(key(expert), LEN) {
        Lookup::Miss(slot) => slot,
        other => panic!("{other:?}"),
    };
    model.ask(&[key(1)]);
    let mut first = slot(1);
    first.make_room().unwrap();
    model.ask(&[key(2)]);
    model.ask(&[key(2)]);
    let mut second = slot(2);
    // The coldest is being written: later.
    assert_eq!(second.make_room(), Err(NotKept::Budget));
    model.ask(&[key(3)]);
    // Not colder by its use alone, but the lower key goes.
    let mut third = slot(3);
    assert_eq!(third.make_room(), Err(NotKept::Budget));
    drop(third);
    let bytes = content(key(1));
    assert_eq!(
        first.fill(bytes.clone(), digest_of(&bytes), "test"),
        Filled::Kept
    );
    model.ask(&[key(2)]);
    second.make_room().unwrap();
    assert_eq!(stored(&model), [0; 0]);
    // Given up: the room is free again, and nothing waits for it.
    drop(second);
    assert_eq!(put(&model, key(9)), Filled::Kept);
}

#[test]
fn a_smaller_budget_does_not_wait_for_what_is_on_its_way() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), 2);
    let model = model(&store);
    sweep(&model, &[5]);
    sweep(&model, &[5]);
    model.ask(&[key(1)]);
    let Lookup::Miss(mut slot) = model.lookup(key(1), LEN) else {
        panic!("here before it came");
    };
    slot.make_room().unwrap();
    // The hotter goes: it is all that can.
    assert_eq!(store.trim(LEN).unwrap().left, LEN);
    assert_eq!(stored(&model), [0; 0]);
}

#[test]
fn a_damaged_heat_file_is_no_file_and_others_count() {
    let home = tempfile::tempdir().unwrap();
    drop({
        let store = open(home.path(), 9);
        sweep(&model(&store), &[1, 2, 3]);
        sweep(&model(&store), &[2]);
        store
    });
    let whole = heat_file(home.path());
    assert!(!whole.is_empty());
    let folder = "models-v1/org--name/0123456789012345678901234567890123456789/heat";
    let path = home.path().join(folder);
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        for damaged in [&flipped[..], &whole[..at]] {
            fs::write(&path, damaged).unwrap();
            let store = open(home.path(), 9);
            assert_eq!(model(&store).hottest(), [], "byte {at}");
        }
    }
    // Looking has not written over it; using does.
    fs::write(&path, &whole).unwrap();
    let two = [open(home.path(), 9), open(home.path(), 9)];
    sweep(&model(&two[0]), &[3]);
    sweep(&model(&two[0]), &[3]);
    sweep(&model(&two[1]), &[4]);
    drop(two);
    let store = open(home.path(), 9);
    assert_eq!(model(&store).hottest(), [3, 2, 4, 1].map(key));
}

#[test]
fn a_measurement_neither_reads_nor_writes_heat() {
    let home = tempfile::tempdir().unwrap();
    sweep(&model(&open(home.path(), 9)), &[1, 2, 3]);
    let before = heat_file(home.path());
    {
        let budget = Budget::Limit(9 * LEN);
        let apart = open_by(home.path(), budget, Policy::Lfu, false);
        assert_eq!(model(&apart).hottest(), []);
        sweep(&model(&apart), &[7]);
        assert_eq!(model(&apart).hottest(), [key(7)]);
    }
    assert_eq!(heat_file(home.path()), before);
    // Without a policy that needs it, heat is kept all the same.
    sweep(
        &model(&open_by(
            home.path(),
            Budget::Limit(9 * LEN),
            Policy::Lru,
            true,
        )),
        &[3],
    );
    assert_ne!(heat_file(home.path()), before);
    assert_eq!(model(&open(home.path(), 9)).hottest()[0], key(3));
}
