//! The matrix product with 8 lanes.

use std::arch::x86_64::*;

use super::{Avx2, ahead, ask, prefetch};
use crate::kernel::chunks::{chunks_of, in_order, padded, rows_of, split, whole};
use crate::kernel::matrix::{Matrix, Weights};
use crate::kernel::mxfp4::{BF16_TABLES, BLOCK_BYTES};
use crate::kernel::twin::{Format, Packed, TILE_OUTPUTS, TileSize, Twin};

const LANES: usize = 8;

/// Columns of an MXFP4 chunk: 32 bytes of codes, two blocks.
const CHUNK: usize = 64;

/// Lanes 0 to 3 belong to the first block, 4 to 7 to the second. Within a block, a vector holds the
/// low (or high) nibbles of every other byte of its first (or second) half.
const MXFP4: [u8; CHUNK] = {
    let mut order = [0; CHUNK];
    let mut p = 0;
    while p < CHUNK {
        let (v, lane) = (p / LANES, p % LANES);
        let (high, second_half, odd) = (v / 4, v / 2 % 2, v % 2);
        order[p] = (32 * (lane / 4) + 16 * second_half + 4 * (lane % 4) + 2 * odd + high) as u8;
        p += 1;
    }
    order
};

impl Twin for Avx2 {
    const LANES: usize = LANES;
    const TILE_ROWS: usize = 3;
    const PANEL_COLS: usize = 512;
    const FEW: usize = 2;

    fn order(format: Format) -> &'static [u8] {
        match format {
            Format::Bf16 => const { &in_order::<16>() },
            Format::F32 => const { &in_order::<LANES>() },
            Format::Mxfp4 => &MXFP4,
        }
    }

    fn few(self, w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
        // SAFETY: `self` exists, so `detect` found AVX2 and FMA.
        unsafe { few(w, x, y) }
    }

    fn decode(self, w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
        // SAFETY: `self` exists, so `detect` found AVX2 and FMA.
        unsafe { decode(w, row, first, out) }
    }

    fn tile(self, size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
        // SAFETY: `self` exists, so `detect` found AVX2 and FMA.
        unsafe { tile_of(size, x, panel, sums) }
    }

    fn add_up(self, sums: &[f32], out: &mut [f32; TILE_OUTPUTS]) {
        // SAFETY: `self` exists, so `detect` found AVX2 and FMA.
        unsafe { add_up(sums, out) }
    }

    fn ask(self, bytes: &[u8]) {
        ask(bytes);
    }
}

#[target_feature(enable = "avx2,fma")]
fn few(w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
    match (x.n(), Format::of(w)) {
        (1, Format::Mxfp4) => few_rows::<4, 1>(w, x, y),
        (1, _) => few_rows::<6, 1>(w, x, y),
        _ => few_rows::<2, 2>(w, x, y),
    }
}

