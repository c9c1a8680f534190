//! One expert's life on disk: looked up, fetched once, kept, read, used.

use std::fmt;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;

use super::Flight;
use super::Inner;
use super::Model;
use super::ModelStore;
use super::State;
use super::Store;
use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::Kind;
use super::error::Damage;
use super::error::StoreError;
use super::index::Entry;
use super::index::EntryId;
use super::ledger::Life;
use super::ledger::session_of;
use super::lock;
use super::recover;
use super::table::Known;
use super::table::Subject;
use crate::terms::ExpertKey;

/// Leases beyond this many open their file only when it is read. An open file is safe even from
/// another process that evicts it; but a prefill may lease 896 at once, and a process may have no
/// more than 256 files open on some systems.
const OPEN_LEASES_MAX: usize = 100;
/// A claim gets its owner's name within microseconds; this leaves room for a very busy machine.
const NAMED_WITHIN_NS: u64 = 1_000_000_000;
/// How often a fetch by another process is looked at.
const POLL: Duration = Duration::from_millis(5);

/// What [`ModelStore::lookup`] found.
#[derive(Debug)]
pub enum Lookup {
    /// On disk, and there until the lease drops.
    Hit(Lease),
    /// Not here. Fill the slot to put it here; drop it to let another caller try.
    Miss(Slot),
    /// Another thread or process is fetching it: wait instead of fetching twice.
    Filling(Wait),
}

/// What became of an expert that was given to [`Slot::fill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// On disk.
    Kept,
    /// Not on disk; the bytes at hand are as good as ever.
    NotKept(NotKept),
}

/// Why an expert was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// It does not fit into the budget beside what is being read or written.
    Budget,
    /// The disk has no more than the reserve left.
    Reserve,
    /// The disk is full.
    Full,
    /// The disk refused.
    Disk(io::ErrorKind),
    /// Another process holds the lock for too long.
    Busy,
    /// All that could go for it is used oftener than it is: [`Policy::Lfu`](super::Policy::Lfu).
    Colder,
    /// Its length is not the one it was looked up with.
    Length,
    /// Its digest is not the one that is known.
    Conflict(Known),
}

impl fmt::Display for NotKept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotKept::Budget => f.write_str("the budget is too small for it"),
            NotKept::Reserve => f.write_str("no more than the reserve is free on the disk"),
            NotKept::Full => f.write_str("the disk is full"),
            NotKept::Disk(kind) => write!(f, "the disk refuses: {kind}"),
            NotKept::Busy => f.write_str("another process holds the lock"),
            NotKept::Colder => f.write_str("what is kept is used oftener"),
            NotKept::Length => f.write_str("it has another length than it should"),
            NotKept::Conflict(known) => write!(f, "its sha256 is not {}", known.sha256),
        }
    }
}

/// An expert that stays on disk until this drops.
#[derive(Debug)]
pub struct Lease {
    pub(super) entry: EntryRef,
    pub(super) len: u64,
    pub(super) open: Option<Opened>,
}

/// The right, and the duty, to fetch one expert. Dropping it lets the next caller try.
#[derive(Debug)]
pub struct Slot {
    pub(super) entry: EntryRef,
    pub(super) len: u64,
    /// Set if others in this process may wait for us.
    pub(super) flight: Option<Arc<Flight>>,
    pub(super) claim: Option<PathBuf>,
    /// Room made for it and not yet used: whether of a model without a limit.
    pub(super) room: Option<bool>,
    /// It was refused for good.
    pub(super) colder: bool,
}

/// Somebody else's fetch.
#[derive(Debug)]
pub struct Wait {
    entry: EntryRef,
    len: u64,
    on: On,
}

#[derive(Debug)]
enum On {
    Thread(Arc<Flight>),
    Process(PathBuf),
}

/// How a wait ended.
#[derive(Debug)]
pub enum Waited {
    /// The other thread has the bytes, kept or not.
    Filled(Bytes),
    /// It is over: look the expert up again.
    Again,
    /// The other process takes too long. With this slot the expert is fetched a second time.
    Late(Slot),
}

/// One expert of one model of one store.
#[derive(Clone, Debug)]
pub(super) struct EntryRef {
    pub(super) store: Store,
    pub(super) model: Arc<Model>,
    pub(super) id: EntryId,
}

