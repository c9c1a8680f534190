//! Lines of a batch: OpenAI's batch format, over the same requests and replies as the routes.

use std::sync::Arc;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;
use sha2::Digest;
use sha2::Sha256;

use super::ask;
use super::ask::Read;
use super::ask::honour;
use super::ask::honour::SharedGrammars;
use super::error::ApiError;
use super::generator::Ask;
use super::generator::Failure;
use super::generator::Generator;
use super::grammar::Demand;
use super::logprobs;
use super::over_engine;
use super::params::Params;
use super::params::wrong_value;
use super::queue::Step;
use super::reply::Envelope;
use super::reply::Shape;
use super::reply::Usage;
use super::reply::chat::ChatReply;
use super::reply::completions::CompletionReply;
use super::reply::responses::Options;
use super::reply::responses::ResponseReply;
use super::unix_now;
use crate::engine;
use crate::engine::Engine;
use crate::engine::EngineError;
use crate::text::ReplyEvent;

/// The longest `custom_id`.
const CUSTOM_ID_MAX: usize = 512;
/// URLs that a line may name.
pub(super) const URLS: [&str; 3] = [CHAT, COMPLETIONS, RESPONSES];
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

/// Finds the conversation that ends with the response of this id.
type Earlier = Box<dyn Fn(&str) -> Option<Vec<Value>> + Send + Sync>;

/// Reads lines against one model.
pub struct BatchReader {
    generator: Arc<dyn Generator>,
    model: ask::Model,
    grammars: SharedGrammars,
    earlier: Earlier,
}

/// A line that says what is asked of which path, whether or not it can be honoured.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) custom_id: String,
    pub(super) url: String,
    body: Map<String, Value>,
}

/// A request that can be honoured, and its reply while it comes to be.
pub struct BatchLine {
    /// The caller's name for it.
    pub custom_id: String,
    /// Names the request and the model: what has the same id has the same answer.
    pub id: String,
    asks: Vec<Ask>,
    scores: Option<usize>,
    shape: Box<dyn Shape>,
    ids: Option<Vec<Value>>,
}

/// A line that gets no answer: its line of the error file.
#[derive(Clone, Debug)]
pub struct Wrong {
    /// The caller's name for it, where it has one.
    pub custom_id: Option<String>,
    /// The line, in OpenAI's shape.
    pub line: Value,
}

impl std::fmt::Debug for BatchReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchReader")
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for BatchLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchLine")
            .field("custom_id", &self.custom_id)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Reads line `number`, counted from 1, without knowing whether it can be honoured.
///
/// # Errors
///
/// The error file's line: it is no request.
pub(super) fn parse(line: &[u8], number: usize) -> Result<Said, Wrong> {
    let unread = |code: &str, message: String| Wrong {
        custom_id: None,
        line: error_line(None, number, code, &message),
    };
    let json: Value = serde_json::from_slice(line).map_err(|error| {
        let message = format!("This line is not parseable as valid JSON: {error}.");
        unread("invalid_json_line", message)
    })?;
    let Value::Object(mut fields) = json else {
        let message = "This line is not a JSON object.".to_owned();
        return Err(unread("invalid_json_line", message));
    };
    let custom_id = match fields.get("custom_id") {
        Some(Value::String(id)) if !id.is_empty() && id.len() <= CUSTOM_ID_MAX => id.clone(),
        Some(_) => {
            let message = format!("'custom_id' must be a string of 1 to {CUSTOM_ID_MAX} bytes.");
            return Err(unread("invalid_custom_id", message));
        }
        None => {
            let message = "Missing required parameter: 'custom_id'.".to_owned();
            return Err(unread("missing_required_parameter", message));
        }
    };
    let wrong = |code: &str, message: &str| wrong_line(&custom_id, number, code, message);
    if fields.get("method").is_some_and(|method| method != "POST") {
        return Err(wrong("invalid_method", "'method' must be 'POST'."));
    }
    let url = match fields.get("url").and_then(Value::as_str) {
        Some(url) if URLS.contains(&url) => url.to_owned(),
        Some(url) => {
            let message = format!("The URL '{url}' is not one of {}.", URLS.join(", "));
            return Err(wrong("invalid_url", &message));
        }
        None => return Err(wrong("invalid_url", "'url' must be a string.")),
    };
    let body = match fields.remove("body") {
        Some(Value::Object(body)) => body,
        _ => return Err(wrong("invalid_body", "'body' must be an object.")),
    };
    Ok(Said {
        custom_id,
        url,
        body,
    })
}

