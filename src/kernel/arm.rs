//! AArch64: the matrix product with 4 lanes.
//!
//! Safety argument, once for the file: `#[target_feature]` functions are reached only through
//! [`Neon`], whose single constructor asks the CPU. Inside them arithmetic intrinsics are safe; the
//! remaining `unsafe` is loads and stores of fixed-size arrays, where the type is the bound.

#![expect(
    clippy::needless_range_loop,
    reason = "several arrays share each index"
)]

use std::arch::aarch64::*;

use super::chunks::{chunks_of, in_order, padded, rows_of, split, whole};
use super::matrix::{Matrix, Weights};
use super::mxfp4::{BF16_TABLES, BLOCK};
use super::twin::{Format, Packed, TILE_OUTPUTS, TileSize, Twin};

/// Proof that this CPU has Advanced SIMD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon(());

impl Neon {
    /// Asks the CPU.
    pub fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

const LANES: usize = 4;

/// A chunk is a block. Vectors 0 to 3 hold the low nibbles, that is the even columns, 4 to 7 the
/// high ones.
const MXFP4: [u8; BLOCK] = {
    let mut order = [0; BLOCK];
    let mut p = 0;
    while p < BLOCK {
        order[p] = (2 * (p % 16) + p / 16) as u8;
        p += 1;
    }
    order
};

impl Twin for Neon {
    const LANES: usize = LANES;
    const TILE_ROWS: usize = 6;
    const PANEL_COLS: usize = 512;
    const FEW: usize = 4;

    fn order(format: Format) -> &'static [u8] {
        match format {
            Format::Bf16 => const { &in_order::<8>() },
            Format::F32 => const { &in_order::<LANES>() },
            Format::Mxfp4 => &MXFP4,
        }
    }

    fn few(self, w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
        // SAFETY: `self` exists, so `detect` found NEON.
        unsafe { few(w, x, y) }
    }

    fn decode(self, w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
        // SAFETY: `self` exists, so `detect` found NEON.
        unsafe { decode(w, row, first, out) }
    }

    fn tile(self, size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
        // SAFETY: `self` exists, so `detect` found NEON.
        unsafe { tile_of(size, x, panel, sums) }
    }

    fn add_up(self, sums: &[f32], out: &mut [f32; TILE_OUTPUTS]) {
        // SAFETY: `self` exists, so `detect` found NEON.
        unsafe { add_up(sums, out) }
    }
}

#[target_feature(enable = "neon")]
fn few(w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
    match x.n() {
        1 => few_rows::<8, 1>(w, x, y),
        2 => few_rows::<4, 2>(w, x, y),
        3 => few_rows::<4, 3>(w, x, y),
        _ => few_rows::<2, 4>(w, x, y),
    }
}

/// `R` outputs at a time: as many independent sums as hide the latency of an addition.
#[target_feature(enable = "neon")]
fn few_rows<const R: usize, const N: usize>(w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
    let x = x.rows::<N>();
    let together = w.rows() - w.rows() % R;
    for i in (0..together).step_by(R) {
        let sums = dots::<R, N>(w, i, x);
        for r in 0..R {
            for n in 0..N {
                y[n][i + r] = total(sums[r][n]);
            }
        }
    }
    for i in together..w.rows() {
        let [sums] = dots::<1, N>(w, i, x);
        for n in 0..N {
            y[n][i] = total(sums[n]);
        }
    }
}

