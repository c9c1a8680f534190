//! Which expert goes when there is no room: policies behind one trait, so that measurement may choose.
//!
//! A policy orders what is held; it does not hold it. Whoever does tells it of every use and asks it who goes.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::VecDeque;

use lru::LruCache;

use super::trace::Trace;
use crate::store::Heat;
use crate::store::Worth;
use crate::terms::ExpertKey;

/// The part of a cache that newcomers share, for S3-FIFO: one tenth, as in its paper.
const SMALL_PART: usize = 10;
/// Uses that S3-FIFO counts up to.
const USES_MAX: u8 = 3;

/// An order in which experts go.
pub trait Policy {
    /// As people say it.
    fn name(&self) -> &'static str;
    /// An expert that is held was used.
    fn used(&mut self, key: ExpertKey);
    /// An expert is held from now on, and used.
    fn inserted(&mut self, key: ExpertKey);
    /// Names the expert that goes for another, and is then no longer held; `None` if none is held,
    /// or the other is not to be kept.
    fn evict(&mut self, newcomer: ExpertKey) -> Option<ExpertKey>;
    /// A layer asks for these experts, in order, held or not, before any of them comes or goes.
    fn asked(&mut self, _layer: &[ExpertKey]) {}
    /// A layer is over that has used these experts, in order, held or not.
    fn end_of_layer(&mut self, _used: &[ExpertKey]) {}
    /// A sweep is over that has used these experts, in order of layer and expert, held or not.
    fn end_of_sweep(&mut self, used: &[ExpertKey]);
}

/// All policies, for a cache of so many experts.
pub fn policies(capacity: usize) -> Vec<Box<dyn Policy>> {
    vec![
        Box::new(Lru::new()),
        Box::new(Lfu::default()),
        Box::new(LeastStale::default()),
        Box::new(S3Fifo::new(capacity)),
    ]
}

/// The one used longest ago goes. This is what the store does unless something else was chosen.
#[derive(Debug)]
pub struct Lru(LruCache<ExpertKey, ()>);

impl Lru {
    /// Holds nothing yet.
    pub fn new() -> Lru {
        Lru(LruCache::unbounded())
    }
}

impl Default for Lru {
    fn default() -> Self {
        Lru::new()
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "LRU"
    }

    fn used(&mut self, key: ExpertKey) {
        self.0.promote(&key);
    }

    fn inserted(&mut self, key: ExpertKey) {
        self.0.push(key, ());
    }

    fn evict(&mut self, _: ExpertKey) -> Option<ExpertKey> {
        self.0.pop_lru().map(|(key, ())| key)
    }

    fn end_of_layer(&mut self, used: &[ExpertKey]) {
        for key in used {
            self.0.promote(key);
        }
    }

    fn end_of_sweep(&mut self, used: &[ExpertKey]) {
        self.end_of_layer(used);
    }
}

/// The one used least often goes, where a use counts ever less (see [`Heat`]); a newcomer that is
/// used less often than all that could go is not kept. This is what the store does where that was
/// chosen. It remembers what has gone: an expert that returns has not lost its past.
#[derive(Debug, Default)]
pub struct Lfu {
    heat: Heat<ExpertKey>,
    held: BTreeSet<(Worth, ExpertKey)>,
    /// What is held of the layer being computed: it does not go.
    in_use: HashSet<ExpertKey>,
}

impl Policy for Lfu {
    fn name(&self) -> &'static str {
        "LFU, decaying"
    }

    fn asked(&mut self, layer: &[ExpertKey]) {
        self.in_use.clear();
        for &key in layer {
            let held = self.held.remove(&(self.heat.worth(key), key));
            let worth = self.heat.count(key);
            if held {
                self.held.insert((worth, key));
                self.in_use.insert(key);
            }
        }
    }

    fn used(&mut self, _: ExpertKey) {}

    fn inserted(&mut self, key: ExpertKey) {
        self.held.insert((self.heat.worth(key), key));
    }

    fn evict(&mut self, newcomer: ExpertKey) -> Option<ExpertKey> {
        let free = |held: &&(Worth, ExpertKey)| !self.in_use.contains(&held.1);
        let coldest = *self.held.iter().find(free)?;
        if coldest > (self.heat.worth(newcomer), newcomer) {
            return None;
        }
        self.held.remove(&coldest);
        Some(coldest.1)
    }

    fn end_of_sweep(&mut self, _: &[ExpertKey]) {
        self.heat.end_of_sweep();
    }
}

