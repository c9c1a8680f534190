//! Who may ask.

use std::sync::Arc;

use axum::extract::Request;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::header;
use axum::middleware::Next;
use axum::response::IntoResponse;
use axum::response::Response;

use super::Door;
use super::error::ApiError;

/// Turns away what a browser was tricked into sending, answers preflights, and marks replies for
/// the origins that may read them.
pub(super) async fn browser(
    State(door): State<Arc<Door>>,
    request: Request,
    next: Next,
) -> Response {
    if door.loopback && !names_loopback(request.headers()) {
        // A page whose own name was pointed at this machine: it would pass every other check.
        return forbidden(
            "host_not_allowed",
            "This server answers to loopback names only.",
        );
    }
    let origin = match origin(&door, request.headers()) {
        Ok(origin) => origin,
        Err(refused) => return *refused,
    };
    let preflight = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut reply = if preflight && origin.is_some() {
        let asked = request
            .headers()
            .get(header::ACCESS_CONTROL_REQUEST_HEADERS);
        let asked = asked
            .cloned()
            .unwrap_or(HeaderValue::from_static("authorization, content-type"));
        let methods = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
        let day = HeaderValue::from_static("86400");
        let headers = [
            (header::ACCESS_CONTROL_ALLOW_HEADERS, asked),
            (header::ACCESS_CONTROL_ALLOW_METHODS, methods),
            (header::ACCESS_CONTROL_MAX_AGE, day),
        ];
        (StatusCode::NO_CONTENT, headers).into_response()
    } else {
        next.run(request).await
    };
    if let Some(origin) = origin {
        let headers = reply.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    reply
}

fn forbidden(code: &'static str, message: &str) -> Response {
    ApiError::plain(StatusCode::FORBIDDEN, code, message).into_response()
}

/// Whether `Host` is a name of this machine for itself. A request without one is no browser's.
fn names_loopback(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else {
        return true;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.');
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

/// The foreign origin that may read the reply; `None` where there is none to tell.
fn origin(door: &Door, headers: &HeaderMap) -> Result<Option<HeaderValue>, Box<Response>> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(None);
    };
    let text = origin.to_str().unwrap_or_default();
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok());
    let own = text.split_once("://").map(|(_, authority)| authority);
    if own.is_some() && own == host {
        return Ok(None);
    }
    if door.options.origins.iter().any(|listed| listed == text) {
        return Ok(Some(origin.clone()));
    }
    Err(Box::new(forbidden(
        "origin_not_allowed",
        "Pages of this origin may not use this server.",
    )))
}

/// Asks for the key, where there is one.
pub(super) async fn key(State(door): State<Arc<Door>>, request: Request, next: Next) -> Response {
    match &door.options.api_key {
        Some(key) if !key.admits(request.headers()) => ApiError::plain(
            StatusCode::UNAUTHORIZED,
            "invalid_api_key",
            "Incorrect API key provided: send it as a bearer token.",
        )
        .into_response(),
        _ => next.run(request).await,
    }
}
