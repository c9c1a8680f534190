//! Text to token ids and back, from the checkpoint's own files.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;

use crate::terms::TokenId;

use super::bpe::Ranks;
use super::chat::Conversation;
use super::chat::render;
use super::error::TextError;
use super::split::for_each_piece;
use super::split::for_each_slice;

/// Ids after the ordinary tokens that are special whether the configuration names them or not.
const SPECIALS: usize = 256;

/// The special tokens without which no chat can be written.
const CHAT_MARKUP: [&str; 4] = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"];

/// Special tokens that end a reply, in one member of the family or another.
const ENDS: [&str; 4] = ["<|end_of_msg|>", "[EOS]", "[EOT]", "<|im_end|>"];

/// A stretch of a prompt that is encoded on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Whether special tokens spelled in it become those tokens. Only ever true for text that this
    /// crate wrote itself.
    pub markup: bool,
}

/// A model's vocabulary: ordinary tokens by rank, then special ones by name. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer(Arc<Vocabulary>);

struct Vocabulary {
    ranks: Ranks,
    /// Names of the special tokens, by id from the first on.
    specials: Vec<String>,
    special_ids: HashMap<String, TokenId>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    added_tokens_decoder: BTreeMap<String, AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

impl Tokenizer {
    /// Reads `tiktoken.model` and `tokenizer_config.json`.
    ///
    /// # Errors
    ///
    /// [`TextError::Damaged`], with the file and the line, where they are not what they should be.
    pub fn new(tiktoken_model: &[u8], tokenizer_config: &[u8]) -> Result<Self, TextError> {
        let ranks = Ranks::parse(tiktoken_model)?;
        let config: Config =
            serde_json::from_slice(tokenizer_config).map_err(|e| damaged(e.to_string()))?;
        let base = ranks.len();
        let mut specials: Vec<String> = (base..base + SPECIALS)
            .map(|id| format!("<|reserved_token_{id}|>"))
            .collect();
        for (id, token) in config.added_tokens_decoder {
            let slot = id.parse().ok().and_then(|id: usize| id.checked_sub(base));
            let slot = slot
                .and_then(|slot| specials.get_mut(slot))
                .ok_or_else(|| {
                    let last = base + SPECIALS - 1;
                    damaged(format!(
                        "added_tokens_decoder: id `{id}` of `{}` is not one of {base} to {last}, \
                     which follow the ordinary tokens",
                        token.content
                    ))
                })?;
            if token.content.is_empty() {
                return Err(damaged(format!(
                    "added_tokens_decoder: id {id} has no name"
                )));
            }
            *slot = token.content;
        }
        let mut special_ids = HashMap::with_capacity(specials.len());
        for (name, id) in specials.iter().zip(base..) {
            let id = TokenId::try_from(id).map_err(|_| damaged("too many tokens".to_owned()))?;
            if let Some(other) = special_ids.insert(name.clone(), id) {
                return Err(damaged(format!(
                    "added_tokens_decoder: {other} and {id} are both named `{name}`"
                )));
            }
        }
        Ok(Tokenizer(Arc::new(Vocabulary {
            ranks,
            specials,
            special_ids,
        })))
    }

    /// How many ids there are: ordinary and special ones, `0..vocab_len`.
    pub fn vocab_len(&self) -> usize {
        self.0.ranks.len() + self.0.specials.len()
    }

    /// The id of a special token, by name.
    pub fn special(&self, name: &str) -> Option<TokenId> {
        self.0.special_ids.get(name).copied()
    }

    /// Whether the id is a special token's.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.special_name(id).is_some()
    }

    fn special_name(&self, id: TokenId) -> Option<&str> {
        let slot = usize::try_from(id).ok()?.checked_sub(self.0.ranks.len())?;
        self.0.specials.get(slot).map(String::as_str)
    }

