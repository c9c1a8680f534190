//! Prompts in, events out: sampling, stopping, counting.
//!
//! An [`Engine`] is one opened model. [`Engine::generate`] renders the prompt, has its rows swept
//! through the model, draws token after token and tells an observer of each, on the caller's own
//! thread. Many callers share the sweeps:
//!
//! ```text
//! caller   prompt ─► offer rows ─► … ─► draw, tell ─► offer a row ─► …      generate.rs, run.rs
//! caller   prompt ─► offer rows ─► …                                        reply.rs, shaping.rs
//!                        ▼    ▲ taken in
//! line     who has memory, who goes to disk, what goes into the next sweep  line.rs, pace.rs
//! sweeps   one thread: compose, sweep, hand out, share the counts out       sweeps.rs, spill.rs
//! kept     states of earlier texts, for prompts that begin like them        prefixes.rs
//! ```
//!
//! What it is doing can be read at any moment from any thread with [`Engine::progress`].

mod error;
mod generate;
mod limit;
mod line;
mod live;
mod pace;
mod prefixes;
mod reply;
mod request;
mod run;
pub mod sampler;
mod shaping;
mod spill;
mod stop;
mod stopper;
mod sweeps;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub use error::EngineError;
pub use limit::AtLimit;
pub use limit::FetchLimit;
pub use line::StateMemory;
pub use live::Phase;
pub use live::Progress;
pub use live::Running;
pub use prefixes::PrefixStats;
pub use prefixes::Prefixes;
pub use prefixes::StateStore;
pub use request::Capture;
pub use request::Event;
pub use request::Finish;
pub use request::Generation;
pub use request::Priority;
pub use request::Prompt;
pub use request::Request;
pub use request::Seconds;
pub use request::Sharing;
pub use request::Snapshots;
pub use request::Start;
pub use sampler::Sampling;
pub use shaping::Constraint;
pub use shaping::ConstraintSource;
pub use shaping::Shaping;
pub use spill::Spilled;
pub use stopper::Stopper;

use sweeps::Machine;
use sweeps::Sweeps;

use crate::checkpoint::Spec;
use crate::kernel::Isa;
use crate::kernel::Kernel;
use crate::model::Model;
use crate::residency::Counts;
use crate::residency::Demand;
use crate::residency::MemoryPlan;
use crate::residency::Meter;
use crate::residency::Opened;
use crate::residency::Recall;
use crate::residency::Supply;
use crate::residency::TraceError;
use crate::terms::TokenId;
use crate::text;
use crate::text::Tokenizer;

/// How the machine is used. Every field is required; defaults live in `cli`.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Instruction set of the arithmetic.
    pub isa: Isa,
    /// Threads for the arithmetic, at least 1.
    pub threads: usize,
    /// What memory may be used for what; its threads are these.
    pub memory: Demand,
}

/// One opened model, ready to generate.
pub struct Engine {
    name: String,
    sweeps: Sweeps,
    tokenizer: Option<Tokenizer>,
    stop_ids: Vec<TokenId>,
    stopper: Stopper,
    kept: prefixes::Kept,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Makes an opened model ready. The core must be installed.
    ///
    /// # Errors
    ///
    /// If the tokenizer is damaged or threads cannot be started.
    pub fn new(opened: Opened, options: EngineOptions) -> Result<Engine, EngineError> {
        let tokenizer = match (
            opened.meta("tiktoken.model")?,
            opened.meta("tokenizer_config.json")?,
        ) {
            (Some(ranks), Some(config)) => Some(Tokenizer::new(&ranks, &config)?),
            _ => None,
        };
        let generation = opened.meta("generation_config.json")?;
        let stop_ids = match &tokenizer {
            Some(tokenizer) => text::stop_ids(generation.as_deref(), &opened.spec.eos, tokenizer)?,
            None => opened.spec.eos.clone(),
        };
        let kernel = Kernel::new(options.isa, options.threads);
        let memory = Demand {
            threads: options.threads,
            ..options.memory
        };
        Ok(Engine {
            name: opened.repo.to_string(),
            sweeps: Sweeps::start(
                Model::new(Arc::clone(&opened.spec), kernel),
                Supply::new(opened, &memory, options.isa)?,
            )
            .map_err(EngineError::Threads)?,
            tokenizer,
            stop_ids,
            stopper: Stopper::new(),
            kept: prefixes::Kept::default(),
        })
    }

    /// The model's name, ORG/NAME.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the model computes.
    pub fn spec(&self) -> &Spec {
        &self.opened().spec
    }

