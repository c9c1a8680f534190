//! The one seam between the store and the file system.
//!
//! Every file access of this room goes through [`Disk`], for two reasons: an error then always knows
//! which path it is about, and a test can make any operation fail, or pull the plug after it.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use super::past_cache;
use super::past_cache::PastCache;

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// Anything else; a symbolic link is not followed.
    Other,
}

/// What a file system tells about a path without opening it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// What it is.
    pub kind: Kind,
    /// Length in bytes.
    pub len: u64,
    /// Last modification, in nanoseconds since 1970.
    pub mtime: u64,
    /// Tells one file from another that has its name later.
    pub id: u64,
}

/// One name in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The name alone, without its folder.
    pub name: String,
    /// What it names.
    pub facts: Facts,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// For reading; it must exist.
    Read,
    /// For writing; it must not exist.
    CreateNew,
    /// For reading and writing in place; made empty if missing.
    Update,
    /// For reading, and writing at the end; made empty if missing.
    Append,
}

/// A file system, as far as the store needs one.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Opens a file.
    fn open(&self, path: &Path, how: How) -> io::Result<Box<dyn DiskFile>>;
    /// What `path` is. A symbolic link is not followed.
    fn facts(&self, path: &Path) -> io::Result<Facts>;
    /// The names in a folder, in no order. Names that are no UTF-8 are left out: none is the store's.
    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>>;
    /// Makes a folder and those above it; fine if it is there.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Gives a file its final name, replacing what had it, in one step.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a second name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file's name; open handles go on reading.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder and everything in it. Symbolic links are removed, not followed.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
    /// Sets the modification time, in nanoseconds since 1970.
    fn set_mtime(&self, path: &Path, mtime: u64) -> io::Result<()>;
    /// Makes a folder's names survive a power loss.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Bytes this user may still write to the file system that holds `path`.
    fn free(&self, path: &Path) -> io::Result<u64>;
    /// Names this run of the operating system, where it tells. Two equal answers mean that the page
    /// cache has lived on in between, whatever was killed.
    fn boot(&self) -> Option<String>;
    /// The time, in nanoseconds since 1970.
    fn now(&self) -> u64;
    /// Bytes that large files are best written in: whole pages, so many that a write past the page
    /// cache is no slower for its length.
    fn piece(&self) -> usize {
        1 << 20
    }
}

/// An open file. Dropping it closes it and gives its lock back.
pub trait DiskFile: Send + Sync + fmt::Debug {
    /// What the open file is now.
    fn facts(&self) -> io::Result<Facts>;
    /// Fills `bytes` from `offset` on; an end before that is [`io::ErrorKind::UnexpectedEof`].
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
    /// The same for bytes that are compared with their digest and not needed again soon: the page
    /// cache need not keep them.
    fn read_back(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(bytes, offset)
    }
    /// Writes all of `bytes` from `offset` on. After an error any part of them may have been written.
    /// Many bytes may go past the page cache, fastest from memory that begins with a page.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at the end, in one piece as other appenders see it.
    fn append(&self, bytes: &[u8]) -> io::Result<()>;
    /// Cuts or extends the file.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Sets the modification time, in nanoseconds since 1970.
    fn set_mtime(&self, mtime: u64) -> io::Result<()>;
    /// Makes the content survive a power loss.
    fn sync(&self) -> io::Result<()>;
    /// Takes the exclusive advisory lock if nobody has it, and says whether it did.
    fn try_lock(&self) -> io::Result<bool>;
    /// Gives the lock back.
    fn unlock(&self) -> io::Result<()>;
}

/// The file system of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

#[derive(Debug)]
struct RealFile {
    file: fs::File,
    writes: bool,
    past_cache: OnceLock<Option<PastCache>>,
}

impl RealFile {
    fn past_cache(&self) -> Option<&PastCache> {
        let open = || PastCache::of(&self.file, self.writes);
        self.past_cache.get_or_init(open).as_ref()
    }
}

impl Disk for RealDisk {
    fn open(&self, path: &Path, how: How) -> io::Result<Box<dyn DiskFile>> {
        let mut options = fs::OpenOptions::new();
        match how {
            How::Read => options.read(true),
            How::CreateNew => options.read(true).write(true).create_new(true),
            How::Update => options.read(true).write(true).create(true).truncate(false),
            How::Append => options.read(true).append(true).create(true),
        };
        let file = options.open(path)?;
        if how == How::Read && file.metadata()?.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        Ok(Box::new(RealFile {
            file,
            writes: how != How::Read,
            past_cache: OnceLock::new(),
        }))
    }

