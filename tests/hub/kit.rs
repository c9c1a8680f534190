//! A client and a hub, ready to fetch.

#![allow(unreachable_pub, dead_code, reason = "a kit for several test modules")]

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use deltafin::hub::Arrived;
use deltafin::hub::Class;
use deltafin::hub::Hub;
use deltafin::hub::HubError;
use deltafin::hub::HubObserver;
use deltafin::hub::HubOptions;
use deltafin::hub::Notice;
use deltafin::hub::Snapshot;
use deltafin::hub::SourceAddress;
use deltafin::hub::Span;
use deltafin::hub::Ticket;
use deltafin::hub::Timing;
use deltafin::hub::Token;
use deltafin::terms::ByteRange;
use deltafin::terms::Digest;
use deltafin::terms::RepoId;
use sha2::Digest as _;

use crate::support::TestHub;

pub const REPO: &str = "test/data";
pub const FILE: &str = "data.safetensors";
pub const TOKEN: &str = "hf_verysecrettoken";

/// Longest any single test may wait for one span.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn repo() -> RepoId {
    REPO.parse().unwrap()
}

/// Waits a hundredth as long as the defaults, so that tests of waits take no time.
pub fn quick() -> Timing {
    Timing {
        connect: Duration::from_secs(2),
        headers: Duration::from_millis(1_000),
        idle: Duration::from_millis(1_000),
        attempts: 6,
        backoff: Duration::from_millis(5),
        backoff_max: Duration::from_millis(80),
        pause_max: Duration::from_secs(310),
        speed_min: 64 << 10,
        speed_window: Duration::from_millis(400),
        deadline: Duration::from_secs(20),
        tick: Duration::from_millis(25),
        warm: Duration::from_secs(3),
    }
}

#[derive(Default)]
pub struct Heard(pub Mutex<Vec<Notice>>);

impl HubObserver for Heard {
    fn notice(&self, notice: &Notice) {
        self.0.lock().unwrap().push(notice.clone());
    }
}

impl Heard {
    pub fn all(&self) -> Vec<Notice> {
        self.0.lock().unwrap().clone()
    }
}

/// A client with its snapshot of [`REPO`].
pub struct Client {
    pub hub: Hub,
    pub snapshot: Arc<Snapshot>,
    pub heard: Arc<Heard>,
}

pub fn options(sources: Vec<SourceAddress>, server: &TestHub) -> HubOptions {
    HubOptions {
        sources,
        timing: quick(),
        clock: server.clock(),
        seed: 7,
        ..HubOptions::default()
    }
}

impl Client {
    pub fn of(server: &TestHub) -> Self {
        Client::with(options(vec![server.source()], server))
    }

    /// With a snapshot taken from the options' own sources.
    pub fn with(mut options: HubOptions) -> Self {
        let heard = Arc::new(Heard::default());
        options.observer = Arc::clone(&heard) as Arc<dyn HubObserver>;
        let hub = Hub::open(options).unwrap();
        let commit = hub.commit(&repo(), "main").unwrap();
        let snapshot = Arc::new(hub.list(&repo(), &commit).unwrap());
        Client {
            hub,
            snapshot,
            heard,
        }
    }

    /// With a snapshot from elsewhere, so that nothing was asked of the sources yet.
    pub fn knowing(mut options: HubOptions, snapshot: &Arc<Snapshot>) -> Self {
        let heard = Arc::new(Heard::default());
        options.observer = Arc::clone(&heard) as Arc<dyn HubObserver>;
        Client {
            hub: Hub::open(options).unwrap(),
            snapshot: Arc::clone(snapshot),
            heard,
        }
    }

    pub fn start(&self, span: Span, class: Class) -> Pending {
        let (sender, receiver) = mpsc::channel();
        let started = Instant::now();
        let ticket = self.hub.fetch(&self.snapshot, span, class, move |outcome| {
            let _ = sender.send(outcome);
        });
        Pending {
            ticket: Some(ticket),
            receiver,
            started,
        }
    }

    /// Bytes of [`FILE`] with no digest known.
    pub fn range(&self, start: u64, end: u64) -> Result<Arrived, HubError> {
        self.start(span(start, end), Class::Demand).wait()
    }

    /// The same with the digest the bytes must have.
    pub fn proven(&self, server: &TestHub, start: u64, end: u64) -> Result<Arrived, HubError> {
        self.start(proven_span(server, start, end), Class::Demand)
            .wait()
    }

    /// Fetches bytes of [`FILE`] and holds them against what the hub has.
    pub fn check(&self, server: &TestHub, start: u64, end: u64) {
        let arrived = self.range(start, end).unwrap();
        assert_right(server, &arrived, start, end);
    }
}

pub fn assert_right(server: &TestHub, arrived: &Arrived, start: u64, end: u64) {
    let expected = server.expected(REPO, FILE, start, end);
    assert!(arrived.bytes == expected, "wrong bytes for {start}..{end}");
    assert_eq!(arrived.sha256, sha256(&expected));
}

pub fn sha256(bytes: &[u8]) -> Digest {
    Digest(sha2::Sha256::digest(bytes).into())
}

pub fn span(start: u64, end: u64) -> Span {
    Span {
        file: FILE.into(),
        range: ByteRange::new(start, end),
        digest: None,
    }
}

pub fn proven_span(server: &TestHub, start: u64, end: u64) -> Span {
    Span {
        digest: Some(sha256(&server.expected(REPO, FILE, start, end))),
        ..span(start, end)
    }
}

pub fn token() -> Option<Token> {
    Token::new(TOKEN, "the test")
}

/// A fetch under way.
pub struct Pending {
    ticket: Option<Ticket>,
    receiver: mpsc::Receiver<Result<Arrived, HubError>>,
    started: Instant,
}

impl Pending {
    pub fn wait(self) -> Result<Arrived, HubError> {
        self.receiver.recv_timeout(PATIENCE).expect("a fetch hangs")
    }

    pub fn ticket(&self) -> &Ticket {
        self.ticket.as_ref().unwrap()
    }

    /// Drops the ticket; the outcome still comes.
    pub fn cancel(mut self) -> Result<Arrived, HubError> {
        self.ticket = None;
        self.receiver.recv_timeout(PATIENCE).expect("a fetch hangs")
    }

    pub fn took(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Waits until something holds, in bounded time.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
