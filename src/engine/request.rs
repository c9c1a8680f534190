//! What an engine is asked, what it says while it works, and what it answers.

use std::time::Duration;

use super::sampler::Sampling;
use super::shaping::Shaping;
use crate::residency::Counts;
use crate::terms::TokenId;
use crate::text::Conversation;

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Token ids, as they are.
    Ids(Vec<TokenId>),
    /// Plain text, without the chat layout.
    Text(String),
    /// A conversation, rendered in K3's chat layout.
    Chat(Conversation),
}

/// One generation.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How the distribution is bent before a token is drawn.
    pub shaping: Shaping,
    /// Texts before which the answer ends; not looked for in reasoning.
    pub stop: Vec<String>,
    /// Keep every distribution and every routing.
    pub capture: bool,
}

/// Something that happened while generating.
#[derive(Debug)]
pub enum Event<'a> {
    /// The prompt is rendered and holds this many tokens.
    Prompt(&'a [TokenId]),
    /// A token was chosen, with the distribution it was chosen from (`[vocab]`).
    Token {
        /// The token.
        id: TokenId,
        /// Logits it was drawn from.
        logits: &'a [f32],
    },
    /// More of the model's reasoning, in whole characters.
    Reasoning(&'a str),
    /// More of the answer, in whole characters.
    Answer(&'a str),
    /// Anything else of a structured reply: tool calls.
    Reply(&'a crate::text::ReplyEvent),
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its message, or a stop text came up.
    Stop,
    /// The model ended its message with tool calls.
    ToolCalls,
    /// `max_tokens` or the context's end.
    Length,
    /// Somebody asked to stop.
    Interrupted,
}

impl Finish {
    /// The word used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::ToolCalls => "tool_calls",
            Finish::Length => "length",
            Finish::Interrupted => "interrupted",
        }
    }
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seconds {
    /// From the first row of the prompt to the first distribution.
    pub prefill: Duration,
    /// All sweeps after it.
    pub decode: Duration,
    /// Both, less the waits for disk and hub.
    pub compute: Duration,
}

/// Every distribution and routing of a generation of P prompt and G generated tokens.
///
/// Row `i` follows token `i`; the last generated token is not fed, so there are P + G − 1 rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capture {
    /// Values a row.
    pub vocab: usize,
    /// `[rows, vocab]`.
    pub logits: Vec<f32>,
    /// Chosen experts of each MoE layer, `[rows, k]`, best first.
    pub experts: Vec<(u16, Vec<i32>)>,
    /// Experts a token in each MoE layer.
    pub top_k: usize,
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The prompt in tokens.
    pub prompt_ids: Vec<TokenId>,
    /// What was generated, without the stop id.
    pub token_ids: Vec<TokenId>,
    /// The answer.
    pub text: String,
    /// What the model thought first.
    pub reasoning: String,
    /// Why it ended.
    pub finish: Finish,
    /// What was moved for it.
    pub counts: Counts,
    /// Where the time went.
    pub seconds: Seconds,
    /// Present when asked for.
    pub capture: Option<Capture>,
}
