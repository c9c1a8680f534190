//! The URL forms of a hub, and the path that stands for its CDN.

mod bytes_path;

#[cfg(test)]
pub(super) use bytes_path::Asked;
#[cfg(test)]
pub(super) use bytes_path::parse_range;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use axum::Json;
use axum::Router;
use axum::extract::Path;
use axum::extract::Query;
use axum::extract::Request;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::middleware;
use axum::middleware::Next;
use axum::response::IntoResponse;
use axum::response::Response;
use axum::routing::get;
use serde::Deserialize;
use serde_json::json;

use super::Backend;
use super::Counters;
use super::Entry;
use super::Listing;
use super::ShareOptions;
use super::guard::Secret;
use super::link::Pacer;
use crate::hub::PEER_HEADER;
use crate::terms::ByteRange;

/// How long a signed URL lives: as long as the hub's.
const URL_LIFE: Duration = Duration::from_secs(3600);

/// What every route shares.
struct Shared {
    /// Named in URLs where a request names no host.
    addr: SocketAddr,
    backend: Arc<dyn Backend>,
    token: Option<Secret>,
    /// Signs URLs of the second path, which carries no token.
    seal: Secret,
    counters: Arc<Counters>,
}

pub(super) fn app(
    addr: SocketAddr,
    backend: Arc<dyn Backend>,
    options: ShareOptions,
    counters: Arc<Counters>,
) -> std::io::Result<Router> {
    let shared = Arc::new(Shared {
        addr,
        backend,
        token: options.token,
        seal: Secret::random()?,
        counters,
    });
    let hub = Router::new()
        .route("/api/models/{org}/{name}", get(model_info))
        .route(
            "/api/models/{org}/{name}/revision/{rev}",
            get(revision_info),
        )
        .route("/api/models/{org}/{name}/tree/{rev}", get(tree))
        .route(
            "/api/models/{org}/{name}/tree/{rev}/{*folder}",
            get(tree_of),
        )
        .route("/{org}/{name}/resolve/{rev}/{*path}", get(resolve))
        .layer(middleware::from_fn_with_state(
            Arc::clone(&shared),
            ask_for_token,
        ));
    let mut app = hub
        .route("/cdn/{org}/{name}/{commit}/{*path}", get(bytes_path::send))
        .fallback(|| async {
            Refusal::plain(StatusCode::NOT_FOUND, "no such path on this share").into_response()
        })
        .with_state(shared);
    if let Some(link) = options.link {
        let pacer = Pacer::new(link);
        app = app.layer(middleware::from_fn(move |request: Request, next: Next| {
            Arc::clone(&pacer).shape(request, next)
        }));
    }
    Ok(app)
}

/// A reply that says no, as the hub words it.
struct Refusal {
    status: StatusCode,
    /// The hub's `X-Error-Code`, by which clients tell what is missing.
    code: Option<&'static str>,
    message: String,
    commit: Option<String>,
}

impl Refusal {
    fn plain(status: StatusCode, message: impl Into<String>) -> Refusal {
        Refusal {
            status,
            code: None,
            message: message.into(),
            commit: None,
        }
    }

    fn coded(code: &'static str, message: String) -> Refusal {
        Refusal {
            code: Some(code),
            ..Refusal::plain(StatusCode::NOT_FOUND, message)
        }
    }

    /// The file exists, and this store does not have these bytes of it: the client's next source may.
    fn not_yet(path: &str, range: ByteRange) -> Refusal {
        Refusal::coded(
            "EntryNotFound",
            format!("{path}: {range} are not on this share yet"),
        )
    }

    fn no_file(listing: &Listing, path: &str) -> Refusal {
        Refusal {
            commit: Some(listing.commit.to_string()),
            ..Refusal::coded(
                "EntryNotFound",
                format!("{} has no file {path}", listing.repo),
            )
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut reply = (self.status, Json(json!({ "error": self.message }))).into_response();
        let headers = reply.headers_mut();
        let mut put = |name: &'static str, text: &str| {
            // A file name may hold what no header may; the body has it anyway.
            if let Ok(value) = HeaderValue::from_str(text) {
                headers.insert(HeaderName::from_static(name), value);
            }
        };
        put("x-error-message", &self.message);
        if let Some(code) = self.code {
            put("x-error-code", code);
        }
        if let Some(commit) = self.commit {
            put("x-repo-commit", &commit);
        }
        reply
    }
}

