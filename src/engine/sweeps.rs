//! One thread sweeps for all: callers offer rows of their sequences and get them back taken in.
//!
//! Callers come and go between sweeps. What a sweep moved is shared out by rows: a generation's
//! counts and arithmetic are its rows' share of each sweep it was in, so that all generations
//! together make up the whole. Time is not shared out: a sweep lasts as long for each.

use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use super::limit;
use super::limit::Before;
use super::line::Action;
use super::line::Due;
use super::line::Entry;
use super::line::Line;
use super::line::Place;
use super::line::elsewhere;
use super::live::Live;
use super::request::Priority;
use super::spill::SpillFile;
use super::stopper::Stops;
use crate::model::LayerRoutes;
use crate::model::Model;
use crate::model::ModelError;
use crate::model::Row;
use crate::model::Sequence;
use crate::model::Shared;
use crate::model::Watch;
use crate::residency::Counts;
use crate::residency::ResidencyError;
use crate::residency::Supply;
use crate::terms::TokenId;

/// How often a waiting caller looks up to see whether it is to stop.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// The next rows of a sequence.
pub(super) struct Offer {
    /// The state; `None` while it is on disk.
    pub(super) sequence: Option<Sequence>,
    /// At least one; a sweep may take a beginning of them.
    pub(super) tokens: Vec<TokenId>,
    /// A token was generated and waits for the next.
    pub(super) decode: bool,
    /// The distribution after the last of them is wanted.
    pub(super) last: bool,
    /// All distributions and routes are wanted.
    pub(super) all: bool,
}

/// Rows taken in.
pub(super) struct Taken {
    pub(super) sequence: Sequence,
    pub(super) rows: usize,
    /// `[rows that asked, vocab]`.
    pub(super) logits: Vec<f32>,
    /// Of these rows; empty unless all were wanted.
    pub(super) routes: Vec<LayerRoutes>,
    pub(super) share: Share,
}

/// A sequence's part of a sweep.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    /// The sweep's number, from 1.
    pub(super) sweep: u64,
    /// Sequences in it.
    pub(super) sequences: usize,
    pub(super) counts: Counts,
    /// Arithmetic.
    pub(super) compute: Duration,
    /// How long the sweep took, for everyone.
    pub(super) took: Duration,
}

/// Why rows were not taken in.
pub(super) enum Lost {
    /// The caller asked to stop. The state, where it is whole.
    Stopped(Option<Sequence>),
    /// The state had to go; it can be computed again.
    Evicted,
    /// Weights did not come. Whoever needed them hears the same error.
    Failed(Arc<ResidencyError>),
    /// The limit of fetched bytes is reached; the state as it was before.
    Limited(Sequence, Arc<ResidencyError>),
    /// The arithmetic panicked.
    Panicked,
}

/// The engine's machine: what the sweeping thread shares with callers.
pub(super) struct Machine {
    pub(super) model: Model,
    pub(super) supply: Supply,
    pub(super) live: Live,
    pub(super) waits_at_limit: AtomicBool,
    line: Mutex<Line>,
    /// Rung when the thread has something to look at.
    bell: Condvar,
}

/// The thread, ended with its owner.
pub(super) struct Sweeps {
    machine: Arc<Machine>,
    thread: Option<JoinHandle<()>>,
}

impl Sweeps {
    /// # Errors
    ///
    /// If the system gives no thread.
    pub(super) fn start(model: Model, supply: Supply) -> std::io::Result<Sweeps> {
        let layers = u16::try_from(model.spec().layers.len()).unwrap_or(u16::MAX);
        let line = Line::new(supply.plan().prefill_rows);
        let machine = Arc::new(Machine {
            model,
            supply,
            live: Live::new(layers),
            waits_at_limit: AtomicBool::new(false),
            line: Mutex::new(line),
            bell: Condvar::new(),
        });
        let thread = {
            let machine = Arc::clone(&machine);
            std::thread::Builder::new()
                .name("sweeps".to_owned())
                .spawn(move || machine.work())?
        };
        Ok(Sweeps {
            machine,
            thread: Some(thread),
        })
    }

    pub(super) fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }
}

impl Drop for Sweeps {
    fn drop(&mut self) {
        self.machine.line().closed = true;
        self.machine.bell.notify_all();
        if let Some(thread) = self.thread.take() {
            // It catches the arithmetic's panics; one of its own has been printed.
            let _ = thread.join();
        }
    }
}

/// A caller's place in the engine; left when dropped.
pub(super) struct Seat<'a> {
    machine: &'a Machine,
    stops: Stops,
    pub(super) ticket: u64,
}

