//! What is stored, compared with its digests while nobody asks for anything.
//!
//! Rot in an expert is found at its first use anyway; the scrub finds it before somebody waits for it,
//! and in experts that nobody will use for months. An expert a second: a full install of K3 takes a
//! day, and whoever comes meanwhile finds the disk free again within the time that one expert takes.

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use super::screen::Screen;
use crate::store::ModelStore;
use crate::store::StoreError;
use crate::terms::ExpertKey;

/// How often an expert is read, and how often it is looked whether somebody has come.
const STEP: Duration = Duration::from_secs(1);

/// A thread that compares one expert after the other. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Scrub {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Scrub {
    /// Starts the thread. Whenever `work`, a count of what was done for others, has stood still for
    /// `idle`, it compares an expert a second; damage is removed, and said through `say`. An `idle` of
    /// nothing starts nothing.
    pub(super) fn start(
        store: ModelStore,
        idle: Duration,
        work: impl Fn() -> u64 + Send + 'static,
        say: impl Fn(&str) + Send + 'static,
    ) -> Option<Scrub> {
        if idle.is_zero() {
            return None;
        }
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("store-scrub".to_owned());
        // A system that gives no thread leaves the check at first use.
        let thread = thread.spawn(move || {
            let mut quiet = Quiet::new(work());
            let mut round = Round::from_anywhere(store);
            let ended = Err(mpsc::RecvTimeoutError::Timeout);
            while stopped.recv_timeout(STEP) == ended {
                if quiet.since(work()) >= idle && round.step(&say).is_break() {
                    return;
                }
            }
        });
        Some(Scrub {
            stop: Some(stop),
            thread: Some(thread.ok()?),
        })
    }

    /// The same, for a person at a screen.
    pub(super) fn telling(
        screen: &std::sync::Arc<Screen>,
        store: ModelStore,
        idle: Duration,
        work: impl Fn() -> u64 + Send + 'static,
    ) -> Option<Scrub> {
        let screen = std::sync::Arc::clone(screen);
        Scrub::start(store, idle, work, move |text| screen.note(text))
    }
}

impl Drop for Scrub {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// How long a count has stood still.
struct Quiet {
    count: u64,
    began: Instant,
}

impl Quiet {
    fn new(count: u64) -> Quiet {
        let began = Instant::now();
        Quiet { count, began }
    }

    fn since(&mut self, count: u64) -> Duration {
        if count != self.count {
            *self = Quiet::new(count);
        }
        self.began.elapsed()
    }
}

/// A walk through the experts, round and round.
struct Round {
    store: ModelStore,
    after: Option<ExpertKey>,
}

impl Round {
    /// Begins anywhere: a server that is started anew every day would never get to the end of a large
    /// store from the top.
    fn from_anywhere(store: ModelStore) -> Round {
        let experts = store.experts();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = now.map_or(0, |since| since.subsec_nanos()) as usize;
        let after = (!experts.is_empty()).then(|| experts[nanos % experts.len()].0);
        Round { store, after }
    }

    /// Compares the next expert. Breaks where the disk refuses: to go on would be to say so once a
    /// second.
    fn step(&mut self, say: &impl Fn(&str)) -> ControlFlow<()> {
        match self.store.scrub(self.after) {
            Ok(Some(scrubbed)) => {
                self.after = Some(scrubbed.key);
                if let Some(damage) = scrubbed.damage {
                    say(&format!(
                        "{}: damaged on disk: {damage}; removed, and fetched again when it is needed",
                        scrubbed.key
                    ));
                }
                ControlFlow::Continue(())
            }
            Ok(None) => ControlFlow::Continue(()),
            Err(error) => {
                say(&told(&error));
                ControlFlow::Break(())
            }
        }
    }
}

fn told(error: &StoreError) -> String {
    let why = super::screen::chain(error);
    format!("{why}; stored experts are not compared any more until the next start")
}
