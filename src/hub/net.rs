//! What every request needs: clients, waits, counts, chance.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::Instant;

use tokio::time::sleep;

use super::Clock;
use super::HubObserver;
use super::Notice;
use super::Timing;
use super::budget::Budget;
use super::clients::Clients;

/// Shared by all sources of one hub.
pub(super) struct Net {
    pub(super) clients: Clients,
    pub(super) timing: Timing,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observer: Arc<dyn HubObserver>,
    pub(super) budget: Budget,
    pub(super) counters: Counters,
    pub(super) chance: Chance,
}

impl Net {
    pub(super) fn notice(&self, notice: &Notice) {
        self.observer.notice(notice);
    }

    /// Waits before attempt `n` (from 1) with full jitter: many clients that failed together must
    /// not come back together.
    pub(super) async fn back_off(&self, n: u32) {
        sleep(back_off(&self.timing, n, self.chance.fraction())).await;
    }
}

/// The wait before attempt `n` (from 1), `chance` in `0.0..1.0` of the longest.
pub(super) fn back_off(timing: &Timing, n: u32, chance: f64) -> Duration {
    let doubled = timing
        .backoff
        .saturating_mul(1 << n.saturating_sub(1).min(16));
    doubled.min(timing.backoff_max).mul_f64(chance)
}

/// Counts that only grow.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) api: AtomicU64,
    pub(super) resolves: AtomicU64,
    pub(super) ranges: AtomicU64,
    pub(super) body_bytes: AtomicU64,
    pub(super) wasted_bytes: AtomicU64,
    pub(super) meta_bytes: AtomicU64,
    pub(super) retries: AtomicU64,
    pub(super) hedges: AtomicU64,
    /// Seconds by which a hub's clock was last seen ahead of ours.
    pub(super) clock: Mutex<Option<i64>>,
}

/// Adds one.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// A seeded stream of fractions (SplitMix64), so that a test can replay its waits.
pub(super) struct Chance(AtomicU64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Chance(AtomicU64::new(seed))
    }

    /// In `0.0..1.0`.
    pub(super) fn fraction(&self) -> f64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.0.fetch_add(STEP, Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let fraction = (z >> 11) as f64 / (1u64 << 53) as f64;
        fraction
    }
}

/// Holds back requests to a server that asked for a pause.
///
/// Those who waited pass one after the other. Let go all at once they would meet a limit that has
/// room for a few, be refused together, and come back together.
#[derive(Default)]
pub(super) struct Gate(Mutex<Door>);

#[derive(Default)]
struct Door {
    /// Nobody passes before, by the clock's `elapsed`.
    closed_until: Duration,
    /// When the next of those who waited may pass, by this machine's own time: a clock turned
    /// by hand must not let them all through.
    next: Option<Instant>,
}

impl Gate {
    fn door(&self) -> MutexGuard<'_, Door> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody passes for as long as `wait`. Whether that is news: servers count in whole seconds, and
    /// everybody who was on the way is told of the same pause.
    pub(super) fn close(&self, clock: &dyn Clock, wait: Duration) -> bool {
        let now = clock.elapsed();
        let mut door = self.door();
        let open = door.closed_until <= now;
        let news = open || now + wait > door.closed_until + Duration::from_secs(2);
        door.closed_until = door.closed_until.max(now + wait);
        news
    }

    /// How long it stays closed.
    pub(super) fn remaining(&self, clock: &dyn Clock) -> Duration {
        self.door().closed_until.saturating_sub(clock.elapsed())
    }

    /// Takes a place in the row of those who waited; returns how long it is until that comes.
    fn place(&self, gap: Duration) -> Duration {
        let now = Instant::now();
        let mut door = self.door();
        let at = door.next.map_or(now, |next| next.max(now));
        door.next = Some(at + gap);
        at - now
    }

    /// Waits until it is open. Who has not had to wait passes at once.
    pub(super) async fn pass(&self, net: &Net) {
        let mut waited = false;
        loop {
            let left = self.remaining(net.clock.as_ref());
            if !left.is_zero() {
                waited = true;
                // In slices, since the machine may sleep meanwhile and a test may turn the clock.
                sleep(left.min(Duration::from_millis(100))).await;
                continue;
            }
            if !waited {
                return;
            }
            // A gap of a random length: other clients on this line were told the same moment.
            let gap = net
                .timing
                .backoff
                .mul_f64(0.25 + net.chance.fraction() / 4.0);
            sleep(self.place(gap)).await;
            // Somebody in front may have been told to wait again.
            waited = !self.remaining(net.clock.as_ref()).is_zero();
        }
    }
}