impl<'a> Seat<'a> {
    /// Stands in line until there is memory for `bytes`.
    pub(super) fn take(
        machine: &'a Machine,
        stops: Stops,
        (priority, patience): (Priority, Option<Duration>),
        bytes: u64,
    ) -> Seat<'a> {
        let ticket = machine.line().join(priority, patience, bytes);
        machine.bell.notify_one();
        Seat {
            machine,
            stops,
            ticket,
        }
    }

    /// Waits until there is memory for the state.
    pub(super) fn enter(&self) -> Result<(), Lost> {
        let mut line = self.machine.line();
        loop {
            let Some(member) = line.members.get_mut(&self.ticket) else {
                return Err(Lost::Stopped(None));
            };
            if matches!(member.place, Place::Out) {
                return Ok(());
            }
            if self.stops.asked() {
                return Err(Lost::Stopped(None));
            }
            let bell = Arc::clone(&member.bell);
            line = wait(&bell, line, Some(STOP_CHECK));
        }
    }

    /// Has rows taken in; blocks until they are, or never will be.
    pub(super) fn step(&self, offer: Offer) -> Result<Taken, Lost> {
        let len = offer.sequence.as_ref().map_or(0, Sequence::len) + offer.tokens.len();
        let mut line = self.machine.line();
        let Some(member) = line.members.get_mut(&self.ticket) else {
            return Err(Lost::Stopped(offer.sequence));
        };
        let bytes = Sequence::bytes(self.machine.model.spec(), len);
        member.bytes = member.bytes.max(bytes);
        member.answer = None;
        member.place = Place::Ready(Box::new(offer), Instant::now());
        let bell = Arc::clone(&member.bell);
        if line.worth_a_look() {
            self.machine.bell.notify_one();
        }
        loop {
            let Some(member) = line.members.get_mut(&self.ticket) else {
                return Err(Lost::Stopped(None));
            };
            if let Some(answer) = member.answer.take() {
                return answer;
            }
            let parked = matches!(member.place, Place::Ready(..) | Place::Parked(..));
            if self.stops.asked() && parked {
                let place = std::mem::replace(&mut member.place, Place::Out);
                drop(line);
                return Err(Lost::Stopped(self.take_back(place)));
            }
            if self.stops.now() && matches!(member.place, Place::Sweeping) {
                self.machine.abandon(&mut line, self.ticket);
                return Err(Lost::Stopped(None));
            }
            line = wait(&bell, line, Some(STOP_CHECK));
        }
    }

    /// Whether the caller was asked to stop.
    pub(super) fn stopping(&self) -> bool {
        self.stops.asked()
    }

    fn take_back(&self, place: Place) -> Option<Sequence> {
        match place {
            Place::Ready(mut offer, _) => elsewhere(&mut offer),
            // A state that cannot be read is computed again by whoever goes on.
            Place::Parked(_, file) => file.read(self.machine.model.spec()).ok(),
            _ => None,
        }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut line = self.machine.line();
        self.machine.abandon(&mut line, self.ticket);
        drop(line);
        self.machine.bell.notify_one();
    }
}

impl Machine {
    pub(super) fn line(&self) -> MutexGuard<'_, Line> {
        // The line is whole between any two statements, so a panic elsewhere leaves it usable.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread, to look at what has changed.
    pub(super) fn look(&self) {
        self.bell.notify_one();
    }

    /// Removes a member, and ends the sweep at work if it was the last to wait for it.
    fn abandon(&self, line: &mut Line, ticket: u64) {
        let Some(member) = line.members.remove(&ticket) else {
            return;
        };
        member.left.store(true, Ordering::Relaxed);
        if matches!(member.place, Place::Sweeping) && line.nobody_waits() {
            self.supply.opened().stop.store(true, Ordering::Relaxed);
        }
    }

    fn work(&self) {
        let mut moved = self.supply.meter().counts();
        let mut sweeps = 0;
        let mut line = self.line();
        loop {
            if line.closed && line.members.is_empty() {
                return;
            }
            if let Some(action) = line.action() {
                line = self.act(line, action);
                continue;
            }
            match line.due() {
                Due::Go => {
                    let entries = line.compose();
                    drop(line);
                    sweeps += 1;
                    self.sweep(entries, sweeps, &mut moved);
                    line = self.line();
                }
                Due::Wait(time) => {
                    let idle = line.members.is_empty();
                    line = wait(&self.bell, line, time);
                    if idle {
                        // What others moved meanwhile, such as an install, is nobody's sweep.
                        moved = self.supply.meter().counts();
                    }
                }
            }
        }
    }

