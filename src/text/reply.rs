//! The model's tokens to reasoning, answer and tool calls, while they arrive.

use crate::terms::TokenId;

use super::json;
use super::message::ToolCall;
use super::tokenizer::Tokenizer;
use super::utf8::Utf8Stream;

/// A tag longer than this is none: its text is shown rather than swallowed for hours.
const TAG_BYTES_MAX: usize = 4096;

/// Where the prompt left off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Inside the model's thinking.
    Think,
    /// Inside its answer.
    Response,
    /// Anywhere: no chat. All text is answer, special tokens by their names.
    Raw,
}

/// A step of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyEvent {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of what it says.
    Answer(String),
    /// It calls a tool.
    ToolCallStart {
        /// Number of the call in this reply, from 0.
        index: usize,
        /// The tool.
        name: String,
    },
    /// More of a call's arguments. A call's fragments, joined, are JSON text, unless the model wrote
    /// its arguments as one text of its own and that is none.
    ToolArguments {
        /// Number of the call.
        index: usize,
        /// The fragment.
        fragment: String,
    },
    /// The call is complete. Never sent for a call that was cut off.
    ToolCallEnd {
        /// Number of the call.
        index: usize,
    },
    /// The model ended its reply. Never sent for a reply that was cut off.
    End,
}

/// An element that is open, innermost last.
enum Element {
    Think,
    Response,
    Tools,
    Call(Call),
    Argument(Argument),
    Json,
    Other(String),
}

struct Call {
    index: usize,
    arguments: usize,
    /// The arguments came as one text.
    whole: bool,
}

struct Argument {
    /// Streamed as it comes; other types are held until they are whole, to be checked.
    string: bool,
    held: String,
}

/// What a tag under construction will do.
struct Tag {
    closes: bool,
    bytes: Vec<u8>,
}

/// Splits a reply into its parts, token by token.
///
/// Only special tokens are structure: text that spells a tag is text. What the model gets wrong
/// (tags never closed, closed twice, unknown, in the wrong place) never shows as markup and never
/// loses the text inside an answer.
pub struct ReplyParser {
    tokenizer: Tokenizer,
    open: Option<TokenId>,
    close: Option<TokenId>,
    separator: Option<TokenId>,
    ends: Vec<TokenId>,
    raw: bool,
    stack: Vec<Element>,
    tag: Option<Tag>,
    utf8: Utf8Stream,
    calls: usize,
    /// Text outside all elements has begun, so its white space counts.
    astray: bool,
    /// The message is closed: what follows is not part of it.
    closed: bool,
    ended: bool,
    events: Vec<ReplyEvent>,
}

impl ReplyParser {
    /// A parser for a reply that begins at `opening`.
    pub fn new(tokenizer: &Tokenizer, opening: Opening) -> Self {
        let stack = match opening {
            Opening::Think => vec![Element::Think],
            Opening::Response | Opening::Raw => vec![Element::Response],
        };
        ReplyParser {
            open: tokenizer.special("<|open|>"),
            close: tokenizer.special("<|close|>"),
            separator: tokenizer.special("<|sep|>"),
            ends: tokenizer.ends().collect(),
            tokenizer: tokenizer.clone(),
            raw: opening == Opening::Raw,
            stack,
            tag: None,
            utf8: Utf8Stream::new(),
            calls: 0,
            astray: false,
            closed: false,
            ended: false,
            events: Vec::new(),
        }
    }

    /// Takes the next token; gives what is certain now. After the end of the reply, nothing.
    pub fn push(&mut self, id: TokenId) -> Vec<ReplyEvent> {
        if self.ended {
            return Vec::new();
        }
        let tokenizer = self.tokenizer.clone();
        if self.ends.contains(&id) {
            self.end();
        } else if !tokenizer.is_special(id) || self.raw {
            self.text(tokenizer.bytes(id));
        } else if Some(id) == self.open || Some(id) == self.close {
            self.flush();
            self.tag = Some(Tag {
                closes: Some(id) == self.close,
                bytes: Vec::new(),
            });
        } else if Some(id) == self.separator {
            self.separator();
        }
        std::mem::take(&mut self.events)
    }

