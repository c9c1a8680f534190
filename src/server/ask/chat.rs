//! `/v1/chat/completions`, read.

use serde_json::Value;
use serde_json::json;

use super::Model;
use super::PASSED_OVER;
use super::Read;
use super::TOP_LOGPROBS_MAX;
use crate::server::cancel::Cancel;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::Prompt;
use crate::server::grammar::Calls;
use crate::server::grammar::Demand;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::ResponseFormat;
use crate::text::ToolChoice;
use crate::text::messages_from_json;

/// Tools that one reply may call, where a grammar has to number the calls.
const CALLS_MAX: usize = 8;

/// What shapes a chat's reply.
#[derive(Debug)]
pub(in crate::server) struct Chat {
    pub(in crate::server) effort: Effort,
    pub(in crate::server) logprobs: bool,
    /// What the reply is held to by a grammar, where the prompt alone would not do.
    pub(in crate::server) demand: Option<Demand>,
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
    let parallel = params.boolean("parallel_tool_calls")?.unwrap_or(true);
    let (tools, tool_choice) = tools(&mut params)?;
    let response_format = match params.take("response_format") {
        None => ResponseFormat::Text,
        Some(format) => ResponseFormat::from_json(&format)?,
    };
    let demand = demand(tools.as_ref(), &tool_choice, parallel, &response_format);
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
        constraint: None,
        score_prompt: false,
        patient: false,
        cancel: Cancel::default(),
        job: None,
    };
    refuse_the_rest(params)?;
    Ok(Read {
        asks: super::repeat(&ask, n).collect(),
        n,
        scores,
        delivery,
        kind: Chat {
            effort,
            logprobs,
            demand,
        },
    })
}

pub(super) fn missing(name: &str) -> ApiError {
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
    let tools = tools.map(Value::Array);
    let choice = possible(choice, tools.as_ref())?;
    Ok((tools, choice))
}

/// The choice, if these tools leave it.
pub(super) fn possible(choice: ToolChoice, tools: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let list = tools.and_then(Value::as_array);
    match (choice, list) {
        (ToolChoice::Required | ToolChoice::Named(_), None) => Err(wrong_value(
            "tool_choice",
            "asks for a tool, and 'tools' is empty",
        )),
        (ToolChoice::Named(name), Some(tools)) if !tools.iter().any(|tool| named(tool, &name)) => {
            let what = format!("names '{name}', which is not among 'tools'");
            Err(wrong_value("tool_choice", &what))
        }
        // With no tools there is nothing to forbid, and a prompt without the note is the plain one.
        (ToolChoice::None, None) => Ok(ToolChoice::Auto),
        (choice, _) => Ok(choice),
    }
}

fn named(tool: &Value, name: &str) -> bool {
    tool["function"]["name"] == name
}

/// What a grammar has to see to; `None` where the model is free.
pub(super) fn demand(
    tools: Option<&Value>,
    choice: &ToolChoice,
    parallel: bool,
    format: &ResponseFormat,
) -> Option<Demand> {
    let schema = match format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some(json!({ "type": "object" })),
        ResponseFormat::JsonSchema(schema) => Some(schema.clone()),
    };
    let most = if parallel { CALLS_MAX } else { 1 };
    let (calls, tool) = match (tools, choice) {
        (None, _) | (_, ToolChoice::None) => (Calls::None, None),
        (Some(_), ToolChoice::Auto) => (Calls::AtMost(most), None),
        (Some(_), ToolChoice::Required) => (Calls::Some(most), None),
        (Some(_), ToolChoice::Named(name)) => (Calls::Some(1), Some(name.clone())),
    };
    let list = tools.and_then(Value::as_array).into_iter().flatten();
    let strict = list.clone().any(|tool| tool["function"]["strict"] == true);
    let free = match calls {
        Calls::None => tools.is_none(),
        Calls::AtMost(_) => parallel && !strict,
        Calls::Some(_) => false,
    };
    (!free || schema.is_some()).then_some(Demand {
        calls,
        tool,
        schema,
    })
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
