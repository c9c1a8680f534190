//! Verified byte ranges over HTTP, politely, from several sources.
//!
//! A [`Hub`] pins a branch to a commit, lists what the commit holds, and fetches ranges of its
//! files. It knows nothing of what the ranges mean. It owns its threads: the face blocks or takes
//! a callback, and everything asynchronous stays inside.

#![allow(dead_code, reason = "the transfers, which come next, use the rest")]

mod address;
mod error;
mod options;
mod snapshot;

pub use error::HubError;
pub use options::Clock;
pub use options::HubObserver;
pub use options::HubOptions;
pub use options::Notice;
pub use options::Proxy;
pub use options::Silent;
pub use options::SourceAddress;
pub use options::SystemClock;
pub use options::Timing;
pub use options::Token;
pub use snapshot::Arrived;
pub use snapshot::Class;
pub use snapshot::FileFacts;
pub use snapshot::Snapshot;
pub use snapshot::Span;

use std::sync::Arc;

use bytes::Bytes;

use crate::terms::RepoId;
use crate::terms::Revision;

/// A reply with this header comes from another Deltafin's store rather than from a hub.
pub const PEER_HEADER: &str = "x-deltafin-share";

/// Several sources of byte ranges, behind one door.
pub struct Hub {
    options: HubOptions,
}

/// A span on its way. Dropping it cancels the fetch and closes its connection.
#[must_use = "dropping a ticket cancels its fetch"]
pub struct Ticket {}

impl Ticket {
    /// Moves the span to another class: a guess that came true need not be fetched twice.
    pub fn promote(&self, class: Class) {
        let _ = class;
    }
}

/// What was moved so far; a photograph, not a registry.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HubStats {
    /// Requests to the hub's API.
    pub api: u64,
    /// Requests to `/resolve/` addresses.
    pub resolves: u64,
    /// Ranged requests for bodies.
    pub ranges: u64,
    /// Bytes of spans, wasted ones included.
    pub body_bytes: u64,
    /// Bytes of spans that were thrown away: wrong, or fetched twice.
    pub wasted_bytes: u64,
    /// Bytes of listings and small files.
    pub meta_bytes: u64,
    /// Span bytes a second, lately.
    pub bytes_per_s: u64,
    /// Spans in flight.
    pub lanes: usize,
    /// Spans waiting for a lane.
    pub waiting: usize,
    /// Requests that were made again.
    pub retries: u64,
    /// Second requests for slow spans.
    pub hedges: u64,
    /// The same, source by source, in the order of the options.
    pub sources: Vec<SourceStats>,
}

/// What one source gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceStats {
    /// Its name: scheme and host, or folder.
    pub name: Arc<str>,
    /// Spans it delivered.
    pub spans: u64,
    /// Bytes of spans that came from it, wasted ones included.
    pub body_bytes: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Spans whose bytes were wrong.
    pub wrong: u64,
    /// Spans in flight.
    pub lanes: usize,
    /// Spans it may have in flight now.
    pub lanes_limit: usize,
    /// Whether it is no longer asked.
    pub set_aside: bool,
}

impl Hub {
    /// Starts the threads; opens no connection.
    ///
    /// # Errors
    ///
    /// An address that cannot be a source, a certificate or proxy that cannot be read.
    pub fn open(options: HubOptions) -> Result<Self, HubError> {
        Ok(Hub { options })
    }

    /// The commit a branch, tag or commit stands for: at most one API request, none for a commit.
    ///
    /// # Errors
    ///
    /// The first source's error, if none knows the revision.
    pub fn commit(&self, repo: &RepoId, revision: &str) -> Result<Revision, HubError> {
        Err(HubError::NotFound {
            what: format!("{repo} at {revision}"),
            place: "any source".to_owned(),
        })
    }

    /// Every file of a commit with its size and, where the hub states one, its SHA-256.
    ///
    /// # Errors
    ///
    /// The first source's error, if none has the commit.
    pub fn list(&self, repo: &RepoId, commit: &Revision) -> Result<Snapshot, HubError> {
        Err(HubError::NotFound {
            what: format!("{repo} at {commit}"),
            place: "any source".to_owned(),
        })
    }

    /// A whole small file, checked against its size and the digest of the listing.
    ///
    /// # Errors
    ///
    /// Also a file larger than `limit` bytes: nothing of it is fetched then.
    pub fn get(&self, snapshot: &Snapshot, path: &str, limit: u64) -> Result<Bytes, HubError> {
        let _ = limit;
        Err(HubError::NotFound {
            what: path.to_owned(),
            place: snapshot.repo.to_string(),
        })
    }

    /// Asks for a span. `deliver` is called exactly once, on one of the hub's threads, whatever
    /// happens ([`HubError::Cancelled`] if the ticket or the hub is dropped first); it must only
    /// hand over.
    pub fn fetch(
        &self,
        snapshot: &Arc<Snapshot>,
        span: Span,
        class: Class,
        deliver: impl FnOnce(Result<Arrived, HubError>) + Send + 'static,
    ) -> Ticket {
        let _ = (snapshot, span, class);
        deliver(Err(HubError::Cancelled));
        Ticket {}
    }

    /// What was moved so far.
    pub fn stats(&self) -> HubStats {
        HubStats::default()
    }

    /// Changes the rate limit while fetches go on.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) {
        let _ = bytes_per_s;
    }

    /// Changes the limit of fetched bytes, so that work can go on after it was reached.
    pub fn set_bytes_max(&self, bytes: Option<u64>) {
        let _ = bytes;
    }
}
