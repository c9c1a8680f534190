//! Reading ahead on a guess: what the next layer will probably choose, while the disk has nothing better to do.
//!
//! ```text
//! layer n     attention ─► foresee ─► request n ─► experts ..   layer n+1   attention ─► .. ─► request n+1
//!                             └─► guess n+1 ─► queue ─► reads, while no demanded read is under way ─┤
//!                                                                  asked for: handed over ◄─────────┤
//!                                                                  not asked for: given up ◄────────┘
//! ```
//!
//! A guess is no use of an expert: the store is asked for each expert that is demanded as if there were no guesses, and
//! where it has one, bytes that were read ahead only stand for a read. So the order in which experts go, what is fetched,
//! and every result are the same with guesses, without, and with wrong ones.

use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;

use super::core::Core;
use super::direct::DirectFile;
use super::open::Opened;
use super::pool::Pool;
use super::tier::Tier;
use crate::kernel::Isa;
use crate::model::Guesser;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

/// Whether experts are read ahead on a guess.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookahead {
    /// Never.
    #[default]
    Off,
    /// Whenever the disk is idle.
    On,
    /// As long as sweeps with guesses are measured to be faster than sweeps without.
    Auto,
    /// Whenever the disk is idle, and what the router would choose last: for tests.
    Contrary,
}

/// Most rows of a sweep that is guessed at: many rows use most of a layer, and one read serves them all.
const ROWS_MAX: usize = 8;
/// Threads that guess and read.
const READERS: usize = 4;
/// What is read at once: the longest that a demanded read may find the disk busy with a guess.
const CHUNK: usize = 1 << 20;
/// How often a thread that has something to read looks whether the disk is idle.
const LOOK: Duration = Duration::from_millis(2);

/// The machinery of guesses.
pub(super) struct Foreseer(Arc<Shared>, Vec<JoinHandle<()>>);

/// What it reads from and where to.
pub(super) struct Means {
    pub(super) opened: Opened,
    pub(super) core: Arc<Core>,
    pub(super) tier: Arc<Tier>,
    pub(super) pool: Pool,
}

/// What has become of a guess at an expert that is now demanded.
pub(super) enum Taken {
    /// Its bytes.
    Ready(Bytes),
    /// They are being read: [`Foreseer::finish`] waits for them.
    Coming,
    Nothing,
}

struct Shared {
    means: Means,
    guesser: Guesser,
    contrary: bool,
    /// Experts that may be in memory on a guess, those on their way among them.
    room: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    trial: Trial,
    sweep: u64,
    /// The layer that has last been shown in this sweep.
    seen: Option<u16>,
    /// When this sweep began, if its time may be compared with that of others.
    began: Option<Instant>,
    /// Not yet guessed at.
    job: Option<Job>,
    guess: Option<(u16, HashSet<ExpertKey>)>,
    /// What was demanded last in this sweep, for a guess that comes too late to be of use and still tells how good it is.
    asked: Option<(u16, Vec<ExpertKey>)>,
    queue: VecDeque<(ExpertKey, PathBuf)>,
    items: HashMap<ExpertKey, Item>,
    /// Reads on a guess under way, those given up among them.
    reading: usize,
    /// Demanded reads under way.
    demanded: usize,
    tickets: u64,
    closed: bool,
}

struct Job {
    sweep: u64,
    layer: u16,
    x: Vec<f32>,
}

enum Item {
    /// By the read of this number; `wanted` once it is demanded.
    Reading {
        ticket: u64,
        wanted: bool,
    },
    Ready(Bytes),
}

enum Task {
    Guess(Job),
    Read {
        key: ExpertKey,
        path: PathBuf,
        ticket: u64,
    },
}

