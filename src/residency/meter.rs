//! Counting every byte and every wait, by source.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

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
    /// Bytes of the core mapped from the store.
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
        }
    }
}

/// The running counts of one opened model; shared by everyone who moves bytes.
#[derive(Debug, Default)]
pub struct Meter {
    counts: Mutex<Counts>,
}

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

    /// A part of the core was mapped from disk.
    pub(super) fn core_mapped(&self, bytes: u64) {
        self.with(|c| c.core_disk += bytes);
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

    fn with(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