#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: Box<dyn DiskFile>,
    store: Store,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.store.inner.open_leases.fetch_sub(1, Ordering::Relaxed);
    }
}

enum Found {
    Here,
    Wrong(Damage),
    Nowhere,
}

impl Store {
    /// Whether another process fetches experts of this home right now.
    pub fn others_fetch(&self) -> bool {
        recover::others_fetch(&self.inner).unwrap_or(false)
    }
}

impl ModelStore {
    /// Finds an expert of `len` bytes and marks it used. Never waits: not for the network, not for
    /// another process, not for a disk to sync.
    ///
    /// An entry of another length is damage: it is removed and counted, and the answer is a miss.
    pub fn lookup(&self, key: ExpertKey, len: u64) -> Lookup {
        let entry = self.entry(key);
        let store = entry.store.clone();
        let inner = &store.inner;
        let mut removed = false;
        loop {
            let mut state = lock(&inner.state);
            if let Some(flight) = state.flights.get(&entry.id) {
                let on = On::Thread(Arc::clone(flight));
                drop(state);
                return Lookup::Filling(Wait { entry, len, on });
            }
            match entry.find(&mut state, len) {
                Found::Here => {
                    state.index.pin(entry.id);
                    state.index.promote(entry.id);
                    drop(state);
                    match entry.clone().lease(len) {
                        Some(lease) => {
                            lock(&inner.state).hit(entry.id);
                            return Lookup::Hit(lease);
                        }
                        None => continue, // another process has evicted it
                    }
                }
                Found::Wrong(damage) if !removed => {
                    removed = true;
                    drop(state);
                    entry.damaged(damage);
                }
                Found::Wrong(_) | Found::Nowhere => return entry.begin_fetch(&store, state, len),
            }
        }
    }

    /// An expert, if it is here, without marking it used and without the duty to fetch it.
    pub fn lease(&self, key: ExpertKey, len: u64) -> Option<Lease> {
        let entry = self.entry(key);
        let store = entry.store.clone();
        let mut state = lock(&store.inner.state);
        match entry.find(&mut state, len) {
            Found::Here => {
                state.index.pin(entry.id);
                drop(state);
                entry.lease(len)
            }
            Found::Wrong(damage) => {
                drop(state);
                entry.damaged(damage);
                None
            }
            Found::Nowhere => None,
        }
    }

    /// Whether an expert of `len` bytes is on disk, without marking it used. One of another length is
    /// damage, which the next [`ModelStore::lookup`] removes.
    pub fn contains(&self, key: ExpertKey, len: u64) -> bool {
        let entry = self.entry(key);
        if let Some(known) = lock(&entry.store.inner.state).index.get(entry.id) {
            return known.len == len;
        }
        let found = entry.store.inner.disk.facts(&entry.path());
        found.is_ok_and(|f| f.kind == Kind::File && f.len == len)
    }

    /// Marks experts used, all at one moment: call it at the end of a token with all that it used.
    /// Recency survives restarts; experts of one batch go in the order of their keys.
    pub fn touch(&self, keys: &[ExpertKey]) {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        let store = self.store();
        let now = store.inner.disk.now();
        let mut touched = Vec::with_capacity(keys.len());
        {
            let mut state = lock(&store.inner.state);
            let mtime = state.tick(now);
            for key in keys {
                if state.index.touch(self.entry_id(key), mtime) {
                    touched.push((key, mtime));
                }
            }
        }
        for (key, mtime) in touched {
            // An expert that went meanwhile needs no date; a disk that refuses costs recency only.
            let path = recover::expert_path(self.folder(), key);
            let _ = store.inner.disk.set_mtime(&path, mtime);
        }
    }

    /// Makes the experts that are on disk the ones used last, in this order, for this process and
    /// until the next [`ModelStore::touch`] alone.
    pub fn promote(&self, keys: &[ExpertKey]) {
        let inner = &self.store().inner;
        let now = inner.disk.now();
        let mut state = lock(&inner.state);
        // With a date, though none goes to the disk: a recount orders by dates.
        let mtime = state.tick(now);
        for key in keys {
            state.index.touch(self.entry_id(*key), mtime);
        }
    }