/// The error file's line for one that has a name and is no request all the same.
pub(super) fn wrong_line(custom_id: &str, number: usize, code: &str, message: &str) -> Wrong {
    Wrong {
        custom_id: Some(custom_id.to_owned()),
        line: error_line(Some(custom_id), number, code, message),
    }
}

/// The error file's line for one that is longer than a request may be.
pub(super) fn long_line(number: usize, most: usize) -> Wrong {
    let most = crate::terms::Bytes(most as u64);
    let message = format!("This line is longer than {most}.");
    Wrong {
        custom_id: None,
        line: error_line(None, number, "line_too_long", &message),
    }
}

impl BatchReader {
    /// Reads for this engine.
    pub fn new(engine: Arc<Engine>) -> BatchReader {
        let nowhere = Box::new(|_: &str| None);
        BatchReader::sharing(engine, SharedGrammars::default(), nowhere)
    }

    /// Reads for whatever generates, with grammars that others use too, and with responses to go on
    /// from.
    pub(super) fn sharing(
        generator: Arc<dyn Generator>,
        grammars: SharedGrammars,
        earlier: Earlier,
    ) -> BatchReader {
        BatchReader {
            model: ask::Model {
                name: generator.model().to_owned(),
                vocab: generator.vocab(),
            },
            generator,
            grammars,
            earlier,
        }
    }

    /// Reads line `number`, counted from 1. Its draws are seeded by what it says where it names no
    /// seed, so that it gets the same answer whenever and wherever it is run. With `token_ids` the
    /// reply's usage holds the ids of each choice.
    ///
    /// # Errors
    ///
    /// The error file's line.
    pub fn read(&self, line: &[u8], number: usize, token_ids: bool) -> Result<BatchLine, Wrong> {
        self.request(parse(line, number)?, token_ids)
    }

    /// The line of an error file for a second request of one name.
    pub fn duplicate(custom_id: &str, number: usize, first: usize) -> Wrong {
        let message = format!("The custom_id '{custom_id}' is already that of line {first}.");
        wrong_line(custom_id, number, "duplicate_custom_id", &message)
    }

    fn id(&self, custom_id: &str, url: &str, body: &Map<String, Value>) -> String {
        let said = json!([
            custom_id,
            url,
            body,
            self.model.name,
            self.generator.fingerprint()
        ]);
        let digest = Sha256::digest(said.to_string());
        let hex: String = digest.iter().take(16).map(|b| format!("{b:02x}")).collect();
        format!("batch_req_{hex}")
    }

    /// Reads what a line says, as a request of its own would be read.
    ///
    /// # Errors
    ///
    /// The error file's line.
    pub(super) fn request(&self, said: Said, token_ids: bool) -> Result<BatchLine, Wrong> {
        let Said {
            custom_id,
            url,
            mut body,
        } = said;
        let id = self.id(&custom_id, &url, &body);
        let refused = |error: ApiError| refusal(&custom_id, &id, &error);
        if body.get("seed").is_none_or(Value::is_null) {
            // 52 bits of the id: what a reader that knows only doubles keeps whole.
            let hex = id.rsplit('_').next().unwrap_or_default();
            let seed = u64::from_str_radix(&hex[..13], 16).unwrap_or_default();
            body.insert("seed".to_owned(), seed.into());
        }
        let params = Params::parse(Value::Object(body).to_string().as_bytes()).map_err(refused)?;
        let request = match url.as_str() {
            CHAT => self.chat(params, &id),
            RESPONSES => self.response(params, &id),
            _ => self.completion(params, &id),
        };
        let (asks, scores, shape) = request.map_err(refused)?;
        Ok(BatchLine {
            ids: token_ids.then(|| vec![Value::Null; asks.len()]),
            custom_id,
            id,
            asks,
            scores,
            shape,
        })
    }

