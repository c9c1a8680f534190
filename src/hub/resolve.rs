//! From a file of a snapshot to the address its bytes are read from.
//!
//! A HEAD without `Range` on `/resolve/` names the address, once a file, and the address is used
//! until shortly before its signature expires. Asking with `Range` would be one request less and
//! is wrong: the edge in front of the hub has been seen to apply the range to the redirect's own
//! text. Asking for each span would spend the hourly allowance on one token.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use reqwest::Response;
use reqwest::StatusCode;
use reqwest::Url;
use reqwest::header::HeaderMap;

use super::FileFacts;
use super::HubError;
use super::Snapshot;
use super::address;
use super::headers;
use super::headers::ETag;
use super::http::HOPS_MAX;
use super::http::HttpSource;
use super::http::Question;
use super::net::Net;
use crate::terms::Digest;

/// A signature is renewed this long before it expires, and at the latest after the second.
const EARLY: Duration = Duration::from_secs(120);
const LONGEST: Duration = Duration::from_secs(55 * 60);
/// For a redirect that does not say how long it holds.
const UNSTATED: Duration = Duration::from_secs(10 * 60);

/// Where a file's bytes are, for a while.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) url: Url,
    /// The digest the source states for the whole file.
    pub(super) sha256: Option<Digest>,
    /// By the clock's `elapsed`.
    fresh_until: Duration,
    /// Tells one answer from the next.
    pub(super) generation: u64,
}

/// What is to be found.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) path: &'a str,
    /// An answer that no longer works.
    pub(super) stale: Option<u64>,
    /// How long a pause the hub asked for is waited for; `None` for as long as it takes.
    pub(super) patience: Option<Duration>,
}

/// One answer, behind a lock that is held while it is asked for: whoever needs it meanwhile waits
/// for it instead of asking too.
type Slot = Arc<tokio::sync::Mutex<Option<Arc<Resolved>>>>;

/// Every answer a source gave, by commit and path.
#[derive(Default)]
pub(super) struct Resolutions {
    slots: Mutex<HashMap<(String, String), Slot>>,
    generation: AtomicU64,
}

impl Resolutions {
    fn slot(&self, snapshot: &Snapshot, path: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(slots.entry(key(snapshot, path)).or_default())
    }
}

/// The tag under which a source first gave each file.
#[derive(Default)]
pub(super) struct Tags(Mutex<HashMap<(String, String), ETag>>);

impl Tags {
    /// The file's first tag, which is `tag` if there was none before.
    pub(super) fn known(&self, snapshot: &Snapshot, path: &str, tag: &ETag) -> ETag {
        let mut tags = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tags.entry(key(snapshot, path))
            .or_insert_with(|| tag.clone())
            .clone()
    }
}

fn key(snapshot: &Snapshot, path: &str) -> (String, String) {
    (
        format!("{}@{}", snapshot.repo, snapshot.commit),
        path.to_owned(),
    )
}

/// What the hops of one resolution said together: a mirror may put the tag on the second hop.
#[derive(Default)]
struct Gathered {
    commit: Option<String>,
    size: Option<u64>,
    sha256: Option<Digest>,
    date: Option<u64>,
}

impl Gathered {
    fn add(&mut self, headers: &HeaderMap, last: bool) {
        let get = |name: &str| headers::text(headers, name);
        if let Some(commit) = get("x-repo-commit") {
            self.commit = Some(commit.to_owned());
        }
        // A redirect's own length and tag are those of its text.
        if let Some(size) = headers::number(headers, "x-linked-size") {
            self.size = Some(size);
        } else if last && self.size.is_none() {
            self.size = headers::number(headers, "content-length");
        }
        let tag = get("x-linked-etag").or_else(|| get("etag").filter(|_| last));
        let sha256 = tag.and_then(ETag::parse).and_then(|tag| tag.sha256());
        self.sha256 = sha256.or(self.sha256);
        self.date = get("date").and_then(headers::http_date).or(self.date);
    }
}

impl HttpSource {
    /// Where a file is.
    pub(super) async fn resolve(
        &self,
        net: &Net,
        wanted: Wanted<'_>,
    ) -> Result<Arc<Resolved>, HubError> {
        let Wanted {
            snapshot,
            path,
            stale,
            ..
        } = wanted;
        let slot = self.resolutions.slot(snapshot, path);
        let mut slot = slot.lock().await;
        if let Some(known) = slot.as_ref() {
            let fresh = known.fresh_until > net.clock.elapsed();
            if fresh && stale != Some(known.generation) {
                return Ok(Arc::clone(known));
            }
        }
        let facts = snapshot.files.get(path).ok_or_else(|| HubError::NotFound {
            what: path.to_owned(),
            place: format!("{} at {}", snapshot.repo, snapshot.commit),
        })?;
        let resolved = Arc::new(self.resolve_anew(net, wanted, facts).await?);
        *slot = Some(Arc::clone(&resolved));
        Ok(resolved)
    }

