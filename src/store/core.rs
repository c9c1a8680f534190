//! Files that are fetched once and in order: the core's, and the parts of shards that the text
//! engine never reads. They are too large to begin anew after a stop, so they grow in place:
//!
//! * `042.part` is what has arrived, locked by the process that writes it;
//! * `042.progress` says how much of it is synced, with the digest of that much;
//! * `042` is the whole file, renamed when all of it is synced.
//!
//! After a kill the page cache still holds every byte that was written, so the part's own length
//! counts; of a large file the kill has lost the piece that was being collected. After a power loss
//! only `done` does, since a file's length may outlive its content.

use std::fmt;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use serde::Deserialize;
use serde::Serialize;
use sha2::Digest as _;
use sha2::Sha256;

use super::ModelStore;
use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::Kind;
use super::disk::read_back_vec;
use super::disk::read_file;
use super::disk::remove_any;
use super::disk::write_file;
use super::error::Damage;
use super::error::StoreError;
use super::growth::Growth;
use super::model::is_plain;
use super::table::Known;
use super::table::Level;
use super::table::Subject;
use crate::terms::ByteRange;
use crate::terms::CorePart;
use crate::terms::Digest;

/// A power loss costs at most this much of a file on its way.
const SYNC_EVERY: u64 = 64 << 20;
/// Read back in pieces of this size.
const PIECE: u64 = 4 << 20;
const POLL: Duration = Duration::from_millis(20);

/// What there is of a file that is fetched once.
#[derive(Debug)]
pub enum CoreState {
    /// All of it, at this path.
    Ready(PathBuf),
    /// A part of it, perhaps nothing; append the rest.
    Partial(CoreWriter),
    /// Another thread or process is appending.
    Busy(CoreBusy),
}

/// Another's appending.
#[derive(Debug)]
pub struct CoreBusy {
    model: ModelStore,
    place: Place,
    len: u64,
}

/// Appends to a file that is fetched once. Dropping it keeps what has arrived.
pub struct CoreWriter {
    model: ModelStore,
    place: Place,
    len: u64,
    file: Growth,
    done: u64,
    synced: u64,
    hasher: Sha256,
}

#[derive(Clone, Debug)]
struct Place {
    /// Path below the model's folder.
    local: String,
    path: PathBuf,
}

impl Place {
    fn part(&self) -> PathBuf {
        self.path.with_added_extension("part")
    }

    fn progress(&self) -> PathBuf {
        self.path.with_added_extension("progress")
    }
}

#[derive(Serialize, Deserialize)]
struct Progress {
    len: u64,
    done: u64,
    sha256: Digest,
    boot: Option<String>,
}

impl ModelStore {
    /// A core file of `len` bytes. One of another length is damage, and begins anew.
    pub fn core(&self, part: CorePart, len: u64) -> Result<CoreState, StoreError> {
        self.fetched_once(format!("core/{part}"), len)
    }

    /// Bytes of a shard that belong neither to its header, nor to the core, nor to an expert.
    pub fn rest(&self, shard: &str, range: ByteRange) -> Result<CoreState, StoreError> {
        if !is_plain(shard) || shard.contains('/') {
            return Err(StoreError::Name {
                name: shard.to_owned(),
            });
        }
        self.fetched_once(rest_path(shard, range), range.len())
    }

    /// Where a core file lies, if all of it is there. Starts nothing.
    pub fn core_ready(&self, part: CorePart, len: u64) -> Option<PathBuf> {
        self.vouched_for(&format!("core/{part}"), len)
    }

    /// Where a stretch of a shard lies that belongs to neither core nor experts, if all of it is there.
    pub fn rest_ready(&self, shard: &str, range: ByteRange) -> Option<PathBuf> {
        self.vouched_for(&rest_path(shard, range), range.len())
    }

    /// Where a whole file lies. One of which the log knows nothing is not there: it is begun anew by
    /// whoever asks for its state, and would never be if it passed for ready here.
    fn vouched_for(&self, local: &str, len: u64) -> Option<PathBuf> {
        let path = self.folder().join(local);
        let facts = self.store().inner.disk.facts(&path).ok()?;
        let whole = facts.kind == Kind::File && facts.len == len;
        (whole && self.is_vouched(local, len).ok()?).then_some(path)
    }

