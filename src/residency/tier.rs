//! Experts that stay in memory: so many of each layer, fed by what was just used.
//!
//! A token uses a layer's experts once, so a cache smaller than what a token uses, that always makes room for the
//! newest, would hit nothing: each would be gone before its next turn. So an expert used in this sweep or the one
//! before is never given up for another; what goes is what no recent sweep has used.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use bytes::Bytes;

use crate::terms::ExpertKey;

/// The memory tier.
#[derive(Debug)]
pub(super) struct Tier {
    /// Experts of each layer, by layer.
    quotas: Vec<usize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sweep: u64,
    layers: Vec<HashMap<u16, Held>>,
}

#[derive(Debug)]
struct Held {
    bytes: Bytes,
    /// Sweep of its last use.
    used: u64,
}

impl Tier {
    /// Room for `count` experts, shared alike between `layers` (by number; others have none).
    pub(super) fn new(count: u64, layers: &[u16]) -> Tier {
        let last = layers.iter().max().map_or(0, |last| usize::from(*last) + 1);
        let mut quotas = vec![0; last];
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let each = count.checked_div(layers.len()).unwrap_or(0);
        let more = count.checked_rem(layers.len()).unwrap_or(0);
        for (n, layer) in layers.iter().enumerate() {
            quotas[usize::from(*layer)] = each + usize::from(n < more);
        }
        Tier {
            state: Mutex::new(State {
                sweep: 0,
                layers: (0..last).map(|_| HashMap::new()).collect(),
            }),
            quotas,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An expert, if it is here; it is then used.
    pub(super) fn get(&self, key: ExpertKey) -> Option<Bytes> {
        let mut state = self.state();
        let sweep = state.sweep;
        let layer = state.layers.get_mut(usize::from(key.layer))?;
        let held = layer.get_mut(&key.expert)?;
        held.used = sweep;
        Some(held.bytes.clone())
    }

    /// Whether an expert is here; looking is no use of it.
    pub(super) fn holds(&self, key: ExpertKey) -> bool {
        let state = self.state();
        let layer = state.layers.get(usize::from(key.layer));
        layer.is_some_and(|layer| layer.contains_key(&key.expert))
    }

    /// Keeps an expert that was just used, if there is room or something that is not as fresh.
    pub(super) fn offer(&self, key: ExpertKey, bytes: &Bytes) {
        let mut state = self.state();
        let sweep = state.sweep;
        let Some(quota) = self.quotas.get(usize::from(key.layer)).copied() else {
            return;
        };
        let layer = &mut state.layers[usize::from(key.layer)];
        if layer.len() >= quota && !layer.contains_key(&key.expert) {
            let oldest = layer.iter().min_by_key(|(id, held)| (held.used, **id));
            match oldest.map(|(id, held)| (*id, held.used)) {
                Some((id, used)) if used + 1 < sweep => drop(layer.remove(&id)),
                _ => return,
            }
        }
        let bytes = bytes.clone();
        layer.insert(key.expert, Held { bytes, used: sweep });
    }

    /// A sweep is over.
    pub(super) fn end_of_sweep(&self) {
        self.state().sweep += 1;
    }

    /// Bytes held.
    #[cfg(test)]
    fn held(&self) -> usize {
        let state = self.state();
        let experts = state.layers.iter().flat_map(HashMap::values);
        experts.map(|held| held.bytes.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(layer: u16, expert: u16) -> ExpertKey {
        ExpertKey { layer, expert }
    }

    /// Uses the experts of one sweep; says how many were here.
    fn sweep(tier: &Tier, experts: &[u16]) -> usize {
        let mut hits = 0;
        for expert in experts {
            match tier.get(key(1, *expert)) {
                Some(_) => hits += 1,
                None => tier.offer(key(1, *expert), &Bytes::from(vec![0; 10])),
            }
        }
        tier.end_of_sweep();
        hits
    }

    #[test]
    fn a_scan_larger_than_the_quota_still_hits_it() {
        let tier = Tier::new(3, &[1]);
        let scan = [1, 2, 3, 4, 5];
        assert_eq!(sweep(&tier, &scan), 0);
        for _ in 0..5 {
            assert_eq!(sweep(&tier, &scan), 3);
        }
    }

    #[test]
    fn what_no_recent_sweep_has_used_makes_room() {
        let tier = Tier::new(3, &[1]);
        sweep(&tier, &[1, 2, 3]);
        sweep(&tier, &[4, 5, 6]);
        sweep(&tier, &[4, 5, 6]);
        assert_eq!(sweep(&tier, &[4, 5, 6]), 3);
    }

    #[test]
    fn quotas_are_shared_alike_and_kept() {
        let tier = Tier::new(5, &[1, 3]);
        assert_eq!(tier.quotas, [0, 3, 0, 2]);
        for layer in 0..5 {
            for expert in 0..9 {
                tier.offer(key(layer, expert), &Bytes::from(vec![0; 10]));
            }
        }
        assert_eq!(tier.held(), 50);
        let none = Tier::new(0, &[1]);
        none.offer(key(1, 1), &Bytes::from(vec![0; 10]));
        assert_eq!(none.held(), 0);
        assert_eq!(Tier::new(7, &[]).get(key(0, 0)), None);
    }
}
