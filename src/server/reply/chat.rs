//! A chat's reply.

use std::sync::Arc;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::Envelope;
use super::Frame;
use super::Shape;
use super::Usage;
use super::fresh_id;
use super::reason;
use crate::server::generator::Finish;
use crate::server::generator::Generator;
use crate::server::logprobs::Gatherer;
use crate::server::logprobs::Scored;
use crate::server::queue::Step;
use crate::text::Reply;
use crate::text::ReplyEvent;

/// `chat.completion` and `chat.completion.chunk`.
pub(in crate::server) struct ChatReply {
    envelope: Envelope,
    usage: Usage,
    /// A stream ends with usage, so every chunk before says that it has none.
    include_usage: bool,
    choices: Vec<Choice>,
}

struct Choice {
    reply: Reply,
    call_ids: Vec<String>,
    /// Where tokens are scored.
    gatherer: Option<Gatherer>,
    scored: Vec<Value>,
    finish: Option<Finish>,
}

impl ChatReply {
    pub(in crate::server) fn new(
        envelope: Envelope,
        usage: Usage,
        include_usage: bool,
        choices: usize,
        scored_by: Option<&Arc<dyn Generator>>,
    ) -> ChatReply {
        let choice = || Choice {
            reply: Reply::default(),
            call_ids: Vec::new(),
            gatherer: scored_by.map(|generator| Gatherer::new(Arc::clone(generator), true)),
            scored: Vec::new(),
            finish: None,
        };
        ChatReply {
            envelope,
            usage,
            include_usage,
            choices: std::iter::repeat_with(choice).take(choices).collect(),
        }
    }

    fn chunk(&self, choices: &Value, usage: Value) -> Frame {
        let mut data = self.envelope.with("chat.completion.chunk", choices);
        if self.include_usage {
            data["usage"] = usage;
        }
        Frame::chunk(data)
    }

    fn delta(&self, choice: usize, delta: &Value, scored: Option<Vec<Value>>) -> Frame {
        let finish = self.choices[choice].finish.map(reason);
        self.chunk(
            &json!([{
                "index": choice, "delta": delta, "logprobs": logprobs(scored),
                "finish_reason": finish,
            }]),
            Value::Null,
        )
    }
}

impl Choice {
    /// A step of the reply, as a delta; an end says nothing.
    fn delta(&mut self, event: &ReplyEvent) -> Option<(Value, Option<Vec<Value>>)> {
        self.reply.add(event);
        if let Some(gatherer) = &mut self.gatherer
            && !matches!(event, ReplyEvent::Answer(_))
        {
            gatherer.elsewhere();
        }
        match event {
            ReplyEvent::Reasoning(text) => Some((json!({ "reasoning_content": text }), None)),
            ReplyEvent::Answer(text) => {
                let scored = self.gatherer.as_mut().map(|gatherer| {
                    let tokens = gatherer.answer();
                    let json = |scored| token_json(gatherer, scored);
                    tokens.iter().map(json).collect::<Vec<_>>()
                });
                self.scored.extend(scored.iter().flatten().cloned());
                Some((json!({ "content": text }), scored))
            }
            ReplyEvent::ToolCallStart { index, name } => {
                let id = fresh_id("call_");
                self.call_ids.push(id.clone());
                let call = json!({
                    "index": index, "id": id, "type": "function",
                    "function": { "name": name, "arguments": "" },
                });
                Some((json!({ "tool_calls": [call] }), None))
            }
            ReplyEvent::ToolArguments { index, fragment } => {
                let call = json!({ "index": index, "function": { "arguments": fragment } });
                Some((json!({ "tool_calls": [call] }), None))
            }
            ReplyEvent::ToolCallEnd { .. } | ReplyEvent::End => None,
        }
    }

    fn message(&self) -> Value {
        let reply = &self.reply;
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        let nothing_said = reply.answer.is_empty() && !reply.tool_calls.is_empty();
        let content = (!nothing_said).then(|| reply.answer.clone());
        message.insert("content".to_owned(), content.into());
        message.insert("refusal".to_owned(), Value::Null);
        if !reply.reasoning.is_empty() {
            let reasoning = reply.reasoning.clone();
            message.insert("reasoning_content".to_owned(), reasoning.into());
        }
        if !reply.tool_calls.is_empty() {
            let calls = reply.tool_calls.iter().zip(&self.call_ids);
            let calls: Vec<_> = calls
                .map(|(call, id)| {
                    json!({
                        "id": id, "type": "function",
                        "function": { "name": call.name, "arguments": call.arguments },
                    })
                })
                .collect();
            message.insert("tool_calls".to_owned(), calls.into());
        }
        message.into()
    }
}

impl Shape for ChatReply {
    fn take(&mut self, choice: usize, step: Step) -> Vec<Frame> {
        self.usage.count(choice, &step);
        let this = &mut self.choices[choice];
        match step {
            Step::Prompt(_) => {
                vec![self.delta(choice, &json!({ "role": "assistant", "content": "" }), None)]
            }
            Step::Token(scored) => {
                if let (Some(gatherer), Some(scored)) = (&mut this.gatherer, scored) {
                    gatherer.token(*scored);
                }
                Vec::new()
            }
            // Asked for by completions alone.
            Step::PromptScores(_) => Vec::new(),
            Step::Reply(event) => {
                let delta = this.delta(&event);
                let frame = delta.map(|(delta, scored)| self.delta(choice, &delta, scored));
                frame.into_iter().collect()
            }
            Step::Ended(outcome) => {
                this.finish = Some(outcome.finish);
                self.usage.add(choice, &outcome);
                vec![self.delta(choice, &json!({}), None)]
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
                let scored = choice.gatherer.is_some().then(|| choice.scored.clone());
                json!({
                    "index": index, "message": choice.message(),
                    "logprobs": logprobs(scored), "finish_reason": choice.finish.map(reason),
                })
            })
            .collect();
        let mut whole = self.envelope.with("chat.completion", &choices.into());
        whole["usage"] = self.usage.json();
        whole
    }
}

fn logprobs(scored: Option<Vec<Value>>) -> Value {
    match scored {
        Some(tokens) => json!({ "content": tokens, "refusal": null }),
        None => Value::Null,
    }
}

fn token_json(gatherer: &Gatherer, scored: &Scored) -> Value {
    let entry = |id, logprob: f64| {
        let (token, bytes) = gatherer.text(id);
        json!({ "token": token, "logprob": logprob, "bytes": bytes })
    };
    let mut json = entry(scored.id, scored.logprob);
    let top = scored.top.iter().map(|&(id, logprob)| entry(id, logprob));
    json["top_logprobs"] = top.collect::<Vec<_>>().into();
    json
}