async fn ask_for_token(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    match &shared.token {
        Some(token) if !token.admits(request.headers()) => Refusal::plain(
            StatusCode::UNAUTHORIZED,
            "Invalid credentials in Authorization header",
        )
        .into_response(),
        _ => next.run(request).await,
    }
}

impl Shared {
    fn listing(&self, org: &str, name: &str, revision: &str) -> Result<Arc<Listing>, Refusal> {
        let repo = format!("{org}/{name}");
        let models = self.backend.models();
        let mut of_repo = models
            .into_iter()
            .filter(|listing| listing.repo.as_str() == repo)
            .peekable();
        if of_repo.peek().is_none() {
            let message = format!("{repo} is not shared here");
            return Err(Refusal::coded("RepoNotFound", message));
        }
        of_repo
            .find(|listing| revision == "main" || listing.commit.as_str() == revision)
            .ok_or_else(|| {
                Refusal::coded("RevisionNotFound", format!("Invalid rev id: {revision}"))
            })
    }

    /// The base URL by which this client reached us, for absolute URLs.
    fn base(&self, headers: &HeaderMap) -> String {
        let host = headers
            .get(header::HOST)
            .and_then(|host| host.to_str().ok())
            .filter(|host| {
                let plain = |b: u8| b.is_ascii_alphanumeric() || b".-:[]".contains(&b);
                !host.is_empty() && host.bytes().all(plain)
            });
        match host {
            Some(host) => format!("http://{host}"),
            None => format!("http://{}", self.addr),
        }
    }
}

/// What every reply about a file states, on the first path and on the second: a client that
/// follows a redirect to the same origin reads its facts from the last reply.
fn facts(shared: &Shared, listing: &Listing, entry: &Entry) -> HeaderMap {
    let text = |text: String| HeaderValue::from_str(&text).expect("digits and quotes");
    let etag = text(format!("\"{}\"", entry.sha256));
    let mut headers = HeaderMap::new();
    let mut put = |name, value| headers.insert(HeaderName::from_static(name), value);
    put("x-repo-commit", text(listing.commit.to_string()));
    put("x-linked-size", text(entry.size.to_string()));
    put("x-linked-etag", etag.clone());
    put("etag", etag);
    put("accept-ranges", HeaderValue::from_static("bytes"));
    if shared.backend.is_peer() {
        put(PEER_HEADER, HeaderValue::from_static("1"));
    }
    headers
}

#[derive(Deserialize)]
struct InfoQuery {
    blobs: Option<String>,
}

async fn model_info(
    State(shared): State<Arc<Shared>>,
    Path((org, name)): Path<(String, String)>,
    Query(query): Query<InfoQuery>,
) -> Result<Response, Refusal> {
    info(&shared, &org, &name, "main", &query)
}

async fn revision_info(
    State(shared): State<Arc<Shared>>,
    Path((org, name, rev)): Path<(String, String, String)>,
    Query(query): Query<InfoQuery>,
) -> Result<Response, Refusal> {
    info(&shared, &org, &name, &rev, &query)
}

fn info(
    shared: &Shared,
    org: &str,
    name: &str,
    rev: &str,
    query: &InfoQuery,
) -> Result<Response, Refusal> {
    shared.counters.api.fetch_add(1, Ordering::Relaxed);
    let listing = shared.listing(org, name, rev)?;
    let blobs = query
        .blobs
        .as_deref()
        .is_some_and(|v| v.eq_ignore_ascii_case("true") || v == "1");
    let siblings: Vec<_> = listing
        .files
        .iter()
        .map(|(path, entry)| {
            if blobs {
                json!({ "rfilename": path, "size": entry.size, "blobId": oid(entry), "lfs": lfs(entry) })
            } else {
                json!({ "rfilename": path })
            }
        })
        .collect();
    let body = Json(json!({
        "_id": oid_of(listing.commit.as_str(), 24),
        "id": listing.repo, "modelId": listing.repo, "sha": listing.commit,
        "private": false, "gated": false, "disabled": false,
        "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
    }));
    let commit = [("x-repo-commit", listing.commit.to_string())];
    Ok((commit, body).into_response())
}

