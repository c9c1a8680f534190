//! Which experts are on disk, and which goes first.

use std::collections::HashMap;
use std::collections::HashSet;

use lru::LruCache;

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

/// Oldest use first out. Experts of a model that is installed without a limit stand apart: they do
/// not count against the budget and never go.
#[derive(Debug)]
pub(super) struct Index {
    lru: LruCache<EntryId, Entry>,
    fixed: HashMap<EntryId, Entry>,
    fixed_models: HashSet<u32>,
    bytes: u64,
    pinned: u64,
}

impl Index {
    pub(super) fn new(fixed_models: HashSet<u32>) -> Self {
        Index {
            lru: LruCache::unbounded(),
            fixed: HashMap::new(),
            fixed_models,
            bytes: 0,
            pinned: 0,
        }
    }

    /// An index of what was found on disk, keeping what `old` knows of leases, checks and uses.
    pub(super) fn of(found: Vec<(EntryId, Entry)>, old: &Index) -> Self {
        let mut index = Index::new(old.fixed_models.clone());
        let mut found = found;
        for (id, entry) in &mut found {
            if let Some(known) = old.get(*id) {
                entry.pins = known.pins;
                entry.checked |= known.checked;
                // A use that is not yet on the disk.
                entry.mtime = entry.mtime.max(known.mtime);
            }
        }
        found.sort_unstable_by_key(|(id, entry)| (entry.mtime, *id));
        for (id, entry) in found {
            index.insert(id, entry);
        }
        index
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
        self.lru.push(id, entry);
    }

    pub(super) fn remove(&mut self, id: EntryId) -> Option<Entry> {
        if let Some(entry) = self.fixed.remove(&id) {
            return Some(entry);
        }
        let entry = self.lru.pop(&id)?;
        self.bytes -= entry.len;
        self.pinned -= if entry.pins > 0 { entry.len } else { 0 };
        Some(entry)
    }

    pub(super) fn get(&self, id: EntryId) -> Option<Entry> {
        self.lru.peek(&id).or_else(|| self.fixed.get(&id)).copied()
    }

    fn get_mut(&mut self, id: EntryId) -> Option<&mut Entry> {
        match self.fixed.get_mut(&id) {
            Some(entry) => Some(entry),
            None => self.lru.peek_mut(&id),
        }
    }

    /// Makes an entry the one used last.
    pub(super) fn promote(&mut self, id: EntryId) {
        self.lru.promote(&id);
    }

    /// Makes an entry the one used last, at the given time.
    pub(super) fn touch(&mut self, id: EntryId, mtime: u64) -> bool {
        self.promote(id);
        let entry = self.get_mut(id);
        let known = entry.is_some();
        if let Some(entry) = entry {
            entry.mtime = mtime;
        }
        known
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

    /// The entry that goes next: the one used longest ago that nobody reads.
    pub(super) fn victim(&self) -> Option<(EntryId, Entry)> {
        let mut oldest_first = self.lru.iter().rev();
        let (id, entry) = oldest_first.find(|(_, entry)| entry.pins == 0)?;
        Some((*id, *entry))
    }

    /// Experts that count against the budget.
    pub(super) fn len(&self) -> usize {
        self.lru.len()
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
        let all = self.lru.iter().chain(self.fixed.iter());
        all.map(|(_, entry)| entry.mtime).max().unwrap_or(0)
    }

    /// All entries of one model, in no order.
    pub(super) fn of_model(&self, model: u32) -> impl Iterator<Item = (EntryId, Entry)> + '_ {
        let all = self.lru.iter().chain(self.fixed.iter());
        all.map(|(id, entry)| (*id, *entry))
            .filter(move |(id, _)| id.model == model)
    }
}
