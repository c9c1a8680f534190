//! Reads that leave no trace in the page cache, and the memory they go to.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use memmap2::MmapMut;

use crate::checkpoint::CORE_ALIGN;

/// From this size on memory is worth huge pages.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// Memory for `len` bytes, aligned as direct reads want it, in huge pages where the system gives them. It is touched
/// when it is first written.
pub(super) fn memory(len: usize) -> io::Result<MmapMut> {
    let len = len.max(1).next_multiple_of(CORE_ALIGN as usize);
    let memory = MmapMut::map_anon(len)?;
    #[cfg(target_os = "linux")]
    if len >= HUGE {
        // Small pages are slower, no more.
        let _ = memory.advise(memmap2::Advice::HugePage);
    }
    Ok(memory)
}

/// A file whose bytes go past the page cache.
#[derive(Debug)]
pub(super) struct DirectFile {
    file: File,
    /// The same file for what a direct read cannot do, or where the file system knows no direct reads.
    plain: File,
    direct: bool,
}

impl DirectFile {
    pub(super) fn open(path: &Path) -> io::Result<DirectFile> {
        let plain = File::open(path)?;
        let direct = open_direct(path);
        Ok(DirectFile {
            direct: direct.is_some(),
            file: match direct {
                Some(file) => file,
                None => plain.try_clone()?,
            },
            plain,
        })
    }

    /// Bytes in the file.
    pub(super) fn len(&self) -> io::Result<u64> {
        Ok(self.plain.metadata()?.len())
    }

    /// Fills `bytes`, which begins and ends at multiples of 4,096 in memory, from `offset`, also such a multiple.
    /// Answers how many bytes there were: fewer only at the file's end.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            // A direct read that stopped short stands where another may not begin.
            let aligned = at.is_multiple_of(CORE_ALIGN);
            let outcome = match self.direct && aligned {
                true => self.file.read_at(&mut bytes[done..], at),
                false => self.plain.read_at(&mut bytes[done..], at),
            };
            match outcome {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if self.direct && aligned && e.kind() == io::ErrorKind::InvalidInput => {
                    // Some file systems open a file so and then refuse to read it.
                    match self.plain.read_at(&mut bytes[done..], at)? {
                        0 => break,
                        n => done += n,
                    }
                }
                Err(e) => return Err(e),
            }
        }
        if !self.direct {
            forget(&self.plain, offset, done);
        }
        Ok(done)
    }

    /// Fills `bytes`, of any length and place, from any `offset`.
    pub(super) fn read_any(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let start = offset / CORE_ALIGN * CORE_ALIGN;
        let skip = usize::try_from(offset - start).unwrap_or(0);
        let mut around = memory(skip + bytes.len())?;
        let found = self.read(&mut around, start)?;
        if found < skip + bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.copy_from_slice(&around[skip..skip + bytes.len()]);
        Ok(())
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
    File::options()
        .read(true)
        .custom_flags(flag)
        .open(path)
        .ok()
}

#[cfg(target_os = "macos")]
fn open_direct(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    rustix::fs::fcntl_nocache(&file, true).ok()?;
    Some(file)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn open_direct(_: &Path) -> Option<File> {
    None
}

/// Gives back what an ordinary read left in the page cache.
#[cfg(target_os = "linux")]
fn forget(file: &File, offset: u64, len: usize) {
    let len = std::num::NonZeroU64::new(len as u64);
    let _ = rustix::fs::fadvise(file, offset, len, rustix::fs::Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
fn forget(_: &File, _: u64, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_find_the_bytes_wherever_the_file_lies() {
        for folder in [Some("/dev/shm"), None] {
            let folder = folder.filter(|f| Path::new(f).is_dir());
            let folder = folder.map_or_else(tempfile::tempdir, tempfile::tempdir_in);
            let folder = folder.unwrap();
            let path = folder.path().join("file");
            let content: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            let file = DirectFile::open(&path).unwrap();
            let mut whole = memory(content.len()).unwrap();
            assert_eq!(file.read(&mut whole, 0).unwrap(), content.len());
            assert!(whole[..content.len()] == content[..]);
            let mut tail = memory(8192).unwrap();
            assert_eq!(file.read(&mut tail, 98_304).unwrap(), 100_000 - 98_304);
            assert!(tail[..1696] == content[98_304..]);
            for (offset, len) in [(0, 1), (4095, 2), (5000, 70_000), (99_999, 1)] {
                let mut some = vec![0; len];
                file.read_any(&mut some, offset as u64).unwrap();
                assert!(some == content[offset..offset + len], "{offset} {len}");
            }
            let beyond = file.read_any(&mut [0; 2], 99_999);
            assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
