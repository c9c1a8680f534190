//! A conversation's messages, as OpenAI's JSON spells them and as the prompt needs them.

use serde::Deserialize;
use serde::Deserializer;
use serde::de::Error;
use serde_json::Map;
use serde_json::Value;

use super::error::TextError;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The operator; OpenAI's `developer` is the same.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
}

/// The original size of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
}

/// A part of a message's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Plain text, which can never become markup.
    Text(String),
    /// An image, with its size where something can show it to the model. Without, it cannot be
    /// rendered: the text engine has no eyes.
    Image(Option<ImageSize>),
}

/// A call of a tool by the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The caller's name for this call, which the result refers to.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// The arguments as JSON text; empty means none.
    pub arguments: String,
}

/// One message. Deserialises from OpenAI's JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: Vec<Part>,
    /// The speaker's own name; of a tool's result, the tool's.
    pub name: Option<String>,
    /// What the model thought before it spoke.
    pub reasoning: Option<String>,
    /// The tools the model called.
    pub tool_calls: Vec<ToolCall>,
    /// Of a tool's result: the call it answers.
    pub tool_call_id: Option<String>,
    /// Of a tool's result: the tool, before `name`.
    pub tool: Option<String>,
    /// Of a system message: tools that are available from here on.
    pub tools: Option<Value>,
}

impl Message {
    /// A message that is only text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Message {
            role,
            content: vec![Part::Text(text.into())],
            name: None,
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            tool: None,
            tools: None,
        }
    }

    /// Reads OpenAI's JSON of one message. Fields it does not know are passed over, as clients add
    /// their own; roles and parts it does not know are refused, as they would change the prompt.
    ///
    /// # Errors
    ///
    /// [`TextError::Invalid`], with the field's path within the message.
    pub fn from_json(json: &Value) -> Result<Self, TextError> {
        let fields = object(json, "message")?;
        let role = match field(fields, "role") {
            Some(Value::String(role)) => role.as_str(),
            _ => return Err(TextError::invalid("role", "must be a string")),
        };
        let role = match role {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            other => {
                return Err(TextError::invalid(
                    "role",
                    format!(
                        "unknown role `{other}`; known are system, developer, user, assistant and tool"
                    ),
                ));
            }
        };
        if field(fields, "function_call").is_some() {
            return Err(TextError::invalid(
                "function_call",
                "is the retired form; use `tool_calls`",
            ));
        }
        let reasoning = string(fields, "reasoning_content")?.filter(|text| !text.is_empty());
        let reasoning = match reasoning {
            Some(reasoning) => Some(reasoning),
            None => string(fields, "reasoning")?,
        };
        let tool_call_id = match string(fields, "tool_call_id")? {
            Some(id) => Some(id),
            None => string(fields, "id")?.filter(|_| role == Role::Tool),
        };
        Ok(Message {
            role,
            content: content(field(fields, "content"))?,
            name: string(fields, "name")?.filter(|name| !name.is_empty()),
            reasoning,
            tool_calls: tool_calls(field(fields, "tool_calls"))?,
            tool_call_id,
            tool: string(fields, "tool")?,
            tools: field(fields, "tools").cloned(),
        })
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = Value::deserialize(deserializer)?;
        Message::from_json(&json).map_err(D::Error::custom)
    }
}

/// Reads OpenAI's `messages`.
///
/// # Errors
///
/// [`TextError::Invalid`], with the path of the field at fault: `messages[2].role`.
pub fn messages_from_json(json: &Value) -> Result<Vec<Message>, TextError> {
    let Value::Array(messages) = json else {
        return Err(TextError::invalid("messages", "must be a list"));
    };
    messages
        .iter()
        .enumerate()
        .map(|(n, message)| {
            Message::from_json(message).map_err(|e| e.inside(&format!("messages[{n}]")))
        })
        .collect()
}

fn content(json: Option<&Value>) -> Result<Vec<Part>, TextError> {
    match json {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![Part::Text(text.clone())]),
        Some(Value::Array(parts)) => parts
            .iter()
            .enumerate()
            .map(|(n, json)| part(json).map_err(|e| e.inside(&format!("content[{n}]"))))
            .collect(),
        Some(_) => Err(TextError::invalid(
            "content",
            "must be a string, a list of parts, or null",
        )),
    }
}

fn part(json: &Value) -> Result<Part, TextError> {
    if let Value::String(text) = json {
        return Ok(Part::Text(text.clone()));
    }
    let fields = object(json, "part")?;
    let kind = string(fields, "type")?.unwrap_or_else(|| "text".to_owned());
    let text = |key: &str| match field(fields, key) {
        Some(Value::String(text)) => Ok(Part::Text(text.clone())),
        _ => Err(TextError::invalid(key, "must be a string")),
    };
    match kind.as_str() {
        "text" | "input_text" | "output_text" => text("text"),
        "refusal" => text("refusal"),
        "image" | "image_url" | "input_image" => Ok(Part::Image(None)),
        other => Err(TextError::invalid(
            "type",
            format!("unsupported content part `{other}`; only text is read"),
        )),
    }
}

fn tool_calls(json: Option<&Value>) -> Result<Vec<ToolCall>, TextError> {
    let Some(json) = json else {
        return Ok(Vec::new());
    };
    let Value::Array(calls) = json else {
        return Err(TextError::invalid("tool_calls", "must be a list"));
    };
    calls
        .iter()
        .enumerate()
        .map(|(n, call)| tool_call(call).map_err(|e| e.inside(&format!("tool_calls[{n}]"))))
        .collect()
}

fn tool_call(json: &Value) -> Result<ToolCall, TextError> {
    let fields = object(json, "call")?;
    match string(fields, "type")?.as_deref() {
        None | Some("function" | "") => {}
        Some(other) => {
            return Err(TextError::invalid(
                "type",
                format!("unsupported kind of call `{other}`; known is function"),
            ));
        }
    }
    let function = match field(fields, "function") {
        Some(function) => object(function, "function")?,
        None => fields,
    };
    let name = string(function, "name")?
        .filter(|name| !name.is_empty())
        .ok_or_else(|| TextError::invalid("function.name", "must be a string, not empty"))?;
    let arguments = match field(function, "arguments") {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Ok(ToolCall {
        id: string(fields, "id")?,
        name,
        arguments,
    })
}

fn object<'v>(json: &'v Value, what: &str) -> Result<&'v Map<String, Value>, TextError> {
    json.as_object()
        .ok_or_else(|| TextError::invalid(what, "must be an object"))
}

/// A field that is there and not null.
fn field<'v>(fields: &'v Map<String, Value>, key: &str) -> Option<&'v Value> {
    fields.get(key).filter(|value| !value.is_null())
}

fn string(fields: &Map<String, Value>, key: &str) -> Result<Option<String>, TextError> {
    match field(fields, key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(TextError::invalid(key, "must be a string")),
    }
}
