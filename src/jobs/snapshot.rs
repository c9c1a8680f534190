//! A sequence's state as one verified file.
//!
//! ```text
//! "DFSTATE1"   u32 length of the head   head, JSON   values, f32 little-endian   sha256 of all before
//! ```
//!
//! The head says what the state belongs to and which tokens it has taken in; the values are those
//! of [`Sequence::slices`], in its order. A file comes to be under another name and is renamed when
//! it is whole and synced, so that a stop at any moment leaves the one before.

use std::fs;
use std::fs::File;
use std::io;
use std::io::BufReader;
use std::io::BufWriter;
use std::io::Read;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;
use sha2::Digest as _;
use sha2::Sha256;

use super::Identity;
use super::error::JobError;
use super::error::Refusal;
use crate::checkpoint::Spec;
use crate::engine::Start;
use crate::model::Sequence;
use crate::terms::TokenId;

const MAGIC: &[u8; 8] = b"DFSTATE1";
const DIGEST: u64 = 32;
/// A head longer than this is none: a million tokens take 7 MB.
const HEAD_MAX: u32 = 64 << 20;
/// Values that are turned into bytes at a time.
const CHUNK: usize = 16 << 10;

/// What a state says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// What it belongs to.
    #[serde(flatten)]
    pub identity: Identity,
    /// The tokens it has taken in.
    pub ids: Vec<TokenId>,
    /// How many f32 follow.
    pub values: u64,
    /// Whatever its maker wants known.
    #[serde(default)]
    pub about: Value,
}

/// Writes a state, at once or not at all; returns the file's length in bytes.
///
/// # Errors
///
/// Where the disk is full or says no; what was at `path` before is then still there.
pub fn write(
    path: &Path,
    identity: &Identity,
    about: Value,
    ids: &[TokenId],
    sequence: &Sequence,
) -> Result<u64, JobError> {
    let temporary = beside(path);
    let written = write_to(&temporary, identity, about, ids, sequence)
        .and_then(|bytes| fs::rename(&temporary, path).map(|()| bytes))
        .and_then(|bytes| sync_folder(path).map(|()| bytes));
    written.map_err(|source| {
        // Half a state serves nobody, least of all on a full disk.
        let _ = fs::remove_file(&temporary);
        JobError::disk("the state cannot be written", path)(source)
    })
}

fn write_to(
    path: &Path,
    identity: &Identity,
    about: Value,
    ids: &[TokenId],
    sequence: &Sequence,
) -> io::Result<u64> {
    let head = Head {
        identity: identity.clone(),
        ids: ids.to_vec(),
        values: sequence.slices().map(|s| s.values.len() as u64).sum(),
        about,
    };
    let head = serde_json::to_vec(&head)?;
    let length = u32::try_from(head.len()).map_err(io::Error::other)?;
    let mut out = Hashing {
        inner: BufWriter::with_capacity(1 << 20, File::create(path)?),
        hash: Sha256::new(),
        bytes: 0,
    };
    out.put(MAGIC)?;
    out.put(&length.to_le_bytes())?;
    out.put(&head)?;
    let mut bytes = Vec::with_capacity(4 * CHUNK);
    for slice in sequence.slices() {
        for values in slice.values.chunks(CHUNK) {
            bytes.clear();
            values
                .iter()
                .for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
            out.put(&bytes)?;
        }
    }
    let Hashing {
        mut inner,
        hash,
        bytes,
    } = out;
    inner.write_all(&hash.finalize())?;
    inner.into_inner()?.sync_all()?;
    Ok(bytes + DIGEST)
}

/// Reads what a state says of itself. Its digest is not checked.
///
/// # Errors
///
/// Where it is no state, or cut.
pub fn read_head(path: &Path) -> Result<Head, Refusal> {
    open(path).map(|(_, head)| head)
}

