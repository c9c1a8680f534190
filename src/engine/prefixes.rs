//! States of earlier texts, for prompts that begin like them.
//!
//! A state is kept whole and shared: clones of a sequence share the latents that have grown, and
//! only what is fixed is copied. The oldest use goes first when the bytes are spent.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::request::Start;
use crate::checkpoint::Spec;
use crate::model::Sequence;
use crate::terms::TokenId;

/// Where states lie that memory does not hold.
pub trait StateStore: Send + Sync {
    /// The longest state whose tokens `ids` begins with and goes beyond, if it is longer than
    /// `longer_than`. Whoever cannot read one answers `None`: it is computed.
    fn load(&self, ids: &[TokenId], longer_than: usize) -> Option<Arc<Start>>;

    /// A state that later texts may begin with. Arithmetic waits: copy what is wanted, and return.
    fn save(&self, start: &Arc<Start>);
}

/// How much is kept of earlier texts. The default is nothing.
#[derive(Clone, Default)]
pub struct Prefixes {
    /// Bytes in memory.
    pub bytes: u64,
    /// In a long prompt, a state every so many tokens, at the end of a sweep; besides those at the
    /// end of its last whole message and at the end of each generation.
    pub every_tokens: Option<usize>,
    /// Asked where memory has nothing as long.
    pub store: Option<Arc<dyn StateStore>>,
}

impl fmt::Debug for Prefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefixes")
            .field("bytes", &self.bytes)
            .field("every_tokens", &self.every_tokens)
            .field("store", &self.store.is_some())
            .finish()
    }
}

/// What the kept states are and have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// States in memory.
    pub states: usize,
    /// Their bytes; what several of them share counts once.
    pub bytes: u64,
    /// Generations that went on from one, of memory or of the store.
    pub hits: u64,
    /// Rows that did not have to be computed for it.
    pub rows: u64,
}

/// The states of one engine.
#[derive(Default)]
pub(super) struct Kept(Mutex<State>);

#[derive(Default)]
struct State {
    how: Prefixes,
    /// The latest use last.
    entries: Vec<Arc<Start>>,
    /// How many entries hold each block.
    blocks: HashMap<usize, usize>,
    stats: PrefixStats,
}

impl Kept {
    fn state(&self) -> MutexGuard<'_, State> {
        // Whole between any two statements.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, how: Prefixes) {
        let mut state = self.state();
        state.how = how;
        state.shrink();
    }

    pub(super) fn stats(&self) -> PrefixStats {
        self.state().stats
    }

    /// Whether states are wanted at all, and how many tokens apart.
    pub(super) fn wanted(&self) -> Option<usize> {
        let state = self.state();
        let wanted = state.how.bytes > 0 || state.how.store.is_some();
        wanted.then(|| state.how.every_tokens.unwrap_or(usize::MAX))
    }

    /// The longest state that `ids` begins with and goes beyond, if it is longer than `longer_than`.
    pub(super) fn find(
        &self,
        spec: &Spec,
        ids: &[TokenId],
        longer_than: usize,
    ) -> Option<Arc<Start>> {
        let mut state = self.state();
        let serves = |start: &Start| {
            start.ids.len() > longer_than
                && start.ids.len() < ids.len()
                && ids.starts_with(&start.ids)
        };
        let entries = state.entries.iter().enumerate();
        let best = entries
            .filter(|(_, start)| serves(start))
            .max_by_key(|(_, start)| start.ids.len());
        let known = best.map(|(at, start)| (at, start.ids.len()));
        let store = state.how.store.clone();
        let found = if let Some((at, _)) = known {
            let start = state.entries.remove(at);
            state.entries.push(Arc::clone(&start));
            Some(start)
        } else {
            None
        };
        drop(state);
        let longest = known.map_or(longer_than, |(_, len)| len);
        // A store's word is checked like anybody's: what does not fit is not used.
        let stored = store
            .and_then(|store| store.load(ids, longest))
            .filter(|start| {
                start.ids.len() > longest
                    && serves(start)
                    && start.sequence.len() == start.ids.len()
                    && !start.sequence.poisoned()
                    && start.sequence.fits(spec)
            });
        if let Some(start) = &stored {
            self.state().put(Arc::clone(start));
        }
        stored.or(found)
    }

    /// A generation went on from a state of so many rows.
    pub(super) fn used(&self, rows: usize) {
        let stats = &mut self.state().stats;
        stats.hits += 1;
        stats.rows += rows as u64;
    }

    /// Keeps the state after `ids`.
    pub(super) fn keep(&self, ids: &[TokenId], sequence: &Sequence) {
        let mut state = self.state();
        if let Some(at) = state.entries.iter().position(|start| start.ids == ids) {
            let start = state.entries.remove(at);
            state.entries.push(start);
            return;
        }
        let start = Arc::new(Start {
            ids: ids.to_vec(),
            sequence: sequence.clone(),
        });
        state.put(Arc::clone(&start));
        let store = state.how.store.clone();
        drop(state);
        if let Some(store) = store {
            store.save(&start);
        }
    }
}

