//! Generations that outlive a process: what is kept, what is refused, what comes out.

#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "a test that cannot go on says where, and shares a kit"
)]

#[path = "jobs/batch.rs"]
mod batch;
#[path = "jobs/full.rs"]
mod full;
#[path = "jobs/journal.rs"]
mod journal;
#[path = "jobs/kept.rs"]
mod kept;
#[path = "engine/kit.rs"]
mod kit;
#[path = "jobs/prefix.rs"]
mod prefix;
mod program;
#[path = "jobs/sweeps.rs"]
mod sweeps;
