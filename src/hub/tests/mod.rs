//! Tests of the hub's parts. Fetches over HTTP are tested in `tests/hub.rs`.

mod folder;
mod headers;
mod strangers;
mod watch;
