//! A response, as `/v1/responses` has it: items with a life of their own, each event numbered.

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::Envelope;
use super::Frame;
use super::Shape;
use super::Usage;
use crate::server::generator::Finish;
use crate::server::queue::Step;
use crate::text::ReplyEvent;

/// `response` and its events.
pub(in crate::server) struct ResponseReply {
    envelope: Envelope,
    usage: Usage,
    echo: Map<String, Value>,
    number: u64,
    /// Items in their order; the last may be growing.
    items: Vec<Item>,
    finish: Option<Finish>,
    status: Status,
    options: Options,
}

/// What a response states of how it is kept.
#[derive(Clone, Debug, Default)]
pub(in crate::server) struct Options {
    pub(in crate::server) background: bool,
    pub(in crate::server) store: bool,
    /// The response it goes on from.
    pub(in crate::server) previous: Option<String>,
}

/// Where a response is in its life.
#[derive(Clone, Debug, PartialEq)]
enum Status {
    Queued,
    InProgress,
    /// Ended by itself, whole or cut off.
    Ended,
    Failed(Value),
    Cancelled,
}

struct Item {
    id: String,
    kind: Kind,
    text: String,
    done: bool,
}

enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, name: String },
}

impl Item {
    fn json(&self, status: &str) -> Value {
        match &self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "status": status, "summary": [],
                "content": [{ "type": "reasoning_text", "text": self.text }],
            }),
            Kind::Message => json!({
                "id": self.id, "type": "message", "status": status, "role": "assistant",
                "content": [self.part()],
            }),
            Kind::Call { call_id, name } => json!({
                "id": self.id, "type": "function_call", "status": status, "call_id": call_id,
                "name": name, "arguments": self.text,
            }),
        }
    }

    /// The item as it is announced: empty.
    fn announced(&self) -> Value {
        let mut json = self.json("in_progress");
        match self.kind {
            Kind::Call { .. } => json["arguments"] = "".into(),
            _ => json["content"] = json!([]),
        }
        json
    }

    fn part(&self) -> Value {
        json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": [] })
    }
}

impl ResponseReply {
    pub(in crate::server) fn new(
        envelope: Envelope,
        usage: Usage,
        echo: Map<String, Value>,
        options: Options,
    ) -> ResponseReply {
        ResponseReply {
            status: Status::Queued,
            options,
            envelope,
            usage,
            echo,
            number: 0,
            items: Vec::new(),
            finish: None,
        }
    }

    fn event(&mut self, name: &'static str, mut data: Value) -> Frame {
        data["type"] = name.into();
        data["sequence_number"] = self.number.into();
        self.number += 1;
        Frame {
            event: Some(name.into()),
            data,
        }
    }

    /// The response as it stands.
    pub(in crate::server) fn response(&self) -> Value {
        let cut_off = self.finish == Some(Finish::Length);
        let details = cut_off.then(|| json!({ "reason": "max_output_tokens" }));
        let growing = if self.over() {
            "incomplete"
        } else {
            "in_progress"
        };
        let output: Vec<_> = self
            .items
            .iter()
            .map(|item| item.json(if item.done { "completed" } else { growing }))
            .collect();
        let error = match &self.status {
            Status::Failed(error) => error.clone(),
            _ => Value::Null,
        };
        let mut json = json!({
            "id": self.envelope.id, "object": "response", "created_at": self.envelope.created,
            "status": self.status_name(), "error": error, "incomplete_details": details,
            "model": self.envelope.model, "output": output,
            "previous_response_id": self.options.previous, "background": self.options.background,
            "store": self.options.store, "truncation": "disabled",
            "usage": self.finish.map(|_| self.usage.response_json()),
        });
        for (key, value) in &self.echo {
            json[key] = value.clone();
        }
        json
    }

