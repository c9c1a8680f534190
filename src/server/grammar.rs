//! What a reply may look like, as a grammar over tokens, so that tools that must be called are called
//! and JSON that must fit a schema fits it: by force, not by hope.
//!
//! The grammar speaks K3's own markup. Only special tokens are structure, in the grammar as in the
//! parser, so no text that the model writes can open or close an element.

mod arguments;
mod lark;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use llguidance::Matcher;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::toktrie::TokEnv;
use llguidance::toktrie::TokRxInfo;
use llguidance::toktrie::TokTrie;
use serde_json::Value;

use super::generator::Generator;
use crate::engine::Constraint;
use crate::engine::ConstraintSource;
use crate::terms::TokenId;
use crate::text::Conversation;

/// The special tokens of K3's markup.
#[derive(Clone, Copy, Debug)]
struct Marks {
    open: TokenId,
    close: TokenId,
    sep: TokenId,
    end: TokenId,
}

/// A grammar that cannot be compiled: the schema holds what no grammar can say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct NoGrammar(pub(super) String);

/// How many tools one reply may call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    /// None at all.
    None,
    /// As many as it likes, up to so many.
    AtMost(usize),
    /// At least one, up to so many.
    Some(usize),
}

/// What is demanded of a reply.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Demand {
    pub(super) calls: Calls,
    /// The one tool to be called; `None` for any.
    pub(super) tool: Option<String>,
    /// The answer is JSON of this schema; `None` for any text.
    pub(super) schema: Option<Value>,
}

/// The vocabulary, ready for grammars. Made once: it holds every token's bytes.
pub(super) struct Grammars {
    factory: ParserFactory,
    marks: Marks,
}

impl Grammars {
    /// `None` where the vocabulary has no K3 markup.
    pub(super) fn new(generator: &dyn Generator) -> Option<Grammars> {
        let ids = 0..TokenId::try_from(generator.vocab()).ok()?;
        let words: Vec<Vec<u8>> = ids
            .map(|id| {
                let bytes = generator.bytes(id);
                if generator.special(id) {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
                } else {
                    bytes
                }
            })
            .collect();
        let find = |name: &str| {
            let is = |word: &&[u8]| word.split_first() == Some((&0xff, name.as_bytes()));
            let at = words.iter().position(|word| is(&word.as_slice()))?;
            TokenId::try_from(at).ok()
        };
        let marks = Marks {
            open: find("<|open|>")?,
            close: find("<|close|>")?,
            sep: find("<|sep|>")?,
            end: find("<|end_of_msg|>")?,
        };
        let size = u32::try_from(words.len()).ok()?;
        let trie = TokTrie::from(&TokRxInfo::new(size, marks.end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).ok()?;
        // Its warnings would go to this process's standard error.
        factory.quiet();
        Some(Grammars { factory, marks })
    }

    /// What holds a reply to `demand`.
    ///
    /// # Errors
    ///
    /// Where the schema of the answer or of a tool cannot be made into a grammar.
    pub(super) fn constraint(
        &self,
        chat: &Conversation,
        demand: &Demand,
    ) -> Result<ConstraintSource, NoGrammar> {
        let text = lark::reply(self.marks, chat, demand)?;
        let grammar = TopLevelGrammar::from_lark(text);
        let parser = self.factory.create_parser(grammar);
        let parser = parser.map_err(|error| NoGrammar(error.to_string()))?;
        let first = Mutex::new(Matcher::new(Ok(parser)));
        Ok(ConstraintSource::new(move || {
            // Nobody advances the first one, so every copy starts at the beginning.
            let first = first.lock().unwrap_or_else(PoisonError::into_inner);
            Box::new(Held(first.deep_clone()))
        }))
    }
}

struct Held(Matcher);

impl Constraint for Held {
    fn mask(&mut self, logits: &mut [f32]) {
        // A matcher that fails says so by ending the reply: a mask it could not compute must not
        // become a reply that breaks its promise. The JSON is then cut short, and seen to be.
        let Ok(mask) = self.0.compute_mask_or_eos() else {
            return;
        };
        for (id, logit) in (0..).zip(logits) {
            if !mask.is_allowed(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn chose(&mut self, id: TokenId) {
        if !self.0.is_stopped() {
            // A token it refuses stops the matcher, which then allows the end alone.
            let _ = self.0.consume_token(id);
        }
    }
}

#[cfg(test)]
mod tests;
