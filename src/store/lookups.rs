//! What is held of each layer, how well it is proved, and how often it was there when it was needed.
//!
//! Lookups are counted in memory and added to `lookups.json` every half minute of work and when a
//! process ends in order: a count is not worth a write a token, and what a kill has lost of it is
//! missed by nobody.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::Serialize;

use super::Inner;
use super::Model;
use super::ModelStore;
use super::State;
use super::disk::Disk;
use super::disk::read_file;
use super::disk::write_file;
use super::error::StoreError;
use super::index::EntryId;
use super::lock;
use super::table::Level;
use super::table::Subject;

const FILE: &str = "lookups.json";

/// How often experts were needed, as far as processes have said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookups {
    /// They were on disk.
    pub hits: u64,
    /// They were not.
    pub misses: u64,
}

impl Lookups {
    /// The sum of two counts.
    pub fn plus(self, other: Lookups) -> Lookups {
        Lookups {
            hits: self.hits.saturating_add(other.hits),
            misses: self.misses.saturating_add(other.misses),
        }
    }

    /// The part that was on disk, from 0 to 1; `None` if nothing was needed yet.
    pub fn rate(self) -> Option<f64> {
        let all = self.hits.saturating_add(self.misses);
        #[expect(
            clippy::cast_precision_loss,
            reason = "a rate is shown with few digits"
        )]
        let rate = self.hits as f64 / all as f64;
        (all > 0).then_some(rate)
    }
}

/// What is held of a layer's experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Experts on disk.
    pub experts: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Those that are first arrivals.
    pub first_use: usize,
    /// Those that were proved by whole shards.
    pub whole_shard: usize,
    /// Those that a manifest names.
    pub manifest: usize,
    /// Those for which nothing vouches: they are fetched again before they are used.
    pub unknown: usize,
    /// How often the layer's experts were needed.
    pub lookups: Lookups,
}

impl Held {
    /// Two layers, or two models, together.
    pub fn plus(self, other: &Held) -> Held {
        Held {
            experts: self.experts + other.experts,
            bytes: self.bytes + other.bytes,
            first_use: self.first_use + other.first_use,
            whole_shard: self.whole_shard + other.whole_shard,
            manifest: self.manifest + other.manifest,
            unknown: self.unknown + other.unknown,
            lookups: self.lookups.plus(other.lookups),
        }
    }
}

/// `lookups.json`.
#[derive(Default, Serialize, Deserialize)]
struct Kept {
    layers: BTreeMap<u16, Lookups>,
}

impl State {
    /// An expert was looked up and was there.
    pub(super) fn hit(&mut self, id: EntryId) {
        self.stats.hits += 1;
        self.lookups_of(id).hits += 1;
    }

    /// An expert was looked up and was not there.
    pub(super) fn missed(&mut self, id: EntryId) {
        self.stats.misses += 1;
        self.lookups_of(id).misses += 1;
    }

    /// Nobody needed the expert that was missed: an installation brings it.
    pub(super) fn not_needed(&mut self, id: EntryId) {
        self.stats.misses = self.stats.misses.saturating_sub(1);
        let misses = &mut self.lookups_of(id).misses;
        *misses = misses.saturating_sub(1);
    }

    fn lookups_of(&mut self, id: EntryId) -> &mut Lookups {
        self.lookups.entry((id.model, id.key.layer)).or_default()
    }

    fn lookups_in(&self, model: u32) -> BTreeMap<u16, Lookups> {
        let all = self.lookups.range((model, 0)..=(model, u16::MAX));
        let some = all.filter(|(_, lookups)| **lookups != Lookups::default());
        some.map(|((_, layer), lookups)| (*layer, *lookups))
            .collect()
    }

    fn take_lookups(&mut self, model: u32) -> BTreeMap<u16, Lookups> {
        let taken = self.lookups_in(model);
        self.lookups.retain(|(of, _), _| *of != model);
        taken
    }

    fn put_back(&mut self, model: u32, taken: BTreeMap<u16, Lookups>) {
        for (layer, lookups) in taken {
            let sum = self.lookups.entry((model, layer)).or_default();
            *sum = sum.plus(lookups);
        }
    }
}

impl ModelStore {
    /// What is held of each layer of which something is here or was ever needed.
    ///
    /// # Errors
    ///
    /// If the digests cannot be read.
    pub fn held(&self) -> Result<BTreeMap<u16, Held>, StoreError> {
        let mut layers: BTreeMap<u16, Held> = BTreeMap::new();
        for (key, bytes) in self.experts() {
            let known = self.told(&Subject::Expert(key))?;
            let held = layers.entry(key.layer).or_default();
            held.experts += 1;
            held.bytes += bytes;
            match known.map(|known| known.level) {
                Some(Level::FirstUse) => held.first_use += 1,
                Some(Level::WholeShard) => held.whole_shard += 1,
                Some(Level::Manifest) => held.manifest += 1,
                None => held.unknown += 1,
            }
        }
        let inner = &self.store().inner;
        let now = lock(&inner.state).lookups_in(self.record().id);
        for (layer, lookups) in added(kept(&*inner.disk, self.record()), &now) {
            layers.entry(layer).or_default().lookups = lookups;
        }
        Ok(layers)
    }
}

impl Inner {
    /// Adds what this process has counted since the last time to what all have, unless another process
    /// holds the store for longer than `wait`.
    pub(super) fn keep_lookups(&self, model: &Model, wait: Duration) {
        let now = lock(&self.state).take_lookups(model.id);
        if !now.is_empty() && !self.add_lookups(model, &now, wait) {
            lock(&self.state).put_back(model.id, now);
        }
    }

    fn add_lookups(&self, model: &Model, now: &BTreeMap<u16, Lookups>, wait: Duration) -> bool {
        if self.disk.facts(&model.folder).is_err() {
            return false;
        }
        let Ok(entered) = self.gate.enter(wait) else {
            return false;
        };
        let layers = added(kept(&*self.disk, model), now);
        let text = serde_json::to_vec(&Kept { layers });
        let written =
            text.is_ok_and(|text| write_file(&*self.disk, &model.folder.join(FILE), &text).is_ok());
        drop(entered);
        written
    }
}

/// What earlier processes have counted; nothing, if that cannot be read.
fn kept(disk: &dyn Disk, model: &Model) -> BTreeMap<u16, Lookups> {
    let bytes = read_file(disk, &model.folder.join(FILE)).ok().flatten();
    let kept = bytes.and_then(|bytes| serde_json::from_slice::<Kept>(&bytes).ok());
    kept.unwrap_or_default().layers
}

fn added(mut kept: BTreeMap<u16, Lookups>, now: &BTreeMap<u16, Lookups>) -> BTreeMap<u16, Lookups> {
    for (layer, lookups) in now {
        let sum = kept.entry(*layer).or_default();
        *sum = sum.plus(*lookups);
    }
    kept
}