    fn chat(&self, params: Params, id: &str) -> Result<Request, ApiError> {
        let mut read = ask::chat::read(params, &self.model)?;
        let demand = read.kind.demand.take();
        self.honour(&mut read, demand)?;
        let shape = ChatReply::new(
            self.envelope(id, "chatcmpl-"),
            usage(&read, Some(read.kind.effort.as_str())),
            false,
            read.asks.len(),
            read.kind.logprobs.then_some(&self.generator),
        );
        Ok((read.asks, read.scores, Box::new(shape)))
    }

    fn completion(&self, params: Params, id: &str) -> Result<Request, ApiError> {
        let mut read = ask::completions::read(params, &self.model)?;
        self.honour(&mut read, None)?;
        let echo = read.kind.echo.take();
        let mut envelope = self.envelope(id, "cmpl-");
        envelope.note = read.kind.between.then(|| json!({ "suffix": "chat" }));
        let shape = CompletionReply::new(
            envelope,
            usage(&read, None),
            false,
            read.asks.len(),
            echo,
            (read.scores.is_some(), read.kind.between, &self.generator),
        );
        Ok((read.asks, read.scores, Box::new(shape)))
    }

    fn response(&self, mut params: Params, id: &str) -> Result<Request, ApiError> {
        let kept = params.peek("store") == Some(&Value::Bool(true));
        let options = ask::responses::options(&mut params)?;
        if options.background || kept {
            // A response that is kept could be gone on from; thousands would drive out those of
            // people who mean to.
            let param = if kept { "store" } else { "background" };
            return Err(wrong_value(
                param,
                "a batch keeps its responses in its output file alone",
            ));
        }
        let before = match &options.previous {
            Some(id) => (self.earlier)(id)
                .ok_or_else(|| ApiError::not_found("previous_response_id", "response", id))?,
            None => Vec::new(),
        };
        let options = Options {
            store: false,
            ..options
        };
        let mut read = ask::responses::read(params, options, before, &self.model)?;
        let demand = read.kind.demand.take();
        self.honour(&mut read, demand)?;
        let shape = ResponseReply::new(
            self.envelope(id, "resp_"),
            usage(&read, Some(read.kind.effort.as_str())),
            read.kind.echo,
            read.kind.options,
        );
        Ok((read.asks, read.scores, Box::new(shape)))
    }

    /// Finds out whether a request can be honoured, and has its reply held to what it demands.
    fn honour<K>(&self, read: &mut Read<K>, demand: Option<Demand>) -> Result<(), ApiError> {
        if read.delivery.stream {
            return Err(wrong_value("stream", "a batch has nobody to stream to"));
        }
        let generator = self.generator.as_ref();
        honour::fits(generator, &honour::prompts(read))?;
        let (Some(demand), Some(ask)) = (demand, read.asks.first()) else {
            return Ok(());
        };
        let held = honour::constraint(generator, &self.grammars, &ask.prompt, &demand)?;
        for ask in &mut read.asks {
            ask.constraint.clone_from(&held);
        }
        Ok(())
    }

    fn envelope(&self, id: &str, prefix: &str) -> Envelope {
        Envelope {
            id: id.replace("batch_req_", prefix),
            created: unix_now(),
            model: self.model.name.clone(),
            fingerprint: self.generator.fingerprint(),
            note: None,
        }
    }

