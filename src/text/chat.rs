//! A conversation as the pieces of a K3 prompt.
//!
//! K3 ships no template: a prompt is elements, opened and closed by special tokens, with the names
//! and values of attributes as plain pieces between them.

use std::str::FromStr;

use serde_json::Value;

use crate::terms::Malformed;

use super::error::TextError;
use super::json;
use super::json::Arguments;
use super::message::Message;
use super::message::Part;
use super::message::Role;
use super::message::ToolCall;
use super::split::is_python_space;
use super::tokenizer::Piece;

/// How much the model is told to think.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// Thinking off.
    None,
    /// The default here: at a minute a token, more means hours.
    #[default]
    Low,
    /// More.
    High,
    /// The vendor's default.
    Max,
}

impl Effort {
    /// The name the model knows it by; `none` is never told.
    pub fn as_str(self) -> &'static str {
        match self {
            Effort::None => "none",
            Effort::Low => "low",
            Effort::High => "high",
            Effort::Max => "max",
        }
    }

    /// Reads OpenAI's `reasoning_effort`, whose scale is finer: K3 has no `medium`, which becomes
    /// `high`.
    ///
    /// # Errors
    ///
    /// [`TextError::Invalid`] for a name that is not on the scale.
    pub fn from_api(name: &str) -> Result<Self, TextError> {
        match name {
            "none" | "minimal" => Ok(Effort::None),
            "low" => Ok(Effort::Low),
            "medium" | "high" => Ok(Effort::High),
            "xhigh" | "max" => Ok(Effort::Max),
            other => Err(TextError::invalid(
                "reasoning_effort",
                format!("`{other}` is not one of none, minimal, low, medium, high, xhigh, max"),
            )),
        }
    }
}

impl FromStr for Effort {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let all = [Effort::None, Effort::Low, Effort::High, Effort::Max];
        let known = all.into_iter().find(|effort| effort.as_str() == text);
        known.ok_or_else(|| Malformed {
            text: text.to_owned(),
            expected: "a reasoning effort: none, low, high or max",
        })
    }
}

/// Whether the model may, must or must not call tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it sees fit.
    #[default]
    Auto,
    /// It must not.
    None,
    /// It must call one or more.
    Required,
    /// It must call this one. The prompt has no words for that beyond `required`.
    Named(String),
}

impl ToolChoice {
    /// Reads OpenAI's `tool_choice`.
    ///
    /// # Errors
    ///
    /// [`TextError::Invalid`] for a form that is not known.
    pub fn from_json(json: &Value) -> Result<Self, TextError> {
        let name = |json: &Value| {
            let function = json.get("function").unwrap_or(json);
            let name = function.get("name")?.as_str()?;
            Some(ToolChoice::Named(name.to_owned()))
        };
        let choice = match json.as_str() {
            Some("auto") => Some(ToolChoice::Auto),
            Some("none") => Some(ToolChoice::None),
            Some("required") => Some(ToolChoice::Required),
            Some(_) => None,
            None if json.is_null() => Some(ToolChoice::Auto),
            None if json["type"] == "function" => name(json),
            None => None,
        };
        choice.ok_or_else(|| {
            TextError::invalid(
                "tool_choice",
                "must be auto, none, required, or an object of type function with a name",
            )
        })
    }
}

/// The form the answer must have.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that fits this schema.
    JsonSchema(Value),
}

impl ResponseFormat {
    /// Reads OpenAI's `response_format`.
    ///
    /// # Errors
    ///
    /// [`TextError::Invalid`] for a form that is not known.
    pub fn from_json(json: &Value) -> Result<Self, TextError> {
        let kind = json.get("type").unwrap_or(json);
        match kind.as_str() {
            Some("text") => Ok(ResponseFormat::Text),
            None if json.is_null() => Ok(ResponseFormat::Text),
            Some("json_object") => Ok(ResponseFormat::JsonObject),
            Some("json_schema") => {
                let outer = json.get("json_schema").filter(|schema| schema.is_object());
                let outer = outer.ok_or_else(|| {
                    TextError::invalid("response_format.json_schema", "must be an object")
                })?;
                let inner = outer.get("schema").or_else(|| outer.get("json_schema"));
                Ok(ResponseFormat::JsonSchema(inner.unwrap_or(outer).clone()))
            }
            _ => Err(TextError::invalid(
                "response_format.type",
                "must be text, json_object or json_schema",
            )),
        }
    }
}

/// What the model is asked to go on with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// The tools' declarations, as OpenAI's `tools` has them.
    pub tools: Option<Value>,
    /// How much to think.
    pub effort: Effort,
    /// Whether to call tools.
    pub tool_choice: ToolChoice,
    /// The answer's form.
    pub response_format: ResponseFormat,
}

