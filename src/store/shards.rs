//! Shards, put together again from the files in which their bytes are kept.
//!
//! ```text
//! shard on the hub    | 8 + N | tensor | tensor | expert 7 | expert 0 | vision ...  |
//! held in             headers/  core/003 core/top experts/…  experts/…  rest/SHARD/A-B
//! ```
//!
//! A full install proves itself with this: the whole shard's sha256 is the one the hub publishes.
//! `share` serves from it. Nothing is kept twice for either.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;

use sha2::Digest as _;
use sha2::Sha256;

use super::ModelStore;
use super::core::rest_path;
use super::disk::DiskFile;
use super::disk::How;
use super::error::StoreError;
use super::lease::Read;
use super::lock;
use super::table::Known;
use super::table::Level;
use super::table::Line;
use super::table::Subject;
use crate::checkpoint::Layout;
use crate::checkpoint::Part;
use crate::terms::ByteRange;
use crate::terms::CorePart;
use crate::terms::Digest;
use crate::terms::ExpertKey;

/// Read back in pieces of this size.
const PIECE: u64 = 4 << 20;

/// What holds a stretch of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The shard's header file; a shard's first stretch.
    Header,
    /// A core file, from `offset` on.
    Core {
        /// Which one.
        part: CorePart,
        /// Where in it.
        offset: u64,
    },
    /// An expert's file, from `offset` on.
    Expert {
        /// Which one.
        key: ExpertKey,
        /// Where in it.
        offset: u64,
    },
    /// A file of its own.
    Rest,
}

/// Neighbouring bytes of a shard that are held in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Which bytes of the shard.
    pub range: ByteRange,
    /// Where they are.
    pub holder: Holder,
}

/// Where the bytes of every shard of a checkpoint are held.
#[derive(Clone, Debug)]
pub struct Shards {
    names: Vec<String>,
    /// For each shard its stretches, in the order of their ranges, without a gap from byte 0 on.
    stretches: Vec<Vec<Stretch>>,
    core_lens: Vec<(CorePart, u64)>,
    expert_len: u64,
}

/// What a full install still has to fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// Core files, each with the bytes of it that are there.
    pub core: Vec<(CorePart, u64)>,
    /// Bytes of core files that are not there.
    pub core_bytes: u64,
    /// Experts, in the order of their keys.
    pub experts: Vec<ExpertKey>,
    /// Their bytes.
    pub expert_bytes: u64,
    /// Stretches that the text engine never reads.
    pub rest: Vec<Part>,
    /// Their bytes.
    pub rest_bytes: u64,
}

/// What the comparison of a whole shard with the hub's digest has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Equal: everything it is made of is proved as far as the hub can prove it.
    Whole,
    /// The hub publishes no digest of this file.
    Unpublished,
    /// Not equal, although each part is what once arrived: a first arrival was wrong.
    Different {
        /// The hub's digest.
        expected: Digest,
        /// Ours.
        actual: Digest,
    },
}

impl Shards {
    /// Maps a checkpoint.
    pub fn new(layout: &Layout) -> Self {
        let mut stretches: Vec<Vec<Stretch>> = vec![Vec::new(); layout.shards().len()];
        let mut add = |source: Part, holder| {
            let range = source.range;
            if !range.is_empty() {
                stretches[usize::from(source.shard)].push(Stretch { range, holder });
            }
        };
        for file in layout.core() {
            let part = file.part;
            for piece in &file.pieces {
                let offset = piece.offset;
                add(piece.source, Holder::Core { part, offset });
            }
        }
        for key in expert_keys(layout) {
            let mut offset = 0;
            for part in layout.expert(key) {
                add(*part, Holder::Expert { key, offset });
                offset += part.range.len();
            }
        }
        for part in layout.rest() {
            add(*part, Holder::Rest);
        }
        for stretches in &mut stretches {
            stretches.sort_unstable_by_key(|s| s.range);
            if let Some(first) = stretches.first().map(|s| s.range.start) {
                let range = ByteRange::new(0, first);
                let holder = Holder::Header;
                stretches.insert(0, Stretch { range, holder });
            }
        }
        let core_lens = layout.core().iter().map(|file| (file.part, file.len));
        Shards {
            names: layout.shards().to_vec(),
            stretches,
            core_lens: core_lens.collect(),
            expert_len: layout.expert_len(),
        }
    }

