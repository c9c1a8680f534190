//! The path that stands for the CDN: signed URLs in, exact bytes out, in pieces.
//!
//! Pieces are read, neither mapped nor handed over by `sendfile`. A mapped file that is cut short by
//! damage ends the whole process at the page that is gone, where a read fails one reply; and the
//! socket that `sendfile` would need belongs to the HTTP library, whose limits on slow readers would
//! be lost. One copy of each byte is what that costs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::Path;
use axum::extract::Query;
use axum::extract::State;
use axum::extract::rejection::QueryRejection;
use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use serde::Deserialize;

use super::Refusal;
use super::Shared;
use super::escape;
use super::facts;
use super::unix_now;
use crate::share::Content;
use crate::terms::ByteRange;

/// Bytes read and sent at a time: what one connection holds in memory, however long its range.
const PIECE: u64 = 256 << 10;

#[derive(Deserialize)]
pub(super) struct Signed {
    #[serde(rename = "Expires")]
    expires: u64,
    #[serde(rename = "Signature")]
    signature: String,
}

pub(super) async fn send(
    State(shared): State<Arc<Shared>>,
    Path((org, name, commit, path)): Path<(String, String, String, String)>,
    signed: Result<Query<Signed>, QueryRejection>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    shared
        .counters
        .body_requests
        .fetch_add(1, Ordering::Relaxed);
    let no = |message: &str| Refusal::plain(StatusCode::FORBIDDEN, message);
    let Ok(Query(signed)) = signed else {
        return Err(no("the URL carries no signature"));
    };
    let target = format!("/cdn/{org}/{name}/{commit}/{}", escape(&path));
    let text = format!("{target}?{}", signed.expires);
    if !shared.seal.signed(&text, &signed.signature) {
        return Err(no("the URL's signature is wrong"));
    }
    if unix_now() > signed.expires {
        return Err(no("the URL has expired"));
    }
    let listing = shared.listing(&org, &name, &commit)?;
    let entry = listing
        .files
        .get(&path)
        .ok_or_else(|| Refusal::no_file(&listing, &path))?;
    let asked = asked_range(&method, &headers, &entry.sha256.to_string(), entry.size);
    let (status, range) = match asked {
        Asked::Whole => (StatusCode::OK, ByteRange::new(0, entry.size)),
        Asked::Part(range) => (StatusCode::PARTIAL_CONTENT, range),
        Asked::Beyond => {
            let range = [(header::CONTENT_RANGE, format!("bytes */{}", entry.size))];
            return Ok((StatusCode::RANGE_NOT_SATISFIABLE, range).into_response());
        }
    };
    let mut reply = (status, facts(&shared, &listing, entry)).into_response();
    let put = reply.headers_mut();
    put.insert(header::CONTENT_LENGTH, range.len().into());
    put.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    if status == StatusCode::PARTIAL_CONTENT {
        let text = format!("bytes {}-{}/{}", range.start, range.end - 1, entry.size);
        put.insert(
            header::CONTENT_RANGE,
            HeaderValue::from_str(&text).expect("digits"),
        );
    }
    if method == Method::HEAD {
        return Ok(reply);
    }
    let backend = Arc::clone(&shared.backend);
    let content = tokio::task::spawn_blocking(move || backend.open(&listing, &path))
        .await
        .map_err(|_| Refusal::plain(StatusCode::INTERNAL_SERVER_ERROR, "reading failed"))?
        .map_err(|error| Refusal::plain(StatusCode::SERVICE_UNAVAILABLE, error.to_string()))?;
    let ready = {
        let content = Arc::clone(&content);
        tokio::task::spawn_blocking(move || content.ready(range)).await
    };
    match ready {
        Ok(Ok(true)) => {}
        Ok(Ok(false)) => return Err(Refusal::not_yet(&target, range)),
        Ok(Err(error)) => {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Err(Refusal::plain(status, error.to_string()));
        }
        Err(_) => {
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            return Err(Refusal::plain(status, "reading failed"));
        }
    }
    *reply.body_mut() = pieces(shared, content, range);
    Ok(reply)
}

/// The bytes of `range`, read as the client takes them. A read that fails cuts the connection:
/// the promised length is missing, so no client takes the reply for whole.
fn pieces(shared: Arc<Shared>, content: Arc<dyn Content>, range: ByteRange) -> Body {
    let stream = futures_util::stream::try_unfold(range.start, move |at| {
        let content = Arc::clone(&content);
        let shared = Arc::clone(&shared);
        async move {
            let len = PIECE.min(range.end - at);
            if len == 0 {
                return Ok::<_, std::io::Error>(None);
            }
            let read = move || content.read(at, usize::try_from(len).expect("a piece is small"));
            let piece = tokio::task::spawn_blocking(read)
                .await
                .map_err(std::io::Error::other)??;
            shared.counters.body_bytes.fetch_add(len, Ordering::Relaxed);
            Ok(Some((piece, at + len)))
        }
    });
    Body::from_stream(stream)
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::share) enum Asked {
    /// No range, or one that a server may ignore.
    Whole,
    Part(ByteRange),
    /// Starts past the end.
    Beyond,
}

fn asked_range(method: &Method, headers: &HeaderMap, sha256: &str, size: u64) -> Asked {
    let range = headers.get(header::RANGE).and_then(|v| v.to_str().ok());
    let Some(range) = range.filter(|_| *method == Method::GET) else {
        return Asked::Whole;
    };
    // A condition on another version than ours asks for the whole of ours.
    let same = headers.get(header::IF_RANGE).is_none_or(|value| {
        value
            .to_str()
            .is_ok_and(|value| value.trim_matches('"') == sha256)
    });
    if same {
        parse_range(range, size)
    } else {
        Asked::Whole
    }
}

/// One range, `a-b`, `a-` or `-n`. Several at once are answered with the whole file, as a CDN may.
pub(in crate::share) fn parse_range(text: &str, size: u64) -> Asked {
    let number = |digits: &str| -> Option<u64> {
        // Digits alone: `parse` would also take a plus sign.
        (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
            // Too large for a u64 is past every end.
            .then(|| digits.parse().unwrap_or(u64::MAX))
    };
    let spec = match text.trim().split_once('=') {
        Some((unit, spec)) if unit.trim().eq_ignore_ascii_case("bytes") => spec.trim(),
        _ => return Asked::Whole,
    };
    let Some((first, last)) = spec.split_once('-') else {
        return Asked::Whole;
    };
    match (number(first), last, number(last)) {
        (Some(first), "", None) if first < size => Asked::Part(ByteRange::new(first, size)),
        (Some(first), _, Some(last)) if first > last => Asked::Whole,
        (Some(first), _, Some(last)) if first < size => {
            Asked::Part(ByteRange::new(first, last.saturating_add(1).min(size)))
        }
        (Some(_), "", None) | (Some(_), _, Some(_)) => Asked::Beyond,
        (None, _, Some(count)) if first.is_empty() => match count.min(size) {
            0 => Asked::Beyond,
            count => Asked::Part(ByteRange::new(size - count, size)),
        },
        _ => Asked::Whole,
    }
}
