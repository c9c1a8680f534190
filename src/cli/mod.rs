//! What you typed, what it means, what you see.
