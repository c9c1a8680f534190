//! Speeds: of a span against its peers, of a source against its past.
//!
//! A read timeout notices silence, never slowness: a server that drips a byte now and then holds a
//! span for ever. And more connections are not always faster: some networks punish the sixth.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::Instant;

use futures_util::FutureExt as _;
use tokio::sync::Notify;

use super::Timing;

/// Lanes a source starts with.
pub(super) const LANES_FIRST: usize = 4;
/// A span this much slower than its peers' median gets a second request.
const HEDGE_SHARE: f64 = 0.15;
/// A span at least this fast (bytes a second) is never called slow.
const HEDGE_FLOOR: f64 = 1_048_576.0;
/// Second requests may cost this share of all bytes.
const HEDGE_COST: f64 = 0.10;
/// Fewest peers that make a median.
const PEERS_MIN: usize = 3;
/// Throughput below this share of the best means that lanes stand in each other's way.
const COLLAPSE: f64 = 0.3;

/// One running span's bytes over time.
pub(super) struct Meter {
    born: Instant,
    bytes: AtomicU64,
    /// Of the attempt under way: its first entry is its start.
    past: Mutex<VecDeque<(Instant, u64)>>,
    /// Whether an attempt is under way. A span that waits, for its address or because its server
    /// asked it to, is not slow, and is no peer of those that move.
    moving: AtomicBool,
    pub(super) hedged: AtomicBool,
    /// Rings when a second request should be made.
    pub(super) hedge: Notify,
    /// Rings when the attempt should be given up.
    pub(super) slow: Notify,
}

impl Meter {
    pub(super) fn new() -> Self {
        let born = Instant::now();
        Meter {
            born,
            bytes: AtomicU64::new(0),
            past: Mutex::new(VecDeque::from([(born, 0)])),
            moving: AtomicBool::new(false),
            hedged: AtomicBool::new(false),
            hedge: Notify::new(),
            slow: Notify::new(),
        }
    }

    pub(super) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// A new attempt begins. It is not judged by what the last one did, nor by a bell that rang
    /// for that.
    pub(super) fn restart(&self) {
        let mut past = self.past();
        past.clear();
        past.push_back((Instant::now(), self.bytes()));
        drop(past);
        let _ = self.slow.notified().now_or_never();
        self.moving.store(true, Relaxed);
    }

    /// The attempt is over.
    pub(super) fn rest(&self) {
        self.moving.store(false, Relaxed);
    }

    fn moving(&self) -> bool {
        self.moving.load(Relaxed)
    }

    fn past(&self) -> MutexGuard<'_, VecDeque<(Instant, u64)>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much of its past can be judged, at most as much as is kept.
    fn age(&self) -> Duration {
        let first = self.past().front().map(|(at, _)| at.elapsed());
        first.unwrap_or_default()
    }

    /// Notes where it stands and forgets what lies further back than `keep`.
    fn sample(&self, keep: Duration) {
        let mut past = self.past();
        past.push_back((Instant::now(), self.bytes()));
        while past.len() > 2 && past.front().is_some_and(|(at, _)| at.elapsed() > keep) {
            past.pop_front();
        }
    }

    /// Bytes a second over the last `window`, or since the attempt began if that is shorter.
    fn speed(&self, window: Duration) -> f64 {
        let past = self.past();
        let within = past.iter().find(|(at, _)| at.elapsed() <= window);
        match within.or(past.back()) {
            Some((at, bytes)) => per_second(self.bytes() - bytes, at.elapsed()),
            None => 0.0,
        }
    }

    pub(super) fn average(&self) -> f64 {
        per_second(self.bytes(), self.born.elapsed())
    }
}

#[expect(clippy::cast_precision_loss, reason = "a speed, not a count")]
fn per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(0.001)
}

/// A running span as the watch sees it.
pub(super) struct Watched<'a> {
    pub(super) meter: &'a Meter,
    /// Bytes it still lacks.
    pub(super) missing: u64,
}

