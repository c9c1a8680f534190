//! Core files, and what the text engine never reads: fetched once, in order, written as they come.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::ResidencyError;
use super::lanes::Halt;
use super::open::Opened;
use crate::checkpoint::CoreFile;
use crate::checkpoint::CorePiece;
use crate::checkpoint::Part;
use crate::hub::Class;
use crate::hub::HubError;
use crate::hub::Streamed;
use crate::store::CoreWriter;
use crate::terms::ByteRange;
use crate::terms::CorePart;

/// Largest single request: a round trip is nothing beside it, and nothing of it is held in memory.
pub(super) const RUN_MAX: u64 = 128 << 20;
/// Where several sources may each hold something, a request this large still finds it in one of them.
const RUN_SHARED: u64 = 16 << 20;
/// A limit of bytes that is nearly reached is used up in requests of at least this size.
const RUN_MIN: u64 = 1 << 20;
/// Neighbouring pieces closer than this are fetched in one request and the gap thrown away.
const GAP_MAX: u64 = 4096;
/// How often a wait looks up to see whether somebody asked to stop.
pub(super) const STOP_CHECK: Duration = Duration::from_millis(50);
/// A range that has to be begun anew this often will not come.
pub(super) const BEGINNINGS_MAX: u32 = 5;

impl Opened {
    /// How much one request asks for at most.
    pub(super) fn run_max(&self) -> u64 {
        let sources = self.hub.as_ref().map_or(1, |h| h.stats().sources.len());
        if sources > 1 { RUN_SHARED } else { RUN_MAX }
    }

    /// Brings the rest of a core file, from where `writer` stands. What a stop leaves behind is
    /// always a prefix.
    pub(super) fn fetch_core(
        &self,
        file: &CoreFile,
        mut writer: CoreWriter,
        halt: &Halt<'_>,
        moved: &dyn Fn(u64),
    ) -> Result<PathBuf, ResidencyError> {
        let head_len = file.head.len() as u64;
        if writer.done() < head_len {
            let done = usize::try_from(writer.done()).unwrap_or(usize::MAX);
            writer.append(&file.head[done..])?;
        }
        let mut source: Arc<str> = Arc::from("");
        let (mut run, mut beginnings) = (self.run_max(), 0);
        loop {
            let todo = chunks(file, writer.done(), run);
            match self.stream_chunks(file, todo, &mut writer, &mut source, halt, moved) {
                Ok(()) => break,
                Err(ResidencyError::Hub(HubError::CapReached { .. })) if run > RUN_MIN => run /= 8,
                Err(ResidencyError::Hub(HubError::Discontinued { .. }))
                    if beginnings < BEGINNINGS_MAX =>
                {
                    beginnings += 1;
                }
                Err(error) => return Err(error),
            }
        }
        pad_to(&mut writer, file.len)?;
        Ok(writer.finish(&source)?)
    }

    fn stream_chunks(
        &self,
        file: &CoreFile,
        todo: VecDeque<Chunk>,
        writer: &mut CoreWriter,
        from: &mut Arc<str>,
        halt: &Halt<'_>,
        moved: &dyn Fn(u64),
    ) -> Result<(), ResidencyError> {
        for chunk in todo {
            let hub = self.hub.as_ref().ok_or_else(|| ResidencyError::Missing {
                repo: self.repo.clone(),
                what: format!("core part {}", file.part),
            })?;
            let span = self.span(&chunk.source);
            let mut stream = hub.stream(&self.snapshot, span, Class::Bulk);
            let mut cursor = Cursor::new(&chunk);
            loop {
                match stream.next(STOP_CHECK)? {
                    Streamed::Quiet => halt.check()?,
                    Streamed::End => break,
                    Streamed::Piece { bytes, source } => {
                        *from = source;
                        self.meter.core_fetched(bytes.len() as u64);
                        moved(bytes.len() as u64);
                        cursor.take(&bytes, writer)?;
                        halt.check()?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Brings the rest of a stretch of a shard that is kept as it is.
    pub(super) fn fetch_stretch(
        &self,
        part: Part,
        writer: CoreWriter,
        halt: &Halt<'_>,
        moved: &dyn Fn(u64),
    ) -> Result<PathBuf, ResidencyError> {
        let file = CoreFile {
            part: CorePart::Top, // names nothing here: the writer knows its place
            head: Vec::new(),
            pieces: vec![CorePiece {
                source: part,
                offset: 0,
            }],
            len: part.range.len(),
        };
        self.fetch_core(&file, writer, halt, moved)
    }
}

/// One request's worth of a core file: a range of a shard, and the slices of it that are wanted.
struct Chunk {
    source: Part,
    /// (offset in the core file, range of the shard)
    slices: Vec<(u64, ByteRange)>,
}

/// How far into a chunk its bytes have come.
struct Cursor<'a> {
    chunk: &'a Chunk,
    /// The next byte's place in the shard.
    at: u64,
    slice: usize,
}

impl<'a> Cursor<'a> {
    fn new(chunk: &'a Chunk) -> Self {
        let at = chunk.source.range.start;
        Cursor {
            chunk,
            at,
            slice: 0,
        }
    }

    fn take(&mut self, mut bytes: &[u8], writer: &mut CoreWriter) -> Result<(), ResidencyError> {
        while let Some((offset, range)) = self.chunk.slices.get(self.slice) {
            if bytes.is_empty() {
                break;
            }
            let wanted = self.at >= range.start;
            let upto = if wanted { range.end } else { range.start };
            let step = usize::try_from(upto - self.at).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(step.min(bytes.len()));
            if wanted {
                pad_to(writer, offset + (self.at - range.start))?;
                writer.append(now)?;
            }
            self.at += now.len() as u64;
            bytes = later;
            if self.at == range.end {
                self.slice += 1;
            }
        }
        Ok(())
    }
}

/// The requests that bring everything of `file` from offset `done` on, in file order, each of at most
/// `most` bytes.
fn chunks(file: &CoreFile, done: u64, most: u64) -> VecDeque<Chunk> {
    let mut chunks: VecDeque<Chunk> = VecDeque::new();
    for piece in &file.pieces {
        let skip = done
            .saturating_sub(piece.offset)
            .min(piece.source.range.len());
        let mut start = piece.source.range.start + skip;
        let mut offset = piece.offset + skip;
        while start < piece.source.range.end {
            let end = piece.source.range.end.min(start + most);
            let slice = (offset, ByteRange::new(start, end));
            match chunks.back_mut() {
                Some(last)
                    if last.source.shard == piece.source.shard
                        && start >= last.source.range.end
                        && start - last.source.range.end <= GAP_MAX
                        && end - last.source.range.start <= most =>
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
