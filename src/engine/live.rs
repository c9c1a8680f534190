//! What is happening now, readable at any moment from any thread.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::Instant;

use super::request::Priority;

/// What a generation is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Nothing.
    #[default]
    Idle,
    /// Waiting for memory.
    Waiting,
    /// Reading the prompt.
    Prefill,
    /// Generating.
    Decode,
    /// Waiting for a higher limit of fetched bytes.
    Paused,
}

/// A photograph of the engine at work: of the generation that has been in it longest, and of the
/// sweep.
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
    /// Time its last finished decoding sweep took.
    pub last_sweep: Option<Duration>,
    /// Generations in the engine, those that wait for memory among them.
    pub generations: usize,
    /// Sequences in the sweep at work; 0 between sweeps.
    pub sequences: usize,
    /// Rows in the sweep at work.
    pub rows: usize,
}

/// A photograph of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its number in this engine, in order of arrival.
    pub id: u64,
    /// Who goes first.
    pub priority: Priority,
    /// What it is doing.
    pub phase: Phase,
    /// Whether it has rows in the sweep at work.
    pub sweeping: bool,
    /// Prompt tokens.
    pub prompt: usize,
    /// Prompt tokens already read.
    pub read: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Most tokens that will be.
    pub max_tokens: usize,
    /// Time since it came.
    pub elapsed: Duration,
    /// Time its last finished decoding sweep took.
    pub last_sweep: Option<Duration>,
}

/// The running photograph.
#[derive(Debug)]
pub(super) struct Live {
    state: Mutex<State>,
    layers: u16,
}

#[derive(Debug, Default)]
struct State {
    running: BTreeMap<u64, (Running, Instant)>,
    layer: u16,
    sequences: usize,
    rows: usize,
}

impl Live {
    pub(super) fn new(layers: u16) -> Live {
        Live {
            state: Mutex::default(),
            layers,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self) -> Progress {
        let state = self.state();
        let at_work = |r: &&(Running, Instant)| r.0.phase != Phase::Waiting;
        let mut running = state.running.values();
        let first = running.clone().find(at_work).or_else(|| running.next());
        let whole = Progress {
            layer: state.layer,
            layers: self.layers,
            generations: state.running.len(),
            sequences: state.sequences,
            rows: state.rows,
            ..Progress::default()
        };
        match first {
            None => whole,
            Some((one, began)) => Progress {
                phase: one.phase,
                prompt: one.prompt,
                read: one.read,
                generated: one.generated,
                max_tokens: one.max_tokens,
                elapsed: began.elapsed(),
                last_sweep: one.last_sweep,
                ..whole
            },
        }
    }

    pub(super) fn running(&self) -> Vec<Running> {
        let one = |(one, began): &(Running, Instant)| Running {
            elapsed: began.elapsed(),
            ..*one
        };
        self.state().running.values().map(one).collect()
    }

    pub(super) fn begin(&self, id: u64, priority: Priority, prompt: usize, max_tokens: usize) {
        let running = Running {
            id,
            priority,
            phase: Phase::Waiting,
            sweeping: false,
            prompt,
            read: 0,
            generated: 0,
            max_tokens,
            elapsed: Duration::ZERO,
            last_sweep: None,
        };
        self.state().running.insert(id, (running, Instant::now()));
    }

    pub(super) fn change(&self, id: u64, change: impl FnOnce(&mut Running)) {
        if let Some((running, _)) = self.state().running.get_mut(&id) {
            change(running);
        }
    }

    pub(super) fn end(&self, id: u64) {
        self.state().running.remove(&id);
    }

    /// A sweep begins, with so many rows of each of these.
    pub(super) fn sweeping(&self, parts: impl Iterator<Item = (u64, usize)>) {
        let mut state = self.state();
        for (id, rows) in parts {
            state.sequences += 1;
            state.rows += rows;
            if let Some((running, _)) = state.running.get_mut(&id) {
                running.sweeping = true;
            }
        }
    }

    pub(super) fn layer(&self, layer: u16) {
        self.state().layer = layer;
    }

    /// The sweep is over.
    pub(super) fn swept(&self) {
        let mut state = self.state();
        (state.sequences, state.rows) = (0, 0);
        for (running, _) in state.running.values_mut() {
            running.sweeping = false;
        }
    }
}