    /// What was opened.
    pub fn opened(&self) -> &Opened {
        self.machine().supply.opened()
    }

    /// The instruction set and the number of threads at work.
    pub fn kernel(&self) -> &Kernel {
        self.machine().model.kernel()
    }

    /// The tokenizer.
    ///
    /// # Errors
    ///
    /// If the checkpoint has none that this engine reads.
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.tokenizer
            .as_ref()
            .ok_or_else(|| EngineError::NoTokenizer {
                model: self.name.clone(),
                missing: "tiktoken.model",
            })
    }

    /// Tokens that end a message.
    pub fn stop_ids(&self) -> &[TokenId] {
        &self.stop_ids
    }

    /// Who got the memory.
    pub fn memory(&self) -> &MemoryPlan {
        self.machine().supply.plan()
    }

    /// What is happening now.
    pub fn progress(&self) -> Progress {
        self.machine().live.progress()
    }

    /// Every generation in the engine, in order of arrival.
    pub fn running(&self) -> Vec<Running> {
        self.machine().live.running()
    }

    /// Sets the memory for the states of running sequences, from the next sweep on. Who does not
    /// fit waits in line: interactive requests before others, else in order of arrival.
    pub fn set_state_memory(&self, memory: StateMemory) {
        self.machine().line().memory = memory;
        self.machine().look();
    }

    /// Sets what is kept of earlier texts for prompts that begin like them. It is not part of
    /// [`StateMemory`].
    pub fn set_prefixes(&self, prefixes: Prefixes) {
        self.kept.set(prefixes);
    }

    /// What is kept of earlier texts, and what that has saved.
    pub fn prefix_stats(&self) -> PrefixStats {
        self.kept.stats()
    }

    /// Says what generations do where the limit of fetched bytes is reached. Their states are whole
    /// either way, told of where [`Request::snapshots`] wants any, and kept for later texts.
    pub fn set_at_limit(&self, at_limit: AtLimit) {
        self.machine().set_at_limit(at_limit);
    }

    /// The limit of fetched bytes, and what counts against it. Without a hub there is none.
    pub fn fetch_limit(&self) -> FetchLimit {
        let hub = self.opened().hub.as_ref();
        let (max, used) = hub.map_or((None, 0), |hub| hub.bytes_limit());
        FetchLimit { max, used }
    }

    /// Bytes a second that come over the network, lately.
    pub fn fetch_rate(&self) -> u64 {
        let hub = self.opened().hub.as_ref();
        hub.map_or(0, |hub| hub.stats().bytes_per_s)
    }

    /// Sets the limit of fetched bytes; whoever waits at a lower one goes on. `None` is no limit.
    pub fn set_fetch_limit(&self, max: Option<u64>) {
        if let Some(hub) = &self.opened().hub {
            hub.set_bytes_max(max);
        }
    }

    /// What moving states to disk and back has cost.
    pub fn spilled(&self) -> Spilled {
        self.machine().line().spilled
    }

    /// What was moved in sweeps for generations that failed, or left half-way: with the
    /// [`Generation::counts`] of all others it makes up what all sweeps moved.
    pub fn unclaimed(&self) -> Counts {
        self.machine().line().unclaimed
    }

    /// Everything moved since the model was opened.
    pub fn counts(&self) -> Counts {
        self.meter().counts()
    }

    /// How often guesses at what a layer would ask for were right, by layer.
    pub fn recall(&self) -> BTreeMap<u16, Recall> {
        self.meter().recall()
    }

    /// Writes which experts every sweep from now on uses to a file; see [`Supply::trace_to`].
    ///
    /// # Errors
    ///
    /// If the file cannot be written, is no trace, or is another model's.
    pub fn trace_to(
        &self,
        path: &Path,
        failed: impl Fn(&TraceError) + Send + Sync + 'static,
    ) -> Result<(), TraceError> {
        self.machine().supply.trace_to(path, failed)
    }

    /// Waits until everything fetched so far is on disk, or has been given up.
    pub fn flush(&self) {
        self.machine().supply.flush();
    }

    /// A way to end all generations that run when it is used. One of its own ends
    /// [`Request::stopper`]'s.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    fn meter(&self) -> &Arc<Meter> {
        self.machine().supply.meter()
    }

    fn machine(&self) -> &Arc<Machine> {
        self.sweeps.machine()
    }
}

impl Progress {
    /// Time left if every token that is still allowed is made at the pace of the last one.
    pub fn estimate(&self) -> Option<std::time::Duration> {
        generate::estimate(
            self.last_sweep,
            self.max_tokens.saturating_sub(self.generated),
        )
    }
}
