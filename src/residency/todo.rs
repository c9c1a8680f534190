//! What a full install has still to bring.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::Instant;

use super::install::Installed;
use crate::terms::ByteRange;
use crate::terms::ExpertKey;

/// Neighbouring bytes of a shard that become one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) range: ByteRange,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Expert(ExpertKey),
    Rest,
}

/// A shard of which something is missing.
#[derive(Debug)]
pub(super) struct ShardTodo {
    pub(super) number: u16,
    /// In the order of their ranges.
    pub(super) entries: VecDeque<Entry>,
    pub(super) owned: bool,
    /// Nothing of it was there before, but for header and core: its digest is computed in passing.
    pub(super) passing: bool,
}

#[derive(Debug, Default)]
pub(super) struct Todo {
    /// Wanted before all others, in this order.
    pub(super) first: VecDeque<(u16, Entry)>,
    pub(super) shards: Vec<ShardTodo>,
    /// To be brought one by one at the end: scattered over a shard, or under way elsewhere.
    pub(super) late: Vec<ExpertKey>,
    pub(super) installed: Installed,
    pub(super) looked: Option<Instant>,
}

impl Todo {
    /// Bytes that are to be moved, apart from experts that come one by one; `begun` says how many of an
    /// expert's came before.
    pub(super) fn missing(&self, begun: &HashMap<ExpertKey, u64>) -> u64 {
        let in_shards = self.shards.iter().flat_map(|shard| &shard.entries);
        let entries = in_shards.chain(self.first.iter().map(|(_, entry)| entry));
        // Beginnings of what was not asked for save nothing here.
        let came = |entry: &Entry| entry.what.key().and_then(|key| begun.get(&key).copied());
        let left = |entry: &Entry| {
            let came = came(entry).unwrap_or(0);
            entry.range.len().saturating_sub(came)
        };
        entries.map(left).sum()
    }

    pub(super) fn is_done(&self) -> bool {
        let mut shards = self.shards.iter();
        self.late.is_empty() && self.first.is_empty() && shards.all(|s| s.entries.is_empty())
    }
}

impl Entry {
    pub(super) fn new(range: ByteRange, what: What) -> Self {
        Entry { range, what }
    }
}

impl What {
    pub(super) fn key(self) -> Option<ExpertKey> {
        match self {
            What::Expert(key) => Some(key),
            What::Rest => None,
        }
    }
}

pub(super) fn is_begun(begun: &HashMap<ExpertKey, u64>, entry: &Entry) -> bool {
    entry.what.key().is_some_and(|key| begun.contains_key(&key))
}