/// Partial sums of rows `i .. i + R` of `w` with each of `x`.
#[target_feature(enable = "neon")]
#[inline]
fn dots<const R: usize, const N: usize>(
    w: Matrix<'_>,
    i: usize,
    x: [&[f32]; N],
) -> [[float32x4_t; N]; R] {
    match w.weights {
        Weights::Bf16(bytes) => dots_bf16(rows_of(bytes, i, 2 * w.cols()), x),
        Weights::F32(bytes) => dots_f32(rows_of(bytes, i, 4 * w.cols()), x),
        Weights::Mxfp4 { codes, scales } => {
            let codes = rows_of(codes, i, w.cols() / 2);
            dots_mxfp4(codes, rows_of(scales, i, w.cols() / 32), x)
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn dots_bf16<const R: usize, const N: usize>(
    w: [&[u8]; R],
    x: [&[f32]; N],
) -> [[float32x4_t; N]; R] {
    let (whole, xs) = (w[0].len() / 16, chunks_of::<_, 8, N>(x));
    let chunks = chunks_of::<_, 16, R>(w);
    let mut sums = [[vdupq_n_f32(0.0); N]; R];
    for i in 0..whole {
        for r in 0..R {
            add_products(&widen(&chunks[r][i]), xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let w = widen(&padded(&w[r][whole * 16..]));
            add_products(&w, xs, whole, &mut sums[r]);
        }
    }
    sums
}

#[target_feature(enable = "neon")]
#[inline]
fn dots_f32<const R: usize, const N: usize>(
    w: [&[u8]; R],
    x: [&[f32]; N],
) -> [[float32x4_t; N]; R] {
    let (whole, xs) = (w[0].len() / 16, chunks_of::<_, LANES, N>(x));
    let chunks = chunks_of::<_, 16, R>(w);
    let mut sums = [[vdupq_n_f32(0.0); N]; R];
    for i in 0..whole {
        for r in 0..R {
            add_products(&[load_floats(&chunks[r][i])], xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let w = load_floats(&padded(&w[r][whole * 16..]));
            add_products(&[w], xs, whole, &mut sums[r]);
        }
    }
    sums
}

#[target_feature(enable = "neon")]
#[inline]
fn dots_mxfp4<const R: usize, const N: usize>(
    codes: [&[u8]; R],
    scales: [&[u8]; R],
    x: [&[f32]; N],
) -> [[float32x4_t; N]; R] {
    let (whole, xs) = (codes[0].len() / 16, chunks_of::<_, BLOCK, N>(x));
    let chunks = chunks_of::<_, 16, R>(codes);
    let mut sums = [[vdupq_n_f32(0.0); N]; R];
    for i in 0..whole {
        for r in 0..R {
            add_products(&unpack(&chunks[r][i], scales[r][i]), xs, i, &mut sums[r]);
        }
    }
    sums
}

/// `sums[n] += w[j] · x[n][i][j]`, one `j` after another: THE order of the sum.
#[target_feature(enable = "neon")]
#[inline]
fn add_products<const N: usize, const V: usize, const C: usize>(
    w: &[float32x4_t; V],
    x: [&[[f32; C]]; N],
    i: usize,
    sums: &mut [float32x4_t; N],
) {
    for n in 0..N {
        let x = x[n][i].as_chunks::<LANES>().0;
        for j in 0..V {
            sums[n] = vfmaq_f32(sums[n], w[j], load(&x[j]));
        }
    }
}

/// 8 bfloat16.
#[target_feature(enable = "neon")]
#[inline]
fn widen(w: &[u8; 16]) -> [float32x4_t; 2] {
    let w = vreinterpretq_u16_u8(load_bytes(w));
    [
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(w))),
        vreinterpretq_f32_u32(vshll_high_n_u16::<16>(w)),
    ]
}

/// 32 weights. The scale picks a table of the block's 16 possible weights as bfloat16, which hold
/// them exactly; the two bytes of a weight are looked up apart and joined.
#[target_feature(enable = "neon")]
#[inline]
fn unpack(codes: &[u8; 16], scale: u8) -> [float32x4_t; 8] {
    let table = &BF16_TABLES[usize::from(scale)];
    let (lower, upper) = (load_bytes(&table.lower), load_bytes(&table.upper));
    let codes = load_bytes(codes);
    let mut w = [vdupq_n_f32(0.0); 8];
    for (at, nibbles) in [
        (0, vandq_u8(codes, vdupq_n_u8(0xf))),
        (4, vshrq_n_u8::<4>(codes)),
    ] {
        let (lower, upper) = (vqtbl1q_u8(lower, nibbles), vqtbl1q_u8(upper, nibbles));
        let first = vreinterpretq_u16_u8(vzip1q_u8(lower, upper));
        let second = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
        w[at] = vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(first)));
        w[at + 1] = vreinterpretq_f32_u32(vshll_high_n_u16::<16>(first));
        w[at + 2] = vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(second)));
        w[at + 3] = vreinterpretq_f32_u32(vshll_high_n_u16::<16>(second));
    }
    w
}

