//! Bending the model's distribution before a token is drawn from it: bias, penalties, cuts, and a
//! grammar that says what may come at all.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::kernel::math;
use crate::terms::TokenId;

/// Says what may come next.
pub trait Constraint {
    /// Sets the logits of tokens that must not come next to negative infinity.
    fn mask(&mut self, logits: &mut [f32]);

    /// Hears which token came, the end's own token included.
    fn chose(&mut self, id: TokenId);
}

/// Makes a fresh [`Constraint`] for each generation.
#[derive(Clone)]
pub struct ConstraintSource(Arc<dyn Fn() -> Box<dyn Constraint> + Send + Sync>);

impl ConstraintSource {
    /// From a function that makes one.
    pub fn new(make: impl Fn() -> Box<dyn Constraint> + Send + Sync + 'static) -> ConstraintSource {
        ConstraintSource(Arc::new(make))
    }

    /// A constraint that has heard nothing yet.
    pub fn make(&self) -> Box<dyn Constraint> {
        (self.0)()
    }
}

impl fmt::Debug for ConstraintSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConstraintSource")
    }
}

/// How the distribution is bent; the default leaves it as it is, bit for bit.
#[derive(Clone, Debug, Default)]
pub struct Shaping {
    /// Draws from the so many likeliest tokens alone; 0 is all.
    pub top_k: usize,
    /// Draws from the tokens that are at least so likely relative to the likeliest, at the
    /// temperature drawn with; 0 is all.
    pub min_p: f32,
    /// Taken off the logit of a token that has been generated.
    pub presence_penalty: f32,
    /// Taken off the logit of a token as often as it has been generated.
    pub frequency_penalty: f32,
    /// Added to tokens' logits; ids beyond the vocabulary are ignored.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// What may come at all.
    pub constraint: Option<ConstraintSource>,
}

/// A generation's own state of shaping.
pub(super) struct Shaper<'a> {
    shaping: &'a Shaping,
    constraint: Option<Box<dyn Constraint>>,
}

