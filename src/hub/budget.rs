//! Limits a person sets: bytes a second, and bytes in all.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;
use tokio::time::sleep_until;

use super::HubError;
use crate::terms::Bytes;

/// No limit.
const NONE: u64 = u64::MAX;

/// Both limits and what counts against them. Bodies of every kind count.
pub(super) struct Budget {
    rate: AtomicU64,
    max: AtomicU64,
    ledger: Mutex<Ledger>,
}

struct Ledger {
    used: u64,
    /// Promised to spans in flight, so that none stops half way for lack of budget.
    reserved: u64,
    /// When the bytes received so far have been paid for at the rate.
    paid: Instant,
}

impl Budget {
    pub(super) fn new(rate: Option<u64>, max: Option<u64>) -> Self {
        Budget {
            rate: AtomicU64::new(rate.unwrap_or(NONE).max(1)),
            max: AtomicU64::new(max.unwrap_or(NONE)),
            ledger: Mutex::new(Ledger {
                used: 0,
                reserved: 0,
                paid: Instant::now(),
            }),
        }
    }

    pub(super) fn set_rate(&self, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(NONE).max(1), Relaxed);
    }

    pub(super) fn set_max(&self, max: Option<u64>) {
        self.max.store(max.unwrap_or(NONE), Relaxed);
    }

    pub(super) fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Relaxed)).filter(|rate| *rate != NONE)
    }

    pub(super) fn max(&self) -> Option<u64> {
        Some(self.max.load(Relaxed)).filter(|max| *max != NONE)
    }

    /// Bytes that may still be asked for; `None` without a limit.
    pub(super) fn left(&self) -> Option<u64> {
        let max = self.max()?;
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        Some(max.saturating_sub(ledger.used.saturating_add(ledger.reserved)))
    }

    /// Bytes that came so far.
    pub(super) fn used(&self) -> u64 {
        let ledger = self.ledger.lock();
        ledger.unwrap_or_else(PoisonError::into_inner).used
    }

    /// Sets `bytes` aside for one fetch.
    pub(super) fn reserve(&self, bytes: u64) -> Result<Reservation<'_>, HubError> {
        let max = self.max.load(Relaxed);
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = ledger
            .used
            .saturating_add(ledger.reserved)
            .saturating_add(bytes);
        if sum > max {
            return Err(HubError::CapReached { max: Bytes(max) });
        }
        ledger.reserved += bytes;
        drop(ledger);
        Ok(Reservation {
            budget: self,
            left: AtomicU64::new(bytes),
        })
    }

    /// Counts bytes nobody reserved: listings, and what a second attempt brings.
    fn charge(&self, reserved: u64, extra: u64) -> Result<(), HubError> {
        let max = self.max.load(Relaxed);
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.reserved -= reserved;
        ledger.used += reserved + extra;
        if extra > 0 && ledger.used.saturating_add(ledger.reserved) > max {
            return Err(HubError::CapReached { max: Bytes(max) });
        }
        Ok(())
    }

    /// Waits as long as `bytes` take at the rate. The socket is not read meanwhile, so the sender
    /// slows down by itself.
    async fn pace(&self, bytes: u64) {
        let rate = self.rate.load(Relaxed);
        if rate == NONE {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "a wait, not a count")]
        let cost = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let until = {
            let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
            // What was not used in the past cannot be made up for.
            ledger.paid = ledger.paid.max(Instant::now()) + cost;
            ledger.paid
        };
        sleep_until(until).await;
    }
}

/// Budget set aside for one fetch; what is left of it is given back on drop.
pub(super) struct Reservation<'a> {
    budget: &'a Budget,
    left: AtomicU64,
}

impl Reservation<'_> {
    /// Counts bytes that came, and waits for the rate.
    pub(super) async fn took(&self, bytes: u64) -> Result<(), HubError> {
        let take = |left: u64| Some(left.saturating_sub(bytes));
        let before = match self.left.fetch_update(Relaxed, Relaxed, take) {
            Ok(before) | Err(before) => before,
        };
        let reserved = before.min(bytes);
        self.budget.charge(reserved, bytes - reserved)?;
        self.budget.pace(bytes).await;
        Ok(())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let left = *self.left.get_mut();
        let mut ledger = self
            .budget
            .ledger
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        ledger.reserved -= left;
    }
}
