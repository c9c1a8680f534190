//! A completion's reply.

use std::sync::Arc;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::Envelope;
use super::Frame;
use super::Shape;
use super::Usage;
use super::reason;
use crate::server::generator::Finish;
use crate::server::generator::Generator;
use crate::server::logprobs::Gatherer;
use crate::server::logprobs::Scored;
use crate::server::queue::Step;
use crate::terms::TokenId;
use crate::text::ReplyEvent;

/// `text_completion`, streamed and whole.
pub(in crate::server) struct CompletionReply {
    envelope: Envelope,
    usage: Usage,
    include_usage: bool,
    /// Texts that choices begin with, where the prompt is echoed; `None` has it told in tokens.
    echo: Option<Vec<Option<String>>>,
    generator: Arc<dyn Generator>,
    choices: Vec<Choice>,
}

struct Choice {
    text: String,
    gatherer: Option<Gatherer>,
    /// What is known of the tokens so far; lists that run beside each other.
    scored: Scores,
    /// The prompt's tokens after its first, where they are scored.
    prompt_scores: Vec<Scored>,
    finish: Option<Finish>,
}

impl CompletionReply {
    pub(in crate::server) fn new(
        envelope: Envelope,
        usage: Usage,
        include_usage: bool,
        choices: usize,
        echo: Option<Vec<Option<String>>>,
        (scored, chat, generator): (bool, bool, &Arc<dyn Generator>),
    ) -> CompletionReply {
        let choice = || Choice {
            text: String::new(),
            gatherer: scored.then(|| Gatherer::new(Arc::clone(generator), chat)),
            scored: Scores::default(),
            prompt_scores: Vec::new(),
            finish: None,
        };
        CompletionReply {
            envelope,
            usage,
            include_usage,
            echo,
            generator: Arc::clone(generator),
            choices: std::iter::repeat_with(choice).take(choices).collect(),
        }
    }

    fn chunk(&self, choices: &Value, usage: Value) -> Frame {
        let mut data = self.envelope.with("text_completion", choices);
        if self.include_usage {
            data["usage"] = usage;
        }
        Frame::chunk(data)
    }

    fn piece(&self, choice: usize, text: &str, logprobs: Value) -> Frame {
        let finish = self.choices[choice].finish.map(reason);
        self.chunk(
            &json!([{
                "index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish,
            }]),
            Value::Null,
        )
    }

    /// The prompt as text: as it was sent, or as its tokens read.
    fn prompt(&self, choice: usize, ids: &[TokenId]) -> Option<String> {
        let sent = self.echo.as_ref()?.get(choice)?;
        Some(sent.clone().unwrap_or_else(|| {
            let bytes: Vec<u8> = ids
                .iter()
                .flat_map(|&id| self.generator.bytes(id))
                .collect();
            String::from_utf8_lossy(&bytes).into_owned()
        }))
    }
}

impl Shape for CompletionReply {
    fn take(&mut self, choice: usize, step: Step) -> Vec<Frame> {
        self.usage.count(choice, &step);
        match step {
            Step::PromptScores(scores) => {
                self.choices[choice].prompt_scores = scores;
                Vec::new()
            }
            Step::Prompt(ids) => match self.prompt(choice, &ids) {
                Some(prompt) => {
                    let this = &mut self.choices[choice];
                    this.text.push_str(&prompt);
                    let mut logprobs = Value::Null;
                    if let Some(gatherer) = &this.gatherer {
                        let scores = std::mem::take(&mut this.prompt_scores);
                        let scores = Scores::of_prompt(gatherer, &ids, &scores);
                        logprobs = scores.json();
                        this.scored.append(scores);
                    }
                    vec![self.piece(choice, &prompt, logprobs)]
                }
                None => Vec::new(),
            },
            Step::Token(scored) => {
                let gatherer = &mut self.choices[choice].gatherer;
                if let (Some(gatherer), Some(scored)) = (gatherer, scored) {
                    gatherer.token(*scored);
                }
                Vec::new()
            }
            Step::Reply(ReplyEvent::Answer(text)) => {
                let this = &mut self.choices[choice];
                let from = this.text.chars().count();
                this.text.push_str(&text);
                let mut logprobs = Value::Null;
                if let Some(gatherer) = &mut this.gatherer {
                    let tokens = gatherer.answer();
                    let scores = Scores::of(gatherer, &tokens, from);
                    logprobs = scores.json();
                    this.scored.append(scores);
                }
                vec![self.piece(choice, &text, logprobs)]
            }
            // A prompt that is no chat is answered with nothing but text.
            Step::Reply(_) => Vec::new(),
            Step::Ended(outcome) => {
                self.choices[choice].finish = Some(outcome.finish);
                self.usage.add(choice, &outcome);
                vec![self.piece(choice, "", Value::Null)]
            }
        }
    }

