//! Every request that was made.

use std::time::Instant;

/// Which of the three servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
pub enum Listener {
    Hub,
    Cdn,
    Other,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Entry {
    pub listener: Listener,
    pub method: String,
    /// Decoded, without the query.
    pub path: String,
    pub query: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub status: u16,
    /// Bytes of the body that went out.
    pub sent: u64,
    /// Whether the reply went out as planned, to its end.
    pub finished: bool,
    /// Whether a fault was played on it.
    pub faulted: bool,
    pub connection: u64,
    /// Requests in service on this listener when it came, itself included.
    pub concurrent: usize,
    pub at: Instant,
}

impl Entry {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// A copy of the requests so far.
#[derive(Clone, Debug)]
pub struct Ledger(pub Vec<Entry>);

impl Ledger {
    pub fn on(&self, listener: Listener) -> impl Iterator<Item = &Entry> {
        self.0.iter().filter(move |e| e.listener == listener)
    }

    pub fn resolves(&self) -> usize {
        let resolve = |e: &&Entry| e.path.contains("/resolve/");
        self.on(Listener::Hub).filter(resolve).count()
    }

    pub fn api(&self) -> usize {
        let api = |e: &&Entry| e.path.starts_with("/api/") && !e.path.contains("/resolve-cache/");
        self.on(Listener::Hub).filter(api).count()
    }

    /// Requests to the CDN.
    pub fn ranges(&self) -> usize {
        self.on(Listener::Cdn).count()
    }

    /// Body bytes the CDN sent.
    pub fn expert_bytes_sent(&self) -> u64 {
        self.on(Listener::Cdn).map(|e| e.sent).sum()
    }

    pub fn connections(&self, listener: Listener) -> usize {
        let mut seen: Vec<u64> = self.on(listener).map(|e| e.connection).collect();
        seen.sort_unstable();
        seen.dedup();
        seen.len()
    }

    pub fn concurrency(&self, listener: Listener) -> usize {
        self.on(listener).map(|e| e.concurrent).max().unwrap_or(0)
    }

    /// Everything a hub may expect of any client of ours, whatever happened.
    pub fn assert_polite(&self) {
        for e in &self.0 {
            let what = format!("{:?} {} {}", e.listener, e.method, e.path);
            let range = e.header("range").unwrap_or("");
            assert!(
                !range.contains(','),
                "{what}: several ranges at once: {range}"
            );
            assert_eq!(
                e.header("accept-encoding"),
                Some("identity"),
                "{what}: compression allowed"
            );
            for name in ["referer", "cookie"] {
                assert_eq!(e.header(name), None, "{what}: sent {name}");
            }
            if e.listener == Listener::Hub {
                let resolve = e.path.contains("/resolve/");
                assert!(!resolve || range.is_empty(), "{what}: Range on resolve");
            } else {
                assert_eq!(e.header("authorization"), None, "{what}: token given away");
                assert_ne!(e.method, "HEAD", "{what}: signatures are for GET");
            }
        }
    }

    /// No request shows `secret` anywhere but in the hub's Authorization header.
    pub fn assert_kept(&self, secret: &str) {
        for e in &self.0 {
            let own = |name: &str| name == "authorization" && e.listener == Listener::Hub;
            let leaked = e.headers.iter().any(|(n, v)| v.contains(secret) && !own(n));
            let in_url = e.path.contains(secret) || e.query.contains(secret);
            assert!(
                !leaked && !in_url,
                "{:?} {} shows the token",
                e.listener,
                e.path
            );
        }
    }
}