    /// The engine's requests of a line, one a choice.
    pub fn requests(&self, engine: &Engine, line: &BatchLine) -> Vec<engine::Request> {
        let request = |ask| over_engine::to_request(engine, ask);
        line.asks.iter().map(request).collect()
    }

    /// Takes the end of a choice.
    pub fn ended(
        &self,
        engine: &Engine,
        line: &mut BatchLine,
        choice: usize,
        made: &engine::Generation,
    ) {
        let mut outcome = over_engine::outcome(made);
        let reasoning = over_engine::reasoning(engine, &line.asks[choice].prompt, made);
        outcome.reasoning_tokens = Some(reasoning);
        if let Some(ids) = &mut line.ids {
            ids[choice] = json!(made.token_ids);
        }
        line.take(choice, Step::Ended(outcome));
    }
}

type Request = (Vec<Ask>, Option<usize>, Box<dyn Shape>);

impl BatchLine {
    /// Whether tokens are scored. What an earlier process generated has no scores any more, so such
    /// a choice begins anew.
    pub fn scored(&self) -> bool {
        self.scores.is_some()
    }

    /// Its generations, to be made elsewhere, and how their tokens are scored.
    pub(super) fn asks(&mut self) -> (Vec<Ask>, Option<usize>) {
        (std::mem::take(&mut self.asks), self.scores)
    }

    /// Takes a step of a choice.
    pub(super) fn take(&mut self, choice: usize, step: Step) {
        self.shape.take(choice, step);
    }

    /// Takes what an engine tells of a choice.
    pub fn hear(&mut self, choice: usize, event: &engine::Event<'_>) {
        let step = match event {
            engine::Event::Prompt(ids) => Step::Prompt(ids.to_vec()),
            engine::Event::Token { id, logits } => {
                let score = |top| Box::new(logprobs::score(*id, logits, top));
                Step::Token(self.scores.map(score))
            }
            engine::Event::Reasoning(text) => {
                Step::Reply(ReplyEvent::Reasoning((*text).to_owned()))
            }
            engine::Event::Answer(text) => Step::Reply(ReplyEvent::Answer((*text).to_owned())),
            engine::Event::Reply(event) => Step::Reply((*event).clone()),
            _ => return,
        };
        self.take(choice, step);
    }

    /// The output file's line, once every choice has ended.
    pub fn answer(mut self) -> Value {
        let mut body = self.shape.whole();
        if let Some(ids) = self.ids.take() {
            body["usage"]["deltafin"]["token_ids"] = ids.into();
        }
        response_line(&self.custom_id, &self.id, 200, &body)
    }

    /// The error file's line for a request that failed while it was generated.
    pub fn failed(&self, error: EngineError) -> Wrong {
        self.refused(&Failure::from(error).into())
    }

    /// The error file's line for a request that failed so.
    pub(super) fn refused(&self, error: &ApiError) -> Wrong {
        refusal(&self.custom_id, &self.id, error)
    }
}

fn usage<K>(read: &Read<K>, effort: Option<&'static str>) -> Usage {
    let seed = read.asks.first().map_or(0, |ask| ask.sampling.seed);
    Usage::new(read.n, seed, effort)
}

fn refusal(custom_id: &str, id: &str, error: &ApiError) -> Wrong {
    Wrong {
        custom_id: Some(custom_id.to_owned()),
        line: response_line(custom_id, id, error.status.as_u16(), &error.body()),
    }
}

fn response_line(custom_id: &str, id: &str, status: u16, body: &Value) -> Value {
    json!({
        "id": id, "custom_id": custom_id,
        "response": {
            "status_code": status, "request_id": id.replace("batch_req_", "req_"), "body": body,
        },
        "error": null,
    })
}

/// A line that is no request has no response, and says where it stands.
fn error_line(custom_id: Option<&str>, number: usize, code: &str, message: &str) -> Value {
    json!({
        "id": format!("batch_req_line_{number}"), "custom_id": custom_id, "response": null,
        "error": { "code": code, "message": message, "param": null, "line": number },
    })
}
