//! The room against its goldens and its promises.
