//! Experts on demand: memory, disk and hub behind the forward pass's port.
//!
//! This is the one place where store and hub meet. Experts are handed over in ARRIVAL order, straight
//! from memory; writing them to disk happens behind, on a thread of its own.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;

use super::MemoryPlan;
use super::ResidencyError;
use super::core::Core;
use super::core::CorePiece;
use super::direct::DirectFile;
use super::fetch::Fetched;
use super::lookahead::Foreseer;
use super::lookahead::Means;
use super::lookahead::Taken;
use super::meter::Meter;
use super::meter::Origin;
use super::open::Opened;
use super::plan::Demand;
use super::pool::Pool;
use super::shape::Shape;
use super::tier::Tier;
use super::trace::TraceError;
use super::trace::TraceHead;
use super::trace::Tracer;
use super::writer::Writer;
use crate::hub::Class;
use crate::hub::Ticket;
use crate::kernel::Isa;
use crate::model::CoreSupply;
use crate::model::ExpertSupply;
use crate::store::Lease;
use crate::store::Lookup;
use crate::store::Slot;
use crate::store::Waited;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

/// How often a wait looks up to see whether somebody asked to stop.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// How long another process may take over an expert before it is fetched a second time.
const OTHERS: Duration = Duration::from_secs(60);
/// Experts read from disk at once.
const DISK_READS: usize = 16;

/// The weights of one opened model.
#[derive(Clone, Debug)]
pub struct Supply(Arc<Inner>);

struct Inner {
    opened: Opened,
    plan: MemoryPlan,
    core: Arc<Core>,
    tier: Arc<Tier>,
    pool: Pool,
    foreseer: Option<Foreseer>,
    readers: rayon::ThreadPool,
    writer: Writer,
    used: Mutex<Vec<ExpertKey>>,
    trace: OnceLock<Tracer>,
}

impl Inner {
    fn used(&self) -> MutexGuard<'_, Vec<ExpertKey>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the disk's order of use up to date before a layer is looked up, so that what is there
    /// depends on what was used before and not on how far the writing is: the layer's own experts
    /// count as used before any goes for another of the same layer.
    fn settle(&self, keys: &[ExpertKey]) {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        let mut used = self.used();
        let limit = self.opened.store.store().budget().limit();
        let room = limit / self.opened.layout.expert_len().max(1);
        if room < (used.len() + keys.len()) as u64 {
            // A cache smaller than a sweep evicts what the sweep itself has brought, in the order of
            // their arrival unless all have arrived.
            self.writer.flush();
            used.sort_unstable();
            self.opened.store.promote(&used);
        } else {
            self.writer.settle();
        }
        self.opened.store.promote(&keys);
        self.opened.store.ask(&keys);
        used.extend_from_slice(&keys);
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supply")
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}

/// An expert's bytes, in the order w1, w2, w3 (packed before scale).
#[derive(Clone, Debug)]
pub struct ExpertBytes(Bytes);

impl AsRef<[u8]> for ExpertBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// What reached the forward pass.
struct Arrival {
    key: ExpertKey,
    outcome: Result<Delivered, ResidencyError>,
}

struct Delivered {
    bytes: Bytes,
    origin: Origin,
    /// Present when the bytes are new and may be kept.
    keep: Option<(Slot, Fetched)>,
}

impl Supply {
    /// Plans the memory; nothing is read yet. Guesses at what comes next are computed with `isa`.
    ///
    /// # Errors
    ///
    /// If the core's heads are damaged, or the reader threads cannot be started.
    pub fn new(opened: Opened, demand: &Demand, isa: Isa) -> Result<Supply, ResidencyError> {
        let shape = Shape::new(&opened.spec, opened.layout.core())?;
        let plan = MemoryPlan::new(&shape, demand);
        let readers = rayon::ThreadPoolBuilder::new()
            .num_threads(DISK_READS.min(plan.window))
            .thread_name(|n| format!("expert-read-{n}"))
            .build()
            .map_err(|e| ResidencyError::Threads(std::io::Error::other(e)))?;
        let writer = Writer::start(opened.store.clone(), Arc::clone(&opened.meter), plan.behind)
            .map_err(ResidencyError::Threads)?;
        let held = plan.expert_memory.checked_div(shape.expert_len());
        let layers: Vec<u16> = opened.spec.moe_layers().collect();
        let means = Means {
            tier: Arc::new(Tier::new(held.unwrap_or(0), &layers)),
            pool: Pool::new(usize::try_from(shape.expert_len()).unwrap_or(0)),
            core: Arc::new(Core::new(&opened, shape, &plan)),
            opened: opened.clone(),
        };
        Ok(Supply(Arc::new(Inner {
            tier: Arc::clone(&means.tier),
            pool: means.pool.clone(),
            core: Arc::clone(&means.core),
            foreseer: match plan.foreseen {
                0 => None,
                room => {
                    let started = Foreseer::start(demand.lookahead, means, isa, room);
                    Some(started.map_err(ResidencyError::Threads)?)
                }
            },
            opened,
            plan,
            readers,
            writer,
            used: Mutex::default(),
            trace: OnceLock::new(),
        })))
    }

