//! Matrix products against an f64 oracle that shares no code with them.

use proptest::prelude::*;

use super::support::Random;
use crate::kernel::{Isa, Kernel, Matrix};

/// How a weight is read, straight from the format's definition, in f64.
#[derive(Clone, Copy, Debug)]
enum Format {
    Bf16,
    F32,
    Mxfp4,
}

/// Owned weights of one matrix.
struct Owned {
    format: Format,
    /// Weights, or codes, behind a byte that spoils the alignment.
    bytes: Vec<u8>,
    scales: Vec<u8>,
    rows: usize,
    cols: usize,
}

impl Owned {
    fn matrix(&self) -> Matrix<'_> {
        let (rows, cols, bytes) = (self.rows, self.cols, &self.bytes[1..]);
        match self.format {
            Format::Bf16 => Matrix::bf16(bytes, rows, cols),
            Format::F32 => Matrix::f32(bytes, rows, cols),
            Format::Mxfp4 => Matrix::mxfp4(bytes, &self.scales[1..], rows, cols),
        }
    }

    fn weight(&self, row: usize, col: usize) -> f64 {
        const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let (bytes, i) = (&self.bytes[1..], row * self.cols + col);
        match self.format {
            Format::Bf16 => {
                f32::from_bits(u32::from_le_bytes([0, 0, bytes[2 * i], bytes[2 * i + 1]])).into()
            }
            Format::F32 => f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap()).into(),
            Format::Mxfp4 => {
                let code = bytes[i / 2] >> (4 * (i % 2)) & 0xf;
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                let b = self.scales[1 + i / 32];
                let scale = if b == 255 {
                    f64::NAN
                } else {
                    2f64.powi(i32::from(b) - 127)
                };
                sign * E2M1[usize::from(code & 7)] * scale
            }
        }
    }
}

/// A matrix drawn from a seed; scales lie in `scales`.
fn draw(
    seed: u64,
    format: Format,
    rows: usize,
    cols: usize,
    scales: std::ops::Range<u64>,
) -> Owned {
    let mut random = Random(seed);
    let n = rows * cols;
    let bytes = match format {
        Format::Bf16 => random.bf16(n),
        Format::F32 => (0..n).flat_map(|_| random.unit().to_le_bytes()).collect(),
        Format::Mxfp4 => random.bytes(n / 2),
    };
    let width = scales.end - scales.start;
    let scales = (0..n / 32)
        .map(|_| (scales.start + random.next() % width) as u8)
        .collect();
    let spoil = |bytes: Vec<u8>| [vec![0], bytes].concat();
    Owned {
        format,
        bytes: spoil(bytes),
        scales: spoil(scales),
        rows,
        cols,
    }
}

/// Every element of `y` against f64, within `cols · ε · Σ|w·x|`.
fn check(k: &Kernel, w: &Owned, x: &[f32]) {
    let n = x.len() / w.cols;
    let mut y = vec![f32::NAN; n * w.rows];
    k.matmul(w.matrix(), x, &mut y);
    for (row, (x, y)) in x.chunks(w.cols).zip(y.chunks(w.rows)).enumerate() {
        for (i, &y) in y.iter().enumerate() {
            let terms = x
                .iter()
                .enumerate()
                .map(|(c, &x)| w.weight(i, c) * f64::from(x));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
            let what = || format!("{:?} {:?} row {row} output {i}", k.isa(), w.format);
            if sum.is_nan() {
                assert!(y.is_nan(), "{}: {y}, wanted NaN", what());
            } else if size > f64::from(f32::MAX) {
                // Partial sums may overflow: that is f32 arithmetic, not decoding.
            } else {
                let bound = w.cols as f64 * f64::from(f32::EPSILON) * size + 1e-42;
                let off = (f64::from(y) - sum).abs();
                assert!(
                    off <= bound,
                    "{}: {y:e}, wanted {sum:e} ± {bound:e}",
                    what()
                );
            }
        }
    }
}

