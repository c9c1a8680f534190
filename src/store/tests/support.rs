//! A small model of small experts.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use crate::store::Budget;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::ModelStore;
use crate::store::Policy;
use crate::store::Store;
use crate::store::StoreOptions;
use crate::store::SyncBehind;
use crate::store::disk::RealDisk;
use crate::store::model::digest_of;
use crate::terms::ExpertKey;

pub(super) const LEN: u64 = 1000;

pub(super) fn open(home: &Path, budget: Budget) -> Store {
    open_by(home, budget, Policy::Lru, true)
}

pub(super) fn open_by(home: &Path, budget: Budget, policy: Policy, keep_heat: bool) -> Store {
    let home = home.to_owned();
    let options = StoreOptions {
        home,
        budget,
        reserve: 0,
        policy,
        keep_heat,
    };
    Store::open_on(options, Arc::new(RealDisk), SyncBehind::Never).unwrap()
}

pub(super) fn model(store: &Store) -> ModelStore {
    let commit = "0123456789012345678901234567890123456789".parse().unwrap();
    store.model(&"org/name".parse().unwrap(), &commit)
}

pub(super) fn key(expert: u16) -> ExpertKey {
    ExpertKey { layer: 1, expert }
}

pub(super) fn content(key: ExpertKey) -> Bytes {
    let first = u32::from(key.expert) * 31 + 7;
    (first..)
        .take(LEN as usize)
        .map(|i| (i % 253) as u8)
        .collect()
}

pub(super) fn put(model: &ModelStore, key: ExpertKey) -> Filled {
    match model.lookup(key, LEN) {
        Lookup::Miss(slot) => slot.fill(content(key), digest_of(&content(key)), "test"),
        other => panic!("{key}: {other:?}"),
    }
}

pub(super) fn stored(model: &ModelStore) -> Vec<u16> {
    let experts = model.experts();
    experts.into_iter().map(|(key, _)| key.expert).collect()
}
