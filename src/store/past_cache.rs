//! Writes and reads that go past the page cache.
//!
//! An expert is written once and read past the cache too, so a copy of it there serves nobody; and to
//! find fresh pages for the copy can cost three times what the disk itself needs.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use memmap2::MmapMut;

/// They begin and end at multiples of this, in the file and in memory.
pub(super) const PAGE: usize = 4096;
/// Fewer bytes are better off in the page cache.
pub(super) const LEAST: usize = 1 << 20;

thread_local! {
    /// Between the disk and memory that does not begin with a page.
    static ALIGNED: RefCell<Option<MmapMut>> = const { RefCell::new(None) };
}

/// A second handle of a file, for nothing else.
#[derive(Debug)]
pub(super) struct PastCache {
    file: File,
    /// The file system has opened it so, and then refused to use it.
    refused: AtomicBool,
}

impl PastCache {
    /// `None` where the system knows no way past its cache.
    #[cfg(target_os = "linux")]
    pub(super) fn of(file: &File, writes: bool) -> Option<Self> {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::OpenOptionsExt;
        let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
        // By its number, not by its name: the file may have got another name since.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = File::options()
            .read(true)
            .write(writes)
            .custom_flags(flag)
            .open(path);
        let refused = AtomicBool::new(false);
        opened.ok().map(|file| PastCache { file, refused })
    }

    /// `None` where the system knows no way past its cache.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn of(_: &File, _: bool) -> Option<Self> {
        None
    }

    /// Writes as many of `bytes` as are whole pages, and says how many those were; 0 where the file
    /// system refuses such writes. `offset` is a multiple of a page.
    pub(super) fn write_pages(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let whole = bytes.len() / PAGE * PAGE;
        if self.refused.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let aligned = (bytes.as_ptr() as usize).is_multiple_of(PAGE);
        let written = match aligned {
            true => self.file.write_all_at(&bytes[..whole], offset),
            false => self.write_copies(&bytes[..whole], offset),
        };
        // What was written before a refusal is written once more, the ordinary way.
        Ok(if self.may(written)? { whole } else { 0 })
    }

    /// Fills `bytes` from `offset` on, whatever their places. False where the file system refuses;
    /// an end before that is [`io::ErrorKind::UnexpectedEof`].
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<bool> {
        if self.refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let read = with_aligned(|aligned| {
            let mut done = 0;
            while done < bytes.len() {
                let at = offset + done as u64;
                let skip = (at % PAGE as u64) as usize;
                let there = match self.file.read_at(aligned, at - skip as u64) {
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    other => other?,
                };
                let len = there.saturating_sub(skip).min(bytes.len() - done);
                if len == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                bytes[done..done + len].copy_from_slice(&aligned[skip..skip + len]);
                done += len;
            }
            Ok(())
        });
        self.may(read)
    }

    /// Whether the file system knows this way; remembered if it does not.
    fn may(&self, outcome: io::Result<()>) -> io::Result<bool> {
        match outcome {
            Ok(()) => Ok(true),
            Err(e) if refusal(e.kind()) => {
                self.refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    fn write_copies(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        with_aligned(|aligned| {
            for (n, piece) in bytes.chunks(LEAST).enumerate() {
                let copy = &mut aligned[..piece.len()];
                copy.copy_from_slice(piece);
                self.file.write_all_at(copy, offset + (n * LEAST) as u64)?;
            }
            Ok(())
        })
    }
}

/// What file systems say that were opened so and then do not do it.
fn refusal(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
    )
}

fn with_aligned(work: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
    ALIGNED.with_borrow_mut(|aligned| {
        let aligned = match aligned {
            Some(aligned) => aligned,
            none => none.insert(MmapMut::map_anon(LEAST)?),
        };
        work(aligned)
    })
}
