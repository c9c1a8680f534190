//! What the door asks of whatever generates text, in the door's own words.
//!
//! A port rather than the engine itself: HTTP has to be tested against a generator that stalls for a
//! minute or fails in the middle, which no real model does on demand.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use serde::Serialize;

use super::cancel::Cancel;
use crate::engine::ConstraintSource;
use crate::jobs::Job;
use crate::terms::TokenId;
use crate::text::Conversation;
use crate::text::ReplyEvent;

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Token ids, as they are.
    Ids(Vec<TokenId>),
    /// Text, without a chat's layout.
    Text(String),
    /// A conversation.
    Chat(Box<Conversation>),
}

/// How tokens are chosen; the fields mean what OpenAI's parameters of the same names mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// The likeliest tokens whose probabilities reach this sum; 1 is all.
    pub top_p: f32,
    /// The likeliest so many tokens; 0 is all.
    pub top_k: usize,
    /// Tokens at least so likely relative to the likeliest; 0 is all.
    pub min_p: f32,
    /// Taken off a token's logit once it has been generated.
    pub presence_penalty: f32,
    /// Taken off a token's logit for every time it has been generated.
    pub frequency_penalty: f32,
    /// Added to tokens' logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Names the sequence of draws.
    pub seed: u64,
}

/// One generation.
#[derive(Clone, Debug)]
pub struct Ask {
    /// What to continue.
    pub prompt: Prompt,
    /// Most tokens to generate; `None` for as many as fit the context.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts before which the answer ends; not looked for in reasoning.
    pub stop: Vec<String>,
    /// What may come at all.
    pub constraint: Option<ConstraintSource>,
    /// The prompt's own tokens are scored first.
    pub score_prompt: bool,
    /// Nobody is there to see it: whoever is goes first.
    pub patient: bool,
    /// Ends it, from any thread.
    pub cancel: Cancel,
    /// Where it is kept while it runs: it goes on from what is there.
    pub job: Option<SharedJob>,
}

/// A job that its generation and its record hold; empty once it has been given up.
pub type SharedJob = Arc<Mutex<Option<Job>>>;

/// Something that happened while generating.
#[derive(Debug)]
pub enum Happening<'a> {
    /// The prompt is rendered and holds these tokens.
    Prompt(&'a [TokenId]),
    /// A token was chosen from this distribution.
    Token {
        /// The token.
        id: TokenId,
        /// Logits, `[vocab]`, before any penalty or bias.
        logits: &'a [f32],
    },
    /// A step of the reply, in whole characters. For a prompt that is no chat all text is answer.
    Reply(&'a ReplyEvent),
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its message, or a stop text came up.
    Stop,
    /// The model ended its message with tool calls.
    ToolCalls,
    /// The limit or the context's end.
    Length,
    /// Somebody asked to stop.
    Interrupted,
}

/// Numbers by where the bytes came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BySource {
    /// Were in memory.
    pub memory: u64,
    /// Read from the store.
    pub disk: u64,
    /// Brought from a neighbour.
    pub peer: u64,
    /// Brought from a hub.
    pub hub: u64,
}

/// What was moved, and where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Experts the router asked for.
    pub requested: u64,
    /// Of these, how many came from where.
    pub experts: BySource,
    /// Their bytes.
    pub bytes: BySource,
    /// Reading the prompt.
    pub prefill: Duration,
    /// Generating.
    pub decode: Duration,
    /// Both, less the waits.
    pub compute: Duration,
    /// Arithmetic stood still for the disk.
    pub wait_disk: Duration,
    /// Arithmetic stood still for a neighbour or the hub.
    pub wait_hub: Duration,
}

/// A finished generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many were not computed again.
    pub cached_tokens: usize,
    /// Tokens generated, those of reasoning and markup among them, the end's own token not.
    pub completion_tokens: usize,
    /// Of these, how many became reasoning, where an earlier process made some of them and nobody
    /// could count them as they came.
    pub reasoning_tokens: Option<usize>,
    /// What it took.
    pub ledger: Ledger,
}

