//! Reading an expert that is on disk.

use std::io;

use bytes::Bytes;
use sha2::Digest as _;
use sha2::Sha256;

use super::disk::DiskFile;
use super::disk::How;
use super::disk::read_vec;
use super::error::Damage;
use super::error::StoreError;
use super::experts::Lease;
use super::lock;
use super::quick::Quick;
use super::table::Line;
use crate::terms::Digest;

impl Lease {
    /// Bytes of the expert.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the expert has no bytes; none does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the expert lies, for whoever reads it past the page cache.
    pub fn path(&self) -> std::path::PathBuf {
        self.entry.path()
    }

    /// Whether this process has compared the bytes with what is known of them: until then only
    /// [`Lease::read`] may be believed, or what [`Lease::confirm`] has confirmed.
    pub fn is_checked(&self) -> bool {
        let entry = &self.entry;
        let known = lock(&entry.inner().state).index.get(entry.id);
        known.is_some_and(|known| known.checked)
    }

    /// Compares bytes that were read past the store, from [`Lease::path`], as [`Lease::read`] would
    /// have.
    ///
    /// # Errors
    ///
    /// As [`Lease::read`].
    pub fn confirm(&self, bytes: &[u8]) -> Result<(), StoreError> {
        if bytes.len() as u64 != self.len {
            let (expected, actual) = (self.len, bytes.len() as u64);
            return Err(self.entry.damaged(Damage::Length { expected, actual }));
        }
        self.check(bytes, false)
    }

    /// Reads the expert: its length is checked always, its bytes at their first use in this process,
    /// by their fast sum, or after an unclean stop by their digest.
    ///
    /// # Errors
    ///
    /// Where [`StoreError::refetch`] holds, the entry is removed already: look it up again and fetch
    /// it.
    pub fn read(&self) -> Result<Bytes, StoreError> {
        self.read_checked(false)
    }

    /// Reads the expert and compares it with its digest, whatever was compared before.
    pub fn read_verified(&self) -> Result<Bytes, StoreError> {
        self.read_checked(true)
    }

    /// Fills `bytes` from `offset` on. An expert that this process has not read yet is read and
    /// checked as a whole first.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        self.read_by(<dyn DiskFile>::read_at, offset, bytes)
    }

    /// The same by `read`, where it need not be read as a whole.
    pub(super) fn read_by(
        &self,
        read: Read,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        let entry = &self.entry;
        let known = lock(&entry.inner().state).index.get(entry.id);
        let end = offset.saturating_add(bytes.len() as u64);
        if known.is_some_and(|known| known.checked)
            && let Some(opened) = &self.open
            && end <= self.len
            && read(&*opened.file, bytes, offset).is_ok()
        {
            return Ok(());
        }
        let whole = self.read()?;
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let part = whole.get(from..).and_then(|tail| tail.get(..bytes.len()));
        let part = part.ok_or_else(|| StoreError::Short {
            path: entry.path(),
            done: self.len,
            len: end,
        })?;
        bytes.copy_from_slice(part);
        Ok(())
    }

    fn read_checked(&self, always: bool) -> Result<Bytes, StoreError> {
        let entry = &self.entry;
        let bytes = match &self.open {
            Some(opened) => read_whole(&*opened.file, self.len),
            None => match entry.inner().disk.open(&entry.path(), How::Read) {
                Ok(file) => read_whole(&*file, self.len),
                Err(e) => Err(Unread::Io(e)),
            },
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(Unread::Length(actual)) => {
                let expected = self.len;
                return Err(entry.damaged(Damage::Length { expected, actual }));
            }
            Err(Unread::Io(e)) if e.kind() == io::ErrorKind::NotFound => {
                lock(&entry.inner().state).index.remove(entry.id);
                return Err(StoreError::Gone { path: entry.path() });
            }
            Err(Unread::Io(e)) if is_our_shortage(&e) => {
                return Err(StoreError::io("read", &entry.path(), e));
            }
            Err(Unread::Io(e)) => return Err(entry.damaged(Damage::Unreadable(e.kind()))),
        };
        self.check(&bytes, always)?;
        Ok(Bytes::from(bytes))
    }

    fn check(&self, bytes: &[u8], always: bool) -> Result<(), StoreError> {
        let entry = &self.entry;
        let known = lock(&entry.inner().state).index.get(entry.id);
        if !always && known.is_some_and(|known| known.checked) {
            return Ok(());
        }
        let log = &entry.model.log;
        let told = log.get(&entry.subject());
        let told = told.map_err(|e| StoreError::io("read", log.path(), e))?;
        let Some(told) = told else {
            return Err(entry.damaged(Damage::Unknown));
        };
        let quick = Quick::of(bytes);
        // A fast sum that differs condemns nothing by itself: the digest says what is wrong.
        if always || told.suspect || told.quick != Some(quick) {
            let actual = Digest(Sha256::digest(bytes).into());
            let expected = told.known.sha256;
            if actual != expected {
                return Err(entry.damaged(Damage::Content { expected, actual }));
            }
        }
        if told.suspect || told.quick != Some(quick) {
            let line = Line {
                subject: entry.subject(),
                known: told.known,
                quick: Some(quick),
                source: "disk",
                checked: true,
            };
            // If this is not kept, the entry is compared once more after the next start. A token
            // does not wait for whoever is at the log.
            log.append_if_free(&[line]);
        }
        lock(&entry.inner().state).index.set_checked(entry.id);
        Ok(())
    }
}

/// [`DiskFile::read_at`] or [`DiskFile::read_back`].
pub(super) type Read = fn(&(dyn DiskFile + 'static), &mut [u8], u64) -> io::Result<()>;

enum Unread {
    Length(u64),
    Io(io::Error),
}

fn read_whole(file: &dyn DiskFile, len: u64) -> Result<Vec<u8>, Unread> {
    let actual = file.facts().map_err(Unread::Io)?.len;
    match usize::try_from(len) {
        Ok(wanted) if actual == len => read_vec(file, 0, wanted).map_err(Unread::Io),
        _ => Err(Unread::Length(actual)),
    }
}

/// Errors that say nothing about the file: too many open ones, no memory.
fn is_our_shortage(error: &io::Error) -> bool {
    const MFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();
    const NFILE: i32 = rustix::io::Errno::NFILE.raw_os_error();
    error.kind() == io::ErrorKind::OutOfMemory
        || matches!(error.raw_os_error(), Some(MFILE | NFILE))
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.entry.inner().state).index.unpin(self.entry.id);
    }
}
