//! The core that passes by: pieces read ahead of the arithmetic, in its own order, round after round.
//!
//! ```text
//! pieces   0  1  2  3  4  5  6  0  1  2 ..     the reading order, cyclic: the end of a sweep leads to the next
//!             ▲ cursor      ▲ next to read
//!             └─ at most so many buffers ─┘
//! ```
//!
//! Pinned pieces are read in their turn of the first round and stay. Whoever leaves the order (a sweep that asks for no
//! distribution skips the head, a broken one begins anew) moves the cursor; what was read for nothing is given up.
//! Experts go first: their reads are waited for, these can be made up.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use memmap2::MmapMut;

use super::ResidencyError;
use super::direct;
use super::direct::DirectFile;
use super::meter::Meter;
use super::shape::Group;
use super::shape::Piece;
use super::shape::Shape;

/// Core reads at once: one keeps a disk busy, the second hides its begin and end.
const READERS: usize = 2;
/// How often a wait looks up to see whether somebody asked to stop.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// Opens the file of a part, by place in the shape.
pub(super) type OpenPart = dyn Fn(usize) -> Result<DirectFile, ResidencyError> + Send + Sync;

/// The pieces of a core, in memory or on their way.
pub(super) struct Ahead(Arc<Shared>, Vec<JoinHandle<()>>);

struct Shared {
    shape: Shape,
    pieces: Vec<Piece>,
    pins: Vec<bool>,
    /// First piece of each group of each part, and the end.
    starts: Vec<Vec<usize>>,
    pinned: Vec<OnceLock<MmapMut>>,
    files: Vec<OnceLock<DirectFile>>,
    open: Box<OpenPart>,
    meter: Arc<Meter>,
    stop: Arc<AtomicBool>,
    lock_pages: bool,
    state: Mutex<State>,
    /// Something was read.
    arrived: Condvar,
    /// A reader may have something to do.
    work: Condvar,
}

#[derive(Default)]
struct State {
    /// Place in the endless order that is asked for next: round times pieces plus piece.
    cursor: u64,
    /// Place that is read next.
    next: u64,
    ready: BTreeMap<u64, Result<MmapMut, ResidencyError>>,
    free: Vec<MmapMut>,
    /// The arithmetic stands still for a piece.
    waited_for: bool,
    /// Expert reads under way.
    experts: usize,
    /// Readers without anything to read.
    readers_waiting: usize,
    closed: bool,
}

