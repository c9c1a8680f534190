//! How fast this machine is: measured in about a second, by doing what a token does.

use std::collections::HashMap;
use std::io;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use super::Opened;
use super::ResidencyError;
use super::direct;
use super::direct::DirectFile;
use super::fetch::Fetched;
use super::shape::Shape;
use crate::checkpoint::Dtype;
use crate::checkpoint::ExpertShape;
use crate::hub::Class;
use crate::kernel::Activation;
use crate::kernel::Kernel;
use crate::kernel::Matrix;

/// How a disk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reads {
    /// Bytes of one read.
    pub len: usize,
    /// Reads under way at once.
    pub deep: usize,
}

/// As nothing in particular does it: what reports of different machines compare by.
pub const READS: Reads = Reads {
    len: 4 << 20,
    deep: 4,
};
/// A read is no smaller here, and no larger.
const READ_MIN: usize = 64 << 10;
const READ_MAX: usize = 32 << 20;
/// Time given to each measurement.
const TIME: Duration = Duration::from_millis(600);
/// Bytes written where there is nothing to read.
const MADE: usize = 128 << 20;
/// Bytes of weights that are multiplied with: more than most processors' caches hold, if there is room.
const ARENA_MAX: u64 = 384 << 20;
const ARENA_MIN: u64 = 16 << 20;
/// Rows of a prompt at once.
const MANY: usize = 64;
/// Of these, rows that go to one expert.
const SOME: usize = 8;

/// The rate of direct reads from `files`, or from one that is made in `folder` for this and removed, in bytes a second.
///
/// # Errors
///
/// If nothing can be read, or made.
pub fn disk(files: &[PathBuf], folder: &Path, reads: Reads) -> io::Result<f64> {
    let reads = Reads {
        len: reads.len.clamp(READ_MIN, READ_MAX).next_multiple_of(4096),
        deep: reads.deep.max(1),
    };
    let mut open = Vec::new();
    for path in files {
        let file = DirectFile::open(path)?;
        let len = file.len()?;
        open.push((file, len));
    }
    if open.iter().map(|(_, len)| len).sum::<u64>() < MADE as u64 {
        let mut made = tempfile::NamedTempFile::new_in(folder)?;
        let block = vec![0x5a; READS.len];
        for _ in 0..MADE / READS.len {
            made.write_all(&block)?;
        }
        made.as_file().sync_all()?;
        let file = DirectFile::open(made.path())?;
        return read(&[(file, MADE as u64)], reads);
    }
    read(&open, reads)
}

fn read(files: &[(DirectFile, u64)], reads: Reads) -> io::Result<f64> {
    let places: Vec<(usize, u64, usize)> = files
        .iter()
        .enumerate()
        .flat_map(|(n, (_, len))| {
            (0..*len)
                .step_by(reads.len)
                .map(move |at| (n, at, reads.len))
        })
        .collect();
    let files: Vec<&DirectFile> = files.iter().map(|(file, _)| file).collect();
    each(&files, &places, reads.deep)
}

/// The rate of these reads (a number of `files`, where, and how many bytes), in this order and `deep` at once, in bytes a
/// second.
///
/// # Errors
///
/// If a file cannot be read.
pub fn replay(files: &[PathBuf], places: &[(usize, u64, usize)], deep: usize) -> io::Result<f64> {
    let open: io::Result<Vec<DirectFile>> = files.iter().map(|f| DirectFile::open(f)).collect();
    let open = open?;
    let files: Vec<&DirectFile> = open.iter().collect();
    // Twice: a sweep is not the first to read this, and whatever else the disk had to do made it slower, never faster.
    let first = each(&files, places, deep.max(1))?;
    Ok(first.max(each(&files, places, deep.max(1))?))
}

