//! Core, experts, metadata and digests on disk, within a budget, through crashes.
//!
//! ```text
//! <home>/
//!   models-v1/<org>--<name>/<commit>/
//!     source.json         repository, commit, every file's size and sha256, header lengths
//!     meta/               small files as on the hub
//!     headers/            the first 8 + N bytes of each shard, as on the hub
//!     core/042 …, top     fetched once; 042.part and 042.progress while it is on its way
//!     experts/042/0123    one file an expert: the hub's bytes
//!     experts/tmp/        on their way to a final name; never read
//!     experts/part/       the beginnings of experts that a full install is bringing
//!     rest/SHARD/A-B      bytes A..B of a shard that the text engine never reads
//!     digests             what each file's bytes should be
//!     lookups.json        how often each layer's experts were needed, and there
//!     heat                how often each expert was used, lately
//!   store.json            budget, reserve and policy last set; models installed without a limit
//!   locks/                who is alive, who fetches what, how many expert bytes there are
//! ```
//!
//! Promises:
//!
//! 1. An expert under its final name is whole: written elsewhere, then renamed.
//! 2. Published and temporary expert bytes together are within the budget at every instant, over
//!    all processes on the home. Room is made before the first byte is written.
//! 3. A leased expert is never removed under its reader.
//! 4. Nothing on a token's path waits for the disk to sync. What a power loss can have spoilt is
//!    found by its digest and removed, not served.
//! 5. An expert that cannot be kept is no error: it is [`Filled::NotKept`], and the token goes on.
//! 6. What rots on the disk is found at an expert's first use in each process: it is removed and
//!    fetched again. (The core is synced before it gets its name, and compared by
//!    [`ModelStore::verify`] alone: to read all of it at each start would cost a minute.)
//!
//! This room never sees the network.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde::Serialize;

use crate::terms::RepoId;
use crate::terms::Revision;

mod arrival;
mod budget;
mod compact;
mod core;
mod digests;
mod discard;
pub mod disk;
mod error;
mod experts;
mod growth;
mod heat;
mod index;
mod lease;
mod ledger;
mod lookups;
mod manifest;
mod model;
mod notice;
mod past_cache;
mod peek;
mod quick;
mod recover;
mod settings;
mod shards;
mod slot;
mod syncer;
mod table;
mod verify;
mod warmth;

#[cfg(test)]
mod tests;

pub use self::arrival::ExpertWriter;
pub use self::budget::Trimmed;
pub use self::core::CoreBusy;
pub use self::core::CoreState;
pub use self::core::CoreWriter;
pub use self::error::Damage;
pub use self::error::StoreError;
pub use self::experts::Filled;
pub use self::experts::Lease;
pub use self::experts::Lookup;
pub use self::experts::NotKept;
pub use self::experts::Slot;
pub use self::experts::Wait;
pub use self::experts::Waited;
pub use self::heat::Heat;
pub use self::heat::Worth;
pub use self::index::Policy;
pub use self::lookups::Held;
pub use self::lookups::Lookups;
pub use self::manifest::Checked;
pub use self::manifest::Manifest;
pub use self::manifest::ManifestError;
pub use self::manifest::Unlisted;
pub use self::model::Area;
pub use self::model::FileRecord;
pub use self::model::ModelStore;
pub use self::model::SourceRecord;
pub use self::settings::Settings;
pub use self::shards::Holder;
pub use self::shards::Missing;
pub use self::shards::ShardDigest;
pub use self::shards::Shards;
pub use self::shards::Stretch;
pub use self::shards::Verdict;
pub use self::table::Known;
pub use self::table::Level;
pub use self::verify::Scrubbed;
pub use self::verify::Verified;
pub use self::verify::VerifyOptions;

use self::digests::DigestLog;
use self::disk::Disk;
use self::disk::DiskFile;
use self::disk::RealDisk;
use self::index::EntryId;
use self::index::Index;
use self::ledger::Gate;

