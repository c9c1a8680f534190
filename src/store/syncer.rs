//! Makes stored files safe from a power loss, behind the tokens' backs.

use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread::JoinHandle;
use std::time::Duration;

use super::digests::DigestLog;
use super::lock;

/// One thread for all models of a home.
#[derive(Debug)]
pub(super) struct Syncer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    work: Mutex<Work>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    logs: Vec<Arc<DigestLog>>,
    wanted: bool,
    stop: bool,
}

impl Syncer {
    /// Starts the thread. `None` if the system gives us none: then the sync at the end remains.
    pub(super) fn start(after: Duration) -> Option<Self> {
        let shared = Arc::new(Shared::default());
        let work = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("store-sync".to_owned())
            .spawn(move || work.run(after))
            .ok()?;
        Some(Syncer {
            shared,
            thread: Some(thread),
        })
    }

    /// Has the thread look after one more model.
    pub(super) fn watch(&self, log: &Arc<DigestLog>) {
        lock(&self.shared.work).logs.push(Arc::clone(log));
    }

    /// Something was stored.
    pub(super) fn wake(&self) {
        lock(&self.shared.work).wanted = true;
        self.shared.changed.notify_one();
    }

    /// Ends the thread after what it is doing.
    pub(super) fn stop(mut self) {
        lock(&self.shared.work).stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, after: Duration) {
        let wait = |work, limit| {
            let waited = self.changed.wait_timeout(work, limit);
            waited.unwrap_or_else(PoisonError::into_inner).0
        };
        loop {
            let mut work = lock(&self.work);
            while !work.wanted && !work.stop {
                work = wait(work, Duration::from_secs(60));
            }
            if !work.stop {
                // More files come while we wait, and are synced together.
                let start = std::time::Instant::now();
                while !work.stop && start.elapsed() < after {
                    work = wait(work, after.saturating_sub(start.elapsed()));
                }
            }
            if work.stop {
                return;
            }
            work.wanted = false;
            let logs = work.logs.clone();
            drop(work);
            for log in logs {
                // What could not be synced stays on its list for the next round.
                let _ = log.sync();
            }
        }
    }
}