    fn act<'a>(&'a self, mut line: MutexGuard<'a, Line>, action: Action) -> MutexGuard<'a, Line> {
        let began = Instant::now();
        match action {
            Action::Enter(ticket) => {
                if let Some((mut offer, file)) = line.enter(ticket) {
                    drop(line);
                    let sequence = file.read(self.model.spec());
                    line = self.line();
                    let Ok(sequence) = sequence else {
                        line.spilled.failed += 1;
                        line.evict(ticket);
                        return line;
                    };
                    line.spilled.read(&file, began);
                    offer.sequence = Some(sequence);
                    if let Some(member) = line.members.get_mut(&ticket) {
                        member.place = Place::Ready(offer, Instant::now());
                    }
                }
            }
            Action::Evict(ticket) => line.evict(ticket),
            Action::Park(ticket) => {
                let folder = line.memory.spill.clone().unwrap_or_default();
                let Some(mut offer) = line.take_ready(ticket, Place::Moving) else {
                    return line;
                };
                drop(line);
                let sequence = elsewhere(&mut offer);
                let file = sequence.as_ref().map(|s| SpillFile::write(&folder, s));
                line = self.line();
                if let Some(Ok(file)) = file {
                    line.spilled.wrote(&file, began);
                    line.parked(ticket, offer, file);
                    return line;
                }
                // A full disk must slow us, not stop us: from now on who does not fit waits.
                line.spilled.failed += 1;
                line.memory.spill = None;
                offer.sequence = sequence;
                if let Some(member) = line.members.get_mut(&ticket) {
                    member.place = Place::Ready(offer, began);
                }
            }
        }
        line
    }

    fn sweep(&self, mut entries: Vec<Entry>, number: u64, moved: &mut Counts) {
        let began = Instant::now();
        let mut rows = Vec::new();
        let mut sequences: Vec<Sequence> = Vec::new();
        for (at, entry) in entries.iter_mut().enumerate() {
            let offer = &mut entry.offer;
            let whole = entry.rows == offer.tokens.len();
            rows.extend(
                offer.tokens[..entry.rows]
                    .iter()
                    .enumerate()
                    .map(|(n, &token)| Row {
                        sequence: at,
                        token,
                        logits: offer.all || (offer.last && whole && n + 1 == entry.rows),
                    }),
            );
            sequences.extend(elsewhere(offer));
        }
        self.live
            .sweeping(entries.iter().map(|e| (e.ticket, e.rows)));
        let before = Before::sweep(self, &sequences, rows.len());
        // Raised by those who left the sweep before this one, which is over.
        self.supply.opened().stop.store(false, Ordering::Relaxed);
        let mut watch = Layers {
            live: &self.live,
            left: entries.iter().map(|e| Arc::clone(&e.left)).collect(),
        };
        let swept = catch_unwind(AssertUnwindSafe(|| {
            let mut borrowed: Vec<&mut Sequence> = sequences.iter_mut().collect();
            let supply = &self.supply;
            self.model
                .sweep_shared(supply, supply, &mut borrowed, &rows, &mut watch)
        }));
        self.supply.end_of_sweep();
        let failure = match &swept {
            Ok(Ok(shared)) => shared.failure.as_ref(),
            Ok(Err(error)) => Some(error),
            Err(_) => None,
        };
        before.put_back(&mut sequences, failure);
        let took = began.elapsed();
        self.live.swept();
        let now = self.supply.meter().counts();
        let counts = now.since(moved);
        *moved = now;
        let whole = Share {
            sweep: number,
            sequences: entries.len(),
            counts,
            compute: took.saturating_sub(counts.wait_disk + counts.wait_hub),
            took,
        };
        self.hand_out(entries, sequences, &rows, swept, whole);
    }

    /// Gives everybody what is theirs.
    fn hand_out(
        &self,
        entries: Vec<Entry>,
        sequences: Vec<Sequence>,
        rows: &[Row],
        swept: std::thread::Result<Result<Shared<ResidencyError>, ResidencyError>>,
        whole: Share,
    ) {
        let mut outcome = Outcome::new(swept);
        let mut guard = self.line();
        let line = &mut *guard;
        pace(line, &entries, whole.took);
        let (mut at, mut asked) = (0, 0);
        for (index, (entry, sequence)) in entries.into_iter().zip(sequences).enumerate() {
            let mine = at..at + entry.rows;
            at = mine.end;
            let wanted = rows[mine.clone()].iter().filter(|row| row.logits).count();
            let logits = asked..asked + wanted;
            asked = logits.end;
            let share = Share {
                counts: whole.counts.share(mine.clone(), rows.len()),
                compute: part(whole.compute, &mine, rows.len()),
                ..whole
            };
            let answer = match outcome.lost(index) {
                Some(Lost::Failed(error))
                    if limit::reached(&error).is_some() && !sequence.poisoned() =>
                {
                    Err(Lost::Limited(sequence, error))
                }
                Some(lost) => Err(lost),
                None => Ok(Taken {
                    rows: entry.rows,
                    logits: outcome.logits(logits, self.model.spec().vocab),
                    routes: match entry.offer.all {
                        true => outcome.routes(mine, rows.len()),
                        false => Vec::new(),
                    },
                    sequence,
                    share,
                }),
            };
            match line.members.get_mut(&entry.ticket) {
                Some(member) => {
                    if answer.is_err() {
                        line.unclaimed += share.counts;
                    }
                    member.place = Place::Out;
                    member.answer = Some(answer);
                    member.bell.notify_all();
                }
                None => line.unclaimed += share.counts,
            }
        }
        line.handed_out(whole.took);
    }
}