/// Stands where the hub has a git object's name. It is not one: nothing here is kept in git, and
/// clients check an LFS file by `lfs.oid`.
fn oid(entry: &Entry) -> String {
    oid_of(&entry.sha256.to_string(), 40)
}

fn oid_of(digits: &str, len: usize) -> String {
    digits[..len.min(digits.len())].to_owned()
}

/// Every file is stated as an LFS file, the small ones too: the only kind whose sha256 a hub tells.
fn lfs(entry: &Entry) -> serde_json::Value {
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n",
        entry.sha256, entry.size
    );
    // `oid` in a tree, `sha256` in a model's information: one record serves both.
    json!({
        "oid": entry.sha256, "sha256": entry.sha256,
        "size": entry.size, "pointerSize": pointer.len(),
    })
}

#[derive(Deserialize)]
struct TreeQuery {
    recursive: Option<String>,
}

async fn tree(
    State(shared): State<Arc<Shared>>,
    Path((org, name, rev)): Path<(String, String, String)>,
    Query(query): Query<TreeQuery>,
) -> Result<Response, Refusal> {
    list(&shared, (&org, &name, &rev), "", &query)
}

async fn tree_of(
    State(shared): State<Arc<Shared>>,
    Path((org, name, rev, folder)): Path<(String, String, String, String)>,
    Query(query): Query<TreeQuery>,
) -> Result<Response, Refusal> {
    list(&shared, (&org, &name, &rev), &format!("{folder}/"), &query)
}

fn list(
    shared: &Shared,
    (org, name, rev): (&str, &str, &str),
    prefix: &str,
    query: &TreeQuery,
) -> Result<Response, Refusal> {
    shared.counters.api.fetch_add(1, Ordering::Relaxed);
    let listing = shared.listing(org, name, rev)?;
    let recursive = query
        .recursive
        .as_deref()
        .is_some_and(|v| v.eq_ignore_ascii_case("true") || v == "1");
    let mut records = Vec::new();
    let mut last_folder = None;
    for (path, entry) in &listing.files {
        let Some(rest) = path.strip_prefix(prefix) else {
            continue;
        };
        match rest.split_once('/') {
            Some((folder, _)) if !recursive => {
                // Paths are sorted, so a folder's files stand together.
                if last_folder != Some(folder) {
                    last_folder = Some(folder);
                    records.push(json!({
                        "type": "directory", "path": format!("{prefix}{folder}"),
                        "oid": oid_of(listing.commit.as_str(), 40), "size": 0,
                    }));
                }
            }
            _ => records.push(json!({
                "type": "file", "path": path, "size": entry.size,
                "oid": oid(entry), "lfs": lfs(entry),
            })),
        }
    }
    if records.is_empty() && !prefix.is_empty() {
        return Err(Refusal::no_file(&listing, prefix.trim_end_matches('/')));
    }
    let commit = [("x-repo-commit", listing.commit.to_string())];
    Ok((commit, Json(records)).into_response())
}

/// HEAD and GET alike: the facts, and where the bytes are.
async fn resolve(
    State(shared): State<Arc<Shared>>,
    Path((org, name, rev, path)): Path<(String, String, String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    shared.counters.resolves.fetch_add(1, Ordering::Relaxed);
    let listing = shared.listing(&org, &name, &rev)?;
    let entry = listing
        .files
        .get(&path)
        .ok_or_else(|| Refusal::no_file(&listing, &path))?;
    let expires = unix_now() + URL_LIFE.as_secs();
    let target = format!("/cdn/{}/{}/{}", listing.repo, listing.commit, escape(&path));
    let signature = shared.seal.sign(&format!("{target}?{expires}"));
    let location = format!(
        "{}{target}?Expires={expires}&Signature={signature}",
        shared.base(&headers)
    );
    let location = HeaderValue::from_str(&location).expect("escaped and digits");
    let mut reply = (
        StatusCode::FOUND,
        facts(&shared, &listing, entry),
        "Found\n",
    )
        .into_response();
    reply.headers_mut().insert(header::LOCATION, location);
    Ok(reply)
}

fn unix_now() -> u64 {
    // A clock before 1970 makes URLs that are long valid, which harms nobody.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A path for a URL: everything but letters, digits, `-._~` and the slashes as `%XX`.
fn escape(path: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            write!(out, "%{byte:02X}").expect("a String takes all");
        }
    }
    out
}
