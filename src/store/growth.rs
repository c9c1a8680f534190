//! A file that grows from its beginning to its end, written in whole pieces.
//!
//! Bytes come from the network in crumbs. Written as they come, each crumb is a copy into a fresh page
//! of the page cache, which costs more than all hashing; collected into pieces that lie on pages, they
//! go past it ([`Disk::piece`]). A kill loses what is collected, which is less than one piece.

use std::cell::Cell;
use std::io;

use memmap2::MmapMut;

use super::disk::Disk;
use super::disk::DiskFile;

/// Shorter files than this many pieces are written as they come: of a small expert a kill would lose
/// all, where the half could stay.
const PIECES_MIN: u64 = 4;

thread_local! {
    /// The last piece that was done with: new memory costs a fault for each of its pages, and a lane
    /// of an install writes one file after another.
    static SPARE: Cell<Option<MmapMut>> = const { Cell::new(None) };
}

/// Memory for a piece; `None` if there is none.
fn memory(len: usize) -> Option<MmapMut> {
    let spare = SPARE.take().filter(|spare| spare.len() == len);
    spare.or_else(|| MmapMut::map_anon(len).ok())
}

/// The writing end of a file. Dropping it writes what is collected, if the disk takes it.
#[derive(Debug)]
pub(super) struct Growth {
    pub(super) file: Box<dyn DiskFile>,
    /// Bytes in the file.
    written: u64,
    /// Where the next piece is collected; `None` writes everything at once.
    piece: Option<MmapMut>,
    /// Bytes in `piece`.
    collected: usize,
}

impl Growth {
    /// Goes on with a file that has `written` bytes and will have `len`.
    pub(super) fn new(disk: &dyn Disk, file: Box<dyn DiskFile>, written: u64, len: u64) -> Self {
        let piece = disk.piece();
        let worth = piece as u64 * PIECES_MIN <= len - written.min(len);
        // Without memory for it, it goes slower.
        let piece = worth.then(|| memory(piece)).flatten();
        Growth {
            file,
            written,
            piece,
            collected: 0,
        }
    }

    /// How much of `bytes` belongs to the piece that is collected; all, where none is.
    pub(super) fn fitting<'a>(&self, bytes: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        let Some(piece) = &self.piece else {
            return (bytes, &[]);
        };
        // Pieces end at multiples of their size, wherever the first begins.
        let len = piece.len() as u64;
        let room = len - (self.written + self.collected as u64) % len;
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        bytes.split_at(room.min(bytes.len()))
    }

    /// Takes what [`fitting`](Self::fitting) gave, and writes the piece if that was its last part.
    ///
    /// # Errors
    ///
    /// What the disk said; then none of `bytes` was taken.
    ///
    /// # Panics
    ///
    /// If it does not fit.
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(piece) = &mut self.piece else {
            return self.write(bytes.len(), |file, at| file.write_at(bytes, at));
        };
        let end = self.collected + bytes.len();
        piece[self.collected..end].copy_from_slice(bytes);
        let before = std::mem::replace(&mut self.collected, end);
        if (self.written + end as u64).is_multiple_of(piece.len() as u64) {
            return self.flush().inspect_err(|_| self.collected = before);
        }
        Ok(())
    }

    /// Whether all that was taken is in the file.
    pub(super) fn is_written(&self) -> bool {
        self.collected == 0
    }

    /// Writes what is collected.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let len = self.collected;
        let piece = self.piece.take();
        let bytes = piece.as_deref().unwrap_or_default().get(..len);
        let written = match bytes {
            Some(bytes) if len > 0 => self.write(len, |file, at| file.write_at(bytes, at)),
            _ => Ok(()),
        };
        self.piece = piece;
        if written.is_ok() {
            self.collected = 0;
        }
        written
    }

    fn write(
        &mut self,
        len: usize,
        write: impl FnOnce(&dyn DiskFile, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        if let Err(e) = write(&*self.file, self.written) {
            // Half of it may be there; the length must not count it.
            let _ = self.file.set_len(self.written);
            return Err(e);
        }
        self.written += len as u64;
        Ok(())
    }

    /// Cuts the file to its first `len` bytes and forgets what is collected.
    pub(super) fn cut(&mut self, len: u64) -> io::Result<()> {
        self.file.set_len(len)?;
        self.written = len;
        self.collected = 0;
        Ok(())
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        let _ = self.flush();
        if let Some(piece) = self.piece.take() {
            // At a thread's end there may be no place for it any more.
            let _ = SPARE.try_with(|spare| spare.set(Some(piece)));
        }
    }
}
