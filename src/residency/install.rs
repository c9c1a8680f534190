//! Bringing a model's bytes into the store ahead of use: the core always, every expert for a full install.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::mpsc;
use std::time::Duration;

use super::ResidencyError;
use super::fetch::Fetched;
use super::open::InstallObserver;
use super::open::Opened;
use crate::checkpoint::CoreFile;
use crate::hub::Class;
use crate::hub::Ticket;
use crate::store::CoreState;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::ShardDigest;
use crate::store::Shards;
use crate::store::Slot;
use crate::store::Verdict;
use crate::terms::ExpertKey;

/// Experts under way or waiting for the disk at once during a full install.
const WINDOW: usize = 16;

/// How long another process may take over an expert before we look again.
const OTHERS: Duration = Duration::from_secs(5);

/// What an installation would move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Bytes of the core that the store lacks.
    pub core_missing: u64,
    /// Bytes of the whole core.
    pub core_total: u64,
    /// Experts asked for that the store lacks.
    pub experts_missing: u64,
    /// Experts asked for.
    pub experts_total: u64,
    /// Bytes of one expert.
    pub expert_len: u64,
}

impl Plan {
    /// Bytes still to move.
    pub fn missing(&self) -> u64 {
        self.core_missing + self.experts_missing * self.expert_len
    }
}

/// What an installation moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Installed {
    /// Experts fetched and kept.
    pub fetched: u64,
    /// Experts fetched that the disk would not keep.
    pub not_kept: u64,
}

/// What the comparison of whole shards with the hub's digests has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proved {
    /// Shards whose bytes are the hub's.
    pub whole: usize,
    /// Shards of which the hub publishes no digest.
    pub unpublished: usize,
    /// Shards whose bytes are not the hub's, although each part is what once arrived.
    pub different: Vec<String>,
}

/// Read back in steps of this size, so that a stop is heard.
const PROVE_STEP: u64 = 64 << 20;

impl Opened {
    /// What is missing of the core and of the experts in `layers` (all when `None`).
    pub fn plan(&self, layers: Option<&RangeInclusive<u16>>) -> Plan {
        let mut plan = Plan {
            expert_len: self.layout.expert_len(),
            ..Plan::default()
        };
        for file in self.layout.core() {
            plan.core_total += file.len;
            plan.core_missing += file.len - self.store.core_done(file.part, file.len);
        }
        for key in self.keys(layers) {
            plan.experts_total += 1;
            plan.experts_missing += u64::from(!self.store.contains(key));
        }
        plan
    }

    fn keys(&self, layers: Option<&RangeInclusive<u16>>) -> Vec<ExpertKey> {
        self.spec
            .expert_keys()
            .filter(|key| layers.is_none_or(|range| range.contains(&key.layer)))
            .collect()
    }

    /// Fetches whatever the store lacks of the core; resumes where an earlier run stopped.
    ///
    /// # Errors
    ///
    /// If the hub or the disk fails, or the core is incomplete and no hub may be asked.
    pub fn install_core(&self, observer: &dyn InstallObserver) -> Result<(), ResidencyError> {
        let files = self.layout.core();
        let missing: u64 = files
            .iter()
            .map(|f| f.len - self.store.core_done(f.part, f.len))
            .sum();
        let incomplete: Vec<&CoreFile> = files
            .iter()
            .filter(|f| self.store.core_ready(f.part, f.len).is_none())
            .collect();
        if incomplete.is_empty() {
            return Ok(());
        }
        let total: u64 = files.iter().map(|f| f.len).sum();
        observer.stage("fetching the core", total - missing, total);
        for file in incomplete {
            let mut state = self.store.core(file.part, file.len)?;
            loop {
                self.check_stop()?;
                match state {
                    CoreState::Ready(_) => break,
                    CoreState::Partial(writer) => {
                        self.fetch_core(file, writer, &|bytes| observer.moved(bytes))?;
                        break;
                    }
                    CoreState::Busy(other) => state = other.wait(OTHERS)?,
                }
            }
        }
        observer.done();
        Ok(())
    }

