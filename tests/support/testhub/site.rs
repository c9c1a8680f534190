//! What is at which address: API, resolve, the cache of small files, the CDN.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use serde_json::Value;
use serde_json::json;
use sha1::Digest as _;

use super::Personality;
use super::State;
use super::data::Access;
use super::data::Repo;
use super::data::TestFile;
use super::data::hex;
use super::ledger::Listener;
use super::wire::Body;
use super::wire::Reply;
use super::wire::Request;
use super::wire::decode;

pub fn answer(state: &State, listener: Listener, request: &Request) -> Reply {
    let plain = matches!(
        state.config.personality,
        Personality::StaticNginx | Personality::StaticPython
    );
    let mut reply = match listener {
        Listener::Hub if plain => file_server(state, request),
        Listener::Hub => hub(state, request),
        Listener::Cdn | Listener::Other => cdn(state, request),
    };
    reply.set("Date", &http_date(state.clock.server()));
    if state.config.share {
        reply.set("X-Deltafin-Share", "1");
    }
    reply
}

fn hub(state: &State, request: &Request) -> Reply {
    let segments: Vec<&str> = request.segments.iter().map(String::as_str).collect();
    let resolve = segments.iter().position(|s| *s == "resolve");
    let (bucket, mut reply) = match (&segments[..], resolve) {
        (["api", "whoami-v2"], _) => ("api", whoami(request)),
        (
            [
                "api",
                "resolve-cache",
                "models",
                ns,
                name,
                commit,
                path @ ..,
            ],
            _,
        ) => (
            "resolvers",
            small_file(state, request, &format!("{ns}/{name}"), commit, path),
        ),
        (["api", "models", ns, name, rest @ ..], _) => {
            ("api", api(state, request, &format!("{ns}/{name}"), rest))
        }
        (_, Some(at)) if at >= 1 && segments.len() > at + 2 => {
            let repo = segments[..at].join("/");
            (
                "resolvers",
                resolve_file(state, request, &repo, segments[at + 1], &segments[at + 2..]),
            )
        }
        _ => ("pages", error(404, "", "Not found")),
    };
    reply
        .headers
        .push(("X-Request-Id".into(), "Root=1-test-request".into()));
    // Twice each, as the real one does.
    for value in ["a=1; Path=/", "b=2; Path=/"] {
        reply.headers.push(("Set-Cookie".into(), value.into()));
    }
    for value in ["1.1 edge", "1.1 origin"] {
        reply.headers.push(("Via".into(), value.into()));
    }
    limit(state, bucket, reply)
}

/// The rate limit's headers, or its refusal.
fn limit(state: &State, bucket: &'static str, mut reply: Reply) -> Reply {
    let quota = match bucket {
        "api" => state.config.quota.api,
        "resolvers" => state.config.quota.resolvers,
        _ => u64::MAX,
    };
    let now = state.clock.server();
    let used = {
        let mut windows = state.windows.lock().unwrap();
        let used = windows.entry((bucket, now / 300)).or_default();
        *used += 1;
        *used
    };
    let left = quota.saturating_sub(used);
    let reset = 300 - now % 300;
    if used > quota {
        reply =
            error(429, "", "We had to rate limit your IP").with("Retry-After", reset.to_string());
    }
    reply
        .with("RateLimit", format!("\"{bucket}\";r={left};t={reset}"))
        .with(
            "RateLimit-Policy",
            format!("\"fixed window\";\"{bucket}\";q={quota};w=300"),
        )
}

fn error(status: u16, code: &str, message: &str) -> Reply {
    let mut reply = Reply::new(status, json!({ "error": message }).to_string())
        .with("Content-Type", "application/json");
    if !code.is_empty() {
        reply = reply.with("X-Error-Code", code);
    }
    reply.with("X-Error-Message", message)
}

fn bearer(request: &Request) -> Option<&str> {
    request.header("authorization")?.strip_prefix("Bearer ")
}

