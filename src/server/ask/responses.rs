//! `/v1/responses`, read into the same generations as a chat.

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::Model;
use super::PASSED_OVER;
use super::Read;
use super::chat;
use crate::server::cancel::Cancel;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::Prompt;
use crate::server::grammar::Demand;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::server::reply::responses::Options;
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
    pub(in crate::server) options: Options,
    /// The items of the input, as they came.
    pub(in crate::server) input: Vec<Value>,
    /// The conversation as messages of a chat, without instructions, which are not inherited.
    pub(in crate::server) messages: Vec<Value>,
}

/// What of a request decides how its response is kept; read before the rest, which needs the
/// conversation it goes on from.
///
/// # Errors
///
/// 400, naming the parameter that is wrong.
pub(in crate::server) fn options(params: &mut Params) -> Result<Options, ApiError> {
    let background = params.boolean("background")?.unwrap_or(false);
    let store = params.boolean("store")?.unwrap_or(true);
    if background && !store {
        return Err(wrong_value(
            "background",
            "needs 'store': who comes back later must find something",
        ));
    }
    Ok(Options {
        background,
        store,
        previous: params.string("previous_response_id")?,
    })
}

/// Reads a request.
///
/// # Errors
///
/// 400, naming the parameter that is wrong, unknown or cannot be honoured.
pub(in crate::server) fn read(
    mut params: Params,
    options: Options,
    before: Vec<Value>,
    model: &Model,
) -> Result<Read<Wanted>, ApiError> {
    super::model(&mut params, model)?;
    let echo = echo(&params);
    let instructions = params.string("instructions")?;
    let instructions = instructions.map(|text| json!({ "role": "system", "content": text }));
    let mut said = before;
    let input = match params.take("input").ok_or_else(|| chat::missing("input"))? {
        Value::String(text) => vec![json!({ "type": "message", "role": "user", "content": text })],
        Value::Array(items) => items,
        _ => return Err(wrong_value("input", "must be a string or a list")),
    };
    let mut thought = String::new();
    for (n, item) in input.iter().enumerate() {
        push(&mut said, &mut thought, item.clone(), n)?;
    }
    let messages = instructions
        .iter()
        .chain(&said)
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
        score_prompt: false,
        patient: false,
        cancel: Cancel::default(),
        job: None,
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
            options,
            input,
            messages: said,
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
        said("reasoning", Value::Null),
        said("user", Value::Null),
    ]
    .into_iter()
    .collect()
}

/// One item of the input as messages of a chat: calls join the assistant's message before them.
///
/// A thought waits for what the assistant says after it.
fn push(
    messages: &mut Vec<Value>,
    thought: &mut String,
    mut item: Value,
    n: usize,
) -> Result<(), ApiError> {
    let text = |item: &Value, key: &str| item[key].as_str().unwrap_or_default().to_owned();
    match item["type"].as_str() {
        None | Some("message") => {
            if item["role"] == "assistant" && !thought.is_empty() {
                item["reasoning_content"] = std::mem::take(thought).into();
            }
            messages.push(item);
        }
        Some("function_call") => {
            let call = json!({
                "id": text(&item, "call_id"), "type": "function",
                "function": { "name": text(&item, "name"), "arguments": text(&item, "arguments") },
            });
            let open = messages.last_mut().filter(|m| m["role"] == "assistant");
            match open {
                Some(message) => match message["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => message["tool_calls"] = json!([call]),
                },
                None => {
                    let mut message =
                        json!({ "role": "assistant", "content": null, "tool_calls": [call] });
                    if !thought.is_empty() {
                        message["reasoning_content"] = std::mem::take(thought).into();
                    }
                    messages.push(message);
                }
            }
        }
        Some("function_call_output") => {
            let output = item["output"].clone();
            let id = text(&item, "call_id");
            messages.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
        }
        Some("reasoning") => {
            let parts = item["content"].as_array().into_iter().flatten();
            let texts = parts.filter_map(|part| part["text"].as_str());
            thought.push_str(&texts.collect::<String>());
        }
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
    params.refuse("conversation", &[], "is not honoured: send it with 'input'")?;
    // Thoughts are given in the open; there is nothing to be asked for in code.
    params.refuse(
        "include",
        &[json!([]), json!(["reasoning.encrypted_content"])],
        "is not honoured",
    )?;
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
