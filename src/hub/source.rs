//! One place bytes come from, and how well it has served.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::HubError;
use super::HubOptions;
use super::Notice;
use super::SourceAddress;
use super::folder::FolderSource;
use super::http::HttpSource;
use super::net::Net;
use crate::terms::ByteRange;

/// Wrong bytes this often, and a source is asked only as a last resort.
const WRONG_MAX: u64 = 3;
/// Rest after a failure; doubles with each further one.
const REST: Duration = Duration::from_secs(5);
const REST_MAX: Duration = Duration::from_secs(300);

pub(super) enum Kind {
    Http(Box<HttpSource>),
    Folder(Arc<FolderSource>),
}

pub(super) struct Source {
    pub(super) name: Arc<str>,
    pub(super) kind: Kind,
    health: Mutex<Health>,
    pub(super) spans: AtomicU64,
    pub(super) body_bytes: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) wrong: AtomicU64,
}

#[derive(Default)]
struct Health {
    /// Serves another file than the pinned one: not asked at all.
    retired: bool,
    /// Gave wrong bytes too often: asked when no other source is left, and only for spans whose
    /// digest is known. A hub that errs once in a thousand spans must not end a long run.
    doubted: bool,
    /// By the clock's `elapsed`.
    resting_until: Duration,
    failures_in_a_row: u32,
}

impl Source {
    pub(super) fn open(address: &SourceAddress, options: &HubOptions) -> Result<Self, HubError> {
        let (name, kind) = match address {
            SourceAddress::Http(url) => {
                let http = HttpSource::open(url, options.token.as_ref())?;
                (Arc::clone(&http.name), Kind::Http(Box::new(http)))
            }
            SourceAddress::Folder(path) => {
                let folder = FolderSource::open(path)?;
                (address.to_string().into(), Kind::Folder(Arc::new(folder)))
            }
        };
        Ok(Source {
            name,
            kind,
            health: Mutex::default(),
            spans: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
        })
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn peer(&self) -> bool {
        match &self.kind {
            Kind::Http(http) => http.peer.load(Relaxed),
            Kind::Folder(_) => false,
        }
    }

    /// Whether it is not asked in the ordinary way any more.
    pub(super) fn set_aside(&self) -> bool {
        let health = self.health();
        health.retired || health.doubted
    }

    /// Whether it may be asked where no other source is left. What it gives must be `provable`.
    pub(super) fn last_resort(&self, provable: bool) -> bool {
        let health = self.health();
        !health.retired && health.doubted && provable
    }

    /// Whether it failed a moment ago and others should be asked first.
    pub(super) fn resting(&self, net: &Net) -> bool {
        self.health().resting_until > net.clock.elapsed()
    }

    pub(super) fn served(&self) {
        self.spans.fetch_add(1, Relaxed);
        let mut health = self.health();
        health.failures_in_a_row = 0;
        health.resting_until = Duration::ZERO;
    }

    /// It did not answer. Others are asked for a while, if there are any.
    pub(super) fn failed(&self, net: &Net, error: &HubError) {
        let now = net.clock.elapsed();
        let mut health = self.health();
        let already = health.resting_until > now;
        if !already {
            let doubled = REST.saturating_mul(1 << health.failures_in_a_row.min(8));
            health.resting_until = now + doubled.min(REST_MAX);
            health.failures_in_a_row += 1;
        }
        drop(health);
        if !already {
            net.notice(&Notice::Down {
                source: self.name.to_string(),
                why: error.to_string(),
            });
        }
    }

    /// It gave bytes that were not the pinned ones.
    pub(super) fn lied(&self, net: &Net, file: &str, range: ByteRange) {
        let times = self.wrong.fetch_add(1, Relaxed) + 1;
        net.notice(&Notice::WrongBytes {
            source: self.name.to_string(),
            file: file.to_owned(),
            range,
        });
        if times >= WRONG_MAX {
            let first = !std::mem::replace(&mut self.health().doubted, true);
            if first {
                self.tell_set_aside(net, "it gave wrong bytes three times");
            }
        }
    }

    /// It serves something else; no longer asked, until the program ends.
    pub(super) fn retire(&self, net: &Net, why: &str) {
        let first = !std::mem::replace(&mut self.health().retired, true);
        if first {
            self.tell_set_aside(net, why);
        }
    }

    fn tell_set_aside(&self, net: &Net, why: &str) {
        net.notice(&Notice::SetAside {
            source: self.name.to_string(),
            why: why.to_owned(),
        });
    }
}
