//! Keeping an expert that has just arrived.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::budget::GATE_WAIT;
use super::budget::not_kept;
use super::budget::unentered;
use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::Kind;
use super::experts::Filled;
use super::experts::NotKept;
use super::experts::Slot;
use super::index::Entry;
use super::lock;
use super::quick::Quick;
use super::table::Known;
use super::table::Level;
use super::table::Line;
use crate::terms::Digest;
use crate::terms::ExpertKey;

impl Slot {
    /// Which expert this is for.
    pub fn key(&self) -> ExpertKey {
        self.entry.id.key
    }

    /// Keeps the expert, if there is room, and hands its bytes to everybody in this process who
    /// waits for them. `sha256` is that of `bytes`, computed where they arrived.
    ///
    /// Experts go in the policy's order to make room; none goes if that would not be enough.
    pub fn fill(mut self, bytes: Bytes, sha256: Digest, source: &str) -> Filled {
        let kept = self.keep(&bytes, sha256, source);
        let filled = self.note(kept);
        self.land(Some(bytes));
        filled
    }

    /// Makes room for the expert before its bytes are written, so that what goes is settled in the
    /// order of these calls however long each write takes. [`Slot::fill`] then takes the room that
    /// was made; a slot that is dropped gives it back.
    ///
    /// # Errors
    ///
    /// If there is no room now: [`Slot::fill`] will try once more, unless this is colder than all
    /// that could go for it.
    pub fn make_room(&mut self) -> Result<(), NotKept> {
        let inner = self.entry.inner();
        if self.room.is_some() || inner.life_line.is_none() {
            return Ok(());
        }
        let fixed = lock(&inner.state).index.is_fixed(self.entry.id.model);
        if self.colder {
            return Err(NotKept::Colder);
        }
        let made = inner.reserve(self.entry.id, self.len, fixed);
        self.colder = made == Err(NotKept::Colder);
        made?;
        self.room = Some(fixed);
        Ok(())
    }

    /// Counts what became of the expert.
    pub(super) fn note(&self, kept: Result<(), NotKept>) -> Filled {
        let inner = self.entry.inner();
        let why = {
            let mut state = lock(&inner.state);
            match kept {
                Ok(()) => {
                    state.stats.kept += 1;
                    state.stats.kept_bytes += self.len;
                    return Filled::Kept;
                }
                Err(NotKept::Colder) => {
                    state.stats.colder += 1;
                    return Filled::NotKept(NotKept::Colder);
                }
                Err(why) => {
                    state.stats.not_kept += 1;
                    why
                }
            }
        };
        if let NotKept::Full | NotKept::Disk(_) | NotKept::Reserve | NotKept::Busy = why {
            let home = inner.home.display();
            inner.trouble(|| {
                format!(
                    "{home}: experts are not kept: {why}; they are used from memory, and fetched again when they are needed again"
                )
            });
        }
        Filled::NotKept(why)
    }

    fn keep(&mut self, bytes: &Bytes, sha256: Digest, source: &str) -> Result<(), NotKept> {
        if bytes.len() as u64 != self.len {
            return Err(NotKept::Length);
        }
        if self.entry.inner().life_line.is_none() {
            return Err(NotKept::Full);
        }
        let known = self.agreed(Known {
            sha256,
            length: self.len,
            level: Level::FirstUse,
        })?;
        let known = (known, Quick::of(bytes));
        self.make_room()?;
        let fixed = self.room.take().unwrap_or_default();
        let inner = self.entry.inner();
        let temporary = self.temporary();
        let stored = self.write(&temporary, bytes).map_err(|e| not_kept(&e));
        let stored = stored.and_then(|mtime| self.publish(&temporary, mtime, known, source, fixed));
        if stored.is_err() {
            // What cannot be removed stays reserved: it is on the disk.
            let removed = super::disk::remove_any(&*inner.disk, &temporary).is_ok();
            if removed && !fixed {
                inner.release(self.len);
            }
        } else {
            inner.stored(&self.entry.model);
        }
        stored
    }