    /// The shards' names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Where the bytes of a shard are held, from its first byte to its last. Empty for a name that is
    /// no shard's, and for a shard without tensors.
    pub fn stretches(&self, shard: &str) -> &[Stretch] {
        let place = self.names.iter().position(|name| name == shard);
        place.map_or(&[], |place| &self.stretches[place])
    }

    /// Bytes of a shard: 0 for a name that is no shard's.
    pub fn size(&self, shard: &str) -> u64 {
        self.stretches(shard).last().map_or(0, |s| s.range.end)
    }
}

/// Every expert of a checkpoint, in the order of the keys.
fn expert_keys(layout: &Layout) -> impl Iterator<Item = ExpertKey> + '_ {
    let layers = (0..=u16::MAX).take(layout.core().len());
    layers.flat_map(move |layer| {
        let experts = (0..=u16::MAX).map(move |expert| ExpertKey { layer, expert });
        experts.take_while(|key| layout.has_expert(*key))
    })
}

impl ModelStore {
    /// What is not here yet of a whole checkpoint, its headers apart.
    pub fn missing(&self, layout: &Layout) -> Missing {
        let mut missing = Missing::default();
        for file in layout.core() {
            if self.core_ready(file.part, file.len).is_none() {
                let done = self.core_done(file.part, file.len);
                missing.core.push((file.part, done));
                missing.core_bytes += file.len - done;
            }
        }
        let len = layout.expert_len();
        let here: HashSet<ExpertKey> = {
            let state = lock(&self.store().inner.state);
            let entries = state.index.of_model(self.record().id);
            let whole = entries.filter(|(_, entry)| entry.len == len);
            whole.map(|(id, _)| id.key).collect()
        };
        let absent = expert_keys(layout).filter(|key| !here.contains(key));
        missing.experts = absent.collect();
        missing.expert_bytes = missing.experts.len() as u64 * len;
        for part in layout.rest() {
            if self.rest_ready(layout.shard(*part), part.range).is_none() {
                missing.rest.push(*part);
                missing.rest_bytes += part.range.len();
            }
        }
        missing
    }

    /// Whether all of `range` of a shard is here.
    pub fn has_range(&self, shards: &Shards, shard: &str, range: ByteRange) -> bool {
        let held = overlapping(shards.stretches(shard), range);
        range.end <= shards.size(shard) && held.iter().all(|s| self.holds(shards, shard, s))
    }

    /// Reads bytes of a shard, filling `bytes` from `offset` on. Experts are checked as
    /// [`super::Lease::read`] checks them, but do not count as used.
    ///
    /// # Errors
    ///
    /// [`StoreError::Absent`] if some of them are not here.
    pub fn read_shard(
        &self,
        shards: &Shards,
        shard: &str,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        self.read_shard_by(<dyn DiskFile>::read_at, shards, (shard, offset), bytes)
    }

    fn read_shard_by(
        &self,
        read: Read,
        shards: &Shards,
        (shard, offset): (&str, u64),
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        let range = ByteRange::new(offset, offset.saturating_add(bytes.len() as u64));
        if range.end > shards.size(shard) {
            return Err(absent(shard, range));
        }
        for stretch in overlapping(shards.stretches(shard), range) {
            let start = stretch.range.start.max(range.start);
            let end = stretch.range.end.min(range.end);
            let (from, to) = (start - range.start, end - range.start);
            // Both are within `bytes`, whose length is a `usize`.
            let into = &mut bytes[from as usize..to as usize];
            let skip = start - stretch.range.start;
            self.read_stretch(read, shards, (shard, stretch), skip, into)?;
        }
        Ok(())
    }

