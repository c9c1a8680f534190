//! States and syncs, behind the arithmetic.
//!
//! One thread a journal. A state is written only after the ids it has taken in are synced, so that
//! after a power cut no state is ahead of its job's ids.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use serde_json::Value;

use super::Identity;
use super::error::JobError;
use super::snapshot;
use crate::model::Sequence;
use crate::terms::TokenId;

/// Ids are synced this often while they come: what a power cut may cost.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// Bytes of states that a process may write in a burst, and for each second after it. Real K3's
/// state has 465 MB: written every minute it would wear a disk out within a year or two.
const BURST: f64 = 4e9;
const RATE: f64 = 1e6;
/// Writing may take one part in so many of the time.
const SHARE: u32 = 4;

/// States up to this size, and so many of them, may wait to be written.
const SMALL: u64 = 16 << 20;
const SMALL_MAX: usize = 64;

/// A state to be written.
pub(super) struct Pending {
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
    pub(super) about: Value,
    pub(super) ids: Vec<TokenId>,
    pub(super) sequence: Sequence,
    /// The log to be synced before.
    pub(super) log: Arc<File>,
}

impl Pending {
    fn write(&self) -> Result<u64, JobError> {
        self.log
            .sync_data()
            .map_err(JobError::disk("the ids cannot be synced", &self.path))?;
        let about = self.about.clone();
        snapshot::write(&self.path, &self.identity, about, &self.ids, &self.sequence)
    }
}

/// The thread, and what it has to do.
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    dirty: Vec<Arc<File>>,
    /// What is being written.
    at_work: Option<PathBuf>,
    stop: bool,
    last_took: Duration,
    last_ended: Option<Instant>,
    /// Bytes that may be written now, as of `last_ended`.
    allowance: Option<f64>,
    /// The first thing that failed and was not told yet.
    trouble: Option<JobError>,
}

impl Writer {
    pub(super) fn start() -> std::io::Result<Writer> {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("deltafin-jobs".to_owned())
            .spawn(move || own.work())?;
        Ok(Writer {
            shared,
            thread: Some(thread),
        })
    }

    /// Whether a state of so many bytes should be written now, for the disk's sake.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let state = self.shared.lock();
        let rested = match state.last_ended {
            Some(ended) => ended.elapsed() >= state.last_took * SHARE,
            None => true,
        };
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let allowed = state.allowance_now() >= bytes as f64;
        let idle = rested && state.at_work.is_none() && state.pending.is_empty();
        // Small ones may queue: several prompts that end with one sweep are each worth a state.
        let small = bytes <= SMALL && state.pending.len() < SMALL_MAX;
        allowed && (idle || small)
    }

    /// Takes a state to be written behind, instead of an older one of the same file.
    pub(super) fn offer(&self, pending: Pending) {
        let mut state = self.shared.lock();
        state.pending.retain(|older| older.path != pending.path);
        state.pending.push_back(pending);
        drop(state);
        self.shared.bell.notify_all();
    }

    /// Has a log synced soon.
    pub(super) fn dirty(&self, log: &Arc<File>) {
        let mut state = self.shared.lock();
        if !state.dirty.iter().any(|other| Arc::ptr_eq(other, log)) {
            state.dirty.push(Arc::clone(log));
            // Only the first wakes the thread: the others wait for its second with it.
            if state.dirty.len() == 1 {
                drop(state);
                self.shared.bell.notify_all();
            }
        }
    }

    /// Gives up what is to be written below a folder, and waits for what is being written there.
    pub(super) fn forget(&self, folder: &Path, log: Option<&Arc<File>>) {
        let mut state = self.shared.lock();
        state.pending.retain(|one| !one.path.starts_with(folder));
        state
            .dirty
            .retain(|other| log.is_none_or(|log| !Arc::ptr_eq(other, log)));
        let busy = |state: &State| state.at_work.iter().any(|path| path.starts_with(folder));
        while busy(&state) {
            state = self.shared.wait(state);
        }
    }

    /// Waits until everything offered is written, or has failed.
    pub(super) fn flush(&self) {
        let mut state = self.shared.lock();
        while !state.pending.is_empty() || state.at_work.is_some() {
            state = self.shared.wait(state);
        }
    }

    /// What failed behind, once.
    pub(super) fn trouble(&self) -> Option<JobError> {
        self.shared.lock().trouble.take()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.bell.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl State {
    fn allowance_now(&self) -> f64 {
        let since = self
            .last_ended
            .map_or(0.0, |ended| ended.elapsed().as_secs_f64());
        (self.allowance.unwrap_or(BURST) + since * RATE).min(BURST)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.bell
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut synced: Option<Instant> = None;
        let mut state = self.lock();
        loop {
            if let Some(pending) = state.pending.pop_front() {
                state.at_work = Some(pending.path.clone());
                drop(state);
                let began = Instant::now();
                let written = pending.write();
                state = self.lock();
                state.wrote(began, written);
                self.bell.notify_all();
                continue;
            }
            let since = synced.map_or(SYNC_EVERY, |synced| synced.elapsed());
            if !state.dirty.is_empty() && (since >= SYNC_EVERY || state.stop) {
                let logs = std::mem::take(&mut state.dirty);
                drop(state);
                let failed = logs.iter().find_map(|log| log.sync_data().err());
                synced = Some(Instant::now());
                state = self.lock();
                if let Some(error) = failed {
                    let path = Path::new("ids");
                    let told = JobError::disk("cannot be synced", path)(error);
                    state.trouble.get_or_insert(told);
                }
                continue;
            }
            if state.stop {
                return;
            }
            if state.dirty.is_empty() {
                state = self.wait(state);
            } else {
                let left = SYNC_EVERY.saturating_sub(since);
                let waited = self.bell.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl State {
    fn wrote(&mut self, began: Instant, written: Result<u64, JobError>) {
        let allowance = self.allowance_now();
        self.at_work = None;
        self.last_took = began.elapsed();
        self.last_ended = Some(Instant::now());
        match written {
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            Ok(bytes) => self.allowance = Some(allowance - bytes as f64),
            Err(error) => {
                self.trouble.get_or_insert(error);
            }
        }
    }
}
