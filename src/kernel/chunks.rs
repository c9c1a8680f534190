//! Rows of bytes and values cut into what a vector takes; shared by the twins.

/// `0, 1, 2, …`
pub(super) const fn in_order<const N: usize>() -> [u8; N] {
    let mut order = [0; N];
    let mut p = 0;
    while p < N {
        order[p] = p as u8;
        p += 1;
    }
    order
}

// The helpers below stand outside `#[target_feature]` functions on purpose: a closure inside one
// carries its features, and so is not inlined into a library function such as `array::from_fn`.

/// Rows `i .. i + R` of a matrix of bytes.
#[inline(always)]
pub(super) fn rows_of<const R: usize>(bytes: &[u8], i: usize, len: usize) -> [&[u8]; R] {
    std::array::from_fn(|r| &bytes[(i + r) * len..(i + r + 1) * len])
}

/// The whole chunks of rows of one length.
#[inline(always)]
pub(super) fn chunks_of<T, const C: usize, const R: usize>(rows: [&[T]; R]) -> [&[[T; C]]; R] {
    let count = rows[0].len() / C;
    rows.map(|row| &row.as_chunks().0[..count])
}

/// A chunk as it is, or its beginning and zeros: zero weights add nothing.
#[inline(always)]
pub(super) fn whole<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes
        .first_chunk()
        .copied()
        .unwrap_or_else(|| padded(bytes))
}

/// The beginning of a chunk, zeros behind it.
#[cold]
pub(super) fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut chunk = [0; N];
    chunk[..bytes.len()].copy_from_slice(bytes);
    chunk
}

/// `R` rows of `cols` values, as vectors of `L`.
#[inline(always)]
pub(super) fn split<const L: usize, const R: usize>(x: &[f32], cols: usize) -> [&[[f32; L]]; R] {
    std::array::from_fn(|r| &x[r * cols..(r + 1) * cols].as_chunks().0[..cols / L])
}