    fn facts(&self, path: &Path) -> io::Result<Facts> {
        fs::symlink_metadata(path).map(|m| facts_of(&m))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            match entry.metadata() {
                Ok(found) => listed.push(Listed {
                    name,
                    facts: facts_of(&found),
                }),
                // Another process removed it between the two calls.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(listed)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn set_mtime(&self, path: &Path, mtime: u64) -> io::Result<()> {
        let mtime = timespec(mtime);
        let times = rustix::fs::Timestamps {
            last_access: mtime,
            last_modification: mtime,
        };
        let nofollow = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        Ok(rustix::fs::utimensat(
            rustix::fs::CWD,
            path,
            &times,
            nofollow,
        )?)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        fs::File::open(path)?.sync_all()
    }

    fn free(&self, path: &Path) -> io::Result<u64> {
        let found = rustix::fs::statvfs(path)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn boot(&self) -> Option<String> {
        // Elsewhere than on Linux no file tells; the answer is then "unknown", which the store
        // treats as a power loss: it forgets a second of work, never more.
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(text.trim().to_owned())
    }

    fn now(&self) -> u64 {
        nanos(SystemTime::now())
    }
}

impl DiskFile for RealFile {
    fn facts(&self) -> io::Result<Facts> {
        self.file.metadata().map(|m| facts_of(&m))
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    fn read_back(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if bytes.len() >= past_cache::LEAST
            && let Some(file) = self.past_cache()
            && file.read(bytes, offset)?
        {
            return Ok(());
        }
        self.read_at(bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let page = past_cache::PAGE as u64;
        let large = bytes.len() >= past_cache::LEAST && offset.is_multiple_of(page);
        let done = match large.then(|| self.past_cache()).flatten() {
            Some(file) => file.write_pages(bytes, offset)?,
            None => 0,
        };
        self.file.write_all_at(&bytes[done..], offset + done as u64)
    }

    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        io::Write::write_all(&mut &self.file, bytes)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn set_mtime(&self, mtime: u64) -> io::Result<()> {
        let mtime = timespec(mtime);
        let times = rustix::fs::Timestamps {
            last_access: mtime,
            last_modification: mtime,
        };
        Ok(rustix::fs::futimens(&self.file, &times)?)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn try_lock(&self) -> io::Result<bool> {
        let wanted = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        match rustix::fs::flock(&self.file, wanted) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
            // File systems without locks (some network mounts): every name is still published by
            // rename, so going on can cost a double download or a budget exceeded by another
            // process, never a wrong byte.
            Err(
                rustix::io::Errno::NOTSUP | rustix::io::Errno::NOSYS | rustix::io::Errno::NOLCK,
            ) => Ok(true),
            Err(e) => Err(e.into()),
        }
    }

    fn unlock(&self) -> io::Result<()> {
        match rustix::fs::flock(&self.file, rustix::fs::FlockOperation::Unlock) {
            Err(
                rustix::io::Errno::NOTSUP | rustix::io::Errno::NOSYS | rustix::io::Errno::NOLCK,
            ) => Ok(()),
            other => Ok(other?),
        }
    }
}

fn facts_of(found: &fs::Metadata) -> Facts {
    Facts {
        kind: if found.is_file() {
            Kind::File
        } else if found.is_dir() {
            Kind::Folder
        } else {
            Kind::Other
        },
        len: found.len(),
        mtime: found.modified().map_or(0, nanos),
        id: found.ino(),
    }
}

/// Nanoseconds since 1970; a time before that counts as 1970.
fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn timespec(nanos: u64) -> rustix::fs::Timespec {
    rustix::fs::Timespec {
        tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: (nanos % 1_000_000_000) as _,
    }
}

/// Reads `len` bytes at `offset`.
pub(super) fn read_vec(file: &dyn DiskFile, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// The same by [`DiskFile::read_back`].
pub(super) fn read_back_vec(file: &dyn DiskFile, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_back(&mut bytes, offset)?;
    Ok(bytes)
}

/// Whether a name is one that [`write_file`] writes under until the file has its own.
pub(super) fn is_unfinished(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".tmp")
}

/// Reads a whole file, or `None` if there is none.
pub(super) fn read_file(disk: &dyn Disk, path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match disk.open(path, How::Read) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let len = file.facts()?.len;
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?;
    read_vec(&*file, 0, len).map(Some)
}

/// Writes a small file so that, whatever happens, its name holds the old bytes or the new ones.
pub(super) fn write_file(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("file");
    // The clock makes the name unique between threads and processes closely enough: a clash is an
    // error from `CreateNew`, not a mixture of two files.
    let temporary = folder.join(format!(".{name}.{:x}.tmp", disk.now()));
    let written = disk.open(&temporary, How::CreateNew).and_then(|file| {
        file.write_at(bytes, 0)?;
        file.sync()?;
        match disk.rename(&temporary, path) {
            // A folder where the file belongs is damage, and in the way.
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => {
                disk.remove_tree(path)?;
                disk.rename(&temporary, path)
            }
            other => other,
        }
    });
    if written.is_err() {
        let _ = disk.remove_file(&temporary);
    }
    written?;
    disk.sync_folder(folder)
}

/// Removes whatever has this name. Fine if nothing has.
pub(super) fn remove_any(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    let removed = match disk.remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(_) if disk.facts(path).is_ok_and(|f| f.kind == Kind::Folder) => disk.remove_tree(path),
        other => other,
    };
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
