//! One span from one source: attempts, second requests, the proof at the end.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use sha2::Digest as _;
use sha2::Sha256;
use tokio::time::sleep;

use super::Arrived;
use super::FileFacts;
use super::HubError;
use super::address;
use super::clients::Role;
use super::folder::FolderSource;
use super::http::HttpSource;
use super::http::unreachable;
use super::job::Job;
use super::job::Partial;
use super::net::Net;
use super::net::count;
use super::resolve::Resolved;
use super::resolve::Wanted;
use super::shared::Shared;
use super::source::Kind;
use super::stream::Pipe;
use super::transfer::Attempt;
use super::transfer::Trouble;
use super::transfer::lock;
use super::watch::Meter;
use crate::terms::ByteRange;
use crate::terms::Digest;

/// An attempt that brought at least this much, or an eighth of the span, was not fruitless.
const FRUIT: u64 = 1 << 20;
/// Kept connections found closed, one after the other, before that counts as a failure.
const STALE_MAX: u32 = 20;
/// Fresh addresses asked for in a row before a refusal is believed.
const RENEWALS_MAX: u32 = 1;
/// Replies with headers that do not fit, before the source is given up for the span.
const MISMATCHES_MAX: u32 = 3;
/// A folder's file is handed on in pieces of this size.
const FOLDER_PIECE: u64 = 1 << 20;
/// A pause longer than this is not waited for if another source is there.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a source did not deliver a span.
pub(super) enum Stop {
    /// Another source may.
    Elsewhere(HubError),
    /// None will.
    Fatal(HubError),
}

/// One span and the source it is asked of.
pub(super) struct Errand<'a> {
    pub(super) shared: &'a Shared,
    pub(super) job: &'a Job,
    pub(super) source: usize,
    pub(super) meter: &'a Meter,
}

/// What went wrong so far.
#[derive(Default)]
struct Troubles {
    requests: u32,
    fruitless: u32,
    stale: u32,
    renewals: u32,
    mismatches: u32,
    wrong: u32,
}

