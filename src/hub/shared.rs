//! What the hub's threads share, and the loop that keeps lanes busy.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

use tokio::runtime::Handle;
use tokio::time::sleep;

use super::HubError;
use super::HubStats;
use super::Notice;
use super::Snapshot;
use super::SourceStats;
use super::job::Job;
use super::net::Net;
use super::queue::Next;
use super::queue::Queue;
use super::queue::hopeless;
use super::resolve::Wanted;
use super::source::Kind;
use super::source::Source;
use super::span::Errand;
use super::span::Stop;
use super::span::unless_interrupted;
use super::watch::Meter;

pub(super) struct Shared {
    pub(super) net: Net,
    pub(super) sources: Vec<Source>,
    pub(super) offline: bool,
    pub(super) queue: Mutex<Queue>,
    pub(super) threads: Handle,
}

impl Shared {
    pub(super) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts whatever can start.
    pub(super) fn pump(self: &Arc<Self>) {
        loop {
            let next = self.queue().next(&self.sources, &self.net);
            match next {
                Next::Nothing => return,
                Next::Fail(mut job) => {
                    let error = hopeless(&mut job);
                    self.threads
                        .spawn(async move { job.deliver.call(Err(error)) });
                }
                Next::Start(job, source, meter) => {
                    let shared = Arc::clone(self);
                    self.threads.spawn(shared.run(job, source, meter));
                }
            }
        }
    }

    async fn run(self: Arc<Self>, mut job: Job, source: usize, meter: Arc<Meter>) {
        let mut lane = Lane {
            shared: Arc::clone(&self),
            id: job.id,
            source,
            delivered: false,
        };
        let errand = Errand {
            shared: &self,
            job: &job,
            source,
            meter: &meter,
        };
        let done = unless_interrupted(&job, errand.run()).await;
        lane.delivered = matches!(done, Some(Ok(_)));
        // The lane is free before the callback runs, so that whatever it asks for can start.
        drop(lane);
        match done {
            Some(Ok(arrived)) => job.deliver.call(Ok(arrived)),
            Some(Err(Stop::Fatal(error))) => job.deliver.call(Err(error)),
            Some(Err(Stop::Elsewhere(error))) => {
                job.tried[source] = true;
                job.blame(error);
                self.requeue(job);
            }
            None if job.control.cancelled() => drop(job),
            None => {
                job.control.resume();
                self.requeue(job);
            }
        }
        self.pump();
    }

    fn requeue(&self, job: Job) {
        if job.control.cancelled() {
            return;
        }
        // A closed queue gives the job back; dropping it tells its owner.
        let _ = self.queue().push_front(job);
    }

    /// Whether another source than `source` could still serve the job.
    pub(super) fn others(&self, job: &Job, source: usize) -> bool {
        (0..self.sources.len()).any(|i| {
            let known = i != source && !job.tried[i];
            known && !self.sources[i].set_aside() && !self.sources[i].resting(&self.net)
        })
    }

    /// Resolves one file at the source that would be asked for it.
    pub(super) async fn prepare(&self, snapshot: &Snapshot, path: &str) {
        let fit = |s: &&Source| !s.set_aside() && !s.resting(&self.net);
        let Some(source) = self.sources.iter().find(fit) else {
            return;
        };
        if let Kind::Http(http) = &source.kind {
            let wanted = Wanted {
                snapshot,
                path,
                stale: None,
                patience: None,
            };
            // Whoever needs the file will meet the error, and handle it.
            let _ = http.resolve(&self.net, wanted).await;
        }
    }

    /// Fewer spans at a time from a source that has too much to do.
    pub(super) fn halve(&self, source: usize) {
        // One overload is met by every lane, and is one reason, not many.
        let halved = self.queue().lanes[source].halve_once(&self.net.timing);
        if let Some(lanes) = halved {
            self.collapsed(source, lanes);
        }
    }

    fn collapsed(&self, source: usize, lanes: usize) {
        self.net.notice(&Notice::Collapse {
            source: self.sources[source].name.to_string(),
            lanes,
        });
    }

    /// Looks at speeds again and again, for as long as the hub lives.
    pub(super) async fn watch(shared: Weak<Shared>) {
        loop {
            let tick = match shared.upgrade() {
                Some(shared) => shared.net.timing.tick,
                None => return,
            };
            sleep(tick).await;
            let Some(shared) = shared.upgrade() else {
                return;
            };
            let collapsed = shared.queue().tick(&shared.sources, &shared.net);
            for (source, lanes) in collapsed {
                shared.collapsed(source, lanes);
            }
            shared.pump();
        }
    }

    pub(super) fn stats(&self) -> HubStats {
        let queue = self.queue();
        let counters = &self.net.counters;
        let timing = &self.net.timing;
        let speeds = queue.lanes.iter().map(|lanes| lanes.speed_lately(timing));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a speed is positive and small"
        )]
        let bytes_per_s = speeds.sum::<f64>() as u64;
        let source = |(source, lanes): (&Source, &super::watch::Lanes)| SourceStats {
            name: Arc::clone(&source.name),
            spans: source.spans.load(Relaxed),
            body_bytes: source.body_bytes.load(Relaxed),
            failures: source.failures.load(Relaxed),
            wrong: source.wrong.load(Relaxed),
            lanes: lanes.busy,
            lanes_limit: lanes.limit,
            set_aside: source.set_aside(),
        };
        HubStats {
            api: counters.api.load(Relaxed),
            resolves: counters.resolves.load(Relaxed),
            ranges: counters.ranges.load(Relaxed),
            body_bytes: counters.body_bytes.load(Relaxed),
            wasted_bytes: counters.wasted_bytes.load(Relaxed),
            meta_bytes: counters.meta_bytes.load(Relaxed),
            bytes_per_s,
            rate_max: self.net.budget.rate(),
            bytes_max: self.net.budget.max(),
            counted_bytes: self.net.budget.used(),
            lanes: queue.running(),
            waiting: queue.waiting(),
            retries: counters.retries.load(Relaxed),
            hedges: counters.hedges.load(Relaxed),
            clock_ahead: *counters
                .clock
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
            sources: self.sources.iter().zip(&queue.lanes).map(source).collect(),
        }
    }

    /// What is said when every source failed.
    pub(super) fn first_error(errors: Vec<HubError>, what: impl FnOnce() -> String) -> HubError {
        // The first source in order was meant; but that it lacks something says less than that
        // another one failed.
        let mut errors = errors.into_iter();
        let first = errors.next();
        match first {
            Some(HubError::NotFound { .. }) => errors
                .find(|e| !matches!(e, HubError::NotFound { .. }))
                .or(first)
                .unwrap_or(HubError::Cancelled),
            Some(error) => error,
            None => HubError::NotFound {
                what: what(),
                place: "any source: none is configured".to_owned(),
            },
        }
    }
}

/// A lane in use; dropping it gives it back, even if the task panicked.
struct Lane {
    shared: Arc<Shared>,
    id: u64,
    source: usize,
    delivered: bool,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.shared
            .queue()
            .ended(self.id, self.source, self.delivered);
    }
}
