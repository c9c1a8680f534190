//! Ctrl-C: once ends cleanly with what was made, twice ends now.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;

use super::exit;
use crate::engine::Stopper;

/// Hears SIGINT and SIGTERM.
#[derive(Clone, Debug, Default)]
pub(super) struct Interrupt(Arc<State>);

#[derive(Debug, Default)]
struct State {
    asked: AtomicU32,
    flag: Arc<AtomicBool>,
    stopper: Mutex<Option<Stopper>>,
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
        self.0.flag.store(true, Ordering::SeqCst);
        if let Some(stopper) = &*self
            .0
            .stopper
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
        {
            stopper.stop();
        }
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
        *self
            .0
            .stopper
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(stopper);
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