impl Errand<'_> {
    fn net(&self) -> &Net {
        &self.shared.net
    }

    fn facts(&self) -> Result<&FileFacts, Stop> {
        let span = &self.job.span;
        let facts = self.job.snapshot.files.get(&*span.file);
        let facts = facts.ok_or_else(|| {
            Stop::Fatal(HubError::NotFound {
                what: span.file.to_string(),
                place: format!("{} at {}", self.job.snapshot.repo, self.job.snapshot.commit),
            })
        })?;
        if span.range.end > facts.size {
            return Err(Stop::Fatal(HubError::Damaged {
                what: span.to_string(),
                place: self.job.snapshot.repo.to_string(),
                why: format!("the file has only {} bytes", facts.size),
            }));
        }
        Ok(facts)
    }

    /// The digest the span must have: its own, or the file's if it is the whole file.
    fn digest(&self, facts: &FileFacts) -> Option<Digest> {
        let whole = self.job.span.range.len() == facts.size;
        self.job.span.digest.or(facts.sha256.filter(|_| whole))
    }

    pub(super) async fn run(&self) -> Result<Arrived, Stop> {
        let facts = self.facts()?;
        match &self.shared.sources[self.source].kind {
            Kind::Folder(folder) => self.read_folder(folder, facts).await,
            Kind::Http(_) if self.shared.offline => Err(Stop::Elsewhere(HubError::Offline {
                what: format!("{} of {}", self.job.span, self.job.snapshot.repo),
            })),
            Kind::Http(http) => {
                let late = self.overdue(http);
                tokio::select! {
                    done = self.read_http(http, facts) => done,
                    why = late => Err(Stop::Elsewhere(why)),
                }
            }
        }
    }

    async fn read_folder(
        &self,
        folder: &Arc<FolderSource>,
        facts: &FileFacts,
    ) -> Result<Arrived, Stop> {
        let pipe = self.job.partial().pipe.clone();
        if let Some(pipe) = pipe {
            return self.stream_folder(folder, &pipe).await;
        }
        let folder = Arc::clone(folder);
        let snapshot = Arc::clone(&self.job.snapshot);
        let span = self.job.span.clone();
        let read = tokio::task::spawn_blocking(move || {
            let bytes = folder.read(&snapshot, &span.file, span.range)?;
            let sum = Digest(Sha256::digest(&bytes).into());
            Ok((bytes, sum))
        });
        let (bytes, sum) = match read.await {
            Ok(read) => read.map_err(Stop::Elsewhere)?,
            // The thread was stopped with the hub.
            Err(_) => return Err(Stop::Fatal(HubError::Cancelled)),
        };
        self.meter.add(bytes.len() as u64);
        self.net()
            .counters
            .body_bytes
            .fetch_add(bytes.len() as u64, Relaxed);
        let source = &self.shared.sources[self.source];
        source.body_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if let Some(expected) = self.digest(facts).filter(|d| *d != sum) {
            source.lied(self.net(), &self.job.span.file, self.job.span.range);
            let what = self.job.span.to_string();
            return Err(Stop::Elsewhere(HubError::wrong_digest(
                &source.name,
                what,
                expected,
                sum,
            )));
        }
        Ok(self.arrived(bytes, sum))
    }

    /// The same in pieces, none of which is hashed.
    async fn stream_folder(
        &self,
        folder: &Arc<FolderSource>,
        pipe: &Pipe,
    ) -> Result<Arrived, Stop> {
        let span = &self.job.span;
        let source = &self.shared.sources[self.source];
        loop {
            let start = span.range.start + self.job.partial().len();
            if start >= span.range.end {
                return Ok(self.arrived(Bytes::new(), Digest([0; 32])));
            }
            let piece = ByteRange::new(start, span.range.end.min(start + FOLDER_PIECE));
            let (folder, file) = (Arc::clone(folder), Arc::clone(&span.file));
            let snapshot = Arc::clone(&self.job.snapshot);
            let read = move || folder.read(&snapshot, &file, piece);
            let bytes = match tokio::task::spawn_blocking(read).await {
                Ok(read) => read.map_err(Stop::Elsewhere)?,
                Err(_) => return Err(Stop::Fatal(HubError::Cancelled)),
            };
            let len = bytes.len() as u64;
            self.meter.add(len);
            self.net().counters.body_bytes.fetch_add(len, Relaxed);
            source.body_bytes.fetch_add(len, Relaxed);
            pipe.push(bytes.into(), &source.name).await;
            self.job.partial().streamed += len;
        }
    }

    fn arrived(&self, bytes: impl Into<Bytes>, sha256: Digest) -> Arrived {
        let source = &self.shared.sources[self.source];
        source.served();
        Arrived {
            bytes: bytes.into(),
            sha256,
            peer: source.peer(),
            source: Arc::clone(&source.name),
        }
    }

    /// Ends when the span has taken too long: more time the larger it is, and more the more of it
    /// came, so that a link that is only slow is never cut off. Pauses a hub asked for do not count.
    async fn overdue(&self, http: &HttpSource) -> HubError {
        let timing = &self.net().timing;
        let mut spent = Duration::ZERO;
        loop {
            sleep(timing.tick).await;
            if http.held_back(self.net()).is_zero() {
                spent += timing.tick;
            }
            let for_size = Duration::from_millis(self.job.span.range.len() / 256);
            let for_what_came = Duration::from_millis(self.job.partial().len() / 4);
            if spent > timing.deadline + for_size + for_what_came {
                let url = http.resolve_url(&self.job.snapshot, &self.job.span.file);
                return unreachable(&url, 1, format!("{} s were not enough", spent.as_secs()));
            }
        }
    }

    async fn read_http(&self, http: &HttpSource, facts: &FileFacts) -> Result<Arrived, Stop> {
        let missing = self.job.span.range.len() - self.job.partial().len();
        let reservation = self.net().budget.reserve(missing).map_err(Stop::Fatal)?;
        let doubted = self.shared.sources[self.source].set_aside();
        let mut troubles = Troubles::default();
        let mut stale = None;
        let mut role = Role::Content;
        loop {
            let others = self.shared.others(self.job, self.source);
            let wanted = Wanted {
                snapshot: &self.job.snapshot,
                path: &self.job.span.file,
                stale: stale.take(),
                patience: others.then_some(PATIENCE),
            };
            let resolved = http
                .resolve(self.net(), wanted)
                .await
                .map_err(|e| self.blame(e))?;
            self.take_over(&resolved, facts);
            if self.job.partial().void {
                let what = self.job.span.to_string();
                return Err(Stop::Fatal(HubError::Discontinued { what }));
            }
            self.wait_for_content(http, others, &resolved, &troubles)
                .await?;
            let before = self.job.partial().len();
            troubles.requests += 1;
            let attempt = Attempt {
                net: self.net(),
                source: http,
                snapshot: &self.job.snapshot,
                span: &self.job.span,
                facts,
                resolved: &resolved,
                reservation: &reservation,
                meter: self.meter,
                body_bytes: &self.shared.sources[self.source].body_bytes,
                role,
            };
            role = Role::Content;
            let pulled = self.pull(&attempt).await;
            // Waits between attempts are not slowness.
            self.meter.rest();
            match pulled {
                Ok(()) => match self.prove(facts, &resolved) {
                    Ok(arrived) => return Ok(arrived),
                    Err(error) => {
                        troubles.wrong += 1;
                        let source = &self.shared.sources[self.source];
                        let just_now = source.set_aside() && !doubted;
                        if troubles.wrong > 1 || just_now {
                            return Err(Stop::Elsewhere(error));
                        }
                        // Once more, over a connection that did not carry the wrong bytes.
                        role = Role::Fresh;
                    }
                },
                Err(trouble) => {
                    let fruit = self.job.partial().len().saturating_sub(before);
                    stale = self.weigh(trouble, &resolved, fruit, &mut troubles).await?;
                }
            }
            count(&self.net().counters.retries);
        }
    }

    /// Waits out a pause that the content's server asked for, unless another source is there and the
    /// pause is long.
    async fn wait_for_content(
        &self,
        http: &HttpSource,
        others: bool,
        resolved: &Resolved,
        troubles: &Troubles,
    ) -> Result<(), Stop> {
        let pause = http.content.remaining(self.net().clock.as_ref());
        if others && pause > PATIENCE {
            let why = format!("it asked for a pause of {} s", pause.as_secs());
            return Err(self.blame(unreachable(&resolved.url, troubles.requests, why)));
        }
        http.content.pass(self.net()).await;
        Ok(())
    }

    /// A prefix from another source is kept only where the end will be proved by a digest, or both
    /// sources state that they hold the same file.
    fn take_over(&self, resolved: &Resolved, facts: &FileFacts) {
        let mut partial = self.job.partial();
        if partial.source == Some(self.source) {
            return;
        }
        let foreign = partial.len() > 0;
        let same = facts.sha256.is_some() && resolved.sha256 == facts.sha256 && !partial.doubtful;
        if foreign && !same && self.digest(facts).is_none() {
            let lost = partial.clear();
            self.net().counters.wasted_bytes.fetch_add(lost, Relaxed);
        }
        partial.source = (partial.len() == 0).then_some(self.source);
    }

    /// The attempt, and beside it a second one if the watch finds it slow. The first to finish
    /// wins; the other's connection is dropped.
    async fn pull(&self, attempt: &Attempt<'_>) -> Result<(), Trouble> {
        self.meter.restart();
        // Whether the bell rang in this attempt: it rings once a span, and waiting for a second
        // request that was never made would be waiting for ever.
        let doubled = AtomicBool::new(false);
        // What is handed on at once has no second copy to race with: a slow one is begun afresh.
        let piped = self.job.partial().pipe.is_some();
        let mut first = pin!(attempt.run(&self.job.partial));
        let mut second = pin!(self.second(attempt, &doubled));
        let mut first_failed = None;
        let mut second_failed = false;
        loop {
            tokio::select! {
                done = &mut first, if first_failed.is_none() => match done {
                    Err(trouble) if doubled.load(Relaxed) && !second_failed => {
                        first_failed = Some(trouble);
                    }
                    done => return done,
                },
                () = self.meter.hedge.notified(), if piped => {
                    self.meter.hedged.store(false, Relaxed);
                    return Err(Trouble::Again { why: "too slow".to_owned() });
                }
                (done, partial) = &mut second, if !piped && !second_failed => match done {
                    Ok(()) => {
                        let loser = std::mem::replace(&mut *self.job.partial(), partial);
                        attempt.waste(loser.len());
                        return Ok(());
                    }
                    Err(_) => {
                        second_failed = true;
                        if let Some(trouble) = first_failed.take() {
                            return Err(trouble);
                        }
                    }
                },
                () = self.meter.slow.notified(), if first_failed.is_none() => {
                    let trouble = Trouble::Again { why: "too slow".to_owned() };
                    if !doubled.load(Relaxed) || second_failed {
                        return Err(trouble);
                    }
                    first_failed = Some(trouble);
                }
            }
        }
    }

    /// Waits for the watch's bell, then fetches what is missing over a connection of its own.
    async fn second(
        &self,
        attempt: &Attempt<'_>,
        doubled: &AtomicBool,
    ) -> (Result<(), Trouble>, Partial) {
        self.meter.hedge.notified().await;
        doubled.store(true, Relaxed);
        attempt.source.content.pass(self.net()).await;
        count(&self.net().counters.hedges);
        let partial = Mutex::new(self.job.partial().clone());
        let own = Meter::new();
        let second = Attempt {
            role: Role::Fresh,
            meter: &own,
            ..*attempt
        };
        let done = second.run(&partial).await;
        let partial = std::mem::take(&mut *lock(&partial));
        (done, partial)
    }

    /// Holds the whole span against its digest, if it has one.
    fn prove(&self, facts: &FileFacts, resolved: &Resolved) -> Result<Arrived, HubError> {
        let mut partial = self.job.partial();
        if partial.pipe.is_some() {
            return Ok(self.arrived(Bytes::new(), Digest([0; 32])));
        }
        let sum = partial.digest();
        let Some(expected) = self.digest(facts).filter(|expected| *expected != sum) else {
            let bytes = std::mem::take(&mut *partial).bytes;
            return Ok(self.arrived(bytes, sum));
        };
        // Of a span pieced together nobody knows which part is wrong.
        let whole = partial.source == Some(self.source);
        let lost = partial.clear();
        partial.source = Some(self.source);
        drop(partial);
        self.net().counters.wasted_bytes.fetch_add(lost, Relaxed);
        if whole {
            let source = &self.shared.sources[self.source];
            source.lied(self.net(), &self.job.span.file, self.job.span.range);
        }
        let url = address::shown_url(&resolved.url);
        Err(HubError::wrong_digest(
            &url,
            self.job.span.to_string(),
            expected,
            sum,
        ))
    }

    /// Waits as the trouble demands. `Ok` means once more; it may name an address that is stale.
    async fn weigh(
        &self,
        trouble: Trouble,
        resolved: &Resolved,
        fruit: u64,
        troubles: &mut Troubles,
    ) -> Result<Option<u64>, Stop> {
        let enough = FRUIT.min(self.job.span.range.len() / 8).max(1);
        if fruit >= enough {
            troubles.fruitless = 0;
        }
        let give_up = |troubles: &Troubles, why: String| {
            self.blame(unreachable(&resolved.url, troubles.requests, why))
        };
        match trouble {
            Trouble::Fatal(error) => Err(Stop::Fatal(error)),
            Trouble::Elsewhere(error) => Err(self.blame(error)),
            Trouble::Changed(error) => {
                let lost = self.job.partial().clear();
                self.net().counters.wasted_bytes.fetch_add(lost, Relaxed);
                self.shared.sources[self.source].retire(self.net(), &error.to_string());
                Err(Stop::Elsewhere(error))
            }
            Trouble::Stale { .. } if troubles.stale < STALE_MAX => {
                troubles.stale += 1;
                Ok(None)
            }
            Trouble::Renew { status, why } => {
                troubles.renewals += 1;
                if troubles.renewals > RENEWALS_MAX {
                    return Err(self.blame(HubError::Refused {
                        url: address::shown_url(&resolved.url),
                        status,
                        message: format!("a freshly signed address was refused: {why}"),
                    }));
                }
                Ok(Some(resolved.generation))
            }
            Trouble::Mismatch { why } => {
                troubles.mismatches += 1;
                if troubles.mismatches >= MISMATCHES_MAX {
                    return Err(self.blame(super::resolve::broken(&resolved.url, &why)));
                }
                self.net().back_off(troubles.mismatches).await;
                Ok(None)
            }
            Trouble::Busy { why, told } => {
                self.shared.halve(self.source);
                troubles.fruitless += 1;
                if troubles.fruitless >= self.net().timing.attempts {
                    return Err(give_up(troubles, why));
                }
                if !told {
                    self.net().back_off(troubles.fruitless).await;
                }
                Ok(None)
            }
            Trouble::Again { why } | Trouble::Stale { why } => {
                let source = &self.shared.sources[self.source];
                source.failures.fetch_add(1, Relaxed);
                troubles.fruitless += 1;
                if troubles.fruitless >= self.net().timing.attempts {
                    return Err(give_up(troubles, why));
                }
                // Where something came, the connection broke; the server is not in trouble.
                if fruit == 0 {
                    self.net().back_off(troubles.fruitless).await;
                }
                Ok(None)
            }
        }
    }

    /// Notes what the error says about the source, beyond this span.
    fn blame(&self, error: HubError) -> Stop {
        let source = &self.shared.sources[self.source];
        match &error {
            HubError::CapReached { .. } | HubError::Cancelled => return Stop::Fatal(error),
            HubError::NotFound { .. } => {}
            HubError::WrongContent { .. } => source.retire(self.net(), &error.to_string()),
            _ => source.failed(self.net(), &error),
        }
        Stop::Elsewhere(error)
    }
}

/// Runs a future to its end or until the job is interrupted.
pub(super) async fn unless_interrupted<T>(job: &Job, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = job.control.interrupted() => None,
        done = work => Some(done),
    }
}
