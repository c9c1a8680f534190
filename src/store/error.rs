//! Why the store could not do what it was asked.

use std::fmt;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use crate::terms::ByteRange;
use crate::terms::Digest;

/// Cut by what the caller does next: fetch again ([`StoreError::refetch`]), or tell the person.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The home cannot be used at all.
    #[error("{}: cannot be used as home: {source}", path.display())]
    Home {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No room for something that must be kept (core, metadata). Experts never cause this.
    #[error("{}: the disk is full", path.display())]
    Full {
        /// What was being written.
        path: PathBuf,
    },
    /// Any other refusal by the file system.
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// A verb: "read", "write".
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes on disk are not the bytes that were stored. They are already removed.
    #[error("{}: damaged ({damage}); removed", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        damage: Damage,
    },
    /// Another process evicted it after it was looked up.
    #[error("{}: evicted by another process", path.display())]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// Another process holds the lock for longer than anybody should.
    #[error("{}: locked by another process for {} s", path.display(), waited.as_secs())]
    Busy {
        /// The lock file.
        path: PathBuf,
        /// How long we waited.
        waited: Duration,
    },
    /// Bytes of a shard that are not stored.
    #[error("{shard}: {range} are not in the store")]
    Absent {
        /// The shard's name.
        shard: String,
        /// The stretch, all or some of which is missing.
        range: ByteRange,
    },
    /// A name that cannot be a file of a model.
    #[error("`{name}` cannot be the name of a model's file")]
    Name {
        /// The name.
        name: String,
    },
    /// A file was declared finished before all of it was there.
    #[error("{}: finished at byte {done} of {len}", path.display())]
    Short {
        /// The file.
        path: PathBuf,
        /// Bytes that are there.
        done: u64,
        /// Bytes that should be.
        len: u64,
    },
}

/// What is wrong with a stored file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Cut or grown.
    Length {
        /// Bytes that should be there.
        expected: u64,
        /// Bytes that are.
        actual: u64,
    },
    /// Other bytes than those that arrived.
    Content {
        /// Digest on arrival.
        expected: Digest,
        /// Digest now.
        actual: Digest,
    },
    /// Nothing tells what its bytes should be.
    Unknown,
    /// A folder, link or device has its name.
    NotAFile,
    /// The disk does not give it back.
    Unreadable(io::ErrorKind),
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Damage::Length { expected, actual } => {
                write!(f, "{actual} bytes instead of {expected}")
            }
            Damage::Content { expected, actual } => {
                write!(f, "sha256 {actual} instead of {expected}")
            }
            Damage::Unknown => f.write_str("no digest was recorded for it"),
            Damage::NotAFile => f.write_str("not a file"),
            Damage::Unreadable(kind) => write!(f, "unreadable: {kind}"),
        }
    }
}

impl StoreError {
    /// Whether fetching the same bytes again is the answer.
    pub fn refetch(&self) -> bool {
        matches!(self, StoreError::Damaged { .. } | StoreError::Gone { .. })
    }

    /// One sentence a person can act on, shown as `hint:` under the error.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            StoreError::Home { .. } => {
                Some("choose a folder you may write to with --home or DELTAFIN_HOME")
            }
            StoreError::Full { .. } => {
                Some("free some disk, lower --cache, or choose another disk with --home")
            }
            StoreError::Busy { .. } => {
                Some("another deltafin on this home is stopped or hangs; continue or end it")
            }
            StoreError::Damaged { .. } => {
                Some("it is fetched again when it is needed; see `deltafin cache verify`")
            }
            StoreError::Io { .. } => Some("look at the disk with `deltafin doctor`"),
            StoreError::Absent { .. } => Some("`deltafin fetch` brings what is missing"),
            StoreError::Gone { .. } | StoreError::Name { .. } | StoreError::Short { .. } => None,
        }
    }

    /// Sorts an error of the file system.
    pub(super) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if full(&source) {
            StoreError::Full { path }
        } else {
            StoreError::Io {
                path,
                doing,
                source,
            }
        }
    }
}

/// Whether the disk, or this user's share of it, has no room left.
pub(super) fn full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}