fn each(files: &[&DirectFile], places: &[(usize, u64, usize)], deep: usize) -> io::Result<f64> {
    let largest = places.iter().map(|(_, _, len)| *len).max().unwrap_or(0);
    let began = Instant::now();
    let next = AtomicUsize::new(0);
    let bytes = std::thread::scope(|scope| -> io::Result<u64> {
        let reader = || -> io::Result<u64> {
            let mut buffer = direct::memory(largest)?;
            let mut bytes = 0;
            while began.elapsed() < TIME && !places.is_empty() {
                let n = next.fetch_add(1, Ordering::Relaxed) % places.len();
                let (file, at, len) = places[n];
                bytes += files[file].read(&mut buffer[..len], at)? as u64;
            }
            Ok(bytes)
        };
        let readers: Vec<_> = (0..deep).map(|_| scope.spawn(reader)).collect();
        readers
            .into_iter()
            .map(|thread| {
                let gone = |_| Err(io::Error::other("a reader ended early"));
                thread.join().unwrap_or_else(gone)
            })
            .sum()
    })?;
    Ok(bytes as f64 / began.elapsed().as_secs_f64())
}

/// Time to measure a link for: connections have to find its rate first.
pub const LINK_TIME: Duration = Duration::from_secs(2);
/// Experts under way at once while a link is measured.
const LINK_WINDOW: usize = 24;
/// How often a wait looks up to see whether somebody asked to stop.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// The rate at which the hub delivers experts, in bytes a second, over `time`, or longer where one takes longer. They
/// are not kept.
///
/// # Errors
///
/// If the hub fails, if somebody asks to stop, or if there is no hub or no expert.
pub fn link(opened: &Opened, time: Duration) -> Result<f64, ResidencyError> {
    let keys = opened.keys(None);
    if opened.hub.is_none() || keys.is_empty() {
        return Err(ResidencyError::Missing {
            repo: opened.repo.clone(),
            what: "a hub, or an expert to fetch".to_owned(),
        });
    }
    let moved = || opened.hub.as_ref().map_or(0, |hub| hub.stats().body_bytes);
    let (sender, arrivals) = mpsc::channel();
    let begin = |(n, key)| {
        let sender = sender.clone();
        let deliver = move |outcome: Result<Fetched, _>| drop(sender.send((n, outcome.map(drop))));
        (n, opened.fetch_expert(key, Class::Demand, deliver))
    };
    let (began, before) = (Instant::now(), moved());
    let mut keys = keys.iter().copied().cycle().enumerate();
    // Whoever drops a ticket no longer wants what it is for.
    let mut tickets: HashMap<usize, _> = keys.by_ref().take(LINK_WINDOW).map(begin).collect();
    let mut first = None;
    loop {
        if opened.stop.load(Ordering::Relaxed) {
            return Err(ResidencyError::Interrupted);
        }
        if let Ok((n, outcome)) = arrivals.recv_timeout(STOP_CHECK) {
            outcome?;
            tickets.remove(&n);
            tickets.extend(keys.next().map(begin));
        }
        // Bytes as they come: on a slow link many experts arrive together, after a long time. In the first quarter
        // addresses are asked for and connections made.
        let (now, bytes) = (Instant::now(), moved());
        match first {
            None if bytes > before && began.elapsed() > time / 4 => first = Some((now, bytes)),
            Some((at, had)) if bytes > had && began.elapsed() > time => {
                return Ok((bytes - had) as f64 / (now - at).as_secs_f64().max(1e-9));
            }
            _ => {}
        }
    }
}

/// How fast arithmetic is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    /// Bytes of core a second, one row at a time.
    pub core: f64,
    /// Bytes of experts a second, one row at a time.
    pub experts: f64,
    /// Multiply-adds a second of the core with many rows.
    pub many: f64,
    /// Multiply-adds a second of experts with some rows each.
    pub many_experts: f64,
}

