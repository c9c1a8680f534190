//! The definition of the matrix product. Read this to learn what it means.

use super::lanes;
use super::matrix::{Matrix, Weights};
use super::mxfp4::{self, BLOCK, BLOCK_BYTES, SCALE_WIDE};

/// `y[row][i] = Σ_c w[i, c] · x[row][c]`, for every row of `x` `[n, cols]`; `y[row]` has `w.rows()`.
///
/// The sum's order is that of [`lanes`], whatever `n` is.
pub(super) fn product(w: Matrix<'_>, x: &[f32], y: &mut [&mut [f32]]) {
    let cols = w.cols();
    let mut weights = vec![0.0; cols];
    for i in 0..w.rows() {
        w.read_row(i, &mut weights);
        for (x, y) in x.chunks(cols).zip(y.iter_mut()) {
            y[i] = lanes::dot(&weights, x);
        }
    }
    wide_product(w, &wide_rows(w), x, y);
}

/// Computes anew the outputs of those rows of `w` that [`wide_rows`] found.
pub(super) fn wide_product(w: Matrix<'_>, rows: &[usize], x: &[f32], y: &mut [&mut [f32]]) {
    for &row in rows {
        let weights = w.slice(row..row + 1);
        for (x, y) in x.chunks(w.cols()).zip(y.iter_mut()) {
            y[row] = wide_row(weights, x);
        }
    }
}

/// The rows whose weights leave the range of f32.
pub(super) fn wide_rows(w: Matrix<'_>) -> Vec<usize> {
    let Weights::Mxfp4 { scales, .. } = w.weights else {
        return Vec::new();
    };
    // A maximum over all bytes is a few vector instructions; looking at each row is not.
    let wide = |scales: &[u8]| scales.iter().fold(0, |top, &b| top.max(b)) >= SCALE_WIDE;
    if !wide(scales) {
        return Vec::new();
    }
    let rows = scales.chunks(w.cols() / BLOCK).enumerate();
    rows.filter(|(_, scales)| wide(scales))
        .map(|(row, _)| row)
        .collect()
}

/// One row with scales of 2^126 and more, where a weight would decode to infinity although its
/// product is finite. In f64 nothing overflows; every instruction set takes this path for such a
/// row, so its bits are the same everywhere.
#[cold]
fn wide_row(row: Matrix<'_>, x: &[f32]) -> f32 {
    let Weights::Mxfp4 { codes, scales } = row.weights else {
        unreachable!("only MXFP4 has scales")
    };
    let (codes, x) = (codes.as_chunks::<BLOCK_BYTES>().0, x.as_chunks::<BLOCK>().0);
    let mut sum = 0.0f64;
    for ((codes, &b), x) in codes.iter().zip(scales).zip(x) {
        let mut w = [0.0; BLOCK];
        mxfp4::decode_block(codes, 1.0, &mut w);
        let block: f64 = w
            .iter()
            .zip(x)
            .map(|(&w, &x)| f64::from(w) * f64::from(x))
            .sum();
        // 255 is NaN; everything else a power of two that f64 holds.
        let scale = if b == 255 {
            f64::NAN
        } else {
            f64::from_bits((u64::from(b) + 896) << 52)
        };
        sum += block * scale;
    }
    sum as f32
}
