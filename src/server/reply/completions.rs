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
    scored: Vec<Scored>,
    finish: Option<Finish>,
}

impl CompletionReply {
    pub(in crate::server) fn new(
        envelope: Envelope,
        usage: Usage,
        include_usage: bool,
        choices: usize,
        echo: Option<Vec<Option<String>>>,
        (scored, generator): (bool, &Arc<dyn Generator>),
    ) -> CompletionReply {
        let choice = || Choice {
            text: String::new(),
            gatherer: scored.then(|| Gatherer::new(Arc::clone(generator), false)),
            scored: Vec::new(),
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
        self.usage.count(&step);
        match step {
            Step::Prompt(ids) => match self.prompt(choice, &ids) {
                Some(prompt) => {
                    self.choices[choice].text.push_str(&prompt);
                    vec![self.piece(choice, &prompt, Value::Null)]
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
                    logprobs = logprobs_json(gatherer, &tokens, from);
                    this.scored.extend(tokens);
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
                let gatherer = choice.gatherer.as_ref();
                json!({
                    "index": index, "text": choice.text,
                    "logprobs": gatherer.map(|g| logprobs_json(g, &choice.scored, 0)),
                    "finish_reason": choice.finish.map(reason),
                })
            })
            .collect();
        let mut whole = self.envelope.with("text_completion", &choices.into());
        whole["usage"] = self.usage.json();
        whole
    }
}

/// Parallel lists, as this endpoint has them; offsets count characters of the choice's text.
fn logprobs_json(gatherer: &Gatherer, tokens: &[Scored], from: usize) -> Value {
    let mut offset = from;
    let mut offsets = Vec::new();
    let mut texts = Vec::new();
    for scored in tokens {
        let (text, _) = gatherer.text(scored.id);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
    }
    let top = |scored: &Scored| -> Value {
        let pairs = scored.top.iter();
        let pairs = pairs.map(|&(id, logprob)| (gatherer.text(id).0, logprob.into()));
        pairs.collect::<Map<_, _>>().into()
    };
    json!({
        "tokens": texts,
        "token_logprobs": tokens.iter().map(|s| s.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
