//! What whoever looks after a store should hear of: each kind once, however often it happens.

use std::path::Path;

use super::Inner;
use super::Store;
use super::error::Damage;
use super::lock;

/// Hears a sentence. Called from whichever thread has found out, with no lock of the store held.
pub(super) type Listener = Box<dyn Fn(&str) + Send + Sync>;

impl Store {
    /// Has `listener` told, once for each process, that experts cannot be kept and why, and that
    /// something damaged was found and removed: at once, if it has happened already. Only the first
    /// listener hears anything.
    pub fn on_notice(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        let inner = &self.inner;
        if inner.listener.set(Box::new(listener)).is_err() {
            return;
        }
        let stats = self.stats();
        if stats.damaged > 0 {
            inner.say(&format!(
                "{}: {} damaged files were found and removed; what is missing is fetched again",
                inner.home.display(),
                stats.damaged
            ));
        }
        if let Some(trouble) = stats.trouble {
            inner.say(&trouble);
        }
    }
}

impl Inner {
    fn say(&self, text: &str) {
        if let Some(listener) = self.listener.get() {
            listener(text);
        }
    }

    /// Experts cannot be kept, through no choice of anybody's.
    pub(super) fn trouble(&self, why: impl FnOnce() -> String) {
        let text = {
            let mut state = lock(&self.state);
            if state.stats.trouble.is_some() {
                return;
            }
            let text = why();
            state.stats.trouble = Some(text.clone());
            text
        };
        self.say(&text);
    }

    /// Counts something damaged that was removed.
    pub(super) fn damaged(&self, path: &Path, damage: &Damage) {
        let first = {
            let mut state = lock(&self.state);
            state.stats.damaged += 1;
            !std::mem::replace(&mut state.told_damage, true)
        };
        if first {
            self.say(&format!(
                "{}: {damage}; removed, and fetched again when it is needed. `deltafin cache verify` reads everything",
                path.display()
            ));
        }
    }
}
