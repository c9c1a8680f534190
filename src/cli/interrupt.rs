//! Ctrl-C: once ends cleanly with what was made, twice ends now.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::termios::OptionalActions;
use rustix::termios::Termios;
use rustix::termios::tcgetattr;
use rustix::termios::tcsetattr;

use super::exit;
use crate::engine::Stopper;

/// How long a token may take after the first signal. Whoever ends services kills after 90 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Hears SIGINT and SIGTERM.
#[derive(Clone, Debug, Default)]
pub(super) struct Interrupt(Arc<State>);

#[derive(Debug, Default)]
struct State {
    asked: AtomicU32,
    flag: Arc<AtomicBool>,
    stopper: Mutex<Option<Stopper>>,
    /// The first signal lets the token at hand be finished.
    gentle: AtomicBool,
    /// While a line is being typed: how the terminal was before.
    typing: Mutex<Option<Termios>>,
}

/// A line is being typed as long as this is there.
pub(super) struct AtPrompt<'a>(&'a Interrupt);

impl Drop for AtPrompt<'_> {
    fn drop(&mut self) {
        *self.0.typing() = None;
    }
}

impl Interrupt {
    /// Starts to listen, on a thread of its own. Where the system refuses, signals keep their
    /// ordinary meaning.
    pub(super) fn listen() -> Interrupt {
        let interrupt = Interrupt::default();
        let heard = interrupt.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            if let Ok(runtime) = runtime {
                runtime.block_on(async {
                    while wait().await {
                        heard.hear()
                    }
                });
            }
        });
        interrupt
    }

    fn hear(&self) {
        if self.0.asked.fetch_add(1, Ordering::SeqCst) > 0 {
            // The second one means now.
            std::process::exit(i32::from(exit::INTERRUPTED));
        }
        if let Some(before) = &*self.typing() {
            // Nothing is under way but a line, and the editor would leave the terminal raw.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
            std::process::exit(i32::from(exit::INTERRUPTED));
        }
        if self.0.gentle.load(Ordering::SeqCst) {
            if let Some(stopper) = &*self.stopper() {
                stopper.finish_sweep();
            }
            let later = self.clone();
            std::thread::spawn(move || {
                std::thread::sleep(PATIENCE);
                later.shout();
            });
        } else {
            self.shout();
        }
    }

    fn typing(&self) -> MutexGuard<'_, Option<Termios>> {
        let typing = &self.0.typing;
        typing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A signal from now on ends the program at once, as long as the result lives.
    pub(super) fn at_prompt(&self) -> AtPrompt<'_> {
        *self.typing() = tcgetattr(std::io::stdin()).ok();
        AtPrompt(self)
    }

    fn stopper(&self) -> MutexGuard<'_, Option<Stopper>> {
        let stopper = &self.0.stopper;
        stopper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what is being fetched or computed, within an expert.
    fn shout(&self) {
        self.0.flag.store(true, Ordering::SeqCst);
        if let Some(stopper) = &*self.stopper() {
            stopper.stop();
        }
    }

    /// From now on the first signal lets the token at hand be finished, so that its state can be
    /// kept; one that takes too long is given up.
    pub(super) fn gently(&self) {
        self.0.gentle.store(true, Ordering::SeqCst);
    }

    /// Whether somebody asked to stop.
    pub(super) fn asked(&self) -> bool {
        self.0.asked.load(Ordering::SeqCst) > 0
    }

    /// Set when somebody asks to stop.
    pub(super) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0.flag)
    }

    /// Also ends this engine's generation from now on.
    pub(super) fn stops(&self, stopper: Stopper) {
        *self.stopper() = Some(stopper);
    }
}

/// Waits for a signal; false when none can come.
async fn wait() -> bool {
    let term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate());
    match term {
        Ok(mut term) => tokio::select! {
            heard = tokio::signal::ctrl_c() => heard.is_ok(),
            heard = term.recv() => heard.is_some(),
        },
        Err(_) => tokio::signal::ctrl_c().await.is_ok(),
    }
}