/// What arithmetic does here with matrices of this model's sizes, no two in a row the same: weights come from memory,
/// not from a processor's cache, and small matrices are slower than large ones. Takes `memory` bytes.
pub fn arithmetic(kernel: &Kernel, act: Activation, shape: &Shape, memory: u64) -> Arithmetic {
    let memory = memory.clamp(ARENA_MIN, ARENA_MAX);
    let mut arena = Arena {
        bytes: vec![0x3c; usize::try_from(memory).unwrap_or(0)],
        at: 0,
    };
    let layer = shape.parts.get(shape.parts.len() / 2);
    let groups = layer.into_iter().flat_map(|part| &part.groups);
    // Rows and columns.
    let mut core: Vec<(usize, usize)> = groups
        .filter(|group| group.dtype == Dtype::BF16)
        .flat_map(|group| {
            group
                .names
                .iter()
                .map(|_| (group.rows, group.row_bytes / 2))
        })
        .collect();
    if core.is_empty() {
        core.push((shape.spec.hidden, shape.spec.hidden));
    }
    let expert = shape.spec.expert_shape();
    kernel.install(|| {
        let (bytes, time) = pass(&mut arena, &core, kernel, 1);
        let (many_bytes, many_time) = pass(&mut arena, &core, kernel, MANY);
        let core = bytes / time;
        let many = many_bytes / 2.0 * MANY as f64 / many_time;
        let Some(expert) = expert else {
            return Arithmetic {
                core,
                experts: core,
                many,
                many_experts: many,
            };
        };
        let values = 3.0 * (expert.inner * expert.width) as f64;
        let one = experts(&mut arena, expert, kernel, act, 1);
        let some = experts(&mut arena, expert, kernel, act, SOME);
        Arithmetic {
            core,
            experts: expert.bytes() as f64 / one,
            many,
            many_experts: values * SOME as f64 / some,
        }
    })
}

/// Weights, handed out one after another, and from the beginning again.
struct Arena {
    bytes: Vec<u8>,
    at: usize,
}

impl Arena {
    /// Makes sure that the next `len` bytes come in one piece.
    fn room(&mut self, len: usize) -> usize {
        if self.at + len > self.bytes.len() {
            self.at = 0;
        }
        let at = self.at;
        self.at += len.next_multiple_of(64);
        at
    }
}

/// Multiplies a layer's matrices with `rows` rows again and again; gives bytes of weights and seconds of one time.
fn pass(arena: &mut Arena, layer: &[(usize, usize)], kernel: &Kernel, rows: usize) -> (f64, f64) {
    let most = arena.bytes.len() / 2;
    // A matrix that is too large for the arena is as fast as its first rows.
    let fit = |(r, c): (usize, usize)| (r.min((most / (2 * c).max(1)).max(1)), c);
    let layer: Vec<(usize, usize)> = layer.iter().map(|size| fit(*size)).collect();
    let widest = layer.iter().map(|(_, c)| *c).max().unwrap_or(0);
    let tallest = layer.iter().map(|(r, _)| *r).max().unwrap_or(0);
    let (x, mut y) = (vec![0.01; rows * widest], vec![0.0; rows * tallest]);
    let bytes: usize = layer.iter().map(|(r, c)| 2 * r * c).sum();
    let time = median(|| {
        for &(r, c) in &layer {
            let at = arena.room(2 * r * c);
            let matrix = Matrix::bf16(&arena.bytes[at..at + 2 * r * c], r, c);
            kernel.matmul(matrix, &x[..rows * c], &mut y[..rows * r]);
        }
    });
    (bytes as f64, time)
}

/// Seconds of one expert with `rows` rows.
fn experts(
    arena: &mut Arena,
    shape: ExpertShape,
    kernel: &Kernel,
    act: Activation,
    rows: usize,
) -> f64 {
    let (inner, width) = (shape.inner, shape.width);
    let (main, scale) = shape.matrix_bytes();
    let scales = vec![120; scale];
    let (x, mut product) = (vec![0.01; rows * width], vec![0.0; rows * inner]);
    let mut y = vec![0.0; rows * width];
    median(|| {
        let at = arena.room(3 * main);
        let part = |n: usize| &arena.bytes[at + n * main..at + (n + 1) * main];
        let matrix = |n: usize, r: usize, c: usize| match shape.packed {
            true => Matrix::mxfp4(part(n), &scales, r, c),
            false => Matrix::bf16(part(n), r, c),
        };
        let (gate, up) = (matrix(0, inner, width), matrix(1, inner, width));
        kernel.gated(gate, up, act, &x, &mut product);
        kernel.matmul(matrix(2, width, inner), &product, &mut y);
    })
}

/// Seconds of one call; the median of several.
fn median(mut call: impl FnMut()) -> f64 {
    call(); // memory is touched, threads are awake
    let began = Instant::now();
    let mut times = Vec::new();
    while times.len() < 3 || (began.elapsed() < TIME / 3 && times.len() < 1000) {
        let before = Instant::now();
        call();
        times.push(before.elapsed());
    }
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64().max(1e-9)
}