    fn read_stretch(
        &self,
        read: Read,
        shards: &Shards,
        (shard, stretch): (&str, &Stretch),
        skip: u64,
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let gone = || absent(shard, stretch.range);
        let (path, offset) = match stretch.holder {
            Holder::Expert { key, offset } => {
                let lease = self.lease(key, shards.expert_len).ok_or_else(gone)?;
                return match lease.read_by(read, offset + skip, into) {
                    Err(e) if e.refetch() => Err(gone()),
                    other => other,
                };
            }
            _ if !self.holds(shards, shard, stretch) => return Err(gone()),
            Holder::Header => (self.folder().join("headers").join(shard), skip),
            Holder::Core { part, offset } => {
                let path = self.folder().join(format!("core/{part}"));
                (path, offset + skip)
            }
            Holder::Rest => (self.folder().join(rest_path(shard, stretch.range)), skip),
        };
        let file = self.store().inner.disk.open(&path, How::Read);
        let filled = file.and_then(|file| read(&*file, into, offset));
        filled.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => gone(),
            _ => StoreError::io("read", &path, e),
        })
    }

    fn holds(&self, shards: &Shards, shard: &str, stretch: &Stretch) -> bool {
        let disk = &self.store().inner.disk;
        match stretch.holder {
            Holder::Header => {
                let path: PathBuf = self.folder().join("headers").join(shard);
                disk.facts(&path)
                    .is_ok_and(|f| f.len == stretch.range.len())
            }
            Holder::Core { part, .. } => {
                let mut lens = shards.core_lens.iter();
                let len = lens.find(|(p, _)| *p == part).map_or(0, |(_, len)| *len);
                self.core_ready(part, len).is_some()
            }
            Holder::Expert { key, .. } => self.contains(key, shards.expert_len),
            Holder::Rest => self.rest_ready(shard, stretch.range).is_some(),
        }
    }

    /// Says that a shard's bytes, as they are held here, have the digest `actual`. If that is the
    /// hub's, every file that now stands in whole shards alone rises to [`Level::WholeShard`].
    pub fn confirm_shard(
        &self,
        shards: &Shards,
        shard: &str,
        actual: Digest,
    ) -> Result<Verdict, StoreError> {
        let source = self.source()?;
        let file = source.and_then(|s| s.files.get(shard).copied());
        let Some((size, expected)) = file.and_then(|f| Some((f.size, f.sha256?))) else {
            return Ok(Verdict::Unpublished);
        };
        if expected != actual {
            return Ok(Verdict::Different { expected, actual });
        }
        let known = Known {
            sha256: actual,
            length: size,
            level: Level::WholeShard,
        };
        let whole = Line {
            subject: whole_subject(shard),
            known,
            quick: None,
            source: "hub",
            checked: true,
        };
        self.append(&[whole])?;
        let risen = self.risen_with(shards, shard)?;
        self.append(&risen)?;
        Ok(Verdict::Whole)
    }

    /// Whether the whole of a shard was compared with the hub's digest.
    pub fn is_confirmed(&self, shard: &str) -> Result<bool, StoreError> {
        Ok(self.told(&whole_subject(shard))?.is_some())
    }

    /// Lines for every file of `shard` whose bytes lie in confirmed shards alone.
    fn risen_with(&self, shards: &Shards, shard: &str) -> Result<Vec<Line<'static>>, StoreError> {
        let mut open = HashSet::new();
        for name in &shards.names {
            if !self.is_confirmed(name)? {
                let unproved = shards.stretches(name).iter();
                open.extend(unproved.map(|s| subject_of(name, s)));
            }
        }
        let mut risen: Vec<Line<'static>> = Vec::new();
        let mut seen = HashSet::new();
        for stretch in shards.stretches(shard) {
            let subject = subject_of(shard, stretch);
            if open.contains(&subject) || !seen.insert(subject.clone()) {
                continue;
            }
            if let Some(known) = self.told(&subject)?
                && known.level < Level::WholeShard
            {
                let level = Level::WholeShard;
                risen.push(Line {
                    subject,
                    known: Known { level, ..known },
                    quick: None,
                    source: "hub",
                    checked: true,
                });
            }
        }
        Ok(risen)
    }

    pub(super) fn told(&self, subject: &Subject) -> Result<Option<Known>, StoreError> {
        let log = &self.record().log;
        let told = log.get(subject);
        let told = told.map_err(|e| StoreError::io("read", log.path(), e))?;
        Ok(told.map(|told| told.known))
    }

    pub(super) fn append(&self, lines: &[Line<'_>]) -> Result<(), StoreError> {
        let log = &self.record().log;
        let written = log.append(lines);
        written.map_err(|e| StoreError::io("write", log.path(), e))?;
        Ok(())
    }
}