/// Rings the bells of spans that are slow beside their peers.
///
/// `finished` holds the average speeds of spans that ended lately; `all_bytes` is what the source
/// gave so far and `hedge_bytes` what second requests cost of it.
pub(super) fn ring(
    running: &[Watched<'_>],
    finished: &VecDeque<f64>,
    timing: &Timing,
    all_bytes: u64,
    hedge_bytes: &mut u64,
) {
    let window = timing.speed_window;
    let keep = window * 3 + timing.tick * 2;
    let mut speeds = Vec::new();
    for span in running {
        span.meter.sample(keep);
        speeds.push(span.meter.speed(window));
    }
    for (i, span) in running.iter().enumerate() {
        if !span.meter.moving() || span.meter.age() < window {
            continue;
        }
        let peers = running.iter().zip(&speeds).enumerate();
        let peers: Vec<f64> = peers
            .filter(|(j, (peer, _))| *j != i && peer.meter.moving())
            .filter(|(_, (peer, _))| peer.meter.age() >= timing.tick)
            .map(|(_, (_, speed))| *speed)
            .collect();
        // With too few beside it, those that ended lately stand in.
        let median = if peers.len() >= PEERS_MIN {
            median(peers)
        } else {
            let lately = finished.iter().copied().chain(peers);
            median(lately.collect())
        };
        let slow_beside = median.is_some_and(|m| speeds[i] < HEDGE_SHARE * m);
        let affordable = within(*hedge_bytes + span.missing, all_bytes, HEDGE_COST);
        if slow_beside && speeds[i] < HEDGE_FLOOR && affordable {
            if !span.meter.hedged.swap(true, Relaxed) {
                *hedge_bytes += span.missing;
                span.meter.hedge.notify_one();
            }
            continue;
        }
        drop_dripping(span.meter, median, timing);
    }
}

/// The floor under which an attempt is given up. A link that is slow for everybody is only slow,
/// so the floor holds beside faster peers; alone, only a drip falls below it.
fn drop_dripping(meter: &Meter, median: Option<f64>, timing: &Timing) {
    let long = timing.speed_window * 3;
    if meter.age() < long {
        return;
    }
    #[expect(clippy::cast_precision_loss, reason = "a speed, not a count")]
    let floor = timing.speed_min as f64;
    let speed = meter.speed(long);
    let beside = median.is_some_and(|m| speed < m / 4.0);
    if (speed < floor && beside) || speed < floor / 16.0 {
        meter.slow.notify_one();
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share, not a count")]
fn within(part: u64, whole: u64, share: f64) -> bool {
    part as f64 <= whole as f64 * share
}

/// `None` for fewer than [`PEERS_MIN`] values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    if values.len() < PEERS_MIN {
        return None;
    }
    values.sort_by(f64::total_cmp);
    Some(values[values.len() / 2])
}

/// How many spans a source may have in flight, and why.
pub(super) struct Lanes {
    pub(super) limit: usize,
    pub(super) busy: usize,
    max: usize,
    /// Not above this after a collapse, for a while.
    ceiling: Option<(usize, Instant)>,
    hold_until: Option<Instant>,
    halved: Option<Instant>,
    changed: Instant,
    speed_at_change: f64,
    best: f64,
    best_at: Instant,
    /// How many lanes were open when throughput was best.
    best_lanes: usize,
    first_use: Option<Instant>,
    full_since: Option<Instant>,
    past: VecDeque<(Instant, u64)>,
}

impl Lanes {
    pub(super) fn new(max: usize) -> Self {
        let now = Instant::now();
        Lanes {
            limit: LANES_FIRST.min(max),
            busy: 0,
            max,
            ceiling: None,
            hold_until: None,
            halved: None,
            changed: now,
            speed_at_change: 0.0,
            best: 0.0,
            best_at: now,
            best_lanes: 0,
            first_use: None,
            full_since: None,
            past: VecDeque::new(),
        }
    }

    pub(super) fn free(&self) -> bool {
        self.busy < self.limit
    }

    fn speed(&self, window: Duration) -> f64 {
        let Some((to, after)) = self.past.back() else {
            return 0.0;
        };
        let first = self.past.iter().find(|(at, _)| *to - *at <= window);
        match first {
            Some((from, before)) if to > from => per_second(after - before, *to - *from),
            _ => 0.0,
        }
    }

    /// Bytes a second over the last two seconds or so.
    pub(super) fn speed_lately(&self, timing: &Timing) -> f64 {
        self.speed(timing.tick * 4)
    }

    /// One look at the source: the time, `total` bytes so far, whether spans wait for it. Returns
    /// the new number of lanes if throughput collapsed.
    pub(super) fn tick(
        &mut self,
        now: Instant,
        total: u64,
        waiting: bool,
        timing: &Timing,
    ) -> Option<usize> {
        self.past.push_back((now, total));
        let keep = timing.speed_window + timing.tick * 2;
        while self.past.len() > 2 && self.past.front().is_some_and(|(at, _)| now - *at > keep) {
            self.past.pop_front();
        }
        if self.busy == 0 || !(waiting || self.busy >= self.limit) {
            self.full_since = None;
            return None;
        }
        let first = *self.first_use.get_or_insert(now);
        let full = *self.full_since.get_or_insert(now);
        let lately = self.speed_lately(timing);
        if now - full >= timing.speed_window {
            let over_window = self.speed(timing.speed_window);
            if over_window < COLLAPSE * self.best && self.limit > 1 {
                return Some(self.halve(now, timing));
            }
        }
        if lately > self.best || now - self.best_at > timing.warm {
            self.best = lately;
            self.best_at = now;
            self.best_lanes = self.limit;
        }
        let held = self.hold_until.is_some_and(|until| now < until);
        if !held && waiting && now - self.changed >= timing.tick {
            self.grow(now, first, lately, timing);
        }
        None
    }

    fn grow(&mut self, now: Instant, first: Instant, lately: f64, timing: &Timing) {
        let ceiling = match self.ceiling {
            Some((lanes, until)) if now < until => lanes,
            _ => {
                self.ceiling = None;
                self.max
            }
        };
        if self.limit >= ceiling {
            return;
        }
        // After the first minute without trouble a whole layer may be asked for at once.
        if self.ceiling.is_none() && now - first >= timing.warm {
            self.limit = ceiling;
        } else if lately > 1.05 * self.speed_at_change || now - self.changed > timing.tick * 6 {
            self.limit += 1;
        } else {
            return;
        }
        self.changed = now;
        self.speed_at_change = lately;
    }

    /// [`Lanes::halve`], unless that was done a moment ago.
    pub(super) fn halve_once(&mut self, timing: &Timing) -> Option<usize> {
        let now = Instant::now();
        let just = self.halved.is_some_and(|at| now - at < timing.tick * 4);
        (!just).then(|| self.halve(now, timing))
    }

    /// Half the lanes, for a minute; and for ten no more than when throughput was best.
    fn halve(&mut self, now: Instant, timing: &Timing) -> usize {
        let fewer = self.limit.saturating_sub(1).max(1);
        let ceiling = match self.best_lanes {
            0 => fewer,
            best => best.min(fewer),
        };
        self.ceiling = Some((ceiling, now + timing.warm * 10));
        self.limit = (self.limit / 2).clamp(1, ceiling);
        self.hold_until = Some(now + timing.warm);
        self.halved = Some(now);
        self.changed = now;
        self.speed_at_change = 0.0;
        self.best = 0.0;
        self.best_lanes = 0;
        self.full_since = None;
        self.limit
    }
}
