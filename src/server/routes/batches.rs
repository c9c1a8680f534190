//! `/v1/batches`: begun, listed, looked up, cancelled.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::Query;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::Map;
use serde_json::Value;

use super::files::Paging;
use super::files::aside;
use super::files::disk;
use super::files::kept;
use super::files::missing;
use super::read_body;
use crate::server::Door;
use crate::server::batch::URLS;
use crate::server::batches::Found;
use crate::server::batches::NotTaken;
use crate::server::batches::Status;
use crate::server::batches::Wish;
use crate::server::batches::run;
use crate::server::error::ApiError;
use crate::server::files::Purpose;
use crate::server::params::Params;
use crate::server::params::wrong_value;
use crate::server::send;

/// Batches of one list, if nothing is said, and at most, as OpenAI has it.
const LIST: usize = 20;
const LIST_MAX: usize = 100;
/// Pairs of metadata, characters of a key and of a value, at most, as OpenAI has it.
const PAIRS_MAX: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 512;
/// Tenths of a second in which a batch is taken up that an earlier process left.
const TAKING_UP: u32 = 50;

pub(super) async fn create(
    State(door): State<Arc<Door>>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let body = read_body(&door, body).await?;
    kept(&door)?;
    let queue = door.queue()?;
    if queue.closed() {
        return Err(send::stopping());
    }
    let wish = wish(Params::parse(&body)?)?;
    let model = queue.generator().model().to_owned();
    let own = Arc::clone(&door);
    let begun = aside(&door, move |kept| {
        let id = &wish.input_file_id;
        let missing = || ApiError::not_found("input_file_id", "file", id);
        let (about, path) = kept.input(id).ok_or_else(missing)?;
        if about.purpose != Purpose::Batch {
            return Err(wrong_value(
                "input_file_id",
                "the file must have been uploaded with purpose 'batch'",
            ));
        }
        let batch = kept.batches.begin(wish, &model, &path);
        let batch = batch.map_err(|not_taken| match not_taken {
            NotTaken::Disk(error) => disk(&error),
            NotTaken::Full(open) => ApiError::busy(
                "too_many_batches",
                format!("{open} batches are open already; come back when one has ended."),
                600,
            ),
        })?;
        let object = batch.json();
        // Here rather than after the reply: a client that leaves now has a batch all the same.
        run::start(&own, batch);
        Ok(Json(object))
    });
    begun.await?
}

fn wish(mut params: Params) -> Result<Wish, ApiError> {
    let mut string = |name| params.string(name)?.ok_or_else(|| missing(name));
    let input_file_id = string("input_file_id")?;
    let endpoint = string("endpoint")?;
    let window = string("completion_window")?;
    if !URLS.contains(&endpoint.as_str()) {
        let what = format!("must be one of {}", URLS.join(", "));
        return Err(wrong_value("endpoint", &what));
    }
    if window != "24h" {
        return Err(wrong_value("completion_window", "must be '24h'"));
    }
    let metadata = match params.take("metadata") {
        None => None,
        Some(Value::Object(pairs)) => Some(metadata(pairs)?),
        Some(_) => return Err(wrong_value("metadata", "must be an object")),
    };
    params.refuse(
        "output_expires_after",
        &[],
        "is not honoured: files stay until they are deleted",
    )?;
    params.end()?;
    Ok(Wish {
        input_file_id,
        endpoint,
        metadata,
    })
}

fn metadata(pairs: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let fits = |(key, value): (&String, &Value)| {
        let value = value.as_str().map(|text| text.chars().count());
        key.chars().count() <= KEY_MAX && value.is_some_and(|len| len <= VALUE_MAX)
    };
    if pairs.len() > PAIRS_MAX || !pairs.iter().all(fits) {
        let what = format!(
            "must be at most {PAIRS_MAX} pairs of a key of up to {KEY_MAX} characters and a string \
             of up to {VALUE_MAX}"
        );
        return Err(wrong_value("metadata", &what));
    }
    Ok(pairs)
}

pub(super) async fn list(
    State(door): State<Arc<Door>>,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let paging = Paging::read(&query, LIST, LIST_MAX)?;
    let all = aside(&door, |kept| kept.batches.list()).await?;
    paging.page(all, "batch").map(Json)
}

fn not_found(id: &str) -> ApiError {
    ApiError::not_found("id", "batch", id)
}

pub(super) async fn retrieve(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let own = id.clone();
    let found = aside(&door, move |kept| {
        kept.batches.get(&own).map(|found| found.json())
    });
    found.await?.map(Json).ok_or_else(|| not_found(&id))
}

pub(super) async fn cancel(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    // One that an earlier process left is being taken up, unless it is another's.
    for _ in 0..TAKING_UP {
        if let Some(ended) = end(&door, &id).await? {
            return ended.map(Json);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(ApiError::plain(
        StatusCode::CONFLICT,
        "made_elsewhere",
        "The batch is answered by another server on this store, or waits for its model to be served \
         again.",
    ))
}

/// Asks for a batch's end; `None` where this server has not taken it up.
async fn end(door: &Arc<Door>, id: &str) -> Result<Option<Result<Value, ApiError>>, ApiError> {
    let own = id.to_owned();
    let ended = aside(door, move |kept| {
        let found = kept.batches.get(&own).ok_or_else(|| not_found(&own))?;
        let ended = match &found {
            Found::Here(batch) => batch.end().map_err(|error| disk(&error))?,
            Found::There {
                over: Some(status), ..
            } => Err(*status),
            Found::There { over: None, .. } => return Ok(None),
        };
        Ok(Some(ended.map(|()| found.json()).map_err(over)))
    });
    ended.await?
}

fn over(status: Status) -> ApiError {
    ApiError::plain(
        StatusCode::CONFLICT,
        "not_cancellable",
        format!(
            "A batch with status '{}' cannot be cancelled.",
            status.name()
        ),
    )
}