    /// Whether the log knows the digest of a file of that length.
    fn is_vouched(&self, local: &str, len: u64) -> Result<bool, StoreError> {
        let log = &self.record().log;
        let told = log.get(&Subject::File(local.into()));
        let told = told.map_err(|e| StoreError::io("read", log.path(), e))?;
        Ok(told.is_some_and(|told| told.known.length == len))
    }

    /// Bytes of a core file that are there, whole or on its way.
    pub fn core_done(&self, part: CorePart, len: u64) -> u64 {
        if self.core_ready(part, len).is_some() {
            return len;
        }
        let place = self.place(format!("core/{part}"));
        let facts = self.store().inner.disk.facts(&place.part()).ok();
        let growing = facts.filter(|facts| facts.kind == Kind::File);
        growing.map_or(0, |facts| facts.len.min(len))
    }

    fn place(&self, local: String) -> Place {
        let path = self.folder().join(&local);
        Place { local, path }
    }

    fn fetched_once(&self, local: String, len: u64) -> Result<CoreState, StoreError> {
        let place = self.place(local);
        if self.is_ready(&place, len)? {
            return Ok(CoreState::Ready(place.path));
        }
        let disk = &*self.store().inner.disk;
        let part = place.part();
        let failed = |e| StoreError::io("open", &part, e);
        let folder = part.parent().unwrap_or(&part);
        disk.create_folder(folder).map_err(failed)?;
        let file = match disk.open(&part, How::Update) {
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => {
                remove_any(disk, &part).map_err(failed)?;
                disk.open(&part, How::Update)
            }
            other => other,
        };
        let file = file.map_err(failed)?;
        if !file.try_lock().map_err(failed)? {
            let model = self.clone();
            return Ok(CoreState::Busy(CoreBusy { model, place, len }));
        }
        // Who held the lock before us may have renamed this very file.
        if self.is_ready(&place, len)? {
            return Ok(CoreState::Ready(place.path));
        }
        if disk.facts(&part).is_err() {
            let model = self.clone();
            return Ok(CoreState::Busy(CoreBusy { model, place, len }));
        }
        CoreWriter::resume(self.clone(), place, len, file).map(CoreState::Partial)
    }

    fn is_ready(&self, place: &Place, len: u64) -> Result<bool, StoreError> {
        let disk = &*self.store().inner.disk;
        let failed = |e| StoreError::io("read", &place.path, e);
        let facts = match disk.facts(&place.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other.map_err(failed)?,
        };
        let whole = facts.kind == Kind::File && facts.len == len;
        if whole && self.is_vouched(&place.local, len)? {
            return Ok(true);
        }
        remove_any(disk, &place.path).map_err(failed)?;
        let damage = match (facts.kind, facts.len == len) {
            (Kind::File, true) => Damage::Unknown,
            (Kind::File, false) => Damage::Length {
                expected: len,
                actual: facts.len,
            },
            _ => Damage::NotAFile,
        };
        self.store().inner.damaged(&place.path, &damage);
        Ok(false)
    }
}

pub(super) fn rest_path(shard: &str, range: ByteRange) -> String {
    format!("rest/{shard}/{}-{}", range.start, range.end)
}

impl CoreBusy {
    /// Waits until the other has ended or `limit` is over, and looks again.
    pub fn wait(self, limit: Duration) -> Result<CoreState, StoreError> {
        let start = Instant::now();
        let CoreBusy { model, place, len } = self;
        loop {
            let state = model.fetched_once(place.local.clone(), len)?;
            if !matches!(state, CoreState::Busy(_)) || start.elapsed() >= limit {
                return Ok(state);
            }
            std::thread::sleep(POLL);
        }
    }
}

impl CoreWriter {
    fn resume(
        model: ModelStore,
        place: Place,
        len: u64,
        file: Box<dyn DiskFile>,
    ) -> Result<Self, StoreError> {
        let disk = model.store().inner.disk.clone();
        let mut writer = CoreWriter {
            model,
            place,
            len,
            file: Growth::new(&*disk, file, 0, len),
            done: 0,
            synced: 0,
            hasher: Sha256::new(),
        };
        let part = writer.place.part();
        let failed = |e| StoreError::io("resume", &part, e);
        let there = writer.file.file.facts().map_err(failed)?.len;
        let progress = read_progress(&*disk, &writer.place.progress()).filter(|p| p.len == len);
        let same_boot = |p: &Progress| p.boot.is_some() && p.boot == disk.boot();
        let usable = match &progress {
            Some(progress) if same_boot(progress) => there.min(len),
            Some(progress) => progress.done.min(there),
            None => 0,
        };
        if !writer.rehash(usable, progress.as_ref()).map_err(failed)? {
            writer.hasher = Sha256::new();
            writer.done = 0;
        }
        writer.file.cut(writer.done).map_err(failed)?;
        let log = &writer.model.record().log;
        log.sync_roots().map_err(failed)?;
        // From here on the part's length counts, in this run of the system.
        writer.checkpoint().map_err(failed)?;
        Ok(writer)
    }