/// The prompt of a conversation, piece by piece, left open where the model's reply begins: inside
/// its thinking, or inside its answer where thinking is off.
///
/// # Errors
///
/// [`TextError::Invalid`] for what cannot be shown to the model: an image, a tool's arguments that
/// are JSON but no object, a tool's result that belongs to no call.
pub fn render(conversation: &Conversation) -> Result<Vec<Piece>, TextError> {
    let mut prompt = Prompt::default();
    if let Some(tools) = given(conversation.tools.as_ref()) {
        prompt.tools(TOOLS, tools);
    }
    let thinking = conversation.effort != Effort::None;
    if thinking {
        let effort = conversation.effort.as_str();
        prompt.note(
            "thinking-effort",
            format!("{EFFORT}`thinking_effort={effort}`."),
        );
    }
    prompt.messages(&conversation.messages, thinking)?;
    match conversation.tool_choice {
        ToolChoice::Auto => {}
        ToolChoice::Required | ToolChoice::Named(_) => prompt.tool_choice("required", "MUST"),
        ToolChoice::None => prompt.tool_choice("none", "MUST NOT"),
    }
    match &conversation.response_format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => prompt.response_format("json_object", None),
        ResponseFormat::JsonSchema(schema) => prompt.response_format("json_schema", Some(schema)),
    }
    prompt.open("message", &[("role", "assistant")]);
    prompt.open(if thinking { "think" } else { "response" }, &[]);
    Ok(prompt.pieces)
}

const TOOLS: &str = "# Tools\nHere are the available tools, described in JSONSchema.";

const LATE_TOOLS: &str = "## New Tools Available\n\
    The system dynamically extends the toolset via lazy-loading.\n\
    You have access to all existing and extended tools.\n\
    Here are the specs for the extended tools.";

const EFFORT: &str = "`thinking_effort` guides on how much to think in your thinking channel \
    (not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n\
    Now the system is invoked with ";

#[derive(Default)]
struct Prompt {
    pieces: Vec<Piece>,
}

impl Prompt {
    fn markup(&mut self, text: impl Into<String>) {
        let (text, markup) = (text.into(), true);
        self.pieces.push(Piece { text, markup });
    }

    fn plain(&mut self, text: impl Into<String>) {
        let (text, markup) = (text.into(), false);
        if !text.is_empty() {
            self.pieces.push(Piece { text, markup });
        }
    }

    fn open(&mut self, tag: &str, attributes: &[(&str, &str)]) {
        self.markup("<|open|>");
        self.plain(tag);
        for (key, value) in attributes {
            self.plain(format!(" {key}"));
            self.plain("=\"");
            self.plain(value.replace('&', "&amp;").replace('"', "&quot;"));
            self.plain("\"");
        }
        self.markup("<|sep|>");
    }

    fn close(&mut self, tag: &str) {
        self.markup("<|close|>");
        self.plain(tag);
        self.markup("<|sep|>");
    }

    fn end(&mut self) {
        self.close("message");
        self.markup("<|end_of_msg|>");
    }

    /// A system message that the engine writes.
    fn note(&mut self, kind: &str, text: String) {
        self.open("message", &[("role", "system"), ("type", kind)]);
        self.plain(text);
        self.end();
    }

    fn tools(&mut self, heading: &str, tools: &Value) {
        let tools = json::tight_sorted(tools);
        self.note(
            "tool-declare",
            format!("{heading}\n\n```json\n{tools}\n```"),
        );
    }

    fn tool_choice(&mut self, choice: &str, must: &str) {
        let what = if choice == "none" {
            "any tools"
        } else {
            "tools"
        };
        self.note(
            "tool-choice",
            format!(
                "The system is invoked with `tool_choice={choice}`.\n\
                 You {must} call {what} in the next message."
            ),
        );
    }

    fn response_format(&mut self, kind: &str, schema: Option<&Value>) {
        let mut text = format!(
            "The system is invoked with `response_format={kind}`.\n\
             Your response must be raw JSON data without markdown code blocks (```json) \
             or any additional formatting."
        );
        if let Some(schema) = schema {
            let schema = json::tight_sorted(schema);
            text += &format!(
                "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
            );
        }
        self.note("response-format", text);
    }

    fn messages(&mut self, messages: &[Message], thinking: bool) -> Result<(), TextError> {
        let mut calls: &[ToolCall] = &[];
        let mut results = 0;
        for (n, message, called) in in_call_order(messages) {
            let at = |e: TextError| e.inside(&format!("messages[{n}]"));
            match message.role {
                Role::System if given(message.tools.as_ref()).is_some() => {
                    let tools = given(message.tools.as_ref()).unwrap_or(&Value::Null);
                    self.tools(LATE_TOOLS, tools);
                }
                Role::System => self.message("system", message).map_err(at)?,
                Role::User => self.message("user", message).map_err(at)?,
                Role::Assistant => {
                    (calls, results) = (&message.tool_calls, 0);
                    self.assistant(message, thinking).map_err(at)?;
                }
                Role::Tool => {
                    results += 1;
                    let own = message.tool.as_deref().or(message.name.as_deref());
                    let by_place = || calls.get(results - 1).map(|call| call.name.as_str());
                    let name = called.or(own).or_else(by_place).ok_or_else(|| {
                        at(TextError::invalid(
                            "tool_call_id",
                            "answers no call of the assistant's last message, and the tool is not named",
                        ))
                    })?;
                    let index = results.to_string();
                    self.open(
                        "message",
                        &[("role", "tool"), ("tool", name), ("index", &index)],
                    );
                    self.content(message).map_err(at)?;
                    self.end();
                }
            }
        }
        Ok(())
    }

