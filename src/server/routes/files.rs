//! `/v1/files`: uploaded, listed, looked up, downloaded, deleted.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::io::Write;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::Query;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use bytes::Bytes;
use serde_json::Value;
use serde_json::json;

use super::multipart::Form;
use super::multipart::too_large;
use crate::jobs::JobError;
use crate::server::Door;
use crate::server::batches::Kept;
use crate::server::error::ApiError;
use crate::server::files;
use crate::server::files::Purpose;
use crate::server::files::Upload;
use crate::server::params::wrong_value;

/// What a form may have beside its file.
const FORM_MAX: u64 = 64 << 10;
/// Bytes of a field that is no file.
const FIELD_MAX: usize = 256;
/// Bytes written, or read, at a time.
const PIECE: usize = 1 << 18;
/// Files of one list, at most, as OpenAI has it.
const LIST_MAX: usize = 10_000;

/// What is kept, and a model to answer batches with: a batch is for the model that is served.
pub(super) fn kept(door: &Door) -> Result<&Arc<Kept>, ApiError> {
    door.queue()?;
    door.kept.get().ok_or_else(|| {
        let message = "This server keeps no files.";
        ApiError::plain(StatusCode::NOT_IMPLEMENTED, "not_kept", message)
    })
}

/// Does what waits for the disk where nobody else waits for it.
pub(super) async fn aside<T: Send + 'static>(
    door: &Arc<Door>,
    what: impl FnOnce(&Kept) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let kept = Arc::clone(kept(door)?);
    let done = tokio::task::spawn_blocking(move || what(&kept)).await;
    done.map_err(|_| {
        let message = "What was asked of the disk failed; the reason is in the server's log.";
        ApiError::plain(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    })
}

pub(super) fn disk(error: &JobError) -> ApiError {
    let hint = error.hint().unwrap_or_default();
    let message = format!("It cannot be kept: {error}. {hint}");
    ApiError::plain(
        StatusCode::INSUFFICIENT_STORAGE,
        "insufficient_storage",
        message,
    )
}

pub(super) async fn create(
    State(door): State<Arc<Door>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let most = door.options.file_max;
    let stored = aside(&door, |kept| kept.files.bytes()).await?;
    let room = door.options.files_max.saturating_sub(stored);
    let mut form = Form::new(&headers, body, most.saturating_add(FORM_MAX))?;
    let mut purpose = None;
    let mut file = None;
    while let Some(part) = form.next().await? {
        match part.name.as_str() {
            "purpose" => purpose = Some(form.text(&part, FIELD_MAX).await?),
            "file" if file.is_none() => {
                let upload = aside(&door, |kept| kept.files.begin()).await?;
                let upload = upload.map_err(|error| disk(&error))?;
                let upload = receive(&mut form, upload, most, room).await?;
                file = Some((part.filename, upload));
            }
            name => {
                return Err(ApiError::unsupported(
                    name,
                    "is not honoured: a file is 'file' and 'purpose'",
                ));
            }
        }
    }
    match purpose.as_deref() {
        Some("batch") => {}
        Some(_) => {
            return Err(wrong_value(
                "purpose",
                "files serve batches here: it must be 'batch'",
            ));
        }
        None => return Err(missing("purpose")),
    }
    let (filename, upload) = file.ok_or_else(|| missing("file"))?;
    let filename = filename.unwrap_or_else(|| "upload".to_owned());
    let made = tokio::task::spawn_blocking(move || {
        upload.finish(&files::fresh_file_id(), &filename, Purpose::Batch)
    });
    let made = made.await.map_err(|_| crate::server::send::lost())?;
    made.map(|about| Json(about.json()))
        .map_err(|error| disk(&error))
}

/// Takes in a file's content. What is not whole is removed with `upload`.
async fn receive(
    form: &mut Form,
    mut upload: Upload,
    most: u64,
    room: u64,
) -> Result<Upload, ApiError> {
    let mut piece = Vec::new();
    loop {
        let chunk = form.chunk().await?;
        let over = chunk.is_none();
        piece.extend_from_slice(&chunk.unwrap_or_default());
        let bytes = upload.bytes() + piece.len() as u64;
        if bytes > most {
            return Err(too_large(most));
        }
        if bytes > room {
            return Err(ApiError::plain(
                StatusCode::INSUFFICIENT_STORAGE,
                "insufficient_storage",
                "The files that are kept leave no room for this one; delete some.",
            ));
        }
        if piece.len() >= PIECE || over {
            let full = std::mem::take(&mut piece);
            let written = tokio::task::spawn_blocking(move || {
                let written = upload.write_all(&full);
                (upload, written)
            });
            let (back, written) = written.await.map_err(|_| crate::server::send::lost())?;
            upload = back;
            written.map_err(|error| {
                let message = format!("The file cannot be kept: {error}.");
                ApiError::plain(
                    StatusCode::INSUFFICIENT_STORAGE,
                    "insufficient_storage",
                    message,
                )
            })?;
        }
        if over {
            return Ok(upload);
        }
    }
}

