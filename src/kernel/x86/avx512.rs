//! The matrix product with 16 lanes.

use std::arch::x86_64::*;

use super::{Avx512, ahead, ask, prefetch};
use crate::kernel::chunks::{chunks_of, in_order, padded, rows_of, split, whole};
use crate::kernel::matrix::{Matrix, Weights};
use crate::kernel::mxfp4::VALUES;
use crate::kernel::twin::{Format, Packed, TILE_OUTPUTS, TileSize, Twin, tame_scales};

const LANES: usize = 16;

/// Columns of an MXFP4 chunk: 64 bytes of codes, four blocks.
const CHUNK: usize = 128;

/// A chunk's codes are 16 words of 8 nibbles: word `i` holds columns `8i .. 8i + 8`. The `j`-th
/// vector takes the `j`-th nibble of every word.
const MXFP4: [u8; CHUNK] = {
    let mut order = [0; CHUNK];
    let mut p = 0;
    while p < CHUNK {
        order[p] = (p % LANES * 8 + p / LANES) as u8;
        p += 1;
    }
    order
};

impl Twin for Avx512 {
    const LANES: usize = LANES;
    const TILE_ROWS: usize = 6;
    const PANEL_COLS: usize = 512;
    const FEW: usize = 4;

    fn order(format: Format) -> &'static [u8] {
        match format {
            Format::Bf16 => const { &in_order::<32>() },
            Format::F32 => const { &in_order::<LANES>() },
            Format::Mxfp4 => &MXFP4,
        }
    }

    fn few(self, w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
        // SAFETY: `self` exists, so `detect` found AVX-512F.
        unsafe { few(w, x, y) }
    }

    fn decode(self, w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
        // SAFETY: `self` exists, so `detect` found AVX-512F.
        unsafe { decode(w, row, first, out) }
    }

    fn tile(self, size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
        // SAFETY: `self` exists, so `detect` found AVX-512F.
        unsafe { tile_of(size, x, panel, sums) }
    }

    fn add_up(self, sums: &[f32], out: &mut [f32; TILE_OUTPUTS]) {
        // SAFETY: `self` exists, so `detect` found AVX-512F.
        unsafe { add_up(sums, out) }
    }

    fn ask(self, bytes: &[u8]) {
        ask(bytes);
    }
}

#[target_feature(enable = "avx512f")]
fn few(w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
    match (x.n(), Format::of(w)) {
        (1, Format::Mxfp4) => few_rows::<4, 1>(w, x, y),
        (1, _) => few_rows::<8, 1>(w, x, y),
        (2, _) => few_rows::<4, 2>(w, x, y),
        (3, _) => few_rows::<2, 3>(w, x, y),
        _ => few_rows::<2, 4>(w, x, y),
    }
}

/// `R` outputs at a time: as many independent sums as hide the latency of an addition, and, where
/// decoding takes little, as many rows side by side as keep the memory busy.
#[target_feature(enable = "avx512f")]
fn few_rows<const R: usize, const N: usize>(w: Matrix<'_>, x: &Packed, y: &mut [&mut [f32]]) {
    let (tame, x) = (x.tame(), x.rows::<N>());
    let together = w.rows() - w.rows() % R;
    for i in (0..together).step_by(R) {
        let sums = dots::<R, N>(w, i, x, tame);
        for r in 0..R {
            for n in 0..N {
                y[n][i + r] = _mm512_reduce_add_ps(sums[r][n]);
            }
        }
    }
    for i in together..w.rows() {
        let [sums] = dots::<1, N>(w, i, x, tame);
        for n in 0..N {
            y[n][i] = _mm512_reduce_add_ps(sums[n]);
        }
    }
}

