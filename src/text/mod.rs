//! Conversations to tokens, tokens to replies.