    /// Holds what has arrived against what is known of it.
    pub(super) fn agreed(&self, arrived: Known) -> Result<Known, NotKept> {
        let told = self.entry.model.log.get(&self.entry.subject());
        match told.map_err(|e| not_kept(&e))? {
            Some(told) if told.known.sha256 != arrived.sha256 => Err(NotKept::Conflict(told.known)),
            _ => Ok(arrived),
        }
    }

    fn temporary(&self) -> PathBuf {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = super::ledger::session_path(Path::new(""), self.entry.inner().session);
        let folder = self.entry.model.folder.join("experts/tmp");
        folder.join(format!("{}.{count}", name.display()))
    }

    fn write(&self, temporary: &Path, bytes: &[u8]) -> io::Result<u64> {
        let inner = self.entry.inner();
        let file = open_new(&*inner.disk, temporary)?;
        file.write_at(bytes, 0)?;
        let mtime = lock(&inner.state).tick(inner.disk.now());
        file.set_mtime(mtime)?;
        Ok(mtime)
    }

    /// Gives a whole temporary file its name. Everything that other processes must see as one step
    /// happens inside the gate, in the order in which a kill at any point does least harm: count,
    /// digest, name.
    pub(super) fn publish(
        &self,
        temporary: &Path,
        mtime: u64,
        (known, quick): (Known, u64),
        source: &str,
        fixed: bool,
    ) -> Result<(), NotKept> {
        let (inner, log) = (self.entry.inner(), &self.entry.model.log);
        let path = self.entry.path();
        let mut entered = inner.enter(GATE_WAIT).map_err(|e| unentered(&e))?;
        // Another process was first (then the rename replaces equal bytes), or something is in the way.
        let replaced = match inner.disk.facts(&path) {
            Ok(facts) if facts.kind == Kind::File => facts.len,
            Ok(_) => {
                inner.discard_inside(&mut entered, self.entry.id, &path);
                0
            }
            Err(_) => 0,
        };
        if !fixed {
            *entered.reserved() -= self.len;
            entered.ledger.published += self.len;
        }
        let line = Line {
            subject: self.entry.subject(),
            known,
            quick: Some(quick),
            source,
            checked: false,
        };
        let named = entered.commit().and_then(|()| {
            let n = log.append(&[line])?;
            let renamed = rename_new(&*inner.disk, temporary, &path);
            log.settle(n, renamed.is_ok().then(|| path.clone()));
            renamed
        });
        if let Err(e) = named {
            if !fixed {
                *entered.reserved() += self.len;
                entered.subtract(self.len);
            }
            let _ = entered.commit();
            return Err(not_kept(&e));
        }
        if replaced > 0 && !fixed {
            entered.subtract(replaced);
            let _ = entered.commit(); // an error leaves the count too high, until it is made anew
        }
        let entry = Entry {
            len: self.len,
            mtime,
            pins: 0,
            checked: true,
        };
        lock(&inner.state).index.insert(self.entry.id, entry);
        Ok(())
    }

    /// Ends the flight: nobody waits for this slot any more.
    pub(super) fn land(&mut self, bytes: Option<Bytes>) {
        let inner = self.entry.inner();
        lock(&inner.state).index.comes_not(self.entry.id);
        if let Some(claim) = self.claim.take() {
            let _ = inner.disk.remove_file(&claim);
        }
        if let Some(flight) = self.flight.take() {
            lock(&inner.state).flights.remove(&self.entry.id);
            let _ = flight.set(bytes);
            inner.landed.notify_all();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.room.take() == Some(false) {
            self.entry.inner().release(self.len);
        }
        self.land(None);
    }
}

pub(super) fn open_new(disk: &dyn Disk, path: &Path) -> io::Result<Box<dyn DiskFile>> {
    match disk.open(path, How::CreateNew) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            disk.create_folder(path.parent().unwrap_or(path))?;
            disk.open(path, How::CreateNew)
        }
        other => other,
    }
}

fn rename_new(disk: &dyn Disk, from: &Path, to: &Path) -> io::Result<()> {
    match disk.rename(from, to) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            disk.create_folder(to.parent().unwrap_or(to))?;
            disk.rename(from, to)
        }
        other => other,
    }
}