impl State {
    fn put(&mut self, start: Arc<Start>) {
        // One that would push everything else out and still not fit is not worth it.
        if Sequence::own_bytes(&start.sequence) > self.how.bytes {
            return;
        }
        self.stats.bytes += start.sequence.own_bytes();
        for (block, bytes) in start.sequence.blocks() {
            let holders = self.blocks.entry(block).or_default();
            *holders += 1;
            if *holders == 1 {
                self.stats.bytes += bytes;
            }
        }
        self.entries.push(start);
        self.shrink();
    }

    fn shrink(&mut self) {
        while self.stats.bytes > self.how.bytes && !self.entries.is_empty() {
            let start = self.entries.remove(0);
            self.stats.bytes -= start.sequence.own_bytes();
            for (block, bytes) in start.sequence.blocks() {
                if let Some(holders) = self.blocks.get_mut(&block) {
                    *holders -= 1;
                    if *holders == 0 {
                        self.blocks.remove(&block);
                        self.stats.bytes -= bytes;
                    }
                }
            }
        }
        self.stats.states = self.entries.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Spec {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let config = std::fs::read(root.join("fixtures/tiny-k3/config.json"));
        Spec::from_config(&config.unwrap()).unwrap()
    }

    fn kept(bytes: u64) -> Kept {
        let kept = Kept::default();
        kept.set(Prefixes {
            bytes,
            ..Prefixes::default()
        });
        kept
    }

    fn keep(kept: &Kept, ids: &[TokenId]) {
        kept.keep(ids, &Sequence::with_len(&tiny(), ids.len()));
    }

    fn found(kept: &Kept, ids: &[TokenId]) -> Option<Vec<TokenId>> {
        kept.find(&tiny(), ids, 0).map(|start| start.ids.clone())
    }

    #[test]
    fn the_longest_true_beginning_is_found() {
        let kept = kept(1 << 30);
        for ids in [&[1, 2][..], &[1, 2, 3, 4], &[1, 2, 9], &[7]] {
            keep(&kept, ids);
        }
        assert_eq!(found(&kept, &[1, 2, 3, 4, 5]), Some(vec![1, 2, 3, 4]));
        // Of a text that is known as a whole the last row still has to be computed.
        assert_eq!(found(&kept, &[1, 2, 3, 4]), Some(vec![1, 2]));
        assert_eq!(found(&kept, &[1, 2]), None);
        assert_eq!(found(&kept, &[2, 1, 2]), None);
        assert!(kept.find(&tiny(), &[1, 2, 3, 4, 5], 4).is_none());
    }

    #[test]
    fn the_oldest_use_goes_first_and_what_is_shared_counts_once() {
        let spec = tiny();
        let one = Sequence::bytes(&spec, 70);
        let kept = kept(3 * one);
        let text = |n: u32| (0..70).map(|i| i + n).collect::<Vec<_>>();
        for n in 0..3 {
            keep(&kept, &text(n));
        }
        assert_eq!(kept.stats().bytes, 3 * one);
        let longer = |n| [text(n), vec![5]].concat();
        assert_eq!(found(&kept, &longer(0)), Some(text(0)));
        keep(&kept, &text(3));
        assert_eq!(found(&kept, &longer(1)), None);
        assert_eq!(found(&kept, &longer(0)), Some(text(0)));
        assert_eq!((kept.stats().states, kept.stats().bytes), (3, 3 * one));
        // A state that went on from another shares its latents.
        let base = kept.find(&spec, &longer(0), 0).unwrap();
        kept.set(Prefixes {
            bytes: 100 * one,
            ..Prefixes::default()
        });
        kept.keep(&text(9), &base.sequence);
        assert_eq!(kept.stats().bytes, 3 * one + base.sequence.own_bytes());
        kept.set(Prefixes::default());
        assert_eq!((kept.stats().states, kept.stats().bytes), (0, 0));
        assert!(kept.state().blocks.is_empty());
    }

    #[test]
    fn a_store_is_asked_and_not_believed() {
        struct Stored(Start);
        impl StateStore for Stored {
            fn load(&self, _: &[TokenId], _: usize) -> Option<Arc<Start>> {
                Some(Arc::new(self.0.clone()))
            }
            fn save(&self, _: &Arc<Start>) {}
        }
        let spec = tiny();
        let ask = |ids: &[TokenId], len| {
            let kept = kept(1 << 30);
            let start = Start {
                ids: ids.to_vec(),
                sequence: Sequence::with_len(&spec, len),
            };
            kept.set(Prefixes {
                bytes: 1 << 30,
                every_tokens: None,
                store: Some(Arc::new(Stored(start))),
            });
            keep(&kept, &[1]);
            found(&kept, &[1, 2, 3, 4])
        };
        assert_eq!(ask(&[1, 2, 3], 3), Some(vec![1, 2, 3]));
        for (ids, len) in [
            (&[1, 2, 4][..], 3),
            (&[1, 2, 3], 2),
            (&[1, 2, 3, 4], 4),
            (&[], 0),
        ] {
            assert_eq!(ask(ids, len), Some(vec![1]), "{ids:?}");
        }
    }
}