    /// The experts on disk, in the order of their keys, each with its bytes.
    pub fn experts(&self) -> Vec<(ExpertKey, u64)> {
        let state = lock(&self.store().inner.state);
        let entries = state.index.of_model(self.record().id);
        let mut experts: Vec<_> = entries.map(|(id, entry)| (id.key, entry.len)).collect();
        experts.sort_unstable();
        experts
    }

    /// The digest an expert must have, if it was ever here.
    pub fn known(&self, key: ExpertKey) -> Option<Known> {
        let told = self.record().log.get(&Subject::Expert(key)).ok().flatten();
        told.map(|told| told.known)
    }

    pub(super) fn entry_id(&self, key: ExpertKey) -> EntryId {
        let model = self.record().id;
        EntryId { model, key }
    }

    fn entry(&self, key: ExpertKey) -> EntryRef {
        EntryRef {
            store: self.store().clone(),
            model: Arc::clone(self.record()),
            id: self.entry_id(key),
        }
    }
}

impl EntryRef {
    pub(super) fn inner(&self) -> &Inner {
        &self.store.inner
    }

    pub(super) fn path(&self) -> PathBuf {
        recover::expert_path(&self.model.folder, self.id.key)
    }

    pub(super) fn subject(&self) -> Subject {
        Subject::Expert(self.id.key)
    }

    fn find(&self, state: &mut State, len: u64) -> Found {
        let wrong_length = |actual| {
            Found::Wrong(Damage::Length {
                expected: len,
                actual,
            })
        };
        match state.index.get(self.id) {
            Some(entry) if entry.len == len => return Found::Here,
            Some(entry) => return wrong_length(entry.len),
            None => {}
        }
        // Another process may have published it since we looked.
        let facts = match self.inner().disk.facts(&self.path()) {
            Ok(facts) => facts,
            Err(_) => return Found::Nowhere,
        };
        if facts.kind != Kind::File {
            return Found::Wrong(Damage::NotAFile);
        }
        if facts.len != len {
            return wrong_length(facts.len);
        }
        let entry = Entry {
            len,
            mtime: facts.mtime,
            pins: 0,
            checked: false,
        };
        state.index.insert(self.id, entry);
        Found::Here
    }

    /// A lease on an entry that was pinned just now; `None` if its file is gone.
    fn lease(self, len: u64) -> Option<Lease> {
        let inner = self.inner();
        let mut lease = Lease {
            entry: self.clone(),
            len,
            open: None,
        };
        if inner.open_leases.fetch_add(1, Ordering::Relaxed) < OPEN_LEASES_MAX {
            match inner.disk.open(&self.path(), How::Read) {
                Ok(file) => {
                    let store = self.store.clone();
                    lease.open = Some(Opened { file, store });
                }
                Err(e) => {
                    inner.open_leases.fetch_sub(1, Ordering::Relaxed);
                    if e.kind() == io::ErrorKind::NotFound {
                        lock(&inner.state).index.remove(self.id);
                        return None;
                    }
                }
            }
        } else {
            inner.open_leases.fetch_sub(1, Ordering::Relaxed);
        }
        Some(lease)
    }

