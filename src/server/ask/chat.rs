//! `/v1/chat/completions`, read.

use serde_json::Value;
use serde_json::json;

use super::Model;
use super::PASSED_OVER;
use super::Read;
use super::TOP_LOGPROBS_MAX;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::Prompt;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::ResponseFormat;
use crate::text::ToolChoice;
use crate::text::messages_from_json;

/// What shapes a chat's reply.
#[derive(Debug)]
pub(in crate::server) struct Chat {
    pub(in crate::server) effort: Effort,
    pub(in crate::server) logprobs: bool,
}

/// Reads a request.
///
/// # Errors
///
/// 400, naming the parameter that is wrong, unknown or cannot be honoured.
pub(in crate::server) fn read(mut params: Params, model: &Model) -> Result<Read<Chat>, ApiError> {
    super::model(&mut params, model)?;
    let messages = params.take("messages").ok_or_else(|| missing("messages"))?;
    let messages = messages_from_json(&messages)?;
    if messages.is_empty() {
        return Err(wrong_value("messages", "must hold at least one message"));
    }
    let effort = match params.string("reasoning_effort")? {
        Some(name) => Effort::from_api(&name)?,
        None => Effort::default(),
    };
    let (tools, tool_choice) = tools(&mut params)?;
    let response_format = match params.take("response_format") {
        None => ResponseFormat::Text,
        Some(format) => ResponseFormat::from_json(&format)?,
    };
    if response_format != ResponseFormat::Text {
        return Err(ApiError::unsupported(
            "response_format",
            "is not honoured beyond the type 'text'",
        ));
    }
    let delivery = super::delivery(&mut params)?;
    let max_tokens = super::tokens_limit(&mut params, "max_tokens")?;
    // The newer name wins where a client sends both.
    let max_tokens = super::tokens_limit(&mut params, "max_completion_tokens")?.or(max_tokens);
    let (logprobs, scores) = logprobs(&mut params)?;
    let n = super::choices(&mut params)?;
    let ask = Ask {
        prompt: Prompt::Chat(Box::new(Conversation {
            messages,
            tools,
            effort,
            tool_choice,
            response_format,
        })),
        max_tokens,
        sampling: super::sampling(&mut params, model)?,
        stop: super::stop(&mut params)?,
    };
    refuse_the_rest(params)?;
    Ok(Read {
        asks: super::repeat(&ask, n).collect(),
        n,
        scores,
        delivery,
        kind: Chat { effort, logprobs },
    })
}

fn missing(name: &str) -> ApiError {
    ApiError::invalid(
        name,
        "missing_required_parameter",
        format!("Missing required parameter: '{name}'."),
    )
}

fn tools(params: &mut Params) -> Result<(Option<Value>, ToolChoice), ApiError> {
    let choice = params.take("tool_choice");
    let tools = match params.take("tools") {
        None => None,
        Some(Value::Array(tools)) if tools.is_empty() => None,
        Some(Value::Array(tools)) => Some(tools),
        Some(_) => return Err(wrong_value("tools", "must be a list")),
    };
    for (n, tool) in tools.iter().flatten().enumerate() {
        let name = tool["function"]["name"].as_str().unwrap_or_default();
        if tool["type"] != "function" || name.is_empty() {
            return Err(wrong_value(
                &format!("tools[{n}]"),
                "must be of type 'function', with a function that has a name",
            ));
        }
    }
    let choice = match choice {
        None => ToolChoice::Auto,
        Some(choice) => ToolChoice::from_json(&choice)?,
    };
    match (&choice, &tools) {
        (ToolChoice::Required | ToolChoice::Named(_), None) => Err(wrong_value(
            "tool_choice",
            "asks for a tool, and 'tools' is empty",
        )),
        (ToolChoice::Required | ToolChoice::Named(_), Some(_)) => Err(ApiError::unsupported(
            "tool_choice",
            "is not honoured beyond 'auto' and 'none'",
        )),
        // With no tools there is nothing to forbid, and a prompt without the note is the plain one.
        (ToolChoice::None, None) => Ok((None, ToolChoice::Auto)),
        _ => Ok((tools.map(Value::Array), choice)),
    }
}

/// Whether tokens are scored, and with how many alternatives.
fn logprobs(params: &mut Params) -> Result<(bool, Option<usize>), ApiError> {
    let wanted = params.boolean("logprobs")?.unwrap_or(false);
    let top = params.whole("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
    match (wanted, top) {
        (false, Some(1..)) => Err(wrong_value(
            "top_logprobs",
            "is only allowed when 'logprobs' is true",
        )),
        (false, _) => Ok((false, None)),
        (true, top) => Ok((true, Some(usize::try_from(top.unwrap_or(0)).unwrap_or(0)))),
    }
}

fn refuse_the_rest(mut params: Params) -> Result<(), ApiError> {
    params.pass(PASSED_OVER);
    // Several calls in one reply are the model's own way, and cannot be forbidden.
    params.refuse(
        "parallel_tool_calls",
        &[json!(true)],
        "can only be true: the model calls as many tools as it sees fit",
    )?;
    params.refuse("modalities", &[json!(["text"])], "can only be ['text']")?;
    params.refuse("verbosity", &[json!("medium")], "can only be 'medium'")?;
    params.refuse("audio", &[], "is not honoured: there is only text")?;
    params.refuse("prediction", &[], "is not honoured")?;
    params.refuse(
        "web_search_options",
        &[],
        "is not honoured: nothing is fetched",
    )?;
    params.refuse(
        "functions",
        &[json!([])],
        "is the retired form; use 'tools'",
    )?;
    params.refuse(
        "function_call",
        &[],
        "is the retired form; use 'tool_choice'",
    )?;
    params.end()
}