/// `R` outputs at a time: as many independent sums as hide the latency of an addition.
#[target_feature(enable = "avx2,fma")]
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
#[target_feature(enable = "avx2,fma")]
#[inline]
fn dots<const R: usize, const N: usize>(
    w: Matrix<'_>,
    i: usize,
    x: [&[f32]; N],
) -> [[__m256; N]; R] {
    match w.weights {
        Weights::Bf16(bytes) => dots_bf16(rows_of(bytes, i, 2 * w.cols()), x),
        Weights::F32(bytes) => dots_f32(rows_of(bytes, i, 4 * w.cols()), x),
        Weights::Mxfp4 { codes, scales } => {
            let codes = rows_of(codes, i, w.cols() / 2);
            dots_mxfp4(codes, rows_of(scales, i, w.cols() / 32), x)
        }
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn dots_bf16<const R: usize, const N: usize>(w: [&[u8]; R], x: [&[f32]; N]) -> [[__m256; N]; R] {
    let (whole, xs) = (w[0].len() / 32, chunks_of::<_, 16, N>(x));
    let chunks = chunks_of::<_, 32, R>(w);
    let ahead = ahead(R, w[0].len());
    let mut sums = [[_mm256_setzero_ps(); N]; R];
    for i in 0..whole {
        for r in 0..R {
            prefetch(&chunks[r][i], ahead);
            add_products(&widen(&chunks[r][i]), xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let w = widen(&padded(&w[r][whole * 32..]));
            add_products(&w, xs, whole, &mut sums[r]);
        }
    }
    sums
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn dots_f32<const R: usize, const N: usize>(w: [&[u8]; R], x: [&[f32]; N]) -> [[__m256; N]; R] {
    let (whole, xs) = (w[0].len() / 32, chunks_of::<_, LANES, N>(x));
    let chunks = chunks_of::<_, 32, R>(w);
    let mut sums = [[_mm256_setzero_ps(); N]; R];
    for i in 0..whole {
        for r in 0..R {
            add_products(&[load_floats(&chunks[r][i])], xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let w = load_floats(&padded(&w[r][whole * 32..]));
            add_products(&[w], xs, whole, &mut sums[r]);
        }
    }
    sums
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn dots_mxfp4<const R: usize, const N: usize>(
    codes: [&[u8]; R],
    scales: [&[u8]; R],
    x: [&[f32]; N],
) -> [[__m256; N]; R] {
    let (whole, xs) = (codes[0].len() / 32, chunks_of::<_, CHUNK, N>(x));
    let (chunks, pairs) = (chunks_of::<_, 32, R>(codes), chunks_of::<_, 2, R>(scales));
    let ahead = ahead(R, codes[0].len());
    let mut sums = [[_mm256_setzero_ps(); N]; R];
    for i in 0..whole {
        for r in 0..R {
            prefetch(&chunks[r][i], ahead);
            let w = unpack(&chunks[r][i], pairs[r][i]);
            add_products(&w, xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let scales = padded(&scales[r][whole * 2..]);
            let w = unpack(&padded(&codes[r][whole * 32..]), scales);
            add_products(&w, xs, whole, &mut sums[r]);
        }
    }
    sums
}

/// `sums[n] += w[j] · x[n][i][j]`, one `j` after another: THE order of the sum.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_products<const N: usize, const V: usize, const C: usize>(
    w: &[__m256; V],
    x: [&[[f32; C]]; N],
    i: usize,
    sums: &mut [__m256; N],
) {
    for n in 0..N {
        let x = x[n][i].as_chunks::<LANES>().0;
        for j in 0..V {
            sums[n] = _mm256_fmadd_ps(w[j], load(&x[j]), sums[n]);
        }
    }
}

/// 16 bfloat16.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn widen(w: &[u8; 32]) -> [__m256; 2] {
    let w = load_bytes(w);
    let halves = [_mm256_castsi256_si128(w), _mm256_extracti128_si256::<1>(w)];
    let words = [
        _mm256_cvtepu16_epi32(halves[0]),
        _mm256_cvtepu16_epi32(halves[1]),
    ];
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words[0])),
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words[1])),
    ]
}

/// 16 bfloat16 as the even and the odd ones: a vector of 32-bit words holds both.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn widen_words(w: __m256i) -> [__m256; 2] {
    let odd = _mm256_and_si256(w, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w)),
        _mm256_castsi256_ps(odd),
    ]
}

/// 64 weights. A block's scale picks a table of its 16 possible weights as bfloat16, which hold
/// them exactly; the two bytes of a weight are looked up apart and joined. That is cheaper than
/// converting integers and multiplying by the scale.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn unpack(codes: &[u8; 32], scales: [u8; 2]) -> [__m256; 8] {
    let [a, b] = scales.map(|b| &BF16_TABLES[usize::from(b)]);
    let (lower, upper) = (join(&a.lower, &b.lower), join(&a.upper, &b.upper));
    let (codes, nibble) = (load_bytes(codes), _mm256_set1_epi8(0xf));
    let low = _mm256_and_si256(codes, nibble);
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
    let mut w = [_mm256_setzero_ps(); 8];
    for (at, nibbles) in [(0, low), (4, high)] {
        let (lower, upper) = (
            _mm256_shuffle_epi8(lower, nibbles),
            _mm256_shuffle_epi8(upper, nibbles),
        );
        let [a, b] = widen_words(_mm256_unpacklo_epi8(lower, upper));
        let [c, d] = widen_words(_mm256_unpackhi_epi8(lower, upper));
        (w[at], w[at + 1], w[at + 2], w[at + 3]) = (a, b, c, d);
    }
    w
}

