//! Which experts are on disk, and which goes first.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;

use lru::LruCache;
use serde::Deserialize;
use serde::Serialize;

use super::heat::Heat;
use super::heat::Worth;
use crate::terms::ExpertKey;

/// An expert of one of the home's models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct EntryId {
    pub(super) model: u32,
    pub(super) key: ExpertKey,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Bytes on disk.
    pub(super) len: u64,
    /// Last use as the file tells it, in nanoseconds since 1970.
    pub(super) mtime: u64,
    /// Leases out on it; above 0 it is not evicted.
    pub(super) pins: u32,
    /// Its bytes came through this process, or were compared here with what is known of them.
    pub(super) checked: bool,
}

/// Which expert goes when there is no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The one used longest ago.
    #[default]
    Lru,
    /// The one used least often, where a use counts ever less (see [`Heat`]). An expert that is
    /// asked for and used less often than all that could go for it is not kept at all.
    Lfu,
}

/// Coldest first; what was never used, by its date.
type Rank = (Worth, u64, EntryId);

/// Who goes for a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    /// This one.
    Held(EntryId, Entry),
    /// One that has room and is not yet written: it can go when it is.
    Coming,
    /// All that could go is hotter than the newcomer.
    Hotter,
    /// Nothing can.
    Nobody,
}

/// Oldest use, or least use, first out. Experts of a model that is installed without a limit stand
/// apart: they do not count against the budget and never go.
#[derive(Debug, Default)]
pub(super) struct Index {
    policy: Policy,
    lru: LruByUse,
    fixed: HashMap<EntryId, Entry>,
    fixed_models: HashSet<u32>,
    bytes: u64,
    pinned: u64,
    /// Of all models, held or not.
    heat: Heat<EntryId>,
    /// Somebody used something since the heat was last written.
    warmed: bool,
    /// Those of `lru`, where the policy needs it.
    coldest_first: BTreeSet<Rank>,
    /// Experts that have room and are not yet written.
    coming: HashSet<EntryId>,
    /// What the layer being computed uses, and whether it was here when that was asked.
    asked: HashMap<EntryId, bool>,
}

/// Without a bound of its own: bytes are what is bounded.
#[derive(Debug)]
struct LruByUse(LruCache<EntryId, Entry>);

impl Default for LruByUse {
    fn default() -> Self {
        LruByUse(LruCache::unbounded())
    }
}

impl Index {
    /// Of nothing, yet.
    pub(super) fn new(policy: Policy) -> Self {
        Index {
            policy,
            ..Index::default()
        }
    }

    /// Takes what was found on disk for the truth, and keeps what is known of leases, checks, uses
    /// and heat.
    pub(super) fn recount(&mut self, mut found: Vec<(EntryId, Entry)>) {
        for (id, entry) in &mut found {
            if let Some(known) = self.get(*id) {
                entry.pins = known.pins;
                entry.checked |= known.checked;
                // A use that is not yet on the disk.
                entry.mtime = entry.mtime.max(known.mtime);
            }
        }
        found.sort_unstable_by_key(|(id, entry)| (entry.mtime, *id));
        self.lru = LruByUse::default();
        self.fixed.clear();
        self.coldest_first.clear();
        (self.bytes, self.pinned) = (0, 0);
        for (id, entry) in found {
            self.insert(id, entry);
        }
    }

    pub(super) fn is_fixed(&self, model: u32) -> bool {
        self.fixed_models.contains(&model)
    }

    /// Lets a model out of the budget or takes it back in.
    pub(super) fn set_fixed(&mut self, model: u32, fixed: bool) {
        if fixed == self.is_fixed(model) {
            return;
        }
        let mut moved: Vec<(EntryId, Entry)> = self.of_model(model).collect();
        moved.sort_unstable_by_key(|(id, entry)| (entry.mtime, *id));
        for (id, _) in &moved {
            self.remove(*id);
        }
        if fixed {
            self.fixed_models.insert(model);
        } else {
            self.fixed_models.remove(&model);
        }
        for (id, entry) in moved {
            self.insert(id, entry);
        }
    }

