//! `/v1/completions`, read.

use serde_json::Value;
use serde_json::json;

use super::Model;
use super::PASSED_OVER;
use super::Read;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::Prompt;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::terms::TokenId;

/// Tokens generated where nothing is said: OpenAI's own default, which clients of this endpoint know.
const MAX_TOKENS: usize = 16;
/// Alternatives to a token, at most, as OpenAI has it.
const LOGPROBS_MAX: u64 = 5;
/// Prompts in one request, at most.
const PROMPTS_MAX: usize = 128;

/// What shapes a completion's reply.
#[derive(Debug)]
pub(in crate::server) struct Completion {
    /// The reply begins with the prompt.
    pub(in crate::server) echo: bool,
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
    let max_tokens = super::tokens_limit(&mut params, "max_tokens")?.unwrap_or(MAX_TOKENS);
    let echo = params.boolean("echo")?.unwrap_or(false);
    let scores = params.whole("logprobs", 0, LOGPROBS_MAX)?;
    if echo && scores.is_some() {
        return Err(ApiError::unsupported(
            "logprobs",
            "is not honoured together with 'echo'",
        ));
    }
    let n = super::choices(&mut params)?;
    params.refuse("best_of", &[json!(n)], "can only be as large as 'n'")?;
    params.refuse("suffix", &[json!("")], "is not honoured")?;
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
            };
            super::repeat(&ask, n).collect::<Vec<_>>()
        })
        .collect();
    Ok(Read {
        asks,
        n,
        scores: scores.map(|n| usize::try_from(n).expect("at most 5")),
        delivery,
        kind: Completion { echo },
    })
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
