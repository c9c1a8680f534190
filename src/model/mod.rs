//! The forward pass and a sequence's state.
