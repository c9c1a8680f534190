//! The short causal convolution before KDA.

use super::math::silu;
use super::pool::Kernel;

/// Channels one task takes, so that a single token can be shared between threads.
const CHANNELS: usize = 1024;

/// Depthwise causal convolution and SiLU over the next `t` tokens of ONE sequence.
///
/// ```text
/// y[t, c] = silu( Σ_i weight[c, i] · u[t - (taps - 1) + i, c] )      last tap: the current input
/// ```
///
/// | name | shape | holds |
/// |---|---|---|
/// | `x` | `[t, c]` | raw projections |
/// | `weight` | `[c, taps]` | |
/// | `history` | `[c, taps - 1]` | the raw inputs before `x`, oldest first; updated |
/// | `y` | `[t, c]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn short_conv(k: &Kernel, x: &[f32], weight: &[f32], history: &mut [f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "values in against values out");
    assert!(
        weight.len() > history.len(),
        "a history has one tap less than the weight"
    );
    let channels = weight.len() - history.len();
    assert!(
        weight.len().is_multiple_of(channels) && x.len().is_multiple_of(channels),
        "{} weights, {} past values and {} inputs do not share a number of channels",
        weight.len(),
        history.len(),
        x.len(),
    );
    let taps = weight.len() / channels;
    let past = taps - 1;
    let tasks: Vec<_> = y
        .chunks_mut(channels)
        .enumerate()
        .flat_map(|(t, y)| {
            y.chunks_mut(CHANNELS)
                .enumerate()
                .map(move |(part, y)| (t, part, y))
        })
        .collect();
    let before = &*history;
    k.tasks((taps + 16) * x.len(), tasks, |(t, part, y)| {
        let first = part * CHANNELS;
        y.fill(0.0);
        for i in 0..taps {
            // Position t - past + i, counted from the first row of `x`.
            match (t + i).checked_sub(past) {
                Some(t) => {
                    let u = &x[t * channels + first..];
                    for (c, (y, u)) in (first..).zip(y.iter_mut().zip(u)) {
                        *y += weight[c * taps + i] * u;
                    }
                }
                None => {
                    for (c, y) in (first..).zip(y.iter_mut()) {
                        *y += weight[c * taps + i] * before[c * past + t + i];
                    }
                }
            }
        }
        k.isa().run(silu_piece, y);
    });
    let t = x.len() / channels;
    for (c, history) in history.chunks_mut(past.max(1)).enumerate().take(channels) {
        history.rotate_left(t.min(past));
        for back in 0..t.min(past) {
            history[past - 1 - back] = x[(t - 1 - back) * channels + c];
        }
    }
}

#[inline(always)]
fn silu_piece(y: &mut [f32]) {
    for y in y {
        *y = silu(*y);
    }
}
