//! How hot experts are: uses, of which each counts half after so many sweeps.
//!
//! What halves for all alike changes no order. So nothing is ever halved: a use in sweep `t` is worth
//! 2^(t / half-life) for ever, kept as a logarithm since it outgrows any number.

use std::collections::HashMap;
use std::hash::Hash;

/// Sweeps after which a use counts half.
const HALF_LIFE: f64 = 64.0;

/// How hot something is, in an order that sets can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Worth(u64);

impl Worth {
    /// Never used.
    pub(super) const NONE: Worth = Worth(0);

    fn new(log2: f64) -> Worth {
        // The bits of numbers from zero upwards are in the numbers' order.
        Worth(log2.max(0.0).to_bits() + 1)
    }
}

/// What every use so far is worth.
#[derive(Clone, Debug)]
pub struct Heat<K> {
    sweeps: u64,
    log2: HashMap<K, f64>,
}

impl<K> Default for Heat<K> {
    fn default() -> Self {
        Heat {
            sweeps: 0,
            log2: HashMap::new(),
        }
    }
}

impl<K: Copy + Eq + Hash> Heat<K> {
    /// The logarithm of what a use is worth now.
    #[expect(
        clippy::cast_precision_loss,
        reason = "sweeps take seconds: their count stays far below 2^53"
    )]
    pub(super) fn now(&self) -> f64 {
        self.sweeps as f64 / HALF_LIFE
    }

    /// Counts a use now.
    pub fn count(&mut self, key: K) -> Worth {
        let now = self.now();
        let log2 = self.log2.entry(key).or_insert(f64::NEG_INFINITY);
        *log2 = plus(*log2, now);
        Worth::new(*log2)
    }

    /// What all its uses are worth.
    pub fn worth(&self, key: K) -> Worth {
        self.log2.get(&key).map_or(Worth::NONE, |l| Worth::new(*l))
    }

    /// A sweep is over: a use from now on is worth a little more.
    pub fn end_of_sweep(&mut self) {
        self.sweeps += 1;
    }

    /// Sweeps so far.
    pub fn sweeps(&self) -> u64 {
        self.sweeps
    }

    /// All that was ever used, each with the logarithm of its worth; in no order.
    pub fn all(&self) -> impl Iterator<Item = (K, f64)> + '_ {
        self.log2.iter().map(|(key, log2)| (*key, *log2))
    }

    /// Has not less happened here than elsewhere: `sweeps` of them, and each use so told.
    pub(super) fn at_least(&mut self, sweeps: u64, told: impl Iterator<Item = (K, f64)>) {
        self.sweeps = self.sweeps.max(sweeps);
        for (key, log2) in told {
            let own = self.log2.entry(key).or_insert(f64::NEG_INFINITY);
            *own = own.max(log2);
        }
    }
}

/// log2(2^a + 2^b), without either power.
fn plus(a: f64, b: f64) -> f64 {
    let (high, low) = (a.max(b), a.min(b));
    high + (low - high).exp2().ln_1p() / std::f64::consts::LN_2
}
