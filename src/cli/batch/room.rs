//! A disk that is full: a batch waits for room, since a night's work is worth more than an early end.

use std::io::ErrorKind;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use crate::cli::exit::CliError;
use crate::cli::interrupt::Interrupt;
use crate::cli::screen::Screen;
use crate::cli::screen::chain;
use crate::jobs::JobError;

/// How often a full disk is tried again.
const AGAIN: Duration = Duration::from_millis(500);
/// How often somebody is reminded of it.
const REMIND: Duration = Duration::from_secs(600);

/// What is said of the disk's room, once for all sequences.
pub(super) struct Room<'a> {
    screen: &'a Screen,
    interrupt: &'a Interrupt,
    said: Mutex<Option<Instant>>,
}

impl<'a> Room<'a> {
    pub(super) fn new(screen: &'a Screen, interrupt: &'a Interrupt) -> Room<'a> {
        Room {
            screen,
            interrupt,
            said: Mutex::new(None),
        }
    }

    /// Does what writes, again and again while the disk has no room for it, until somebody asks to stop.
    ///
    /// `write` must be harmless to repeat, and hold no lock that others need while this waits.
    pub(super) fn wait<T>(
        &self,
        mut write: impl FnMut() -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let mut waited = false;
        loop {
            match write() {
                Err(error) if full(&error) && !self.interrupt.asked() => {
                    waited = true;
                    self.tell(&error);
                    std::thread::sleep(AGAIN);
                }
                done => {
                    if waited && done.is_ok() && self.said().take().is_some() {
                        self.screen.note("there is room again; going on");
                    }
                    return done;
                }
            }
        }
    }

    fn said(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, error: &CliError) {
        let mut said = self.said();
        if said.is_none_or(|said| said.elapsed() >= REMIND) {
            *said = Some(Instant::now());
            self.screen.note(&format!(
                "the disk is full: {}; nothing is lost, and this goes on when there is room",
                chain(error)
            ));
        }
    }
}

fn full(error: &CliError) -> bool {
    let source = match error {
        CliError::File { source, .. } | CliError::Job(JobError::Disk { source, .. }) => source,
        _ => return false,
    };
    matches!(
        source.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded
    )
}
