//! Several lanes at one piece of work: the first failure stops the others.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::thread;

use super::ResidencyError;

/// Tells lanes to stop: somebody asked, or another lane has failed.
#[derive(Debug)]
pub(super) struct Halt<'a> {
    asked: &'a AtomicBool,
    failed: AtomicBool,
    error: Mutex<Option<ResidencyError>>,
}

impl<'a> Halt<'a> {
    pub(super) fn new(asked: &'a AtomicBool) -> Self {
        Halt {
            asked,
            failed: AtomicBool::new(false),
            error: Mutex::default(),
        }
    }

    /// # Errors
    ///
    /// [`ResidencyError::Interrupted`] when it is time to stop.
    pub(super) fn check(&self) -> Result<(), ResidencyError> {
        if self.asked.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed) {
            return Err(ResidencyError::Interrupted);
        }
        Ok(())
    }

    fn fail(&self, error: ResidencyError) {
        let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the flag is up, so that a lane stopped by it cannot be taken for the cause.
        first.get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` in up to `lanes` threads, this one among them, until each has returned.
///
/// # Errors
///
/// The first that any of them met.
pub(super) fn in_lanes(
    asked: &AtomicBool,
    lanes: usize,
    work: impl Fn(&Halt<'_>) -> Result<(), ResidencyError> + Sync,
) -> Result<(), ResidencyError> {
    let halt = Halt::new(asked);
    let lane = || {
        if let Err(error) = work(&halt) {
            halt.fail(error);
        }
    };
    thread::scope(|scope| {
        for _ in 1..lanes {
            let builder = thread::Builder::new().name("install".to_owned());
            // A system that gives us no more threads leaves all the work to fewer.
            let _ = builder.spawn_scoped(scope, lane);
        }
        lane();
    });
    let error = halt.error.into_inner();
    error
        .unwrap_or_else(PoisonError::into_inner)
        .map_or(Ok(()), Err)
}
