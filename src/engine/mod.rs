//! Prompts in, events out: sampling, stopping, counting.
//!
//! An [`Engine`] is one opened model. [`Engine::generate`] renders the prompt, sweeps its rows
//! through the model, draws token after token and tells an observer of each. What it is doing can be
//! read at any moment from any thread with [`Engine::progress`].

mod error;
mod generate;
mod live;
mod request;
pub mod sampler;
mod shaping;
mod stop;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

pub use error::EngineError;
pub use live::Phase;
pub use live::Progress;
pub use request::Capture;
pub use request::Event;
pub use request::Finish;
pub use request::Generation;
pub use request::Prompt;
pub use request::Request;
pub use request::Seconds;
pub use sampler::Sampling;
pub use shaping::Constraint;
pub use shaping::ConstraintSource;
pub use shaping::Shaping;

use crate::checkpoint::Spec;
use crate::kernel::Isa;
use crate::kernel::Kernel;
use crate::model::Model;
use crate::residency::Counts;
use crate::residency::Meter;
use crate::residency::Opened;
use crate::residency::Supply;
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
}

/// One opened model, ready to generate.
pub struct Engine {
    name: String,
    model: Model,
    supply: Supply,
    tokenizer: Option<Tokenizer>,
    stop_ids: Vec<TokenId>,
    live: live::Live,
    /// Held by the generation at work.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Ends the running generation, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<AtomicBool>);

impl Stopper {
    /// The generation ends within the expert at hand, with what was made so far.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
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
        Ok(Engine {
            name: opened.repo.to_string(),
            model: Model::new(Arc::clone(&opened.spec), kernel),
            supply: Supply::new(opened).map_err(EngineError::Threads)?,
            tokenizer,
            stop_ids,
            live: live::Live::default(),
            turn: Mutex::new(()),
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
        self.supply.opened()
    }

    /// The instruction set and the number of threads at work.
    pub fn kernel(&self) -> &Kernel {
        self.model.kernel()
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

    /// What is happening now.
    pub fn progress(&self) -> Progress {
        self.live.progress()
    }

    /// Everything moved since the model was opened.
    pub fn counts(&self) -> Counts {
        self.meter().counts()
    }

    /// Waits until everything fetched so far is on disk, or has been given up.
    pub fn flush(&self) {
        self.supply.flush();
    }

    /// A way to end the running generation.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.opened().stop))
    }

    fn meter(&self) -> &Arc<Meter> {
        self.supply.meter()
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
