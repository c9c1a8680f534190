//! The hub client against the test hub: what it fetches, and what it survives.
//!
//! Tests named after a numbered fault belong to one list of what networks, hubs, mirrors and CDNs
//! have been seen to do. Of its fifty, 46 to 48 (disk full, killed, two processes) are the store's
//! to survive, and 39 (HTTP/2's own) cannot come up: the client speaks HTTP/1.1 alone.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

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

#[path = "hub/sources.rs"]
mod sources;

#[cfg(feature = "tls")]
#[path = "hub/trust.rs"]
mod trust;