/// A shard's sha256, computed as its bytes come by in order; what came out of order, or in an earlier
/// run, is read back from disk once.
#[derive(Clone)]
pub struct ShardDigest {
    shard: String,
    at: u64,
    hasher: Sha256,
}

impl ShardDigest {
    /// Nothing seen yet.
    pub fn new(shard: &str) -> Self {
        ShardDigest {
            shard: shard.to_owned(),
            at: 0,
            hasher: Sha256::new(),
        }
    }

    /// Bytes hashed so far: the first that are missing begin here.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Takes in bytes of the shard that begin at `offset`, if they continue what was seen.
    pub fn feed(&mut self, offset: u64, bytes: &[u8]) {
        let seen = self.at.checked_sub(offset).map(usize::try_from);
        if let Some(fresh) = seen.and_then(|seen| bytes.get(seen.ok()?..)) {
            self.hasher.update(fresh);
            self.at += fresh.len() as u64;
        }
    }

    /// Reads back up to `end` what has not come by.
    pub fn catch_up(
        &mut self,
        model: &ModelStore,
        shards: &Shards,
        end: u64,
    ) -> Result<(), StoreError> {
        let mut bytes = Vec::new();
        while self.at < end {
            let ahead = overlapping(shards.stretches(&self.shard), ByteRange::new(self.at, end));
            // An expert is read, and checked, as a whole; else in pieces.
            let stop = ahead.first().map_or(end, |s| s.range.end).min(end);
            let expert =
                matches!(ahead.first(), Some(s) if matches!(s.holder, Holder::Expert { .. }));
            let len = if expert {
                stop - self.at
            } else {
                PIECE.min(stop - self.at)
            };
            bytes.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            let read = <dyn DiskFile>::read_back;
            model.read_shard_by(read, shards, (&self.shard, self.at), &mut bytes)?;
            self.hasher.update(&bytes);
            self.at += len;
        }
        Ok(())
    }

    /// The digest of the whole shard.
    ///
    /// # Errors
    ///
    /// [`StoreError::Absent`] if some of it is not here.
    pub fn finish(mut self, model: &ModelStore, shards: &Shards) -> Result<Digest, StoreError> {
        self.catch_up(model, shards, shards.size(&self.shard))?;
        Ok(Digest(self.hasher.finalize().into()))
    }
}

impl std::fmt::Debug for ShardDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardDigest")
            .field("shard", &self.shard)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

fn absent(shard: &str, range: ByteRange) -> StoreError {
    StoreError::Absent {
        shard: shard.to_owned(),
        range,
    }
}

fn whole_subject(shard: &str) -> Subject {
    Subject::File(format!("shards/{shard}").into())
}

pub(super) fn subject_of(shard: &str, stretch: &Stretch) -> Subject {
    match stretch.holder {
        Holder::Header => Subject::File(format!("headers/{shard}").into()),
        Holder::Core { part, .. } => Subject::File(format!("core/{part}").into()),
        Holder::Expert { key, .. } => Subject::Expert(key),
        Holder::Rest => Subject::File(rest_path(shard, stretch.range).into()),
    }
}

/// The stretches that hold some of `range`.
fn overlapping(stretches: &[Stretch], range: ByteRange) -> &[Stretch] {
    if range.is_empty() {
        return &[];
    }
    let from = stretches.partition_point(|s| s.range.end <= range.start);
    let to = stretches.partition_point(|s| s.range.start < range.end);
    &stretches[from..to]
}