impl<'a> Shaper<'a> {
    pub(super) fn new(shaping: &'a Shaping) -> Shaper<'a> {
        Shaper {
            shaping,
            constraint: shaping.constraint.as_ref().map(ConstraintSource::make),
        }
    }

    /// The distribution to draw from at `temperature`, after `generated`.
    ///
    /// Bias and penalties come first, so that cuts are made in the distribution that is drawn from;
    /// the grammar before the cuts, so that they never cut off all that it leaves.
    pub(super) fn shape<'l>(
        &mut self,
        logits: &'l [f32],
        generated: &[TokenId],
        temperature: f32,
    ) -> Cow<'l, [f32]> {
        let how = self.shaping;
        let mut shaped = Cow::Borrowed(logits);
        for &(id, bias) in &how.logit_bias {
            add(&mut shaped, id, bias);
        }
        if how.presence_penalty != 0.0 || how.frequency_penalty != 0.0 {
            for (id, count) in counts(generated) {
                #[expect(clippy::cast_precision_loss, reason = "counts are small")]
                let often = how.frequency_penalty * count as f32;
                add(&mut shaped, id, -(how.presence_penalty + often));
            }
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.mask(shaped.to_mut());
        }
        if how.top_k > 0 && how.top_k < shaped.len() {
            keep_top(shaped.to_mut(), how.top_k);
        }
        if how.min_p > 0.0 && temperature > 0.0 {
            let top = shaped.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for logit in shaped.to_mut() {
                if math::exp((*logit - top) / temperature) < how.min_p {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        shaped
    }

    /// Hears which token was drawn.
    pub(super) fn chose(&mut self, id: TokenId) {
        if let Some(constraint) = &mut self.constraint {
            constraint.chose(id);
        }
    }
}

fn add(logits: &mut Cow<'_, [f32]>, id: TokenId, what: f32) {
    if what != 0.0
        && let Some(logit) = logits.to_mut().get_mut(id as usize)
    {
        *logit += what;
    }
}

/// How often each token was generated, in order of id.
fn counts(generated: &[TokenId]) -> Vec<(TokenId, usize)> {
    let mut sorted = generated.to_vec();
    sorted.sort_unstable();
    let same = sorted.chunk_by(|a, b| a == b);
    same.map(|run| (run[0], run.len())).collect()
}

/// Leaves the `k` largest, the lower ids of equals.
fn keep_top(logits: &mut [f32], k: usize) {
    let mut ranked: Vec<usize> = (0..logits.len()).collect();
    let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    ranked.select_nth_unstable_by(k - 1, order);
    for &id in &ranked[k..] {
        logits[id] = f32::NEG_INFINITY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(shaping: &Shaping, logits: &[f32], generated: &[TokenId], t: f32) -> Vec<f32> {
        Shaper::new(shaping)
            .shape(logits, generated, t)
            .into_owned()
    }

    const LOGITS: [f32; 4] = [1.0, 3.0, 3.0, 0.5];
    const NOT: f32 = f32::NEG_INFINITY;

    #[test]
    fn the_default_leaves_the_very_same_numbers() {
        let shaping = Shaping::default();
        let mut shaper = Shaper::new(&shaping);
        assert!(matches!(
            shaper.shape(&LOGITS, &[1, 1], 1.0),
            Cow::Borrowed(_)
        ));
    }

    #[test]
    fn penalties_grow_as_openai_says_and_bias_is_added() {
        let shaping = Shaping {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(3, 2.0), (99, 5.0)],
            ..Shaping::default()
        };
        let shaped = shape(&shaping, &LOGITS, &[1, 0, 1, 1], 1.0);
        assert_eq!(shaped, [1.0 - 0.75, 3.0 - 0.5 - 0.75, 3.0, 2.5]);
    }

    #[test]
    fn top_k_keeps_so_many_and_the_lower_of_equals() {
        let top = |top_k| {
            let shaping = Shaping {
                top_k,
                ..Shaping::default()
            };
            shape(&shaping, &LOGITS, &[], 1.0)
        };
        assert_eq!(top(1), [NOT, 3.0, NOT, NOT]);
        assert_eq!(top(3), [1.0, 3.0, 3.0, NOT]);
        assert_eq!(top(9), LOGITS);
    }

    #[test]
    fn min_p_is_relative_to_the_likeliest_at_the_temperature() {
        let shaping = Shaping {
            min_p: 0.2,
            ..Shaping::default()
        };
        // e^-2 = 0.135 is below 0.2; at temperature 2, e^-1 = 0.37 and e^-1.25 = 0.29 are not.
        assert_eq!(shape(&shaping, &LOGITS, &[], 1.0), [NOT, 3.0, 3.0, NOT]);
        assert_eq!(shape(&shaping, &LOGITS, &[], 2.0), LOGITS);
    }

    #[test]
    fn a_constraint_rules_before_the_cuts() {
        struct Only(TokenId);
        impl Constraint for Only {
            fn mask(&mut self, logits: &mut [f32]) {
                for (id, logit) in (0..).zip(logits) {
                    if id != self.0 {
                        *logit = NOT;
                    }
                }
            }
            fn chose(&mut self, id: TokenId) {
                self.0 = id;
            }
        }
        let shaping = Shaping {
            top_k: 1,
            min_p: 0.9,
            constraint: Some(ConstraintSource::new(|| Box::new(Only(3)))),
            ..Shaping::default()
        };
        let mut shaper = Shaper::new(&shaping);
        assert_eq!(*shaper.shape(&LOGITS, &[], 1.0), [NOT, NOT, NOT, 0.5]);
        shaper.chose(0);
        assert_eq!(*shaper.shape(&LOGITS, &[], 1.0), [1.0, NOT, NOT, NOT]);
    }
}
