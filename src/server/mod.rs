//! The OpenAI-shaped door.
//!
//! ```text
//! gate       who may ask: key, host, origin, size                     gate.rs
//! ask        JSON to generations; what cannot be honoured is refused  ask/
//! queue      a few generations at a time, a short line before them    queue.rs
//! reply      news to OpenAI's shapes, streamed or whole               reply/
//! send       bytes on the wire, alive for hours                       send.rs
//! shelf      responses that are kept                                  shelf.rs
//! batch      the same requests and replies as lines of a file         batch.rs
//! batches    such files, answered behind everybody who waits          batches.rs, files.rs
//! ```
//!
//! Behind the door stands a [`Generator`]. The door opens before there is one: the core of a large
//! model takes hours to fetch, and until it is there `/health` says what is awaited.

mod ask;
mod batch;
mod batches;
mod cancel;
mod error;
mod files;
mod gate;
mod generator;
mod grammar;
mod limits;
mod logprobs;
mod metrics;
mod over_engine;
mod params;
mod queue;
mod reply;
mod routes;
mod send;
mod shelf;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

pub use batch::BatchLine;
pub use batch::BatchReader;
pub use batch::Wrong;
pub use cancel::Cancel;
pub use cancel::Hearing;
pub use generator::Arrived;
pub use generator::Ask;
pub use generator::BySource;
pub use generator::Failure;
pub use generator::Finish;
pub use generator::Generator;
pub use generator::Happening;
pub use generator::Ledger;
pub use generator::Limit;
pub use generator::Now;
pub use generator::Outcome;
pub use generator::Prompt;
pub use generator::Sampling;
pub use generator::SharedJob;

use crate::jobs::Identity;
use crate::jobs::JobError;
use crate::jobs::Journal;
use crate::share::Limits;
use crate::share::Secret;
use ask::honour::SharedGrammars;
use batches::Kept;
use queue::Queue;
use shelf::disk::Disk;

/// What keeps a server from serving; afterwards every fault is a reply to one request.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {source}")]
    Bind {
        /// The address asked for.
        addr: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Threads are not to be had.
    #[error("cannot start serving: {0}")]
    Start(std::io::Error),
    /// Anybody could use this machine.
    #[error("{0} is reached by others, and no key is asked of them")]
    Open(SocketAddr),
}

impl ServerError {
    /// What to do next.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            ServerError::Bind { .. } => "choose another --port, or stop what listens there",
            ServerError::Start(_) => "check the limits on threads and open files (ulimit -a)",
            ServerError::Open(_) => "give --api-key, or listen on 127.0.0.1",
        })
    }
}

/// How to serve. Every field is required; [`ServerOptions::new`] gives what suits most.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Asked of every client as a bearer token.
    pub api_key: Option<Secret>,
    /// Web origins, such as `http://localhost:3000`, whose pages may ask too.
    pub origins: Vec<String>,
    /// Requests served at once: they share the passes over the model's weights.
    pub running_max: usize,
    /// Requests that wait while others are served; more are turned away.
    pub waiting_max: usize,
    /// The longest silence in a reply.
    pub heartbeat: Duration,
    /// Bytes of one request.
    pub body_max: usize,
    /// Bytes of one file.
    pub file_max: u64,
    /// Bytes of all files that are kept, as far as clients send them: what batches write is not
    /// refused.
    pub files_max: u64,
    /// Connections at once; more wait in the system's queue.
    pub connections_max: usize,
}

impl ServerOptions {
    /// No key, no foreign origins, and limits for one machine and a few people.
    pub fn new() -> ServerOptions {
        ServerOptions {
            api_key: None,
            origins: Vec::new(),
            running_max: 8,
            waiting_max: 32,
            // OpenAI's clients and most proxies take half a minute of silence for death.
            heartbeat: Duration::from_secs(8),
            body_max: 8 << 20,
            file_max: 200_000_000,
            files_max: 16_000_000_000,
            connections_max: 512,
        }
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions::new()
    }
}

/// What is awaited before the first request can be served.
#[derive(Clone)]
struct Loading {
    what: String,
    /// Whether it waits for a higher limit of fetched bytes.
    paused: bool,
}

/// What every route shares.
struct Door {
    options: ServerOptions,
    /// Whether only this machine reaches us.
    loopback: bool,
    started: u64,
    queue: OnceLock<Arc<Queue>>,
    grammars: SharedGrammars,
    loading: Mutex<Loading>,
    /// Who will serve, once it is ready.
    coming: OnceLock<Arc<dyn Generator>>,
    shelf: shelf::Shelf,
    /// Files and batches, where they are kept.
    kept: OnceLock<Arc<Kept>>,
}

impl Door {
    fn new(options: ServerOptions, loopback: bool) -> Arc<Door> {
        Arc::new(Door {
            options,
            loopback,
            started: unix_now(),
            queue: OnceLock::new(),
            grammars: SharedGrammars::default(),
            loading: Mutex::new(Loading {
                what: "starting".to_owned(),
                paused: false,
            }),
            coming: OnceLock::new(),
            shelf: shelf::Shelf::default(),
            kept: OnceLock::new(),
        })
    }

    fn loading(&self) -> Loading {
        let loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        loading.clone()
    }

