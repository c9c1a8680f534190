//! `/v1/responses`: made, kept, looked up, cancelled, deleted.

use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::Query;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;
use serde_json::json;

use super::answer_with;
use super::check;
use super::constrain;
use super::enter;
use super::envelope;
use super::facts;
use super::read_body;
use super::usage;
use crate::jobs::Job;
use crate::jobs::JobError;
use crate::server::Door;
use crate::server::ask;
use crate::server::ask::Read;
use crate::server::ask::responses::Wanted;
use crate::server::error::ApiError;
use crate::server::generator::Ask;
use crate::server::generator::SharedJob;
use crate::server::params::Params;
use crate::server::queue::News;
use crate::server::queue::Place;
use crate::server::queue::Queue;
use crate::server::reply;
use crate::server::reply::Envelope;
use crate::server::reply::Shape;
use crate::server::reply::responses::Options;
use crate::server::send;
use crate::server::shelf::Keeping;
use crate::server::shelf::Kept;
use crate::server::shelf::Record;
use crate::server::shelf::disk::Made;
use crate::server::unix_now;

pub(super) async fn create(
    State(door): State<Arc<Door>>,
    body: Body,
) -> Result<Response, ApiError> {
    let body = read_body(&door, body).await?;
    let queue = door.queue()?;
    let mut params = Params::parse(&body)?;
    let options = ask::responses::options(&mut params)?;
    let before = match &options.previous {
        Some(id) => {
            let missing = || not_found(id, "previous_response_id");
            door.shelf.get(id).ok_or_else(missing)?.conversation()
        }
        None => Vec::new(),
    };
    let mut read = prepare(&door, params, options, before.clone()).await?;
    let mut made = Made {
        body: Value::Null,
        before,
        seed: read.asks.first().map_or(0, |ask| ask.sampling.seed),
        background: read.kind.options.background,
        created: unix_now(),
        input: read.kind.input.clone(),
        messages: read.kind.messages.clone(),
        response: Value::Null,
    };
    let record = record(&door, &mut read, reply::fresh_id("resp_"), made.created)?;
    if !record.background {
        let mut keeping = None;
        if read.kind.options.store {
            door.shelf.put(&record);
            let disk = door.shelf.disk().map(Arc::clone);
            keeping = disk.map(|disk| Keeping { disk, made });
        }
        return answer_with(&door, queue, read, Box::new(Kept(record, keeping))).await;
    }
    made.body = serde_json::from_slice(&body).unwrap_or_default();
    made.response = record.response();
    if let Some(disk) = door.shelf.disk() {
        // Whoever gets an id may come back for it after anything but the loss of the disk.
        let (disk, id) = (Arc::clone(disk), record.id.clone());
        let begun = tokio::task::spawn_blocking(move || disk.begin(&id, &made)).await;
        let begun = begun.map_err(|_| send::lost())?;
        let begun = begun.map_err(|error| not_kept(&error))?;
        *lock(&record.job()) = Some(begun);
    }
    let asks = patient(&record, &mut read);
    let place = match enter(queue, asks, None) {
        Ok(place) => place,
        Err(error) => {
            if let Some(job) = lock(&record.job()).take() {
                // It was never promised to anybody.
                let _ = job.remove();
            }
            return Err(error);
        }
    };
    door.shelf.put(&record);
    tokio::spawn(make(place, Arc::clone(queue), Arc::clone(&record)));
    if read.delivery.stream {
        let generator = Some(Arc::clone(queue.generator()));
        let heartbeat = door.options.heartbeat;
        Ok(send::follow(record, 0, heartbeat, generator))
    } else {
        Ok(Json(record.response()).into_response())
    }
}

/// Reads a request, and finds out whether it can be honoured.
async fn prepare(
    door: &Arc<Door>,
    params: Params,
    options: Options,
    before: Vec<Value>,
) -> Result<Read<Wanted>, ApiError> {
    let generator = door.queue()?.generator();
    let facts = facts(generator.as_ref());
    let mut read = ask::responses::read(params, options, before, &facts)?;
    check(generator, &read).await?;
    let demand = read.kind.demand.take();
    constrain(door, generator, &mut read.asks, demand).await?;
    Ok(read)
}

/// The generations of a response that nobody waits for.
fn patient(record: &Record, read: &mut Read<Wanted>) -> Vec<Ask> {
    let mut asks = std::mem::take(&mut read.asks);
    for ask in &mut asks {
        ask.patient = true;
        let job = record.job();
        ask.job = lock(&job).is_some().then(|| Arc::clone(&job));
    }
    asks
}

fn lock(job: &SharedJob) -> std::sync::MutexGuard<'_, Option<Job>> {
    job.lock().unwrap_or_else(PoisonError::into_inner)
}

fn not_kept(error: &JobError) -> ApiError {
    let hint = error.hint().unwrap_or_default();
    let message = format!("The response cannot be kept: {error}. {hint}");
    ApiError::plain(
        StatusCode::INSUFFICIENT_STORAGE,
        "insufficient_storage",
        message,
    )
}

/// Goes on with the background responses that an earlier process did not finish.
pub(in crate::server) async fn resume(door: Arc<Door>) {
    for (id, made) in door.shelf.find_left() {
        // One that cannot be read any more says so when it is asked for; the others go on.
        let _ = resume_one(&door, &id, made).await;
    }
}

