//! MXFP4, block by block (OCP Microscaling Formats v1.0).
//!
//! A block is 32 weights that share one power-of-two scale. Weight `2i` is the low nibble of byte
//! `i`, weight `2i + 1` the high nibble. A nibble is E2M1: sign, two bits of exponent, one of
//! mantissa; eight magnitudes in all.

/// Weights per scale.
pub const BLOCK: usize = 32;
/// Bytes that hold the nibbles of one block.
pub const BLOCK_BYTES: usize = BLOCK / 2;

/// The value of each E2M1 code.
pub(super) const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The 16 weights of a block with one scale, as bfloat16 split into bytes: what a byte shuffle can
/// look up.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[repr(align(32))]
pub(super) struct Bf16Table {
    pub(super) lower: [u8; 16],
    pub(super) upper: [u8; 16],
}

/// One table for each scale byte. Exact up to 252: even 0.5 · 2^-127 is a bfloat16.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) static BF16_TABLES: [Bf16Table; 256] = {
    let mut tables = [const {
        Bf16Table {
            lower: [0; 16],
            upper: [0; 16],
        }
    }; 256];
    let mut b = 0;
    while b < 256 {
        let mut code = 0;
        while code < 16 {
            let bits = (VALUES[code] * scale(b as u8)).to_bits() >> 16;
            tables[b].lower[code] = bits as u8;
            tables[b].upper[code] = (bits >> 8) as u8;
            code += 1;
        }
        b += 1;
    }
    tables
};

/// Scale bytes from here on do not decode into f32: 4 · 2^126 overflows, and 255 is NaN.
pub(super) const SCALE_WIDE: u8 = 253;

/// `2^(b - 127)`; NaN for 255, as the standard has it.
///
/// Exact: 0 gives 2^-127, which f32 holds as a subnormal.
#[inline]
pub(super) const fn scale(b: u8) -> f32 {
    match b {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 22),
        _ => f32::from_bits((b as u32) << 23),
    }
}

/// Decodes rows of MXFP4: `codes` `[rows, cols / 2]` and `scales` `[rows, cols / 32]` into `out`
/// `[rows, cols]`.
///
/// Every product is exact in f32 for scale bytes up to 252; above, large codes become infinite
/// here although a matrix product over them stays finite. (The product does not use this function.)
///
/// # Panics
///
/// If the lengths disagree or `cols` is not a multiple of 32.
pub fn decode(codes: &[u8], scales: &[u8], cols: usize, out: &mut [f32]) {
    assert!(
        cols.is_multiple_of(BLOCK),
        "{cols} columns are not whole blocks"
    );
    assert_eq!(codes.len() * 2, out.len(), "codes against values");
    assert_eq!(scales.len() * BLOCK, out.len(), "scales against values");
    let (codes, _) = codes.as_chunks::<BLOCK_BYTES>();
    let (out, _) = out.as_chunks_mut::<BLOCK>();
    for ((codes, &b), out) in codes.iter().zip(scales).zip(out) {
        decode_block(codes, scale(b), out);
    }
}

/// One block: `out[2i]` from the low nibble of byte `i`, `out[2i + 1]` from the high one.
#[inline]
pub(super) fn decode_block(codes: &[u8; BLOCK_BYTES], scale: f32, out: &mut [f32; BLOCK]) {
    for (&byte, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
        out[0] = VALUES[usize::from(byte & 0xf)] * scale;
        out[1] = VALUES[usize::from(byte >> 4)] * scale;
    }
}