    /// Adds an entry as the one used last.
    pub(super) fn insert(&mut self, id: EntryId, entry: Entry) {
        self.remove(id);
        if self.is_fixed(id.model) {
            self.fixed.insert(id, entry);
            return;
        }
        self.bytes += entry.len;
        self.pinned += if entry.pins > 0 { entry.len } else { 0 };
        self.lru.0.push(id, entry);
        if self.policy == Policy::Lfu {
            self.coldest_first.insert(self.rank(id, entry.mtime));
        }
    }

    pub(super) fn remove(&mut self, id: EntryId) -> Option<Entry> {
        if let Some(entry) = self.fixed.remove(&id) {
            return Some(entry);
        }
        let entry = self.lru.0.pop(&id)?;
        self.coldest_first.remove(&self.rank(id, entry.mtime));
        self.bytes -= entry.len;
        self.pinned -= if entry.pins > 0 { entry.len } else { 0 };
        Some(entry)
    }

    pub(super) fn get(&self, id: EntryId) -> Option<Entry> {
        let counted = self.lru.0.peek(&id);
        counted.or_else(|| self.fixed.get(&id)).copied()
    }

    fn get_mut(&mut self, id: EntryId) -> Option<&mut Entry> {
        match self.fixed.get_mut(&id) {
            Some(entry) => Some(entry),
            None => self.lru.0.peek_mut(&id),
        }
    }

    /// Makes an entry the one used last.
    pub(super) fn promote(&mut self, id: EntryId) {
        self.lru.0.promote(&id);
    }

    /// Makes an entry the one used last, at the given time.
    pub(super) fn touch(&mut self, id: EntryId, mtime: u64) -> bool {
        self.promote(id);
        let Some(old) = self.get(id) else {
            return false;
        };
        if self.coldest_first.remove(&self.rank(id, old.mtime)) {
            self.coldest_first.insert(self.rank(id, mtime));
        }
        if let Some(entry) = self.get_mut(id) {
            entry.mtime = mtime;
        }
        true
    }

    /// Keeps an entry from being the next to go, after something that the heat does not tell.
    pub(super) fn spare(&mut self, id: EntryId, mtime: u64) {
        self.touch(id, mtime);
        let moves = self.coldest_first.remove(&self.rank(id, mtime));
        if moves {
            self.heat.count(id);
            self.coldest_first.insert(self.rank(id, mtime));
        }
    }

    pub(super) fn set_checked(&mut self, id: EntryId) {
        if let Some(entry) = self.get_mut(id) {
            entry.checked = true;
        }
    }

    pub(super) fn pin(&mut self, id: EntryId) {
        let fixed = self.is_fixed(id.model);
        if let Some(entry) = self.get_mut(id) {
            entry.pins += 1;
            if entry.pins == 1 && !fixed {
                let len = entry.len;
                self.pinned += len;
            }
        }
    }

    /// Undoes one [`Index::pin`]. The entry may be gone meanwhile.
    pub(super) fn unpin(&mut self, id: EntryId) {
        let fixed = self.is_fixed(id.model);
        if let Some(entry) = self.get_mut(id)
            && entry.pins > 0
        {
            entry.pins -= 1;
            if entry.pins == 0 && !fixed {
                let len = entry.len;
                self.pinned -= len;
            }
        }
    }

    /// Counts a use of each of the experts that a layer asks for, here or not, before any comes or
    /// goes on its account. Until the next call, what is here of them does not go for the others.
    pub(super) fn ask(&mut self, ids: &[EntryId]) {
        self.asked.clear();
        self.warmed = true;
        for &id in ids {
            let held = self.get(id);
            self.asked.insert(id, held.is_some());
            let mtime = held.map_or(0, |entry| entry.mtime);
            let moves = self.coldest_first.remove(&self.rank(id, mtime));
            self.heat.count(id);
            if moves {
                self.coldest_first.insert(self.rank(id, mtime));
            }
        }
    }