    /// Ends the stream where the tokens end, as by a limit: gives what was held back. Calls and
    /// arguments that are open stay so.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        if !self.ended {
            self.flush();
            self.ended = true;
        }
        std::mem::take(&mut self.events)
    }

    /// The model said that it is done: whatever is open is closed.
    fn end(&mut self) {
        self.flush();
        self.close_down_to(0);
        self.ended = true;
        self.events.push(ReplyEvent::End);
    }

    fn text(&mut self, bytes: &[u8]) {
        match &mut self.tag {
            Some(tag) => {
                tag.bytes.extend_from_slice(bytes);
                if tag.bytes.len() > TAG_BYTES_MAX {
                    let bytes = std::mem::take(&mut tag.bytes);
                    self.tag = None;
                    self.text(&bytes);
                }
            }
            None => {
                let text = self.utf8.push(bytes);
                self.emit(text);
            }
        }
    }

    /// Ends a stretch of text: a character cut off by a special token will not become whole.
    fn flush(&mut self) {
        let rest = self.utf8.finish();
        self.emit(rest);
    }

    /// Text, to where it belongs.
    fn emit(&mut self, text: String) {
        if text.is_empty() || self.closed {
            return;
        }
        // An element that is none of ours is as if it were not there.
        let place = self
            .stack
            .iter_mut()
            .rev()
            .find(|element| !matches!(element, Element::Other(_)));
        match place {
            Some(Element::Think) => self.events.push(ReplyEvent::Reasoning(text)),
            Some(Element::Response) => self.events.push(ReplyEvent::Answer(text)),
            Some(Element::Argument(argument)) if argument.string => {
                let quoted = json::quoted(&text);
                self.fragment(quoted[1..quoted.len() - 1].to_owned());
            }
            Some(Element::Argument(argument)) => argument.held.push_str(&text),
            Some(Element::Json) => self.fragment(text),
            Some(Element::Tools | Element::Call(_) | Element::Other(_)) => {}
            None => {
                let text = if self.astray {
                    text.as_str()
                } else {
                    text.trim_start()
                };
                if !text.is_empty() {
                    self.astray = true;
                    self.events.push(ReplyEvent::Answer(text.to_owned()));
                }
            }
        }
    }

    fn separator(&mut self) {
        let Some(tag) = self.tag.take() else {
            return; // separates nothing
        };
        if self.closed {
            return;
        }
        self.astray = false;
        let text = String::from_utf8_lossy(&tag.bytes).into_owned();
        if tag.closes {
            self.close_tag(text.trim());
        } else {
            self.open_tag(&text);
        }
    }

    fn open_tag(&mut self, text: &str) {
        let (name, attributes) = match text.trim_start().split_once(' ') {
            Some((name, attributes)) => (name, attributes),
            None => (text.trim(), ""),
        };
        let call = self.call();
        match name {
            "think" => self.stack.push(Element::Think),
            "response" => {
                // Thinking that was never closed ends here; else what follows the answer would be
                // taken for thinking again.
                self.stack.retain(|e| !matches!(e, Element::Think));
                self.stack.push(Element::Response);
            }
            "tools" => self.stack.push(Element::Tools),
            "call" => match attribute(attributes, "tool") {
                Some(tool) => self.open_call(tool),
                None => self.stack.push(Element::Tools),
            },
            "argument" if call.is_some_and(|call| !call.whole) => {
                self.close_innermost(|e| matches!(e, Element::Argument(_)));
                self.open_argument(attributes);
            }
            "json" if call.is_some_and(|call| !call.whole && call.arguments == 0) => {
                if let Some(call) = self.call_mut() {
                    call.whole = true;
                }
                self.stack.push(Element::Json);
            }
            // Arguments with no call to take them must not turn into an answer.
            "argument" | "json" => self.stack.push(Element::Tools),
            other => self.stack.push(Element::Other(other.to_owned())),
        }
    }

    fn open_call(&mut self, name: String) {
        self.close_innermost(|e| matches!(e, Element::Call(_)));
        let index = self.calls;
        self.calls += 1;
        self.events.push(ReplyEvent::ToolCallStart { index, name });
        self.stack.push(Element::Call(Call {
            index,
            arguments: 0,
            whole: false,
        }));
    }

    fn open_argument(&mut self, attributes: &str) {
        let key = attribute(attributes, "key").unwrap_or_default();
        let kind = attribute(attributes, "type");
        let string = kind.is_none_or(|kind| kind == "string");
        let Some(call) = self.call_mut() else {
            return;
        };
        let comma = if call.arguments == 0 { "{" } else { "," };
        call.arguments += 1;
        let quote = if string { "\"" } else { "" };
        self.fragment(format!("{comma}{}:{quote}", json::quoted(&key)));
        self.stack.push(Element::Argument(Argument {
            string,
            held: String::new(),
        }));
    }

    fn close_tag(&mut self, name: &str) {
        let closes = |element: &Element| match element {
            Element::Think => name == "think",
            Element::Response => name == "response",
            Element::Tools => matches!(name, "tools" | "call" | "argument" | "json"),
            Element::Call(_) => name == "call",
            Element::Argument(_) => name == "argument",
            Element::Json => name == "json",
            Element::Other(other) => name == other,
        };
        if name == "message" && !self.stack.iter().any(closes) {
            self.close_down_to(0);
            self.closed = true;
        } else {
            self.close_innermost(closes);
        }
    }

    /// Closes the innermost element of a kind, with all that is open inside it.
    fn close_innermost(&mut self, kind: impl Fn(&Element) -> bool) {
        if let Some(at) = self.stack.iter().rposition(kind) {
            self.close_down_to(at);
        }
    }

    fn close_down_to(&mut self, depth: usize) {
        while self.stack.len() > depth {
            match self.stack.pop() {
                Some(Element::Argument(argument)) if argument.string => self.fragment("\"".into()),
                Some(Element::Argument(argument)) => {
                    // What is not the JSON it was announced to be is passed on as a string, so that
                    // the arguments as a whole stay JSON.
                    let value = argument.held.trim();
                    let value = match json::is_json(value) {
                        true => value.to_owned(),
                        false => json::quoted(&argument.held),
                    };
                    self.fragment(value);
                }
                Some(Element::Call(call)) => {
                    let index = call.index;
                    let rest = match (call.whole, call.arguments) {
                        (true, _) => "",
                        (false, 0) => "{}",
                        (false, _) => "}",
                    };
                    if !rest.is_empty() {
                        let fragment = rest.to_owned();
                        self.events
                            .push(ReplyEvent::ToolArguments { index, fragment });
                    }
                    self.events.push(ReplyEvent::ToolCallEnd { index });
                }
                _ => {}
            }
        }
    }

    fn call(&self) -> Option<&Call> {
        self.stack.iter().rev().find_map(|element| match element {
            Element::Call(call) => Some(call),
            _ => None,
        })
    }

    fn call_mut(&mut self) -> Option<&mut Call> {
        let mut innermost_first = self.stack.iter_mut().rev();
        innermost_first.find_map(|element| match element {
            Element::Call(call) => Some(call),
            _ => None,
        })
    }

    fn fragment(&mut self, fragment: String) {
        if let Some(index) = self.call().map(|call| call.index) {
            self.events
                .push(ReplyEvent::ToolArguments { index, fragment });
        }
    }
}