pub(super) fn missing(name: &str) -> ApiError {
    let message = format!("Missing required parameter: '{name}'.");
    ApiError::invalid(name, "missing_required_parameter", message)
}

fn not_found(id: &str) -> ApiError {
    ApiError::not_found("id", "file", id)
}

pub(super) async fn list(
    State(door): State<Arc<Door>>,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let paging = Paging::read(&query, LIST_MAX, LIST_MAX)?;
    // Of a purpose that is not known here there is no file.
    let purpose = query.get("purpose").map(|name| Purpose::named(name));
    let files = aside(&door, |kept| kept.files.list()).await?;
    let files = files
        .into_iter()
        .filter(|file| purpose.is_none_or(|purpose| purpose == Some(file.purpose)));
    let files: Vec<_> = files.map(|file| (file.id.clone(), file.json())).collect();
    paging.page(files, "file").map(Json)
}

pub(super) async fn retrieve(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let own = id.clone();
    let found = aside(&door, move |kept| kept.files.get(&own)).await?;
    found
        .map(|about| Json(about.json()))
        .ok_or_else(|| not_found(&id))
}

pub(super) async fn delete(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let own = id.clone();
    let removed = aside(&door, move |kept| kept.files.remove(&own)).await?;
    if !removed.map_err(|error| disk(&error))? {
        return Err(not_found(&id));
    }
    Ok(Json(json!({ "id": id, "object": "file", "deleted": true })))
}

pub(super) async fn content(
    State(door): State<Arc<Door>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let own = id.clone();
    let found = aside(&door, move |kept| {
        Some((kept.files.get(&own)?, kept.files.content(&own)?))
    });
    let (about, file) = found.await?.ok_or_else(|| not_found(&id))?;
    let pieces = futures_util::stream::unfold(Some(file), |file| async move {
        let read = tokio::task::spawn_blocking(move || file.map(piece)).await;
        match read {
            Ok(Some((file, Ok(bytes)))) if !bytes.is_empty() => Some((Ok(bytes), Some(file))),
            Ok(Some((_, Err(error)))) => Some((Err(error), None)),
            Err(_) => Some((Err(std::io::Error::other("the file was not read")), None)),
            Ok(_) => None,
        }
    });
    let mut reply = Body::from_stream(pieces).into_response();
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_LENGTH, about.bytes.into());
    // What a client has uploaded is never a page of this server's.
    let mut put = |name, value| headers.insert(name, HeaderValue::from_static(value));
    put(header::CONTENT_TYPE, "application/octet-stream");
    put(header::CONTENT_DISPOSITION, "attachment");
    put(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    Ok(reply)
}

fn piece(mut file: File) -> (File, std::io::Result<Bytes>) {
    let mut bytes = vec![0; PIECE];
    let read = file.read(&mut bytes);
    let read = read.map(|n| {
        bytes.truncate(n);
        Bytes::from(bytes)
    });
    (file, read)
}

/// Which part of a list is asked for.
pub(super) struct Paging {
    after: Option<String>,
    limit: usize,
    oldest_first: bool,
}

impl Paging {
    /// Reads `after`, `limit` and `order`.
    ///
    /// # Errors
    ///
    /// 400 where one has no value it can have.
    pub(super) fn read(
        query: &HashMap<String, String>,
        limit: usize,
        most: usize,
    ) -> Result<Paging, ApiError> {
        let limit = match query.get("limit") {
            None => limit,
            Some(text) => {
                let limit = text.parse().ok().filter(|n| (1..=most).contains(n));
                let wrong = || wrong_value("limit", &format!("must be from 1 to {most}"));
                limit.ok_or_else(wrong)?
            }
        };
        let oldest_first = match query.get("order").map(String::as_str) {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => return Err(wrong_value("order", "must be 'asc' or 'desc'")),
        };
        Ok(Paging {
            after: query.get("after").cloned(),
            limit,
            oldest_first,
        })
    }

    /// OpenAI's list of these, which come with their ids, the newest first.
    ///
    /// # Errors
    ///
    /// 404 where the one to begin after is not among them.
    pub(super) fn page(
        &self,
        mut all: Vec<(String, Value)>,
        what: &str,
    ) -> Result<Value, ApiError> {
        if self.oldest_first {
            all.reverse();
        }
        let from = match &self.after {
            None => 0,
            Some(after) => {
                let at = all.iter().position(|(id, _)| id == after);
                at.ok_or_else(|| ApiError::not_found("after", what, after))? + 1
            }
        };
        let has_more = all.len() > from + self.limit;
        let page = all.into_iter().skip(from).take(self.limit);
        let (ids, data): (Vec<_>, Vec<_>) = page.unzip();
        Ok(json!({
            "object": "list", "data": data, "first_id": ids.first(), "last_id": ids.last(),
            "has_more": has_more,
        }))
    }
}
