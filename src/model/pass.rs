//! What the parts of one sweep share: settings, rows, scratch memory and the watcher.

use std::ops::Deref;
use std::ops::DerefMut;
use std::ops::Range;
use std::time::Instant;

use crate::checkpoint::Act;
use crate::checkpoint::Spec;
use crate::kernel::Activation;
use crate::kernel::Kernel;
use crate::model::error::ModelError;
use crate::model::ports::Waited;
use crate::model::ports::Watch;
use crate::model::weights::Weights;

/// The rows of one sequence within a sweep.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// Which of the sequences given to the sweep.
    pub(super) sequence: usize,
    /// Which rows, in position order.
    pub(super) rows: Range<usize>,
    /// Position of the first row.
    pub(super) position: usize,
}

/// Borrowed memory of a pass. It keeps its full length when a taker needs less, so that it is never filled twice.
#[derive(Debug)]
pub(super) struct Scratch {
    values: Vec<f32>,
    len: usize,
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

/// One sweep under way.
pub(super) struct Pass<'a> {
    pub(super) spec: &'a Spec,
    pub(super) kernel: &'a Kernel,
    pub(super) act: Activation,
    pub(super) runs: &'a [Run],
    /// Rows of the sweep.
    pub(super) n: usize,
    pub(super) watch: &'a mut dyn Watch,
    /// Whether intermediate values are wanted.
    taps: bool,
    /// The layer at work; `None` before the first and after the last.
    pub(super) layer: Option<u16>,
    /// Of each run, whether its rows are beyond help: an expert did not come, or nobody wants them.
    /// They are computed along, since a row harms no other, and ask for no more experts.
    pub(super) lost: Vec<bool>,
    free: Vec<Vec<f32>>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(
        spec: &'a Spec,
        kernel: &'a Kernel,
        runs: &'a [Run],
        watch: &'a mut dyn Watch,
    ) -> Self {
        Pass {
            spec,
            kernel,
            act: match spec.act {
                Act::Situ { beta, linear_beta } => Activation::Situ { beta, linear_beta },
                Act::Silu => Activation::Silu,
            },
            runs,
            n: runs.last().map_or(0, |run| run.rows.end),
            taps: watch.taps(),
            watch,
            layer: None,
            lost: vec![false; runs.len()],
            free: Vec::new(),
        }
    }

    /// Gives up the runs that nobody wants any more.
    pub(super) fn let_go(&mut self) {
        for (lost, run) in self.lost.iter_mut().zip(self.runs) {
            *lost |= self.watch.left(run.sequence);
        }
    }

    /// Whether each row is beyond help.
    pub(super) fn lost_rows(&self) -> Vec<bool> {
        let mut rows = vec![false; self.n];
        for (run, _) in self.runs.iter().zip(&self.lost).filter(|(_, lost)| **lost) {
            rows[run.rows.clone()].fill(true);
        }
        rows
    }

    /// Whether nothing is left to be computed for.
    pub(super) fn all_lost(&self) -> bool {
        self.lost.iter().all(|lost| *lost)
    }

    /// Scratch for `len` values, which hold anything: whoever takes it overwrites it.
    pub(super) fn take(&mut self, len: usize) -> Scratch {
        // The tightest fit; if nothing fits, the largest grows, so that their number stays what a layer needs.
        let held = |at: &usize| self.free[*at].len();
        let places = 0..self.free.len();
        let fits = places.clone().filter(|at| held(at) >= len).min_by_key(held);
        let mut values = match fits.or(places.max_by_key(held)) {
            Some(at) => self.free.swap_remove(at),
            None => Vec::new(),
        };
        if values.len() < len {
            // A new one rather than `resize`, which would copy values that nobody reads.
            values = vec![0.0; len];
        }
        Scratch { values, len }
    }

    /// Gives scratch back for the next taker.
    pub(super) fn give(&mut self, scratch: Scratch) {
        self.free.push(scratch.values);
    }

    /// Shows an intermediate value to whoever wants it.
    pub(super) fn tap(&mut self, name: &'static str, values: &[f32]) {
        if self.taps {
            self.watch.tap(self.layer, name, values);
        }
    }

    /// Whether intermediate values that nobody needs otherwise are worth computing.
    pub(super) fn taps(&self) -> bool {
        self.taps
    }

    /// Runs what may have to wait for the world, and tells the watcher how long it took.
    pub(super) fn wait<R>(&mut self, what: Waited, f: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = f();
        self.watch.waited(what, began.elapsed());
        result
    }

    /// `x · wᵀ` for the matrix `name` `[rows, cols]`, in scratch.
    pub(super) fn project(
        &mut self,
        w: &Weights<'_>,
        name: &str,
        (rows, cols): (usize, usize),
        x: &[f32],
    ) -> Result<Scratch, ModelError> {
        let mut y = self.take(x.len() / cols * rows);
        let kernel = self.kernel;
        w.runs(&[name], (rows, cols), |run, parts| {
            self.outputs(rows, run, &mut y, |y| kernel.matmul(parts[0], x, y));
        })?;
        Ok(y)
    }

    /// Has `compute` make the outputs `run` of `y` `[n, width]`: in place where they lie together.
    pub(super) fn outputs(
        &mut self,
        width: usize,
        run: Range<usize>,
        y: &mut [f32],
        compute: impl FnOnce(&mut [f32]),
    ) {
        let n = y.len() / width;
        if n <= 1 || run.len() == width {
            compute(&mut y[run.start..run.start + n * run.len()]);
            return;
        }
        let mut part = self.take(n * run.len());
        compute(&mut part);
        for (y, part) in y.chunks_mut(width).zip(part.chunks(run.len())) {
            y[run.clone()].copy_from_slice(part);
        }
        self.give(part);
    }

    /// The gated MLP `stem` over `x` `[n, hidden]`, in scratch.
    pub(super) fn mlp(
        &mut self,
        w: &Weights<'_>,
        stem: &str,
        inner: usize,
        x: &[f32],
    ) -> Result<Scratch, ModelError> {
        let hidden = self.spec.hidden;
        let gate = format!("{stem}.gate_proj.weight");
        let up = format!("{stem}.up_proj.weight");
        let mut product = self.take(x.len() / hidden * inner);
        let (kernel, act) = (self.kernel, self.act);
        w.runs(&[&gate, &up], (inner, hidden), |run, parts| {
            self.outputs(inner, run, &mut product, |y| {
                kernel.gated(parts[0], parts[1], act, x, y);
            });
        })?;
        let down = format!("{stem}.down_proj.weight");
        let y = self.project(w, &down, (hidden, inner), &product)?;
        self.give(product);
        Ok(y)
    }
}

/// `to += from`, element by element.
pub(super) fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}
