//! Counting every byte and every wait, by source.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::ops::AddAssign;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use crate::terms::ExpertKey;

/// Where an expert came from when the forward pass asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It was still in memory.
    Memory,
    /// The store's disk.
    Disk,
    /// Another machine's share.
    Peer,
    /// The hub, or a folder standing for it.
    Hub,
}

impl Origin {
    /// The word used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Memory => "memory",
            Origin::Disk => "disk",
            Origin::Peer => "peer",
            Origin::Hub => "hub",
        }
    }
}

/// One number for each [`Origin`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByOrigin {
    /// From memory.
    pub memory: u64,
    /// From the store's disk.
    pub disk: u64,
    /// From another machine's share.
    pub peer: u64,
    /// From the hub.
    pub hub: u64,
}

impl ByOrigin {
    fn slot(&mut self, origin: Origin) -> &mut u64 {
        match origin {
            Origin::Memory => &mut self.memory,
            Origin::Disk => &mut self.disk,
            Origin::Peer => &mut self.peer,
            Origin::Hub => &mut self.hub,
        }
    }

    /// All origins together.
    pub fn total(&self) -> u64 {
        self.memory + self.disk + self.peer + self.hub
    }

    fn since(&self, before: &ByOrigin) -> ByOrigin {
        ByOrigin {
            memory: self.memory - before.memory,
            disk: self.disk - before.disk,
            peer: self.peer - before.peer,
            hub: self.hub - before.hub,
        }
    }
}

/// A photograph of what was moved so far, and of the time spent waiting for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Experts the router asked for; an expert that serves many rows of one sweep counts once.
    pub requested: u64,
    /// Of these, how many each origin delivered.
    pub experts: ByOrigin,
    /// Their bytes.
    pub bytes: ByOrigin,
    /// Bytes of the core mapped or read from the store.
    pub core_disk: u64,
    /// Bytes of the core brought from the hub.
    pub core_hub: u64,
    /// Bytes of metadata and headers brought from the hub.
    pub meta: u64,
    /// Time the arithmetic stood still for the disk.
    pub wait_disk: Duration,
    /// Time the arithmetic stood still for a peer or the hub.
    pub wait_hub: Duration,
    /// Experts that were fetched and could not be kept on disk (budget, full disk).
    pub unkept: u64,
    /// Experts asked for by layers whose choice was guessed at.
    pub guessed: u64,
    /// Of these, those that the guess had named.
    pub foreseen: u64,
    /// Bytes of experts read from disk on a guess.
    pub read_ahead: u64,
    /// Of these, those that were then asked for; they are among [`Counts::bytes`] of the disk.
    pub used_ahead: u64,
}

impl Counts {
    /// What was added after `before` was taken.
    #[must_use]
    pub fn since(&self, before: &Counts) -> Counts {
        Counts {
            requested: self.requested - before.requested,
            experts: self.experts.since(&before.experts),
            bytes: self.bytes.since(&before.bytes),
            core_disk: self.core_disk - before.core_disk,
            core_hub: self.core_hub - before.core_hub,
            meta: self.meta - before.meta,
            wait_disk: self.wait_disk.saturating_sub(before.wait_disk),
            wait_hub: self.wait_hub.saturating_sub(before.wait_hub),
            unkept: self.unkept - before.unkept,
            guessed: self.guessed - before.guessed,
            foreseen: self.foreseen - before.foreseen,
            read_ahead: self.read_ahead - before.read_ahead,
            used_ahead: self.used_ahead - before.used_ahead,
        }
    }
}

impl Counts {
    /// The share of rows `part` among `rows` that moved all this together: shares of rows that
    /// follow one another add up to the whole, to the byte and the nanosecond.
    #[must_use]
    pub fn share(&self, part: Range<usize>, rows: usize) -> Counts {
        let below = |n: u64, row: usize| u128::from(n) * row as u128 / rows.max(1) as u128;
        let of = |n: u64| {
            let share = below(n, part.end) - below(n, part.start);
            u64::try_from(share).unwrap_or(u64::MAX) // never more than n
        };
        let time =
            |t: Duration| Duration::from_nanos(of(u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)));
        let each = |by: &ByOrigin| ByOrigin {
            memory: of(by.memory),
            disk: of(by.disk),
            peer: of(by.peer),
            hub: of(by.hub),
        };
        Counts {
            requested: of(self.requested),
            experts: each(&self.experts),
            bytes: each(&self.bytes),
            core_disk: of(self.core_disk),
            core_hub: of(self.core_hub),
            meta: of(self.meta),
            wait_disk: time(self.wait_disk),
            wait_hub: time(self.wait_hub),
            unkept: of(self.unkept),
            guessed: of(self.guessed),
            foreseen: of(self.foreseen),
            read_ahead: of(self.read_ahead),
            used_ahead: of(self.used_ahead),
        }
    }
}