#[target_feature(enable = "neon")]
fn decode(w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
    match w.weights {
        Weights::Bf16(bytes) => {
            let [bytes] = rows_of(bytes, row, 2 * w.cols());
            let mut chunks = bytes[2 * first..].chunks(16);
            for out in out.as_chunks_mut::<8>().0 {
                store_all(&widen(&whole(chunks.next().unwrap_or_default())), out);
            }
        }
        Weights::F32(bytes) => {
            let [bytes] = rows_of(bytes, row, 4 * w.cols());
            let mut chunks = bytes[4 * first..].chunks(16);
            for out in out.as_chunks_mut::<LANES>().0 {
                let w = load_floats(&whole(chunks.next().unwrap_or_default()));
                store_all(&[w], out);
            }
        }
        Weights::Mxfp4 { codes, scales } => {
            let [codes] = rows_of(codes, row, w.cols() / 2);
            let [scales] = rows_of(scales, row, w.cols() / 32);
            let codes = codes[first / 2..].as_chunks::<16>().0;
            let chunks = codes.iter().zip(&scales[first / 32..]);
            for ((codes, &scale), out) in chunks.zip(out.as_chunks_mut::<BLOCK>().0) {
                store_all(&unpack(codes, scale), out);
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn tile_of(size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
    match size.rows {
        1 => tile::<1>(size, x, panel, sums),
        2 => tile::<2>(size, x, panel, sums),
        3 => tile::<3>(size, x, panel, sums),
        4 => tile::<4>(size, x, panel, sums),
        5 => tile::<5>(size, x, panel, sums),
        _ => tile::<6>(size, x, panel, sums),
    }
}

#[target_feature(enable = "neon")]
fn tile<const M: usize>(size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
    let cols = size.cols;
    let (x, w) = (
        split::<LANES, M>(x, cols),
        split::<LANES, TILE_OUTPUTS>(panel, cols),
    );
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<TILE_OUTPUTS>();
    let sums: &mut [_; M] = sums.first_chunk_mut().expect("a tile's sums");
    let mut held = [[vdupq_n_f32(0.0); TILE_OUTPUTS]; M];
    if !size.fresh {
        for m in 0..M {
            for r in 0..TILE_OUTPUTS {
                held[m][r] = load(&sums[m][r]);
            }
        }
    }
    for i in 0..cols / LANES {
        let mut now = [vdupq_n_f32(0.0); M];
        for m in 0..M {
            now[m] = load(&x[m][i]);
        }
        for r in 0..TILE_OUTPUTS {
            let w = load(&w[r][i]);
            for m in 0..M {
                held[m][r] = vfmaq_f32(held[m][r], w, now[m]);
            }
        }
    }
    for m in 0..M {
        for r in 0..TILE_OUTPUTS {
            store(held[m][r], &mut sums[m][r]);
        }
    }
}

#[target_feature(enable = "neon")]
fn add_up(sums: &[f32], out: &mut [f32; TILE_OUTPUTS]) {
    for (sums, out) in sums.as_chunks::<LANES>().0.iter().zip(out) {
        *out = total(load(sums));
    }
}

/// The sum of all lanes: neighbours, then 2 apart.
#[target_feature(enable = "neon")]
#[inline]
fn total(v: float32x4_t) -> f32 {
    vaddvq_f32(v)
}

#[target_feature(enable = "neon")]
#[inline]
fn load(x: &[f32; LANES]) -> float32x4_t {
    // SAFETY: the array is exactly the 16 bytes read.
    unsafe { vld1q_f32(x.as_ptr()) }
}

#[target_feature(enable = "neon")]
#[inline]
fn load_bytes(x: &[u8; 16]) -> uint8x16_t {
    // SAFETY: the array is exactly the 16 bytes read.
    unsafe { vld1q_u8(x.as_ptr()) }
}

/// 4 little-endian f32 of any alignment.
#[target_feature(enable = "neon")]
#[inline]
fn load_floats(x: &[u8; 16]) -> float32x4_t {
    vreinterpretq_f32_u8(load_bytes(x))
}

#[target_feature(enable = "neon")]
#[inline]
fn store(x: float32x4_t, to: &mut [f32; LANES]) {
    // SAFETY: the array is exactly the 16 bytes written.
    unsafe { vst1q_f32(to.as_mut_ptr(), x) }
}

/// Vectors one after another into a chunk.
#[target_feature(enable = "neon")]
#[inline]
fn store_all<const V: usize, const C: usize>(x: &[float32x4_t; V], to: &mut [f32; C]) {
    let to = to.as_chunks_mut().0;
    for v in 0..V {
        store(x[v], &mut to[v]);
    }
}