    fn begin_fetch<'a>(
        self,
        store: &'a Store,
        mut state: std::sync::MutexGuard<'a, State>,
        len: u64,
    ) -> Lookup {
        let claim = match self.claim() {
            // Another process may have published it, and let its claim go, since we looked.
            Claim::Ours(path) if matches!(self.find(&mut state, len), Found::Here) => {
                let _ = self.inner().disk.remove_file(&path);
                state.index.pin(self.id);
                state.index.promote(self.id);
                drop(state);
                if let Some(lease) = self.clone().lease(len) {
                    lock(&store.inner.state).hit(self.id);
                    return Lookup::Hit(lease);
                }
                state = lock(&store.inner.state);
                None
            }
            Claim::Ours(path) => Some(path),
            Claim::Refused => None,
            Claim::Theirs(path) => {
                drop(state);
                let on = On::Process(path);
                return Lookup::Filling(Wait {
                    entry: self,
                    len,
                    on,
                });
            }
        };
        let flight: Arc<Flight> = Arc::new(OnceLock::new());
        state.flights.insert(self.id, Arc::clone(&flight));
        state.missed(self.id);
        drop(state);
        Lookup::Miss(Slot {
            entry: self,
            len,
            flight: Some(flight),
            claim,
            room: None,
            colder: false,
        })
    }

    /// Removes a damaged entry and counts it.
    pub(super) fn damaged(&self, damage: Damage) -> StoreError {
        let path = self.path();
        self.inner().discard(self.id, &path);
        self.inner().damaged(&path, &damage);
        StoreError::Damaged { path, damage }
    }

    fn claim_path(&self) -> PathBuf {
        let model = super::ledger::fnv(recover::model_name(&self.model).as_bytes());
        let ExpertKey { layer, expert } = self.id.key;
        let name = format!("{model:016x}-{layer:03}-{expert:04}");
        self.inner().home.join("locks/claims").join(name)
    }

    /// Tells other processes that we fetch this one.
    fn claim(&self) -> Claim {
        let (inner, path) = (self.inner(), self.claim_path());
        if inner.life_line.is_none() {
            return Claim::Refused; // nobody could tell when we are gone
        }
        match inner.disk.open(&path, How::CreateNew) {
            Ok(file) => {
                let name = super::ledger::session_path(Path::new(""), inner.session);
                let _ = file.write_at(name.as_os_str().as_encoded_bytes(), 0);
                Claim::Ours(path)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => self.other_claim(path),
            // A disk that refuses costs at most a second download.
            Err(_) => Claim::Refused,
        }
    }

    fn other_claim(&self, path: PathBuf) -> Claim {
        let inner = self.inner();
        match claim_owner(&*inner.disk, &path) {
            Some(owner) if owner == inner.session => Claim::Ours(path), // could not be removed
            Some(owner) if inner.gate.life(owner) != Life::Alive => Claim::Ours(path),
            None if is_abandoned(&*inner.disk, &path) => Claim::Ours(path),
            // The owner may be writing its name right now.
            Some(_) | None => Claim::Theirs(path),
        }
    }
}

enum Claim {
    Ours(PathBuf),
    Theirs(PathBuf),
    Refused,
}

/// Whether a claim without a name is so old that its owner must have died before it wrote it.
pub(super) fn is_abandoned(disk: &dyn Disk, claim: &Path) -> bool {
    let facts = disk.facts(claim);
    facts.is_ok_and(|f| disk.now().saturating_sub(f.mtime) > NAMED_WITHIN_NS)
}

/// Who fetches the expert that a claim is for.
pub(super) fn claim_owner(disk: &dyn Disk, path: &Path) -> Option<u64> {
    let bytes = super::disk::read_file(disk, path).ok().flatten()?;
    session_of(std::str::from_utf8(&bytes).ok()?)
}

impl Wait {
    /// Waits until the other fetch ends, for `limit` at most where it is another process's.
    pub fn wait(self, limit: Duration) -> Waited {
        match &self.on {
            On::Thread(flight) => {
                let inner = self.entry.inner();
                let mut state = lock(&inner.state);
                loop {
                    match flight.get() {
                        Some(Some(bytes)) => return Waited::Filled(bytes.clone()),
                        Some(None) => return Waited::Again,
                        None => {
                            let woken = inner.landed.wait(state);
                            state = woken.unwrap_or_else(PoisonError::into_inner);
                        }
                    }
                }
            }
            On::Process(claim) => {
                let start = Instant::now();
                while start.elapsed() < limit {
                    if self.other_ended(claim) {
                        return Waited::Again;
                    }
                    std::thread::sleep(POLL);
                }
                Waited::Late(Slot {
                    entry: self.entry.clone(),
                    len: self.len,
                    flight: None,
                    claim: None,
                    room: None,
                    colder: false,
                })
            }
        }
    }

    fn other_ended(&self, claim: &Path) -> bool {
        let inner = self.entry.inner();
        if inner.disk.facts(claim).is_err() {
            return true;
        }
        let owner = claim_owner(&*inner.disk, claim);
        match owner {
            Some(owner) => inner.gate.life(owner) != Life::Alive,
            None => is_abandoned(&*inner.disk, claim),
        }
    }
}
