//! What a hub is told when it is opened, and what it tells while it works.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use crate::terms::ByteRange;

/// Everything a [`super::Hub`] needs to know. It reads no environment of its own, but for the
/// system's proxy settings where [`Proxy::System`] says so.
#[derive(Clone)]
pub struct HubOptions {
    /// Where bytes may come from, tried in this order.
    pub sources: Vec<SourceAddress>,
    /// Sent to hubs over https or on this machine; never to a CDN or in the clear to another
    /// machine. A source's own secret can stand in its address: `http://:SECRET@nas:8090`.
    pub token: Option<Token>,
    /// No socket at all; folders still work.
    pub offline: bool,
    /// Bytes a second over all sources.
    pub rate_bytes_per_s: Option<u64>,
    /// After this many bytes, fetches end with [`super::HubError::CapReached`].
    pub bytes_max: Option<u64>,
    /// Spans in flight at a time from one source, at most.
    pub lanes_max: usize,
    /// PEM certificates trusted besides the system's.
    pub extra_ca_pem: Vec<Vec<u8>>,
    /// Which proxy to use.
    pub proxy: Proxy,
    /// What servers see as the client's name.
    pub user_agent: String,
    /// Waits, attempts and floors.
    pub timing: Timing,
    /// Time, for expiry of signed URLs and rate-limit windows.
    pub clock: Arc<dyn Clock>,
    /// Seeds the jitter of retries.
    pub seed: u64,
    /// Hears of events a person should know of.
    pub observer: Arc<dyn HubObserver>,
}

impl Default for HubOptions {
    fn default() -> Self {
        HubOptions {
            sources: Vec::new(),
            token: None,
            offline: false,
            rate_bytes_per_s: None,
            bytes_max: None,
            lanes_max: 16,
            extra_ca_pem: Vec::new(),
            proxy: Proxy::System,
            user_agent: concat!("deltafin/", env!("CARGO_PKG_VERSION"), "; rust").to_owned(),
            timing: Timing::default(),
            clock: Arc::new(SystemClock::new()),
            seed: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(1, |d| u64::from(d.subsec_nanos())),
            observer: Arc::new(Silent),
        }
    }
}

/// Where bytes may come from.
#[derive(Clone, PartialEq, Eq)]
pub enum SourceAddress {
    /// A hub, a mirror, another Deltafin's share or a plain file server: `https://huggingface.co`.
    Http(String),
    /// A model's own folder (with its `config.json`), a folder of `ORG/NAME` folders, or a Hugging
    /// Face cache.
    Folder(PathBuf),
}

impl SourceAddress {
    /// Reads what a person typed: whatever holds `://` is a URL, all else is a folder.
    pub fn parse(text: &str) -> Self {
        if text.contains("://") {
            SourceAddress::Http(text.to_owned())
        } else {
            SourceAddress::Folder(PathBuf::from(text))
        }
    }
}

impl fmt::Display for SourceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceAddress::Http(url) => f.write_str(&super::address::shown(url)),
            SourceAddress::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

impl fmt::Debug for SourceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A secret and where it came from. It shows itself by its origin alone.
#[derive(Clone)]
pub struct Token {
    secret: String,
    origin: String,
}

impl Token {
    /// `origin` names the place for error texts: `HF_TOKEN`, or a file. White space around the
    /// secret is dropped; an empty secret is no token.
    pub fn new(secret: &str, origin: impl Into<String>) -> Option<Self> {
        let secret = secret.trim();
        (!secret.is_empty()).then(|| Token {
            secret: secret.to_owned(),
            origin: origin.into(),
        })
    }

    /// Where it came from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    pub(super) fn secret(&self) -> &str {
        &self.secret
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(from {})", self.origin)
    }
}

/// Which proxy carries requests.
#[derive(Clone, Default)]
pub enum Proxy {
    /// What the environment or the system says (`HTTPS_PROXY`, `NO_PROXY`); never for loopback.
    #[default]
    System,
    /// None.
    Direct,
    /// This one, for everything.
    Url(String),
}

