//! What a repository holds at one commit, and what is asked of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::Serialize;

use crate::terms::ByteRange;
use crate::terms::Digest;
use crate::terms::RepoId;
use crate::terms::Revision;

/// A repository at one commit: immutable, so it may be kept for ever.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The repository.
    pub repo: RepoId,
    /// The pinned commit.
    pub commit: Revision,
    /// Every file, by its path in the repository (`/` between folders, never absolute).
    pub files: BTreeMap<String, FileFacts>,
}

/// What is known of a file before its bytes arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Length in bytes.
    pub size: u64,
    /// SHA-256 of the whole file, where the hub states one (its large files).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Digest>,
    /// Git's name for the content (SHA-1 over `blob LENGTH\0` and the bytes), 40 hexadecimal
    /// digits, where the hub states one (its small files).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git_sha1: Option<String>,
}

/// A range of one file of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Path in the repository.
    pub file: Arc<str>,
    /// Which bytes; not empty.
    pub range: ByteRange,
    /// The SHA-256 these bytes must have, if somebody knows it.
    pub digest: Option<Digest>,
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.file, self.range)
    }
}

/// Who waits for a span. Lower classes start only on lanes that no higher one waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// The arithmetic stands still until it comes.
    Demand,
    /// A download somebody asked for.
    Bulk,
    /// A guess. It uses idle lanes alone, at most half of them, and steps back for demand.
    Hint,
}

/// A span that arrived whole and passed every check there was.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// Exactly the span's bytes.
    pub bytes: bytes::Bytes,
    /// SHA-256 of `bytes`, computed as they came in.
    pub sha256: Digest,
    /// Whether another Deltafin on the network gave them, rather than a hub.
    pub peer: bool,
    /// Name of the source: scheme and host of a hub, or a folder.
    pub source: Arc<str>,
}
