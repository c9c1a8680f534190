//! Which span goes next, over which source, on which lane.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::Class;
use super::HubError;
use super::job::Control;
use super::job::Job;
use super::job::Partial;
use super::net::Net;
use super::source::Kind;
use super::source::Source;
use super::watch::Lanes;
use super::watch::Meter;
use super::watch::Watched;
use super::watch::ring;

/// Speeds remembered of spans that ended.
const FINISHED_MAX: usize = 16;

/// Everything that waits or runs.
pub(super) struct Queue {
    waiting: [VecDeque<Job>; 3],
    pub(super) lanes: Vec<Lanes>,
    running: HashMap<u64, Running>,
    finished: Vec<VecDeque<f64>>,
    hedge_bytes: Vec<u64>,
    closed: bool,
}

/// A span with a lane.
struct Running {
    source: usize,
    control: Arc<Control>,
    meter: Arc<Meter>,
    partial: Arc<Mutex<Partial>>,
    length: u64,
}

/// What to do next.
pub(super) enum Next {
    Start(Job, usize, Arc<Meter>),
    /// No source is left to ask.
    Fail(Job),
    Nothing,
}

impl Queue {
    pub(super) fn new(sources: &[Source], lanes_max: usize) -> Self {
        let lanes = |_: &Source| Lanes::new(lanes_max.max(1));
        Queue {
            waiting: Default::default(),
            lanes: sources.iter().map(lanes).collect(),
            running: HashMap::new(),
            finished: sources.iter().map(|_| VecDeque::new()).collect(),
            hedge_bytes: vec![0; sources.len()],
            closed: false,
        }
    }

    /// Whether the job was taken; a closed queue gives it back.
    pub(super) fn push(&mut self, job: Job) -> Result<(), Box<Job>> {
        if self.closed {
            return Err(Box::new(job));
        }
        self.waiting[job.control.class() as usize].push_back(job);
        Ok(())
    }

    /// Back to the head of its class, with what it has got so far.
    pub(super) fn push_front(&mut self, job: Job) -> Result<(), Box<Job>> {
        if self.closed {
            return Err(Box::new(job));
        }
        self.waiting[job.control.class() as usize].push_front(job);
        Ok(())
    }

    /// Takes a waiting job out.
    pub(super) fn remove(&mut self, id: u64) -> Option<Job> {
        self.waiting.iter_mut().find_map(|class| {
            let at = class.iter().position(|job| job.id == id)?;
            class.remove(at)
        })
    }

