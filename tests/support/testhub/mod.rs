//! The hub: three listeners, one state.

pub mod data;
pub mod fault;
pub mod ledger;
pub mod site;
pub mod wire;

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use deltafin::hub::Clock;
use deltafin::hub::SourceAddress;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::sleep;

use data::Content;
use data::Repo;
use data::TestFile;
use fault::Fault;
use fault::Rule;
use ledger::Entry;
use ledger::Ledger;
use ledger::Listener;
use wire::Reply;
use wire::Request;

/// Whose habits the hub has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Personality {
    Hf,
    /// One redirect more, tags only on the second hop, no lengths on HEAD.
    HfMirror,
    /// Serves bytes itself: 200 on resolve, ranges there too.
    Olah,
    /// 200 with the slice and its Content-Range.
    ModelScope,
    /// A plain file server: no API, no commit, ranges, an ETag of its own.
    StaticNginx,
    /// A plain file server that ignores Range.
    StaticPython,
    /// A hub whose content carries no ETag.
    NoEtag,
}

/// Requests allowed in each window of 300 s.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    pub api: u64,
    pub resolvers: u64,
}

#[derive(Clone, Debug)]
pub struct Config {
    pub personality: Personality,
    /// Entries on one page of a tree.
    pub page: usize,
    pub quota: Quota,
    /// Seconds a signed address works.
    pub signature_lasts: u64,
    /// Whether replies say which other Deltafin serves them.
    pub share: bool,
    /// Whether addresses on the CDN are signed at all.
    pub signed: bool,
    /// Whether replies offer the other protocol large files can be had by.
    pub xet: bool,
    pub hosts: Hosts,
    pub called: Called,
}

/// Where the three servers listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// 127.0.0.1, 127.0.0.2 and 127.0.0.3, where the system has them.
    Three,
    /// 127.0.0.1 for all.
    One,
    /// `[::1]` for all: see [`ipv6`].
    V6,
}

