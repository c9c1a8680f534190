//! Writing behind: experts go to disk after the arithmetic has them, never before.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc;
use std::thread::JoinHandle;

use bytes::Bytes;

use super::fetch::Fetched;
use super::meter::Meter;
use crate::store::Filled;
use crate::store::Slot;
use crate::terms::ExpertKey;

/// The thread that fills slots, and the experts it has not yet written.
#[derive(Debug)]
pub(super) struct Writer {
    queue: Option<mpsc::SyncSender<Job>>,
    waiting: Arc<Waiting>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Waiting {
    experts: Mutex<HashMap<ExpertKey, Bytes>>,
    empty: Condvar,
}

struct Job {
    key: ExpertKey,
    slot: Slot,
    fetched: Fetched,
}

impl Writer {
    /// Starts the thread. At most `behind` experts wait for the disk at once: more would only turn a slow disk into a
    /// full memory, and a disk slower than the link must in the end slow the link.
    pub(super) fn start(meter: Arc<Meter>, behind: usize) -> std::io::Result<Writer> {
        let (queue, jobs) = mpsc::sync_channel::<Job>(behind);
        let waiting = Arc::<Waiting>::default();
        let shared = Arc::clone(&waiting);
        let thread = std::thread::Builder::new()
            .name("expert-write".to_owned())
            .spawn(move || {
                while let Ok(job) = jobs.recv() {
                    let Job { key, slot, fetched } = job;
                    if let Filled::NotKept(_) =
                        slot.fill(fetched.bytes, fetched.sha256, &fetched.source)
                    {
                        meter.unkept();
                    }
                    let mut experts = shared
                        .experts
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    experts.remove(&key);
                    if experts.is_empty() {
                        shared.empty.notify_all();
                    }
                }
            })?;
        Ok(Writer {
            queue: Some(queue),
            waiting,
            thread: Some(thread),
        })
    }

    /// The bytes of an expert that still waits for the disk.
    pub(super) fn pending(&self, key: ExpertKey) -> Option<Bytes> {
        self.waiting
            .experts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
            .cloned()
    }

    /// Hands an expert over to be written; blocks while too many wait.
    pub(super) fn keep(&self, key: ExpertKey, slot: Slot, fetched: Fetched) {
        let bytes = fetched.bytes.clone();
        self.waiting
            .experts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key, bytes);
        if let Some(queue) = &self.queue {
            // The thread lives as long as the queue does.
            let _ = queue.send(Job { key, slot, fetched });
        }
    }

    /// Waits until nothing waits.
    pub(super) fn flush(&self) {
        let mut experts = self
            .waiting
            .experts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while !experts.is_empty() {
            experts = self
                .waiting
                .empty
                .wait(experts)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Writer {
    /// Writes what still waits: it was paid for.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