/// Waits, attempts and floors of the network code.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Until a connection stands.
    pub connect: Duration,
    /// From a request to its reply's headers.
    pub headers: Duration,
    /// Between two pieces of a body.
    pub idle: Duration,
    /// Fruitless attempts for a span from one source; a longer run of errors is not luck.
    pub attempts: u32,
    /// First wait between attempts; doubles, with full jitter.
    pub backoff: Duration,
    /// Longest such wait.
    pub backoff_max: Duration,
    /// Longest single wait a server can impose (a rate limit's window is 300 s).
    pub pause_max: Duration,
    /// A span slower than this over `speed_window`, and than its peers, is started afresh.
    pub speed_min: u64,
    /// What speeds are measured over.
    pub speed_window: Duration,
    /// A span may take this long, and more the larger it is and the more of it has come.
    pub deadline: Duration,
    /// Between two looks at speeds and lanes.
    pub tick: Duration,
    /// After this long every lane may open at once.
    pub warm: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            connect: Duration::from_secs(10),
            headers: Duration::from_secs(15),
            idle: Duration::from_secs(10),
            attempts: 6,
            backoff: Duration::from_millis(250),
            backoff_max: Duration::from_secs(8),
            pause_max: Duration::from_secs(310),
            speed_min: 64 << 10,
            speed_window: Duration::from_secs(5),
            deadline: Duration::from_secs(120),
            tick: Duration::from_millis(500),
            warm: Duration::from_secs(60),
        }
    }
}

/// Time as the hub sees it. Tests turn it by hand; sleeps inside the hub look at it again and
/// again, so that turning it ends them.
pub trait Clock: Send + Sync {
    /// Time since some fixed instant; never runs backwards.
    fn elapsed(&self) -> Duration;
    /// Seconds since 1970 by this machine, which may be wrong.
    fn unix_seconds(&self) -> u64;
}

/// The machine's clock.
pub struct SystemClock(Instant);

impl SystemClock {
    /// Starts counting now.
    pub fn new() -> Self {
        SystemClock(Instant::now())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        SystemClock::new()
    }
}

impl Clock for SystemClock {
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    fn unix_seconds(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs())
    }
}

/// Hears what a person should know. Called on the hub's threads: only hand over.
pub trait HubObserver: Send + Sync {
    /// Something happened. One call an event, not one a request.
    fn notice(&self, notice: &Notice) {
        let _ = notice;
    }
}

/// Hears nothing.
pub struct Silent;

impl HubObserver for Silent {}

/// What a person should know; [`fmt::Display`] gives one line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A hub asked for a pause; transfers under way go on.
    RateLimited {
        /// Which hub.
        host: String,
        /// How long.
        seconds: u64,
        /// Whether a token was sent.
        anonymous: bool,
    },
    /// Bytes came that were not the pinned ones; they were dropped and asked for again.
    WrongBytes {
        /// Which source.
        source: String,
        /// Which file.
        file: String,
        /// Which bytes.
        range: ByteRange,
    },
    /// A source is no longer asked, or only as a last resort.
    SetAside {
        /// Which source.
        source: String,
        /// Why.
        why: String,
    },
    /// A source does not answer for now; others are asked, and it again later.
    Down {
        /// Which source.
        source: String,
        /// What it met last.
        why: String,
    },
    /// Throughput fell apart; fewer spans are asked for at a time.
    Collapse {
        /// Which source.
        source: String,
        /// Lanes from now on.
        lanes: usize,
    },
    /// The hub has something to say (`X-HF-Warning`); once a topic.
    Warning {
        /// Which hub.
        host: String,
        /// Its words.
        message: String,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::RateLimited {
                host,
                seconds,
                anonymous,
            } => {
                write!(f, "rate limited by {host}, going on in {seconds} s")?;
                if *anonymous {
                    f.write_str(" (the limit of anonymous use; set HF_TOKEN)")?;
                }
                Ok(())
            }
            Notice::WrongBytes {
                source,
                file,
                range,
            } => write!(
                f,
                "{source} gave wrong bytes for {file} {range}; fetching them again"
            ),
            Notice::SetAside { source, why } => write!(f, "{source} is set aside: {why}"),
            Notice::Down { source, why } => write!(f, "{source} does not answer: {why}"),
            Notice::Collapse { source, lanes } => {
                write!(
                    f,
                    "throughput of {source} collapsed; using {lanes} connections"
                )
            }
            Notice::Warning { host, message } => write!(f, "{host} says: {message}"),
        }
    }
}
