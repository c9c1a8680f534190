//! Sums in one fixed order that every instruction set can follow.
//!
//! Element `i` goes to partial sum `i % 16`; the sixteen are then added pairwise. Written so, a
//! compiler may use vectors of 4, 8 or 16 and the bits stay the same. (A plain running sum would
//! forbid vectors; letting the vector width choose would make results depend on it.)

/// Partial sums.
pub(super) const WIDTH: usize = 16;

/// Adds sixteen partial sums pairwise: 8 apart, 4 apart, 2 apart, neighbours.
#[inline(always)]
pub(super) fn add_up(mut s: [f32; WIDTH]) -> f32 {
    for step in [8, 4, 2, 1] {
        for i in 0..step {
            s[i] += s[i + step];
        }
    }
    s[0]
}

/// Σ a·b.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut s = [0.0; WIDTH];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<WIDTH>(), b.as_chunks::<WIDTH>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..WIDTH {
            s[i] += a[i] * b[i];
        }
    }
    for (s, (a, b)) in s.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *s += a * b;
    }
    add_up(s)
}

/// Σ x².
#[inline(always)]
pub(super) fn sum_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

/// y += a · x.
#[inline(always)]
pub(super) fn add_scaled(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}
