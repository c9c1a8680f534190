//! What can be served: models at one commit each, every file known by size and sha256.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use sha2::Digest as _;
use sha2::Sha256;

use crate::terms::ByteRange;
use crate::terms::Digest;
use crate::terms::RepoId;
use crate::terms::Revision;

/// A file's facts, as every reply states them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Length in bytes.
    pub size: u64,
    /// Of the whole file; its ETag.
    pub sha256: Digest,
}

/// One model at one commit: the files that may be asked for. A path that is not a key here does
/// not exist, whatever lies on the disk; that is why no request can climb out of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The model's name.
    pub repo: RepoId,
    /// What `main` stands for.
    pub commit: Revision,
    /// By path, with `/` between folders.
    pub files: BTreeMap<String, Entry>,
}

impl Listing {
    /// A listing whose commit follows from its content: the first 40 digits of the sha256 over
    /// every path, size and sha256, so that equal files have equal commits on every machine.
    pub fn new(repo: RepoId, files: BTreeMap<String, Entry>) -> Listing {
        let mut hash = Sha256::new();
        for (path, entry) in &files {
            // Lengths first, so that no two lists read the same.
            hash.update((path.len() as u64).to_le_bytes());
            hash.update(path.as_bytes());
            hash.update(entry.size.to_le_bytes());
            hash.update(entry.sha256.0);
        }
        let digest = Digest(hash.finalize().into()).to_string();
        let commit = digest[..40]
            .parse()
            .expect("40 hexadecimal digits are a commit");
        Listing {
            repo,
            commit,
            files,
        }
    }
}

/// An open file's bytes.
pub trait Content: Send + Sync {
    /// Whether these bytes are here: a store that is still growing may lack some.
    fn has(&self, range: ByteRange) -> bool {
        let _ = range;
        true
    }

    /// Makes `range` readable as far as a first byte needs it, before a reply is begun; may block.
    /// Whether it is, or can be made so: what is not is not found here.
    ///
    /// # Errors
    ///
    /// Where it should be and is not just now.
    fn ready(&self, range: ByteRange) -> io::Result<bool> {
        Ok(self.has(range))
    }

    /// Exactly `len` bytes from `offset`; may block.
    ///
    /// # Errors
    ///
    /// Where the bytes cannot be read, or the file is no longer the one that was listed.
    fn read(&self, offset: u64, len: usize) -> io::Result<Bytes>;
}

/// Models that can be served.
pub trait Backend: Send + Sync + 'static {
    /// All models, in no particular order.
    fn models(&self) -> Vec<Arc<Listing>>;

    /// Whether this is another machine's store rather than a hub of its own: clients count its
    /// bytes apart.
    fn is_peer(&self) -> bool {
        false
    }

    /// Opens a file of a listing this backend gave; may block.
    ///
    /// # Errors
    ///
    /// Where the file cannot be opened, or is no longer the one that was listed.
    fn open(&self, listing: &Listing, path: &str) -> io::Result<Arc<dyn Content>>;
}
