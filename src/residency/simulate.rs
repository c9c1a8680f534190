//! What a cache would have done: a trace replayed against a policy and a budget, beside the best that any could do.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;

use super::policy::Policy;
use super::trace::Trace;
use crate::terms::ExpertKey;

/// How often a replay found an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Uses of an expert.
    pub uses: u64,
    /// Those that found it in the cache.
    pub hits: u64,
}

impl Replayed {
    /// Hits for each use, from 0 to 1. All experts are of one length: it is also the rate by bytes.
    pub fn rate(self) -> f64 {
        if self.uses == 0 {
            return 0.0;
        }
        self.hits as f64 / self.uses as f64
    }
}

/// Replays a trace through a cache of `capacity` experts that is empty at first.
///
/// A layer is looked up at once, before any of its experts comes or goes: so does the store. Those
/// that are here count as used first, in order; then come the others, each for the one that the
/// policy names, if it names one.
pub fn replay(trace: &Trace, capacity: usize, policy: &mut dyn Policy) -> Replayed {
    let mut held = HashSet::new();
    let mut replayed = Replayed::default();
    for sweep in &trace.sweeps {
        for layer in sweep {
            replayed.uses += layer.len() as u64;
            let (here, missing): (Vec<ExpertKey>, Vec<ExpertKey>) =
                layer.iter().partition(|key| held.contains(*key));
            replayed.hits += here.len() as u64;
            policy.asked(layer);
            for key in here {
                policy.used(key);
            }
            if capacity == 0 {
                continue;
            }
            for key in missing {
                if held.len() >= capacity {
                    match policy.evict(key) {
                        Some(gone) => held.remove(&gone),
                        None => continue,
                    };
                }
                held.insert(key);
                policy.inserted(key);
            }
            policy.end_of_layer(layer);
        }
        policy.end_of_sweep(&sweep.concat());
    }
    replayed
}

/// The most hits that any policy could have had: of what is held and what has just come, always keep
/// what is used again soonest.
///
/// Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966;
/// here a newcomer need not be kept.
pub fn belady(trace: &Trace, capacity: usize) -> Replayed {
    let layers: Vec<&Vec<ExpertKey>> = trace.sweeps.iter().flatten().collect();
    let mut next: HashMap<ExpertKey, usize> = HashMap::new();
    // Of each layer in turn, when each of its experts is used again.
    let mut again: Vec<Vec<usize>> = Vec::with_capacity(layers.len());
    for (at, layer) in layers.iter().enumerate().rev() {
        let uses = layer.iter();
        again.push(
            uses.map(|key| next.insert(*key, at).unwrap_or(usize::MAX))
                .collect(),
        );
    }
    again.reverse();
    let mut held: HashMap<ExpertKey, usize> = HashMap::new();
    let mut by_next: BTreeSet<(usize, ExpertKey)> = BTreeSet::new();
    let mut replayed = Replayed::default();
    for (layer, again) in layers.iter().zip(&again) {
        for key in layer.iter() {
            replayed.uses += 1;
            if let Some(at) = held.remove(key) {
                replayed.hits += 1;
                by_next.remove(&(at, *key));
            }
        }
        for (key, &at) in layer.iter().zip(again) {
            if at != usize::MAX {
                held.insert(*key, at);
                by_next.insert((at, *key));
            }
        }
        while held.len() > capacity {
            match by_next.pop_last() {
                Some((_, key)) => held.remove(&key),
                None => break,
            };
        }
    }
    replayed
}

