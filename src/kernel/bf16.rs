//! bfloat16: the upper half of an f32, so widening is exact and a shift.

/// The f32 of one little-endian bfloat16, inside products: a shift, where [`half`] would also look
/// whether it is a NaN to be made quiet.
#[inline(always)]
pub(super) fn widen_one(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Widens little-endian bfloat16 values, `[n]` from `[2n]` bytes: norm gains, projections of one
/// row. Large matrices are never widened as a whole; see [`Matrix`](super::Matrix).
///
/// # Panics
///
/// If `bytes` holds half a value.
#[track_caller]
pub fn widen(bytes: &[u8]) -> Vec<f32> {
    let (values, rest) = bytes.as_chunks::<2>();
    assert!(rest.is_empty(), "{} bytes are not bfloat16", bytes.len());
    values
        .iter()
        .map(|&v| half::bf16::from_le_bytes(v).to_f32())
        .collect()
}

/// Reads little-endian f32 values, `[n]` from `[4n]` bytes of any alignment.
///
/// # Panics
///
/// If `bytes` holds part of a value.
#[track_caller]
pub fn read_f32(bytes: &[u8]) -> Vec<f32> {
    let (values, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty(), "{} bytes are not f32", bytes.len());
    values.iter().map(|&v| f32::from_le_bytes(v)).collect()
}
