//! Writing behind: experts go to disk after the arithmetic has them, never before.
//!
//! ```text
//! keep ─► room    makes room, in the order of arrival      touched ─► waits for what was written, then
//!           ▼                                                         dates what a sweep has used
//!         write   fills the slot
//! ```
//!
//! Two threads, because room is made in a moment and a write takes as long as the disk: whoever needs to
//! know what is gone ([`Writer::settle`]) need not wait for what is still being written.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::mpsc;
use std::thread::JoinHandle;

use bytes::Bytes;

use super::fetch::Fetched;
use super::meter::Meter;
use crate::store::Filled;
use crate::store::ModelStore;
use crate::store::NotKept;
use crate::store::Slot;
use crate::terms::ExpertKey;

/// The threads that make room and fill slots, and the experts not yet written.
#[derive(Debug)]
pub(super) struct Writer {
    queue: Option<mpsc::Sender<Job>>,
    waiting: Arc<Waiting>,
    /// Experts that may wait at once.
    behind: usize,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Waiting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes on their way to the disk.
    experts: HashMap<ExpertKey, Bytes>,
    /// Jobs for which no room was made yet, or whose dates are not yet written.
    unsettled: usize,
    /// Experts with room, not yet written.
    writing: usize,
}

enum Job {
    Keep(Kept),
    Touch(Vec<ExpertKey>),
}

struct Kept {
    key: ExpertKey,
    slot: Slot,
    fetched: Fetched,
}

impl Waiting {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `enough`.
    fn until(&self, enough: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.state();
        while !enough(&state) {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn change(&self, how: impl FnOnce(&mut State)) {
        how(&mut self.state());
        self.changed.notify_all();
    }
}

impl Writer {
    /// Starts the threads. At most `behind` experts wait for the disk at once: more would only turn a slow disk into a
    /// full memory, and a disk slower than the link must in the end slow the link.
    pub(super) fn start(
        store: ModelStore,
        meter: Arc<Meter>,
        behind: usize,
    ) -> std::io::Result<Writer> {
        let (queue, jobs) = mpsc::channel::<Job>();
        let (ready, slots) = mpsc::channel::<Kept>();
        let waiting = Arc::<Waiting>::default();
        let shared = Arc::clone(&waiting);
        let room = std::thread::Builder::new()
            .name("expert-room".to_owned())
            .spawn(move || make_room(&store, &jobs, &ready, &shared))?;
        let shared = Arc::clone(&waiting);
        let write = std::thread::Builder::new()
            .name("expert-write".to_owned())
            .spawn(move || write(&slots, &meter, &shared))?;
        Ok(Writer {
            queue: Some(queue),
            waiting,
            behind: behind.max(1),
            threads: vec![room, write],
        })
    }

    /// The bytes of an expert that still waits for the disk.
    pub(super) fn pending(&self, key: ExpertKey) -> Option<Bytes> {
        self.waiting.state().experts.get(&key).cloned()
    }

    /// Hands an expert over to be written; blocks while too many wait.
    pub(super) fn keep(&self, key: ExpertKey, slot: Slot, fetched: Fetched) {
        let bytes = fetched.bytes.clone();
        let most = self.behind;
        let mut state = self.waiting.until(|state| state.experts.len() < most);
        state.experts.insert(key, bytes);
        drop(state);
        self.send(Job::Keep(Kept { key, slot, fetched }));
    }

    /// Has the experts of a finished sweep dated, after all that was handed over before.
    pub(super) fn touch(&self, used: Vec<ExpertKey>) {
        self.send(Job::Touch(used));
    }

    fn send(&self, job: Job) {
        self.waiting.state().unsettled += 1;
        if let Some(queue) = &self.queue {
            // The threads live as long as the queue does.
            let _ = queue.send(job);
        }
    }

    /// Waits until room was made for everything handed over, and every date is written: from then
    /// on it is settled what is gone from the disk. What comes to it may still be under way, where
    /// [`Writer::pending`] finds it.
    pub(super) fn settle(&self) {
        drop(self.waiting.until(|state| state.unsettled == 0));
    }

    /// Waits until nothing waits.
    pub(super) fn flush(&self) {
        let idle = |state: &State| state.unsettled == 0 && state.experts.is_empty();
        drop(self.waiting.until(idle));
    }
}

fn make_room(
    store: &ModelStore,
    jobs: &mpsc::Receiver<Job>,
    ready: &mpsc::Sender<Kept>,
    waiting: &Waiting,
) {
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Keep(mut kept) => {
                // What is being written cannot go yet: where only that is left, wait for it.
                let made = kept.slot.make_room();
                if made.is_err_and(|why| why != NotKept::Colder) {
                    drop(waiting.until(|state| state.writing == 0));
                    // `fill` tries once more, and tells why there is none.
                    let _ = kept.slot.make_room();
                }
                waiting.change(|state| state.writing += 1);
                let _ = ready.send(kept);
            }
            Job::Touch(used) => {
                drop(waiting.until(|state| state.writing == 0));
                store.touch(&used);
                store.end_of_sweep();
            }
        }
        waiting.change(|state| state.unsettled -= 1);
    }
}

fn write(slots: &mpsc::Receiver<Kept>, meter: &Meter, waiting: &Waiting) {
    while let Ok(Kept { key, slot, fetched }) = slots.recv() {
        match slot.fill(fetched.bytes, fetched.sha256, &fetched.source) {
            Filled::Kept | Filled::NotKept(NotKept::Colder) => {}
            Filled::NotKept(_) => meter.unkept(),
        }
        waiting.change(|state| {
            state.experts.remove(&key);
            state.writing -= 1;
        });
    }
}

impl Drop for Writer {
    /// Writes what still waits: it was paid for.
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
