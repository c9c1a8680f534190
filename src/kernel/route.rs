//! The router: which experts a row goes to, and with which weight.

use super::math::{sigmoid, softmax};

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Each expert on its own (K3, Kimi-Linear).
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// The router's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// How logits become scores.
    pub score: Score,
    /// Whether the chosen scores are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights, after that.
    pub scale: f32,
    /// Groups the experts stand in, one after another; 1 for none.
    pub groups: usize,
    /// Groups that may be chosen from.
    pub topk_groups: usize,
}

/// Chooses `k` experts for one row.
///
/// The choice is by score plus bias; the weight is the score alone. Groups beyond the best
/// `topk_groups` (by the sum of their two best choices) are out.
///
/// | name | shape | holds |
/// |---|---|---|
/// | `logits`, `bias` | `[experts]` | |
/// | `ids`, `weights` | `[k]` | overwritten: best choice first, ties to the lower index |
///
/// # Panics
///
/// If the lengths disagree, `k` exceeds what may be chosen from, or groups do not divide experts.
#[track_caller]
pub fn top_k(
    logits: &[f32],
    bias: &[f32],
    k: usize,
    spec: RouterSpec,
    ids: &mut [u16],
    weights: &mut [f32],
) {
    let experts = logits.len();
    assert_eq!(bias.len(), experts, "biases against experts");
    assert_eq!(
        (ids.len(), weights.len()),
        (k, k),
        "ids and weights against k"
    );
    assert!(
        experts <= usize::from(u16::MAX) + 1,
        "{experts} experts do not fit an id"
    );
    let mut scores = logits.to_vec();
    match spec.score {
        Score::Sigmoid => scores.iter_mut().for_each(|s| *s = sigmoid(*s)),
        Score::Softmax => softmax(&mut scores),
    }
    let mut choice: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    let open = if spec.groups > 1 && spec.topk_groups < spec.groups {
        close_groups(&mut choice, spec)
    } else {
        experts
    };
    assert!(k <= open, "{k} of {open} experts");
    choose(&choice, ids);
    for (w, &id) in weights.iter_mut().zip(&*ids) {
        *w = scores[usize::from(id)];
    }
    if spec.renormalize && k > 1 {
        let sum: f32 = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= spec.scale);
}

/// Sets the choices of the groups that lose to -infinity; returns how many experts are left.
fn close_groups(choice: &mut [f32], spec: RouterSpec) -> usize {
    assert!(
        choice.len().is_multiple_of(spec.groups),
        "{} groups",
        spec.groups
    );
    let size = choice.len() / spec.groups;
    let best: Vec<f32> = choice
        .chunks(size)
        .map(|group| {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for &c in group {
                if c > first {
                    (first, second) = (c, first);
                } else if c > second {
                    second = c;
                }
            }
            if size > 1 { first + second } else { first }
        })
        .collect();
    let mut kept = vec![0; spec.topk_groups];
    choose(&best, &mut kept);
    for (g, group) in choice.chunks_mut(size).enumerate() {
        if !kept.iter().any(|&k| usize::from(k) == g) {
            group.fill(f32::NEG_INFINITY);
        }
    }
    size * spec.topk_groups
}

/// The indices of the largest values, largest first, ties to the lower index. NaN ranks below all
/// numbers, so that a poisoned row still yields distinct experts.
fn choose(values: &[f32], ids: &mut [u16]) {
    let rank = |i: u16| {
        let v = values[usize::from(i)];
        // -0 and 0 are a tie.
        if v.is_nan() {
            f32::NEG_INFINITY
        } else {
            v + 0.0
        }
    };
    let better = |a: &u16, b: &u16| {
        rank(*b)
            .total_cmp(&rank(*a))
            .then_with(|| {
                values[usize::from(*a)]
                    .is_nan()
                    .cmp(&values[usize::from(*b)].is_nan())
            })
            .then(a.cmp(b))
    };
    let mut order: Vec<u16> = (0..values.len()).map(|i| i as u16).collect();
    if ids.len() < order.len() && !ids.is_empty() {
        order.select_nth_unstable_by(ids.len() - 1, better);
        order.truncate(ids.len());
    }
    order.sort_unstable_by(better);
    ids.copy_from_slice(&order[..ids.len()]);
}
