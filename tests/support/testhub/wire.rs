//! HTTP/1.1 by hand, since a library would not let a server misbehave.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::State;
use super::data::TestFile;
use super::fault::Fault;
use super::ledger::Listener;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path segments, decoded one by one (`%2F` stays inside its segment).
    pub segments: Vec<String>,
    pub path: String,
    pub query: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// One `Range`, as asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub first: Option<u64>,
    pub last: Option<u64>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    /// `None` without a range, and for several at once.
    pub fn range(&self) -> Option<Asked> {
        let spec = self.header("range")?.strip_prefix("bytes=")?;
        let (first, last) = spec.split_once('-')?;
        if spec.contains(',') {
            return None;
        }
        Some(Asked {
            first: first.parse().ok(),
            last: last.parse().ok(),
        })
    }

    pub fn param(&self, name: &str) -> Option<String> {
        let pairs = self.query.split('&').filter_map(|p| p.split_once('='));
        let mut found = pairs.filter(|(key, _)| *key == name);
        found.next().map(|(_, value)| decode(value))
    }

    pub async fn read(stream: &mut TcpStream, kept: &mut Vec<u8>) -> io::Result<Option<Request>> {
        let end = loop {
            if let Some(at) = kept.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if kept.len() > 64 << 10 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if stream.read_buf(kept).await? == 0 {
                return Ok(None);
            }
        };
        let head = String::from_utf8_lossy(&kept[..end]).into_owned();
        kept.drain(..end);
        let mut lines = head.lines();
        let mut first = lines.next().unwrap_or("").split(' ');
        let method = first.next().unwrap_or("").to_owned();
        let mut target = first.next().unwrap_or("").to_owned();
        // A proxy is asked for whole addresses; a hub behind it answers all the same.
        if let Some(rest) = target.strip_prefix("http://") {
            target = rest.find('/').map_or("/", |at| &rest[at..]).to_owned();
        }
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()))
            .collect();
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let segments: Vec<String> = path.split('/').skip(1).map(decode).collect();
        let length = headers.iter().find(|(n, _)| n == "content-length");
        let length: usize = length.and_then(|(_, v)| v.parse().ok()).unwrap_or(0);
        while kept.len() < length.min(1 << 20) {
            if stream.read_buf(kept).await? == 0 {
                return Ok(None);
            }
        }
        let body = kept.drain(..length.min(kept.len())).collect();
        Ok(Some(Request {
            method,
            path: format!("/{}", segments.join("/")),
            segments,
            query: query.to_owned(),
            headers,
            body,
        }))
    }
}

pub fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        let hex = text
            .get(i + 1..i + 3)
            .and_then(|h| u8::from_str_radix(h, 16).ok());
        match (bytes[i], hex) {
            (b'%', Some(byte)) => {
                out.push(byte);
                i += 3;
            }
            (byte, _) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A body not yet read.
#[derive(Clone, Debug)]
pub enum Body {
    Bytes(Vec<u8>),
    File(Arc<TestFile>, u64, u64),
}

impl Body {
    pub fn len(&self) -> u64 {
        match self {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::File(_, start, end) => end - start,
        }
    }

    fn read(&self, at: u64, length: usize, shift: i64) -> Vec<u8> {
        match self {
            Body::Bytes(bytes) => {
                let at = usize::try_from(at).unwrap();
                bytes[at..at + length].to_vec()
            }
            Body::File(file, start, _) => {
                let from = (start + at).saturating_add_signed(shift);
                let there = file.size.saturating_sub(from).min(length as u64);
                let mut bytes = file.content.read(from, usize::try_from(there).unwrap());
                bytes.resize(length, 0);
                bytes
            }
        }
    }
}

/// A reply as it should be, before faults.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Body,
    /// No Content-Length, as some mirrors answer a HEAD.
    pub unmeasured: bool,
    pub chunked: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Reply {
            status,
            headers: Vec::new(),
            body: Body::Bytes(body.into()),
            unmeasured: false,
            chunked: false,
        }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub fn set(&mut self, name: &str, value: &str) {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        if !value.is_empty() {
            self.headers.push((name.to_owned(), value.to_owned()));
        }
    }
}

enum End {
    Keep,
    Hold,
    Reset,
    Close,
}