impl Ahead {
    /// Starts reading from the first piece on. `buffers` hold a piece each.
    pub(super) fn start(
        shape: Shape,
        (pieces, pins): (Vec<Piece>, Vec<bool>),
        buffers: usize,
        open: Box<OpenPart>,
        meter: Arc<Meter>,
        stop: Arc<AtomicBool>,
    ) -> io::Result<Ahead> {
        let largest = pieces.iter().zip(&pins).filter(|(_, pin)| !**pin);
        let largest = largest.map(|(piece, _)| piece.bytes).max();
        let free = match largest {
            Some(largest) => (0..buffers.max(2))
                .map(|_| direct::memory(largest))
                .collect(),
            None => Ok(Vec::new()),
        };
        let shared = Arc::new(Shared {
            starts: starts(&shape, &pieces),
            pinned: pieces.iter().map(|_| OnceLock::new()).collect(),
            files: shape.parts.iter().map(|_| OnceLock::new()).collect(),
            shape,
            pieces,
            pins,
            open,
            meter,
            stop,
            lock_pages: super::ram::swaps(),
            state: Mutex::new(State {
                free: free?,
                ..State::default()
            }),
            arrived: Condvar::new(),
            work: Condvar::new(),
        });
        let reader = |n| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("core-read-{n}"));
            thread.spawn(move || shared.read_on())
        };
        let readers = (0..READERS).map(reader).collect::<io::Result<_>>();
        Ok(Ahead(Arc::clone(&shared), readers?))
    }

    /// The file of a part.
    pub(super) fn file(&self, part: usize) -> Result<&DirectFile, ResidencyError> {
        self.0.file(part)
    }

    /// Waits for the pieces of a group, one after the other, and shows each: first row, rows, bytes.
    pub(super) fn show(
        &self,
        part: usize,
        group: usize,
        show: &mut dyn FnMut(&Group, &Piece, &[u8]),
    ) -> Result<(), ResidencyError> {
        let shared = &*self.0;
        let shape = &shared.shape.parts[part].groups[group];
        for at in shared.starts[part][group]..shared.starts[part][group + 1] {
            let piece = &shared.pieces[at];
            if let Some(bytes) = shared.pinned[at].get() {
                show(shape, piece, bytes);
                continue;
            }
            match shared.take(at)? {
                Some(bytes) => {
                    show(shape, piece, &bytes);
                    shared.state().free.push(bytes);
                    shared.work.notify_one();
                }
                None => match shared.pinned[at].get() {
                    Some(bytes) => show(shape, piece, bytes),
                    None => return Err(ResidencyError::Interrupted),
                },
            }
        }
        Ok(())
    }

    /// Shows a group as [`Ahead::show`] does if all of it is pinned and read; `None`, and at once, if not.
    pub(super) fn show_pinned(
        &self,
        part: usize,
        group: usize,
        show: &mut dyn FnMut(&Group, &Piece, &[u8]),
    ) -> Option<()> {
        let shared = &*self.0;
        let range = shared.starts[part][group]..shared.starts[part][group + 1];
        let pinned: Option<Vec<&MmapMut>> =
            range.clone().map(|at| shared.pinned[at].get()).collect();
        for (at, bytes) in range.zip(pinned?) {
            let group = &shared.shape.parts[part].groups[group];
            show(group, &shared.pieces[at], bytes);
        }
        Some(())
    }

    /// Whether nothing of the core is being read or could be: every buffer is full, and the arithmetic has what it
    /// waits for.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.0.state();
        state.readers_waiting == READERS && !state.waited_for
    }

    /// An expert read begins: core reads hold back.
    pub(super) fn expert_begins(&self) {
        self.0.state().experts += 1;
    }

    /// It has ended.
    pub(super) fn expert_ends(&self) {
        let mut state = self.0.state();
        state.experts -= 1;
        if state.experts == 0 {
            self.0.work.notify_all();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.work.notify_all();
        for reader in self.1.drain(..) {
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, part: usize) -> Result<&DirectFile, ResidencyError> {
        match self.files[part].get() {
            Some(file) => Ok(file),
            None => {
                let file = (self.open)(part)?;
                Ok(self.files[part].get_or_init(|| file))
            }
        }
    }

    /// Waits for a piece; `None` if it was pinned meanwhile.
    fn take(&self, at: usize) -> Result<Option<MmapMut>, ResidencyError> {
        let began = Instant::now();
        let mut state = self.state();
        let count = self.pieces.len() as u64;
        // The next time that this piece comes.
        let round = state.cursor / count + u64::from((at as u64) < state.cursor % count);
        let place = round * count + at as u64;
        state.cursor = place;
        state.next = state.next.max(place);
        let kept = state.ready.split_off(&place);
        for passed in std::mem::replace(&mut state.ready, kept).into_values() {
            state.free.extend(passed.ok());
        }
        self.work.notify_all();
        let outcome = loop {
            if let Some(read) = state.ready.remove(&place) {
                break read.map(Some);
            }
            if self.pinned[at].get().is_some() {
                break Ok(None);
            }
            if self.stop.load(Ordering::Relaxed) {
                break Err(ResidencyError::Interrupted);
            }
            state.waited_for = true;
            self.work.notify_all();
            let (guard, _) = self
                .arrived
                .wait_timeout(state, STOP_CHECK)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
        };
        state.waited_for = false;
        if outcome.is_err() {
            // Whoever tries again finds it read again.
            state.next = place;
        }
        state.cursor = place + u64::from(outcome.is_ok());
        drop(state);
        self.meter.core_waited(began.elapsed());
        outcome
    }

    /// What a reader does all its life.
    fn read_on(&self) {
        while let Some((place, mut buffer)) = self.assignment() {
            let outcome = self.read(self.index(place), buffer.as_mut());
            let mut state = self.state();
            if place < state.cursor {
                // The cursor has left it behind meanwhile.
                state.free.extend(buffer);
            } else {
                let ready = match outcome {
                    Ok(()) => buffer.map(Ok),
                    Err(error) => {
                        state.free.extend(buffer);
                        Some(Err(error))
                    }
                };
                // Read twice after a failure before it.
                let twice = ready.and_then(|ready| state.ready.insert(place, ready));
                state.free.extend(twice.and_then(Result::ok));
            }
            drop(state);
            self.arrived.notify_all();
        }
    }

    fn index(&self, place: u64) -> usize {
        usize::try_from(place % self.pieces.len() as u64).unwrap_or(0)
    }

    /// Waits for a piece to read and a buffer for it, which a pinned one brings itself. `None` at the end.
    fn assignment(&self) -> Option<(u64, Option<MmapMut>)> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            let held_back = state.experts > 0 && !state.waited_for;
            // A round ahead is enough: beyond it everything is either read or pinned.
            while (self.pinned[self.index(state.next)].get().is_some()
                || state.ready.contains_key(&state.next))
                && state.next < state.cursor + self.pieces.len() as u64
            {
                state.next += 1;
            }
            let place = state.next;
            let ahead = place < state.cursor + self.pieces.len() as u64;
            if ahead && !held_back {
                if self.pins[self.index(place)] {
                    state.next += 1;
                    return Some((place, None));
                }
                if let Some(buffer) = state.free.pop() {
                    state.next += 1;
                    return Some((place, Some(buffer)));
                }
            }
            state.readers_waiting += 1;
            state = self
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.readers_waiting -= 1;
        }
    }

    /// Reads a piece into `buffer`, or without one to where it stays.
    fn read(&self, at: usize, buffer: Option<&mut MmapMut>) -> Result<(), ResidencyError> {
        let piece = &self.pieces[at];
        if let Some(buffer) = buffer {
            return self.fill(piece, buffer);
        }
        let mut memory = direct::memory(piece.bytes).map_err(|source| {
            let path = "memory for the core".to_owned();
            ResidencyError::Map { path, source }
        })?;
        self.fill(piece, &mut memory)?;
        if self.lock_pages {
            // Not allowed everywhere; it then may be swapped.
            let _ = memory.lock();
        }
        let _ = self.pinned[at].set(memory);
        Ok(())
    }

    fn fill(&self, piece: &Piece, memory: &mut MmapMut) -> Result<(), ResidencyError> {
        let file = self.file(piece.part)?;
        let group = &self.shape.parts[piece.part].groups[piece.group];
        let stride = group.stride(&piece.rows);
        let failed = |source| ResidencyError::Map {
            path: format!("core part {}", self.shape.parts[piece.part].part),
            source,
        };
        for (offset, bytes) in group.offsets.iter().zip(memory.chunks_mut(stride)) {
            let from = offset + (piece.rows.start * group.row_bytes) as u64;
            let found = file.read(bytes, from).map_err(failed)?;
            if found < piece.rows.len() * group.row_bytes {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
            self.meter.core_read(found as u64);
        }
        Ok(())
    }
}

fn starts(shape: &Shape, pieces: &[Piece]) -> Vec<Vec<usize>> {
    let first = |part, group| pieces.partition_point(|p| (p.part, p.group) < (part, group));
    let part = |(at, part): (usize, &super::shape::PartShape)| {
        (0..=part.groups.len())
            .map(|group| first(at, group))
            .collect()
    };
    shape.parts.iter().enumerate().map(part).collect()
}
