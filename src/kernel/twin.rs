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
use std::ops::Range;

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

/// What a tile multiplies.
#[derive(Clone, Copy)]
pub(super) struct TileSize {
    /// Rows of `x`, at most `TILE_ROWS`.
    pub(super) rows: usize,
    /// Columns, whole chunks.
    pub(super) cols: usize,
    /// Whether the sums begin here, whatever is in their memory.
    pub(super) fresh: bool,
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

    /// Adds to the partial sums `[rows, TILE_OUTPUTS, LANES]`, or to zeros where they are `fresh`, the
    /// products of the tile's rows of `x` with `TILE_OUTPUTS` rows of a panel, one row after another.
    fn tile(self, size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]);

    /// Adds up the partial sums of `TILE_OUTPUTS` outputs, each as the few-row path does.
    fn add_up(self, sums: &[f32], out: &mut [f32; TILE_OUTPUTS]);

    /// Asks the memory for bytes that will be decoded soon.
    fn ask(self, bytes: &[u8]) {
        let _ = bytes;
    }
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
    /// Whether every value is 0 or of ordinary size; see [`tame`].
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "x86's short cut alone asks")
    )]
    tame: bool,
}

/// Whether every value is 0 or between 2^-50 and 2^40 in size.
///
/// Then, under scales of a [`tame_scales`] row, no product and no partial sum leaves the normal range
/// of f32, whether it is held as it is or divided by one of the scales: every one is a multiple of
/// 2^-74 times the smallest scale, and below `cols` · 2^43 times the largest. So both ways round alike.
fn tame(x: &[f32]) -> bool {
    const LEAST: u32 = (127 - 50) << 23;
    const MOST: u32 = (127 + 40) << 23;
    let wild = |x: &f32| {
        let size = x.to_bits() << 1 >> 1;
        u32::from(size.wrapping_sub(LEAST) > MOST - LEAST) & u32::from(size != 0)
    };
    x.iter().fold(0, |any, x| any | wild(x)) == 0
}

/// Whether the scale bytes of some rows lie close together and far from the ends of their range: at
/// most 2^40 apart, from 2^-50 to 2^60.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn tame_scales(scales: &[u8]) -> bool {
    let (mut least, mut most) = ([u8::MAX; 32], [0; 32]);
    let (whole, rest) = scales.as_chunks::<32>();
    for chunk in whole {
        for i in 0..32 {
            least[i] = least[i].min(chunk[i]);
            most[i] = most[i].max(chunk[i]);
        }
    }
    let ends = |ends: (u8, u8), b: &u8| (ends.0.min(*b), ends.1.max(*b));
    let least = least.iter().fold(u8::MAX, |a, b| a.min(*b));
    let most = most.iter().fold(0, |a, b| a.max(*b));
    let (least, most) = rest.iter().fold((least, most), ends);
    least >= 127 - 50 && most <= 127 + 60 && most - least <= 40
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
            tame: Format::of(w) == Format::Mxfp4 && n <= T::FEW && tame(x),
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

    /// Whether sums may be held divided by a row's scales; asked of few rows of MXFP4 alone.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn tame(&self) -> bool {
        self.tame
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
        let values = len + LINE / size_of::<f32>();
        if self.values.len() < values {
            self.values.resize(values, 0.0);
        }
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
        let outputs = |first: usize| first..w.rows().min(first + PANEL);
        let panel = Panel {
            w: w.slice(outputs(first)),
            first,
            next: w.slice(outputs(w.rows().min(first + PANEL))),
        };
        for (held, y) in y.chunks_mut(ROWS_HELD).enumerate() {
            panel.product(twin, x, held * ROWS_HELD, y, &mut scratch);
        }
    }
    SCRATCH.set(Scratch {
        packed: SCRATCH.take().packed,
        ..scratch
    });
}

/// At most [`PANEL`] outputs.
struct Panel<'a> {
    w: Matrix<'a>,
    /// Which output of the product the first row of `w` is.
    first: usize,
    /// The panel after this one; without rows behind the last.
    next: Matrix<'a>,
}

impl Panel<'_> {
    /// The outputs of at most [`ROWS_HELD`] rows, from row `held` of `x` on.
    fn product<T: Twin>(
        &self,
        twin: T,
        x: &Packed,
        held: usize,
        y: &mut [&mut [f32]],
        scratch: &mut Scratch,
    ) {
        let outputs = self.w.rows().next_multiple_of(TILE_OUTPUTS);
        let Scratch { panel, sums, .. } = scratch;
        let tile = TILE_OUTPUTS * T::LANES;
        let sums = sums.get(y.len() * outputs * T::LANES);
        let blocks = x.cols.div_ceil(x.block);
        for b in 0..blocks {
            let (start, cols) = (b * x.block, x.width(b));
            let panel = panel.get(outputs * cols);
            for (row, out) in panel.chunks_mut(cols).enumerate() {
                if row < self.w.rows() {
                    twin.decode(self.w, row, start, out);
                } else {
                    out.fill(0.0);
                }
            }
            let soon = match b + 1 < blocks {
                true => (self.w, start + cols),
                false => (self.next, 0),
            };
            let (x, block) = (x.rows_of_block(b, held), x.block);
            let tiles = y.len().div_ceil(T::TILE_ROWS);
            let rows = sums.chunks_mut(T::TILE_ROWS * outputs * T::LANES);
            for (at, (x, sums)) in x.chunks(T::TILE_ROWS * cols).zip(rows).enumerate() {
                ask_part(twin, soon, block, at..at + 1, tiles);
                let size = TileSize {
                    rows: sums.len() / (outputs * T::LANES),
                    cols,
                    fresh: b == 0,
                };
                let tiles = panel
                    .chunks(TILE_OUTPUTS * cols)
                    .zip(sums.chunks_mut(size.rows * tile));
                for (panel, sums) in tiles {
                    twin.tile(size, x, panel, sums);
                }
            }
        }
        self.add_up(twin, sums, y);
    }

    /// Adds up the partial sums of every output.
    fn add_up<T: Twin>(&self, twin: T, sums: &[f32], y: &mut [&mut [f32]]) {
        let outputs = self.w.rows().next_multiple_of(TILE_OUTPUTS);
        let tile = TILE_OUTPUTS * T::LANES;
        let mut totals = [0.0; TILE_OUTPUTS];
        let rows = sums.chunks(T::TILE_ROWS * outputs * T::LANES);
        for (y, sums) in y.chunks_mut(T::TILE_ROWS).zip(rows) {
            for (at, sums) in sums.chunks(y.len() * tile).enumerate() {
                let at = at * TILE_OUTPUTS;
                let count = TILE_OUTPUTS.min(self.w.rows() - at);
                let first = self.first + at;
                for (y, sums) in y.iter_mut().zip(sums.chunks(tile)) {
                    twin.add_up(sums, &mut totals);
                    y[first..first + count].copy_from_slice(&totals[..count]);
                }
            }
        }
    }
}

/// Asks for a part of the next block's weights: decoding it would otherwise wait for memory at every
/// row, as each lies a row's length from the one before.
fn ask_part<T: Twin>(
    twin: T,
    (w, start): (Matrix<'_>, usize),
    cols: usize,
    part: Range<usize>,
    parts: usize,
) {
    let cols = start..w.cols().min(start + cols);
    for row in part.start * w.rows() / parts..part.end * w.rows() / parts {
        for bytes in w.bytes_of(row, cols.clone()) {
            twin.ask(bytes);
        }
    }
}
