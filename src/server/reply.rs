//! What a client hears, in OpenAI's shapes: the same news as a stream of chunks or as one object.

pub(super) mod chat;
pub(super) mod completions;
pub(super) mod responses;

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;
use serde_json::json;

use super::generator::BySource;
use super::generator::Finish;
use super::generator::Ledger;
use super::generator::Outcome;
use super::queue::Step;
use crate::text::ReplyEvent;

/// One event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Frame {
    /// The event's name, for the shapes that have one.
    pub(super) event: Option<Cow<'static, str>>,
    pub(super) data: Value,
}

impl Frame {
    fn chunk(data: Value) -> Frame {
        Frame { event: None, data }
    }
}

/// A kind of reply, put together from news.
pub(super) trait Shape: Send + 'static {
    /// Takes a step of a choice; gives what a stream says of it.
    fn take(&mut self, choice: usize, step: Step) -> Vec<Frame>;

    /// What a stream says when every choice has ended.
    fn end(&mut self) -> Vec<Frame>;

    /// What a stream says instead when the request failed; `error` is an object in OpenAI's shape.
    fn fail(&mut self, error: Value) -> Vec<Frame> {
        vec![Frame::chunk(error)]
    }

    /// The whole reply, once every choice has ended.
    fn whole(&mut self) -> Value;

    /// The last words of a stream, after everything.
    fn farewell(&self) -> Option<&'static str> {
        Some("[DONE]")
    }
}

/// What every object of one reply states.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) fingerprint: String,
    /// What else is to be known of how the reply came about.
    pub(super) note: Option<Value>,
}

impl Envelope {
    fn with(&self, object: &str, choices: &Value) -> Value {
        let mut json = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        });
        if let Some(note) = &self.note {
            json["deltafin"] = note.clone();
        }
        json
    }
}

/// A name nobody guesses: a prefix and 128 random bits.
pub(super) fn fresh_id(prefix: &str) -> String {
    use std::hash::BuildHasher;
    // Every RandomState has keys of its own, the first of them from the system's randomness.
    let part = || std::hash::RandomState::new().hash_one(prefix);
    format!("{prefix}{:016x}{:016x}", part(), part())
}

/// `finish_reason`.
fn reason(finish: Finish) -> &'static str {
    match finish {
        // An interrupted generation is reported as an error and never gets here with a client left.
        Finish::Stop | Finish::Interrupted => "stop",
        Finish::ToolCalls => "tool_calls",
        Finish::Length => "length",
    }
}

/// Usage over all choices of a request.
#[derive(Debug)]
pub(super) struct Usage {
    /// Choices that share a prompt, which is counted once.
    n: usize,
    prompt_tokens: usize,
    completion_tokens: usize,
    /// Of each choice, tokens that became reasoning.
    reasoning: HashMap<usize, usize>,
    /// Of each choice, tokens that have become nothing yet.
    pending: HashMap<usize, usize>,
    cached_tokens: usize,
    ledger: Ledger,
    /// The seed of the first choice.
    seed: u64,
    effort: Option<&'static str>,
}

#[derive(Serialize)]
struct Experts {
    requested: u64,
    #[serde(flatten)]
    by: BySource,
}

impl Usage {
    pub(super) fn new(n: usize, seed: u64, effort: Option<&'static str>) -> Usage {
        Usage {
            n,
            prompt_tokens: 0,
            completion_tokens: 0,
            reasoning: HashMap::new(),
            pending: HashMap::new(),
            cached_tokens: 0,
            ledger: Ledger::default(),
            seed,
            effort,
        }
    }

    /// Counts the tokens that become reasoning; markup belongs to neither side.
    fn count(&mut self, choice: usize, step: &Step) {
        let pending = self.pending.entry(choice).or_default();
        match step {
            Step::Token(_) => *pending += 1,
            Step::Reply(event) => {
                let became = std::mem::take(pending);
                if matches!(event, ReplyEvent::Reasoning(_)) {
                    *self.reasoning.entry(choice).or_default() += became;
                }
            }
            Step::Prompt(_) | Step::PromptScores(_) | Step::Ended(_) => *pending = 0,
        }
    }

    fn add(&mut self, choice: usize, outcome: &Outcome) {
        if choice.is_multiple_of(self.n) {
            self.prompt_tokens += outcome.prompt_tokens;
            self.cached_tokens += outcome.cached_tokens;
        }
        self.completion_tokens += outcome.completion_tokens;
        if let Some(reasoning) = outcome.reasoning_tokens {
            // Of this choice alone: another may have been made here from its first token on.
            self.reasoning.insert(choice, reasoning);
        }
        self.ledger.add(&outcome.ledger);
    }

    fn reasoning_tokens(&self) -> usize {
        self.reasoning.values().sum()
    }

    fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": { "cached_tokens": self.cached_tokens, "cache_write_tokens": 0 },
            "completion_tokens_details": { "reasoning_tokens": self.reasoning_tokens() },
            "deltafin": self.deltafin(),
        })
    }

    /// The same in the words of `/v1/responses`.
    fn response_json(&self) -> Value {
        json!({
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": { "cached_tokens": self.cached_tokens, "cache_write_tokens": 0 },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": { "reasoning_tokens": self.reasoning_tokens() },
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "deltafin": self.deltafin(),
        })
    }

    fn deltafin(&self) -> Value {
        let ledger = &self.ledger;
        let experts = Experts {
            requested: ledger.requested,
            by: ledger.experts,
        };
        let mut object = json!({
            "experts": experts,
            "bytes": ledger.bytes,
            "seconds": {
                "prefill": ledger.prefill.as_secs_f64(),
                "decode": ledger.decode.as_secs_f64(),
                "compute": ledger.compute.as_secs_f64(),
                "wait_disk": ledger.wait_disk.as_secs_f64(),
                "wait_hub": ledger.wait_hub.as_secs_f64(),
            },
            "seed": self.seed,
        });
        if let Some(effort) = self.effort {
            object["reasoning_effort"] = effort.into();
        }
        object
    }
}

impl BySource {
    fn add(&mut self, other: &BySource) {
        self.memory += other.memory;
        self.disk += other.disk;
        self.peer += other.peer;
        self.hub += other.hub;
    }
}

impl Ledger {
    pub(super) fn add(&mut self, other: &Ledger) {
        self.requested += other.requested;
        self.experts.add(&other.experts);
        self.bytes.add(&other.bytes);
        self.prefill += other.prefill;
        self.decode += other.decode;
        self.compute += other.compute;
        self.wait_disk += other.wait_disk;
        self.wait_hub += other.wait_hub;
    }
}
