//! Keeping an expert piece by piece as it comes by, in a full install.
//!
//! `experts/part/042-0123.<run>` is what has arrived, locked by the process that writes it; `<run>`
//! names the run of the operating system. After a kill the page cache still holds every byte that was
//! written, so the file's length counts and the rest is fetched; after a power loss a length may
//! outlive its content, so a beginning from another run is removed. Nothing is synced before the whole
//! expert has its name. Of a large expert, a kill also loses the piece that was being collected.
//!
//! Only models without a limit keep beginnings: for the others they would be bytes that no budget
//! counts.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

use sha2::Digest as _;
use sha2::Sha256;

use super::Inner;
use super::Model;
use super::ModelStore;
use super::budget::not_kept;
use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::read_back_vec;
use super::disk::remove_any;
use super::experts::Filled;
use super::experts::NotKept;
use super::experts::Slot;
use super::growth::Growth;
use super::ledger::fnv;
use super::lock;
use super::quick::Quick;
use super::recover;
use super::table::Known;
use super::table::Level;
use crate::terms::Digest;
use crate::terms::ExpertKey;

/// Read back in pieces of this size.
const PIECE: u64 = 4 << 20;

/// Takes an expert in pieces, in order. Dropping it keeps what has arrived, where that may be kept.
pub struct ExpertWriter {
    slot: Slot,
    file: Growth,
    part: PathBuf,
    done: u64,
    hasher: Sha256,
    quick: Quick,
    fixed: bool,
    /// The part has its final name, or was given up.
    settled: bool,
}

impl Slot {
    /// Begins to take the expert piece by piece, going on from what an earlier process has left.
    ///
    /// # Errors
    ///
    /// Why there is no room for it. Others who wait for this expert are let go.
    pub fn grow(self) -> Result<ExpertWriter, NotKept> {
        let inner = self.entry.inner();
        if inner.life_line.is_none() {
            return Err(NotKept::Full);
        }
        let fixed = {
            let mut state = lock(&inner.state);
            state.not_needed(self.entry.id);
            state.index.is_fixed(self.entry.id.model)
        };
        inner.reserve(self.entry.id, self.len, fixed)?;
        let begun = self.open_part(fixed);
        if begun.is_err() && !fixed {
            inner.release(self.len);
        }
        let (file, part) = begun?;
        let (mut hasher, mut quick) = (Sha256::new(), Quick::new());
        let resumed = self.resume(&*file, &mut hasher, &mut quick);
        if resumed.is_err() && !fixed {
            let _ = remove_any(&*self.entry.inner().disk, &part);
            self.entry.inner().release(self.len);
        }
        let done = resumed?;
        let file = Growth::new(&*self.entry.inner().disk, file, done, self.len);
        Ok(ExpertWriter {
            slot: self,
            file,
            part,
            done,
            hasher,
            quick,
            fixed,
            settled: false,
        })
    }

    fn open_part(&self, fixed: bool) -> Result<(Box<dyn DiskFile>, PathBuf), NotKept> {
        let disk = &*self.entry.inner().disk;
        let part = part_path(disk, &self.entry.model, self.entry.id.key);
        let opened = match disk.open(&part, How::Update) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let folder = part.parent().unwrap_or(&part);
                disk.create_folder(folder)
                    .and_then(|()| disk.open(&part, How::Update))
            }
            Err(_) if disk.facts(&part).is_ok() => {
                remove_any(disk, &part).and_then(|()| disk.open(&part, How::Update))
            }
            other => other,
        };
        let file = opened.map_err(|e| not_kept(&e))?;
        if !file.try_lock().map_err(|e| not_kept(&e))? {
            return Err(NotKept::Busy);
        }
        // Who held the lock before us may have renamed this very file: then its name is gone, and
        // what we have open is the published expert.
        if disk.facts(&part).is_err() {
            return Err(NotKept::Busy);
        }
        if !fixed || disk.boot().is_none() {
            file.set_len(0).map_err(|e| not_kept(&e))?;
        }
        Ok((file, part))
    }

    /// Reads what is there of the expert, and says how many bytes that is.
    fn resume(
        &self,
        file: &dyn DiskFile,
        hasher: &mut Sha256,
        quick: &mut Quick,
    ) -> Result<u64, NotKept> {
        let there = file.facts().map_err(|e| not_kept(&e))?.len;
        // One that is longer than it may be is no beginning of it.
        let usable = if there > self.len { 0 } else { there };
        if usable != there {
            file.set_len(usable).map_err(|e| not_kept(&e))?;
        }
        let mut done = 0;
        while done < usable {
            let piece = usize::try_from(PIECE.min(usable - done)).unwrap_or(usize::MAX);
            let bytes = read_back_vec(file, done, piece).map_err(|e| not_kept(&e))?;
            hasher.update(&bytes);
            quick.update(&bytes);
            done += bytes.len() as u64;
        }
        Ok(done)
    }
}

impl ExpertWriter {
    /// Which expert this is.
    pub fn key(&self) -> ExpertKey {
        self.slot.key()
    }