/// Partial sums of rows `i .. i + R` of `w` with each of `x`.
#[target_feature(enable = "avx512f")]
#[inline]
fn dots<const R: usize, const N: usize>(
    w: Matrix<'_>,
    i: usize,
    x: [&[f32]; N],
    tame: bool,
) -> [[__m512; N]; R] {
    match w.weights {
        Weights::Bf16(bytes) => dots_bf16(rows_of(bytes, i, 2 * w.cols()), x),
        Weights::F32(bytes) => dots_f32(rows_of(bytes, i, 4 * w.cols()), x),
        Weights::Mxfp4 { codes, scales } => {
            let codes = rows_of(codes, i, w.cols() / 2);
            let blocks = w.cols() / 32;
            if tame && tame_scales(&scales[i * blocks..(i + R) * blocks]) {
                let scales = rows_of(scales, i, blocks);
                if N == 1 {
                    alone(codes, scales, x)
                } else {
                    dots_tame(codes, scales, x)
                }
            } else {
                dots_mxfp4(codes, rows_of(scales, i, blocks), x)
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn dots_bf16<const R: usize, const N: usize>(w: [&[u8]; R], x: [&[f32]; N]) -> [[__m512; N]; R] {
    let (whole, xs) = (w[0].len() / 64, chunks_of::<_, 32, N>(x));
    let chunks = chunks_of::<_, 64, R>(w);
    let ahead = ahead(R, w[0].len());
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for i in 0..whole {
        for r in 0..R {
            prefetch(&chunks[r][i], ahead);
            add_products(&widen(&chunks[r][i]), xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let w = widen(&padded(&w[r][whole * 64..]));
            add_products(&w, xs, whole, &mut sums[r]);
        }
    }
    sums
}

#[target_feature(enable = "avx512f")]
#[inline]
fn dots_f32<const R: usize, const N: usize>(w: [&[u8]; R], x: [&[f32]; N]) -> [[__m512; N]; R] {
    let (whole, xs) = (w[0].len() / 64, chunks_of::<_, LANES, N>(x));
    let chunks = chunks_of::<_, 64, R>(w);
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for i in 0..whole {
        for r in 0..R {
            add_products(&[load_floats(&chunks[r][i])], xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let w = load_floats(&padded(&w[r][whole * 64..]));
            add_products(&[w], xs, whole, &mut sums[r]);
        }
    }
    sums
}

#[target_feature(enable = "avx512f")]
#[inline]
fn dots_mxfp4<const R: usize, const N: usize>(
    codes: [&[u8]; R],
    scales: [&[u8]; R],
    x: [&[f32]; N],
) -> [[__m512; N]; R] {
    let (whole, xs) = (codes[0].len() / 64, chunks_of::<_, CHUNK, N>(x));
    let (chunks, fours) = (chunks_of::<_, 64, R>(codes), chunks_of::<_, 4, R>(scales));
    let ahead = ahead(R, codes[0].len());
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    for i in 0..whole {
        for r in 0..R {
            prefetch(&chunks[r][i], ahead);
            let w = unpack_scaled(&chunks[r][i], fours[r][i]);
            add_products(&w, xs, i, &mut sums[r]);
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            let scales = padded(&scales[r][whole * 4..]);
            let w = unpack_scaled(&padded(&codes[r][whole * 64..]), scales);
            add_products(&w, xs, whole, &mut sums[r]);
        }
    }
    sums
}

/// [`dots_mxfp4`], bit for bit, where nothing can overflow or vanish: sums are held divided by the
/// scales of the block at hand, and multiplied by the ratio when the scales change. A power of two
/// changes no rounding, and one product a chunk is an eighth of one for each vector of weights.
#[target_feature(enable = "avx512f")]
#[inline]
fn dots_tame<const R: usize, const N: usize>(
    codes: [&[u8]; R],
    scales: [&[u8]; R],
    x: [&[f32]; N],
) -> [[__m512; N]; R] {
    let (whole, xs) = (codes[0].len() / 64, chunks_of::<_, CHUNK, N>(x));
    let (chunks, fours) = (chunks_of::<_, 64, R>(codes), chunks_of::<_, 4, R>(scales));
    let ahead = ahead(R, codes[0].len());
    let mut sums = [[_mm512_setzero_ps(); N]; R];
    let mut scale = [_mm512_set1_ps(1.0); R];
    let table = load(&VALUES);
    for i in 0..whole {
        let mut words = [_mm512_setzero_si512(); R];
        for r in 0..R {
            prefetch(&chunks[r][i], ahead);
            let next = spread(fours[r][i]);
            rescale(&mut sums[r], scale[r], next);
            words[r] = load_bytes(&chunks[r][i]);
            scale[r] = next;
        }
        // Row by row within a nibble, not nibble by nibble within a row: the sums of a row wait for
        // one another, those of different rows do not. Each still meets its products in one order.
        for j in 0..CHUNK / LANES {
            for r in 0..R {
                let w = look_up(words[r], table);
                words[r] = _mm512_srli_epi32::<4>(words[r]);
                for n in 0..N {
                    let x = load(&xs[n][i].as_chunks::<LANES>().0[j]);
                    sums[r][n] = _mm512_fmadd_ps(w, x, sums[r][n]);
                }
            }
        }
    }
    if xs[0].len() > whole {
        for r in 0..R {
            // Behind the last block of a row there is no scale; its weights are zeros.
            let mut last = [scales[r][scales[r].len() - 1]; 4];
            let rest = &scales[r][whole * 4..];
            last[..rest.len()].copy_from_slice(rest);
            let next = spread(last);
            rescale(&mut sums[r], scale[r], next);
            let codes = unpack(&padded(&codes[r][whole * 64..]));
            add_products(&codes, xs, whole, &mut sums[r]);
            scale[r] = next;
        }
    }
    for r in 0..R {
        for n in 0..N {
            sums[r][n] = _mm512_mul_ps(sums[r][n], scale[r]);
        }
    }
    sums
}

/// [`dots_tame`] as a function of its own: among the other loops the compiler runs out of registers
/// and keeps sums in memory, which costs one row a fifth of its speed.
#[target_feature(enable = "avx512f")]
#[inline(never)]
fn alone<const R: usize, const N: usize>(
    codes: [&[u8]; R],
    scales: [&[u8]; R],
    x: [&[f32]; N],
) -> [[__m512; N]; R] {
    dots_tame(codes, scales, x)
}

/// Sums that were divided by `from`, divided by `to`; both are normal powers of two.
#[target_feature(enable = "avx512f")]
#[inline]
fn rescale<const N: usize>(sums: &mut [__m512; N], from: __m512, to: __m512) {
    let exponent = _mm512_sub_epi32(_mm512_castps_si512(from), _mm512_castps_si512(to));
    let ratio = _mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23));
    for n in 0..N {
        sums[n] = _mm512_mul_ps(sums[n], _mm512_castsi512_ps(ratio));
    }
}

/// `sums[n] += w[j] · x[n][i][j]`, one `j` after another: THE order of the sum.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_products<const N: usize, const V: usize, const C: usize>(
    w: &[__m512; V],
    x: [&[[f32; C]]; N],
    i: usize,
    sums: &mut [__m512; N],
) {
    for n in 0..N {
        let x = x[n][i].as_chunks::<LANES>().0;
        for j in 0..V {
            sums[n] = _mm512_fmadd_ps(w[j], load(&x[j]), sums[n]);
        }
    }
}

/// 32 bfloat16.
#[target_feature(enable = "avx512f")]
#[inline]
fn widen(w: &[u8; 64]) -> [__m512; 2] {
    let w = load_bytes(w);
    let (first, second) = (_mm512_castsi512_si256(w), _mm512_extracti64x4_epi64::<1>(w));
    [widen_half(first), widen_half(second)]
}

#[target_feature(enable = "avx512f")]
#[inline]
fn widen_half(w: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(w)))
}

/// 128 weights without their scales: per vector a shift and a table look-up by the lowest four bits.
#[target_feature(enable = "avx512f")]
#[inline]
fn unpack(codes: &[u8; 64]) -> [__m512; 8] {
    let (codes, table) = (load_bytes(codes), load(&VALUES));
    [
        look_up(codes, table),
        look_up(_mm512_srli_epi32::<4>(codes), table),
        look_up(_mm512_srli_epi32::<8>(codes), table),
        look_up(_mm512_srli_epi32::<12>(codes), table),
        look_up(_mm512_srli_epi32::<16>(codes), table),
        look_up(_mm512_srli_epi32::<20>(codes), table),
        look_up(_mm512_srli_epi32::<24>(codes), table),
        look_up(_mm512_srli_epi32::<28>(codes), table),
    ]
}

/// 128 weights.
#[target_feature(enable = "avx512f")]
#[inline]
fn unpack_scaled(codes: &[u8; 64], scales: [u8; 4]) -> [__m512; 8] {
    let (mut w, scale) = (unpack(codes), spread(scales));
    for j in 0..8 {
        w[j] = _mm512_mul_ps(w[j], scale);
    }
    w
}

/// The scales of a chunk's four blocks, in the lanes of their words: 4b .. 4b + 4 belong to block b.
#[target_feature(enable = "avx512f")]
#[inline]
fn spread(scales: [u8; 4]) -> __m512 {
    let bytes = at_the_top(scales);
    let exponent = _mm512_and_si512(
        _mm512_srli_epi32::<1>(bytes),
        _mm512_set1_epi32(0x7f80_0000),
    );
    // Byte 0 means 2^-127, a subnormal that the exponent alone does not say.
    let scale = _mm512_max_epu32(exponent, _mm512_set1_epi32(1 << 22));
    _mm512_castsi512_ps(scale)
}

/// Each scale's byte at the top of its four words, from where one shift brings it to the exponent.
#[target_feature(enable = "avx512f")]
#[inline]
#[cfg(not(miri))]
fn at_the_top(scales: [u8; 4]) -> __m512i {
    let to_top = _mm512_set_epi32(0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24);
    _mm512_sllv_epi32(_mm512_set1_epi32(i32::from_le_bytes(scales)), to_top)
}

/// The same in words that Miri knows: it lacks shifts by a count of each word's own.
#[target_feature(enable = "avx512f")]
#[cfg(miri)]
fn at_the_top(scales: [u8; 4]) -> __m512i {
    let [a, b, c, d] = scales.map(|scale| i32::from(scale) << 24);
    _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a)
}

