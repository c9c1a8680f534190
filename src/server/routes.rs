//! The routes, and what they do with a request that has been let in.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::State;
use axum::http::StatusCode;
use axum::middleware;
use axum::response::Response;
use axum::routing::get;
use axum::routing::post;
use bytes::Bytes;
use serde_json::Value;
use serde_json::json;

use super::Door;
use super::ask;
use super::ask::Read;
use super::error::ApiError;
use super::gate;
use super::generator::Ask;
use super::generator::Generator;
use super::generator::Prompt;
use super::params::Params;
use super::queue::Place;
use super::queue::Queue;
use super::queue::TurnedAway;
use super::reply;
use super::reply::Envelope;
use super::reply::Shape;
use super::reply::Usage;
use super::send;
use super::send::Sending;
use super::unix_now;

/// A request's body is sent in one go; who takes longer is not sending it.
const BODY_PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn app(door: Arc<Door>) -> Router {
    let behind_key = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(no_embeddings))
        .layer(middleware::from_fn_with_state(Arc::clone(&door), gate::key));
    Router::new()
        .merge(behind_key)
        .route("/health", get(health))
        .route("/health/ready", get(ready))
        .fallback(|| async {
            ApiError::plain(
                StatusCode::NOT_FOUND,
                "not_found",
                "There is no such path; see /openapi.json for those there are.",
            )
        })
        .method_not_allowed_fallback(|| async {
            ApiError::plain(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "This path does not answer to this method.",
            )
        })
        .layer(middleware::from_fn_with_state(
            Arc::clone(&door),
            gate::browser,
        ))
        .with_state(door)
}

impl Door {
    fn queue(&self) -> Result<&Arc<Queue>, ApiError> {
        self.queue.get().ok_or_else(|| {
            let message = format!("The model is not ready yet: {}.", self.loading());
            ApiError::busy("loading", message, 30)
        })
    }
}

fn facts(generator: &dyn Generator) -> ask::Model {
    ask::Model {
        name: generator.model().to_owned(),
        vocab: generator.vocab(),
    }
}

/// The whole body, within the limits of size and time.
async fn read_body(door: &Door, body: Body) -> Result<Bytes, ApiError> {
    let limit = door.options.body_max;
    let read = axum::body::to_bytes(body, limit);
    match tokio::time::timeout(BODY_PATIENCE, read).await {
        Err(_) => Err(ApiError::plain(
            StatusCode::REQUEST_TIMEOUT,
            "request_timeout",
            "The request's body did not come in time.",
        )),
        // Too long, or cut off; to who cut it off the reply does not matter.
        Ok(Err(_)) => Err(ApiError::plain(
            StatusCode::PAYLOAD_TOO_LARGE,
            "request_too_large",
            format!(
                "The request's body is longer than {}.",
                crate::terms::Bytes(limit as u64)
            ),
        )),
        Ok(Ok(bytes)) => Ok(bytes),
    }
}

async fn chat(State(door): State<Arc<Door>>, body: Body) -> Result<Response, ApiError> {
    let body = read_body(&door, body).await?;
    let queue = door.queue()?;
    let generator = queue.generator();
    let read = ask::chat::read(Params::parse(&body)?, &facts(generator.as_ref()))?;
    check(generator, &read).await?;
    let usage = usage(&read, Some(read.kind.effort.as_str()));
    let shape = reply::chat::ChatReply::new(
        envelope(generator.as_ref(), "chatcmpl-"),
        usage,
        read.delivery.include_usage,
        read.asks.len(),
        read.kind.logprobs.then_some(generator),
    );
    answer(&door, queue, read, Box::new(shape)).await
}

async fn completions(State(door): State<Arc<Door>>, body: Body) -> Result<Response, ApiError> {
    let body = read_body(&door, body).await?;
    let queue = door.queue()?;
    let generator = queue.generator();
    let read = ask::completions::read(Params::parse(&body)?, &facts(generator.as_ref()))?;
    check(generator, &read).await?;
    let echo = read.kind.echo.then(|| {
        let sent = |ask: &Ask| match &ask.prompt {
            Prompt::Text(text) => Some(text.clone()),
            Prompt::Ids(_) | Prompt::Chat(_) => None,
        };
        read.asks.iter().map(sent).collect()
    });
    let shape = reply::completions::CompletionReply::new(
        envelope(generator.as_ref(), "cmpl-"),
        usage(&read, None),
        read.delivery.include_usage,
        read.asks.len(),
        echo,
        (read.scores.is_some(), generator),
    );
    answer(&door, queue, read, Box::new(shape)).await
}

