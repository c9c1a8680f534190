//! Verified byte ranges over HTTP, politely, from several sources.
//!
//! A [`Hub`] pins a branch to a commit, lists what the commit holds, and fetches ranges of its
//! files. It knows nothing of what the ranges mean. It owns its threads: the face blocks or takes
//! a callback, and everything asynchronous stays inside.
//!
//! # One span's walk
//!
//! ```text
//! fetch ─► queue      Demand before Bulk before Hint; a lane of the first source that may serve it
//!            └─ span      attempts, fail-over, proof by digest
//!                 ├─ resolve   HEAD, once a file and hour: where the bytes are
//!                 └─ transfer  ranged GET: headers held against the question, bytes counted
//! watch ─► every half second: lanes grow or shrink, slow spans get a second request
//! ```

mod address;
mod api;
mod budget;
mod clients;
mod error;
mod folder;
mod gathered;
mod headers;
mod http;
mod job;
mod net;
mod options;
mod queue;
mod resolve;
mod shared;
mod snapshot;
mod source;
mod span;
mod stats;
mod stream;
mod transfer;
mod watch;

#[cfg(test)]
mod tests;

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
pub use stats::HubStats;
pub use stats::SourceStats;
pub use stream::Stream;
pub use stream::Streamed;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::Weak;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;

use bytes::Bytes;
use tokio::runtime::Runtime;
use tokio::task::block_in_place;

use crate::terms::RepoId;
use crate::terms::Revision;
use job::Control;
use job::Deliver;
use job::Job;
use net::Net;
use queue::Queue;
use shared::Shared;
use source::Kind;
use source::Source;

/// A reply with this header comes from another Deltafin's store rather than from a hub.
pub const PEER_HEADER: &str = "x-deltafin-share";

/// Threads of the hub. Hashing a gigabit takes a tenth of one.
const THREADS: usize = 2;

/// Addresses asked for at a time ahead of need.
const PREPARED_AT_A_TIME: usize = 8;

/// Several sources of byte ranges, behind one door.
pub struct Hub {
    shared: Arc<Shared>,
    /// `None` only while dropping.
    runtime: Option<Runtime>,
    jobs: AtomicU64,
}

/// A span on its way. Dropping it cancels the fetch and closes its connection.
#[must_use = "dropping a ticket cancels its fetch"]
pub struct Ticket {
    id: u64,
    control: Arc<Control>,
    shared: Weak<Shared>,
}

impl Ticket {
    /// Moves the span to another class: a guess that came true need not be fetched twice.
    pub fn promote(&self, class: Class) {
        self.control.set_class(class);
        if let Some(shared) = self.shared.upgrade() {
            shared.queue().promote(self.id);
            shared.pump();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.control.cancel();
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let waiting = shared.queue().remove(self.id);
        if let Some(job) = waiting {
            // Its callback runs on a thread of the hub, as ever.
            shared.threads.spawn(async move { drop(job) });
        }
    }
}

impl Hub {
    /// Starts the threads; opens no connection.
    ///
    /// # Errors
    ///
    /// An address that cannot be a source, a certificate or proxy that cannot be read.
    pub fn open(options: HubOptions) -> Result<Self, HubError> {
        let open = |address| Source::open(address, &options);
        let sources = options
            .sources
            .iter()
            .map(open)
            .collect::<Result<Vec<_>, _>>()?;
        let net = Net {
            clients: clients::Clients::new(&options)?,
            budget: budget::Budget::new(options.rate_bytes_per_s, options.bytes_max),
            chance: net::Chance::new(options.seed),
            timing: options.timing,
            clock: options.clock,
            observer: options.observer,
            counters: net::Counters::default(),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(8)
            .thread_name("hub")
            .enable_all()
            .build()
            .map_err(HubError::Threads)?;
        let shared = Arc::new(Shared {
            net,
            queue: Mutex::new(Queue::new(&sources, options.lanes_max)),
            sources,
            offline: options.offline,
            threads: runtime.handle().clone(),
        });
        runtime.spawn(Shared::watch(Arc::downgrade(&shared)));
        Ok(Hub {
            shared,
            runtime: Some(runtime),
            jobs: AtomicU64::new(0),
        })
    }

    /// Runs on the hub's threads and waits. Not `block_on`, which panics where the caller's own
    /// thread belongs to a runtime.
    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, HubError>> + Send + 'static,
    ) -> Result<T, HubError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.shared.threads.spawn(async move {
            // The caller waits below, so nobody can have gone away.
            let _ = sender.send(work.await);
        });
        receiver.recv().unwrap_or(Err(HubError::Cancelled))
    }

    /// The commit a branch, tag or commit stands for: at most one API request a source, none for a
    /// commit.
    ///
    /// # Errors
    ///
    /// The first source's error, if none knows the revision.
    pub fn commit(&self, repo: &RepoId, revision: &str) -> Result<Revision, HubError> {
        let (shared, repo, revision) =
            (Arc::clone(&self.shared), repo.clone(), revision.to_owned());
        self.wait(async move {
            let mut errors = Vec::new();
            for source in &shared.sources {
                let found = match &source.kind {
                    Kind::Folder(folder) => block_in_place(|| folder.commit(&repo, &revision)),
                    Kind::Http(_) if shared.offline => {
                        Err(offline(format!("{repo} at {revision}")))
                    }
                    Kind::Http(http) => http.commit(&shared.net, &repo, &revision).await,
                };
                match found {
                    Ok(commit) => return Ok(commit),
                    Err(error) => errors.push(error),
                }
            }
            Err(Shared::first_error(errors, || {
                format!("{repo} at {revision}")
            }))
        })
    }

