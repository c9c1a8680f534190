//! Norms over the last axis.

use super::lanes::sum_squares;
use super::pool::Kernel;

/// RMS norm of `n` rows: `y = gain · x / sqrt(mean(x²) + eps)`.
///
/// | name | shape | holds |
/// |---|---|---|
/// | `x` | `[n, d]` | |
/// | `gain` | `[d]` | as stored: not `1 + gain` |
/// | `y` | `[n, d]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn rms_norm(k: &Kernel, x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "values in against values out");
    y.copy_from_slice(x);
    rms_norm_in_place(k, y, gain, eps);
}

/// [`rms_norm`] over its own input, `x` `[n, d]`.
///
/// # Panics
///
/// If `x` is not whole rows of `gain.len()`.
#[track_caller]
pub fn rms_norm_in_place(k: &Kernel, x: &mut [f32], gain: &[f32], eps: f32) {
    let d = gain.len();
    assert!(
        d > 0 && x.len().is_multiple_of(d),
        "{} values are not rows of {d}",
        x.len()
    );
    k.chunks(2 * x.len(), x, d, |_, x| {
        k.isa().run(rms_row, (x, gain, eps))
    });
}

#[inline(always)]
fn rms_row((x, gain, eps): (&mut [f32], &[f32], f32)) {
    let factor = 1.0 / (sum_squares(x) / x.len() as f32 + eps).sqrt();
    for (x, g) in x.iter_mut().zip(gain) {
        *x = g * (*x * factor);
    }
}

/// `x = scale · x / sqrt(Σ x² + eps)` over one vector `[d]`.
///
/// The sum, not the mean, and `eps` inside the root: an RMS norm with the same `eps` is off by 1e-4
/// for a key near zero.
#[inline(always)]
pub fn l2_norm(x: &mut [f32], eps: f32, scale: f32) {
    let factor = scale / (sum_squares(x) + eps).sqrt();
    for x in x {
        *x *= factor;
    }
}

/// [`l2_norm`] of every `d` values of `x` `[n, d]`: KDA's queries and keys, head by head.
///
/// # Panics
///
/// If `x` is not whole rows of `d`.
#[track_caller]
pub fn l2_norm_rows(k: &Kernel, x: &mut [f32], d: usize, eps: f32, scale: f32) {
    assert!(
        d > 0 && x.len().is_multiple_of(d),
        "{} values are not rows of {d}",
        x.len()
    );
    // A head is short; many go into one task.
    let group = d * (4096 / d).max(1);
    k.chunks(2 * x.len(), x, group, |_, x| {
        k.isa().run(l2_rows, (x, d, eps, scale))
    });
}

#[inline(always)]
fn l2_rows((x, d, eps, scale): (&mut [f32], usize, f32, f32)) {
    for x in x.chunks_mut(d) {
        l2_norm(x, eps, scale);
    }
}