/// What came of a sweep, to be cut up.
struct Outcome {
    shared: Option<Shared<ResidencyError>>,
    failure: Option<Arc<ResidencyError>>,
}

impl Outcome {
    fn new(swept: std::thread::Result<Result<Shared<ResidencyError>, ResidencyError>>) -> Outcome {
        match swept {
            Err(_) => Outcome {
                shared: None,
                failure: None,
            },
            Ok(Err(error)) => Outcome {
                shared: None,
                failure: Some(Arc::new(error)),
            },
            Ok(Ok(mut shared)) => Outcome {
                failure: shared.failure.take().map(Arc::new),
                shared: Some(shared),
            },
        }
    }

    /// Why the rows of a sequence are lost, if they are.
    fn lost(&self, sequence: usize) -> Option<Lost> {
        if let Some(shared) = &self.shared
            && !shared.lost.contains(&sequence)
        {
            return None;
        }
        Some(match (&self.failure, &self.shared) {
            (None, None) => Lost::Panicked,
            (None, Some(_)) => Lost::Stopped(None),
            (Some(error), _) => match **error {
                ResidencyError::Interrupted | ResidencyError::Model(ModelError::Abandoned) => {
                    Lost::Stopped(None)
                }
                _ => Lost::Failed(Arc::clone(error)),
            },
        })
    }

    fn logits(&mut self, rows: std::ops::Range<usize>, vocab: usize) -> Vec<f32> {
        let logits = self.shared.as_ref().map(|shared| &shared.sweep.logits);
        let mine = logits.and_then(|all| all.get(rows.start * vocab..rows.end * vocab));
        mine.map(<[f32]>::to_vec).unwrap_or_default()
    }

    fn routes(&self, rows: std::ops::Range<usize>, all: usize) -> Vec<LayerRoutes> {
        let routes = self.shared.iter().flat_map(|shared| &shared.sweep.routes);
        let mine = |routes: &LayerRoutes| {
            let k = routes.experts.len() / all.max(1);
            LayerRoutes {
                layer: routes.layer,
                experts: routes.experts[rows.start * k..rows.end * k].to_vec(),
                weights: routes.weights[rows.start * k..rows.end * k].to_vec(),
            }
        };
        routes.map(mine).collect()
    }
}

/// Learns from a sweep how much company the next may have.
fn pace(line: &mut Line, entries: &[Entry], took: Duration) {
    let awaited = |e: &&Entry| e.priority == Priority::Interactive && e.offer.decode;
    let rows = |entries: &mut dyn Iterator<Item = &Entry>| entries.map(|e| e.rows).sum::<usize>();
    if entries.iter().any(|e| awaited(&e)) {
        let company = rows(&mut entries.iter().filter(|e| !awaited(e)));
        line.pace.swept(took, company);
    }
}

/// The part of a time that some rows have.
fn part(time: Duration, mine: &std::ops::Range<usize>, rows: usize) -> Duration {
    let below = |row: usize| time.as_nanos() * row as u128 / rows.max(1) as u128;
    let nanos = below(mine.end) - below(mine.start);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Tells the live photograph which layer is at work, and the pass who has left.
struct Layers<'a> {
    live: &'a Live,
    left: Vec<Arc<AtomicBool>>,
}

impl Watch for Layers<'_> {
    fn layer(&mut self, layer: u16) {
        self.live.layer(layer);
    }

    fn left(&self, sequence: usize) -> bool {
        self.left[sequence].load(Ordering::Relaxed)
    }
}

fn wait<'a>(
    bell: &Condvar,
    line: MutexGuard<'a, Line>,
    time: Option<Duration>,
) -> MutexGuard<'a, Line> {
    match time {
        Some(time) => {
            let woken = bell.wait_timeout(line, time);
            woken.unwrap_or_else(PoisonError::into_inner).0
        }
        None => bell.wait(line).unwrap_or_else(PoisonError::into_inner),
    }
}