/// How a reply goes out.
struct Plan {
    stop: Option<u64>,
    end: End,
    /// What Content-Length says; `None` for no such header.
    declared: Option<u64>,
    chunked: bool,
    extra: u64,
    shift: i64,
    flip: Option<u64>,
    zeros: Option<u64>,
    drip: Option<(usize, Duration)>,
    rate: Option<u64>,
}

/// What a reply is to.
pub struct Outgoing<'a> {
    pub listener: Listener,
    pub request: &'a Request,
    pub fault: Option<Fault>,
    /// Its place in the ledger.
    pub entry: usize,
    /// Bytes a second on this connection.
    pub own: Option<u64>,
}

/// Sends `reply`, as the fault has it. Whether the connection may be used again.
pub async fn send(
    state: &State,
    stream: &mut TcpStream,
    mut reply: Reply,
    out: Outgoing<'_>,
) -> io::Result<bool> {
    let Outgoing {
        listener,
        request,
        fault,
        entry,
        own,
    } = out;
    let mut plan = Plan {
        stop: None,
        end: End::Keep,
        declared: Some(reply.body.len()),
        chunked: reply.chunked,
        extra: 0,
        shift: 0,
        flip: None,
        zeros: None,
        drip: None,
        rate: own,
    };
    state.wait_latency().await;
    if let Some(fault) = fault {
        match fault {
            Fault::Hang => return hold(stream).await,
            Fault::Vanish => return Ok(false),
            Fault::Garbage(bytes) => {
                stream.write_all(&bytes).await?;
                stream.shutdown().await?;
                return Ok(false);
            }
            Fault::DelayMs(ms) => sleep(Duration::from_millis(ms)).await,
            fault => disturb(fault, request, &mut reply, &mut plan),
        }
    }
    if request.header("connection") == Some("close") && matches!(plan.end, End::Keep) {
        reply.set("Connection", "close");
        plan.end = End::Close;
    }
    if plan.chunked {
        plan.declared = None;
        reply.set("Transfer-Encoding", "chunked");
    } else if plan.declared.is_none() {
        reply.set("Connection", "close");
        if matches!(plan.end, End::Keep) {
            plan.end = End::Close;
        }
    }
    if let (Some(length), false) = (plan.declared, reply.unmeasured) {
        let own = reply
            .headers
            .iter()
            .any(|(n, _)| n.eq_ignore_ascii_case("content-length"));
        if !own {
            reply.set("Content-Length", &length.to_string());
        }
    }
    state.enter(entry, reply.status);
    let mut head = format!("HTTP/1.1 {} {}\r\n", reply.status, reason(reply.status));
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await?;
    if request.method != "HEAD" && reply.status != 304 {
        send_body(state, stream, listener, &reply.body, &plan, entry).await?;
    }
    state.finish(entry);
    match plan.end {
        End::Keep => Ok(true),
        End::Hold => hold(stream).await,
        End::Close => {
            stream.shutdown().await?;
            Ok(false)
        }
        End::Reset => {
            stream.set_zero_linger()?;
            Ok(false)
        }
    }
}