fn whoami(request: &Request) -> Reply {
    match bearer(request) {
        Some(_) => json_reply(&json!({ "name": "tester", "type": "user" })),
        None => error(401, "", "Invalid username or password."),
    }
}

fn json_reply(value: &Value) -> Reply {
    Reply::new(200, value.to_string()).with("Content-Type", "application/json; charset=utf-8")
}

/// The repository, if this client may see it.
fn open(state: &State, request: &Request, name: &str) -> Result<Repo, Reply> {
    let token = bearer(request);
    if token == Some("bad") {
        return Err(error(
            401,
            "",
            "Invalid credentials in Authorization header",
        ));
    }
    let hidden = || match token {
        Some(_) => error(404, "RepoNotFound", "Repository not found"),
        None => error(401, "RepoNotFound", "Invalid username or password."),
    };
    let repos = state.repos.lock().unwrap();
    let Some(repo) = repos.get(name) else {
        return Err(hidden());
    };
    match &repo.access {
        Access::Public => Ok(repo.clone()),
        Access::Private(own) if token == Some(own) => Ok(repo.clone()),
        Access::Private(_) => Err(hidden()),
        Access::Gated(own) if token == Some(own) => Ok(repo.clone()),
        Access::Gated(_) => {
            let status = if token.is_some() { 403 } else { 401 };
            let text =
                format!("Access to model {name} is restricted. Visit its page to ask for it.");
            Err(error(status, "GatedRepo", &text))
        }
        Access::Disabled => Err(error(403, "", "Access to this resource is disabled.")),
    }
}

fn commit_of<'a>(repo: &'a Repo, revision: &str) -> Result<&'a String, Reply> {
    let name = if revision == "main" {
        &repo.main
    } else {
        revision
    };
    match repo.commits.get_key_value(name) {
        Some((commit, _)) => Ok(commit),
        None => Err(error(
            404,
            "RevisionNotFound",
            &format!("Invalid rev id: {revision}"),
        )),
    }
}

fn api(state: &State, request: &Request, name: &str, rest: &[&str]) -> Reply {
    let repo = match open(state, request, name) {
        Ok(repo) => repo,
        Err(reply) => return reply,
    };
    let revision = rest.get(1).copied().unwrap_or("main");
    let commit = match commit_of(&repo, revision) {
        Ok(commit) => commit.clone(),
        Err(reply) => return reply,
    };
    let files = &repo.commits[&commit];
    match rest {
        [] | ["revision", _] => {
            let siblings: Vec<Value> = files.keys().map(|f| json!({ "rfilename": f })).collect();
            json_reply(&json!({
                "_id": "0", "id": name, "modelId": name, "sha": commit, "private": false, "gated": false,
                "disabled": false, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
                "createdAt": "2026-01-01T00:00:00.000Z", "lastModified": "2026-01-01T00:00:00.000Z",
            }))
        }
        ["tree", _, ..] => tree(state, request, name, &commit, files),
        ["paths-info", _] => paths_info(request, files),
        ["xet-read-token", _] => json_reply(&json!({
            "accessToken": "xet", "exp": state.clock.server() + 3600, "casUrl": state.url(Listener::Cdn),
        })),
        _ => error(404, "", "Not found"),
    }
}

fn record(path: &str, file: &TestFile) -> Value {
    let mut record =
        json!({ "type": "file", "path": path, "size": file.size, "oid": file.git_sha1 });
    if file.lfs {
        record["lfs"] = json!({ "oid": file.sha256, "size": file.size, "pointerSize": 135 });
        record["xetHash"] = json!(file.sha256);
    }
    record
}