/// The value of an attribute in `key="value" key="value"`.
fn attribute(text: &str, name: &str) -> Option<String> {
    let mut rest = text;
    loop {
        let (key, after) = rest.split_once("=\"")?;
        let (value, after) = after.split_once('"')?;
        if key.trim() == name {
            return Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
        }
        rest = after;
    }
}

/// A reply, put together from its events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// What the model thought.
    pub reasoning: String,
    /// What it said.
    pub answer: String,
    /// The tools it called, without ids.
    pub tool_calls: Vec<ToolCall>,
    /// How many of the calls are complete: all, unless the reply was cut off.
    pub complete_calls: usize,
    /// Whether the model ended the reply itself.
    pub ended: bool,
}

impl Reply {
    /// Takes the next event.
    pub fn add(&mut self, event: &ReplyEvent) {
        match event {
            ReplyEvent::Reasoning(text) => self.reasoning.push_str(text),
            ReplyEvent::Answer(text) => self.answer.push_str(text),
            ReplyEvent::ToolCallStart { name, .. } => self.tool_calls.push(ToolCall {
                id: None,
                name: name.clone(),
                arguments: String::new(),
            }),
            ReplyEvent::ToolArguments { index, fragment } => {
                if let Some(call) = self.tool_calls.get_mut(*index) {
                    call.arguments.push_str(fragment);
                }
            }
            ReplyEvent::ToolCallEnd { .. } => self.complete_calls += 1,
            ReplyEvent::End => self.ended = true,
        }
    }
}