impl AddAssign for ByOrigin {
    fn add_assign(&mut self, more: ByOrigin) {
        self.memory += more.memory;
        self.disk += more.disk;
        self.peer += more.peer;
        self.hub += more.hub;
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, more: Counts) {
        self.requested += more.requested;
        self.experts += more.experts;
        self.bytes += more.bytes;
        self.core_disk += more.core_disk;
        self.core_hub += more.core_hub;
        self.meta += more.meta;
        self.wait_disk += more.wait_disk;
        self.wait_hub += more.wait_hub;
        self.unkept += more.unkept;
        self.guessed += more.guessed;
        self.foreseen += more.foreseen;
        self.read_ahead += more.read_ahead;
        self.used_ahead += more.used_ahead;
    }
}

/// The running counts of one opened model; shared by everyone who moves bytes.
#[derive(Debug, Default)]
pub struct Meter {
    counts: Mutex<Counts>,
    recent: Mutex<Recent>,
    recall: Mutex<BTreeMap<u16, Recall>>,
}

/// How often guesses at one layer's choice were right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recall {
    /// Experts that it asked for when there was a guess.
    pub asked: u64,
    /// Of these, those that the guess had named.
    pub foreseen: u64,
}

/// The experts that came last, for those who watch.
#[derive(Debug, Default)]
struct Recent {
    /// The number of the next.
    next: u64,
    last: VecDeque<(ExpertKey, Origin)>,
}

/// Some tokens' worth of a large model's experts.
const RECENT_MAX: usize = 8192;

impl Meter {
    /// The counts so far.
    pub fn counts(&self) -> Counts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The router asked for this many experts.
    pub(super) fn requested(&self, experts: usize) {
        self.with(|c| c.requested += experts as u64);
    }

    /// An expert reached the arithmetic after it had stood still for `waited`.
    pub(super) fn arrived(&self, origin: Origin, bytes: u64, waited: Duration) {
        self.with(|c| {
            *c.experts.slot(origin) += 1;
            *c.bytes.slot(origin) += bytes;
            match origin {
                Origin::Memory => {}
                Origin::Disk => c.wait_disk += waited,
                Origin::Peer | Origin::Hub => c.wait_hub += waited,
            }
        });
    }

    /// This expert has reached the arithmetic.
    pub(super) fn lit(&self, key: ExpertKey, origin: Origin) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.next += 1;
        if recent.last.len() == RECENT_MAX {
            recent.last.pop_front();
        }
        recent.last.push_back((key, origin));
    }

    /// The experts that reached the arithmetic from the number `since` on, oldest first, as far
    /// back as is remembered (8,192 of them); and the number of the next.
    pub fn arrivals(&self, since: u64) -> (u64, Vec<(ExpertKey, Origin)>) {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let news = usize::try_from(recent.next.saturating_sub(since)).unwrap_or(usize::MAX);
        let old = recent.last.len().saturating_sub(news);
        (recent.next, recent.last.iter().skip(old).copied().collect())
    }

    /// Bytes of the core were mapped or read from disk.
    pub(super) fn core_read(&self, bytes: u64) {
        self.with(|c| c.core_disk += bytes);
    }

    /// The arithmetic stood still for the core.
    pub(super) fn core_waited(&self, time: Duration) {
        self.with(|c| c.wait_disk += time);
    }

    /// Part of the core came from the hub.
    pub(super) fn core_fetched(&self, bytes: u64) {
        self.with(|c| c.core_hub += bytes);
    }

    /// Metadata or a header came from the hub.
    pub(super) fn meta_fetched(&self, bytes: u64) {
        self.with(|c| c.meta += bytes);
    }

    /// An expert was fetched and could not be kept.
    pub(super) fn unkept(&self) {
        self.with(|c| c.unkept += 1);
    }

    /// A layer whose choice was guessed at has asked for `asked` experts, of which `foreseen` were named.
    pub(super) fn guessed(&self, layer: u16, asked: usize, foreseen: usize) {
        let (asked, foreseen) = (asked as u64, foreseen as u64);
        let mut recall = self.recall.lock().unwrap_or_else(PoisonError::into_inner);
        let of_layer = recall.entry(layer).or_default();
        of_layer.asked += asked;
        of_layer.foreseen += foreseen;
        drop(recall);
        self.with(|c| {
            c.guessed += asked;
            c.foreseen += foreseen;
        });
    }

    /// How often guesses were right, by layer.
    pub fn recall(&self) -> BTreeMap<u16, Recall> {
        self.recall
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// So many bytes were read on a guess.
    pub(super) fn read_ahead(&self, bytes: u64) {
        self.with(|c| c.read_ahead += bytes);
    }

    /// So many of them were then asked for.
    pub(super) fn used_ahead(&self, bytes: u64) {
        self.with(|c| c.used_ahead += bytes);
    }

    fn with(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