    fn open_message(&mut self, role: &str, message: &Message) {
        match &message.name {
            Some(name) => self.open("message", &[("role", role), ("name", name)]),
            None => self.open("message", &[("role", role)]),
        }
    }

    fn message(&mut self, role: &str, message: &Message) -> Result<(), TextError> {
        self.open_message(role, message);
        self.content(message)?;
        self.end();
        Ok(())
    }

    fn content(&mut self, message: &Message) -> Result<(), TextError> {
        for (n, part) in message.content.iter().enumerate() {
            match part {
                Part::Text(text) => self.plain(text.as_str()),
                Part::Image(Some(size)) => self.markup(format!(
                    "<|media_begin|>image {}x{}<|media_content|><|media_pad|><|media_end|>",
                    size.width, size.height
                )),
                Part::Image(None) => {
                    return Err(TextError::invalid(
                        format!("content[{n}]"),
                        "images cannot be read: only the text model runs here; leave the image out",
                    ));
                }
            }
        }
        Ok(())
    }

    fn assistant(&mut self, message: &Message, thinking: bool) -> Result<(), TextError> {
        self.open_message("assistant", message);
        if thinking {
            self.open("think", &[]);
            let reasoning = message.reasoning.as_deref().unwrap_or_default();
            if !reasoning.chars().all(is_python_space) {
                self.plain(reasoning);
            }
            self.close("think");
        }
        self.open("response", &[]);
        self.content(message)?;
        self.close("response");
        if !message.tool_calls.is_empty() {
            self.open("tools", &[]);
            for (n, call) in message.tool_calls.iter().enumerate() {
                self.call(n, call)?;
            }
            self.close("tools");
        }
        self.end();
        Ok(())
    }

    fn call(&mut self, n: usize, call: &ToolCall) -> Result<(), TextError> {
        let index = (n + 1).to_string();
        self.open("call", &[("tool", &call.name), ("index", &index)]);
        let arguments = match call.arguments.as_str() {
            blank if blank.chars().all(is_python_space) => Arguments::Members(Vec::new()),
            text => json::arguments(text),
        };
        match arguments {
            Arguments::Members(members) => {
                for (key, kind, value) in members {
                    self.open("argument", &[("key", &key), ("type", kind)]);
                    self.plain(value);
                    self.close("argument");
                }
            }
            Arguments::NotJson => {
                self.open("json", &[("type", "object")]);
                self.plain(call.arguments.as_str());
                self.close("json");
            }
            Arguments::NotAnObject => {
                return Err(TextError::invalid(
                    format!("tool_calls[{n}].function.arguments"),
                    "must be a JSON object",
                ));
            }
        }
        self.close("call");
        Ok(())
    }
}

/// The tools, unless they are none: null, or an empty list.
fn given(tools: Option<&Value>) -> Option<&Value> {
    tools.filter(|tools| match tools {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    })
}

/// The messages with their places in the conversation. A run of tool results that all answer calls of
/// the last assistant message comes in the order of those calls, each with the name of its tool.
fn in_call_order(messages: &[Message]) -> Vec<(usize, &Message, Option<&str>)> {
    let mut ordered = Vec::with_capacity(messages.len());
    let mut calls: &[ToolCall] = &[];
    let mut at = 0;
    while let Some(message) = messages.get(at) {
        if message.role != Role::Tool {
            if message.role == Role::Assistant {
                calls = &message.tool_calls;
            }
            ordered.push((at, message, None));
            at += 1;
            continue;
        }
        let run = messages[at..].iter().take_while(|m| m.role == Role::Tool);
        let run: Vec<(usize, &Message)> = (at..).zip(run).collect();
        at += run.len();
        let call_of = |message: &Message| {
            let id = message.tool_call_id.as_deref()?;
            calls.iter().position(|call| call.id.as_deref() == Some(id))
        };
        let answered: Option<Vec<usize>> = run.iter().map(|(_, m)| call_of(m)).collect();
        match answered {
            Some(answered) => {
                let mut known: Vec<_> = answered.into_iter().zip(run).collect();
                known.sort_by_key(|(call, _)| *call); // stable: two results of one call keep their order
                ordered.extend(
                    known
                        .into_iter()
                        .map(|(call, (n, m))| (n, m, Some(calls[call].name.as_str()))),
                );
            }
            None => ordered.extend(run.into_iter().map(|(n, m)| (n, m, None))),
        }
    }
    ordered
}
