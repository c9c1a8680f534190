//! Conversations to tokens, tokens to replies.
//!
//! ```text
//! messages ─ render ─► pieces ─ Tokenizer ─► ids ─ (model) ─► ids ─ ReplyParser ─► reasoning, answer, tool calls
//! ```
//!
//! A prompt is a list of [`Piece`]s, each encoded on its own, and only a piece marked as markup can
//! give a special token. What a user, a tool or a file wrote is never marked, so no text can open or
//! close a tag, whatever it spells.
//!
//! Special tokens are known by name, from `tokenizer_config.json`: their numbers differ between the
//! members of the family.

mod bpe;
mod chat;
mod class;
mod error;
mod json;
mod message;
mod reply;
mod split;
#[cfg(test)]
mod tests;
mod tokenizer;
mod utf8;

pub use chat::Conversation;
pub use chat::Effort;
pub use chat::ResponseFormat;
pub use chat::ToolChoice;
pub use chat::render;
pub use error::TextError;
pub use message::ImageSize;
pub use message::Message;
pub use message::Part;
pub use message::Role;
pub use message::ToolCall;
pub use message::messages_from_json;
pub use reply::Opening;
pub use reply::Reply;
pub use reply::ReplyEvent;
pub use reply::ReplyParser;
pub use tokenizer::Piece;
pub use tokenizer::Tokenizer;
pub use tokenizer::stop_ids;
pub use utf8::Utf8Stream;
