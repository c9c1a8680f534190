//! Experts brought before they are asked for: the hottest that a cache can hold.

use std::collections::VecDeque;
use std::time::Duration;

use super::ResidencyError;
use super::install::Installed;
use super::install::Manner;
use super::open::InstallObserver;
use super::open::Opened;
use crate::terms::ExpertKey;

/// What warming a cache would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Warming {
    /// The experts that the cache is to hold, hottest first: as many as its budget has room for.
    pub wanted: Vec<ExpertKey>,
    /// Of these, how many the store lacks.
    pub missing: u64,
    /// Of those, the ones to be fetched, hottest first: as many as may be.
    pub fetch: Vec<ExpertKey>,
}

impl Opened {
    /// What of `order`, hottest first, is worth having and not here; at most `bytes_max` bytes of it are to be fetched.
    pub fn warming(&self, order: &[ExpertKey], bytes_max: Option<u64>) -> Warming {
        let len = self.layout.expert_len().max(1);
        let room = |bytes: u64| usize::try_from(bytes / len).unwrap_or(usize::MAX);
        let held = room(self.store.store().budget().limit());
        let wanted: Vec<ExpertKey> = order.iter().take(held).copied().collect();
        let lacking = wanted.iter().filter(|key| !self.store.contains(**key, len));
        let lacking: Vec<ExpertKey> = lacking.copied().collect();
        let most = bytes_max.map_or(usize::MAX, room);
        Warming {
            missing: lacking.len() as u64,
            fetch: lacking.into_iter().take(most).collect(),
            wanted,
        }
    }

    /// Fetches what was planned, the hottest first, and answers what was moved and what ended it early: a failure, a
    /// limit or a stop. What was fetched is kept in any case, and a later plan goes on from there.
    ///
    /// Room is made at the cost of what is not wanted, never of what is: the wanted count as used last, the hottest
    /// as the very last.
    ///
    /// With `quiet` an expert is begun only when no other process has fetched any for that long.
    pub fn warm(
        &self,
        plan: &Warming,
        quiet: Option<Duration>,
        observer: &dyn InstallObserver,
    ) -> (Installed, Option<ResidencyError>) {
        let mut installed = Installed::default();
        if plan.fetch.is_empty() {
            return (installed, None);
        }
        if self.hub.is_none() {
            return (
                installed,
                Some(self.missing_now(plan.fetch.first().copied())),
            );
        }
        let coldest_first: Vec<ExpertKey> = plan.wanted.iter().rev().copied().collect();
        self.store.warm_up(&plan.wanted);
        self.store.promote(&coldest_first);
        let total = plan.fetch.len() as u64 * self.layout.expert_len();
        observer.stage("warming the cache", 0, total);
        let todo: VecDeque<ExpertKey> = plan.fetch.iter().copied().collect();
        let manner = Manner {
            strict: true,
            quiet,
        };
        let brought = self.install_one_by_one(todo, manner, &mut installed, observer);
        observer.done();
        // By itself each would be as recent as it came: the hottest, which came first, would go first.
        for key in coldest_first {
            self.store.touch(&[key]);
        }
        (installed, brought.err())
    }
}
