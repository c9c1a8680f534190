//! One ranged GET: headers held against what was asked, bytes counted as they come.
//!
//! The HTTP library calls a body that ended early a success if no length was declared, and never
//! notices one that drips. So nothing here believes in success: a span is done when its last byte
//! was counted.
//!
//! What continues a prefix is held against the validator of the prefix by comparing the tags of the
//! replies. `If-Range` would let the server compare instead; a server that does not know it answers
//! with the whole file, and one that ignores it has to be checked all the same.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use reqwest::Response;
use reqwest::StatusCode;
use reqwest::Url;
use tokio::time::timeout;

use super::FileFacts;
use super::HubError;
use super::Snapshot;
use super::Span;
use super::address;
use super::budget::Reservation;
use super::clients::Ask;
use super::clients::Role;
use super::clients::chain;
use super::headers;
use super::headers::ContentRange;
use super::headers::ETag;
use super::http::HOPS_MAX;
use super::http::HttpSource;
use super::http::status_line;
use super::http::worth_repeating;
use super::job::Partial;
use super::net::Net;
use super::net::count;
use super::resolve::Resolved;
use super::resolve::broken;
use super::watch::Meter;

/// A whole file up to this size may be read to get at its beginning.
const SMALL_FILE: u64 = 1 << 20;

/// Why an attempt did not finish its span.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The same again may work.
    Again { why: String },
    /// A kept connection had been closed meanwhile: the same again, and nobody is to blame.
    Stale { why: String },
    /// The address may have expired.
    Renew { status: u16, why: String },
    /// The server has too much to do. If it said for how long, the source's gate is closed.
    Busy { why: String, told: bool },
    /// The headers do not fit the question; the body was not read.
    Mismatch { why: String },
    /// The source serves another file than the pinned one.
    Changed(HubError),
    /// This source will not serve the span.
    Elsewhere(HubError),
    /// No source will.
    Fatal(HubError),
}

/// What one attempt works with.
pub(super) struct Attempt<'a> {
    pub(super) net: &'a Net,
    pub(super) source: &'a HttpSource,
    pub(super) snapshot: &'a Snapshot,
    pub(super) span: &'a Span,
    pub(super) facts: &'a FileFacts,
    pub(super) resolved: &'a Resolved,
    pub(super) reservation: &'a Reservation<'a>,
    pub(super) meter: &'a Meter,
    /// What the source gave so far.
    pub(super) body_bytes: &'a AtomicU64,
    pub(super) role: Role,
}

/// How much of an accepted body belongs to the span.
struct Body {
    needed: u64,
    /// Whether bytes beyond `needed` are expected and simply not read.
    cut: bool,
}