    fn now_loading(&self, what: &str, paused: bool) {
        *self.loading.lock().unwrap_or_else(PoisonError::into_inner) = Loading {
            what: what.to_owned(),
            paused,
        };
    }

    fn open(&self, generator: Arc<dyn Generator>) -> std::io::Result<()> {
        let queue = Queue::start(
            generator,
            self.options.running_max,
            self.options.waiting_max,
        )?;
        if let Err(second) = self.queue.set(queue) {
            second.close();
        }
        Ok(())
    }
}

fn unix_now() -> u64 {
    unix_nanos() / 1_000_000_000
}

/// Nanoseconds since 1970, until 2554.
fn unix_nanos() -> u64 {
    // A clock before 1970 is told as 1970.
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

/// A server that listens, on threads of its own, until it is stopped or dropped.
pub struct Server {
    addr: SocketAddr,
    door: Arc<Door>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    runtime: tokio::runtime::Handle,
}

impl Server {
    /// Listens on `addr` (port 0 takes a free one). Until [`Server::ready`], requests are told to
    /// come back later.
    ///
    /// # Errors
    ///
    /// [`ServerError::Open`] beyond loopback without a key, [`ServerError::Bind`] where the address
    /// is taken or not ours, [`ServerError::Start`] where the system gives no thread.
    pub fn start(addr: SocketAddr, options: ServerOptions) -> Result<Server, ServerError> {
        if !addr.ip().is_loopback() && options.api_key.is_none() {
            return Err(ServerError::Open(addr));
        }
        let bind = |source| ServerError::Bind { addr, source };
        let listener = std::net::TcpListener::bind(addr).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        // Two threads: a long prompt being parsed must not hold up another's heartbeat.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("deltafin-serve")
            .enable_all()
            .build()
            .map_err(ServerError::Start)?;
        let limits = Limits {
            connections: options.connections_max,
            headers: Duration::from_secs(30),
            ..Limits::default()
        };
        let door = Door::new(options, addr.ip().is_loopback());
        let router = routes::app(Arc::clone(&door));
        let handle = runtime.handle().clone();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("deltafin-serve".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    // The listener was bound above, so only a broken runtime fails here.
                    if let Ok(listener) = tokio::net::TcpListener::from_std(listener) {
                        let stopped = async move {
                            // A dropped handle stops as well as an explicit word.
                            let _ = stopped.await;
                        };
                        crate::share::serve(listener, router, limits, stopped).await;
                    }
                });
                runtime.shutdown_timeout(Duration::from_millis(200));
            })
            .map_err(ServerError::Start)?;
        Ok(Server {
            addr,
            door,
            stop: Some(stop),
            thread: Some(thread),
            runtime: handle,
        })
    }

    /// Says what is awaited before the first request can be served.
    pub fn loading(&self, what: &str) {
        self.door.now_loading(what, false);
    }

    /// Says that loading waits for a higher limit of fetched bytes.
    pub fn paused(&self, what: &str) {
        self.door.now_loading(what, true);
    }

    /// Names who will serve once it is ready: its limit of fetched bytes can be moved from now on.
    /// A second call changes nothing.
    pub fn coming(&self, generator: Arc<dyn Generator>) {
        let _ = self.door.coming.set(generator);
    }

    /// Serves with `generator` from now on. A second call changes nothing.
    ///
    /// # Errors
    ///
    /// [`ServerError::Start`] where the system gives no thread.
    pub fn ready(&self, generator: Arc<dyn Generator>) -> Result<(), ServerError> {
        self.door.open(generator).map_err(ServerError::Start)?;
        let door = Arc::clone(&self.door);
        self.runtime
            .spawn(routes::responses::resume(Arc::clone(&door)));
        self.runtime.spawn(batches::run::resume(door));
        Ok(())
    }

    /// Has responses outlive the process, in this journal; to be said before [`Server::ready`],
    /// which then goes on with those that an earlier process did not finish.
    pub fn keep(&self, journal: Journal, identity: Identity) {
        self.door.shelf.keep_on(Disk::new(journal, identity));
    }

    /// Has clients' files, and the batches that are made of them, kept in this home; to be said
    /// before [`Server::ready`], which then goes on with the batches that an earlier process did not
    /// finish. Without it there are none.
    ///
    /// # Errors
    ///
    /// Where their folders cannot be made.
    pub fn keep_files(&self, home: &Path) -> Result<(), JobError> {
        // A second home would hold nothing of the first.
        let _ = self.door.kept.set(Arc::new(Kept::open(home)?));
        Ok(())
    }

    /// Lets nobody in any more, and returns when nobody is served: after `grace`, what runs ends
    /// where its state is whole, if that comes within `patience`. Background responses end at once,
    /// and go on at the next start where [`Server::keep`] was said.
    pub fn drain(&self, grace: Duration, patience: Duration) {
        if let Some(queue) = self.door.queue.get() {
            queue.drain(grace, patience);
        }
    }

    /// The address served, with the port that was taken.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The base URL, without a slash at the end; OpenAI's clients want `/v1` after it.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Ends the running generation, tells every client, and returns when they are gone.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(queue) = self.door.queue.get() {
            queue.close();
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
