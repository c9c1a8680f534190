//! From logits to a token.
//!
//! The draw at a position depends on the seed and the position alone, never on how many draws came
//! before: a generation that is resumed, or whose prompt is replayed, meets the same luck.

use crate::kernel::math;
use crate::terms::TokenId;

/// How a token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token; 1 samples the model's own distribution.
    pub temperature: f32,
    /// Samples from the smallest set of likeliest tokens whose probabilities reach this sum; 1 is all.
    pub top_p: f32,
    /// Names the sequence of draws.
    pub seed: u64,
}

/// Chooses the token that follows position `position - 1`.
///
/// `logits` has shape `[vocab]`. Greedy ties go to the lower id. With a temperature the
/// probabilities are `softmax(logits / temperature)`, computed with the engine's own exponential so
/// that every system draws the same token, and summed in f64 in order of id.
///
/// # Panics
///
/// If `logits` is empty.
pub fn sample(logits: &[f32], sampling: &Sampling, position: usize) -> TokenId {
    let best = argmax(logits);
    if sampling.temperature <= 0.0 {
        return id(best);
    }
    let top = logits[best];
    let weight = |logit: f32| f64::from(math::exp((logit - top) / sampling.temperature));
    let draw = uniform(sampling.seed, position as u64);
    if sampling.top_p >= 1.0 {
        let total: f64 = logits.iter().map(|&l| weight(l)).sum();
        return id(
            walk(logits.iter().map(|&l| weight(l)).enumerate(), draw * total).unwrap_or(best),
        );
    }
    let mut ranked: Vec<(usize, f64)> = logits.iter().map(|&l| weight(l)).enumerate().collect();
    let total: f64 = ranked.iter().map(|r| r.1).sum();
    let (kept, count) = nucleus(&mut ranked, f64::from(sampling.top_p) * total);
    ranked.truncate(count);
    id(walk(ranked.into_iter(), draw * kept).unwrap_or(best))
}

/// Brings the likeliest to the front, in order, until their weights reach `wanted`; their sum and number.
///
/// Mostly some hundreds of a hundred thousand are enough, and sorting all of them takes longer than a small model's
/// pass. So ever larger parts are set apart first, each of which is then sorted.
pub(super) fn nucleus(ranked: &mut [(usize, f64)], wanted: f64) -> (f64, usize) {
    let order = |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let (mut kept, mut count) = (0.0, 0);
    let mut part = 256;
    while count < ranked.len() {
        let rest = &mut ranked[count..];
        let here = part.min(rest.len());
        if here < rest.len() {
            rest.select_nth_unstable_by(here, order);
        }
        rest[..here].sort_unstable_by(order);
        for (_, weight) in &rest[..here] {
            kept += weight;
            count += 1;
            if kept >= wanted {
                return (kept, count);
            }
        }
        part *= 8;
    }
    (kept, count)
}

/// The index of the largest logit, the lowest of equals; NaN never wins.
fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = i;
        }
    }
    best
}

/// The first index at which the running sum of weights passes `target`.
fn walk(weights: impl Iterator<Item = (usize, f64)>, target: f64) -> Option<usize> {
    let mut sum = 0.0;
    let mut last = None;
    for (index, weight) in weights {
        sum += weight;
        if weight > 0.0 {
            last = Some(index);
        }
        if sum > target {
            return Some(index);
        }
    }
    last // rounding may leave the target a hair above the sum
}

/// A number in `[0, 1)` from seed and position alone.
///
/// Two rounds of the SplitMix64 finaliser over a counter: a counter-based generator, since a
/// stateful one would tie the draw to the history of the process.
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let key = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
    let bits = mix(key
        ^ mix(position
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(0x1234_5678_9abc_def1)));
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    let fraction = (bits >> 11) as f64;
    fraction / 9_007_199_254_740_992.0
}

fn id(index: usize) -> TokenId {
    TokenId::try_from(index).unwrap_or(TokenId::MAX)
}