/// Reads a state that is to go on under `identity`.
///
/// # Errors
///
/// Where it is cut, changed, or belongs to something else: whoever asked computes it again.
pub fn read(path: &Path, identity: &Identity, spec: &Spec) -> Result<Start, Refusal> {
    let (mut file, head) = open(path)?;
    head.belongs_to(identity)?;
    if head.ids.len() > spec.context || head.ids.is_empty() {
        return Err(Refusal::Shape);
    }
    let mut sequence = Sequence::with_len(spec, head.ids.len());
    let values: u64 = sequence.slices().map(|s| s.values.len() as u64).sum();
    if values != head.values {
        return Err(Refusal::Shape);
    }
    let mut bytes = vec![0; 4 * CHUNK];
    for slice in sequence.slices_mut() {
        for values in slice.values.chunks_mut(CHUNK) {
            let bytes = &mut bytes[..4 * values.len()];
            file.get(bytes)?;
            let (words, _) = bytes.as_chunks::<4>();
            for (value, word) in values.iter_mut().zip(words) {
                *value = f32::from_le_bytes(*word);
            }
        }
    }
    file.check()?;
    Ok(Start {
        ids: head.ids,
        sequence,
    })
}

/// Checks a whole file against its digest, whatever it belongs to.
///
/// # Errors
///
/// Where it is no state, cut or changed.
pub fn verify(path: &Path) -> Result<Head, Refusal> {
    let (mut file, head) = open(path)?;
    let mut bytes = vec![0; 4 * CHUNK];
    let mut left = head.values * 4;
    while left > 0 {
        let now = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
        file.get(&mut bytes[..now])?;
        left -= now as u64;
    }
    file.check()?;
    Ok(head)
}

impl Head {
    /// Whether a state with this head may go on under `identity`.
    ///
    /// # Errors
    ///
    /// Naming the first thing that differs.
    pub fn belongs_to(&self, identity: &Identity) -> Result<(), Refusal> {
        let same = |what, found: &str, wanted: &str| {
            if found == wanted {
                return Ok(());
            }
            Err(Refusal::Other {
                what,
                found: found.to_owned(),
                wanted: wanted.to_owned(),
            })
        };
        let own = &self.identity;
        same("model", &own.model, &identity.model)?;
        same("revision", &own.revision, &identity.revision)?;
        same("arithmetic", &own.arithmetic, &identity.arithmetic)
    }
}

/// A file read and hashed; what follows the head is next.
struct Reading {
    inner: BufReader<File>,
    hash: Sha256,
}

impl Reading {
    fn get(&mut self, bytes: &mut [u8]) -> Result<(), Refusal> {
        self.inner.read_exact(bytes).map_err(unreadable)?;
        self.hash.update(bytes);
        Ok(())
    }

    fn check(mut self) -> Result<(), Refusal> {
        let mut digest = [0; DIGEST as usize];
        self.inner.read_exact(&mut digest).map_err(unreadable)?;
        if self.hash.finalize()[..] == digest {
            Ok(())
        } else {
            Err(Refusal::Digest)
        }
    }
}

fn open(path: &Path) -> Result<(Reading, Head), Refusal> {
    let file = File::open(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?.len();
    let mut reading = Reading {
        inner: BufReader::with_capacity(1 << 20, file),
        hash: Sha256::new(),
    };
    let mut start = [0; 12];
    if found < 12 {
        return Err(Refusal::Format);
    }
    reading.get(&mut start)?;
    let (magic, length) = start.split_at(8);
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
    if magic != MAGIC || length > HEAD_MAX {
        return Err(Refusal::Format);
    }
    let before_values = 12 + u64::from(length);
    if found < before_values {
        let expected = before_values + DIGEST;
        return Err(Refusal::Length { expected, found });
    }
    let mut head = vec![0; length as usize];
    reading.get(&mut head)?;
    let head: Head = serde_json::from_slice(&head).map_err(|_| Refusal::Format)?;
    let values = head.values.checked_mul(4).ok_or(Refusal::Format)?;
    let expected = values.saturating_add(before_values + DIGEST);
    if expected != found {
        return Err(Refusal::Length { expected, found });
    }
    Ok((reading, head))
}

fn unreadable(error: io::Error) -> Refusal {
    Refusal::Unreadable(error.to_string())
}

struct Hashing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Hashing<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.inner.write_all(bytes)
    }
}

/// The name under which a file comes to be.
pub(super) fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    path.with_file_name(name)
}

/// Makes a rename in a file's folder survive a power cut.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

/// Writes a small file at once or not at all, so that it survives a power cut.
///
/// # Errors
///
/// Where the disk says no; what was there before is then still there.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), JobError> {
    let temporary = beside(path);
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder(path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        JobError::disk("cannot be written", path)(source)
    })
}
