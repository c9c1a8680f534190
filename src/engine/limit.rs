//! The limit of fetched bytes: a sweep that it breaks off is taken back, so that states stay whole.
//!
//! A limit that somebody set is no failure. What is computed by then has cost hours, so it must
//! neither be lost nor be computed from a state in which some layers have taken in a token that
//! others have not.

use std::sync::atomic::Ordering;

use super::sweeps::Machine;
use crate::hub::HubError;
use crate::model::Sequence;
use crate::residency::ResidencyError;

/// What a generation does where the limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtLimit {
    /// It fails.
    #[default]
    Fail,
    /// It waits for a higher one, or to be stopped.
    Wait,
}

/// The limit of fetched bytes, and what counts against it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchLimit {
    /// Bytes in all; `None` is no limit.
    pub max: Option<u64>,
    /// Bytes that came over the network so far.
    pub used: u64,
}

/// States as they were before a sweep that the limit may break off; none before others.
pub(super) struct Before(Vec<Sequence>);

impl Before {
    /// Clones share what has grown, so a copy takes what is fixed, and only while the sweep may need
    /// more than is left.
    pub(super) fn sweep(machine: &Machine, sequences: &[Sequence], rows: usize) -> Before {
        let left = machine.supply.opened().hub.as_ref();
        let left = left.and_then(|hub| hub.bytes_left());
        // Twice: a span that comes wrong is fetched again, and counts again.
        let near = left.is_some_and(|left| left / 2 < most(machine, rows));
        Before(if near { sequences.to_vec() } else { Vec::new() })
    }

    /// Takes the sweep back for those whom the limit broke off.
    pub(super) fn put_back(self, sequences: &mut [Sequence], failure: Option<&ResidencyError>) {
        if failure.is_some_and(|failure| reached(failure).is_some()) {
            for (now, before) in sequences.iter_mut().zip(self.0) {
                if now.poisoned() {
                    *now = before;
                }
            }
        }
    }
}

impl Machine {
    pub(super) fn set_at_limit(&self, at_limit: AtLimit) {
        let waits = at_limit == AtLimit::Wait;
        self.waits_at_limit.store(waits, Ordering::Relaxed);
    }

    pub(super) fn at_limit(&self) -> AtLimit {
        match self.waits_at_limit.load(Ordering::Relaxed) {
            true => AtLimit::Wait,
            false => AtLimit::Fail,
        }
    }
}

/// Bytes that a sweep of so many rows may need of experts, if none is here.
fn most(machine: &Machine, rows: usize) -> u64 {
    let spec = machine.model.spec();
    let experts = spec.moe.as_ref().map_or(0, |moe| {
        rows.saturating_mul(moe.top_k).min(moe.experts) * spec.moe_layers().count()
    });
    machine
        .supply
        .opened()
        .layout
        .expert_len()
        .saturating_mul(experts as u64)
}

/// The limit that an error tells of, if it does.
pub(super) fn reached(error: &ResidencyError) -> Option<u64> {
    match error {
        ResidencyError::Hub(HubError::CapReached { max }) => Some(max.0),
        _ => None,
    }
}