    /// Who got the memory.
    pub fn plan(&self) -> &MemoryPlan {
        &self.0.plan
    }

    /// What was opened.
    pub fn opened(&self) -> &Opened {
        &self.0.opened
    }

    /// The counts so far.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.0.opened.meter
    }

    /// Writes the experts of every sweep from now on to a file, in the form that [`super::Trace`]
    /// reads; a second call changes nothing. What goes wrong later costs the trace alone: `failed`
    /// is told once, and no more is written.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, is no trace, or is another model's.
    pub fn trace_to(
        &self,
        path: &Path,
        failed: impl Fn(&TraceError) + Send + Sync + 'static,
    ) -> Result<(), TraceError> {
        let opened = &self.0.opened;
        let head = TraceHead {
            model: opened.repo.to_string(),
            revision: opened.snapshot.commit.to_string(),
            expert_bytes: opened.layout.expert_len(),
        };
        let tracer = Tracer::begin(path, &head, Box::new(failed))?;
        let _ = self.0.trace.set(tracer);
        Ok(())
    }

    /// Marks the experts of the finished sweep as used, in (layer, expert) order, so that recency
    /// does not depend on the order in which they arrived.
    pub fn end_of_sweep(&self) {
        let mut used = std::mem::take(&mut *self.0.used());
        used.sort_unstable();
        used.dedup();
        if let Some(trace) = self.0.trace.get() {
            trace.sweep(&used);
        }
        self.0.writer.touch(used);
        self.0.tier.end_of_sweep();
        if let Some(foreseer) = &self.0.foreseer {
            foreseer.end_of_sweep();
        }
    }

    /// Waits until everything fetched so far is on disk, or has been given up.
    pub fn flush(&self) {
        self.0.writer.flush();
    }
}

impl CoreSupply for Supply {
    type Lease = CorePiece;
    type Error = ResidencyError;

    fn core(&self, part: CorePart) -> Result<CorePiece, ResidencyError> {
        self.0.core.part(part)
    }

    fn failure(&self) -> Option<ResidencyError> {
        self.0.core.failure()
    }
}

impl ExpertSupply for Supply {
    type Lease = ExpertBytes;
    type Error = ResidencyError;

    fn request(
        &self,
        keys: &[ExpertKey],
    ) -> impl Iterator<Item = Result<(ExpertKey, ExpertBytes), ResidencyError>> {
        let inner = &self.0;
        inner.opened.meter.requested(keys.len());
        inner.settle(keys);
        if let Some(foreseer) = &inner.foreseer {
            foreseer.demand(keys);
        }
        let (mut here, mut waiting) = (VecDeque::new(), VecDeque::new());
        for &key in keys {
            match inner.tier.get(key) {
                Some(bytes) => here.push_back((key, bytes)),
                None => waiting.push_back(key),
            }
        }
        let (sender, arrivals) = mpsc::channel();
        let mut arrivals = Arrivals {
            errand: Errand {
                inner: Arc::clone(inner),
                sender,
                tickets: Arc::default(),
                dropped: Arc::default(),
            },
            waiting,
            here,
            remaining: keys.len(),
            arrivals,
        };
        for _ in 0..inner.plan.window {
            arrivals.begin_next();
        }
        arrivals
    }

    fn at_hand(&self, key: ExpertKey) -> bool {
        self.0.tier.holds(key)
    }

    fn foresee(&self, layer: u16, x: &[f32]) {
        if let Some(foreseer) = &self.0.foreseer {
            foreseer.foresee(layer, x);
        }
    }
}

