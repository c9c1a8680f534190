//! The matrix product's driver: splits outputs between threads, never a sum.

use super::act::Activation;
use super::isa::Isa;
use super::matrix::Matrix;
use super::pool::Kernel;
use super::scalar;
use super::twin::{self, Format, PANEL, Packed, Twin};

/// Multiply-adds of one task, about.
const TASK_WORK: usize = 1 << 18;

impl Kernel {
    /// `y = x · wᵀ`, for any number of rows at once.
    ///
    /// | name | shape | holds |
    /// |---|---|---|
    /// | `w` | `[rows, cols]` | |
    /// | `x` | `[n, cols]` | |
    /// | `y` | `[n, rows]` | overwritten |
    ///
    /// Sums in f32. An element differs from the exact one by at most `cols · ε · Σ|w·x|`, and has
    /// ONE order of summation per instruction set: its bits do not depend on `n`, on the other
    /// rows, on the threads, or on whether `w` is a slice of a larger matrix. Instruction sets may
    /// differ from one another.
    ///
    /// # Panics
    ///
    /// If the lengths disagree.
    #[track_caller]
    pub fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [f32]) {
        let n = rows_of(w, x, y);
        self.product(w, None, n, x, y);
    }

    /// `y = act(x · gateᵀ, x · upᵀ)`: the first half of a gated MLP, `y` `[n, inner]`.
    ///
    /// Each product has the bits of [`matmul`](Self::matmul).
    ///
    /// # Panics
    ///
    /// If the lengths or the two shapes disagree.
    #[track_caller]
    pub fn gated(
        &self,
        gate: Matrix<'_>,
        up: Matrix<'_>,
        act: Activation,
        x: &[f32],
        y: &mut [f32],
    ) {
        assert_eq!(
            (gate.rows(), gate.cols()),
            (up.rows(), up.cols()),
            "gate against up"
        );
        let n = rows_of(gate, x, y);
        self.product(gate, Some((up, act)), n, x, y);
    }

    fn product(&self, w: Matrix<'_>, up: Gated<'_>, n: usize, x: &[f32], y: &mut [f32]) {
        if n == 0 || w.rows() == 0 {
            return;
        }
        match self.isa() {
            Isa::Scalar => self.split(w, up, x, y, |w, y| scalar::product(w, x, y)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(twin) => self.vector(twin, w, up, x, y),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(twin) => self.vector(twin, w, up, x, y),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(twin) => self.vector(twin, w, up, x, y),
        }
    }

    fn vector<T: Twin>(&self, twin: T, w: Matrix<'_>, up: Gated<'_>, x: &[f32], y: &mut [f32]) {
        let packed = Packed::new::<T>(self, w, x);
        match up {
            // Two matrices of one format share the packed activations.
            Some((up, act)) if Format::of(up) != Format::of(w) => {
                let mut values = vec![0.0; y.len()];
                self.vector(twin, w, None, x, y);
                self.vector(twin, up, None, x, &mut values);
                act.apply(self.isa(), y, &values);
            }
            _ => self.split(w, up, x, y, |w, y| twin::product(twin, w, &packed, x, y)),
        }
    }

    /// Cuts the outputs into tasks and computes each by `product`.
    fn split(
        &self,
        w: Matrix<'_>,
        gated: Gated<'_>,
        x: &[f32],
        y: &mut [f32],
        product: impl Fn(Matrix<'_>, &mut [&mut [f32]]) + Send + Sync,
    ) {
        let (rows, cols, n) = (w.rows(), w.cols(), x.len() / w.cols());
        let work = n * rows * cols * if gated.is_some() { 2 } else { 1 };
        let step = if self.worth_sharing(work) {
            self.step(n, rows, cols)
        } else {
            rows
        };
        let mut tasks: Vec<Vec<&mut [f32]>> = Vec::new();
        tasks.resize_with(rows.div_ceil(step), || Vec::with_capacity(n));
        for y in y.chunks_mut(rows) {
            for (task, part) in tasks.iter_mut().zip(y.chunks_mut(step)) {
                task.push(part);
            }
        }
        let tasks = tasks.into_iter().enumerate().collect();
        self.tasks(work, tasks, |(i, mut y): (usize, Vec<&mut [f32]>)| {
            let part = i * step..(i * step + step).min(rows);
            product(w.slice(part.clone()), &mut y);
            if let Some((up, act)) = gated {
                let mut values = vec![0.0; n * part.len()];
                let mut out: Vec<_> = values.chunks_mut(part.len()).collect();
                product(up.slice(part), &mut out);
                for (gate, up) in y.iter_mut().zip(out) {
                    act.apply(self.isa(), gate, up);
                }
            }
        });
    }

    /// Outputs per task: enough work to be worth handing over, enough tasks for all threads, and
    /// whole panels where there are many rows.
    fn step(&self, n: usize, rows: usize, cols: usize) -> usize {
        let enough = (TASK_WORK / (n * cols)).max(1);
        let fair = rows.div_ceil(4 * self.threads());
        enough.max(fair.min(PANEL)).next_multiple_of(8).min(rows)
    }
}

/// The second matrix of a gated product, and what joins the two.
type Gated<'a> = Option<(Matrix<'a>, Activation)>;

/// How many rows a call has.
#[track_caller]
fn rows_of(w: Matrix<'_>, x: &[f32], y: &[f32]) -> usize {
    let (rows, cols) = (w.rows(), w.cols());
    assert!(cols > 0, "a matrix without columns");
    assert!(
        x.len().is_multiple_of(cols),
        "{} values are not rows of {cols}",
        x.len()
    );
    let n = x.len() / cols;
    assert_eq!(y.len(), n * rows, "outputs of {n} rows by {rows}");
    n
}
