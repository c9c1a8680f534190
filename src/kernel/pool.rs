//! The instruction set and the threads, as one value.

use std::sync::Arc;

use rayon::prelude::*;

use super::isa::Isa;

/// Below this many multiply-adds a call runs on the thread that makes it. Waking another costs 5 to
/// 20 µs, which is what this much arithmetic takes; a small model is made of such calls.
const INLINE_WORK: usize = 1 << 17;

/// An instruction set and a pool of threads: what every kernel needs besides its data.
///
/// Cheap to clone; clones share the threads. Idle threads sleep. No result depends on the number of
/// threads: work is only ever split between outputs, never inside a sum.
#[derive(Clone, Debug)]
pub struct Kernel {
    isa: Isa,
    threads: usize,
    pool: Arc<rayon::ThreadPool>,
}

impl Kernel {
    /// Starts `threads` threads (0 counts as 1).
    ///
    /// # Panics
    ///
    /// If the system refuses to start a thread: nothing can be computed then.
    pub fn new(isa: Isa, threads: usize) -> Kernel {
        let threads = threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("kernel-{i}"))
            .build()
            .unwrap_or_else(|e| panic!("cannot start {threads} compute threads: {e}"));
        Kernel {
            isa,
            threads,
            pool: Arc::new(pool),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How many threads share the work.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` inside the pool, so that kernels called from it (and rayon's `par_*` iterators) use
    /// the pool without handing over at each call. A forward pass runs inside one `install`.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.install(f)
    }

    /// Whether `work` multiply-adds are worth waking other threads for.
    pub(super) fn worth_sharing(&self, work: usize) -> bool {
        self.threads > 1 && work > INLINE_WORK
    }

    /// Calls `f(i, chunk)` for the `i`-th `len` values of `out`. `work`: multiply-adds in all.
    pub(super) fn chunks(
        &self,
        work: usize,
        out: &mut [f32],
        len: usize,
        f: impl Fn(usize, &mut [f32]) + Send + Sync,
    ) {
        if self.worth_sharing(work) {
            self.install(|| {
                out.par_chunks_mut(len)
                    .enumerate()
                    .for_each(|(i, out)| f(i, out))
            });
        } else {
            out.chunks_mut(len)
                .enumerate()
                .for_each(|(i, out)| f(i, out));
        }
    }

    /// Calls `f` for every task. `work`: multiply-adds in all.
    pub(super) fn tasks<T: Send>(&self, work: usize, tasks: Vec<T>, f: impl Fn(T) + Send + Sync) {
        if self.worth_sharing(work) {
            self.install(|| tasks.into_par_iter().for_each(f));
        } else {
            tasks.into_iter().for_each(f);
        }
    }
}