    /// A use counts a little more from now on.
    pub(super) fn end_of_sweep(&mut self) {
        self.heat.end_of_sweep();
    }

    /// Of all models.
    pub(super) fn heat(&self) -> &Heat<EntryId> {
        &self.heat
    }

    /// Whether it has changed since this was last asked.
    pub(super) fn was_warmed(&mut self) -> bool {
        std::mem::take(&mut self.warmed)
    }

    /// Has each of these used just now, if not before.
    pub(super) fn warm_up(&mut self, ids: impl Iterator<Item = EntryId>) {
        self.warmed = true;
        self.change_heat(|heat| {
            let now = heat.now();
            heat.at_least(0, ids.map(|id| (id, now)));
        });
    }

    /// Changes what is known of heat.
    pub(super) fn change_heat(&mut self, how: impl FnOnce(&mut Heat<EntryId>)) {
        how(&mut self.heat);
        if self.policy == Policy::Lfu {
            let held = self.lru.0.iter();
            let ranks = held.map(|(id, entry)| self.rank(*id, entry.mtime));
            self.coldest_first = ranks.collect();
        }
    }

    fn rank(&self, id: EntryId, mtime: u64) -> Rank {
        let worth = self.heat.worth(id);
        let date = if worth == Worth::NONE { mtime } else { 0 };
        (worth, date, id)
    }

    /// An expert has got room and is on its way.
    pub(super) fn comes(&mut self, id: EntryId) {
        self.coming.insert(id);
    }

    /// It is on disk now, or its room was given back.
    pub(super) fn comes_not(&mut self, id: EntryId) {
        self.coming.remove(&id);
    }

    /// The entry that goes next, of those that nobody reads: for `newcomer`, if it is not to make
    /// the store smaller.
    pub(super) fn victim(&self, newcomer: Option<EntryId>) -> Victim {
        if self.policy == Policy::Lru {
            let mut oldest_first = self.lru.0.iter().rev();
            let free = oldest_first.find(|(_, entry)| entry.pins == 0);
            return free.map_or(Victim::Nobody, |(id, entry)| Victim::Held(*id, *entry));
        }
        // Whoever brings what nobody has asked for means it to be here.
        let newcomer = newcomer.filter(|id| self.asked.contains_key(id));
        let free = |rank: &&Rank| {
            let entry = self.lru.0.peek(&rank.2);
            let in_use = newcomer.is_some() && self.asked.get(&rank.2) == Some(&true);
            entry.is_some_and(|entry| entry.pins == 0) && !in_use
        };
        let coldest = self.coldest_first.iter().find(free);
        // Only whoever could come second to it waits for it: a smaller budget does not.
        let coming = newcomer.and_then(|_| self.coming.iter().map(|id| self.rank(*id, 0)).min());
        let Some(first) = coldest.copied().into_iter().chain(coming).min() else {
            return Victim::Nobody;
        };
        if newcomer.is_some_and(|id| first > self.rank(id, 0)) {
            return Victim::Hotter;
        }
        match self.lru.0.peek(&first.2) {
            Some(entry) if coldest == Some(&first) => Victim::Held(first.2, *entry),
            _ => Victim::Coming,
        }
    }

    /// Experts that count against the budget.
    pub(super) fn len(&self) -> usize {
        self.lru.0.len()
    }

    /// Bytes that count against the budget.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that could be evicted now.
    pub(super) fn evictable(&self) -> u64 {
        self.bytes - self.pinned
    }

    /// The latest use of any entry.
    pub(super) fn newest(&self) -> u64 {
        let all = self.lru.0.iter().chain(self.fixed.iter());
        all.map(|(_, entry)| entry.mtime).max().unwrap_or(0)
    }

    /// All entries of one model, in no order.
    pub(super) fn of_model(&self, model: u32) -> impl Iterator<Item = (EntryId, Entry)> + '_ {
        let all = self.lru.0.iter().chain(self.fixed.iter());
        all.map(|(id, entry)| (*id, *entry))
            .filter(move |(id, _)| id.model == model)
    }
}