    fn status_name(&self) -> &'static str {
        match (&self.status, self.finish) {
            (Status::Queued, _) => "queued",
            (Status::InProgress, _) => "in_progress",
            (Status::Ended, Some(Finish::Length)) => "incomplete",
            (Status::Ended, _) => "completed",
            (Status::Failed(_), _) => "failed",
            (Status::Cancelled, _) => "cancelled",
        }
    }

    /// Whether nothing more will change.
    pub(in crate::server) fn over(&self) -> bool {
        !matches!(self.status, Status::Queued | Status::InProgress)
    }

    /// Ends it where it is; what has ended stays as it is.
    pub(in crate::server) fn cancel(&mut self) {
        if !self.over() {
            self.status = Status::Cancelled;
        }
    }

    /// What it adds to a conversation, as a message of a chat.
    pub(in crate::server) fn message(&self) -> Value {
        let mut message = json!({ "role": "assistant", "content": null });
        let mut calls = Vec::new();
        for item in &self.items {
            match &item.kind {
                Kind::Reasoning => message["reasoning_content"] = item.text.clone().into(),
                Kind::Message => message["content"] = item.text.clone().into(),
                Kind::Call { call_id, name } => calls.push(json!({
                    "id": call_id, "type": "function",
                    "function": { "name": name, "arguments": item.text },
                })),
            }
        }
        if calls.is_empty() {
            // A message without words is still one.
            if message["content"].is_null() {
                message["content"] = "".into();
            }
        } else {
            message["tool_calls"] = calls.into();
        }
        message
    }

    /// A name that the same response gives the same part whenever it is made.
    fn name(&self, prefix: &str) -> String {
        let whole = self.envelope.id.trim_start_matches("resp_");
        format!("{prefix}{whole}{:02x}", self.items.len())
    }

    /// Begins an item; what was growing is done.
    fn begin(&mut self, kind: Kind) -> Vec<Frame> {
        let mut frames = self.finish_item();
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call { .. } => "fc_",
        };
        let item = Item {
            id: self.name(prefix),
            kind,
            text: String::new(),
            done: false,
        };
        let index = self.items.len();
        let added = json!({ "output_index": index, "item": item.announced() });
        frames.push(self.event("response.output_item.added", added));
        if let Kind::Message = item.kind {
            let part = json!({
                "item_id": item.id, "output_index": index, "content_index": 0, "part": item.part(),
            });
            frames.push(self.event("response.content_part.added", part));
        }
        self.items.push(item);
        frames
    }

    /// More of the item that grows.
    fn grow(&mut self, text: &str) -> Option<Frame> {
        let index = self.items.len().checked_sub(1)?;
        let item = &mut self.items[index];
        item.text.push_str(text);
        let mut delta = json!({ "item_id": item.id, "output_index": index, "delta": text });
        let name = match item.kind {
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        if !matches!(item.kind, Kind::Call { .. }) {
            delta["content_index"] = 0.into();
        }
        if let Kind::Message = item.kind {
            delta["logprobs"] = json!([]);
        }
        Some(self.event(name, delta))
    }

    fn finish_item(&mut self) -> Vec<Frame> {
        let index = self.items.len().wrapping_sub(1);
        let Some(item) = self.items.last_mut().filter(|item| !item.done) else {
            return Vec::new();
        };
        item.done = true;
        let (id, text, part) = (item.id.clone(), item.text.clone(), item.part());
        let whole = item.json("completed");
        let at = json!({ "item_id": id, "output_index": index });
        let with = |extra: Value| {
            let mut data = at.clone();
            for (key, value) in extra.as_object().into_iter().flatten() {
                data[key] = value.clone();
            }
            data
        };
        let closing = match &item.kind {
            Kind::Reasoning => vec![(
                "response.reasoning_text.done",
                with(json!({ "content_index": 0, "text": text })),
            )],
            Kind::Message => vec![
                (
                    "response.output_text.done",
                    with(json!({ "content_index": 0, "text": text, "logprobs": [] })),
                ),
                (
                    "response.content_part.done",
                    with(json!({ "content_index": 0, "part": part })),
                ),
            ],
            Kind::Call { name, .. } => vec![(
                "response.function_call_arguments.done",
                with(json!({ "arguments": text, "name": name })),
            )],
        };
        let mut frames: Vec<_> = closing
            .into_iter()
            .map(|(name, data)| self.event(name, data))
            .collect();
        let done = json!({ "output_index": index, "item": whole });
        frames.push(self.event("response.output_item.done", done));
        frames
    }

    /// Text goes to the item of its kind, which begins where another was growing.
    fn text(&mut self, kind: Kind, text: &str) -> Vec<Frame> {
        let same = self.items.last().is_some_and(|item| {
            !item.done && std::mem::discriminant(&item.kind) == std::mem::discriminant(&kind)
        });
        let mut frames = if same { Vec::new() } else { self.begin(kind) };
        frames.extend(self.grow(text));
        frames
    }
}

impl Shape for ResponseReply {
    fn take(&mut self, choice: usize, step: Step) -> Vec<Frame> {
        self.usage.count(choice, &step);
        match step {
            Step::Prompt(_) => {
                self.status = Status::InProgress;
                ["response.created", "response.in_progress"]
                    .into_iter()
                    .map(|name| {
                        let response = self.response();
                        self.event(name, json!({ "response": response }))
                    })
                    .collect()
            }
            Step::Token(_) | Step::PromptScores(_) => Vec::new(),
            Step::Reply(ReplyEvent::Reasoning(text)) => self.text(Kind::Reasoning, &text),
            Step::Reply(ReplyEvent::Answer(text)) => self.text(Kind::Message, &text),
            Step::Reply(ReplyEvent::ToolCallStart { name, .. }) => {
                let call_id = self.name("call_");
                self.begin(Kind::Call { call_id, name })
            }
            Step::Reply(ReplyEvent::ToolArguments { fragment, .. }) => {
                self.grow(&fragment).into_iter().collect()
            }
            Step::Reply(ReplyEvent::ToolCallEnd { .. }) => self.finish_item(),
            Step::Reply(ReplyEvent::End) => Vec::new(),
            Step::Ended(outcome) => {
                self.finish = Some(outcome.finish);
                self.usage.add(0, &outcome);
                // What was cut off stays marked so; everything else is done.
                if outcome.finish == Finish::Length {
                    Vec::new()
                } else {
                    self.finish_item()
                }
            }
        }
    }

    fn end(&mut self) -> Vec<Frame> {
        self.status = Status::Ended;
        let name = match self.status_name() {
            "incomplete" => "response.incomplete",
            _ => "response.completed",
        };
        let response = self.response();
        vec![self.event(name, json!({ "response": response }))]
    }

    fn fail(&mut self, error: Value) -> Vec<Frame> {
        let error = &error["error"];
        // OpenAI's list of codes is closed; what kept this one is in the message.
        self.status = Status::Failed(json!({
            "code": "server_error", "message": error["message"],
        }));
        let response = self.response();
        vec![self.event("response.failed", json!({ "response": response }))]
    }

    fn whole(&mut self) -> Value {
        self.status = Status::Ended;
        self.response()
    }

    /// This kind of stream ends with its last event.
    fn farewell(&self) -> Option<&'static str> {
        None
    }
}
