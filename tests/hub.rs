//! The hub client against the test hub: what it fetches, and what it survives.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod support;

#[path = "hub/kit.rs"]
mod kit;

#[path = "hub/faithful.rs"]
mod faithful;