/// The experts that a trace names, the hottest first: what LFU would keep longest. Ties go by layer, then
/// expert.
pub fn hottest(trace: &Trace) -> Vec<ExpertKey> {
    let mut heat = Heat::default();
    for sweep in &trace.sweeps {
        for key in sweep.iter().flatten() {
            heat.count(*key);
        }
        heat.end_of_sweep();
    }
    let mut worth: Vec<(ExpertKey, f64)> = heat.all().collect();
    worth.sort_unstable_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    worth.into_iter().map(|(key, _)| key).collect()
}

/// Of the experts whose last sweep is longest ago, the one whose layer comes again last goes: right
/// after a layer was computed, its own turn is a whole sweep away. Plain LRU evicts in a scan exactly
/// what comes next.
#[derive(Debug, Default)]
struct LeastStale {
    sweep: u64,
    layer: u16,
    last: HashMap<ExpertKey, u64>,
    held: BTreeMap<u64, BTreeSet<ExpertKey>>,
}

impl LeastStale {
    fn remove(&mut self, key: ExpertKey) {
        if let Some(sweep) = self.last.remove(&key)
            && let Some(of_sweep) = self.held.get_mut(&sweep)
        {
            of_sweep.remove(&key);
            if of_sweep.is_empty() {
                self.held.remove(&sweep);
            }
        }
    }
}

impl Policy for LeastStale {
    fn name(&self) -> &'static str {
        "least stale"
    }

    fn used(&mut self, key: ExpertKey) {
        self.remove(key);
        self.inserted(key);
    }

    fn inserted(&mut self, key: ExpertKey) {
        self.layer = key.layer;
        self.last.insert(key, self.sweep);
        self.held.entry(self.sweep).or_default().insert(key);
    }

    fn evict(&mut self, _: ExpertKey) -> Option<ExpertKey> {
        let (_, oldest) = self.held.first_key_value()?;
        let end = ExpertKey {
            layer: self.layer,
            expert: u16::MAX,
        };
        // Behind us, the nearest layer; if all lie ahead, the farthest.
        let key = oldest
            .range(..=end)
            .next_back()
            .or(oldest.last())
            .copied()?;
        self.remove(key);
        Some(key)
    }

    fn end_of_sweep(&mut self, _: &[ExpertKey]) {
        self.sweep += 1;
    }
}

/// Three queues, first in, first out: newcomers pass a small one and reach the large one only if
/// they are used again there, or come back soon after they have gone.
///
/// Source: "FIFO queues are all you need for cache eviction", SOSP 2023, section 4.
#[derive(Debug)]
struct S3Fifo {
    capacity: usize,
    uses: HashMap<ExpertKey, u8>,
    small: VecDeque<ExpertKey>,
    main: VecDeque<ExpertKey>,
    /// Gone from `small`, by name alone; as many as `main` may hold.
    ghost: LruCache<ExpertKey, ()>,
}

impl S3Fifo {
    fn new(capacity: usize) -> S3Fifo {
        S3Fifo {
            capacity,
            uses: HashMap::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: LruCache::unbounded(),
        }
    }

    fn small_max(&self) -> usize {
        (self.capacity / SMALL_PART).max(1)
    }

    /// One that was used again moves on; the first that was not goes.
    fn newcomer_out(&mut self) -> Option<ExpertKey> {
        while let Some(key) = self.small.pop_front() {
            if self.uses.get(&key).is_some_and(|&uses| uses > 0) {
                self.uses.insert(key, 0);
                self.main.push_back(key);
                continue;
            }
            self.uses.remove(&key);
            self.ghost.push(key, ());
            while self.ghost.len() > self.capacity.saturating_sub(self.small_max()) {
                self.ghost.pop_lru();
            }
            return Some(key);
        }
        None
    }

