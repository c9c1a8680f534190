//! What every request needs: clients, waits, counts, chance.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

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
        let doubled = self
            .timing
            .backoff
            .saturating_mul(1 << n.saturating_sub(1).min(16));
        let longest = doubled.min(self.timing.backoff_max);
        sleep(longest.mul_f64(self.chance.fraction())).await;
    }
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

/// Holds back requests to a hub that asked for a pause. Transfers already resolved do not pass it.
#[derive(Default)]
pub(super) struct Gate(Mutex<Duration>);

impl Gate {
    /// Nobody passes before `until` (of the clock's `elapsed`). Whether that is later than before.
    pub(super) fn close_until(&self, until: Duration) -> bool {
        let mut closed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let later = until > *closed;
        if later {
            *closed = until;
        }
        later
    }

    /// How long it stays closed.
    pub(super) fn remaining(&self, clock: &dyn Clock) -> Duration {
        let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        until.saturating_sub(clock.elapsed())
    }

    pub(super) async fn pass(&self, clock: &dyn Clock) {
        loop {
            let left = self.remaining(clock);
            if left.is_zero() {
                return;
            }
            // In slices, since the machine may sleep meanwhile and a test may turn the clock.
            sleep(left.min(Duration::from_millis(100))).await;
        }
    }
}
