//! The matrix product of a vector instruction set: what one must supply, and what they share.
//!
//! Every output is summed in `LANES` partial sums: the vector's. Columns meet the lanes in the
//! order in which decoding yields them most cheaply, so activations are reordered once a call
//! ([`Packed`]) instead of weights once a row. Two paths compute the same sums in the same order:
//!
//! * few rows: weights are decoded in registers and used at once; memory is the limit;
//! * many rows: weights are decoded once into a panel that stays in cache, and tiles of outputs run
//!   over it; arithmetic is the limit.

use std::cell::Cell;

use super::matrix::{Matrix, Weights};
use super::pool::Kernel;
use super::scalar;

/// Rows of `x` whose partial sums are held at once: bounds the scratch of a task.
/// A multiple of every tile's rows.
const ROWS_HELD: usize = 120;

/// Outputs a task of the many-row path computes.
pub(super) const PANEL: usize = 64;

/// Outputs of a tile, each with its own partial sums for every row of the tile.
pub(super) const TILE_OUTPUTS: usize = 4;

/// How a matrix is stored, without the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Bf16,
    F32,
    Mxfp4,
}

impl Format {
    pub(super) fn of(w: Matrix<'_>) -> Format {
        match w.weights {
            Weights::Bf16(_) => Format::Bf16,
            Weights::F32(_) => Format::F32,
            Weights::Mxfp4 { .. } => Format::Mxfp4,
        }
    }
}

/// A vector instruction set's part.
pub(super) trait Twin: Copy + Send + Sync {
    /// Partial sums of an output.
    const LANES: usize;
    /// Most rows of a tile.
    const TILE_ROWS: usize;
    /// Columns of a panel: a multiple of every order's length.
    const PANEL_COLS: usize;
    /// Most rows for which weights are decoded in registers.
    const FEW: usize;

    /// The order in which a chunk's columns are summed: position `p` of a chunk in packed
    /// activations (and in a panel) holds column `order[p]` of that chunk. Its length is the chunk's,
    /// a multiple of `LANES`; position `p` belongs to partial sum `p % LANES`.
    fn order(format: Format) -> &'static [u8];

    /// Products of every row of `w` with at most `FEW` packed rows of whole length.
    fn few(self, w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]);

    /// Decodes columns of one row of `w` from `first` on into `out`, in order, zeros behind the
    /// last; `first` and the length of `out` are multiples of the chunk.
    fn decode(self, w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]);

    /// Adds to the partial sums `[rows, TILE_OUTPUTS, LANES]` the products of `rows` rows of `x`
    /// with `TILE_OUTPUTS` rows of a panel, `cols` values each, one row after another.
    fn tile(self, rows: usize, cols: usize, x: &[f32], panel: &[f32], sums: &mut [f32]);

    /// Adds up the partial sums of each of `out`, as the few-row path does.
    fn add_up(self, sums: &[f32], out: &mut [f32]);
}

/// Activations in the order of a format's decoding, padded with zeros to whole chunks.
pub(super) struct Packed {
    values: Aligned,
    /// Rows.
    n: usize,
    /// Padded columns.
    cols: usize,
    /// Columns of a block: `[blocks, n, block]`, so that a tile's rows lie side by side.
    block: usize,
}

impl Packed {
    /// Packs `x` `[n, w.cols()]`.
    pub(super) fn new<T: Twin>(k: &Kernel, w: Matrix<'_>, x: &[f32]) -> Packed {
        let (order, n) = (T::order(Format::of(w)), x.len() / w.cols());
        let cols = w.cols().next_multiple_of(order.len());
        let block = if n <= T::FEW { cols } else { T::PANEL_COLS };
        let mut packed = Packed {
            values: SCRATCH.take().packed,
            n,
            cols,
            block,
        };
        let in_order = order.iter().enumerate().all(|(p, &c)| p == usize::from(c));
        let out = packed.values.get(n * cols);
        k.chunks(8 * n * cols, out, block * n, |b, out| {
            let rows = x.chunks(w.cols()).map(|x| &x[b * block..]);
            for (x, out) in rows.zip(out.chunks_mut(out.len() / n)) {
                if in_order {
                    let (values, rest) = out.split_at_mut(x.len().min(out.len()));
                    values.copy_from_slice(&x[..values.len()]);
                    rest.fill(0.0);
                    continue;
                }
                let whole = x.chunks_exact(order.len());
                let rest = whole.remainder();
                let mut out = out.chunks_exact_mut(order.len());
                for (x, out) in whole.zip(&mut out) {
                    out.iter_mut()
                        .zip(order)
                        .for_each(|(o, &c)| *o = x[usize::from(c)]);
                }
                for out in out.take(1) {
                    let get = |c: u8| rest.get(usize::from(c)).copied().unwrap_or(0.0);
                    out.iter_mut().zip(order).for_each(|(o, &c)| *o = get(c));
                }
            }
        });
        packed
    }

    /// Rows.
    pub(super) fn n(&self) -> usize {
        self.n
    }

