//! Lines of a batch: OpenAI's batch format, over the same requests and replies as the routes.

use std::sync::Arc;
use std::sync::OnceLock;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;
use sha2::Digest;
use sha2::Sha256;

use super::ask;
use super::ask::Read;
use super::error::ApiError;
use super::generator::Ask;
use super::generator::Failure;
use super::generator::Generator;
use super::generator::Prompt;
use super::grammar::Demand;
use super::grammar::Grammars;
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
use super::unix_now;
use crate::engine;
use crate::engine::Engine;
use crate::engine::EngineError;
use crate::text::ReplyEvent;

/// The longest `custom_id`.
const CUSTOM_ID_MAX: usize = 512;
/// URLs that a line may name.
const URLS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Reads lines against one model.
pub struct BatchReader {
    engine: Arc<Engine>,
    generator: Arc<dyn Generator>,
    model: ask::Model,
    grammars: OnceLock<Option<Grammars>>,
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
    generator: Arc<dyn Generator>,
    reasoning: usize,
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

impl BatchReader {
    /// Reads for this engine.
    pub fn new(engine: Arc<Engine>) -> BatchReader {
        let generator: Arc<dyn Generator> = Arc::clone(&engine) as Arc<dyn Generator>;
        BatchReader {
            model: ask::Model {
                name: generator.model().to_owned(),
                vocab: generator.vocab(),
            },
            engine,
            generator,
            grammars: OnceLock::new(),
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
                let message =
                    format!("'custom_id' must be a string of 1 to {CUSTOM_ID_MAX} bytes.");
                return Err(unread("invalid_custom_id", message));
            }
            None => {
                let message = "Missing required parameter: 'custom_id'.".to_owned();
                return Err(unread("missing_required_parameter", message));
            }
        };
        let wrong = |code: &str, message: &str| Wrong {
            custom_id: Some(custom_id.clone()),
            line: error_line(Some(&custom_id), number, code, message),
        };
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
        let id = self.id(&custom_id, &url, &body);
        self.request(custom_id, id, &url, body, token_ids)
    }

    /// The line of an error file for a second request of one name.
    pub fn duplicate(custom_id: &str, number: usize, first: usize) -> Wrong {
        let message = format!("The custom_id '{custom_id}' is already that of line {first}.");
        Wrong {
            custom_id: Some(custom_id.to_owned()),
            line: error_line(Some(custom_id), number, "duplicate_custom_id", &message),
        }
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

    fn request(
        &self,
        custom_id: String,
        id: String,
        url: &str,
        mut body: Map<String, Value>,
        token_ids: bool,
    ) -> Result<BatchLine, Wrong> {
        let refused = |error: ApiError| refusal(&custom_id, &id, &error);
        if body.get("seed").is_none_or(Value::is_null) {
            // 52 bits of the id: what a reader that knows only doubles keeps whole.
            let hex = id.rsplit('_').next().unwrap_or_default();
            let seed = u64::from_str_radix(&hex[..13], 16).unwrap_or_default();
            body.insert("seed".to_owned(), seed.into());
        }
        let params = Params::parse(Value::Object(body).to_string().as_bytes()).map_err(refused)?;
        let request = if url == URLS[0] {
            self.chat(params, &id)
        } else {
            self.completion(params, &id)
        };
        let (asks, scores, shape) = request.map_err(refused)?;
        for ask in &asks {
            let fits = self.generator.tokens(&ask.prompt);
            fits.map_err(|failure| refused(failure.into()))?;
        }
        Ok(BatchLine {
            generator: Arc::clone(&self.generator),
            ids: token_ids.then(|| vec![Value::Null; asks.len()]),
            custom_id,
            id,
            asks,
            scores,
            shape,
            reasoning: 0,
        })
    }

    fn chat(&self, params: Params, id: &str) -> Result<Request, ApiError> {
        let mut read = ask::chat::read(params, &self.model)?;
        whole(&read)?;
        let demand = read.kind.demand.take();
        self.constrain(&mut read.asks, demand)?;
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
        whole(&read)?;
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

    fn constrain(&self, asks: &mut [Ask], demand: Option<Demand>) -> Result<(), ApiError> {
        let Some(demand) = demand else { return Ok(()) };
        let Some(Prompt::Chat(chat)) = asks.first().map(|ask| ask.prompt.clone()) else {
            return Ok(());
        };
        let param = match demand.schema {
            Some(_) => "response_format",
            None => "tools",
        };
        let made = || Grammars::new(self.generator.as_ref());
        let grammars = self.grammars.get_or_init(made).as_ref();
        let Some(grammars) = grammars else {
            return Err(wrong_value(
                param,
                "this model's vocabulary has no chat markup",
            ));
        };
        let constraint = grammars.constraint(&chat, &demand);
        let constraint = constraint.map_err(|error| wrong_value(param, &error.to_string()))?;
        for ask in asks {
            ask.constraint = Some(constraint.clone());
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
    pub fn requests(&self, line: &BatchLine) -> Vec<engine::Request> {
        let request = |ask| over_engine::to_request(&self.engine, ask);
        line.asks.iter().map(request).collect()
    }

    /// Takes the end of a choice.
    pub fn ended(&self, line: &mut BatchLine, choice: usize, made: &engine::Generation) {
        line.reasoning += over_engine::reasoning(&self.engine, &line.asks[choice].prompt, made);
        if let Some(ids) = &mut line.ids {
            ids[choice] = json!(made.token_ids);
        }
        let outcome = over_engine::outcome(made);
        line.shape.take(choice, Step::Ended(outcome));
    }
}

type Request = (Vec<Ask>, Option<usize>, Box<dyn Shape>);

impl BatchLine {
    /// Whether tokens are scored. What an earlier process generated has no scores any more, so such
    /// a choice begins anew.
    pub fn scored(&self) -> bool {
        self.scores.is_some()
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
        self.shape.take(choice, step);
    }

    /// The output file's line, once every choice has ended.
    pub fn answer(mut self) -> Value {
        let mut body = self.shape.whole();
        let details = &mut body["usage"]["completion_tokens_details"];
        details["reasoning_tokens"] = self.reasoning.into();
        if let Some(ids) = self.ids.take() {
            body["usage"]["deltafin"]["token_ids"] = ids.into();
        }
        drop(self.generator);
        response_line(&self.custom_id, &self.id, 200, &body)
    }

    /// The error file's line for a request that failed while it was generated.
    pub fn failed(&self, error: EngineError) -> Wrong {
        refusal(&self.custom_id, &self.id, &Failure::from(error).into())
    }
}

fn usage<K>(read: &Read<K>, effort: Option<&'static str>) -> Usage {
    let seed = read.asks.first().map_or(0, |ask| ask.sampling.seed);
    Usage::new(read.n, seed, effort)
}

fn whole<K>(read: &Read<K>) -> Result<(), ApiError> {
    match read.delivery.stream {
        true => Err(wrong_value("stream", "a batch has nobody to stream to")),
        false => Ok(()),
    }
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
