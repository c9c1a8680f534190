//! The routes, and what they do with a request that has been let in.

mod batches;
mod files;
mod multipart;
pub(super) mod responses;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::Query;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::middleware;
use axum::response::Html;
use axum::response::IntoResponse;
use axum::response::Response;
use axum::routing::get;
use axum::routing::post;
use bytes::Bytes;
use serde_json::Value;
use serde_json::json;

use super::Door;
use super::ask;
use super::ask::Read;
use super::ask::honour;
use super::error::ApiError;
use super::gate;
use super::generator::Ask;
use super::generator::Generator;
use super::grammar::Demand;
use super::limits;
use super::metrics;
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
        .route("/v1/responses", post(responses::create))
        .route(
            "/v1/responses/{id}",
            get(responses::retrieve).delete(responses::delete),
        )
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route(
            "/v1/responses/{id}/input_items",
            get(responses::input_items),
        )
        .route("/v1/files", post(files::create).get(files::list))
        .route("/v1/files/{id}", get(files::retrieve).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", post(batches::create).get(batches::list))
        .route("/v1/batches/{id}", get(batches::retrieve))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        .route("/limits", get(limits::look).post(limits::set))
        .route("/metrics", get(metrics))
        // Which experts a prompt needs says something of the prompt.
        .route("/live", get(live))
        .layer(middleware::from_fn_with_state(Arc::clone(&door), gate::key));
    Router::new()
        .merge(behind_key)
        .route("/", get(page))
        .route("/openapi.json", get(openapi))
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
    pub(super) fn queue(&self) -> Result<&Arc<Queue>, ApiError> {
        self.queue.get().ok_or_else(|| {
            let message = format!("The model is not ready yet: {}.", self.loading().what);
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
pub(super) async fn read_body(door: &Door, body: Body) -> Result<Bytes, ApiError> {
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
    let mut read = ask::chat::read(Params::parse(&body)?, &facts(generator.as_ref()))?;
    check(generator, &read).await?;
    let demand = read.kind.demand.take();
    constrain(&door, generator, &mut read.asks, demand).await?;
    let usage = usage(&read, Some(read.kind.effort.as_str()));
    let shape = reply::chat::ChatReply::new(
        envelope(generator.as_ref(), "chatcmpl-"),
        usage,
        read.delivery.include_usage,
        read.asks.len(),
        read.kind.logprobs.then_some(generator),
    );
    answer_with(&door, queue, read, Box::new(shape)).await
}

async fn completions(State(door): State<Arc<Door>>, body: Body) -> Result<Response, ApiError> {
    let body = read_body(&door, body).await?;
    let queue = door.queue()?;
    let generator = queue.generator();
    let mut read = ask::completions::read(Params::parse(&body)?, &facts(generator.as_ref()))?;
    check(generator, &read).await?;
    let echo = read.kind.echo.take();
    let mut envelope = envelope(generator.as_ref(), "cmpl-");
    // K3 has no tokens for a hole in a text: whoever compares models should know how it was asked.
    envelope.note = read.kind.between.then(|| json!({ "suffix": "chat" }));
    let shape = reply::completions::CompletionReply::new(
        envelope,
        usage(&read, None),
        read.delivery.include_usage,
        read.asks.len(),
        echo,
        (read.scores.is_some(), read.kind.between, generator),
    );
    answer_with(&door, queue, read, Box::new(shape)).await
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
        note: None,
    }
}

/// Finds out whether every prompt can be used, on a thread that may work for a while.
async fn check<K>(generator: &Arc<dyn Generator>, read: &Read<K>) -> Result<(), ApiError> {
    let prompts = honour::prompts(read);
    let generator = Arc::clone(generator);
    let checked = tokio::task::spawn_blocking(move || honour::fits(generator.as_ref(), &prompts));
    let checked = checked.await.map_err(|_| {
        let message = "The prompt could not be turned into tokens.";
        ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    })?;
    checked.map_err(ApiError::from)
}

/// Compiles what a reply is held to, if anything, on a thread that may work for a while.
async fn constrain(
    door: &Arc<Door>,
    generator: &Arc<dyn Generator>,
    asks: &mut [Ask],
    demand: Option<Demand>,
) -> Result<(), ApiError> {
    let (Some(demand), Some(ask)) = (demand, asks.first()) else {
        return Ok(());
    };
    let (door, generator) = (Arc::clone(door), Arc::clone(generator));
    let prompt = ask.prompt.clone();
    let compiled = tokio::task::spawn_blocking(move || {
        honour::constraint(generator.as_ref(), &door.grammars, &prompt, &demand)
    });
    let compiled = compiled.await.map_err(|_| {
        let message = "The grammar of the reply could not be compiled.";
        ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    })?;
    let constraint = compiled?;
    for ask in asks {
        ask.constraint.clone_from(&constraint);
    }
    Ok(())
}

async fn answer_with<K>(
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

async fn metrics(State(door): State<Arc<Door>>) -> Response {
    let text = metrics::text(door.queue.get().map(Arc::as_ref));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// The web page. It loads nothing from anywhere, and may not.
async fn page() -> Response {
    let only_itself = HeaderValue::from_static(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    );
    let headers = [(header::CONTENT_SECURITY_POLICY, only_itself)];
    (headers, Html(include_str!("page.html"))).into_response()
}

async fn openapi() -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], include_str!("openapi.json")).into_response()
}

/// What the page's picture of the machine is drawn from: what is going on, and the experts that
/// arrived since the last look.
async fn live(State(door): State<Arc<Door>>, Query(since): Query<Since>) -> Json<Value> {
    let Json(mut body) = health(State(Arc::clone(&door))).await;
    if let Some(queue) = door.queue.get() {
        let (next, arrived) = queue.generator().arrivals(since.since.unwrap_or(0));
        let told = arrived.iter();
        let told = told.map(|one| json!([one.layer, one.expert, &one.source[..1]]));
        body["arrivals"] = json!({ "next": next, "experts": told.collect::<Vec<_>>() });
    }
    Json(body)
}

#[derive(serde::Deserialize)]
struct Since {
    since: Option<u64>,
}

/// For those who watch statuses rather than bodies.
async fn ready(State(door): State<Arc<Door>>) -> Result<&'static str, ApiError> {
    door.queue().map(|_| "ready")
}

async fn health(State(door): State<Arc<Door>>) -> Json<Value> {
    let body = match door.queue.get() {
        None => {
            let loading = door.loading();
            json!({
                "status": "loading", "live": true, "ready": false, "loading": loading.what,
                "paused": loading.paused, "limits": door.coming.get().map(|coming| coming.limit()),
            })
        }
        Some(queue) => {
            let lengths = queue.lengths();
            let now = queue.generator().now();
            json!({
                "status": "ok", "live": true, "ready": true, "model": queue.generator().model(),
                "running": lengths.running, "waiting": lengths.waiting, "now": now,
                "limits": queue.generator().limit(),
                "batch": { "running": lengths.batch_running, "waiting": lengths.batch_waiting },
            })
        }
    };
    Json(body)
}
