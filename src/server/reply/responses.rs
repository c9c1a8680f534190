//! A response, as `/v1/responses` has it: items with a life of their own, each event numbered.

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::Envelope;
use super::Frame;
use super::Shape;
use super::Usage;
use super::fresh_id;
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
    ) -> ResponseReply {
        ResponseReply {
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
            event: Some(name),
            data,
        }
    }

    fn response(&self, status: &str, error: &Value) -> Value {
        let cut_off = self.finish == Some(Finish::Length);
        let details = cut_off.then(|| json!({ "reason": "max_output_tokens" }));
        let output: Vec<_> = self
            .items
            .iter()
            .map(|item| item.json(if item.done { "completed" } else { "incomplete" }))
            .collect();
        let mut json = json!({
            "id": self.envelope.id, "object": "response", "created_at": self.envelope.created,
            "status": status, "error": error, "incomplete_details": details,
            "model": self.envelope.model, "output": output, "previous_response_id": null,
            "background": false, "store": false, "truncation": "disabled",
            "usage": self.finish.map(|_| self.usage.response_json()),
        });
        for (key, value) in &self.echo {
            json[key] = value.clone();
        }
        json
    }

    fn status(&self) -> &'static str {
        match self.finish {
            Some(Finish::Length) => "incomplete",
            _ => "completed",
        }
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
            id: fresh_id(prefix),
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
    fn take(&mut self, _: usize, step: Step) -> Vec<Frame> {
        self.usage.count(&step);
        match step {
            Step::Prompt(_) => ["response.created", "response.in_progress"]
                .into_iter()
                .map(|name| {
                    let response = self.response("in_progress", &Value::Null);
                    self.event(name, json!({ "response": response }))
                })
                .collect(),
            Step::Token(_) => Vec::new(),
            Step::Reply(ReplyEvent::Reasoning(text)) => self.text(Kind::Reasoning, &text),
            Step::Reply(ReplyEvent::Answer(text)) => self.text(Kind::Message, &text),
            Step::Reply(ReplyEvent::ToolCallStart { name, .. }) => {
                let call_id = fresh_id("call_");
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
        let status = self.status();
        let name = match status {
            "incomplete" => "response.incomplete",
            _ => "response.completed",
        };
        let response = self.response(status, &Value::Null);
        vec![self.event(name, json!({ "response": response }))]
    }

    fn fail(&mut self, error: Value) -> Vec<Frame> {
        let error = &error["error"];
        let short = json!({ "code": error["code"], "message": error["message"] });
        let response = self.response("failed", &short);
        vec![self.event("response.failed", json!({ "response": response }))]
    }

    fn whole(&mut self) -> Value {
        self.response(self.status(), &Value::Null)
    }

    /// This kind of stream ends with its last event.
    fn farewell(&self) -> Option<&'static str> {
        None
    }
}