impl Foreseer {
    /// Starts its threads. At most `room` experts are in memory on a guess.
    pub(super) fn start(
        choice: Lookahead,
        means: Means,
        isa: Isa,
        room: usize,
    ) -> io::Result<Foreseer> {
        let shared = Arc::new(Shared {
            guesser: Guesser::new(Arc::clone(&means.opened.spec), isa),
            contrary: choice == Lookahead::Contrary,
            room,
            state: Mutex::new(State {
                trial: Trial::new(choice),
                sweep: 0,
                seen: None,
                began: None,
                job: None,
                guess: None,
                asked: None,
                queue: VecDeque::new(),
                items: HashMap::new(),
                reading: 0,
                demanded: 0,
                tickets: 0,
                closed: false,
            }),
            changed: Condvar::new(),
            means,
        });
        let thread = |n| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("expert-guess-{n}"));
            thread.spawn(move || shared.work())
        };
        let threads = (0..READERS).map(thread).collect::<io::Result<_>>();
        Ok(Foreseer(Arc::clone(&shared), threads?))
    }

    /// What `layer` has been given, `x` `[rows, hidden]`: guesses at the next layer from it.
    pub(super) fn foresee(&self, layer: u16, x: &[f32]) {
        let shared = &*self.0;
        let rows = x.len() / shared.means.opened.spec.hidden.max(1);
        let mut state = shared.state();
        let few = rows <= ROWS_MAX;
        if state.seen.is_none_or(|seen| layer <= seen) {
            shared.begin(&mut state);
            state.began = few.then(Instant::now);
        }
        state.seen = Some(layer);
        let next = layer.saturating_add(1);
        if few && state.trial.runs() && shared.guesser.is_routed(next) {
            let sweep = state.sweep;
            state.job = Some(Job {
                sweep,
                layer: next,
                x: x.to_vec(),
            });
            shared.changed.notify_one();
        }
    }

    /// These experts of one layer are demanded: what was guessed besides is given up, and what is not yet being read is
    /// left to the reads on demand, of which more go on at once.
    pub(super) fn demand(&self, keys: &[ExpertKey]) {
        let shared = &*self.0;
        let Some(layer) = keys.first().map(|key| key.layer) else {
            return;
        };
        let mut state = shared.state();
        let guess = state.guess.take_if(|(guessed, _)| *guessed <= layer);
        if let Some((_, guess)) = guess.filter(|(guessed, _)| *guessed == layer) {
            shared.recall(layer, keys, &guess);
        }
        state.queue.retain(|(key, _)| key.layer > layer);
        let asked: HashSet<ExpertKey> = keys.iter().copied().collect();
        state
            .items
            .retain(|key, _| key.layer > layer || asked.contains(key));
        for key in keys {
            if let Some(Item::Reading { wanted, .. }) = state.items.get_mut(key) {
                *wanted = true;
            }
        }
        state.asked = Some((layer, keys.to_vec()));
        drop(state);
        shared.changed.notify_all();
    }

    /// What was read of a demanded expert that is on disk.
    pub(super) fn take(&self, key: ExpertKey) -> Taken {
        self.0.take(&mut self.0.state(), key)
    }

    /// Waits for a read on a guess; `None` if it has failed.
    pub(super) fn finish(&self, key: ExpertKey) -> Option<Bytes> {
        let shared = &*self.0;
        let mut state = shared.state();
        loop {
            match shared.take(&mut state, key) {
                Taken::Ready(bytes) => return Some(bytes),
                Taken::Nothing => return None,
                Taken::Coming => {}
            }
            let woken = shared.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A demanded read begins: reads on a guess hold back.
    pub(super) fn read_begins(&self) {
        self.0.state().demanded += 1;
    }

    /// It has ended.
    pub(super) fn read_ends(&self) {
        let mut state = self.0.state();
        state.demanded -= 1;
        if state.demanded == 0 {
            drop(state);
            self.0.changed.notify_all();
        }
    }

    /// A sweep is over.
    pub(super) fn end_of_sweep(&self) {
        let mut state = self.0.state();
        if let Some(began) = state.began.take() {
            state.trial.swept(began.elapsed());
        }
        self.0.begin(&mut state);
    }
}

impl Drop for Foreseer {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.closed = true;
        self.0.begin(&mut state);
        drop(state);
        for thread in self.1.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another sweep begins: nothing that was guessed holds any more.
    fn begin(&self, state: &mut State) {
        state.sweep += 1;
        state.seen = None;
        state.began = None;
        state.job = None;
        state.guess = None;
        state.asked = None;
        state.queue.clear();
        state.items.clear();
        self.changed.notify_all();
    }

    fn recall(&self, layer: u16, asked: &[ExpertKey], guess: &HashSet<ExpertKey>) {
        let foreseen = asked.iter().filter(|key| guess.contains(key)).count();
        let meter = &self.means.opened.meter;
        meter.guessed(layer, asked.len(), foreseen);
    }

    fn take(&self, state: &mut State, key: ExpertKey) -> Taken {
        match state.items.remove(&key) {
            Some(Item::Ready(bytes)) => {
                self.means.opened.meter.used_ahead(bytes.len() as u64);
                Taken::Ready(bytes)
            }
            Some(reading) => {
                state.items.insert(key, reading);
                Taken::Coming
            }
            None => Taken::Nothing,
        }
    }

    /// What a thread does all its life.
    fn work(&self) {
        while let Some(task) = self.task() {
            match task {
                Task::Guess(job) => self.guess(&job),
                Task::Read { key, path, ticket } => self.read(key, &path, ticket),
            }
        }
    }

    fn task(&self) -> Option<Task> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.job.take() {
                return Some(Task::Guess(job));
            }
            let ready = state.items.values();
            let ready = ready.filter(|item| matches!(item, Item::Ready(_))).count();
            if ready + state.reading < self.room
                && self.is_idle(&state)
                && let Some((key, path)) = state.queue.pop_front()
            {
                state.tickets += 1;
                let ticket = state.tickets;
                let wanted = false;
                state.items.insert(key, Item::Reading { ticket, wanted });
                state.reading += 1;
                return Some(Task::Read { key, path, ticket });
            }
            state = match state.queue.is_empty() {
                true => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                false => self.look(state),
            };
        }
    }

    /// Lets a moment pass, or until something changes.
    fn look<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let woken = self.changed.wait_timeout(state, LOOK);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Whether the disk has nothing better to do.
    fn is_idle(&self, state: &State) -> bool {
        state.demanded == 0
            && self
                .means
                .core
                .ahead()
                .is_none_or(super::ahead::Ahead::is_idle)
    }

    fn guess(&self, job: &Job) {
        let Means {
            opened, core, tier, ..
        } = &self.means;
        // Whatever is wrong with the core, the pass finds it itself.
        let Ok(lease) = core.part(CorePart::Layer(job.layer)) else {
            return;
        };
        let guess = self.guesser.guess(&lease, job.layer, &job.x, self.contrary);
        let Ok(Some(keys)) = guess else {
            return;
        };
        let len = opened.layout.expert_len();
        let away = keys.iter().filter(|key| !tier.holds(**key));
        let found = away.filter_map(|key| Some((*key, opened.store.peek(*key, len)?)));
        let queue: VecDeque<_> = found.collect();
        let guess: HashSet<ExpertKey> = keys.into_iter().collect();
        let mut state = self.state();
        if state.sweep != job.sweep {
            return;
        }
        match &state.asked {
            Some((layer, _)) if *layer > job.layer => {}
            Some((layer, asked)) if *layer == job.layer => {
                self.recall(*layer, asked, &guess);
            }
            _ => {
                state.guess = Some((job.layer, guess));
                state.queue = queue;
                drop(state);
                self.changed.notify_all();
            }
        }
    }

    fn read(&self, key: ExpertKey, path: &Path, ticket: u64) {
        let mut done = 0;
        let outcome = self.bytes(key, path, ticket, &mut done);
        self.means.opened.meter.read_ahead(done as u64);
        let mut state = self.state();
        state.reading -= 1;
        if state.reads(key, ticket).is_some() {
            match outcome {
                Some(bytes) => drop(state.items.insert(key, Item::Ready(bytes))),
                None => drop(state.items.remove(&key)),
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The bytes of an expert, read while the disk is idle or they are demanded; `None` if it was given up or anything is
    /// odd, which an ordinary read then finds and names.
    fn bytes(&self, key: ExpertKey, path: &Path, ticket: u64, done: &mut usize) -> Option<Bytes> {
        let len = usize::try_from(self.means.opened.layout.expert_len()).ok()?;
        let file = DirectFile::open(path).ok()?;
        if file.len().ok()? != len as u64 {
            return None;
        }
        let mut buffer = self.means.pool.take().ok()?;
        while *done < len {
            self.turn(key, ticket)?;
            let space = buffer.space();
            let end = (*done + CHUNK).min(space.len());
            let found = file.read(&mut space[*done..end], *done as u64).ok()?;
            *done += found;
            if found == 0 {
                return None;
            }
        }
        (*done == len && buffer.as_ref().len() == len).then(|| buffer.freeze())
    }

    /// Waits until the read of that number may go on; `None` if it was given up.
    fn turn(&self, key: ExpertKey, ticket: u64) -> Option<()> {
        let mut state = self.state();
        loop {
            let wanted = state.reads(key, ticket)?;
            if wanted || self.is_idle(&state) {
                return Some(());
            }
            state = self.look(state);
        }
    }
}

impl State {
    /// Whether the read of that number is demanded; `None` if it was given up.
    fn reads(&self, key: ExpertKey, number: u64) -> Option<bool> {
        match self.items.get(&key) {
            Some(Item::Reading { ticket, wanted }) if *ticket == number => Some(*wanted),
            _ => None,
        }
    }
}

/// Whether guessing pays: sweeps with and without, in turn, and the middle one of each.
#[derive(Debug)]
struct Trial {
    choice: Lookahead,
    /// Whether the sweep at hand is one with guesses.
    turn: bool,
    /// Without guesses, and with.
    times: [Vec<Duration>; 2],
    /// What was found, and for how many sweeps that holds.
    found: Option<(bool, u32)>,
}

/// Sweeps of each kind that are compared.
const COMPARED: usize = 16;
/// Sweeps after which they are compared again: what is asked for changes, and so does the disk.
const HOLDS: u32 = 1024;

impl Trial {
    fn new(choice: Lookahead) -> Trial {
        Trial {
            choice,
            turn: false,
            times: [Vec::new(), Vec::new()],
            found: None,
        }
    }

    /// Whether to guess in the sweep at hand.
    fn runs(&self) -> bool {
        match self.choice {
            Lookahead::Off => false,
            Lookahead::On | Lookahead::Contrary => true,
            Lookahead::Auto => self.found.map_or(self.turn, |(pays, _)| pays),
        }
    }

    /// The sweep at hand took so long.
    fn swept(&mut self, time: Duration) {
        if self.choice != Lookahead::Auto {
            return;
        }
        if let Some((_, left)) = &mut self.found {
            *left -= 1;
            if *left == 0 {
                self.found = None;
            }
            return;
        }
        self.times[usize::from(self.turn)].push(time);
        self.turn = !self.turn;
        if self.times.iter().all(|times| times.len() >= COMPARED) {
            let [without, with] = std::mem::take(&mut self.times).map(middle);
            self.found = Some((with < without, HOLDS));
        }
    }
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sweeps that take so many milliseconds without guesses and with them; says how many ran with.
    fn sweeps(trial: &mut Trial, count: usize, [without, with]: [u64; 2]) -> usize {
        let mut guessed = 0;
        for _ in 0..count {
            let runs = trial.runs();
            guessed += usize::from(runs);
            trial.swept(Duration::from_millis(if runs { with } else { without }));
        }
        guessed
    }

    #[test]
    fn what_does_not_pay_is_left_and_tried_again() {
        let (trial, holds) = (2 * COMPARED, HOLDS as usize);
        let mut auto = Trial::new(Lookahead::Auto);
        assert_eq!(sweeps(&mut auto, trial, [10, 11]), COMPARED);
        assert_eq!(sweeps(&mut auto, holds, [10, 11]), 0);
        // No gain is not a gain.
        assert_eq!(sweeps(&mut auto, trial, [10, 10]), COMPARED);
        assert_eq!(sweeps(&mut auto, holds, [10, 10]), 0);
        assert_eq!(sweeps(&mut auto, trial, [10, 8]), COMPARED);
        assert_eq!(sweeps(&mut auto, holds, [10, 8]), holds);
        assert_eq!(sweeps(&mut auto, trial, [10, 12]), COMPARED);
        assert!(!auto.runs());
        assert_eq!(sweeps(&mut Trial::new(Lookahead::On), 99, [1, 2]), 99);
        assert_eq!(sweeps(&mut Trial::new(Lookahead::Off), 99, [2, 1]), 0);
    }
}