    fn end(&mut self) -> Vec<Frame> {
        if self.include_usage {
            vec![self.chunk(&json!([]), self.usage.json())]
        } else {
            Vec::new()
        }
    }

    fn whole(&mut self) -> Value {
        let choices = self.choices.iter().enumerate();
        let choices: Vec<_> = choices
            .map(|(index, choice)| {
                json!({
                    "index": index, "text": choice.text,
                    "logprobs": choice.gatherer.is_some().then(|| choice.scored.json()),
                    "finish_reason": choice.finish.map(reason),
                })
            })
            .collect();
        let mut whole = self.envelope.with("text_completion", &choices.into());
        whole["usage"] = self.usage.json();
        whole
    }
}

/// Lists that run beside each other, as this endpoint has them; offsets count characters of the
/// choice's text.
#[derive(Debug, Default)]
struct Scores {
    tokens: Vec<String>,
    logprobs: Vec<Option<f64>>,
    top: Vec<Value>,
    offsets: Vec<usize>,
}

impl Scores {
    /// Of generated tokens, the first of which stands at `from`.
    fn of(gatherer: &Gatherer, tokens: &[Scored], from: usize) -> Scores {
        let mut scores = Scores::default();
        let mut offset = from;
        for scored in tokens {
            offset += scores.push(gatherer, scored.id, Some(scored), offset);
        }
        scores
    }

    /// Of a prompt, whose first token nothing comes before.
    fn of_prompt(gatherer: &Gatherer, ids: &[TokenId], scored: &[Scored]) -> Scores {
        let mut scores = Scores::default();
        let mut offset = 0;
        let known = std::iter::once(None).chain(scored.iter().map(Some));
        for (&id, scored) in ids.iter().zip(known) {
            offset += scores.push(gatherer, id, scored, offset);
        }
        scores
    }

    /// Adds a token; gives the length of its text in characters.
    fn push(
        &mut self,
        gatherer: &Gatherer,
        id: TokenId,
        scored: Option<&Scored>,
        offset: usize,
    ) -> usize {
        let (text, _) = gatherer.text(id);
        let length = text.chars().count();
        let top = scored.map(|scored| {
            let pairs = scored.top.iter();
            let pairs = pairs.map(|&(id, logprob)| (gatherer.text(id).0, logprob.into()));
            pairs.collect::<Map<_, _>>()
        });
        self.tokens.push(text);
        self.logprobs.push(scored.map(|scored| scored.logprob));
        self.top.push(top.into());
        self.offsets.push(offset);
        length
    }

    fn append(&mut self, other: Scores) {
        self.tokens.extend(other.tokens);
        self.logprobs.extend(other.logprobs);
        self.top.extend(other.top);
        self.offsets.extend(other.offsets);
    }

    fn json(&self) -> Value {
        json!({
            "tokens": self.tokens, "token_logprobs": self.logprobs,
            "top_logprobs": self.top, "text_offset": self.offsets,
        })
    }
}
