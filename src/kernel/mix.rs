//! Attention residual: which earlier block a sub-layer reads.

use super::lanes::{add_scaled, dot, sum_squares};
use super::math::softmax;
use super::pool::Kernel;

/// Mixes `n` rows of candidates, each row on its own:
///
/// ```text
/// s_j = Σ c_j · score / sqrt(mean(c_j²) + eps)      p = softmax(s)      out = Σ_j p_j · c_j
/// ```
///
/// | name | shape | holds |
/// |---|---|---|
/// | `candidates` | `N + 1` of `[n, d]` | the blocks in push order, then the running sum |
/// | `score` | `[d]` | norm gain times projection |
/// | `out` | `[n, d]` | overwritten: the mix of the RAW candidates, not of the normalised ones |
/// | `probs` | `[n, N + 1]` | overwritten, resized |
///
/// # Panics
///
/// If there is no candidate, or the lengths disagree.
#[track_caller]
pub fn res_mix(
    k: &Kernel,
    candidates: &[&[f32]],
    score: &[f32],
    eps: f32,
    out: &mut [f32],
    probs: &mut Vec<f32>,
) {
    let (d, count) = (score.len(), candidates.len());
    assert!(count > 0, "nothing to mix");
    assert!(
        d > 0 && out.len().is_multiple_of(d),
        "{} values are not rows of {d}",
        out.len()
    );
    assert!(
        candidates.iter().all(|c| c.len() == out.len()),
        "candidates of different lengths"
    );
    probs.clear();
    probs.resize(out.len() / d * count, 0.0);
    let work = 4 * count * out.len();
    let rows = out
        .chunks_mut(d)
        .zip(probs.chunks_mut(count))
        .enumerate()
        .collect();
    k.tasks(work, rows, |(row, (out, probs))| {
        k.isa()
            .run(mix_row, (candidates, row * d, score, eps, out, probs));
    });
}

/// One row; `at` is where it begins in each candidate.
#[inline(always)]
fn mix_row((candidates, at, score, eps, out, probs): MixRow<'_>) {
    let d = score.len();
    for (p, c) in probs.iter_mut().zip(candidates) {
        let c = &c[at..at + d];
        *p = dot(c, score) / (sum_squares(c) / d as f32 + eps).sqrt();
    }
    softmax(probs);
    out.fill(0.0);
    for (&p, c) in probs.iter().zip(candidates) {
        add_scaled(p, &c[at..at + d], out);
    }
}

type MixRow<'a> = (
    &'a [&'a [f32]],
    usize,
    &'a [f32],
    f32,
    &'a mut [f32],
    &'a mut [f32],
);
