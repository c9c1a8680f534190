//! Bringing a model's bytes into the store ahead of use: the core always, every expert for a full install.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use super::ResidencyError;
use super::bulk::Bulk;
use super::bulk::LANES;
use super::fetch::Fetched;
use super::lanes::Halt;
use super::lanes::in_lanes;
use super::open::InstallObserver;
use super::open::Opened;
use crate::checkpoint::CoreFile;
use crate::hub::Class;
use crate::hub::Ticket;
use crate::store::CoreState;
use crate::store::Filled;
use crate::store::Lookup;
use crate::store::ModelStore;
use crate::store::ShardDigest;
use crate::store::Shards;
use crate::store::Slot;
use crate::store::Verdict;
use crate::terms::ByteRange;
use crate::terms::ExpertKey;

/// Experts under way or waiting for the disk at once during a full install.
const WINDOW: usize = 16;

/// How long another process may take over an expert before we look again.
const OTHERS: Duration = Duration::from_secs(5);
/// How often to look whether others fetch.
const LOOK_EVERY: Duration = Duration::from_millis(20);

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
    /// Experts fetched that could not be kept: others than those known.
    pub not_kept: u64,
    /// Bytes that came for experts and the rest.
    pub bytes: u64,
}

/// What the comparison of whole shards with the hub's digests has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proved {
    /// Shards whose bytes are the hub's.
    pub whole: usize,
    /// Shards of which the hub publishes no digest.
    pub unpublished: usize,
    /// Shards whose bytes are not those of the published digest, although each part is what once arrived.
    pub different: Vec<String>,
    /// Files that held bytes of those, and were removed and forgotten.
    pub discarded: usize,
}

/// Read back in steps of this size, so that a stop is heard.
const PROVE_STEP: u64 = 64 << 20;

/// How experts are fetched one by one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner {
    /// Begin no more once one could not be kept: the next would be paid for and lost as well.
    pub(super) strict: bool,
    /// Begin none until no other process has fetched experts for so long.
    pub(super) quiet: Option<Duration>,
}

/// Whether others let the link rest.
struct Quiet {
    wanted: Option<Duration>,
    since: Instant,
    looked: Option<Instant>,
}

impl Quiet {
    fn begin(wanted: Option<Duration>) -> Quiet {
        Quiet {
            wanted,
            since: Instant::now(),
            looked: None,
        }
    }