/// By which names the servers speak of themselves and each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Called {
    /// Their addresses.
    Address,
    /// This host, with the port of each.
    Host(&'static str),
    /// Origins of hub, CDN and the other one. Only who knows the way, as a proxy, gets there.
    Origins([&'static str; 3]),
}

/// Whether this machine has an IPv6 loopback.
pub fn ipv6() -> bool {
    std::net::TcpListener::bind(("::1", 0)).is_ok()
}

impl Default for Config {
    fn default() -> Self {
        Config {
            personality: Personality::Hf,
            page: 1000,
            quota: Quota {
                api: 500,
                resolvers: 3000,
            },
            signature_lasts: 3600,
            share: false,
            signed: true,
            xet: true,
            hosts: Hosts::Three,
            called: Called::Address,
        }
    }
}

/// Limits on how fast replies go out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    /// Bytes a second on each connection to the CDN.
    pub per_connection: Option<u64>,
    /// Bytes a second from the CDN in all.
    pub total: Option<u64>,
    /// One connection in so many, an early one, gets only so many bytes a second.
    pub slow_lane: Option<(u64, u64)>,
    /// With more connections than the first at a time, the total falls to the second.
    pub collapse: Option<(usize, u64)>,
}

/// A clock that both sides share and a test turns; it also runs by itself.
pub struct TestClock {
    started: Instant,
    advanced: AtomicU64,
    skew: AtomicI64,
}

impl TestClock {
    pub fn new() -> Arc<Self> {
        Arc::new(TestClock {
            started: Instant::now(),
            advanced: AtomicU64::new(0),
            skew: AtomicI64::new(0),
        })
    }

    /// Turns both sides' time by so many seconds.
    pub fn advance(&self, seconds: u64) {
        self.advanced.fetch_add(seconds, SeqCst);
    }

    /// Lets the client believe that it is so much later than it is.
    pub fn skew(&self, seconds: i64) {
        self.skew.store(seconds, SeqCst);
    }

    /// Seconds since 1970 as the server has it.
    pub fn server(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        now.as_secs() + self.advanced.load(SeqCst)
    }
}

impl Clock for TestClock {
    fn elapsed(&self) -> Duration {
        self.started.elapsed() + Duration::from_secs(self.advanced.load(SeqCst))
    }

    fn unix_seconds(&self) -> u64 {
        self.server().saturating_add_signed(self.skew.load(SeqCst))
    }
}

pub struct State {
    pub config: Config,
    pub repos: Mutex<BTreeMap<String, Repo>>,
    rules: Mutex<Vec<Rule>>,
    /// Random state and share of CDN requests with a random fault.
    chaos: Mutex<Option<(u64, f64)>>,
    ledger: Mutex<Vec<Entry>>,
    pub clock: Arc<TestClock>,
    addresses: HashMap<Listener, SocketAddr>,
    throttle: Mutex<Throttle>,
    latency: Mutex<Duration>,
    /// Random state, and the most that is added to the latency.
    jitter: Mutex<(u64, Duration)>,
    free_at: Mutex<Instant>,
    link: Mutex<Link>,
    in_service: Mutex<HashMap<Listener, usize>>,
    connections: AtomicU64,
    open: AtomicU64,
    /// Changing it makes every signature given out so far worthless.
    pub key: AtomicU64,
    pub windows: Mutex<HashMap<(&'static str, u64), u64>>,
}

/// What went over a link with a total rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    pub bytes: u64,
    /// Those of them that found the link busy: all, if it never idles.
    pub queued: u64,
}

impl State {
    pub fn url(&self, listener: Listener) -> String {
        let address = self.addresses[&listener];
        match self.config.called {
            Called::Address => format!("http://{address}"),
            Called::Host(host) => format!("http://{host}:{}", address.port()),
            Called::Origins([hub, cdn, other]) => match listener {
                Listener::Hub => hub.to_owned(),
                Listener::Cdn => cdn.to_owned(),
                Listener::Other => other.to_owned(),
            },
        }
    }

    pub async fn wait_latency(&self) {
        let mut latency = *self.latency.lock().unwrap();
        {
            let (state, most) = &mut *self.jitter.lock().unwrap();
            if !most.is_zero() {
                latency += Duration::from_micros(next_random(state) % most.as_micros() as u64);
            }
        }
        if !latency.is_zero() {
            sleep(latency).await;
        }
    }

    pub fn enter(&self, entry: usize, status: u16) {
        if let Some(entry) = self.ledger.lock().unwrap().get_mut(entry) {
            entry.status = status;
        }
    }

    pub fn sent(&self, entry: usize, bytes: u64) {
        if let Some(entry) = self.ledger.lock().unwrap().get_mut(entry) {
            entry.sent += bytes;
        }
    }

    pub fn finish(&self, entry: usize) {
        if let Some(entry) = self.ledger.lock().unwrap().get_mut(entry) {
            entry.finished = true;
        }
    }

    /// Bytes to send at a time: few on a slow link, so that it trickles rather than gulps.
    pub fn piece(&self, listener: Listener, own: Option<u64>) -> u64 {
        let throttle = *self.throttle.lock().unwrap();
        let cdn = listener == Listener::Cdn;
        let collapsed = throttle.collapse.map(|(_, rate)| rate);
        let shared = [throttle.per_connection, throttle.total, collapsed]
            .into_iter()
            .flatten();
        match shared.filter(|_| cdn).chain(own).min() {
            Some(rate) => (rate / 100).clamp(1, 64 << 10),
            None => 64 << 10,
        }
    }

    fn lane_rate(&self, listener: Listener, connection: u64) -> Option<u64> {
        let (every, rate) = self.throttle.lock().unwrap().slow_lane?;
        let slow = listener == Listener::Cdn && connection % every == 3 % every;
        slow.then_some(rate)
    }

    /// Waits until `bytes` may go out.
    pub async fn pace(&self, listener: Listener, bytes: u64, own: Option<u64>) {
        let throttle = *self.throttle.lock().unwrap();
        let seconds = |rate: u64| Duration::from_secs_f64(bytes as f64 / rate as f64);
        let mut until = Instant::now();
        if let Some(rate) = own {
            until += seconds(rate);
        }
        if listener == Listener::Cdn {
            if let Some(rate) = throttle.per_connection {
                until = until.max(Instant::now() + seconds(rate));
            }
            let busy = self
                .in_service
                .lock()
                .unwrap()
                .get(&listener)
                .copied()
                .unwrap_or(0);
            let total = match throttle.collapse {
                Some((above, rate)) if busy > above => Some(rate),
                _ => throttle.total,
            };
            if let Some(rate) = total {
                let mut free_at = self.free_at.lock().unwrap();
                // A timer's grain is a millisecond; what it oversleeps may be made up for.
                let grain = Duration::from_millis(5);
                let now = Instant::now();
                let idle_since = now.checked_sub(grain).unwrap_or(now);
                {
                    let mut link = self.link.lock().unwrap();
                    link.bytes += bytes;
                    link.queued += if *free_at >= idle_since { bytes } else { 0 };
                }
                *free_at = (*free_at).max(idle_since) + seconds(rate);
                until = until.max(*free_at);
            }
        }
        tokio::time::sleep_until(until.into()).await;
    }

    fn fault_for(&self, listener: Listener, request: &Request) -> Option<Fault> {
        let mut rules = self.rules.lock().unwrap();
        let mut plays = None;
        for rule in rules.iter_mut() {
            if rule.plays(listener, request) {
                plays = Some(rule.fault.clone());
                break;
            }
        }
        if plays.is_some() || listener != Listener::Cdn {
            return plays;
        }
        let mut chaos = self.chaos.lock().unwrap();
        let (state, share) = chaos.as_mut()?;
        let roll = next_random(state);
        let fault = next_random(state);
        let range = request.range()?;
        let length = range.last? + 1 - range.first?;
        ((roll >> 11) as f64 / (1u64 << 53) as f64 <= *share).then(|| fault::random(fault, length))
    }
}

pub fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A running test hub; see the module's head.
pub struct TestHub {
    pub state: Arc<State>,
    runtime: Mutex<Option<Runtime>>,
}

impl TestHub {
    /// One model's folder as one repository.
    pub fn folder(repo: &str, folder: impl AsRef<Path>) -> Self {
        TestHub::with(Config::default(), vec![Repo::folder(repo, folder)])
    }

    /// One repository with one made-up file `data.safetensors`.
    pub fn virtual_file(repo: &str, seed: u64, size: u64) -> Self {
        let repo = Repo::new(repo).file("data.safetensors", Content::Virtual { seed, size });
        TestHub::with(Config::default(), vec![repo])
    }

    pub fn with(config: Config, repos: Vec<Repo>) -> Self {
        TestHub::on_clock(config, repos, TestClock::new())
    }

    pub fn on_clock(config: Config, repos: Vec<Repo>, clock: Arc<TestClock>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("testhub")
            .enable_all()
            .build()
            .unwrap();
        let _inside = runtime.enter();
        // Another host as well as another port: some clients compare hosts alone. Where only one
        // loopback address exists, the port has to do.
        let bind = |host: &str| {
            let socket = std::net::TcpListener::bind((host, 0))
                .or_else(|_| std::net::TcpListener::bind(("127.0.0.1", 0)))
                .unwrap();
            socket.set_nonblocking(true).unwrap();
            TcpListener::from_std(socket).unwrap()
        };
        let [hub, cdn, other] = match config.hosts {
            Hosts::Three => ["127.0.0.1", "127.0.0.2", "127.0.0.3"],
            Hosts::One => ["127.0.0.1"; 3],
            Hosts::V6 => ["::1"; 3],
        };
        let sockets = [
            (Listener::Hub, bind(hub)),
            (Listener::Cdn, bind(cdn)),
            (Listener::Other, bind(other)),
        ];
        let addresses = sockets
            .iter()
            .map(|(l, s)| (*l, s.local_addr().unwrap()))
            .collect();
        let state = Arc::new(State {
            config,
            repos: Mutex::new(repos.into_iter().map(|r| (r.name.clone(), r)).collect()),
            rules: Mutex::default(),
            chaos: Mutex::default(),
            ledger: Mutex::default(),
            clock,
            addresses,
            throttle: Mutex::default(),
            latency: Mutex::default(),
            jitter: Mutex::new((1, Duration::ZERO)),
            link: Mutex::default(),
            free_at: Mutex::new(Instant::now()),
            in_service: Mutex::default(),
            connections: AtomicU64::new(0),
            open: AtomicU64::new(0),
            key: AtomicU64::new(1),
            windows: Mutex::default(),
        });
        for (listener, socket) in sockets {
            runtime.spawn(accept(Arc::clone(&state), listener, socket));
        }
        TestHub {
            state,
            runtime: Mutex::new(Some(runtime)),
        }
    }

    /// What `--hub` takes.
    pub fn url(&self) -> String {
        self.state.url(Listener::Hub)
    }

    pub fn url_of(&self, listener: Listener) -> String {
        self.state.url(listener)
    }

    /// Where a listener really is, whatever it is called.
    pub fn address_of(&self, listener: Listener) -> SocketAddr {
        self.state.addresses[&listener]
    }

    pub fn source(&self) -> SourceAddress {
        SourceAddress::Http(self.url())
    }

    /// Where `main` points.
    pub fn commit(&self, repo: &str) -> String {
        self.state.repos.lock().unwrap()[repo].main.clone()
    }

    /// Changes a repository while the hub runs: new commits, lost commits, access.
    pub fn change(&self, repo: &str, change: impl FnOnce(&mut Repo)) {
        change(self.state.repos.lock().unwrap().get_mut(repo).unwrap());
    }

    /// The bytes a client should get.
    pub fn expected(&self, repo: &str, path: &str, start: u64, end: u64) -> Vec<u8> {
        let repos = self.state.repos.lock().unwrap();
        let repo = &repos[repo];
        let file = &repo.commits[&repo.main][path];
        file.content
            .read(start, usize::try_from(end - start).unwrap())
    }

    pub fn clock(&self) -> Arc<TestClock> {
        Arc::clone(&self.state.clock)
    }

    /// Adds a rule; earlier ones come first.
    pub fn fault(&self, rule: Rule) {
        self.state.rules.lock().unwrap().push(rule);
    }

    pub fn heal(&self) {
        self.state.rules.lock().unwrap().clear();
        *self.state.chaos.lock().unwrap() = None;
    }

    /// A random fault on this share of CDN requests.
    pub fn chaos(&self, seed: u64, share: f64) {
        *self.state.chaos.lock().unwrap() = Some((seed, share));
    }

    pub fn slow(&self, throttle: Throttle) {
        *self.state.throttle.lock().unwrap() = throttle;
    }

    /// Delay before each reply.
    pub fn latency(&self, latency: Duration) {
        *self.state.latency.lock().unwrap() = latency;
    }

    /// Adds a random time up to this to each delay.
    pub fn jitter(&self, most: Duration) {
        self.state.jitter.lock().unwrap().1 = most;
    }

    /// What went over the link since this was last asked, if it has a total rate.
    pub fn link(&self) -> Link {
        std::mem::take(&mut *self.state.link.lock().unwrap())
    }

    /// Makes all signatures given out so far worthless.
    pub fn change_key(&self) {
        self.state.key.fetch_add(1, SeqCst);
    }

    pub fn ledger(&self) -> Ledger {
        Ledger(self.state.ledger.lock().unwrap().clone())
    }

    pub fn forget(&self) {
        self.state.ledger.lock().unwrap().clear();
    }

    /// Connections open now, on all listeners.
    pub fn open_connections(&self) -> u64 {
        self.state.open.load(SeqCst)
    }

    /// Closes every connection and refuses new ones.
    pub fn stop(&self) {
        if let Some(runtime) = self.runtime.lock().unwrap().take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

impl Drop for TestHub {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn accept(state: Arc<State>, listener: Listener, socket: TcpListener) {
    loop {
        let Ok((stream, _)) = socket.accept().await else {
            return;
        };
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            state.open.fetch_add(1, SeqCst);
            // The client going away is as good an end as any.
            let _ = serve(&state, listener, stream).await;
            state.open.fetch_sub(1, SeqCst);
        });
    }
}

async fn serve(state: &State, listener: Listener, mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    // Opening a connection takes a round trip, too.
    state.wait_latency().await;
    let connection = state.connections.fetch_add(1, SeqCst);
    let mut kept = Vec::new();
    while let Some(request) = Request::read(&mut stream, &mut kept).await? {
        let in_service = InService::new(state, listener);
        let reply = site::answer(state, listener, &request);
        let fault = state.fault_for(listener, &request);
        let entry = Entry {
            listener,
            method: request.method.clone(),
            path: request.path.clone(),
            query: request.query.clone(),
            headers: request.headers.clone(),
            status: 0,
            sent: 0,
            finished: false,
            faulted: fault.is_some(),
            connection,
            concurrent: in_service.count,
            at: Instant::now(),
        };
        let entry = {
            let mut ledger = state.ledger.lock().unwrap();
            ledger.push(entry);
            ledger.len() - 1
        };
        let own = state.lane_rate(listener, connection);
        let out = wire::Outgoing {
            listener,
            request: &request,
            fault,
            entry,
            own,
        };
        if !wire::send(state, &mut stream, reply, out).await? {
            return Ok(());
        }
    }
    Ok(())
}

/// Counts a request while it is in service.
struct InService<'a> {
    state: &'a State,
    listener: Listener,
    count: usize,
}

impl<'a> InService<'a> {
    fn new(state: &'a State, listener: Listener) -> Self {
        let mut all = state.in_service.lock().unwrap();
        let count = all.entry(listener).or_default();
        *count += 1;
        InService {
            state,
            listener,
            count: *count,
        }
    }
}

impl Drop for InService<'_> {
    fn drop(&mut self) {
        *self
            .state
            .in_service
            .lock()
            .unwrap()
            .get_mut(&self.listener)
            .unwrap() -= 1;
    }
}