fn tree(
    state: &State,
    request: &Request,
    name: &str,
    commit: &str,
    files: &BTreeMap<String, TestFile>,
) -> Reply {
    let from: usize = request
        .param("cursor")
        .and_then(|c| c.parse().ok())
        .unwrap_or(0);
    let page: Vec<Value> = files
        .iter()
        .skip(from)
        .take(state.config.page)
        .map(|(path, file)| record(path, file))
        .collect();
    let next = from + page.len();
    let reply = json_reply(&Value::Array(page));
    if next >= files.len() {
        return reply;
    }
    let url = format!(
        "<{}/api/models/{name}/tree/{commit}?recursive=true&expand=false&cursor={next}>; rel=\"next\"",
        state.url(Listener::Hub)
    );
    reply.with("Link", url)
}

fn paths_info(request: &Request, files: &BTreeMap<String, TestFile>) -> Reply {
    let body = String::from_utf8_lossy(&request.body).into_owned();
    let form = request
        .header("content-type")
        .is_some_and(|t| t.contains("form"));
    let paths: Vec<String> = if form {
        let pairs = body.split('&').filter_map(|p| p.split_once('='));
        pairs
            .filter(|(key, _)| *key == "paths")
            .map(|(_, value)| decode(&value.replace('+', " ")))
            .collect()
    } else {
        let value: Value = serde_json::from_str(&body).unwrap_or_default();
        serde_json::from_value(value["paths"].clone()).unwrap_or_default()
    };
    let found = paths.iter().filter_map(|p| Some(record(p, files.get(p)?)));
    json_reply(&Value::Array(found.collect()))
}

fn resolve_file(
    state: &State,
    request: &Request,
    name: &str,
    revision: &str,
    path: &[&str],
) -> Reply {
    // Another spelling of the name is sent to the right one, without any tag.
    let canonical = {
        let repos = state.repos.lock().unwrap();
        repos.keys().find(|k| k.eq_ignore_ascii_case(name)).cloned()
    };
    if let Some(canonical) = canonical.filter(|c| c != name) {
        let to = format!(
            "/{canonical}/resolve/{revision}/{}",
            encode(&path.join("/"))
        );
        return Reply::new(307, "Temporary Redirect").with("Location", to);
    }
    let repo = match open(state, request, name) {
        Ok(repo) => repo,
        Err(reply) => return reply,
    };
    let commit = match commit_of(&repo, revision) {
        Ok(commit) => commit.clone(),
        Err(reply) => return reply,
    };
    let path = path.join("/");
    let Some(file) = repo.commits[&commit].get(&path) else {
        return error(404, "EntryNotFound", "Entry not found").with("X-Repo-Commit", commit);
    };
    let file = Arc::new(file.clone());
    let personality = state.config.personality;
    if personality == Personality::Olah {
        let reply = slice(request, &file, Some(file.etag()), false);
        return reply.with("X-Repo-Commit", commit);
    }
    if personality == Personality::HfMirror && request.param("second").is_none() {
        let to = format!("/{name}/resolve/{commit}/{}?second=1", encode(&path));
        let mut reply = Reply::new(307, "")
            .with("Location", to)
            .with("X-Repo-Commit", commit);
        reply.unmeasured = request.method == "HEAD";
        return reply;
    }
    if !file.lfs {
        let to = format!(
            "/api/resolve-cache/models/{name}/{commit}/{}?%2F=&etag=%22{}%22",
            encode(&path),
            file.git_sha1
        );
        return Reply::new(307, format!("Temporary Redirect. Redirecting to {to}"))
            .with("Location", to)
            .with("X-Repo-Commit", commit);
    }
    let to = signed(state, &format!("/bridge/{name}/{commit}/{path}"));
    let mut reply = Reply::new(302, format!("Found. Redirecting to {to}"))
        .with("Location", to)
        .with("X-Repo-Commit", commit.clone())
        .with("X-Linked-Size", file.size.to_string())
        .with("Accept-Ranges", "bytes")
        .with("ETag", "\"the-redirects-own\"")
        .with("Vary", "Origin, Accept");
    if personality != Personality::NoEtag {
        let xet = format!(
            "<{}/api/models/{name}/xet-read-token/{commit}>; rel=\"xet-auth\"",
            state.url(Listener::Hub)
        );
        reply = reply.with("X-Linked-ETag", format!("\"{}\"", file.sha256));
        if state.config.xet {
            reply = reply
                .with("X-Xet-Hash", file.sha256.clone())
                .with("Link", xet);
        }
    }
    reply.unmeasured = personality == Personality::HfMirror && request.method == "HEAD";
    reply
}

