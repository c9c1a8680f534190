//! The hub client against the test hub: what it fetches, and what it survives.
//!
//! Tests named after a numbered fault belong to one list of what networks, hubs, mirrors and CDNs
//! have been seen to do: `docs/faults.md` has all fifty, with guards and tests. 46 to 48 (disk full,
//! killed, two processes) are the store's to survive, and tested there.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod program;
mod support;

#[path = "hub/kit.rs"]
mod kit;

#[path = "hub/bodies.rs"]
mod bodies;

#[path = "hub/chaos.rs"]
mod chaos;

#[path = "hub/faithful.rs"]
mod faithful;

#[path = "hub/hubside.rs"]
mod hubside;

#[path = "hub/people.rs"]
mod people;

#[path = "hub/proxies.rs"]
mod proxies;

#[path = "hub/sources.rs"]
mod sources;

#[path = "hub/storms.rs"]
mod storms;

#[cfg(feature = "tls")]
#[path = "hub/trust.rs"]
mod trust;
