//! What is happening now, readable at any moment from any thread.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

/// What the engine is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Nothing.
    #[default]
    Idle,
    /// Reading the prompt.
    Prefill,
    /// Generating.
    Decode,
}

/// A photograph of a generation at work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Prompt tokens.
    pub prompt: usize,
    /// Prompt tokens already read.
    pub read: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Most tokens that will be.
    pub max_tokens: usize,
    /// The layer at work, counted from 0.
    pub layer: u16,
    /// Layers in all.
    pub layers: u16,
    /// Time since the generation began.
    pub elapsed: Duration,
    /// Time the last finished sweep took.
    pub last_sweep: Option<Duration>,
}

/// The running photograph.
#[derive(Debug, Default)]
pub(super) struct Live {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    began: Option<Instant>,
}

impl Live {
    pub(super) fn progress(&self) -> Progress {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Progress {
            elapsed: state.began.map_or(Duration::ZERO, |b| b.elapsed()),
            ..state.progress
        }
    }

    pub(super) fn begin(&self, prompt: usize, max_tokens: usize, layers: u16) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.progress = Progress {
            phase: Phase::Prefill,
            prompt,
            max_tokens,
            layers,
            ..Progress::default()
        };
        state.began = Some(Instant::now());
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(
            &mut self
                .state
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .progress,
        );
    }

    pub(super) fn end(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.progress.phase = Phase::Idle;
        state.began = None;
    }
}
