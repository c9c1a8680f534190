//! Bringing whole experts and whole core files from the hub, whatever their pieces.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use bytes::BytesMut;
use sha2::Digest as _;
use sha2::Sha256;

use super::ResidencyError;
use super::open::Opened;
use crate::checkpoint::CoreFile;
use crate::checkpoint::CorePiece;
use crate::checkpoint::Part;
use crate::hub::Arrived;
use crate::hub::Class;
use crate::hub::HubError;
use crate::hub::Span;
use crate::hub::Ticket;
use crate::store::CoreWriter;
use crate::terms::ByteRange;
use crate::terms::CorePart;
use crate::terms::Digest;
use crate::terms::ExpertKey;

/// Largest single request for core bytes: long enough to amortise a round trip, short enough that
/// a fault costs little.
const CHUNK: u64 = 16 << 20;
/// Core chunks under way or waiting for their turn to be written; bounds memory at `CHUNK` each.
const WINDOW: usize = 8;
/// Neighbouring pieces closer than this are fetched in one request and the gap thrown away.
const GAP_MAX: u64 = 4096;

/// Bytes that came from a hub.
#[derive(Clone, Debug)]
pub(super) struct Fetched {
    pub(super) bytes: Bytes,
    pub(super) sha256: Digest,
    /// Whether another machine's share delivered them.
    pub(super) peer: bool,
    /// Who delivered them, for the record.
    pub(super) source: Arc<str>,
}

/// An expert whose parts arrive one by one, in any order.
struct Join<F> {
    parts: Vec<Option<Arrived>>,
    deliver: Option<F>,
}

impl Opened {
    /// Starts fetching one expert; `deliver` is called once, on a thread of the hub.
    ///
    /// # Panics
    ///
    /// If no hub may be asked: the caller knows.
    pub(super) fn fetch_expert<F>(&self, key: ExpertKey, class: Class, deliver: F) -> Vec<Ticket>
    where
        F: FnOnce(Result<Fetched, ResidencyError>) + Send + 'static,
    {
        let hub = self.hub.as_ref().expect("a hub to fetch from");
        let parts = self.layout.expert(key);
        let join = Arc::new(Mutex::new(Join {
            parts: vec![None; parts.len()],
            deliver: Some(deliver),
        }));
        parts
            .iter()
            .enumerate()
            .map(|(n, part)| {
                let join = Arc::clone(&join);
                hub.fetch(&self.snapshot, self.span(part), class, move |outcome| {
                    arrive(&join, n, outcome)
                })
            })
            .collect()
    }

    fn span(&self, part: &Part) -> Span {
        let file = self.layout.shards()[usize::from(part.shard)].as_str();
        Span {
            file: Arc::from(file),
            range: part.range,
            digest: None,
        }
    }

    /// Brings the rest of a core file, from where `writer` stands.
    ///
    /// Chunks are fetched several at a time and written in file order, so that what a stop leaves
    /// behind is always a prefix.
    pub(super) fn fetch_core(
        &self,
        file: &CoreFile,
        mut writer: CoreWriter,
        moved: &dyn Fn(u64),
    ) -> Result<std::path::PathBuf, ResidencyError> {
        let hub = self.hub.as_ref().ok_or_else(|| ResidencyError::Missing {
            repo: self.repo.clone(),
            what: format!("core part {}", file.part),
        })?;
        let mut todo: VecDeque<Chunk> = chunks(file, writer.done());
        let head_len = file.head.len() as u64;
        if writer.done() < head_len {
            let done = usize::try_from(writer.done()).unwrap_or(usize::MAX);
            writer.append(&file.head[done..])?;
        }
        let (sender, arrivals) = mpsc::channel();
        let mut under_way: BTreeMap<usize, (Chunk, Ticket)> = BTreeMap::new();
        let mut waiting: BTreeMap<usize, Bytes> = BTreeMap::new();
        let (mut started, mut next) = (0, 0);
        let mut source: Arc<str> = Arc::from("");
        while !todo.is_empty() || !under_way.is_empty() {
            while under_way.len() < WINDOW {
                let Some(chunk) = todo.pop_front() else { break };
                let (sender, n) = (sender.clone(), started);
                let ticket = hub.fetch(
                    &self.snapshot,
                    self.span(&chunk.source),
                    Class::Bulk,
                    move |outcome| {
                        let _ = sender.send((n, outcome));
                    },
                );
                under_way.insert(started, (chunk, ticket));
                started += 1;
            }
            self.check_stop()?;
            let Ok((n, outcome)) = arrivals.recv_timeout(Duration::from_millis(50)) else {
                continue;
            };
            let arrived: Arrived = outcome?;
            self.meter.core_fetched(arrived.bytes.len() as u64);
            moved(arrived.bytes.len() as u64);
            source = arrived.source;
            waiting.insert(n, arrived.bytes);
            while let Some(bytes) = waiting.remove(&next) {
                if let Some((chunk, _)) = under_way.remove(&next) {
                    chunk.write(&bytes, &mut writer)?;
                }
                next += 1;
            }
        }
        pad_to(&mut writer, file.len)?;
        Ok(writer.finish(&source)?)
    }