/// An expert on its way from disk, which the core's reads give way to.
struct Reading {
    inner: Arc<Inner>,
    counted: bool,
}

impl Reading {
    fn begin(inner: &Arc<Inner>) -> Reading {
        let ahead = inner.core.ahead();
        if let Some(ahead) = ahead {
            ahead.expert_begins();
        }
        if let Some(foreseer) = &inner.foreseer {
            foreseer.read_begins();
        }
        Reading {
            counted: ahead.is_some(),
            inner: Arc::clone(inner),
        }
    }

    /// Reads past the page cache where memory is short and the bytes may be believed as they are.
    fn read(&self, key: ExpertKey, lease: &Lease) -> Result<Bytes, crate::store::StoreError> {
        let inner = &*self.inner;
        // Already on its way on a guess: reading it twice would take longer.
        if let Some(foreseer) = &inner.foreseer
            && let Some(bytes) = foreseer.finish(key)
        {
            return Ok(bytes);
        }
        if !inner.plan.mapped
            && lease.is_checked()
            && let Some(bytes) = direct(&inner.pool, lease)
        {
            return Ok(bytes);
        }
        lease.read()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if self.counted
            && let Some(ahead) = self.inner.core.ahead()
        {
            ahead.expert_ends();
        }
        if let Some(foreseer) = &self.inner.foreseer {
            foreseer.read_ends();
        }
    }
}

/// An expert read past the page cache; `None` if anything is odd, which an ordinary read then finds and names.
fn direct(pool: &Pool, lease: &Lease) -> Option<Bytes> {
    let file = DirectFile::open(&lease.path()).ok()?;
    let len = usize::try_from(lease.len()).ok()?;
    if file.len().ok()? != lease.len() {
        return None;
    }
    let mut buffer = pool.take().ok()?;
    let found = file.read(buffer.space(), 0).ok()?;
    (found == len && buffer.as_ref().len() == len).then(|| buffer.freeze())
}

/// One request's errands, shared by the threads that run them.
#[derive(Clone)]
struct Errand {
    inner: Arc<Inner>,
    sender: mpsc::Sender<Arrival>,
    tickets: Arc<Mutex<Vec<Ticket>>>,
    /// The request was given up: start nothing new.
    dropped: Arc<AtomicBool>,
}

impl Errand {
    /// Starts moving one expert towards memory; returns at once.
    fn bring(&self, key: ExpertKey) {
        if let Some(bytes) = self.inner.writer.pending(key) {
            self.deliver(
                key,
                Ok(Delivered {
                    bytes,
                    origin: Origin::Memory,
                    keep: None,
                }),
            );
            return;
        }
        let opened = &self.inner.opened;
        match opened.store.lookup(key, opened.layout.expert_len()) {
            Lookup::Hit(lease) => {
                let foreseer = self.inner.foreseer.as_ref();
                if let Some(Taken::Ready(bytes)) = foreseer.map(|f| f.take(key)) {
                    let origin = Origin::Disk;
                    let keep = None;
                    self.deliver(
                        key,
                        Ok(Delivered {
                            bytes,
                            origin,
                            keep,
                        }),
                    );
                    return;
                }
                let errand = self.clone();
                let reading = Reading::begin(&self.inner);
                self.inner
                    .readers
                    .spawn_fifo(move || match reading.read(key, &lease) {
                        Ok(bytes) => errand.deliver(
                            key,
                            Ok(Delivered {
                                bytes,
                                origin: Origin::Disk,
                                keep: None,
                            }),
                        ),
                        // Damage was found and removed: now it is a miss. Any other trouble of the
                        // disk slows us down; it does not stop us while a hub has the bytes.
                        Err(error) if error.refetch() => errand.bring_again(key),
                        Err(error) if errand.inner.opened.hub.is_none() => {
                            errand.deliver(key, Err(error.into()));
                        }
                        Err(_) => errand.fetch(key, None),
                    });
            }
            Lookup::Filling(wait) => {
                let errand = self.clone();
                self.inner
                    .readers
                    .spawn_fifo(move || match wait.wait(OTHERS) {
                        Waited::Filled(bytes) => {
                            let origin = Origin::Memory;
                            errand.deliver(
                                key,
                                Ok(Delivered {
                                    bytes,
                                    origin,
                                    keep: None,
                                }),
                            );
                        }
                        Waited::Again => errand.bring_again(key),
                        Waited::Late(slot) => errand.fetch(key, Some(slot)),
                    });
            }
            Lookup::Miss(slot) => self.fetch(key, Some(slot)),
        }
    }

