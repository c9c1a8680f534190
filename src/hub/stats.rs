//! What was moved; plain numbers, taken at one moment.

use std::sync::Arc;

/// What was moved so far; a photograph, not a registry.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HubStats {
    /// Requests to the hub's API.
    pub api: u64,
    /// Requests to `/resolve/` addresses.
    pub resolves: u64,
    /// Ranged requests for bodies.
    pub ranges: u64,
    /// Bytes of spans, wasted ones included.
    pub body_bytes: u64,
    /// Bytes of spans that were thrown away: wrong, or fetched twice.
    pub wasted_bytes: u64,
    /// Bytes of listings and small files.
    pub meta_bytes: u64,
    /// Span bytes a second, lately.
    pub bytes_per_s: u64,
    /// The limit of bytes a second, if one is set.
    pub rate_max: Option<u64>,
    /// The limit of bytes in all, if one is set.
    pub bytes_max: Option<u64>,
    /// Bytes that count against it: bodies of every kind that came over the network.
    pub counted_bytes: u64,
    /// Spans in flight.
    pub lanes: usize,
    /// Spans waiting for a lane.
    pub waiting: usize,
    /// Requests that were made again.
    pub retries: u64,
    /// Second requests for slow spans.
    pub hedges: u64,
    /// Seconds by which a hub's clock was last seen ahead of this machine's.
    pub clock_ahead: Option<i64>,
    /// The same, source by source, in the order of the options.
    pub sources: Vec<SourceStats>,
}

/// What one source gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceStats {
    /// Its name: scheme and host, or folder.
    pub name: Arc<str>,
    /// Spans it delivered.
    pub spans: u64,
    /// Bytes of spans that came from it, wasted ones included.
    pub body_bytes: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Spans whose bytes were wrong.
    pub wrong: u64,
    /// Spans in flight.
    pub lanes: usize,
    /// Spans it may have in flight now.
    pub lanes_limit: usize,
    /// Whether it is no longer asked, or only as a last resort for bytes a digest will prove.
    pub set_aside: bool,
}