    /// All rows, where blocks are whole rows.
    #[inline(always)]
    pub(super) fn rows<const N: usize>(&self) -> [&[f32]; N] {
        debug_assert_eq!((self.n, self.block), (N, self.cols));
        let values = self.values.all();
        std::array::from_fn(|row| &values[row * self.cols..(row + 1) * self.cols])
    }

    /// Columns of block `b`: the last one may be narrower.
    fn width(&self, b: usize) -> usize {
        self.block.min(self.cols - b * self.block)
    }

    /// Rows from `first` on in block `b`, `[.., width(b)]`.
    fn rows_of_block(&self, b: usize, first: usize) -> &[f32] {
        &self.values.all()[b * self.block * self.n + first * self.width(b)..]
    }
}

/// Memory a thread keeps for its next call: allocating it anew costs a page fault for every 4 KB.
#[derive(Default)]
struct Scratch {
    packed: Aligned,
    panel: Aligned,
    sums: Aligned,
}

/// Values that begin at a cache line: a vector of 64 bytes that straddles two costs twice.
#[derive(Default)]
struct Aligned {
    values: Vec<f32>,
    first: usize,
}

impl Aligned {
    /// `len` values, whatever they were.
    fn get(&mut self, len: usize) -> &mut [f32] {
        const LINE: usize = 64;
        self.values.resize(len + LINE / size_of::<f32>(), 0.0);
        // `usize::MAX` where the address cannot be known (under Miri): alignment is only speed.
        self.first = self
            .values
            .as_ptr()
            .align_offset(LINE)
            .min(LINE / size_of::<f32>());
        &mut self.values[self.first..self.first + len]
    }

    /// What [`get`](Self::get) gave last, and something behind it.
    fn all(&self) -> &[f32] {
        &self.values[self.first..]
    }
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Drop for Packed {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        SCRATCH.set(Scratch {
            packed: values,
            ..SCRATCH.take()
        });
    }
}

/// Products of all rows of `w` with all rows of `x`; `y[row]` has `w.rows()` values.
pub(super) fn product<T: Twin>(
    twin: T,
    w: Matrix<'_>,
    x: &Packed,
    raw: &[f32],
    y: &mut [&mut [f32]],
) {
    // First, because it also brings the scales into cache.
    let wide = scalar::wide_rows(w);
    if x.n <= T::FEW {
        twin.few(w, x, y);
    } else {
        many(twin, w, x, y);
    }
    scalar::wide_product(w, &wide, raw, y);
}

/// The many-row path.
fn many<T: Twin>(twin: T, w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
    let mut scratch = SCRATCH.take();
    for first in (0..w.rows()).step_by(PANEL) {
        let outputs = PANEL.min(w.rows() - first);
        for (held, y) in y.chunks_mut(ROWS_HELD).enumerate() {
            panel(
                twin,
                w.slice(first..first + outputs),
                x,
                held * ROWS_HELD,
                first,
                y,
                &mut scratch,
            );
        }
    }
    SCRATCH.set(Scratch {
        packed: SCRATCH.take().packed,
        ..scratch
    });
}

/// At most [`PANEL`] outputs of at most [`ROWS_HELD`] rows, from row `held` of `x` on.
fn panel<T: Twin>(
    twin: T,
    w: Matrix<'_>,
    x: &Packed,
    held: usize,
    first: usize,
    y: &mut [&mut [f32]],
    scratch: &mut Scratch,
) {
    let outputs = w.rows().next_multiple_of(TILE_OUTPUTS);
    let Scratch { panel, sums, .. } = scratch;
    let tile = TILE_OUTPUTS * T::LANES;
    let sums = sums.get(y.len() * outputs * T::LANES);
    sums.fill(0.0);
    for b in 0..x.cols.div_ceil(x.block) {
        let (start, cols) = (b * x.block, x.width(b));
        let panel = panel.get(outputs * cols);
        for (row, out) in panel.chunks_mut(cols).enumerate() {
            if row < w.rows() {
                twin.decode(w, row, start, out);
            } else {
                out.fill(0.0);
            }
        }
        let x = x.rows_of_block(b, held);
        let rows = sums.chunks_mut(T::TILE_ROWS * outputs * T::LANES);
        for (x, sums) in x.chunks(T::TILE_ROWS * cols).zip(rows) {
            let rows = sums.len() / (outputs * T::LANES);
            let tiles = panel
                .chunks(TILE_OUTPUTS * cols)
                .zip(sums.chunks_mut(rows * tile));
            for (panel, sums) in tiles {
                twin.tile(rows, cols, x, panel, sums);
            }
        }
    }
    let mut totals = [0.0; TILE_OUTPUTS];
    let rows = sums.chunks(T::TILE_ROWS * outputs * T::LANES);
    for (y, sums) in y.chunks_mut(T::TILE_ROWS).zip(rows) {
        for (at, sums) in sums.chunks(y.len() * tile).enumerate() {
            let at = at * TILE_OUTPUTS;
            let count = TILE_OUTPUTS.min(w.rows() - at);
            for (y, sums) in y.iter_mut().zip(sums.chunks(tile)) {
                twin.add_up(sums, &mut totals);
                y[first + at..first + at + count].copy_from_slice(&totals[..count]);
            }
        }
    }
}