    /// Fetches every expert of `layers` (all when `None`) that the store lacks.
    ///
    /// # Errors
    ///
    /// If the hub or the disk fails, or somebody asked to stop.
    pub fn install_experts(
        &self,
        layers: Option<&RangeInclusive<u16>>,
        observer: &dyn InstallObserver,
    ) -> Result<Installed, ResidencyError> {
        let len = self.layout.expert_len();
        let keys = self.keys(layers);
        let mut todo: VecDeque<ExpertKey> = keys
            .iter()
            .copied()
            .filter(|key| !self.store.contains(*key))
            .collect();
        let (total, missing) = (keys.len() as u64, todo.len() as u64);
        let mut installed = Installed::default();
        if todo.is_empty() {
            return Ok(installed);
        }
        if self.hub.is_none() {
            return Err(ResidencyError::MissingExpert { key: todo[0] });
        }
        observer.stage("fetching experts", (total - missing) * len, total * len);
        let (sender, arrivals) = mpsc::channel::<(Slot, Result<Fetched, ResidencyError>)>();
        let mut tickets: VecDeque<Ticket> = VecDeque::new();
        let mut under_way = 0;
        while !todo.is_empty() || under_way > 0 {
            while under_way < WINDOW {
                let Some(key) = todo.pop_front() else { break };
                match self.store.lookup(key, len) {
                    Lookup::Hit(_) => observer.moved(len),
                    // Another process is on it; come back when ours are done.
                    Lookup::Filling(wait) if under_way == 0 => {
                        drop(wait.wait(OTHERS));
                        todo.push_back(key);
                    }
                    Lookup::Filling(_) => {
                        todo.push_back(key);
                        break;
                    }
                    Lookup::Miss(slot) => {
                        let sender = sender.clone();
                        tickets.extend(self.fetch_expert(key, Class::Bulk, move |outcome| {
                            let _ = sender.send((slot, outcome));
                        }));
                        under_way += 1;
                    }
                }
            }
            self.check_stop()?;
            if under_way == 0 {
                continue;
            }
            let Ok((slot, outcome)) = arrivals.recv_timeout(Duration::from_millis(50)) else {
                continue;
            };
            under_way -= 1;
            if under_way == 0 {
                tickets.clear();
            }
            let fetched = outcome?;
            let bytes = fetched.bytes.len() as u64;
            match slot.fill(fetched.bytes, fetched.sha256, &fetched.source) {
                Filled::Kept => installed.fetched += 1,
                Filled::NotKept(_) => installed.not_kept += 1,
            }
            observer.moved(bytes);
        }
        observer.done();
        Ok(installed)
    }

    /// Fetches what the text engine never reads (vision, projector), so that whole shards can be
    /// proved and shared.
    ///
    /// # Errors
    ///
    /// If the hub or the disk fails, or somebody asked to stop.
    pub fn install_rest(&self, observer: &dyn InstallObserver) -> Result<(), ResidencyError> {
        let missing = self.store.missing(&self.layout);
        if missing.rest.is_empty() {
            return Ok(());
        }
        let total: u64 = self.layout.rest().iter().map(|p| p.range.len()).sum();
        observer.stage("fetching the rest", total - missing.rest_bytes, total);
        for part in missing.rest {
            let shard = self.layout.shard(part);
            let mut state = self.store.rest(shard, part.range)?;
            loop {
                self.check_stop()?;
                match state {
                    CoreState::Ready(_) => break,
                    CoreState::Partial(writer) => {
                        self.fetch_stretch(part, writer, &|bytes| observer.moved(bytes))?;
                        break;
                    }
                    CoreState::Busy(other) => state = other.wait(OTHERS)?,
                }
            }
        }
        observer.done();
        Ok(())
    }

    /// Compares every whole shard with the digest that the hub publishes, reading each back from
    /// disk once.
    ///
    /// # Errors
    ///
    /// If something is missing, or the disk refuses, or somebody asked to stop. A shard that
    /// differs is no error but a count.
    pub fn prove(&self, observer: &dyn InstallObserver) -> Result<Proved, ResidencyError> {
        let shards = Shards::new(&self.layout);
        let mut todo = Vec::new();
        let mut proved = Proved::default();
        for name in shards.names() {
            if self.store.is_confirmed(name)? {
                proved.whole += 1;
            } else {
                todo.push(name.as_str());
            }
        }
        if todo.is_empty() {
            return Ok(proved);
        }
        let size = |name: &str| self.snapshot.files.get(name).map_or(0, |f| f.size);
        let total = todo.iter().map(|name| size(name)).sum();
        observer.stage("proving whole shards", 0, total);
        for name in todo {
            let mut digest = ShardDigest::new(name);
            while digest.at() < size(name) {
                self.check_stop()?;
                let before = digest.at();
                digest.catch_up(&self.store, &shards, size(name).min(before + PROVE_STEP))?;
                observer.moved(digest.at() - before);
            }
            let actual = digest.finish(&self.store, &shards)?;
            match self.store.confirm_shard(&shards, name, actual)? {
                Verdict::Whole => proved.whole += 1,
                Verdict::Unpublished => proved.unpublished += 1,
                Verdict::Different { .. } => proved.different.push(name.to_owned()),
            }
        }
        observer.done();
        Ok(proved)
    }
}