/// How many expert bytes may lie on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Budget {
    /// At most this many, over all models of the home that have no limit of their own lifted.
    Limit(u64),
    /// As many as the disk holds above the reserve.
    Unlimited,
}

/// How a store is opened. No field has a default: a budget that nobody chose is a bug.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The folder that holds everything.
    pub home: PathBuf,
    /// How many expert bytes may lie on disk.
    pub budget: Budget,
    /// Bytes of free disk that experts never touch.
    pub reserve: u64,
    /// Which expert goes when there is no room.
    pub policy: Policy,
    /// Whether this process goes on from the heat that those before it have left, and leaves its
    /// own: a measurement does neither.
    pub keep_heat: bool,
}

/// What a store holds and has done since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Experts on disk that count against the budget, as far as this process knows.
    pub experts: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Lookups that found their expert.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// Experts written.
    pub kept: u64,
    /// Bytes of experts written.
    pub kept_bytes: u64,
    /// Experts that were not kept, for whatever reason but the next.
    pub not_kept: u64,
    /// Experts that were not kept because what is kept is used oftener.
    pub colder: u64,
    /// Experts evicted.
    pub evicted: u64,
    /// Their bytes.
    pub evicted_bytes: u64,
    /// Files found damaged and removed.
    pub damaged: u64,
    /// Entries removed at opening, because the last stop was unclean and nothing vouched for them.
    pub distrusted: u64,
    /// Why experts could not be kept, the first time that it was the disk's fault rather than the
    /// budget's: one warning for the person, not one an expert.
    pub trouble: Option<String>,
}

/// All models under one home. Cloning it shares it.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    disk: Arc<dyn Disk>,
    home: PathBuf,
    session: u64,
    gate: Gate,
    limits: Mutex<Limits>,
    state: Mutex<State>,
    /// A flight has landed.
    landed: Condvar,
    /// Files held open by leases, so that a large prefill does not run out of handles.
    open_leases: AtomicUsize,
    syncer: Option<syncer::Syncer>,
    /// Locked as long as this process lives; `None` if it could not be made because the disk is
    /// full, and then nothing is ever written.
    life_line: Option<Box<dyn DiskFile>>,
    listener: OnceLock<notice::Listener>,
    keep_heat: bool,
    /// When heat was last written, as the disk tells the time.
    heat_kept: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    budget: Budget,
    reserve: u64,
}

#[derive(Debug)]
struct State {
    index: Index,
    models: Vec<Arc<Model>>,
    flights: HashMap<EntryId, Arc<Flight>>,
    /// The last modification time given out; every batch gets a later one.
    clock: u64,
    /// When a dead process was last looked for, or the experts last counted.
    swept: u64,
    /// By model and layer.
    lookups: BTreeMap<(u32, u16), Lookups>,
    stats: StoreStats,
    /// Whoever listens was told of damage.
    told_damage: bool,
}

/// An expert on its way: empty until its slot is filled or dropped. `None` inside means that nobody
/// has brought it.
type Flight = OnceLock<Option<Bytes>>;

#[derive(Debug)]
struct Model {
    id: u32,
    repo: RepoId,
    commit: Revision,
    folder: PathBuf,
    log: Arc<DigestLog>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("home", &self.home)
            .finish_non_exhaustive()
    }
}

/// When files are made safe from a power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SyncBehind {
    /// By a thread of its own, this long after the first file that needs it.
    After(Duration),
    /// When somebody calls [`Store::sync`]: tests decide the moment.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    Never,
}

/// Long enough to sync many experts at once, short enough that a power loss costs seconds of work.
const SYNC_AFTER: Duration = Duration::from_secs(1);

impl Store {
    /// Opens a home, makes it if it is missing, and clears away what a crash has left. Reads no
    /// expert's bytes.
    ///
    /// # Errors
    ///
    /// [`StoreError::Home`] if the folder cannot be used, [`StoreError::Busy`] if another process
    /// hangs while it holds the lock. Damage is never an error here: it is removed and counted.
    pub fn open(options: StoreOptions) -> Result<Self, StoreError> {
        Self::open_on(options, Arc::new(RealDisk), SyncBehind::After(SYNC_AFTER))
    }