    /// Reads back what is there. False if its synced beginning is not what it was.
    fn rehash(&mut self, usable: u64, progress: Option<&Progress>) -> io::Result<bool> {
        let synced = progress.map_or(0, |p| p.done);
        if synced > usable {
            return Ok(false);
        }
        while self.done < usable {
            if self.done == synced && progress.is_some_and(|p| p.sha256 != self.digest()) {
                return Ok(false);
            }
            // The digest is compared exactly at the end of what was synced.
            let stop = if self.done < synced { synced } else { usable };
            let piece = PIECE.min(stop - self.done);
            let piece = usize::try_from(piece).unwrap_or(usize::MAX);
            let bytes = read_back_vec(&*self.file.file, self.done, piece)?;
            self.hasher.update(&bytes);
            self.done += bytes.len() as u64;
        }
        Ok(self.done != synced || progress.is_none_or(|p| p.sha256 == self.digest()))
    }

    fn digest(&self) -> Digest {
        Digest(self.hasher.clone().finalize().into())
    }

    /// Bytes that are there; the next ones to append begin here.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Bytes that the file will have.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing is there yet.
    pub fn is_empty(&self) -> bool {
        self.done == 0
    }

    /// Appends the next bytes.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`] or [`StoreError::Io`]; [`done`](Self::done) then says how many were taken.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<(), StoreError> {
        let end = self.done + bytes.len() as u64;
        if end > self.len {
            let (path, len) = (self.place.part(), self.len);
            let done = end;
            return Err(StoreError::Short { path, done, len });
        }
        while !bytes.is_empty() {
            let (now, later) = self.file.fitting(bytes);
            let mut written = self.file.append(now);
            if written.is_ok() {
                self.hasher.update(now);
                self.done += now.len() as u64;
                bytes = later;
                if self.file.is_written() && self.done - self.synced >= SYNC_EVERY {
                    written = self.checkpoint();
                }
            }
            written.map_err(|e| StoreError::io("write", &self.place.part(), e))?;
        }
        Ok(())
    }

    fn checkpoint(&mut self) -> io::Result<()> {
        let disk = &*self.model.store().inner.disk;
        self.file.flush()?;
        self.file.file.sync()?;
        let progress = Progress {
            len: self.len,
            done: self.done,
            sha256: self.digest(),
            boot: disk.boot(),
        };
        let text = serde_json::to_vec(&progress).map_err(io::Error::other)?;
        write_file(disk, &self.place.progress(), &text)?;
        self.synced = self.done;
        Ok(())
    }

    /// Gives the whole file its name, safe from a power loss. `source` is where it came from.
    ///
    /// # Errors
    ///
    /// [`StoreError::Short`] if something is missing; whatever arrived is kept.
    pub fn finish(mut self, source: &str) -> Result<PathBuf, StoreError> {
        let Place { local, path } = &self.place;
        if self.done != self.len {
            return Err(StoreError::Short {
                path: path.clone(),
                done: self.done,
                len: self.len,
            });
        }
        let disk = &*self.model.store().inner.disk;
        let failed = |e| StoreError::io("publish", path, e);
        self.file.flush().map_err(failed)?;
        self.file.file.sync().map_err(failed)?;
        let known = Known {
            sha256: self.digest(),
            length: self.len,
            level: Level::FirstUse,
        };
        // The digest first: a file without one is begun anew.
        let subject = Subject::File(local.as_str().into());
        self.model.vouch(subject, known, source, path)?;
        disk.rename(&self.place.part(), path).map_err(failed)?;
        disk.sync_folder(path.parent().unwrap_or(path))
            .map_err(failed)?;
        let _ = disk.remove_file(&self.place.progress());
        Ok(path.clone())
    }
}

fn read_progress(disk: &dyn Disk, path: &Path) -> Option<Progress> {
    let bytes = read_file(disk, path).ok().flatten()?;
    serde_json::from_slice(&bytes).ok()
}

impl fmt::Debug for CoreWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoreWriter")
            .field("file", &self.place.path)
            .field("done", &self.done)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