    async fn resolve_anew(
        &self,
        net: &Net,
        wanted: Wanted<'_>,
        facts: &FileFacts,
    ) -> Result<Resolved, HubError> {
        let Wanted { snapshot, path, .. } = wanted;
        let asked = self.resolve_url(snapshot, path);
        let mut url = asked.clone();
        let mut gathered = Gathered::default();
        for _ in 0..HOPS_MAX {
            let question = Question {
                url: &url,
                head: true,
                spare: Some(StatusCode::NOT_FOUND),
                patience: wanted.patience,
            };
            let response = self.ask(net, question).await?;
            let headers = response.headers();
            if response.status() == StatusCode::NOT_FOUND {
                let hub =
                    headers.contains_key("x-error-code") || headers.contains_key("x-repo-commit");
                let plain = address::under(&self.base, &address::path(path));
                if hub || url == plain || gathered.commit.is_some() {
                    return Err(self.refusal(net, response).await);
                }
                // A plain file server knows no `/resolve/`.
                url = plain;
                continue;
            }
            let redirect = response.status().is_redirection();
            gathered.add(headers, !redirect);
            if !redirect {
                return self.resolved(net, &asked, url, gathered, snapshot, facts);
            }
            let next = headers::location(&url, headers).map_err(|why| broken(&url, why))?;
            // The hub's own redirects (a new name, another spelling, its cache of small files) are
            // followed; one that leads away, or that tells all there is to know, is the address.
            let linked =
                headers.contains_key("x-linked-size") || headers.contains_key("x-linked-etag");
            if linked || !self.hub_origin(&next) {
                return self.resolved(net, &asked, next, gathered, snapshot, facts);
            }
            url = next;
        }
        Err(broken(&asked, "more than 20 redirects in a row"))
    }

    pub(super) fn resolve_url(&self, snapshot: &Snapshot, path: &str) -> Url {
        let tail = format!(
            "{}/resolve/{}/{}",
            snapshot.repo,
            snapshot.commit,
            address::path(path)
        );
        address::under(&self.base, &tail)
    }

    /// Holds what the hops said against what was pinned.
    fn resolved(
        &self,
        net: &Net,
        asked: &Url,
        url: Url,
        said: Gathered,
        snapshot: &Snapshot,
        facts: &FileFacts,
    ) -> Result<Resolved, HubError> {
        let wrong = |what: &str, expected: String, actual: String| HubError::WrongContent {
            url: address::shown_url(asked),
            what: what.to_owned(),
            expected,
            actual,
        };
        match &said.commit {
            Some(commit) if commit != snapshot.commit.as_str() => {
                let commit: String = commit.chars().take(60).collect();
                return Err(wrong("the commit", snapshot.commit.to_string(), commit));
            }
            // A login page answers everything with success. A plain file server names no commit
            // either, but knows the file's exact length.
            None if said.size != Some(facts.size) => {
                return Err(HubError::NotAHub {
                    url: address::shown_url(asked),
                    why: "the reply names no commit (X-Repo-Commit)".to_owned(),
                });
            }
            _ => {}
        }
        if let Some(size) = said.size.filter(|size| *size != facts.size) {
            return Err(wrong("the size", facts.size.to_string(), size.to_string()));
        }
        match (facts.sha256, said.sha256) {
            (Some(pinned), Some(stated)) if pinned != stated => {
                return Err(wrong(
                    "the file",
                    format!("sha256 {pinned}"),
                    stated.to_string(),
                ));
            }
            _ => {}
        }
        let now = net.clock.elapsed();
        Ok(Resolved {
            fresh_until: now + self.lifetime(net, &url, said.date),
            sha256: said.sha256,
            url,
            generation: self.resolutions.generation.fetch_add(1, Relaxed),
        })
    }

    /// How long an address is used. The server's clock made the expiry, so the server's `Date` is
    /// what it is held against: this machine's clock may be hours off.
    fn lifetime(&self, net: &Net, url: &Url, date: Option<u64>) -> Duration {
        let now = date.unwrap_or_else(|| net.clock.unix_seconds());
        match headers::expiry(url) {
            Some(at) if at > now => {
                let left = Duration::from_secs(at - now);
                left.saturating_sub(EARLY).max(left / 2).min(LONGEST)
            }
            // A fresh signature that has expired already tells of a clock, not of the signature.
            Some(_) => UNSTATED,
            None if self.same_origin(url) && url.query().is_none() => LONGEST,
            None => UNSTATED,
        }
    }

    /// The body of a small file by one GET, redirects followed by hand.
    pub(super) async fn get_once(
        &self,
        net: &Net,
        snapshot: &Snapshot,
        path: &str,
    ) -> Result<Response, HubError> {
        let asked = self.resolve_url(snapshot, path);
        let mut url = asked.clone();
        let mut commit = false;
        for _ in 0..HOPS_MAX {
            let question = Question {
                spare: Some(StatusCode::NOT_FOUND),
                ..Question::get(&url)
            };
            let response = self.ask(net, question).await?;
            let headers = response.headers();
            commit |= headers.contains_key("x-repo-commit");
            if response.status() == StatusCode::NOT_FOUND {
                let plain = address::under(&self.base, &address::path(path));
                if commit || headers.contains_key("x-error-code") || url == plain {
                    return Err(self.refusal(net, response).await);
                }
                url = plain;
                continue;
            }
            if !response.status().is_redirection() {
                return Ok(response);
            }
            url = headers::location(&url, headers).map_err(|why| broken(&url, why))?;
        }
        Err(broken(&asked, "more than 20 redirects in a row"))
    }
}

pub(super) fn broken(url: &Url, why: &str) -> HubError {
    HubError::Protocol {
        url: address::shown_url(url),
        why: why.to_owned(),
    }
}
