//! A demand written down as a grammar.

use std::fmt::Write as _;

use serde_json::Value;

use super::Calls;
use super::Demand;
use super::Marks;
use super::NoGrammar;
use super::arguments;
use crate::text::Conversation;
use crate::text::Effort;

/// Any text, in one piece up to the next special token.
pub(super) const TEXT: &str = "(TEXT)?";

/// Rules under construction.
pub(super) struct Rules {
    text: String,
    open: String,
    close: String,
    sep: String,
}

impl Rules {
    pub(super) fn rule(&mut self, name: &str, body: &str) {
        writeln!(self.text, "{name}: {body}").expect("a String takes all");
    }

    /// An element: `tag` with its attributes, and what stands inside.
    pub(super) fn element(&self, tag: &str, attributes: &str, inside: &str) -> String {
        let head = literal(&format!("{tag}{attributes}"));
        format!(
            "{} {head} {} {inside} {}",
            self.open,
            self.sep,
            self.closed(tag)
        )
    }

    fn closed(&self, tag: &str) -> String {
        format!("{} {} {}", self.close, literal(tag), self.sep)
    }
}

/// A text, to the letter.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// An attribute as K3 writes it.
pub(super) fn attribute(key: &str, value: &str) -> String {
    let value = value.replace('&', "&amp;").replace('"', "&quot;");
    format!(" {key}=\"{value}\"")
}

/// JSON of a schema. White space is fixed: a model that may write any amount of it may never end.
pub(super) fn json(schema: &Value) -> Result<String, NoGrammar> {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        _ => return Err(NoGrammar("a schema must be a JSON object".to_owned())),
    };
    schema["x-guidance"] = serde_json::json!({ "whitespace_flexible": false });
    Ok(format!("%json {schema}"))
}

/// The whole reply, from where the prompt leaves off to the end of the message.
pub(super) fn reply(
    marks: Marks,
    chat: &Conversation,
    demand: &Demand,
) -> Result<String, NoGrammar> {
    let token = |id: u32| format!("<[{id}]>");
    let mut rules = Rules {
        text: String::new(),
        open: token(marks.open),
        close: token(marks.close),
        sep: token(marks.sep),
    };
    let (response, tools) = (
        response(&mut rules, demand)?,
        tools(&mut rules, chat, demand)?,
    );
    let answered = |inside: &str, tools: &str| {
        let (closed, message) = (rules.closed("response"), rules.closed("message"));
        format!("{inside} {closed} {tools} {message}")
    };
    let body = match (demand.calls, &demand.schema) {
        (Calls::None, _) => answered(&response, ""),
        (Calls::AtMost(_), None) => answered(&response, "(tools)?"),
        // Either JSON or calls: an answer beside calls need not be the one that was asked for.
        (Calls::AtMost(_), Some(_)) => {
            format!("({} | {})", answered(&response, ""), answered("", "tools"))
        }
        // Nothing is said beside calls that are demanded: a model that rambles would never come
        // to them.
        (Calls::Some(_), _) => answered("", &tools),
    };
    let opened = format!("{} \"response\" {}", rules.open, rules.sep);
    if chat.effort == Effort::None {
        rules.rule("start", &body);
    } else {
        let thought = rules.closed("think");
        rules.rule("start", &format!("{TEXT} {thought} {opened} {body}"));
    }
    rules.text.push_str("TEXT: /(.|\\n)+/\n");
    Ok(rules.text)
}

fn response(rules: &mut Rules, demand: &Demand) -> Result<String, NoGrammar> {
    match &demand.schema {
        None => Ok(TEXT.to_owned()),
        Some(schema) => {
            rules.rule("answer", &json(schema)?);
            Ok("answer".to_owned())
        }
    }
}

/// Rules for the tools that may be called; gives the name of the element that holds the calls.
fn tools(rules: &mut Rules, chat: &Conversation, demand: &Demand) -> Result<String, NoGrammar> {
    let (Calls::AtMost(most) | Calls::Some(most)) = demand.calls else {
        return Ok(String::new());
    };
    let mut names = Vec::new();
    for tool in chat.tools.iter().filter_map(Value::as_array).flatten() {
        let function = &tool["function"];
        let name = function["name"].as_str().unwrap_or_default();
        if demand.tool.as_deref().is_none_or(|only| only == name) {
            let rule = format!("arguments_{}", names.len());
            let body = arguments::body(rules, &rule, &function["parameters"])?;
            rules.rule(&rule, &body);
            names.push(name);
        }
    }
    if names.is_empty() {
        let tool = demand.tool.as_deref().unwrap_or_default();
        return Err(NoGrammar(format!("there is no tool '{tool}'")));
    }
    // Calls are numbered, so each place in the row has a rule of its own.
    for n in (1..=most).rev() {
        let number = attribute("index", &n.to_string());
        let calls = names.iter().enumerate().map(|(tool, name)| {
            let attributes = format!("{}{number}", attribute("tool", name));
            rules.element("call", &attributes, &format!("arguments_{tool}"))
        });
        let one = calls.collect::<Vec<_>>().join(" | ");
        let more = if n < most {
            format!("(calls_{})?", n + 1)
        } else {
            String::new()
        };
        rules.rule(&format!("calls_{n}"), &format!("({one}) {more}"));
    }
    let element = rules.element("tools", "", "calls_1");
    rules.rule("tools", &element);
    Ok("tools".to_owned())
}