async fn resume_one(door: &Arc<Door>, id: &str, made: Made) -> Result<(), ApiError> {
    let queue = door.queue()?;
    let mut body = made.body;
    if body["seed"].is_null() {
        body["seed"] = made.seed.into();
    }
    let mut params = Params::parse(body.to_string().as_bytes())?;
    let options = ask::responses::options(&mut params)?;
    let Some(disk) = door.shelf.disk().map(Arc::clone) else {
        return Ok(());
    };
    let name = id.to_owned();
    let taken = tokio::task::spawn_blocking(move || disk.take_up(&name)).await;
    let job = match taken {
        Ok(Ok(job)) => job,
        // Another process was faster.
        _ => return Ok(()),
    };
    let mut read = prepare(door, params, options, made.before).await?;
    let record = record(door, &mut read, id.to_owned(), made.created)?;
    *lock(&record.job()) = Some(job);
    let asks = patient(&record, &mut read);
    let Ok(place) = queue.enter_again(asks) else {
        return Ok(());
    };
    door.shelf.put(&record);
    tokio::spawn(make(place, Arc::clone(queue), record));
    Ok(())
}

fn record(
    door: &Door,
    read: &mut Read<Wanted>,
    id: String,
    created: u64,
) -> Result<Arc<Record>, ApiError> {
    let generator = door.queue()?.generator();
    let envelope = Envelope {
        id: id.clone(),
        created,
        ..envelope(generator.as_ref(), "resp_")
    };
    let usage = usage(read, Some(read.kind.effort.as_str()));
    let echo = std::mem::take(&mut read.kind.echo);
    let options = read.kind.options.clone();
    let background = options.background;
    let reply = reply::responses::ResponseReply::new(envelope, usage, echo, options);
    let input = std::mem::take(&mut read.kind.input);
    let messages = std::mem::take(&mut read.kind.messages);
    Ok(Record::new(&id, background, input, messages, reply))
}

/// Makes a response that nobody has to wait for.
async fn make(mut place: Place, queue: Arc<Queue>, record: Arc<Record>) {
    let mut shape = Kept(Arc::clone(&record), None);
    let _hearing = place.ended_by(&record.cancel);
    loop {
        let (frames, last) = match place.next().await {
            // Cancelled: it stays as it was then.
            _ if record.over() => (Vec::new(), true),
            Some(News::Choice { choice, step }) => (shape.take(choice, step), false),
            Some(News::Done) => (shape.end(), true),
            Some(News::Failed(failure)) => (shape.fail(ApiError::from(failure).body()), true),
            Some(News::Interrupted) if queue.closed() => {
                // It is not over: the next process goes on with it, under the same id.
                record.put_off();
                (Vec::new(), true)
            }
            Some(News::Interrupted) => (shape.fail(send::stopping().body()), true),
            None => (shape.fail(send::lost().body()), true),
        };
        if last {
            // What is left is said once it is on the disk, so that nobody sees an end that a power
            // cut undoes; and with the whole stream.
            record.hold(frames);
            crate::server::shelf::conclude(&record).await;
            record.say(Vec::new(), true);
            return;
        }
        record.say(frames, false);
    }
}

fn not_found(id: &str, param: &str) -> ApiError {
    ApiError::not_found(param, "response", id)
}

fn find(door: &Door, id: &str) -> Result<Arc<Record>, ApiError> {
    // Until the model is there nobody knows what an earlier process kept.
    door.queue()?;
    door.shelf.get(id).ok_or_else(|| not_found(id, "id"))
}

/// A response that is over or made here. One that an earlier process left is being taken up, unless
/// it is another's.
async fn here(door: &Door, mut record: Arc<Record>) -> Result<Arc<Record>, ApiError> {
    for _ in 0..50 {
        if !record.elsewhere() {
            return Ok(record);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        record = find(door, &record.id)?;
    }
    Err(ApiError::plain(
        StatusCode::CONFLICT,
        "made_elsewhere",
        "The response is made by another server on this store, or waits for its model to be \
         served again.",
    ))
}

#[derive(Deserialize)]
pub(super) struct Retrieval {
    stream: Option<bool>,
    starting_after: Option<usize>,
}

pub(super) async fn retrieve(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
    Query(how): Query<Retrieval>,
) -> Result<Response, ApiError> {
    let mut record = find(&door, &id)?;
    if how.stream != Some(true) {
        if record.background && record.over() {
            // Nobody sees an end that a power cut undoes.
            record.ended().await;
        }
        return Ok(Json(record.response()).into_response());
    }
    if !record.background {
        return Err(ApiError::unsupported(
            "stream",
            "is honoured for responses made in the background alone",
        ));
    }
    record = here(&door, record).await?;
    let from = how
        .starting_after
        .map_or(0, |number| number.saturating_add(1));
    // Before there is one, what is kept can be heard already.
    let generator = door.queue.get().map(|queue| Arc::clone(queue.generator()));
    let heartbeat = door.options.heartbeat;
    Ok(send::follow(record, from, heartbeat, generator))
}

pub(super) async fn cancel(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let record = find(&door, &id)?;
    if !record.background {
        return Err(ApiError::invalid(
            "id",
            "not_background",
            "Only a response made in the background can be cancelled; others end with their connection.",
        ));
    }
    let record = here(&door, record).await?;
    if !record.over() {
        record.end();
        record.ended().await;
    }
    Ok(Json(record.response()))
}

pub(super) async fn delete(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    door.queue()?;
    let record = door.shelf.remove(&id).ok_or_else(|| not_found(&id, "id"))?;
    record.end();
    Ok(Json(
        json!({ "id": id, "object": "response", "deleted": true }),
    ))
}

pub(super) async fn input_items(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    find(&door, &id).map(|record| Json(record.input_items()))
}