    /// One that was used again goes round once more for each use.
    fn resident_out(&mut self) -> Option<ExpertKey> {
        while let Some(key) = self.main.pop_front() {
            match self.uses.get_mut(&key) {
                Some(uses) if *uses > 0 => {
                    *uses -= 1;
                    self.main.push_back(key);
                }
                _ => {
                    self.uses.remove(&key);
                    return Some(key);
                }
            }
        }
        None
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "S3-FIFO"
    }

    fn used(&mut self, key: ExpertKey) {
        if let Some(uses) = self.uses.get_mut(&key) {
            *uses = (*uses + 1).min(USES_MAX);
        }
    }

    fn inserted(&mut self, key: ExpertKey) {
        self.uses.insert(key, 0);
        if self.ghost.pop(&key).is_some() {
            self.main.push_back(key);
        } else {
            self.small.push_back(key);
        }
    }

    fn evict(&mut self, _: ExpertKey) -> Option<ExpertKey> {
        if self.small.len() >= self.small_max() || self.main.is_empty() {
            self.newcomer_out().or_else(|| self.resident_out())
        } else {
            self.resident_out()
        }
    }

    fn end_of_sweep(&mut self, _: &[ExpertKey]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(layer: u16, expert: u16) -> ExpertKey {
        ExpertKey { layer, expert }
    }

    #[test]
    fn everyone_names_each_expert_it_was_given_once() {
        for mut policy in policies(40) {
            for n in 0..40 {
                policy.inserted(key(n % 5, n));
            }
            for n in (0..40).step_by(3) {
                policy.asked(&[key(n % 5, n)]);
                policy.used(key(n % 5, n));
            }
            policy.end_of_sweep(&[]);
            // Hot enough for all the others to go for it.
            let newcomer = key(9, 0);
            for _ in 0..3 {
                policy.asked(&[newcomer]);
            }
            let mut gone: Vec<_> = std::iter::from_fn(|| policy.evict(newcomer)).collect();
            assert_eq!(gone.len(), 40, "{}", policy.name());
            gone.sort_unstable();
            gone.dedup();
            assert_eq!(gone.len(), 40, "{}", policy.name());
        }
    }

    /// A layer in a cache without a limit.
    fn lfu_sweep_part(lfu: &mut Lfu, layer: &[ExpertKey]) {
        lfu.asked(layer);
        for key in layer {
            if !lfu.in_use.contains(key) {
                lfu.inserted(*key);
            }
        }
    }

    /// A sweep that uses one expert of each layer; says who went.
    fn lfu_sweep(lfu: &mut Lfu, capacity: usize, used: &[ExpertKey]) -> Vec<ExpertKey> {
        let mut gone = Vec::new();
        for &key in used {
            lfu.asked(&[key]);
            let held = lfu.held.iter().any(|(_, held)| *held == key);
            if !held && lfu.held.len() >= capacity {
                match lfu.evict(key) {
                    Some(other) => gone.push(other),
                    None => continue,
                }
            }
            if !held {
                lfu.inserted(key);
            }
        }
        lfu.end_of_sweep(&[]);
        gone
    }

    #[test]
    fn frequency_fades() {
        let mut lfu = Lfu::default();
        let of = |expert| key(0, expert);
        for _ in 0..3 {
            assert!(lfu_sweep(&mut lfu, 3, &[of(1), of(2), of(3)]).is_empty());
        }
        lfu_sweep(&mut lfu, 3, &[of(1), of(2)]);
        // One use is less than any of them has.
        assert!(lfu_sweep(&mut lfu, 3, &[of(4)]).is_empty());
        // Used as often as the coldest, but later.
        assert!(lfu_sweep(&mut lfu, 3, &[of(4)]).is_empty());
        assert_eq!(lfu_sweep(&mut lfu, 3, &[of(4)]), [of(3)]);
        // Four uses long ago are worth less than one now; what has gone has not lost its past.
        for _ in 0..200 {
            lfu_sweep(&mut lfu, 3, &[]);
        }
        lfu_sweep(&mut lfu, 3, &[of(2), of(4)]);
        assert_eq!(lfu_sweep(&mut lfu, 3, &[of(3)]), [of(1)]);
    }

    #[test]
    fn what_the_layer_uses_does_not_go_for_its_own() {
        let mut lfu = Lfu::default();
        lfu_sweep(&mut lfu, 2, &[key(0, 1), key(0, 2)]);
        lfu_sweep(&mut lfu, 2, &[key(0, 2)]);
        lfu.asked(&[key(0, 1), key(0, 3)]);
        lfu.asked(&[key(0, 1), key(0, 3)]);
        // Number 2 is hotter than number 1, and goes: number 1 is being used.
        lfu.asked(&[key(0, 1), key(0, 3)]);
        assert_eq!(lfu.evict(key(0, 3)), Some(key(0, 2)));
    }

    #[test]
    fn the_hottest_are_those_that_lfu_keeps() {
        let head = crate::residency::TraceHead {
            model: "org/name".to_owned(),
            revision: "r".to_owned(),
            expert_bytes: 1,
        };
        // Three uses at the beginning, one at the end, two just before it, and two that tie.
        let mut sweeps = vec![vec![vec![key(0, 3)]]; 3];
        sweeps.extend(vec![vec![vec![key(0, 9)]]; 300]);
        sweeps.extend(vec![vec![vec![key(0, 2), key(1, 1)]]; 2]);
        sweeps.push(vec![vec![key(0, 5)]]);
        let trace = Trace { head, sweeps };
        let order = hottest(&trace);
        assert_eq!(
            order,
            [key(0, 9), key(0, 2), key(1, 1), key(0, 5), key(0, 3)]
        );
        let mut lfu = Lfu::default();
        for sweep in &trace.sweeps {
            for layer in sweep {
                lfu_sweep_part(&mut lfu, layer);
            }
            lfu.end_of_sweep(&[]);
        }
        let newcomer = key(7, 7);
        for _ in 0..999 {
            lfu.asked(&[newcomer]);
        }
        let mut kept: Vec<_> = std::iter::from_fn(|| lfu.evict(newcomer)).collect();
        kept.reverse();
        let worth = |key: &ExpertKey| order.iter().position(|k| k == key).unwrap();
        // Among equals LFU names the lower first, and keeps the higher.
        kept[1..3].sort_unstable();
        assert!(kept.iter().map(worth).is_sorted(), "{kept:?}");
    }

    #[test]
    fn the_layer_just_done_goes_before_the_one_that_comes() {
        let mut stale = LeastStale::default();
        for layer in 0..4 {
            stale.inserted(key(layer, 7));
        }
        stale.end_of_sweep(&[]);
        stale.inserted(key(1, 8));
        assert_eq!(stale.evict(key(9, 9)), Some(key(1, 7)));
        assert_eq!(stale.evict(key(9, 9)), Some(key(0, 7)));
        assert_eq!(stale.evict(key(9, 9)), Some(key(3, 7)));
        assert_eq!(stale.evict(key(9, 9)), Some(key(2, 7)));
        assert_eq!(stale.evict(key(9, 9)), Some(key(1, 8)));
    }

    #[test]
    fn a_scan_does_not_wash_out_what_is_used_again() {
        let mut s3 = S3Fifo::new(20);
        for n in 0..10 {
            s3.inserted(key(0, n));
            s3.used(key(0, n));
        }
        for n in 100..150 {
            if n >= 110 {
                // It is full.
                let gone = s3.evict(key(9, 9)).unwrap();
                assert!(gone.expert >= 100, "{gone}");
            }
            s3.inserted(key(0, n));
        }
        while s3.small.contains(&key(0, 148)) {
            let gone = s3.evict(key(9, 9)).unwrap();
            assert!(gone.expert >= 100, "{gone}");
        }
        // Who returns soon after it has gone stays.
        s3.inserted(key(0, 148));
        assert!(s3.main.contains(&key(0, 148)));
    }
}
