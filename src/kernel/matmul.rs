//! The matrix product's driver: splits outputs between threads, never a sum.

use super::act::Activation;
use super::matrix::Matrix;
use super::pool::Kernel;
use super::scalar;

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

    fn product(
        &self,
        w: Matrix<'_>,
        gated: Option<(Matrix<'_>, Activation)>,
        n: usize,
        x: &[f32],
        y: &mut [f32],
    ) {
        let (rows, cols) = (w.rows(), w.cols());
        if n == 0 || rows == 0 {
            return;
        }
        let work = n * rows * cols * if gated.is_some() { 2 } else { 1 };
        let step = if self.worth_sharing(work) {
            (TASK_WORK / (n * cols).max(1)).clamp(1, rows)
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
            scalar::product(w.slice(part.clone()), x, &mut y);
            if let Some((up, act)) = gated {
                let mut values = vec![0.0; n * part.len()];
                let mut out: Vec<_> = values.chunks_mut(part.len()).collect();
                scalar::product(up.slice(part), x, &mut out);
                for (gate, up) in y.iter_mut().zip(out) {
                    act.apply(gate, up);
                }
            }
        });
    }
}

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