/// A table for each half.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn join(first: &[u8; BLOCK_BYTES], second: &[u8; BLOCK_BYTES]) -> __m256i {
    // SAFETY: the array is exactly the 16 bytes read.
    let first = unsafe { _mm_loadu_si128(first.as_ptr().cast()) };
    // SAFETY: the array is exactly the 16 bytes read.
    let second = unsafe { _mm_loadu_si128(second.as_ptr().cast()) };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), second)
}

#[target_feature(enable = "avx2,fma")]
fn decode(w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
    match w.weights {
        Weights::Bf16(bytes) => {
            let [bytes] = rows_of(bytes, row, 2 * w.cols());
            let mut chunks = bytes[2 * first..].chunks(32);
            for out in out.as_chunks_mut::<16>().0 {
                store_all(&widen(&whole(chunks.next().unwrap_or_default())), out);
            }
        }
        Weights::F32(bytes) => {
            let [bytes] = rows_of(bytes, row, 4 * w.cols());
            let mut chunks = bytes[4 * first..].chunks(32);
            for out in out.as_chunks_mut::<LANES>().0 {
                let w = load_floats(&whole(chunks.next().unwrap_or_default()));
                store_all(&[w], out);
            }
        }
        Weights::Mxfp4 { codes, scales } => {
            let [codes] = rows_of(codes, row, w.cols() / 2);
            let [scales] = rows_of(scales, row, w.cols() / 32);
            let chunks = codes[first / 2..]
                .chunks(32)
                .zip(scales[first / 32..].chunks(2));
            for ((codes, scales), out) in chunks.zip(out.as_chunks_mut::<CHUNK>().0) {
                store_all(&unpack(&whole(codes), whole(scales)), out);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn tile_of(size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
    match size.rows {
        1 => tile::<1>(size, x, panel, sums),
        2 => tile::<2>(size, x, panel, sums),
        _ => tile::<3>(size, x, panel, sums),
    }
}

#[target_feature(enable = "avx2,fma")]
fn tile<const M: usize>(size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
    let cols = size.cols;
    let (x, w) = (
        split::<LANES, M>(x, cols),
        split::<LANES, TILE_OUTPUTS>(panel, cols),
    );
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<TILE_OUTPUTS>();
    let sums: &mut [_; M] = sums.first_chunk_mut().expect("a tile's sums");
    let mut held = [[_mm256_setzero_ps(); TILE_OUTPUTS]; M];
    if !size.fresh {
        for m in 0..M {
            for r in 0..TILE_OUTPUTS {
                held[m][r] = load(&sums[m][r]);
            }
        }
    }
    for i in 0..cols / LANES {
        // 12 sums, 3 activations and one weight: all 16 registers.
        let mut now = [_mm256_setzero_ps(); M];
        for m in 0..M {
            now[m] = load(&x[m][i]);
        }
        for r in 0..TILE_OUTPUTS {
            let w = load(&w[r][i]);
            for m in 0..M {
                held[m][r] = _mm256_fmadd_ps(w, now[m], held[m][r]);
            }
        }
    }
    for m in 0..M {
        for r in 0..TILE_OUTPUTS {
            store(held[m][r], &mut sums[m][r]);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn add_up(sums: &[f32], out: &mut [f32; TILE_OUTPUTS]) {
    for (sums, out) in sums.as_chunks::<LANES>().0.iter().zip(out) {
        *out = total(load(sums));
    }
}

/// The sum of all lanes: 4 apart, 2 apart, neighbours.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn total(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn load(x: &[f32; LANES]) -> __m256 {
    // SAFETY: the array is exactly the 32 bytes read.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn load_bytes(x: &[u8; 32]) -> __m256i {
    // SAFETY: the array is exactly the 32 bytes read.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

/// 8 little-endian f32 of any alignment.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn load_floats(x: &[u8; 32]) -> __m256 {
    _mm256_castsi256_ps(load_bytes(x))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn store(x: __m256, to: &mut [f32; LANES]) {
    // SAFETY: the array is exactly the 32 bytes written.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
}

/// Vectors one after another into a chunk.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn store_all<const V: usize, const C: usize>(x: &[__m256; V], to: &mut [f32; C]) {
    let to = to.as_chunks_mut().0;
    for v in 0..V {
        store(x[v], &mut to[v]);
    }
}