    /// A token's bytes, which need not be whole characters. A special token's are its name; an id
    /// beyond the vocabulary has none.
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        let special = || self.special_name(id).map(str::as_bytes);
        self.0.ranks.bytes(id).or_else(special).unwrap_or_default()
    }

    /// The bytes of a row of tokens, joined.
    pub fn decode(&self, ids: &[TokenId]) -> Vec<u8> {
        ids.iter().flat_map(|id| self.bytes(*id)).copied().collect()
    }

    /// The ids of plain text: never a special token, whatever the text spells.
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        let mut ids = Vec::new();
        for_each_slice(text, |slice| self.encode_slice(slice, &mut ids));
        ids
    }

    /// The ids of a prompt. Each piece is encoded on its own: joined first, text on both sides of a
    /// border could become one token.
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Vec<TokenId> {
        let mut ids = Vec::new();
        for piece in pieces {
            for_each_slice(&piece.text, |slice| {
                if piece.markup {
                    self.encode_markup(slice, &mut ids);
                } else {
                    self.encode_slice(slice, &mut ids);
                }
            });
        }
        ids
    }

    /// The ids of a conversation's prompt, up to where the model's reply begins.
    ///
    /// # Errors
    ///
    /// [`TextError::NoChatMarkup`] where this vocabulary cannot spell a chat, else what [`render`]
    /// finds wrong.
    pub fn encode_chat(&self, conversation: &Conversation) -> Result<Vec<TokenId>, TextError> {
        let missing = CHAT_MARKUP.into_iter().find(|n| self.special(n).is_none());
        if let Some(missing) = missing {
            return Err(TextError::NoChatMarkup { missing });
        }
        Ok(self.encode_pieces(&render(conversation)?))
    }

    fn encode_slice(&self, text: &str, ids: &mut Vec<TokenId>) {
        for_each_piece(text, |piece| self.0.ranks.encode(piece.as_bytes(), ids));
    }

    /// Special tokens spelled in `text` become those tokens; what lies between is plain.
    fn encode_markup(&self, text: &str, ids: &mut Vec<TokenId>) {
        let (mut plain, mut at) = (0, 0);
        while at < text.len() {
            let rest = &text[at..];
            match self.special_at(rest) {
                Some((name, id)) => {
                    self.encode_slice(&text[plain..at], ids);
                    ids.push(id);
                    at += name.len();
                    plain = at;
                }
                None => at += rest.chars().next().map_or(1, char::len_utf8),
            }
        }
        self.encode_slice(&text[plain..], ids);
    }

    /// The longest special token that `text` begins with.
    fn special_at(&self, text: &str) -> Option<(&str, TokenId)> {
        let names = self.0.special_ids.iter();
        names
            .filter(|(name, _)| text.starts_with(name.as_str()))
            .max_by_key(|(name, _)| name.len())
            .map(|(name, id)| (name.as_str(), *id))
    }

    /// The special tokens that end a reply, by name.
    pub(super) fn ends(&self) -> impl Iterator<Item = TokenId> {
        ENDS.into_iter().filter_map(|name| self.special(name))
    }
}

/// The ids on which generation stops: those of `generation_config.json`, those of `config.json`, and
/// the vocabulary's own ends of message, text and turn. Sorted, each once.
///
/// `<|close|>` is not among them unless the files say so: it ends inner elements too.
///
/// # Errors
///
/// [`TextError::Damaged`] where `generation_config` is not JSON with an id or a list of ids.
pub fn stop_ids(
    generation_config: Option<&[u8]>,
    config_eos: &[TokenId],
    tokenizer: &Tokenizer,
) -> Result<Vec<TokenId>, TextError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Ids {
        One(TokenId),
        Several(Vec<TokenId>),
    }
    #[derive(Deserialize)]
    struct Generation {
        #[serde(default)]
        eos_token_id: Option<Ids>,
    }
    let mut stops: BTreeSet<TokenId> = config_eos.iter().copied().chain(tokenizer.ends()).collect();
    if let Some(json) = generation_config {
        let generation: Generation =
            serde_json::from_slice(json).map_err(|e| TextError::Damaged {
                file: "generation_config.json",
                line: 0,
                what: e.to_string(),
            })?;
        match generation.eos_token_id {
            Some(Ids::One(id)) => stops.extend([id]),
            Some(Ids::Several(ids)) => stops.extend(ids),
            None => {}
        }
    }
    Ok(stops.into_iter().collect())
}

fn damaged(what: String) -> TextError {
    TextError::Damaged {
        file: "tokenizer_config.json",
        line: 0,
        what,
    }
}
