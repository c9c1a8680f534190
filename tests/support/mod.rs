//! What integration tests share: a hub to fetch from.
//!
//! # The test hub in a minute
//!
//! [`TestHub`] is a Hugging-Face-shaped hub inside the test's own process: real sockets on loopback
//! (a *hub*, a *CDN* on another host, and an *other* host for hostile redirects), signed addresses
//! that expire, pagination, rate limits, tokens. It behaves well until told otherwise.
//!
//! ```ignore
//! mod support;
//! use support::TestHub;
//!
//! // One model's own folder, served as one repository:
//! let hub = TestHub::folder("test/tiny-k3", "fixtures/tiny-k3");
//! // or made-up bytes, any size at no cost (`virtual_bytes` says what they are):
//! let hub = TestHub::with(Config::default(), vec![
//!     Repo::new("test/big").file("a.safetensors", Content::Virtual { seed: 1, size: 16 << 30 }),
//! ]);
//!
//! let options = HubOptions { sources: vec![hub.source()], ..HubOptions::default() };
//! // `hub.url()` is what `--hub` takes; `hub.commit("test/big")` is where `main` points.
//!
//! hub.fault(Rule::on(Listener::Cdn).path("model-00003").fault(Fault::ResetAfter(1000)).times(2));
//! hub.clock().advance(3600);          // signed addresses expire without waiting
//! hub.slow(Throttle { per_connection: Some(90_000), ..Throttle::default() });
//! hub.latency(Duration::from_millis(30));
//!
//! let ledger = hub.ledger();          // every request so far
//! ledger.assert_polite();             // no Range on resolve, no token on the CDN, ...
//! assert_eq!(ledger.resolves(), 9);
//! assert_eq!(ledger.expert_bytes_sent(), 0);   // body bytes the CDN sent
//! hub.stop();                         // from now on connections are refused
//! ```
//!
//! Dropping the hub closes every connection. By hand: `cargo run --example testhub -- FOLDER ORG/NAME`.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    unused_imports,
    clippy::unwrap_used,
    clippy::too_many_lines,
    reason = "each test uses its part of this"
)]

pub mod proxy;
pub mod testhub;
#[cfg(feature = "tls")]
pub mod tls;

pub use testhub::Called;
pub use testhub::Config;
pub use testhub::Hosts;
pub use testhub::Personality;
pub use testhub::Quota;
pub use testhub::TestClock;
pub use testhub::TestHub;
pub use testhub::Throttle;
pub use testhub::data::Access;
pub use testhub::data::Content;
pub use testhub::data::Repo;
pub use testhub::data::virtual_bytes;
pub use testhub::fault::Fault;
pub use testhub::fault::Rule;
pub use testhub::ledger::Entry;
pub use testhub::ledger::Ledger;
pub use testhub::ledger::Listener;