    fn lasts(&mut self, store: &ModelStore) -> bool {
        let Some(wanted) = self.wanted else {
            return true;
        };
        let now = Instant::now();
        if self.looked.is_none_or(|at| now - at >= LOOK_EVERY) {
            self.looked = Some(now);
            if store.store().others_fetch() {
                self.since = now;
            }
        }
        now - self.since >= wanted
    }
}

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
            plan.experts_missing += u64::from(!self.store.contains(key, plan.expert_len));
        }
        plan
    }

    pub(super) fn keys(&self, layers: Option<&RangeInclusive<u16>>) -> Vec<ExpertKey> {
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
        if self.hub.is_none() {
            return Err(ResidencyError::Missing {
                repo: self.repo.clone(),
                what: format!("core part {}", incomplete[0].part),
            });
        }
        let total: u64 = files.iter().map(|f| f.len).sum();
        observer.stage("fetching the core", total - missing, total);
        // The largest first, so that no lane is left with one at the end.
        let mut todo = incomplete;
        todo.sort_by_key(|file| file.len);
        let todo = Mutex::new(todo);
        in_lanes(&self.stop, LANES, |halt| {
            loop {
                let next = todo.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let Some(file) = next else { return Ok(()) };
                let mut state = self.store.core(file.part, file.len)?;
                loop {
                    halt.check()?;
                    match state {
                        CoreState::Ready(_) => break,
                        CoreState::Partial(writer) => {
                            self.fetch_core(file, writer, halt, &|bytes| observer.moved(bytes))?;
                            break;
                        }
                        CoreState::Busy(other) => state = other.wait(OTHERS)?,
                    }
                }
            }
        })?;
        observer.done();
        Ok(())
    }

    /// Fetches every expert of `layers` that the store lacks, those of `order` first; if `layers` is
    /// `None`, all of them and what the text engine never reads, so that whole shards can be proved.
    ///
    /// # Errors
    ///
    /// If the hub or the disk fails, or somebody asked to stop.
    pub fn install_experts(
        &self,
        layers: Option<&RangeInclusive<u16>>,
        order: &[ExpertKey],
        observer: &dyn InstallObserver,
    ) -> Result<Installed, ResidencyError> {
        let shards = Shards::new(&self.layout);
        let bulk = Bulk::survey(self, &shards, layers, order, observer)?;
        // Not by the bytes that are left: there may be none, and still an expert without its name.
        if bulk.is_done() {
            return Ok(Installed::default());
        }
        let missing = bulk.missing() + bulk.scattered() * self.layout.expert_len();
        if self.hub.is_none() {
            return Err(self.missing_now(None));
        }
        let mut total = self.keys(layers).len() as u64 * self.layout.expert_len();
        if layers.is_none() {
            total += self
                .layout
                .rest()
                .iter()
                .map(|p| p.range.len())
                .sum::<u64>();
        }
        observer.stage("fetching experts", total.saturating_sub(missing), total);
        let mut brought = bulk.bring()?;
        let manner = Manner::default();
        self.install_one_by_one(
            brought.late.into(),
            manner,
            &mut brought.installed,
            observer,
        )?;
        observer.done();
        Ok(brought.installed)
    }

    /// What is said of experts, or of one of them, that no hub may be asked for.
    pub(super) fn missing_now(&self, key: Option<ExpertKey>) -> ResidencyError {
        match key {
            Some(key) => ResidencyError::MissingExpert { key },
            None => ResidencyError::Missing {
                repo: self.repo.clone(),
                what: "some of what was asked for".to_owned(),
            },
        }
    }

    /// Fetches experts that are scattered over their shards, or that others had begun, in this order.
    pub(super) fn install_one_by_one(
        &self,
        mut todo: VecDeque<ExpertKey>,
        manner: Manner,
        installed: &mut Installed,
        observer: &dyn InstallObserver,
    ) -> Result<(), ResidencyError> {
        let len = self.layout.expert_len();
        let (sender, arrivals) = mpsc::channel::<(Slot, Result<Fetched, ResidencyError>)>();
        let mut tickets: VecDeque<Ticket> = VecDeque::new();
        let mut under_way = 0;
        let mut quiet = Quiet::begin(manner.quiet);
        while !todo.is_empty() || under_way > 0 {
            let may_begin = quiet.lasts(&self.store);
            while may_begin && under_way < WINDOW {
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
                if !may_begin {
                    thread::sleep(LOOK_EVERY);
                }
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
                Filled::NotKept(_) => {
                    installed.not_kept += 1;
                    if manner.strict {
                        todo.clear();
                    }
                }
            }
            installed.bytes += bytes;
            observer.moved(bytes);
        }
        Ok(())
    }

    /// Fetches what is left of what the text engine never reads (vision, projector): another process
    /// may have been at it.
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
            let halt = Halt::new(&self.stop);
            loop {
                halt.check()?;
                match state {
                    CoreState::Ready(_) => break,
                    CoreState::Partial(writer) => {
                        self.fetch_stretch(part, writer, &halt, &|bytes| observer.moved(bytes))?;
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
            // What was proved once may have gone since: then it is read, and said to be missing.
            let whole = ByteRange::new(0, shards.size(name));
            let here = self.store.has_range(&shards, name, whole);
            if here && self.store.is_confirmed(name)? {
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
        let (todo, read) = (Mutex::new(todo), Mutex::new(Vec::new()));
        let threads = thread::available_parallelism().map_or(1, usize::from);
        in_lanes(&self.stop, threads.min(LANES), |halt| {
            loop {
                let next = todo.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let Some(name) = next else { return Ok(()) };
                let mut digest = ShardDigest::new(name);
                while digest.at() < size(name) {
                    halt.check()?;
                    let before = digest.at();
                    let upto = size(name).min(before + PROVE_STEP);
                    digest.catch_up(&self.store, &shards, upto)?;
                    observer.moved(digest.at() - before);
                }
                let digest = digest.finish(&self.store, &shards)?;
                let mut read = read.lock().unwrap_or_else(PoisonError::into_inner);
                read.push((name, digest));
            }
        })?;
        // Nothing is discarded before all is read: shards have core files in common.
        let mut read = read.into_inner().unwrap_or_else(PoisonError::into_inner);
        read.sort_unstable_by_key(|(name, _)| *name);
        for (name, actual) in read {
            match self.store.confirm_shard(&shards, name, actual)? {
                Verdict::Whole => proved.whole += 1,
                Verdict::Unpublished => proved.unpublished += 1,
                Verdict::Different { .. } => {
                    // Kept, they would be served; and the right ones could never take their place.
                    proved.discarded += self.store.discard_shard(&shards, name)?;
                    proved.different.push(name.to_owned());
                }
            }
        }
        observer.done();
        Ok(proved)
    }
}