/// An address on the CDN that works for a while.
pub fn signed(state: &State, path: &str) -> String {
    let base = state.url(Listener::Cdn);
    if !state.config.signed {
        return format!("{base}{}", encode(path));
    }
    let expires = state.clock.server() + state.config.signature_lasts;
    format!(
        "{base}{}?Expires={expires}&Policy=eyJ0ZXN0IjoxfQ__&Signature={}&Key-Pair-Id=KTEST",
        encode(path),
        signature(state, path, expires)
    )
}

/// Percent-encodes everything a path segment may not hold.
fn encode(path: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    path.bytes()
        .map(|b| {
            if plain(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

fn signature(state: &State, path: &str, expires: u64) -> String {
    let key = state.key.load(SeqCst);
    hex(&sha2::Sha256::digest(format!("{key}|{path}|{expires}")))
}

fn small_file(state: &State, request: &Request, name: &str, commit: &str, path: &[&str]) -> Reply {
    let repo = match open(state, request, name) {
        Ok(repo) => repo,
        Err(reply) => return reply,
    };
    let Some(file) = repo
        .commits
        .get(commit)
        .and_then(|files| files.get(&path.join("/")))
    else {
        return error(404, "EntryNotFound", "Entry not found");
    };
    let file = Arc::new(file.clone());
    let zip = request
        .header("accept-encoding")
        .is_some_and(|e| e.contains("gzip"));
    let mut reply = if zip {
        let length = usize::try_from(file.size).unwrap();
        let mut reply = Reply::new(200, gzip(&file.content.read(0, length)))
            .with("ETag", format!("W/\"{}\"", file.git_sha1))
            .with("Content-Encoding", "gzip");
        reply.chunked = true;
        reply
    } else {
        slice(request, &file, Some(file.git_sha1.clone()), false)
    };
    reply.set("X-Repo-Commit", commit);
    reply.unmeasured =
        state.config.personality == Personality::HfMirror && request.method == "HEAD";
    reply
}

fn cdn(state: &State, request: &Request) -> Reply {
    if request.header("authorization").is_some() {
        let text = "<Error><Code>InvalidArgument</Code><Message>Only one auth mechanism allowed</Message></Error>";
        return Reply::new(400, text).with("Content-Type", "application/xml");
    }
    if state.config.signed {
        let expires: u64 = request
            .param("Expires")
            .and_then(|e| e.parse().ok())
            .unwrap_or(0);
        let right = signature(state, &request.path, expires);
        let given = request.param("Signature");
        if given.as_deref() != Some(&right) {
            return Reply::new(403, "<Error><Code>SignatureDoesNotMatch</Code></Error>");
        }
        if expires < state.clock.server() {
            return Reply::new(
                403,
                "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
            );
        }
    }
    let segments: Vec<&str> = request.segments.iter().map(String::as_str).collect();
    let ["bridge", ns, name, commit, path @ ..] = &segments[..] else {
        return Reply::new(404, "no such object");
    };
    let repos = state.repos.lock().unwrap();
    let commits = repos.get(&format!("{ns}/{name}")).map(|r| &r.commits);
    let Some(file) = commits
        .and_then(|c| c.get(*commit))
        .and_then(|f| f.get(&path.join("/")))
    else {
        return Reply::new(404, "no such object");
    };
    let file = Arc::new(file.clone());
    drop(repos);
    let tag = (state.config.personality != Personality::NoEtag).then(|| file.sha256.clone());
    let quirk = state.config.personality == Personality::ModelScope;
    slice(request, &file, tag, quirk)
        .with("Cache-Control", "public, max-age=31536000, immutable")
        .with("X-Cache", "Hit from cloudfront")
}

/// A file or the part of it that Range asks for.
fn slice(request: &Request, file: &Arc<TestFile>, tag: Option<String>, as_200: bool) -> Reply {
    let size = file.size;
    let mut reply = Reply::new(200, "");
    reply.body = Body::File(Arc::clone(file), 0, size);
    reply.set("Accept-Ranges", "bytes");
    reply.set("Content-Type", "application/octet-stream");
    let tag = tag.map(|tag| format!("\"{tag}\""));
    if let Some(tag) = &tag {
        reply.set("ETag", tag);
    }
    let Some(range) = request.range() else {
        return reply;
    };
    // Compression would have to be of the whole file, so the range is dropped.
    let zip = request
        .header("accept-encoding")
        .is_some_and(|e| e.contains("gzip"));
    let stale = request
        .header("if-range")
        .is_some_and(|r| Some(r) != tag.as_deref());
    if (zip && !file.lfs) || stale {
        return reply;
    }
    let (first, last) = match (range.first, range.last) {
        (Some(first), last) => (first, last.unwrap_or(u64::MAX).min(size.saturating_sub(1))),
        (None, Some(suffix)) => (size.saturating_sub(suffix), size.saturating_sub(1)),
        (None, None) => return reply,
    };
    if first >= size {
        let mut reply = Reply::new(416, "");
        reply.set("Content-Range", &format!("bytes */{size}"));
        return reply;
    }
    reply.status = if as_200 { 200 } else { 206 };
    reply.set("Content-Range", &format!("bytes {first}-{last}/{size}"));
    reply.body = Body::File(Arc::clone(file), first, last + 1);
    reply
}

/// Every file of the first repository at its plain path.
fn file_server(state: &State, request: &Request) -> Reply {
    let repos = state.repos.lock().unwrap();
    let repo = repos.values().next().unwrap();
    let Some(file) = repo.commits[&repo.main].get(&request.segments.join("/")) else {
        return Reply::new(404, "<html><body>404 Not Found</body></html>");
    };
    let file = Arc::new(file.clone());
    drop(repos);
    if state.config.personality == Personality::StaticPython {
        let mut reply = Reply::new(200, "");
        reply.body = Body::File(Arc::clone(&file), 0, file.size);
        return reply;
    }
    slice(request, &file, Some(format!("6564-{:x}", file.size)), false)
}

/// gzip without compression: stored blocks.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let mut blocks = bytes.chunks(65_535).peekable();
    if blocks.peek().is_none() {
        out.extend([1, 0, 0, 255, 255]);
    }
    while let Some(block) = blocks.next() {
        let length = u16::try_from(block.len()).unwrap();
        out.push(u8::from(blocks.peek().is_none()));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(block);
    }
    let crc = bytes.iter().fold(!0u32, |mut crc, byte| {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (!(crc & 1)).wrapping_add(1));
        }
        crc
    });
    out.extend((!crc).to_le_bytes());
    out.extend(u32::try_from(bytes.len()).unwrap().to_le_bytes());
    out
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`.
pub fn http_date(unix: u64) -> String {
    let days = unix / 86_400;
    let weekday =
        ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][usize::try_from(days % 7).unwrap()];
    let (mut year, mut left) = (1970, days);
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let months = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let names = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let mut month = 0;
    while left >= months[month] {
        left -= months[month];
        month += 1;
    }
    let s = unix % 86_400;
    format!(
        "{weekday}, {:02} {} {year} {:02}:{:02}:{:02} GMT",
        left + 1,
        &names[month * 3..month * 3 + 3],
        s / 3600,
        s / 60 % 60,
        s % 60
    )
}
