//! Writes that go past the page cache.
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

/// Such writes begin and end at multiples of this, in the file and in memory.
pub(super) const PAGE: usize = 4096;
/// Fewer bytes are better off in the page cache.
pub(super) const LEAST: usize = 1 << 20;

thread_local! {
    /// Bytes that do not begin with a page are copied here.
    static ALIGNED: RefCell<Option<MmapMut>> = const { RefCell::new(None) };
}

/// A second handle of a file, for such writes alone.
#[derive(Debug)]
pub(super) struct PastCache {
    file: File,
    /// The file system has opened it so, and then refused to write.
    refused: AtomicBool,
}

impl PastCache {
    /// `None` where the system knows no such writes.
    #[cfg(target_os = "linux")]
    pub(super) fn of(file: &File) -> Option<Self> {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::OpenOptionsExt;
        let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
        // By its number, not by its name: the file may have got another name since.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = File::options().write(true).custom_flags(flag).open(path);
        let refused = AtomicBool::new(false);
        opened.ok().map(|file| PastCache { file, refused })
    }

    /// `None` where the system knows no such writes.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn of(_: &File) -> Option<Self> {
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
        match written {
            Ok(()) => Ok(whole),
            // What was written of it is written once more, the ordinary way.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                self.refused.store(true, Ordering::Relaxed);
                Ok(0)
            }
            Err(e) => Err(e),
        }
    }

    fn write_copies(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        ALIGNED.with_borrow_mut(|aligned| {
            let copy = match aligned {
                Some(copy) => copy,
                none => none.insert(MmapMut::map_anon(LEAST)?),
            };
            for (n, piece) in bytes.chunks(LEAST).enumerate() {
                copy[..piece.len()].copy_from_slice(piece);
                let at = offset + (n * LEAST) as u64;
                self.file.write_all_at(&copy[..piece.len()], at)?;
            }
            Ok(())
        })
    }
}