impl Attempt<'_> {
    /// Fetches what `partial` still lacks.
    pub(super) async fn run(&self, partial: &Mutex<Partial>) -> Result<(), Trouble> {
        let got = lock(partial).len();
        let first = self.span.range.start + got;
        let last = self.span.range.end - 1;
        let response = self.request(first, last).await?;
        let body = self.accept(&response, first, last, partial);
        let (response, body) = match body {
            Ok(body) => (response, body),
            Err(Verdict::Known(trouble)) => return Err(trouble),
            Err(Verdict::Status) => return Err(self.judge(response, first).await),
        };
        self.read(response, &body, partial).await
    }

    /// Sends the request, following redirects between content hosts, which never see a token.
    async fn request(&self, first: u64, last: u64) -> Result<Response, Trouble> {
        let mut url: Url = self.resolved.url.clone();
        for _ in 0..HOPS_MAX {
            count(&self.net.counters.ranges);
            let own = self.source.same_origin(&url);
            let ask = Ask {
                role: self.role,
                url: &url,
                head: false,
                token: self.source.token_for(&url).filter(|_| own),
                range: Some((first, last)),
            };
            let response = match self.net.clients.send(ask, &self.net.timing).await {
                Ok(response) => response,
                Err(e) if e.hopeless => {
                    return Err(Trouble::Elsewhere(broken(&url, &e.why)));
                }
                Err(e) if e.stale => return Err(Trouble::Stale { why: e.why }),
                Err(e) => return Err(Trouble::Again { why: e.why }),
            };
            if !response.status().is_redirection() {
                return Ok(response);
            }
            url = headers::location(&url, response.headers())
                .map_err(|why| Trouble::Elsewhere(broken(&url, why)))?;
        }
        let why = "more than 20 redirects in a row";
        Err(Trouble::Elsewhere(broken(&self.resolved.url, why)))
    }

    /// Decides by status and headers alone whether the body is the one asked for.
    fn accept(
        &self,
        response: &Response,
        first: u64,
        last: u64,
        partial: &Mutex<Partial>,
    ) -> Result<Body, Verdict> {
        let status = response.status();
        if status != StatusCode::PARTIAL_CONTENT && status != StatusCode::OK {
            return Err(Verdict::Status);
        }
        let headers = response.headers();
        let asked = ContentRange::Slice {
            first,
            last,
            total: Some(self.facts.size),
        };
        let needed = last - first + 1;
        let range_text = headers::text(headers, "content-range");
        let exact = range_text.and_then(ContentRange::parse) == Some(asked);
        let length = headers::number(headers, "content-length");
        if !headers::plain_encoding(headers) {
            return Err(mismatch(
                "a compressed body, though none was allowed".to_owned(),
            ));
        }
        let body = if status == StatusCode::OK {
            self.accept_whole(exact, length, first, needed, partial)?
        } else {
            if !exact {
                return Err(mismatch(format!(
                    "asked for bytes {first}-{last}/{}, got Content-Range {:?}",
                    self.facts.size,
                    range_text.unwrap_or("none")
                )));
            }
            Body { needed, cut: false }
        };
        if !body.cut && length.is_some_and(|l| l != body.needed) {
            return Err(mismatch(format!(
                "asked for {} bytes, Content-Length says {}",
                body.needed,
                length.unwrap_or_default()
            )));
        }
        self.same_file(headers::text(headers, "etag"), partial)?;
        Ok(body)
    }

    /// A 200 in reply to a range. The exact slice is taken only where a digest will prove it; a
    /// whole file where it is what was asked for or small; anything else would be gigabytes for
    /// megabytes, and its connection is dropped unread.
    fn accept_whole(
        &self,
        exact: bool,
        length: Option<u64>,
        first: u64,
        needed: u64,
        partial: &Mutex<Partial>,
    ) -> Result<Body, Verdict> {
        let size = self.facts.size;
        if exact && length == Some(needed) && self.span.digest.is_some() {
            return Ok(Body { needed, cut: false });
        }
        let whole = !exact && length == Some(size);
        if whole && self.span.range.start == 0 && self.span.range.end == size {
            if first > 0 {
                self.waste(lock(partial).clear());
            }
            return Ok(Body {
                needed: size,
                cut: false,
            });
        }
        if whole && first == 0 && size <= SMALL_FILE {
            return Ok(Body { needed, cut: true });
        }
        Err(Verdict::Known(Trouble::Elsewhere(broken(
            &self.resolved.url,
            "the server does not support ranged reads (200 in reply to Range)",
        ))))
    }

    /// Two replies belong together only if they are of the same file. Where the file's digest is
    /// pinned and the tag is a digest they must be equal; otherwise the tag must stay what it was
    /// when this source first named it.
    fn same_file(&self, tag: Option<&str>, partial: &Mutex<Partial>) -> Result<(), Verdict> {
        let tag = tag.and_then(ETag::parse);
        let stated = tag.as_ref().and_then(ETag::sha256);
        let changed = |expected: String, actual: String| {
            Verdict::Known(Trouble::Changed(HubError::WrongContent {
                url: address::shown_url(&self.resolved.url),
                what: format!("the file behind {}", self.span.file),
                expected,
                actual,
            }))
        };
        if let (Some(pinned), Some(stated)) = (self.facts.sha256, stated) {
            if pinned != stated {
                return Err(changed(format!("sha256 {pinned}"), stated.to_string()));
            }
        } else {
            if let Some(tag) = &tag {
                let known = self.source.tags.known(self.snapshot, &self.span.file, tag);
                if known != *tag {
                    return Err(changed(format!("ETag {}", known.text), tag.text.clone()));
                }
            }
            lock(partial).doubtful = true;
        }
        Ok(())
    }

    /// What a status other than success means.
    async fn judge(&self, response: Response, first: u64) -> Trouble {
        let status = response.status();
        let line = status_line(&response);
        match status.as_u16() {
            403 => Trouble::Renew {
                status: 403,
                why: self.source.message(self.net, response).await,
            },
            416 => {
                let said = headers::text(response.headers(), "content-range")
                    .and_then(ContentRange::parse);
                let why = format!(
                    "{line} for byte {first} of {} bytes (Content-Range {said:?})",
                    self.facts.size
                );
                if said
                    == Some(ContentRange::Outside {
                        total: self.facts.size,
                    })
                    && first >= self.facts.size
                {
                    return Trouble::Fatal(broken(&self.resolved.url, &why));
                }
                Trouble::Renew { status: 416, why }
            }
            429 => Trouble::Busy {
                told: self.source.pause_content(self.net, &response),
                why: line,
            },
            _ if worth_repeating(status) => {
                if self.source.pause_content(self.net, &response) {
                    Trouble::Busy {
                        told: true,
                        why: line,
                    }
                } else {
                    Trouble::Again { why: line }
                }
            }
            _ => Trouble::Elsewhere(self.source.refusal(self.net, response).await),
        }
    }

    async fn read(
        &self,
        mut response: Response,
        body: &Body,
        partial: &Mutex<Partial>,
    ) -> Result<(), Trouble> {
        let whole = usize::try_from(self.span.range.len()).unwrap_or(usize::MAX);
        let pipe = lock(partial).pipe.clone();
        if lock(partial).void {
            let why = "its beginning was handed on already".to_owned();
            return Err(Trouble::Again { why });
        }
        if pipe.is_none() {
            // The span's length is ours, not the server's; still it may not fit.
            if !lock(partial).bytes.reserve(whole) {
                let why = format!("no memory for {whole} bytes");
                return Err(Trouble::Fatal(broken(&self.resolved.url, &why)));
            }
        }
        let mut missing = body.needed;
        while missing > 0 {
            let chunk = match timeout(self.net.timing.idle, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => {
                    let why = format!("the body ended {missing} bytes early");
                    return Err(Trouble::Again { why });
                }
                Ok(Err(error)) => return Err(Trouble::Again { why: chain(error) }),
                Err(_) => {
                    let why = format!("no byte for {} s", self.net.timing.idle.as_secs_f32());
                    return Err(Trouble::Again { why });
                }
            };
            let arrived = chunk.len() as u64;
            self.count(arrived).await?;
            if arrived > missing && !body.cut {
                return Err(self.too_long(partial));
            }
            let used = arrived.min(missing);
            #[expect(clippy::cast_possible_truncation, reason = "no longer than the chunk")]
            let chunk = chunk.slice(..used as usize);
            match &pipe {
                None => lock(partial).add(&chunk),
                Some(pipe) => {
                    pipe.push(chunk, &self.source.name).await;
                    lock(partial).streamed += used;
                }
            }
            missing -= used;
        }
        if body.cut {
            return Ok(());
        }
        // Reading to the very end lets the connection be used again, and shows extra bytes where
        // no length was declared.
        match timeout(Duration::from_millis(500), response.chunk()).await {
            Ok(Ok(Some(extra))) if !extra.is_empty() => Err(self.too_long(partial)),
            _ => Ok(()),
        }
    }

    /// A server that miscounts the end may have miscounted the start.
    fn too_long(&self, partial: &Mutex<Partial>) -> Trouble {
        self.waste(lock(partial).clear());
        Trouble::Mismatch {
            why: "the body is longer than its range".to_owned(),
        }
    }

    async fn count(&self, bytes: u64) -> Result<(), Trouble> {
        self.net.counters.body_bytes.fetch_add(bytes, Relaxed);
        self.body_bytes.fetch_add(bytes, Relaxed);
        self.meter.add(bytes);
        self.reservation.took(bytes).await.map_err(Trouble::Fatal)
    }

    pub(super) fn waste(&self, bytes: u64) {
        self.net.counters.wasted_bytes.fetch_add(bytes, Relaxed);
    }
}

/// Why a reply's body is not read.
enum Verdict {
    Known(Trouble),
    /// The status says it; the body may say more.
    Status,
}

fn mismatch(why: String) -> Verdict {
    Verdict::Known(Trouble::Mismatch { why })
}

pub(super) fn lock(partial: &Mutex<Partial>) -> std::sync::MutexGuard<'_, Partial> {
    partial.lock().unwrap_or_else(PoisonError::into_inner)
}