    fn bring_again(&self, key: ExpertKey) {
        if !self.dropped.load(Ordering::Relaxed) {
            self.bring(key);
        }
    }

    fn fetch(&self, key: ExpertKey, slot: Option<Slot>) {
        let opened = &self.inner.opened;
        if opened.hub.is_none() {
            self.deliver(key, Err(ResidencyError::MissingExpert { key }));
            return;
        }
        let errand = self.clone();
        let tickets = opened.fetch_expert(key, Class::Demand, move |outcome| {
            let outcome = outcome.map(|fetched| Delivered {
                bytes: fetched.bytes.clone(),
                origin: if fetched.peer {
                    Origin::Peer
                } else {
                    Origin::Hub
                },
                keep: slot.map(|slot| (slot, fetched)),
            });
            errand.deliver(key, outcome);
        });
        self.tickets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(tickets);
    }

    fn deliver(&self, key: ExpertKey, outcome: Result<Delivered, ResidencyError>) {
        // The receiver is gone when the request was given up; a slot inside is then released.
        let _ = self.sender.send(Arrival { key, outcome });
    }
}

/// The experts of one request, as they arrive.
struct Arrivals {
    errand: Errand,
    /// Not yet begun.
    waiting: VecDeque<ExpertKey>,
    /// In memory: computed while the others are on their way.
    here: VecDeque<(ExpertKey, Bytes)>,
    /// Not yet handed over.
    remaining: usize,
    arrivals: mpsc::Receiver<Arrival>,
}

impl Iterator for Arrivals {
    type Item = Result<(ExpertKey, ExpertBytes), ResidencyError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.remaining == 0 {
            return None;
        }
        let began = Instant::now();
        if let Ok(arrival) = self.arrivals.try_recv() {
            self.remaining -= 1;
            self.begin_next();
            return Some(self.receive(arrival, began.elapsed()));
        }
        if let Some((key, bytes)) = self.here.pop_front() {
            self.remaining -= 1;
            let meter = &self.errand.inner.opened.meter;
            meter.arrived(Origin::Memory, bytes.len() as u64, Duration::ZERO);
            return Some(Ok((key, ExpertBytes(bytes))));
        }
        loop {
            if self.errand.inner.opened.stop.load(Ordering::Relaxed) {
                self.remaining = 0;
                return Some(Err(ResidencyError::Interrupted));
            }
            match self.arrivals.recv_timeout(STOP_CHECK) {
                Ok(arrival) => {
                    self.remaining -= 1;
                    self.begin_next();
                    return Some(self.receive(arrival, began.elapsed()));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.remaining = 0;
                    return Some(Err(ResidencyError::Interrupted));
                }
            }
        }
    }
}

impl Arrivals {
    fn begin_next(&mut self) {
        if let Some(key) = self.waiting.pop_front() {
            self.errand.bring(key);
        }
    }

    fn receive(
        &self,
        arrival: Arrival,
        waited: Duration,
    ) -> Result<(ExpertKey, ExpertBytes), ResidencyError> {
        let delivered = arrival.outcome?;
        let inner = &self.errand.inner;
        inner
            .opened
            .meter
            .arrived(delivered.origin, delivered.bytes.len() as u64, waited);
        inner.opened.meter.lit(arrival.key, delivered.origin);
        inner.tier.offer(arrival.key, &delivered.bytes);
        if let Some((slot, fetched)) = delivered.keep {
            inner.writer.keep(arrival.key, slot, fetched);
        }
        Ok((arrival.key, ExpertBytes(delivered.bytes)))
    }
}

impl Drop for Arrivals {
    /// Cancels what is still under way and keeps what has already arrived.
    fn drop(&mut self) {
        self.errand.dropped.store(true, Ordering::Relaxed);
        self.errand
            .tickets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        while let Ok(arrival) = self.arrivals.try_recv() {
            if let Ok(Delivered {
                keep: Some((slot, fetched)),
                ..
            }) = arrival.outcome
            {
                self.errand.inner.writer.keep(arrival.key, slot, fetched);
            }
        }
    }
}
