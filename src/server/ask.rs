//! Requests read into generations: what is common to all kinds.

pub(super) mod chat;
pub(super) mod completions;
pub(super) mod honour;
pub(super) mod responses;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::error::ApiError;
use super::generator::Ask;
use super::generator::Sampling;
use super::params::Params;
use super::params::wrong_value;
use crate::terms::TokenId;

/// Choices of one request, at most.
const CHOICES_MAX: u64 = 128;
/// Stop texts of one request, at most. OpenAI takes four; editors send twice as many.
const STOPS_MAX: usize = 16;
/// Alternatives to a token, at most, as OpenAI has it.
const TOP_LOGPROBS_MAX: u64 = 20;

/// How the reply is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delivery {
    /// As server-sent events.
    pub(super) stream: bool,
    /// A stream ends with a chunk of usage.
    pub(super) include_usage: bool,
}

/// A request, read.
#[derive(Debug)]
pub(super) struct Read<K> {
    /// One generation a choice.
    pub(super) asks: Vec<Ask>,
    /// Choices that share a prompt stand together, so many of them.
    pub(super) n: usize,
    /// Score tokens, with so many alternatives each.
    pub(super) scores: Option<usize>,
    pub(super) delivery: Delivery,
    /// What shapes the reply.
    pub(super) kind: K,
}

/// Facts of the model that a request is read against.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) vocab: usize,
}

/// Parameters that speak to OpenAI's own service and change nothing in a reply made here.
const PASSED_OVER: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_timeout",
];

/// Checks that the model asked for is the one that is here.
fn model(params: &mut Params, model: &Model) -> Result<(), ApiError> {
    match params.string("model")? {
        Some(name) if !is_model(&name, model) => Err(ApiError::no_model(&name, &model.name)),
        _ => Ok(()),
    }
}

/// Whether a name is the model's: in full, or without its organisation.
pub(super) fn is_model(name: &str, model: &Model) -> bool {
    let short = model.name.rsplit('/').next();
    name == model.name || Some(name) == short
}

fn delivery(params: &mut Params) -> Result<Delivery, ApiError> {
    let stream = params.boolean("stream")?.unwrap_or(false);
    let mut include_usage = false;
    match params.take("stream_options") {
        None => {}
        Some(_) if !stream => {
            return Err(wrong_value(
                "stream_options",
                "is only allowed when 'stream' is true",
            ));
        }
        Some(Value::Object(options)) => {
            for (key, value) in options {
                match (key.as_str(), value) {
                    ("include_usage", Value::Bool(include)) => include_usage = include,
                    // Padding against traffic analysis, which a stream with comments has anyway.
                    ("include_obfuscation", _) | (_, Value::Null) => {}
                    (key, _) => {
                        let name = format!("stream_options.{key}");
                        return Err(ApiError::unsupported(&name, "is not known here"));
                    }
                }
            }
        }
        Some(_) => return Err(wrong_value("stream_options", "must be an object")),
    }
    Ok(Delivery {
        stream,
        include_usage,
    })
}

/// Reads everything that says how tokens are chosen. Without a seed one is drawn, and reported.
fn sampling(params: &mut Params, model: &Model) -> Result<Sampling, ApiError> {
    let seed = match params.take("seed") {
        None => fresh_seed(),
        // OpenAI's seed is a signed 64-bit number; any bits name a sequence of draws.
        Some(value) => match (value.as_u64(), value.as_i64()) {
            (Some(seed), _) => seed,
            (_, Some(seed)) => seed.cast_unsigned(),
            _ => return Err(wrong_value("seed", "must be a whole number of 64 bits")),
        },
    };
    Ok(Sampling {
        temperature: params.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
        top_p: params.number("top_p", 0.0, 1.0)?.unwrap_or(1.0),
        top_k: top_k(params)?,
        min_p: params.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
        presence_penalty: params.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: params
            .number("frequency_penalty", -2.0, 2.0)?
            .unwrap_or(0.0),
        logit_bias: logit_bias(params, model)?,
        seed,
    })
}

/// 0 and, as others have it, −1 mean all.
fn top_k(params: &mut Params) -> Result<usize, ApiError> {
    match params.take("top_k") {
        None => Ok(0),
        Some(value) if value == json!(-1) => Ok(0),
        Some(value) => value
            .as_u64()
            .and_then(|k| usize::try_from(k).ok())
            .ok_or_else(|| wrong_value("top_k", "must be a whole number of at least 0, or -1")),
    }
}

fn logit_bias(params: &mut Params, model: &Model) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let wrong = |what: String| wrong_value("logit_bias", &what);
    let entries: Map<String, Value> = match params.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(_) => {
            return Err(wrong(
                "must be an object from token ids to numbers".to_owned(),
            ));
        }
    };
    entries
        .into_iter()
        .map(|(key, value)| {
            let id = key
                .parse::<TokenId>()
                .ok()
                .filter(|&id| (id as usize) < model.vocab)
                .ok_or_else(|| {
                    wrong(format!(
                        "'{key}' is no token of a vocabulary of {}",
                        model.vocab
                    ))
                })?;
            #[expect(clippy::cast_possible_truncation, reason = "checked to be small")]
            let bias = value
                .as_f64()
                .filter(|bias| (-100.0..=100.0).contains(bias))
                .ok_or_else(|| wrong(format!("the bias of '{key}' must be from -100 to 100")))?
                as f32;
            Ok((id, bias))
        })
        .collect()
}

fn stop(params: &mut Params) -> Result<Vec<String>, ApiError> {
    let wrong = || {
        wrong_value(
            "stop",
            &format!("must be a string or a list of up to {STOPS_MAX} strings"),
        )
    };
    let texts = match params.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(texts)) if texts.len() <= STOPS_MAX => texts
            .into_iter()
            .map(|text| match text {
                Value::String(text) => Ok(text),
                _ => Err(wrong()),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong()),
    };
    // An empty stop text would end every answer before it begins.
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

fn choices(params: &mut Params) -> Result<usize, ApiError> {
    let n = params.whole("n", 1, CHOICES_MAX)?.unwrap_or(1);
    Ok(usize::try_from(n).expect("at most 128"))
}

/// One generation a choice: the first with the seed itself, so that `n = 1` changes nothing, each
/// further one with the seed after it.
fn repeat(ask: &Ask, n: usize) -> impl Iterator<Item = Ask> {
    (0..n as u64).map(|choice| {
        let mut ask = ask.clone();
        ask.sampling.seed = ask.sampling.seed.wrapping_add(choice);
        ask
    })
}

/// A seed nobody chose, small enough to survive a JSON reader that knows only doubles.
fn fresh_seed() -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(0) >> 11
}

fn tokens_limit(params: &mut Params, name: &str) -> Result<Option<usize>, ApiError> {
    Ok(params
        .whole(name, 1, u64::MAX)?
        .map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
}