/// Experts that a trace names at least once.
pub fn distinct(trace: &Trace) -> usize {
    let keys: HashSet<&ExpertKey> = trace.sweeps.iter().flatten().flatten().collect();
    keys.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residency::Lru;
    use crate::residency::TraceHead;
    use crate::residency::policies;

    fn trace(sweeps: Vec<Vec<Vec<ExpertKey>>>) -> Trace {
        Trace {
            head: TraceHead {
                model: "org/name".to_owned(),
                revision: "r".to_owned(),
                expert_bytes: 1,
            },
            sweeps,
        }
    }

    /// Sweeps of `layers` layers, each using `each` of 32 experts, low numbers oftener.
    fn skewed(seed: u64, sweeps: usize, layers: u16, each: usize) -> Trace {
        let mut state = seed;
        let mut draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 40) as f64 / (1u64 << 24) as f64;
            (unit * unit * 32.0) as u16
        };
        let mut layer = |layer| {
            let mut chosen = BTreeSet::new();
            while chosen.len() < each {
                chosen.insert(draw());
            }
            chosen
                .into_iter()
                .map(|expert| ExpertKey { layer, expert })
                .collect()
        };
        trace(
            (0..sweeps)
                .map(|_| (0..layers).map(&mut layer).collect())
                .collect(),
        )
    }

    #[test]
    fn one_token_over_and_over_hits_only_where_all_of_it_fits() {
        let sweep: Vec<Vec<ExpertKey>> = (0..4)
            .map(|layer| (0..2).map(|expert| ExpertKey { layer, expert }).collect())
            .collect();
        let trace = trace(vec![sweep; 10]);
        assert_eq!(distinct(&trace), 8);
        let lru = |capacity| replay(&trace, capacity, &mut Lru::new());
        assert_eq!(lru(8), Replayed { uses: 80, hits: 72 });
        assert_eq!(lru(6).hits, 0);
        // One of each layer is found before the other evicts its like of the next layer.
        assert_eq!(lru(7).hits, 36);
        assert_eq!(lru(0).hits, 0);
        assert_eq!(belady(&trace, 8).hits, 72);
        // Whoever keeps three of eight hits three in each of nine sweeps, or a little more by
        // keeping what has just come where nothing else is due.
        assert!((27..=36).contains(&belady(&trace, 3).hits));
        assert_eq!(belady(&trace, 0).hits, 0);
    }

    #[test]
    fn nobody_beats_the_bound_and_more_room_never_lowers_it() {
        for seed in 0..20 {
            let trace = skewed(seed, 40, 5, 4);
            let mut before = 0;
            for capacity in [0, 1, 4, 8, 20, 40, 80, 159, 160] {
                let bound = belady(&trace, capacity);
                assert!(bound.hits >= before);
                before = bound.hits;
                for mut policy in policies(capacity) {
                    let found = replay(&trace, capacity, policy.as_mut());
                    assert_eq!(found.uses, 40 * 5 * 4);
                    assert!(found.hits <= bound.hits, "{} at {capacity}", policy.name());
                }
            }
            let all = replay(&trace, 160, &mut Lru::new());
            assert_eq!(all.hits, all.uses - distinct(&trace) as u64);
            assert_eq!(all, belady(&trace, 160));
        }
    }

    #[test]
    fn the_bound_is_what_trying_everything_finds() {
        // Small enough to try every choice of what to keep.
        for seed in 0..10 {
            let trace = skewed(seed, 4, 2, 2);
            for capacity in 1..4 {
                let layers: Vec<_> = trace.sweeps.iter().flatten().cloned().collect();
                let best = try_all(&layers, capacity);
                assert_eq!(
                    belady(&trace, capacity).hits,
                    best,
                    "seed {seed}, {capacity}"
                );
            }
        }
    }

    fn try_all(layers: &[Vec<ExpertKey>], capacity: usize) -> u64 {
        let mut worlds: HashMap<BTreeSet<ExpertKey>, u64> = HashMap::from([(BTreeSet::new(), 0)]);
        for layer in layers {
            let mut then: HashMap<BTreeSet<ExpertKey>, u64> = HashMap::new();
            for (held, hits) in &worlds {
                let hits = hits + layer.iter().filter(|key| held.contains(key)).count() as u64;
                let all: Vec<_> = held
                    .iter()
                    .chain(layer)
                    .copied()
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .collect();
                for mask in 0..1u32 << all.len() {
                    if mask.count_ones() as usize > capacity {
                        continue;
                    }
                    let kept = all.iter().enumerate().filter(|(n, _)| mask >> n & 1 == 1);
                    let best = then.entry(kept.map(|(_, key)| *key).collect()).or_default();
                    *best = hits.max(*best);
                }
            }
            worlds = then;
        }
        worlds.into_values().max().unwrap_or(0)
    }
}