    fn open_on(
        options: StoreOptions,
        disk: Arc<dyn Disk>,
        sync: SyncBehind,
    ) -> Result<Self, StoreError> {
        let inner = recover::open(options, disk, sync)?;
        Ok(Store {
            inner: Arc::new(inner),
        })
    }

    /// The folder this store lives in.
    pub fn home(&self) -> &Path {
        &self.inner.home
    }

    /// Every model of which something is stored.
    pub fn models(&self) -> Vec<(RepoId, Revision)> {
        let models = recover::models_in(&*self.inner.disk, &self.inner.home);
        let mut models = models.unwrap_or_default();
        models.sort();
        models
    }

    /// One model at one commit. Nothing is made on disk before there is something to keep.
    pub fn model(&self, repo: &RepoId, commit: &Revision) -> ModelStore {
        let mut state = lock(&self.inner.state);
        let known = state.models.iter();
        let found = known
            .into_iter()
            .find(|m| m.repo == *repo && m.commit == *commit);
        let model = match found {
            Some(model) => Arc::clone(model),
            None => {
                let model = Arc::new(self.inner.new_model(state.models.len(), repo, commit));
                state.models.push(Arc::clone(&model));
                model
            }
        };
        drop(state);
        ModelStore::new(self.clone(), model)
    }

    /// What the store holds and has done.
    pub fn stats(&self) -> StoreStats {
        lock(&self.inner.state).stats()
    }

    /// Makes everything stored so far safe from a power loss, and waits for it. Never needed on a
    /// token's path: a thread does it behind.
    pub fn sync(&self) -> Result<(), StoreError> {
        let models = lock(&self.inner.state).models.clone();
        for model in models {
            let synced = model.log.sync();
            synced.map_err(|e| StoreError::io("sync", model.log.path(), e))?;
        }
        Ok(())
    }
}

impl State {
    fn stats(&self) -> StoreStats {
        StoreStats {
            experts: self.index.len(),
            bytes: self.index.bytes(),
            ..self.stats.clone()
        }
    }

    /// A modification time later than every one given out before, whatever the clock does.
    fn tick(&mut self, now: u64) -> u64 {
        self.clock = now.max(self.clock.saturating_add(1));
        self.clock
    }
}

impl Inner {
    fn new_model(&self, id: usize, repo: &RepoId, commit: &Revision) -> Model {
        let folder = recover::model_folder(&self.home, repo, commit);
        let log = DigestLog::new(Arc::clone(&self.disk), &self.home, &folder, self.session);
        let log = Arc::new(log);
        if let Some(syncer) = &self.syncer {
            syncer.watch(&log);
        }
        Model {
            id: u32::try_from(id).unwrap_or(u32::MAX),
            repo: repo.clone(),
            commit: commit.clone(),
            folder,
            log,
        }
    }
}

/// How long the end of a process waits for another to add its counts.
const GOOD_BYE: Duration = Duration::from_secs(1);

impl Drop for Inner {
    /// Says good-bye: everything is synced, then the life line goes. Should anything fail on the way,
    /// the life line stays, and the next process takes the stop for an unclean one.
    fn drop(&mut self) {
        if let Some(syncer) = self.syncer.take() {
            syncer.stop();
        }
        if self.life_line.is_none() {
            return;
        }
        let models = std::mem::take(&mut lock(&self.state).models);
        for model in &models {
            self.keep_lookups(model, GOOD_BYE);
        }
        self.keep_heat(&models);
        let synced = models.iter().all(|model| model.log.sync().is_ok());
        if synced {
            let locks = self.home.join("locks");
            let _ = self
                .disk
                .remove_file(&ledger::session_path(&locks, self.session));
            // Should this fail, a power loss makes the next process look more closely: no harm.
            let _ = self.disk.sync_folder(&locks);
        }
    }
}

/// Locks a mutex. A thread that panicked while it held one has broken nothing: every critical
/// section of this room leaves its data true at each step.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
