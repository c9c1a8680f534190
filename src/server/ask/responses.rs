//! `/v1/responses`, read into the same generations as a chat.

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::Model;
use super::PASSED_OVER;
use super::Read;
use super::chat;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::Prompt;
use crate::server::grammar::Demand;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::Message;
use crate::text::ResponseFormat;
use crate::text::ToolChoice;

/// What shapes a response.
#[derive(Debug)]
pub(in crate::server) struct Wanted {
    pub(in crate::server) effort: Effort,
    pub(in crate::server) demand: Option<Demand>,
    /// Parameters that the response states again.
    pub(in crate::server) echo: Map<String, Value>,
}

/// Reads a request.
///
/// # Errors
///
/// 400, naming the parameter that is wrong, unknown or cannot be honoured.
pub(in crate::server) fn read(mut params: Params, model: &Model) -> Result<Read<Wanted>, ApiError> {
    super::model(&mut params, model)?;
    let echo = echo(&params);
    let mut messages = Vec::new();
    if let Some(text) = params.string("instructions")? {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match params.take("input").ok_or_else(|| chat::missing("input"))? {
        Value::String(text) => messages.push(json!({ "role": "user", "content": text })),
        Value::Array(items) => {
            for (n, item) in items.into_iter().enumerate() {
                push(&mut messages, item, n)?;
            }
        }
        _ => return Err(wrong_value("input", "must be a string or a list")),
    }
    let messages = messages
        .iter()
        .map(|message| Message::from_json(message).map_err(ApiError::from))
        .collect::<Result<Vec<_>, _>>()?;
    let effort = effort(&mut params)?;
    let tools = tools(&mut params)?;
    let tool_choice = match params.take("tool_choice") {
        None => ToolChoice::Auto,
        Some(choice) => ToolChoice::from_json(&choice)?,
    };
    let tool_choice = chat::possible(tool_choice, tools.as_ref())?;
    let response_format = format(&mut params)?;
    let parallel = params.boolean("parallel_tool_calls")?.unwrap_or(true);
    let demand = chat::demand(tools.as_ref(), &tool_choice, parallel, &response_format);
    let stream = params.boolean("stream")?.unwrap_or(false);
    let conversation = Conversation {
        messages,
        tools,
        effort,
        tool_choice,
        response_format,
    };
    let ask = Ask {
        prompt: Prompt::Chat(Box::new(conversation)),
        max_tokens: super::tokens_limit(&mut params, "max_output_tokens")?,
        sampling: super::sampling(&mut params, model)?,
        stop: super::stop(&mut params)?,
        constraint: None,
    };
    refuse_the_rest(params)?;
    Ok(Read {
        asks: vec![ask],
        n: 1,
        scores: None,
        delivery: super::Delivery {
            stream,
            include_usage: true,
        },
        kind: Wanted {
            effort,
            demand,
            echo,
        },
    })
}

/// What OpenAI's object of a response states of its request, with the defaults where nothing was
/// said.
fn echo(params: &Params) -> Map<String, Value> {
    let said = |name: &str, default: Value| {
        let value = params.peek(name).cloned().unwrap_or(default);
        (name.to_owned(), value)
    };
    [
        said("instructions", Value::Null),
        said("metadata", json!({})),
        said("parallel_tool_calls", json!(true)),
        said("temperature", json!(1.0)),
        said("top_p", json!(1.0)),
        said("tool_choice", json!("auto")),
        said("tools", json!([])),
        said("max_output_tokens", Value::Null),
        said("text", json!({ "format": { "type": "text" } })),
    ]
    .into_iter()
    .collect()
}

/// One item of the input as messages of a chat: calls join the assistant's message before them.
fn push(messages: &mut Vec<Value>, item: Value, n: usize) -> Result<(), ApiError> {
    let text = |key: &str| item[key].as_str().unwrap_or_default().to_owned();
    match item["type"].as_str() {
        None | Some("message") => messages.push(item),
        Some("function_call") => {
            let call = json!({
                "id": text("call_id"), "type": "function",
                "function": { "name": text("name"), "arguments": text("arguments") },
            });
            let open = messages.last_mut().filter(|m| m["role"] == "assistant");
            match open {
                Some(message) => match message["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => message["tool_calls"] = json!([call]),
                },
                None => messages
                    .push(json!({ "role": "assistant", "content": null, "tool_calls": [call] })),
            }
        }
        Some("function_call_output") => {
            let output = item["output"].clone();
            let id = text("call_id");
            messages.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
        }
        // The model's own earlier thoughts come back as it gave them: in the item after them.
        Some("reasoning") => {}
        Some(other) => {
            let what = format!("items of type '{other}' are not honoured");
            return Err(wrong_value(&format!("input[{n}]"), &what));
        }
    }
    Ok(())
}

fn effort(params: &mut Params) -> Result<Effort, ApiError> {
    let Some(reasoning) = params.take("reasoning") else {
        return Ok(Effort::default());
    };
    match &reasoning["effort"] {
        Value::Null => Ok(Effort::default()),
        Value::String(name) => Ok(Effort::from_api(name)?),
        _ => Err(wrong_value("reasoning.effort", "must be a string")),
    }
}

/// Tools lie flat here; the prompt has them as a chat does.
fn tools(params: &mut Params) -> Result<Option<Value>, ApiError> {
    let tools = match params.take("tools") {
        None => return Ok(None),
        Some(Value::Array(tools)) if tools.is_empty() => return Ok(None),
        Some(Value::Array(tools)) => tools,
        Some(_) => return Err(wrong_value("tools", "must be a list")),
    };
    let nested = tools.into_iter().enumerate().map(|(n, tool)| {
        let name = tool["name"].as_str().unwrap_or_default();
        if tool["type"] != "function" || name.is_empty() {
            return Err(wrong_value(
                &format!("tools[{n}]"),
                "must be of type 'function' and have a name: nothing is fetched or run here",
            ));
        }
        let Value::Object(mut function) = tool else {
            return Err(wrong_value(&format!("tools[{n}]"), "must be an object"));
        };
        function.shift_remove("type");
        Ok(json!({ "type": "function", "function": function }))
    });
    Ok(Some(Value::Array(nested.collect::<Result<_, _>>()?)))
}

fn format(params: &mut Params) -> Result<ResponseFormat, ApiError> {
    let format = match params.take("text") {
        None => return Ok(ResponseFormat::Text),
        Some(mut text) => text["format"].take(),
    };
    if format["type"] == "json_schema" {
        // Flat here, nested in a chat.
        let nested = json!({ "type": "json_schema", "json_schema": format });
        return Ok(ResponseFormat::from_json(&nested)?);
    }
    Ok(ResponseFormat::from_json(&format)?)
}

fn refuse_the_rest(mut params: Params) -> Result<(), ApiError> {
    params.pass(PASSED_OVER);
    params.refuse(
        "background",
        &[json!(false)],
        "is not honoured: stay connected",
    )?;
    params.refuse(
        "previous_response_id",
        &[],
        "is not honoured: send the conversation with 'input'",
    )?;
    params.refuse("conversation", &[], "is not honoured: send it with 'input'")?;
    params.refuse("include", &[json!([])], "is not honoured")?;
    params.refuse("truncation", &[json!("disabled")], "can only be 'disabled'")?;
    params.refuse("top_logprobs", &[json!(0)], "is not honoured here")?;
    params.refuse(
        "max_tool_calls",
        &[],
        "is not honoured: no tool is run here",
    )?;
    params.refuse("prompt", &[], "is not honoured: nothing is stored here")?;
    params.refuse("stream_options", &[json!({})], "is not honoured here")?;
    params.end()
}
