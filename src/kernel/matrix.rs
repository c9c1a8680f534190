//! Weights as they lie in the checkpoint, borrowed.

use std::ops::Range;

use super::bf16::widen_one;
use super::mxfp4::{self, BLOCK, BLOCK_BYTES};

/// A borrowed weight matrix `[rows, cols]`, row-major, little-endian, of any alignment.
///
/// The bytes are used where they lie: an mmap, an expert's file in memory, a hub's answer.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(super) weights: Weights<'a>,
    rows: usize,
    cols: usize,
}

/// How a matrix is stored.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    /// `[rows, cols]` bfloat16.
    Bf16(&'a [u8]),
    /// `[rows, cols]` f32.
    F32(&'a [u8]),
    /// `codes` `[rows, cols / 2]`, `scales` `[rows, cols / 32]`; see [`mxfp4`].
    Mxfp4 { codes: &'a [u8], scales: &'a [u8] },
}

impl std::fmt::Debug for Weights<'_> {
    /// The format alone: nobody wants megabytes of weights in a failed assertion.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Weights::Bf16(_) => "Bf16",
            Weights::F32(_) => "F32",
            Weights::Mxfp4 { .. } => "Mxfp4",
        })
    }
}

impl<'a> Matrix<'a> {
    /// Views `bytes`, `[rows, cols]` bfloat16.
    ///
    /// # Panics
    ///
    /// If the length disagrees with the shape. Sizes from a file are checked where the file is
    /// read; a mismatch here is our own mistake.
    #[track_caller]
    pub fn bf16(bytes: &'a [u8], rows: usize, cols: usize) -> Self {
        assert_eq!(bytes.len(), 2 * rows * cols, "bf16 [{rows}, {cols}]");
        Matrix {
            weights: Weights::Bf16(bytes),
            rows,
            cols,
        }
    }

    /// Views `bytes`, `[rows, cols]` f32.
    ///
    /// # Panics
    ///
    /// If the length disagrees with the shape.
    #[track_caller]
    pub fn f32(bytes: &'a [u8], rows: usize, cols: usize) -> Self {
        assert_eq!(bytes.len(), 4 * rows * cols, "f32 [{rows}, {cols}]");
        Matrix {
            weights: Weights::F32(bytes),
            rows,
            cols,
        }
    }

    /// Views `codes` (`[rows, cols / 2]`) and `scales` (`[rows, cols / 32]`) as one MXFP4 matrix.
    ///
    /// # Panics
    ///
    /// If a length disagrees with the shape, or `cols` is not a multiple of 32.
    #[track_caller]
    pub fn mxfp4(codes: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Self {
        assert!(
            cols.is_multiple_of(BLOCK),
            "{cols} columns are not whole blocks of {BLOCK}"
        );
        assert_eq!(
            codes.len(),
            rows * cols / 2,
            "codes of mxfp4 [{rows}, {cols}]"
        );
        assert_eq!(
            scales.len(),
            rows * cols / BLOCK,
            "scales of mxfp4 [{rows}, {cols}]"
        );
        Matrix {
            weights: Weights::Mxfp4 { codes, scales },
            rows,
            cols,
        }
    }

    /// Outputs: the length of a result row.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs: the length of an activation row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of weights, scales included.
    pub fn bytes(&self) -> usize {
        match self.weights {
            Weights::Bf16(bytes) | Weights::F32(bytes) => bytes.len(),
            Weights::Mxfp4 { codes, scales } => codes.len() + scales.len(),
        }
    }

    /// The matrix of some of the rows.
    ///
    /// # Panics
    ///
    /// If `rows` leaves the matrix.
    #[track_caller]
    pub fn slice(&self, rows: Range<usize>) -> Matrix<'a> {
        assert!(
            rows.start <= rows.end && rows.end <= self.rows,
            "rows {rows:?} of {}",
            self.rows
        );
        let cut = |bytes: &'a [u8], row: usize| &bytes[rows.start * row..rows.end * row];
        let weights = match self.weights {
            Weights::Bf16(bytes) => Weights::Bf16(cut(bytes, 2 * self.cols)),
            Weights::F32(bytes) => Weights::F32(cut(bytes, 4 * self.cols)),
            Weights::Mxfp4 { codes, scales } => Weights::Mxfp4 {
                codes: cut(codes, self.cols / 2),
                scales: cut(scales, self.cols / BLOCK),
            },
        };
        Matrix {
            weights,
            rows: rows.len(),
            cols: self.cols,
        }
    }

    /// Where some columns of a row lie: weights or codes, and scales. Columns are whole blocks.
    pub(super) fn bytes_of(&self, row: usize, cols: Range<usize>) -> [&'a [u8]; 2] {
        let from = row * self.cols;
        let cut = |bytes: &'a [u8], size: usize, values: usize| {
            let at = |col: usize| (from + col) * size / values;
            &bytes[at(cols.start)..at(cols.end)]
        };
        match self.weights {
            Weights::Bf16(bytes) => [cut(bytes, 2, 1), &[]],
            Weights::F32(bytes) => [cut(bytes, 4, 1), &[]],
            Weights::Mxfp4 { codes, scales } => [cut(codes, 1, 2), cut(scales, 1, BLOCK)],
        }
    }

    /// Decodes one row into `out` `[cols]`: the embedding's lookup.
    ///
    /// # Panics
    ///
    /// If the row is outside, or `out` has the wrong length.
    #[track_caller]
    #[inline]
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(
            out.len(),
            self.cols,
            "a row of [{}, {}]",
            self.rows,
            self.cols
        );
        match self.slice(row..row + 1).weights {
            Weights::Bf16(bytes) => {
                for (out, &w) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *out = widen_one(w);
                }
            }
            Weights::F32(bytes) => {
                for (out, &w) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(w);
                }
            }
            Weights::Mxfp4 { codes, scales } => {
                let (codes, _) = codes.as_chunks::<BLOCK_BYTES>();
                let (out, _) = out.as_chunks_mut::<BLOCK>();
                for ((codes, &b), out) in codes.iter().zip(scales).zip(out) {
                    mxfp4::decode_block(codes, mxfp4::scale(b), out);
                }
            }
        }
    }
}
