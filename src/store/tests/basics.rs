//! What each part does when nothing goes wrong.

use bytes::Bytes;

use super::support::LEN;
use super::support::content;
use super::support::key;
use super::support::model;
use super::support::open;
use super::support::put;
use super::support::stored;
use crate::store::Area;
use crate::store::Budget;
use crate::store::CoreState;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::NotKept;
use crate::store::model::digest_of;
use crate::terms::CorePart;

#[test]
fn an_expert_comes_back_as_it_went_in_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    {
        let store = open(home.path(), Budget::Unlimited);
        assert_eq!(put(&model(&store), key(3)), Filled::Kept);
    }
    let store = open(home.path(), Budget::Unlimited);
    let Lookup::Hit(lease) = model(&store).lookup(key(3), LEN) else {
        panic!("lost");
    };
    assert_eq!(lease.read().unwrap(), content(key(3)));
    assert_eq!(store.stats().distrusted, 0);
    let file = model(&store).folder().join("experts/001/0003");
    assert_eq!(
        std::fs::read(file).unwrap(),
        content(key(3)),
        "the hub's bytes, nothing else"
    );
}

#[test]
fn the_expert_used_longest_ago_goes_first_and_restarts_change_nothing() {
    let home = tempfile::tempdir().unwrap();
    {
        let store = open(home.path(), Budget::Limit(4 * LEN));
        let model = model(&store);
        for expert in [5, 1, 2, 3] {
            put(&model, key(expert));
        }
        model.touch(&[key(2), key(5)]);
    }
    let store = open(home.path(), Budget::Limit(4 * LEN));
    let model = model(&store);
    put(&model, key(7));
    assert_eq!(stored(&model), [2, 3, 5, 7], "1 was the oldest");
    put(&model, key(8));
    assert_eq!(stored(&model), [2, 5, 7, 8], "then 3");
    put(&model, key(9));
    assert_eq!(
        stored(&model),
        [5, 7, 8, 9],
        "2 and 5 tie: the lower key goes"
    );
}

#[test]
fn a_leased_expert_outlives_every_wish_for_room() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Limit(2 * LEN));
    let model = model(&store);
    put(&model, key(1));
    put(&model, key(2));
    let Lookup::Hit(one) = model.lookup(key(1), LEN) else {
        panic!("lost");
    };
    let Lookup::Hit(two) = model.lookup(key(2), LEN) else {
        panic!("lost");
    };
    assert_eq!(put(&model, key(3)), Filled::NotKept(NotKept::Budget));
    drop(two);
    assert_eq!(put(&model, key(3)), Filled::Kept);
    assert_eq!(stored(&model), [1, 3]);
    assert_eq!(store.trim(0).unwrap().left, LEN);
    assert_eq!(one.read().unwrap(), content(key(1)));
    drop(one);
    assert_eq!(store.trim(0).unwrap().left, 0);
}

#[test]
fn nothing_is_evicted_for_an_expert_that_would_not_fit_anyway() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Limit(3 * LEN));
    let model = model(&store);
    put(&model, key(1));
    let Lookup::Miss(slot) = model.lookup(key(2), 4 * LEN) else {
        panic!("never stored");
    };
    let large = Bytes::from(vec![2; 4 * LEN as usize]);
    let filled = slot.fill(large.clone(), digest_of(&large), "test");
    assert_eq!(filled, Filled::NotKept(NotKept::Budget));
    assert_eq!(stored(&model), [1]);
}

#[test]
fn opening_with_a_smaller_budget_trims_at_once() {
    let home = tempfile::tempdir().unwrap();
    {
        let store = open(home.path(), Budget::Unlimited);
        (0..10).for_each(|expert| assert_eq!(put(&model(&store), key(expert)), Filled::Kept));
    }
    let store = open(home.path(), Budget::Limit(3 * LEN));
    assert_eq!(stored(&model(&store)), [7, 8, 9]);
}

#[test]
fn a_model_without_a_limit_is_neither_counted_nor_evicted() {
    let home = tempfile::tempdir().unwrap();
    {
        let store = open(home.path(), Budget::Limit(2 * LEN));
        model(&store).set_unlimited(true).unwrap();
        (0..5).for_each(|expert| assert_eq!(put(&model(&store), key(expert)), Filled::Kept));
    }
    let store = open(home.path(), Budget::Limit(2 * LEN));
    let model = model(&store);
    assert_eq!(stored(&model), [0, 1, 2, 3, 4]);
    assert_eq!(store.stats().bytes, 0);
    model.set_unlimited(false).unwrap();
    assert_eq!(store.stats().bytes, 5 * LEN);
    put(&model, key(7));
    assert_eq!(stored(&model), [4, 7]);
}

#[test]
fn a_core_file_grows_over_restarts_and_is_published_whole() {
    let home = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
    let len = bytes.len() as u64;
    let mut from = 0;
    loop {
        let store = open(home.path(), Budget::Limit(0));
        let mut writer = match model(&store).core(CorePart::Layer(4), len).unwrap() {
            CoreState::Partial(writer) => writer,
            other => panic!("{other:?}"),
        };
        assert_eq!(writer.done(), from, "nothing is fetched twice");
        let busy = model(&store).core(CorePart::Layer(4), len).unwrap();
        assert!(matches!(busy, CoreState::Busy(_)), "{busy:?}");
        let end = (from as usize + 3_333).min(bytes.len());
        writer.append(&bytes[from as usize..end]).unwrap();
        from = end as u64;
        if from == len {
            writer.finish("test").unwrap();
            break;
        }
        assert!(writer.finish("test").is_err(), "it is not whole");
    }
    let store = open(home.path(), Budget::Limit(0));
    let CoreState::Ready(path) = model(&store).core(CorePart::Layer(4), len).unwrap() else {
        panic!("lost");
    };
    assert_eq!(std::fs::read(path).unwrap(), bytes);
    let core = std::fs::read_dir(model(&store).folder().join("core")).unwrap();
    assert_eq!(core.count(), 1, "nothing is left beside it");
}

#[test]
fn a_small_file_that_rots_is_as_good_as_missing() {
    let home = tempfile::tempdir().unwrap();
    let store = open(home.path(), Budget::Limit(0));
    let model = model(&store);
    assert_eq!(model.read(Area::Meta, "config.json").unwrap(), None);
    model.write(Area::Meta, "config.json", b"{}").unwrap();
    assert_eq!(
        model.read(Area::Meta, "config.json").unwrap().unwrap(),
        b"{}"
    );
    std::fs::write(model.folder().join("meta/config.json"), b"[]").unwrap();
    assert_eq!(model.read(Area::Meta, "config.json").unwrap(), None);
    for name in ["../x", "/x", "", ".hidden", "a//b", "a\\b"] {
        assert!(model.write(Area::Meta, name, b"").is_err(), "{name}");
    }
}