    /// Takes everything out and lets nothing in any more.
    pub(super) fn close(&mut self) -> Vec<Job> {
        self.closed = true;
        for running in self.running.values() {
            running.control.cancel();
        }
        self.waiting.iter_mut().flat_map(std::mem::take).collect()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    /// The next job that can start, its lane taken: of a higher class first, and within a class
    /// the one that waited longest. Lanes of another source than the one a higher class waits for
    /// are not left idle.
    pub(super) fn next(&mut self, sources: &[Source], net: &Net) -> Next {
        for class in [Class::Demand, Class::Bulk, Class::Hint] {
            for at in 0..self.waiting[class as usize].len() {
                let job = &self.waiting[class as usize][at];
                let source = choose(job, sources, net);
                let start = source.is_some_and(|s| self.admits(s, class));
                if source.is_some() && !start {
                    continue;
                }
                let Some(job) = self.waiting[class as usize].remove(at) else {
                    continue;
                };
                let Some(source) = source else {
                    return Next::Fail(job);
                };
                let meter = self.start(&job, source);
                return Next::Start(job, source, meter);
            }
        }
        // Demand that still waits found its lanes taken.
        self.displace_guesses();
        Next::Nothing
    }

    fn admits(&self, source: usize, class: Class) -> bool {
        let lanes = &self.lanes[source];
        let guesses = self.guesses().filter(|r| r.source == source).count();
        lanes.free() && (class != Class::Hint || guesses < (lanes.limit / 2).max(1))
    }

    fn guesses(&self) -> impl Iterator<Item = &Running> {
        self.running
            .values()
            .filter(|r| r.control.class() == Class::Hint)
    }

    /// Takes lanes from guesses, as many as demand waits for. What they got so far is kept.
    fn displace_guesses(&self) {
        let demand = self.waiting[Class::Demand as usize].len();
        for running in self.guesses().take(demand) {
            running.control.yield_lane();
        }
    }

    /// Takes a lane.
    fn start(&mut self, job: &Job, source: usize) -> Arc<Meter> {
        let meter = Arc::new(Meter::new());
        self.lanes[source].busy += 1;
        let running = Running {
            source,
            control: Arc::clone(&job.control),
            meter: Arc::clone(&meter),
            partial: Arc::clone(&job.partial),
            length: job.span.range.len(),
        };
        self.running.insert(job.id, running);
        meter
    }

    /// Gives the lane back.
    pub(super) fn ended(&mut self, id: u64, source: usize, delivered: bool) {
        self.lanes[source].busy -= 1;
        let Some(running) = self.running.remove(&id) else {
            return;
        };
        if delivered {
            let finished = &mut self.finished[source];
            finished.push_back(running.meter.average());
            if finished.len() > FINISHED_MAX {
                finished.pop_front();
            }
        }
    }

    pub(super) fn promote(&mut self, id: u64) {
        if let Some(job) = self.remove(id) {
            self.waiting[job.control.class() as usize].push_back(job);
        }
    }

    /// One look at every source. Returns those whose throughput collapsed, with their new lanes.
    pub(super) fn tick(&mut self, sources: &[Source], net: &Net) -> Vec<(usize, usize)> {
        let mut collapsed = Vec::new();
        let now = Instant::now();
        let waiting = self.waiting() > 0;
        for (i, source) in sources.iter().enumerate() {
            let total = source.body_bytes.load(Relaxed);
            if let Some(lanes) = self.lanes[i].tick(now, total, waiting, &net.timing) {
                collapsed.push((i, lanes));
            }
            let running: Vec<Watched<'_>> = self
                .running
                .values()
                .filter(|r| r.source == i)
                .map(|r| Watched {
                    meter: &r.meter,
                    missing: r
                        .length
                        .saturating_sub(super::transfer::lock(&r.partial).len()),
                })
                .collect();
            ring(
                &running,
                &self.finished[i],
                &net.timing,
                total,
                &mut self.hedge_bytes[i],
            );
        }
        collapsed
    }
}

/// The first source in order that may still serve the job: folders of this machine before whatever
/// costs the network, rested ones before those that failed a moment ago, and those that lied only
/// when nobody else is left.
fn choose(job: &Job, sources: &[Source], net: &Net) -> Option<usize> {
    let usable = |i: &usize| !job.tried[*i] && !sources[*i].set_aside();
    let here = |i: &usize| matches!(sources[*i].kind, Kind::Folder(_));
    let away = |i: &usize| !here(i);
    let all = 0..sources.len();
    let local = all.clone().filter(here).filter(usable);
    let mut order = local.chain(all.filter(away).filter(usable));
    let first = order.clone().next();
    let provable = job.span.digest.is_some();
    let last_resort = |i: &usize| !job.tried[*i] && sources[*i].last_resort(provable);
    order
        .find(|i| !sources[*i].resting(net))
        .or(first)
        .or_else(|| (0..sources.len()).find(last_resort))
}

/// What is said of a job that no source is left for.
pub(super) fn hopeless(job: &mut Job) -> HubError {
    job.error.take().unwrap_or_else(|| HubError::NotFound {
        what: format!(
            "{} of {} at {}",
            job.span, job.snapshot.repo, job.snapshot.commit
        ),
        place: "any source that is still asked".to_owned(),
    })
}
