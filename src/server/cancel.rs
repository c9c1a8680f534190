//! Ending one generation, from any thread.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

type Shout = Box<dyn Fn() + Send>;

/// Whoever hears of the end does so until this is dropped: what is over must not be ended again.
#[must_use]
pub struct Hearing {
    cancel: Cancel,
    number: u64,
}

impl Drop for Hearing {
    fn drop(&mut self) {
        let mut shouts = self.cancel.shouts();
        shouts.retain(|(number, _)| *number != self.number);
    }
}

/// A word to one generation, or to all of one request, that nobody waits for them any more.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Inner>);

#[derive(Default)]
struct Inner {
    asked: AtomicBool,
    shouts: Mutex<Vec<(u64, Shout)>>,
    next: AtomicU64,
}

impl std::fmt::Debug for Cancel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cancel").field(&self.asked()).finish()
    }
}

impl Cancel {
    /// Asks for the end. Asking again changes nothing.
    pub fn cancel(&self) {
        // First the word, then the shout: whoever registers between the two hears the word.
        self.0.asked.store(true, Ordering::SeqCst);
        for (_, shout) in self.shouts().iter() {
            shout();
        }
    }

    /// Whether the end was asked for.
    pub fn asked(&self) -> bool {
        self.0.asked.load(Ordering::SeqCst)
    }

    /// Has `shout` called when the end is asked for; at once where it was already.
    pub fn hear(&self, shout: impl Fn() + Send + 'static) -> Hearing {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let mut shouts = self.shouts();
        if self.asked() {
            shout();
        }
        shouts.push((number, Box::new(shout)));
        Hearing {
            cancel: self.clone(),
            number,
        }
    }

    fn shouts(&self) -> std::sync::MutexGuard<'_, Vec<(u64, Shout)>> {
        self.0.shouts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