/// Each word's lowest four bits choose from `table`.
#[target_feature(enable = "avx512f")]
#[inline]
#[cfg(not(miri))]
fn look_up(words: __m512i, table: __m512) -> __m512 {
    _mm512_permutexvar_ps(words, table)
}

/// The same in words that Miri knows: it lacks this one instruction.
#[target_feature(enable = "avx512f")]
#[cfg(miri)]
fn look_up(words: __m512i, table: __m512) -> __m512 {
    let (mut numbers, mut values) = ([0.0; LANES], [0.0; LANES]);
    store(_mm512_castsi512_ps(words), &mut numbers);
    store(table, &mut values);
    load(&numbers.map(|n: f32| values[n.to_bits() as usize % LANES]))
}

#[target_feature(enable = "avx512f")]
fn decode(w: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
    match w.weights {
        Weights::Bf16(bytes) => {
            let [bytes] = rows_of(bytes, row, 2 * w.cols());
            let mut chunks = bytes[2 * first..].chunks(64);
            for out in out.as_chunks_mut::<32>().0 {
                let w = widen(&whole(chunks.next().unwrap_or_default()));
                store_all(&w, out);
            }
        }
        Weights::F32(bytes) => {
            let [bytes] = rows_of(bytes, row, 4 * w.cols());
            let mut chunks = bytes[4 * first..].chunks(64);
            for out in out.as_chunks_mut::<LANES>().0 {
                let w = load_floats(&whole(chunks.next().unwrap_or_default()));
                store_all(&[w], out);
            }
        }
        Weights::Mxfp4 { codes, scales } => {
            let [codes] = rows_of(codes, row, w.cols() / 2);
            let [scales] = rows_of(scales, row, w.cols() / 32);
            let chunks = codes[first / 2..]
                .chunks(64)
                .zip(scales[first / 32..].chunks(4));
            for ((codes, scales), out) in chunks.zip(out.as_chunks_mut::<CHUNK>().0) {
                store_all(&unpack_scaled(&whole(codes), whole(scales)), out);
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
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

#[target_feature(enable = "avx512f")]
fn tile<const M: usize>(size: TileSize, x: &[f32], panel: &[f32], sums: &mut [f32]) {
    let cols = size.cols;
    let (x, w) = (
        split::<LANES, M>(x, cols),
        split::<LANES, TILE_OUTPUTS>(panel, cols),
    );
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<TILE_OUTPUTS>();
    let sums: &mut [_; M] = sums.first_chunk_mut().expect("a tile's sums");
    let mut held = [[_mm512_setzero_ps(); TILE_OUTPUTS]; M];
    if !size.fresh {
        for m in 0..M {
            for r in 0..TILE_OUTPUTS {
                held[m][r] = load(&sums[m][r]);
            }
        }
    }
    for i in 0..cols / LANES {
        let w = [
            load(&w[0][i]),
            load(&w[1][i]),
            load(&w[2][i]),
            load(&w[3][i]),
        ];
        for m in 0..M {
            let x = load(&x[m][i]);
            for r in 0..TILE_OUTPUTS {
                held[m][r] = _mm512_fmadd_ps(w[r], x, held[m][r]);
            }
        }
    }
    for m in 0..M {
        for r in 0..TILE_OUTPUTS {
            store(held[m][r], &mut sums[m][r]);
        }
    }
}

/// The sums of `a`'s and `b`'s lanes 8 apart, side by side.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves(a: __m512, b: __m512) -> __m512 {
    let (low, high) = (
        _mm512_shuffle_f32x4::<0x44>(a, b),
        _mm512_shuffle_f32x4::<0xee>(a, b),
    );
    _mm512_add_ps(low, high)
}

#[target_feature(enable = "avx512f")]
fn add_up(sums: &[f32], out: &mut [f32; TILE_OUTPUTS]) {
    let sums: &[[f32; LANES]; TILE_OUTPUTS] = sums.as_chunks().0.first_chunk().expect("sums");
    let [a, b, c, d] = [
        load(&sums[0]),
        load(&sums[1]),
        load(&sums[2]),
        load(&sums[3]),
    ];
    // As `reduce_add` does for one: lanes 8 apart, 4 apart, 2 apart, neighbours; here for four.
    let (ab, cd) = (halves(a, b), halves(c, d));
    let (even, odd) = (
        _mm512_shuffle_f32x4::<0x88>(ab, cd),
        _mm512_shuffle_f32x4::<0xdd>(ab, cd),
    );
    let quarters = _mm512_add_ps(even, odd);
    let pairs = _mm512_add_ps(quarters, _mm512_shuffle_ps::<0x0e>(quarters, quarters));
    let totals = _mm512_add_ps(pairs, _mm512_shuffle_ps::<0x01>(pairs, pairs));
    let mut all = [0.0; LANES];
    store(totals, &mut all);
    *out = [all[0], all[4], all[8], all[12]];
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load(x: &[f32; LANES]) -> __m512 {
    // SAFETY: the array is exactly the 64 bytes read.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_bytes(x: &[u8; 64]) -> __m512i {
    // SAFETY: the array is exactly the 64 bytes read.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

/// 16 little-endian f32 of any alignment.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_floats(x: &[u8; 64]) -> __m512 {
    _mm512_castsi512_ps(load_bytes(x))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(x: __m512, to: &mut [f32; LANES]) {
    // SAFETY: the array is exactly the 64 bytes written.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

/// Vectors one after another into a chunk.
#[target_feature(enable = "avx512f")]
#[inline]
fn store_all<const V: usize, const C: usize>(x: &[__m512; V], to: &mut [f32; C]) {
    let to = to.as_chunks_mut().0;
    for v in 0..V {
        store(x[v], &mut to[v]);
    }
}
