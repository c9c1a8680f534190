//! How much may ride along in a sweep that somebody waits for.

use std::time::Duration;

/// Rows of prompts in one sweep, at most. Each expert is fetched and decoded once for all of them.
const PREFILL_ROWS: usize = 512;
/// A sweep with company may take so many times what it takes without.
const STRETCH: u32 = 3;
/// Below this nobody feels the company.
const UNFELT: Duration = Duration::from_millis(20);
/// After so many sweeps with company one goes without, to know what that takes by now.
const LOOK_AGAIN: u32 = 64;

/// Rows that may accompany the decode rows of interactive sequences: found by trying, since what a
/// row costs depends on what is bound, the arithmetic, the disk or the link.
#[derive(Debug)]
pub(super) struct Pace {
    /// What a sweep of interactive decode rows alone takes.
    alone: Option<Duration>,
    rows: usize,
    since_alone: u32,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace {
            alone: None,
            rows: 64,
            since_alone: 0,
        }
    }

    /// Rows of company for the next such sweep.
    pub(super) fn company(&self) -> usize {
        match self.alone {
            Some(_) if self.since_alone < LOOK_AGAIN => self.rows,
            _ => 0,
        }
    }

    /// A sweep of interactive decode rows took so long, with so many rows of company.
    pub(super) fn swept(&mut self, took: Duration, company: usize) {
        let Some(alone) = self.alone.filter(|_| company > 0) else {
            self.since_alone = 0;
            self.alone = Some(self.alone.map_or(took, |before| (before * 3 + took) / 4));
            return;
        };
        self.since_alone += 1;
        let limit = (alone * STRETCH).max(UNFELT);
        if took > limit {
            // At least one, or what fills the gaps would never move.
            self.rows = (self.rows.min(company) / 2).max(1);
        } else if company >= self.rows && took < limit * 2 / 3 {
            self.rows = (self.rows * 2).min(PREFILL_ROWS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sweeps whose rows cost `row` each, until the company has settled; the longest sweep of the
    /// last twenty, and the rows that ride along.
    fn settle(row: Duration, alone: Duration) -> (Duration, usize) {
        let mut pace = Pace::new();
        let mut last = Vec::new();
        for _ in 0..100 {
            let company = pace.company();
            let took = alone + row * u32::try_from(company).unwrap();
            pace.swept(took, company);
            last.push(took);
        }
        (
            last.into_iter().rev().take(20).max().unwrap(),
            pace.company(),
        )
    }

    #[test]
    fn company_stretches_a_sweep_threefold_at_most() {
        for (row, alone) in [
            (1, 50),
            (10, 50),
            (40, 50),
            (1_000, 60_000),
            (30_000, 60_000),
        ] {
            let ms = Duration::from_millis;
            let (longest, rows) = settle(ms(row), ms(alone));
            assert!(longest <= ms(alone) * STRETCH, "{row} a row: {longest:?}");
            assert!(rows >= 1);
            // And is not refused where there is room for it.
            assert!(
                ms(row) * u32::try_from(rows).unwrap() * 4 >= ms(alone) * 2 || rows == PREFILL_ROWS,
                "{row}: {rows}"
            );
        }
    }

    #[test]
    fn what_fills_the_gaps_always_moves() {
        let (_, rows) = settle(Duration::from_secs(10), Duration::from_secs(1));
        assert_eq!(rows, 1);
    }

    #[test]
    fn the_first_sweep_goes_alone_and_another_from_time_to_time() {
        let mut pace = Pace::new();
        assert_eq!(pace.company(), 0);
        let mut alone = 0;
        for _ in 0..200 {
            let company = pace.company();
            alone += usize::from(company == 0);
            pace.swept(Duration::from_millis(100), company);
        }
        assert!((3..=5).contains(&alone), "{alone}");
    }
}