    /// Every file of a commit with its size and, where the hub states one, its SHA-256.
    ///
    /// # Errors
    ///
    /// The first source's error, if none has the commit.
    pub fn list(&self, repo: &RepoId, commit: &Revision) -> Result<Snapshot, HubError> {
        let (shared, repo, commit) = (Arc::clone(&self.shared), repo.clone(), commit.clone());
        self.wait(async move {
            let mut errors = Vec::new();
            for source in &shared.sources {
                let found = match &source.kind {
                    Kind::Folder(folder) => block_in_place(|| folder.list(&repo, &commit)),
                    Kind::Http(_) if shared.offline => Err(offline(format!("{repo} at {commit}"))),
                    Kind::Http(http) => http.list(&shared.net, &repo, &commit).await,
                };
                match found {
                    Ok(snapshot) => return Ok(snapshot),
                    Err(error) => errors.push(error),
                }
            }
            Err(Shared::first_error(errors, || {
                format!("{repo} at {commit}")
            }))
        })
    }

    /// A whole small file, checked against its size and the digest of the listing.
    ///
    /// # Errors
    ///
    /// Also a file larger than `limit` bytes: nothing of it is fetched then.
    pub fn get(&self, snapshot: &Snapshot, path: &str, limit: u64) -> Result<Bytes, HubError> {
        let place = format!("{} at {}", snapshot.repo, snapshot.commit);
        let facts = snapshot.files.get(path).ok_or_else(|| HubError::NotFound {
            what: path.to_owned(),
            place: place.clone(),
        })?;
        if facts.size > limit {
            return Err(HubError::Damaged {
                what: path.to_owned(),
                place,
                why: format!("{} bytes, where at most {limit} make sense", facts.size),
            });
        }
        let shared = Arc::clone(&self.shared);
        let (snapshot, path, facts) = (snapshot.clone(), path.to_owned(), facts.clone());
        self.wait(async move {
            let mut errors = Vec::new();
            for source in &shared.sources {
                let found = match &source.kind {
                    Kind::Folder(folder) => block_in_place(|| folder.get(&snapshot, &path, &facts)),
                    Kind::Http(_) if shared.offline => Err(offline(path.clone())),
                    Kind::Http(http) => http.get(&shared.net, &snapshot, &path, &facts).await,
                };
                match found {
                    Ok(bytes) => return Ok(bytes),
                    Err(error) => errors.push(error),
                }
            }
            Err(Shared::first_error(errors, || path.clone()))
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
        self.begin(snapshot, span, class, None, deliver)
    }

    fn begin(
        &self,
        snapshot: &Arc<Snapshot>,
        span: Span,
        class: Class,
        pipe: Option<Arc<stream::Pipe>>,
        deliver: impl FnOnce(Result<Arrived, HubError>) + Send + 'static,
    ) -> Ticket {
        let id = self.jobs.fetch_add(1, Relaxed);
        let control = Arc::new(Control::new(class));
        let job = Job {
            id,
            snapshot: Arc::clone(snapshot),
            span,
            control: Arc::clone(&control),
            deliver: Deliver::new(deliver),
            tried: vec![false; self.shared.sources.len()],
            error: None,
            partial: Arc::new(Mutex::new(job::Partial::new(pipe))),
        };
        // Not closed while somebody holds the hub.
        let _ = self.shared.queue().push(job);
        self.shared.pump();
        Ticket {
            id,
            control,
            shared: Arc::downgrade(&self.shared),
        }
    }

    /// Finds out in the background where files lie, a few at a time, so that the first spans of
    /// each need not wait for the hub. What fails is asked for again when it is needed.
    pub fn prepare(&self, snapshot: &Arc<Snapshot>, files: impl IntoIterator<Item = Arc<str>>) {
        let files: VecDeque<Arc<str>> = files.into_iter().collect();
        if self.shared.offline || files.is_empty() {
            return;
        }
        let files = Arc::new(Mutex::new(files));
        for _ in 0..PREPARED_AT_A_TIME {
            let (files, snapshot) = (Arc::clone(&files), Arc::clone(snapshot));
            let shared = Arc::downgrade(&self.shared);
            self.shared.threads.spawn(async move {
                loop {
                    let next = files
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .pop_front();
                    let (Some(file), Some(shared)) = (next, shared.upgrade()) else {
                        return;
                    };
                    shared.prepare(&snapshot, &file).await;
                }
            });
        }
    }

    /// What was moved so far.
    pub fn stats(&self) -> HubStats {
        self.shared.stats()
    }

    /// Changes the rate limit while fetches go on.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) {
        self.shared.net.budget.set_rate(bytes_per_s);
    }

    /// Bytes that the limit of fetched bytes still allows; `None` without one.
    pub fn bytes_left(&self) -> Option<u64> {
        self.shared.net.budget.left()
    }

    /// The limit of fetched bytes, and how many came.
    pub fn bytes_limit(&self) -> (Option<u64>, u64) {
        let budget = &self.shared.net.budget;
        (budget.max(), budget.used())
    }

    /// Changes the limit of fetched bytes, so that work can go on after it was reached.
    pub fn set_bytes_max(&self, bytes: Option<u64>) {
        self.shared.net.budget.set_max(bytes);
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // Outside the lock: the callbacks may do anything.
        let waiting = self.shared.queue().close();
        drop(waiting);
        if let Some(runtime) = self.runtime.take() {
            // Not a plain drop: the last owner may be a thread of this or another runtime.
            runtime.shutdown_background();
        }
    }
}

fn offline(what: String) -> HubError {
    HubError::Offline { what }
}
