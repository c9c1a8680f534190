//! Asking generations to end.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

/// Ends generations, from any thread: those of the requests that carry it, or, had from
/// [`Engine::stopper`](super::Engine::stopper), all that run at the moment.
#[derive(Clone, Debug, Default)]
pub struct Stopper(Arc<Asked>);

#[derive(Debug, Default)]
struct Asked {
    now: AtomicU64,
    gently: AtomicU64,
}

impl Stopper {
    /// One that nobody has used.
    pub fn new() -> Stopper {
        Stopper::default()
    }

    /// The generation ends within a moment, with what was made so far. A sweep that others share
    /// goes on without it; one of its own ends within the expert at hand, and its state is lost.
    pub fn stop(&self) {
        self.0.now.fetch_add(1, Ordering::SeqCst);
    }

    /// The generation ends when the sweep at work is over, its state whole.
    pub fn finish_sweep(&self) {
        self.0.gently.fetch_add(1, Ordering::SeqCst);
    }

    fn counts(&self) -> (u64, u64) {
        let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        (count(&self.0.now), count(&self.0.gently))
    }
}

/// What can stop one generation.
#[derive(Clone, Debug)]
pub(super) struct Stops {
    own: Option<Stopper>,
    engine: Stopper,
    /// How often the engine's was used before this generation began.
    before: (u64, u64),
}

impl Stops {
    pub(super) fn new(own: Option<&Stopper>, engine: &Stopper) -> Stops {
        Stops {
            own: own.cloned(),
            before: engine.counts(),
            engine: engine.clone(),
        }
    }

    /// Whether it is to end at once.
    pub(super) fn now(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.counts().0 > 0)
            || self.engine.counts().0 != self.before.0
    }

    /// Whether it is to end, at once or when its state is whole.
    pub(super) fn asked(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.counts() != (0, 0))
            || self.engine.counts() != self.before
    }
}
