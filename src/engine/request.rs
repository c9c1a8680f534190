//! What an engine is asked, what it says while it works, and what it answers.

use std::sync::Arc;
use std::time::Duration;

use super::sampler::Sampling;
use super::shaping::Shaping;
use super::stopper::Stopper;
use crate::model::Sequence;
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
    /// Keep every distribution and every routing. All rows are then computed: a start is not used.
    pub capture: bool,
    /// Tokens that an earlier process has already generated for this request. They are read like a
    /// prompt, and count as generated in everything else: limit, penalties, positions of the draws,
    /// grammar, reply and stop texts.
    pub generated: Vec<TokenId>,
    /// A state to go on from. One that does not fit is ignored: it saves rows, it decides nothing.
    pub start: Option<Arc<Start>>,
    /// When to tell of the sequence's state.
    pub snapshots: Snapshots,
    /// Who goes first where not all can.
    pub priority: Priority,
    /// How long each sweep may be held back while it would be this sequence's alone: with company
    /// it costs less. `None` waits for nobody.
    pub patience: Option<Duration>,
    /// Ends this generation, and no other.
    pub stopper: Option<Stopper>,
}

impl Request {
    /// Continues `prompt` with at most `max_tokens` tokens; everything else is off.
    pub fn new(prompt: Prompt, max_tokens: usize, sampling: Sampling) -> Request {
        Request {
            prompt,
            max_tokens,
            sampling,
            shaping: Shaping::default(),
            stop: Vec::new(),
            capture: false,
            generated: Vec::new(),
            start: None,
            snapshots: Snapshots::default(),
            priority: Priority::Interactive,
            patience: None,
            stopper: None,
        }
    }
}

/// A sequence's state after `ids`.
#[derive(Clone, Debug)]
pub struct Start {
    /// The tokens it has taken in. They serve a request whose prompt and generated tokens begin
    /// with them and go on: the last row has to be computed, since its distribution is not kept.
    pub ids: Vec<TokenId>,
    /// The state.
    pub sequence: Sequence,
}

/// When a generation tells of its sequence's state, with [`Event::State`]. The default is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshots {
    /// At the end of the first sweep after so many tokens more.
    pub every_tokens: Option<usize>,
    /// At the end of the first sweep after so much time more.
    pub every: Option<Duration>,
    /// When the prompt has been read, and no token of the reply.
    pub at_prompt_end: bool,
    /// When the generation has ended by itself.
    pub at_end: bool,
}

impl Snapshots {
    /// Whether any was asked for.
    pub fn wanted(&self) -> bool {
        *self != Snapshots::default()
    }
}

/// Who goes first where not all can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for each token.
    #[default]
    Interactive,
    /// Fills what is left.
    Batch,
}

/// Something that happened while generating.
///
/// ```text
/// Prompt  (Reasoning | Answer | Reply)* Replayed   the second half where the request brings tokens
/// (State | Token | Reasoning | Answer | Reply)*
/// ```
#[derive(Debug)]
#[non_exhaustive]
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
    /// The tokens that the request brought have been replayed: the text told before this was made
    /// by an earlier process, and none of its tokens is told as [`Event::Token`]. What follows is
    /// new.
    Replayed(&'a [TokenId]),
    /// The sequence's state after `ids`, which begin with the prompt: at the moments that
    /// [`Request::snapshots`] names, and once more where such a generation is stopped between two
    /// sweeps. (A sweep stopped half-way leaves no state to tell of.) Arithmetic waits while this
    /// is heard: copy, and return.
    State {
        /// What it has taken in.
        ids: &'a [TokenId],
        /// The state.
        sequence: &'a Sequence,
    },
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
    /// The sweeps that read the prompt, as long as they lasted, whoever shared them.
    pub prefill: Duration,
    /// All sweeps after them.
    pub decode: Duration,
    /// Arithmetic, by rows: this generation's share of the time that its sweeps did not wait for
    /// disk or hub. Alone it is prefill and decode less the waits in [`Counts`].
    pub compute: Duration,
    /// In line, and between sweeps.
    pub waited: Duration,
}

/// Whom the sweeps of a generation served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// Sweeps that this generation had rows in.
    pub sweeps: u64,
    /// The sequences in each of these, added up; as many as sweeps where it was always alone.
    pub sequences: u64,
    /// How often its state had to go for want of memory and was computed again.
    pub evicted: u64,
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
    /// The sweep that each row was computed in, by its number in this engine.
    pub sweeps: Vec<u64>,
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The prompt in tokens.
    pub prompt_ids: Vec<TokenId>,
    /// What was generated, without the stop id; begins with what the request brought.
    pub token_ids: Vec<TokenId>,
    /// The answer.
    pub text: String,
    /// What the model thought first.
    pub reasoning: String,
    /// Why it ended.
    pub finish: Finish,
    /// What was moved for it: of each sweep that it had rows in, the share of its rows among all.
    /// All generations of an engine together make up what the engine moved, but for those that
    /// failed or left a sweep half-way.
    pub counts: Counts,
    /// Where the time went.
    pub seconds: Seconds,
    /// Whom it shared its sweeps with.
    pub sharing: Sharing,
    /// Rows that were computed of the prompt and of the tokens that the request brought.
    pub computed_rows: usize,
    /// Rows of these that were not, because a state was there to go on from.
    pub cached_tokens: usize,
    /// Present when asked for.
    pub capture: Option<Capture>,
}