    /// Bytes that are there; the next ones to append begin here.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Bytes that are still missing.
    pub fn missing(&self) -> u64 {
        self.slot.len - self.done
    }

    /// Appends the next bytes.
    ///
    /// # Errors
    ///
    /// Why the disk does not take them; [`done`](Self::done) then says how many of them it took.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<(), NotKept> {
        if bytes.len() as u64 > self.missing() {
            return Err(NotKept::Length);
        }
        while !bytes.is_empty() {
            let (now, later) = self.file.fitting(bytes);
            self.file.append(now).map_err(|e| not_kept(&e))?;
            self.hasher.update(now);
            self.quick.update(now);
            self.done += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// Forgets what has arrived: it was not the expert's beginning after all.
    pub fn restart(&mut self) -> Result<(), NotKept> {
        self.file.cut(0).map_err(|e| not_kept(&e))?;
        self.hasher = Sha256::new();
        self.quick = Quick::new();
        self.done = 0;
        Ok(())
    }

    /// Gives the whole expert its name. `source` is where it came from.
    pub fn finish(mut self, source: &str) -> Filled {
        let kept = self.keep(source);
        // What is not what it should be is no beginning to go on from.
        if let Err(NotKept::Conflict(_)) = kept {
            self.done = 0;
        }
        self.settled = kept.is_ok();
        self.slot.note(kept)
    }

    fn keep(&mut self, source: &str) -> Result<(), NotKept> {
        if self.missing() > 0 {
            return Err(NotKept::Length);
        }
        self.file.flush().map_err(|e| not_kept(&e))?;
        let sha256 = Digest(self.hasher.clone().finalize().into());
        let known = Known {
            sha256,
            length: self.slot.len,
            level: Level::FirstUse,
        };
        let known = (self.slot.agreed(known)?, self.quick.clone().finish());
        let inner = self.slot.entry.inner();
        let mtime = lock(&inner.state).tick(inner.disk.now());
        self.file.file.set_mtime(mtime).map_err(|e| not_kept(&e))?;
        let published = self
            .slot
            .publish(&self.part, mtime, known, source, self.fixed);
        if published.is_ok() {
            inner.stored(&self.slot.entry.model);
        }
        published
    }
}

impl Drop for ExpertWriter {
    fn drop(&mut self) {
        if !self.settled && (!self.fixed || self.done == 0) {
            let inner = self.slot.entry.inner();
            let _ = remove_any(&*inner.disk, &self.part);
            if !self.fixed {
                inner.release(self.slot.len);
            }
        }
    }
}

impl ModelStore {
    /// Beginnings of experts that an earlier process has left, each with its bytes.
    pub fn begun(&self) -> HashMap<ExpertKey, u64> {
        let disk = &*self.store().inner.disk;
        let folder = self.folder().join("experts/part");
        let run = run_name(disk);
        let listed = recover::list(disk, &folder).unwrap_or_default();
        let ours = listed.into_iter().filter_map(|l| {
            let name = l.name.strip_suffix(&run)?.strip_suffix('.')?;
            let key = super::table::expert_of(&name.replacen('-', "/", 1))?;
            (l.facts.len > 0).then_some((key, l.facts.len))
        });
        ours.collect()
    }
}

fn part_path(disk: &dyn Disk, model: &Model, key: ExpertKey) -> PathBuf {
    let ExpertKey { layer, expert } = key;
    let name = format!("{layer:03}-{expert:04}.{}", run_name(disk));
    model.folder.join("experts/part").join(name)
}

/// This run of the operating system, short enough for a file's name.
fn run_name(disk: &dyn Disk) -> String {
    format!("{:016x}", fnv(disk.boot().unwrap_or_default().as_bytes()))
}

/// Removes beginnings that nobody writes and nobody can go on from: of another run of the system, of
/// a model with a limit, of an expert that is whole by now.
pub(super) fn sweep_parts(inner: &Inner, model: &Model) -> std::io::Result<()> {
    let disk = &*inner.disk;
    let folder = model.folder.join("experts/part");
    let run = run_name(disk);
    let fixed = lock(&inner.state).index.is_fixed(model.id);
    for listed in recover::list(disk, &folder)? {
        let path = folder.join(&listed.name);
        let name = listed.name.strip_suffix(&run);
        let key = name
            .and_then(|n| n.strip_suffix('.'))
            .and_then(|n| super::table::expert_of(&n.replacen('-', "/", 1)));
        let usable = fixed
            && key.is_some_and(|key| {
                disk.facts(&recover::expert_path(&model.folder, key))
                    .is_err()
            });
        if usable {
            continue;
        }
        // Locked: another process is at work on it.
        let free = match disk.open(&path, How::Read) {
            Ok(file) => file.try_lock().unwrap_or(true),
            Err(_) => true,
        };
        if free {
            remove_any(disk, &path)?;
        }
    }
    Ok(())
}

impl fmt::Debug for ExpertWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertWriter")
            .field("key", &self.slot.key())
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}
