//! The OpenAI-shaped door.