fn formats() -> impl Strategy<Value = Format> {
    prop_oneof![Just(Format::Bf16), Just(Format::F32), Just(Format::Mxfp4)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_isa_matches_the_oracle(
        seed: u64, format in formats(), rows in 1usize..40, blocks in 1usize..12, odd in 0usize..32, n in 1usize..20,
    ) {
        let cols = match format { Format::Mxfp4 => blocks * 32, _ => (blocks - 1) * 32 + odd + 1 };
        let w = draw(seed, format, rows, cols, 90..150);
        let x = Random(seed ^ 1).units(n * cols);
        for isa in Isa::available() {
            check(&Kernel::new(isa, 1), &w, &x);
        }
    }

    #[test]
    fn scales_of_every_size_decode_exactly(seed: u64, rows in 1usize..6, blocks in 1usize..9, n in 1usize..10) {
        let cols = blocks * 32;
        let w = draw(seed, Format::Mxfp4, rows, cols, 0..255);
        let x = Random(seed ^ 1).units(n * cols);
        for isa in Isa::available() {
            check(&Kernel::new(isa, 1), &w, &x);
        }
    }
}

#[test]
fn a_finite_result_stays_finite_although_a_weight_is_too_large_for_f32() {
    for b in [252, 253, 254] {
        for code in 0..16u8 {
            let w = Owned {
                format: Format::Mxfp4,
                bytes: [vec![0], vec![code | code << 4; 32]].concat(),
                scales: vec![0, b, 0],
                rows: 1,
                cols: 64,
            };
            for isa in Isa::available() {
                for n in [1, 2, 5, 9] {
                    check(&Kernel::new(isa, 1), &w, &vec![1e-3; n * 64]);
                }
            }
        }
    }
}

#[test]
fn subnormal_activations_and_weights_are_not_flushed() {
    let w = draw(3, Format::Mxfp4, 3, 64, 0..3);
    let large = vec![1e30; 64];
    let bright = draw(4, Format::Mxfp4, 3, 64, 200..210);
    for isa in Isa::available() {
        let k = Kernel::new(isa, 1);
        check(&k, &w, &large);
        check(&k, &bright, &vec![1e-40; 7 * 64]);
    }
}

#[test]
fn a_nan_scale_poisons_only_its_own_output() {
    for isa in Isa::available() {
        let k = Kernel::new(isa, 1);
        for n in [1, 2, 7, 33] {
            let scales = [127, 127, 255, 127, 127, 127];
            let w = Matrix::mxfp4(&[0x22; 96], &scales, 3, 64);
            let mut y = vec![0.0; 3 * n];
            k.matmul(w, &vec![1.0; 64 * n], &mut y);
            for y in y.chunks(3) {
                assert!(
                    y[0] == 64.0 && y[1].is_nan() && y[2] == 64.0,
                    "{isa:?}: {y:?}"
                );
            }
        }
    }
}

#[test]
fn infinities_and_nan_poison_only_their_own_row() {
    for isa in Isa::available() {
        let k = Kernel::new(isa, 2);
        for (format, cols) in [(Format::Bf16, 70), (Format::F32, 70), (Format::Mxfp4, 96)] {
            let w = draw(5, format, 9, cols, 120..130);
            let clean = Random(6).units(8 * cols);
            let mut want = vec![0.0; 8 * 9];
            k.matmul(w.matrix(), &clean, &mut want);
            let mut x = clean.clone();
            x[2 * cols + 3] = f32::NAN;
            x[5 * cols + 69] = f32::INFINITY;
            let mut y = vec![0.0; 8 * 9];
            k.matmul(w.matrix(), &x, &mut y);
            for (row, (y, want)) in y.chunks(9).zip(want.chunks(9)).enumerate() {
                match row {
                    2 => assert!(y.iter().all(|y| y.is_nan()), "{y:?}"),
                    5 => assert!(y.iter().all(|y| !y.is_finite()), "{y:?}"),
                    _ => assert_eq!(y, want, "{isa:?} {format:?} row {row}"),
                }
            }
        }
    }
}