fn usage<K>(read: &Read<K>, effort: Option<&'static str>) -> Usage {
    let seed = read.asks.first().map_or(0, |ask| ask.sampling.seed);
    Usage::new(read.n, seed, effort)
}

fn envelope(generator: &dyn Generator, prefix: &str) -> Envelope {
    Envelope {
        id: reply::fresh_id(prefix),
        created: unix_now(),
        model: generator.model().to_owned(),
        fingerprint: generator.fingerprint(),
    }
}

/// Renders every prompt, so that one that cannot be used is a 400 and not a broken stream. On a
/// thread that may work for a while: a prompt may be a book.
async fn check<K>(generator: &Arc<dyn Generator>, read: &Read<K>) -> Result<(), ApiError> {
    let asks = read.asks.iter().step_by(read.n);
    let prompts: Vec<Prompt> = asks.map(|ask| ask.prompt.clone()).collect();
    let generator = Arc::clone(generator);
    let checked = tokio::task::spawn_blocking(move || {
        prompts
            .iter()
            .try_for_each(|prompt| generator.tokens(prompt).map(drop))
    });
    let checked = checked.await.map_err(|_| {
        let message = "The prompt could not be turned into tokens.";
        ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    })?;
    checked.map_err(ApiError::from)
}

async fn answer<K>(
    door: &Door,
    queue: &Arc<Queue>,
    read: Read<K>,
    shape: Box<dyn Shape>,
) -> Result<Response, ApiError> {
    let place = enter(queue, read.asks, read.scores)?;
    let sending = Sending {
        place,
        shape,
        generator: Arc::clone(queue.generator()),
        heartbeat: door.options.heartbeat,
    };
    if read.delivery.stream {
        Ok(send::stream(sending))
    } else {
        Ok(send::whole(sending).await)
    }
}

fn enter(queue: &Arc<Queue>, asks: Vec<Ask>, scores: Option<usize>) -> Result<Place, ApiError> {
    queue.enter(asks, scores).map_err(|turned_away| {
        match turned_away {
            TurnedAway::Full(waiting) => {
                // Nobody knows when the line moves; a token's time says of what order it is.
                let pace = queue.generator().now().last_token.unwrap_or(1.0);
                let seconds = Duration::try_from_secs_f64(pace * 20.0)
                    .map_or(600, |wait| wait.as_secs().clamp(5, 600));
                ApiError::busy(
                    "queue_full",
                    format!(
                        "One request is being served and {waiting} are waiting; come back later."
                    ),
                    seconds,
                )
            }
            TurnedAway::Closed => ApiError::busy("server_stopping", "The server is stopping.", 60),
        }
    })
}

fn model_json(door: &Door, generator: &dyn Generator) -> Value {
    let name = generator.model();
    let owner = name.split('/').next().unwrap_or(name);
    json!({
        "id": name, "object": "model", "created": door.started, "owned_by": owner,
        "context_length": generator.context(), "max_model_len": generator.context(),
    })
}

async fn models(State(door): State<Arc<Door>>) -> Result<Json<Value>, ApiError> {
    // While loading there is no model to be used, and a list says so without failing.
    let queue = door.queue.get();
    let models = queue.map(|queue| model_json(&door, queue.generator().as_ref()));
    let models: Vec<_> = models.into_iter().collect();
    Ok(Json(json!({ "object": "list", "data": models })))
}

async fn model(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let generator = door.queue()?.generator().as_ref();
    if ask::is_model(&id, &facts(generator)) {
        Ok(Json(model_json(&door, generator)))
    } else {
        Err(ApiError::no_model(&id, generator.model()))
    }
}

async fn no_embeddings() -> ApiError {
    let message = "This model generates text and has no embeddings to give.";
    ApiError::plain(StatusCode::BAD_REQUEST, "unsupported_endpoint", message)
}

/// For those who watch statuses rather than bodies.
async fn ready(State(door): State<Arc<Door>>) -> Result<&'static str, ApiError> {
    door.queue().map(|_| "ready")
}

async fn health(State(door): State<Arc<Door>>) -> Json<Value> {
    let body = match door.queue.get() {
        None => {
            json!({ "status": "loading", "live": true, "ready": false, "loading": door.loading() })
        }
        Some(queue) => {
            let (waiting, running) = queue.lengths();
            let now = queue.generator().now();
            json!({
                "status": "ok", "live": true, "ready": true, "model": queue.generator().model(),
                "running": running, "waiting": waiting, "now": now,
            })
        }
    };
    Json(body)
}
