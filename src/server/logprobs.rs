//! How likely a token was, and what else might have come.

use std::sync::Arc;

use super::generator::Generator;
use crate::terms::TokenId;

/// A token with its log probability and its likeliest rivals.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scored {
    pub(super) id: TokenId,
    pub(super) logprob: f64,
    /// Best first, ties to the lower id; the token itself among them where it belongs.
    pub(super) top: Vec<(TokenId, f64)>,
}

/// The log of `softmax(logits)` at `id` and at the `top` largest. Of the model's own distribution:
/// temperature, penalties and bias do not enter, as they do not in OpenAI's.
pub(super) fn score(id: TokenId, logits: &[f32], top: usize) -> Scored {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    let log = |logit: f32| f64::from(logit - max) - sum.ln();
    let mut best: Vec<(TokenId, f32)> = Vec::with_capacity(top + 1);
    for (n, &logit) in (0..).zip(logits) {
        if best.len() == top && best.last().is_none_or(|last| logit <= last.1) {
            continue;
        }
        let at = best.partition_point(|b| b.1 >= logit);
        best.insert(at, (n, logit));
        best.truncate(top);
    }
    Scored {
        id,
        logprob: logits
            .get(id as usize)
            .map_or(f64::NEG_INFINITY, |&logit| log(logit)),
        top: best
            .into_iter()
            .map(|(id, logit)| (id, log(logit)))
            .collect(),
    }
}

/// Finds the scored tokens that make up the answer, which is all that is reported.
///
/// Text comes later than its tokens, as characters become whole; what is neither markup, nor thought,
/// nor a tool's argument by the time answer comes, is the answer's.
pub(super) struct Gatherer {
    generator: Arc<dyn Generator>,
    /// Special tokens are structure, not text.
    chat: bool,
    in_tag: bool,
    held: Vec<Scored>,
}

impl Gatherer {
    pub(super) fn new(generator: Arc<dyn Generator>, chat: bool) -> Gatherer {
        Gatherer {
            generator,
            chat,
            in_tag: false,
            held: Vec::new(),
        }
    }

    /// A token was generated.
    pub(super) fn token(&mut self, scored: Scored) {
        if self.chat && self.generator.special(scored.id) {
            self.in_tag = self.generator.bytes(scored.id) != b"<|sep|>";
        } else if !self.in_tag {
            self.held.push(scored);
        }
    }

    /// The tokens so far went elsewhere than into the answer.
    pub(super) fn elsewhere(&mut self) {
        self.held.clear();
    }

    /// The tokens so far went into the answer: gives them.
    pub(super) fn answer(&mut self) -> Vec<Scored> {
        std::mem::take(&mut self.held)
    }

    /// A token as text; what is no whole character shows as U+FFFD, its bytes stand beside it.
    pub(super) fn text(&self, id: TokenId) -> (String, Vec<u8>) {
        let bytes = self.generator.bytes(id);
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    }
}