/// Changes reply and plan as the fault has it.
fn disturb(fault: Fault, request: &Request, reply: &mut Reply, plan: &mut Plan) {
    let whole = |reply: &mut Reply| {
        if let Body::File(file, ..) = &reply.body {
            reply.body = Body::File(Arc::clone(file), 0, file.size);
        }
    };
    let mut stop = |at: u64, end: End| {
        plan.stop = Some(at);
        plan.end = end;
    };
    match fault {
        Fault::StallAfter(at) => stop(at, End::Hold),
        Fault::ResetAfter(at) => stop(at, End::Reset),
        Fault::CutAfter(at) => stop(at, End::Close),
        Fault::CutUndeclared(at) => {
            stop(at, End::Close);
            plan.declared = None;
        }
        Fault::CutChunked(at) => {
            stop(at, End::Close);
            plan.chunked = true;
        }
        Fault::Chunked => plan.chunked = true,
        Fault::Undeclared => plan.declared = None,
        Fault::ExtraDeclared(n) => {
            plan.extra = n;
            plan.declared = plan.declared.map(|d| d + n);
        }
        Fault::ExtraUndeclared(n) => {
            plan.extra = n;
            plan.chunked = true;
        }
        Fault::FlipBit(at) => plan.flip = Some(at),
        Fault::Zeros(at) => plan.zeros = Some(at),
        Fault::Shift(by) => plan.shift = by,
        Fault::WholeFile => {
            whole(reply);
            reply.status = 200;
            reply.set("Content-Range", "");
            plan.declared = Some(reply.body.len());
        }
        Fault::SliceAs200 => reply.status = 200,
        Fault::ContentRange(value) => reply.set("Content-Range", &value),
        Fault::Status(status, headers, body) => {
            reply.status = status;
            reply.headers.retain(|(name, _)| name == "Date");
            for (name, value) in headers {
                reply.set(&name, &value);
            }
            reply.body = Body::Bytes(body.into_bytes());
            plan.declared = Some(reply.body.len());
        }
        Fault::Redirect(status, to) => {
            reply.status = status;
            reply.headers.clear();
            if !to.is_empty() || request.method == "HEAD" {
                reply.headers.push(("Location".to_owned(), to));
            }
            reply.body = Body::Bytes(b"moved".to_vec());
            plan.declared = Some(5);
        }
        Fault::Header(name, value) => reply.set(&name, &value),
        Fault::Drip(bytes, ms) => plan.drip = Some((bytes, Duration::from_millis(ms))),
        Fault::Rate(rate) => plan.rate = Some(rate),
        Fault::CloseAfter => plan.end = End::Close,
        Fault::HeaderBomb(count, size) => {
            for i in 0..count {
                let value = "x".repeat(size);
                reply.headers.push((format!("X-Bomb-{i}"), value));
            }
        }
        Fault::Gzip => reply.set("Content-Encoding", "gzip"),
        Fault::Hang | Fault::DelayMs(_) | Fault::Vanish | Fault::Garbage(_) => {}
    }
}

async fn send_body(
    state: &State,
    stream: &mut TcpStream,
    listener: Listener,
    body: &Body,
    plan: &Plan,
    entry: usize,
) -> io::Result<()> {
    let length = body.len();
    let stop = plan.stop.unwrap_or(u64::MAX).min(length);
    let mut at = 0;
    while at < stop {
        let most = match plan.drip {
            Some((bytes, _)) => bytes as u64,
            None => state.piece(listener, plan.rate),
        };
        let n = most.min(stop - at);
        let mut bytes = body.read(at, usize::try_from(n).unwrap(), plan.shift);
        spoil(&mut bytes, at, plan);
        state.pace(listener, n, plan.rate).await;
        write_piece(stream, &bytes, plan.chunked).await?;
        state.sent(entry, n);
        at += n;
        if let Some((_, pause)) = plan.drip {
            sleep(pause).await;
        }
    }
    if plan.stop.is_none() {
        if plan.extra > 0 {
            let extra = vec![b'x'; usize::try_from(plan.extra).unwrap()];
            write_piece(stream, &extra, plan.chunked).await?;
        }
        if plan.chunked {
            stream.write_all(b"0\r\n\r\n").await?;
        }
    }
    stream.flush().await
}

fn spoil(bytes: &mut [u8], at: u64, plan: &Plan) {
    let length = bytes.len() as u64;
    if let Some(flip) = plan.flip.filter(|f| (at..at + length).contains(f)) {
        bytes[usize::try_from(flip - at).unwrap()] ^= 4;
    }
    if let Some(from) = plan.zeros {
        let start = from.max(at);
        let end = (from + 4096).min(at + length);
        for i in start..end.max(start) {
            bytes[usize::try_from(i - at).unwrap()] = 0;
        }
    }
}

async fn write_piece(stream: &mut TcpStream, bytes: &[u8], chunked: bool) -> io::Result<()> {
    if chunked {
        stream
            .write_all(format!("{:x}\r\n", bytes.len()).as_bytes())
            .await?;
        stream.write_all(bytes).await?;
        stream.write_all(b"\r\n").await
    } else {
        stream.write_all(bytes).await
    }
}

/// Silence until the client goes away.
async fn hold(stream: &mut TcpStream) -> io::Result<bool> {
    let mut rest = [0; 1024];
    while stream.read(&mut rest).await? > 0 {}
    Ok(false)
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        301 => "Moved Permanently",
        302 => "Found",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        416 => "Range Not Satisfiable",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Whatever",
    }
}
