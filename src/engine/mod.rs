//! Prompts in, events out: sampling, stopping, counting.
