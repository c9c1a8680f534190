//! `/v1/completions`, read.

use serde_json::Value;
use serde_json::json;

use super::Model;
use super::PASSED_OVER;
use super::Read;
use crate::server::cancel::Cancel;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::Prompt;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::terms::TokenId;
use crate::text::Conversation;
use crate::text::Effort;
use crate::text::Message;
use crate::text::ResponseFormat;
use crate::text::ToolChoice;

/// Tokens generated where nothing is said: OpenAI's own default, which clients of this endpoint know.
const MAX_TOKENS: usize = 16;
/// Alternatives to a token, at most, as OpenAI has it.
const LOGPROBS_MAX: u64 = 5;
/// Prompts in one request, at most.
const PROMPTS_MAX: usize = 128;

/// What asks a chat model for the text between two others. K3 was taught no tokens for it.
const BETWEEN: &str = "You complete text at the cursor. The user shows the text before the cursor, \
then the text after it. Reply with the text that belongs between the two and nothing else: no \
explanation, no quotation, no code fence, nothing of what is already there.";

/// What shapes a completion's reply.
#[derive(Debug)]
pub(in crate::server) struct Completion {
    /// Texts that the choices begin with, where the prompt is echoed; `None` inside has it told in
    /// tokens.
    pub(in crate::server) echo: Option<Vec<Option<String>>>,
    /// The text was asked for by a chat's prompt, since something comes after it.
    pub(in crate::server) between: bool,
}

/// Reads a request: one choice for each prompt and each of `n`, prompts first.
///
/// # Errors
///
/// 400, naming the parameter that is wrong, unknown or cannot be honoured.
pub(in crate::server) fn read(
    mut params: Params,
    model: &Model,
) -> Result<Read<Completion>, ApiError> {
    super::model(&mut params, model)?;
    let prompts = prompts(params.take("prompt"), model)?;
    let delivery = super::delivery(&mut params)?;
    let echo = params.boolean("echo")?.unwrap_or(false);
    // Whoever wants to know how likely a text is asks for its echo and for nothing more.
    let least = u64::from(!echo);
    let max_tokens = params.whole("max_tokens", least, u64::MAX)?;
    let max_tokens = max_tokens.map_or(MAX_TOKENS, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let scores = params.whole("logprobs", 0, LOGPROBS_MAX)?;
    let n = super::choices(&mut params)?;
    params.refuse("best_of", &[json!(n)], "can only be as large as 'n'")?;
    let suffix = params.string("suffix")?.filter(|text| !text.is_empty());
    let score_prompt = echo && scores.is_some();
    if suffix.is_some() && score_prompt {
        return Err(ApiError::unsupported(
            "suffix",
            "is not honoured together with 'echo' and 'logprobs'",
        ));
    }
    let echo = echo.then(|| echoed(&prompts, n));
    let prompts = match &suffix {
        Some(after) => between(prompts, after)?,
        None => prompts,
    };
    let sampling = super::sampling(&mut params, model)?;
    let stop = super::stop(&mut params)?;
    params.pass(PASSED_OVER);
    params.end()?;
    let asks = prompts
        .into_iter()
        .flat_map(|prompt| {
            let ask = Ask {
                prompt,
                max_tokens: Some(max_tokens),
                sampling: sampling.clone(),
                stop: stop.clone(),
                constraint: None,
                score_prompt,
                patient: false,
                cancel: Cancel::default(),
                job: None,
            };
            super::repeat(&ask, n).collect::<Vec<_>>()
        })
        .collect();
    Ok(Read {
        asks,
        n,
        scores: scores.map(|n| usize::try_from(n).expect("at most 5")),
        delivery,
        kind: Completion {
            echo,
            between: suffix.is_some(),
        },
    })
}

/// What each choice's text begins with.
fn echoed(prompts: &[Prompt], n: usize) -> Vec<Option<String>> {
    let sent = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => Some(text.clone()),
        Prompt::Ids(_) | Prompt::Chat(_) => None,
    };
    let texts = prompts.iter().map(sent);
    texts
        .flat_map(|text| std::iter::repeat_n(text, n))
        .collect()
}

/// Prompts before a text as conversations that ask for what is missing.
fn between(prompts: Vec<Prompt>, after: &str) -> Result<Vec<Prompt>, ApiError> {
    let message = |role: &str, content: &str| {
        Message::from_json(&json!({ "role": role, "content": content })).map_err(ApiError::from)
    };
    prompts
        .into_iter()
        .map(|prompt| {
            let Prompt::Text(before) = prompt else {
                let what = "is only honoured with a prompt that is text";
                return Err(ApiError::unsupported("suffix", what));
            };
            let shown = format!(
                "<before>{before}</before>\n<after>{after}</after>\nWrite what is between."
            );
            Ok(Prompt::Chat(Box::new(Conversation {
                messages: vec![message("system", BETWEEN)?, message("user", &shown)?],
                tools: None,
                // A cursor waits: no thinking.
                effort: Effort::None,
                tool_choice: ToolChoice::Auto,
                response_format: ResponseFormat::Text,
            })))
        })
        .collect()
}

/// A string, a list of strings, a list of token ids, or a list of such lists.
fn prompts(json: Option<Value>, model: &Model) -> Result<Vec<Prompt>, ApiError> {
    let wrong = |what: &str| wrong_value("prompt", what);
    let any = "must be a string, a list of strings, a list of token ids, or a list of such lists";
    let list = match json {
        None => {
            return Err(ApiError::invalid(
                "prompt",
                "missing_required_parameter",
                "Missing required parameter: 'prompt'.",
            ));
        }
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(_) => return Err(wrong(any)),
    };
    if list.iter().all(Value::is_number) {
        return Ok(vec![Prompt::Ids(ids(&list, model)?)]);
    }
    if list.len() > PROMPTS_MAX {
        return Err(wrong(&format!("must hold at most {PROMPTS_MAX} prompts")));
    }
    list.into_iter()
        .map(|item| match item {
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(list) if list.iter().all(Value::is_number) && !list.is_empty() => {
                Ok(Prompt::Ids(ids(&list, model)?))
            }
            _ => Err(wrong(any)),
        })
        .collect()
}

fn ids(list: &[Value], model: &Model) -> Result<Vec<TokenId>, ApiError> {
    list.iter()
        .map(|value| {
            value
                .as_u64()
                .and_then(|id| TokenId::try_from(id).ok())
                .filter(|&id| (id as usize) < model.vocab)
                .ok_or_else(|| {
                    let what = format!("{value} is no token of a vocabulary of {}", model.vocab);
                    wrong_value("prompt", &what)
                })
        })
        .collect()
}