/// Why a generation could not be made; cut by what the client does next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The request cannot be honoured as it is: change it.
    #[error("{message}")]
    Refused {
        /// The parameter at fault.
        param: Option<String>,
        /// A word for programs.
        code: &'static str,
        /// A sentence for people.
        message: String,
    },
    /// Weights did not come: the network, the disk, or an offline store. May pass.
    #[error("{message}")]
    Unavailable {
        /// A sentence for people, with what to do.
        message: String,
    },
    /// Something is broken here.
    #[error("{message}")]
    Broken {
        /// A sentence for people.
        message: String,
    },
}

/// What a generator is doing at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Now {
    /// Whether a generation runs.
    pub busy: bool,
    /// Whether it waits for a higher limit of fetched bytes, its state whole.
    pub paused: bool,
    /// Most tokens that will be generated.
    pub max_tokens: usize,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Of these, how many are read.
    pub read: usize,
    /// Tokens generated.
    pub generated: usize,
    /// The layer at work, counted from 0.
    pub layer: u16,
    /// Layers in all.
    pub layers: u16,
    /// Experts a layer.
    pub experts_a_layer: u16,
    /// Seconds since the generation began.
    pub elapsed: f64,
    /// Seconds the last token took.
    pub last_token: Option<f64>,
    /// Bytes a second over the network, lately.
    pub bytes_per_s: u64,
    /// Everything moved since the model was opened: experts.
    pub experts: BySource,
    /// Everything moved since the model was opened: their bytes.
    pub bytes: BySource,
}

/// The limit of bytes from the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Bytes in all since the process began; `None` is no limit.
    pub max_bytes: Option<u64>,
    /// How many came.
    pub fetched_bytes: u64,
}

/// An expert that reached the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Its layer, counted from 0.
    pub layer: u16,
    /// Its number within the layer.
    pub expert: u16,
    /// Where it came from: `memory`, `disk`, `peer` or `hub`.
    pub source: &'static str,
}

/// What stands behind the door.
pub trait Generator: Send + Sync + 'static {
    /// The model's name, ORG/NAME.
    fn model(&self) -> &str;

    /// Names the weights and the arithmetic: equal fingerprints and seeds give equal bits.
    fn fingerprint(&self) -> String;

    /// Tokens that fit, prompt and reply together.
    fn context(&self) -> usize;

    /// Size of the vocabulary.
    fn vocab(&self) -> usize;

    /// The prompt in tokens.
    ///
    /// # Errors
    ///
    /// [`Failure::Refused`] where it cannot be generated from: empty, too long, not renderable.
    fn tokens(&self, prompt: &Prompt) -> Result<Vec<TokenId>, Failure>;

    /// The bytes a token stands for; of a special token, its name.
    fn bytes(&self, id: TokenId) -> Vec<u8>;

    /// Whether a token is structure rather than text.
    fn special(&self, id: TokenId) -> bool;

    /// Generates, telling `on` of everything as it happens; breaking out of it ends the generation
    /// with [`Finish::Interrupted`]. Blocks; called for one generation at a time.
    ///
    /// # Errors
    ///
    /// What kept it from ending.
    fn generate(
        &self,
        ask: &Ask,
        on: &mut dyn FnMut(Happening<'_>) -> ControlFlow<()>,
    ) -> Result<Outcome, Failure>;

    /// Reads tokens without generating, telling `on` of each row: its number, and the distribution
    /// after its token (logits, `[vocab]`). Blocks, and can be stopped, as [`Generator::generate`].
    ///
    /// # Errors
    ///
    /// What kept it from ending.
    fn read(
        &self,
        ids: &[TokenId],
        cancel: &Cancel,
        on: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Outcome, Failure>;

    /// What is happening; never waits for arithmetic.
    fn now(&self) -> Now;

    /// Has everything that runs end where its state is whole, to go on from another time.
    fn wind_down(&self) {}

    /// The limit of fetched bytes. Generations that reach it wait, their states whole and kept.
    fn limit(&self) -> Limit {
        Limit::default()
    }

    /// Sets it; `None` is no limit. Who waits at a lower one goes on.
    fn set_limit(&self, _max_bytes: Option<u64>) {}

    /// Experts that reached the arithmetic, from the number `since` on, as far back as is
    /// remembered; and the number of the next.
    fn arrivals(&self, since: u64) -> (u64, Vec<Arrived>);
}