    /// Brings the rest of a stretch of a shard that is kept as it is.
    pub(super) fn fetch_stretch(
        &self,
        part: Part,
        writer: CoreWriter,
        moved: &dyn Fn(u64),
    ) -> Result<std::path::PathBuf, ResidencyError> {
        let file = CoreFile {
            part: CorePart::Top, // names nothing here: the writer knows its place
            head: Vec::new(),
            pieces: vec![CorePiece {
                source: part,
                offset: 0,
            }],
            len: part.range.len(),
        };
        self.fetch_core(&file, writer, moved)
    }

    /// # Errors
    ///
    /// [`ResidencyError::Interrupted`] when somebody asked to stop.
    pub(super) fn check_stop(&self) -> Result<(), ResidencyError> {
        if self.stop.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ResidencyError::Interrupted);
        }
        Ok(())
    }
}

fn arrive<F>(join: &Mutex<Join<F>>, n: usize, outcome: Result<Arrived, HubError>)
where
    F: FnOnce(Result<Fetched, ResidencyError>),
{
    let (deliver, outcome) = {
        let mut join = join.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(arrived) => {
                join.parts[n] = Some(arrived);
                if join.parts.iter().any(Option::is_none) {
                    return;
                }
                let parts = std::mem::take(&mut join.parts);
                (
                    join.deliver.take(),
                    Ok(concatenate(parts.into_iter().flatten().collect())),
                )
            }
            Err(error) => (join.deliver.take(), Err(error.into())),
        }
    };
    if let Some(deliver) = deliver {
        deliver(outcome);
    }
}

fn concatenate(mut parts: Vec<Arrived>) -> Fetched {
    let peer = parts.iter().all(|p| p.peer);
    if parts.len() == 1 {
        let only = parts.remove(0);
        return Fetched {
            bytes: only.bytes,
            sha256: only.sha256,
            peer,
            source: only.source,
        };
    }
    let mut bytes = BytesMut::with_capacity(parts.iter().map(|p| p.bytes.len()).sum());
    for part in &parts {
        bytes.extend_from_slice(&part.bytes);
    }
    let bytes = bytes.freeze();
    let sha256 = Digest(Sha256::digest(&bytes).into());
    let source = parts
        .first()
        .map_or_else(|| Arc::from(""), |p| Arc::clone(&p.source));
    Fetched {
        bytes,
        sha256,
        peer,
        source,
    }
}

/// One request's worth of a core file: a range of a shard, and the slices of it that are wanted.
struct Chunk {
    source: Part,
    /// (offset in the core file, range of the shard)
    slices: Vec<(u64, ByteRange)>,
}

impl Chunk {
    fn write(&self, bytes: &[u8], writer: &mut CoreWriter) -> Result<(), ResidencyError> {
        for (offset, range) in &self.slices {
            pad_to(writer, *offset)?;
            let from = usize::try_from(range.start - self.source.range.start).unwrap_or(usize::MAX);
            let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
            writer.append(&bytes[from..from + len])?;
        }
        Ok(())
    }
}

/// The requests that bring everything of `file` from offset `done` on, in file order.
fn chunks(file: &CoreFile, done: u64) -> VecDeque<Chunk> {
    let mut chunks: VecDeque<Chunk> = VecDeque::new();
    for piece in &file.pieces {
        let skip = done
            .saturating_sub(piece.offset)
            .min(piece.source.range.len());
        let mut start = piece.source.range.start + skip;
        let mut offset = piece.offset + skip;
        while start < piece.source.range.end {
            let end = piece.source.range.end.min(start + CHUNK);
            let slice = (offset, ByteRange::new(start, end));
            match chunks.back_mut() {
                Some(last)
                    if last.source.shard == piece.source.shard
                        && start >= last.source.range.end
                        && start - last.source.range.end <= GAP_MAX
                        && end - last.source.range.start <= CHUNK =>
                {
                    last.source.range.end = end;
                    last.slices.push(slice);
                }
                _ => chunks.push_back(Chunk {
                    source: Part {
                        shard: piece.source.shard,
                        range: slice.1,
                    },
                    slices: vec![slice],
                }),
            }
            offset += end - start;
            start = end;
        }
    }
    chunks
}

/// Appends zeros up to `offset`: tensors start on pages.
fn pad_to(writer: &mut CoreWriter, offset: u64) -> Result<(), ResidencyError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    while writer.done() < offset {
        let more = usize::try_from(offset - writer.done())
            .unwrap_or(usize::MAX)
            .min(ZEROS.len());
        writer.append(&ZEROS[..more])?;
    }
    Ok(())
}
