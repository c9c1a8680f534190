//! The engine as its callers meet it: generations that are resumed, stopped and shared, over the
//! trained checkpoint, in this process.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "engine/kit.rs"]
mod kit;
#[path = "engine/lookahead.rs"]
mod lookahead;
#[path = "engine/memory.rs"]
mod memory;
#[path = "engine/prefixes.rs"]
mod prefixes;
#[path = "engine/recency.rs"]
mod recency;
#[path = "engine/resume.rs"]
mod resume;
#[path = "engine/shared.rs"]
mod shared;
