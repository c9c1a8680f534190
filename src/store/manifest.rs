//! A list of what every expert of a model should be, that people can publish and hold others' bytes
//! against.
//!
//! ```text
//! deltafin manifest 1
//! {"model":"org/name","revision":"0123…","expert_bytes":17547264,"layers":[[1,896],…],"level":"whole shard"}
//! 32 bytes of SHA-256 for each expert, by layer, then expert
//! 32 bytes of SHA-256 over all of the above
//! ```
//!
//! The last sum is there because what a manifest contradicts is removed: a list that has rotted must
//! not cost anybody a sound store.

use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;

use serde::Deserialize;
use serde::Serialize;
use sha2::Digest as _;
use sha2::Sha256;

use super::ModelStore;
use super::error::Damage;
use super::error::StoreError;
use super::recover;
use super::table::Known;
use super::table::Level;
use super::table::Line;
use super::table::Subject;
use super::verify::Inspected;
use super::verify::inspect;
use crate::terms::Digest;
use crate::terms::ExpertKey;
use crate::terms::RepoId;
use crate::terms::Revision;

const MAGIC: &[u8] = b"deltafin manifest ";
const VERSION: u32 = 1;
/// Longest head that is read: 93 layers take a kilobyte.
const HEAD_MAX: usize = 1 << 20;
/// What was proved is written down so many experts at a time.
const BATCH: usize = 64;

/// What every expert of a model should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The repository.
    pub repo: RepoId,
    /// The commit.
    pub commit: Revision,
    /// Bytes of each expert.
    pub expert_bytes: u64,
    /// The least that whoever wrote it had proved of any of its digests.
    pub level: Level,
    /// In the order of the keys.
    digests: Vec<(ExpertKey, Digest)>,
}

/// Why bytes are no manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// They begin otherwise.
    #[error("not a manifest")]
    NotOne,
    /// A later version's.
    #[error("a manifest of version {0}, which this program does not know")]
    Version(String),
    /// It is not what was written.
    #[error("a damaged manifest: {0}")]
    Damaged(String),
}

/// Experts of which nothing is known, so that no manifest can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlisted {
    /// How many.
    pub unknown: usize,
    /// Of how many.
    pub of: usize,
}

/// What a comparison with a manifest has found, so far or in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Experts of the manifest.
    pub of: usize,
    /// Experts looked for.
    pub seen: usize,
    /// Experts that are here and are what they should be: they have risen to [`Level::Manifest`].
    pub proved: usize,
    /// Experts that are not here.
    pub absent: usize,
    /// Bytes read.
    pub bytes: u64,
    /// Experts that are not what they should be. They are removed.
    pub wrong: Vec<(PathBuf, Damage)>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    model: RepoId,
    revision: Revision,
    expert_bytes: u64,
    /// Each layer that has experts, and how many: they are numbered from 0.
    layers: Vec<(u16, u16)>,
    level: Level,
}

impl Manifest {
    /// How many experts it lists.
    pub fn len(&self) -> usize {
        self.digests.len()
    }

    /// Whether it lists none.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// Every expert and its digest, in the order of the keys.
    pub fn digests(&self) -> &[(ExpertKey, Digest)] {
        &self.digests
    }

    /// The manifest as it is written.
    ///
    /// # Errors
    ///
    /// None but from the serializer, which has no reason for any.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let mut layers: Vec<(u16, u16)> = Vec::new();
        for (key, _) in &self.digests {
            match layers.last_mut() {
                Some((layer, experts)) if *layer == key.layer => *experts += 1,
                _ => layers.push((key.layer, 1)),
            }
        }
        let head = Head {
            model: self.repo.clone(),
            revision: self.commit.clone(),
            expert_bytes: self.expert_bytes,
            layers,
            level: self.level,
        };
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(format!("{VERSION}\n").as_bytes());
        serde_json::to_writer(&mut bytes, &head).map_err(io::Error::other)?;
        bytes.push(b'\n');
        for (_, digest) in &self.digests {
            bytes.extend_from_slice(&digest.0);
        }
        let sum: [u8; 32] = Sha256::digest(&bytes).into();
        bytes.extend_from_slice(&sum);
        Ok(bytes)
    }

    /// Reads a manifest.
    ///
    /// # Errors
    ///
    /// If the bytes are none, or not the ones that were written.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let damaged = |why: &str| ManifestError::Damaged(why.to_owned());
        let (version, body) = bytes
            .strip_prefix(MAGIC)
            .and_then(cut_line)
            .ok_or(ManifestError::NotOne)?;
        if version != VERSION.to_string() {
            let shown = version.chars().take(20).collect();
            return Err(ManifestError::Version(shown));
        }
        let (all, sum) = bytes
            .split_last_chunk::<32>()
            .ok_or_else(|| damaged("it is cut"))?;
        let actual: [u8; 32] = Sha256::digest(all).into();
        if actual != *sum {
            return Err(damaged("its own sha256 is another"));
        }
        let (head, listed) = cut_line(body).ok_or_else(|| damaged("its head is cut"))?;
        let head: Head =
            serde_json::from_str(head).map_err(|e| damaged(&format!("its head: {e}")))?;
        let (listed, rest) = listed.as_chunks::<32>();
        if !rest.is_empty() || head.layers.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            return Err(damaged("its layers are in no order"));
        }
        let keys = head
            .layers
            .iter()
            .flat_map(|(layer, experts)| (0..*experts).map(|expert| (*layer, expert)));
        let keys = keys.map(|(layer, expert)| ExpertKey { layer, expert });
        let digests: Vec<_> = keys
            .zip(listed.iter().map(|digest| Digest(*digest)))
            .collect();
        let named: usize = head.layers.iter().map(|(_, n)| usize::from(*n)).sum();
        // The last of the listed is the sum of the whole.
        if named != digests.len() || named + 1 != listed.len() {
            return Err(damaged("it lists another number of experts than it says"));
        }
        Ok(Manifest {
            repo: head.model,
            commit: head.revision,
            expert_bytes: head.expert_bytes,
            level: head.level,
            digests,
        })
    }
}

/// A line of text at the front of `bytes`, and what comes after it.
fn cut_line(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let end = bytes.iter().take(HEAD_MAX).position(|b| *b == b'\n')?;
    let line = std::str::from_utf8(&bytes[..end]).ok()?;
    Some((line, &bytes[end + 1..]))
}

impl ModelStore {
    /// The manifest of the experts `keys`, of `len` bytes each: what they were when they arrived. They
    /// need not be here any more.
    ///
    /// # Errors
    ///
    /// In the inner place, how many were never here; in the outer one, if the digests cannot be read.
    pub fn manifest(
        &self,
        keys: &[ExpertKey],
        len: u64,
    ) -> Result<Result<Manifest, Unlisted>, StoreError> {
        let mut digests = Vec::with_capacity(keys.len());
        let mut level = Level::Manifest;
        for key in keys {
            let known = self.told(&Subject::Expert(*key))?;
            if let Some(known) = known.filter(|known| known.length == len) {
                level = level.min(known.level);
                digests.push((*key, known.sha256));
            }
        }
        if digests.len() < keys.len() {
            return Ok(Err(Unlisted {
                unknown: keys.len() - digests.len(),
                of: keys.len(),
            }));
        }
        digests.sort_unstable();
        Ok(Ok(Manifest {
            repo: self.repo().clone(),
            commit: self.commit().clone(),
            expert_bytes: len,
            level,
            digests,
        }))
    }

    /// Reads every expert that is here and holds it against a manifest of this model. `watch` sees the
    /// state after each and may end it early; what was found until then holds.
    ///
    /// What differs is removed, and from now on only what the manifest names is kept in its place.
    ///
    /// # Errors
    ///
    /// If the disk refuses otherwise than by giving wrong bytes.
    pub fn check_manifest(
        &self,
        manifest: &Manifest,
        watch: &mut dyn FnMut(&Checked) -> ControlFlow<()>,
    ) -> Result<Checked, StoreError> {
        let mut checked = Checked {
            of: manifest.len(),
            ..Checked::default()
        };
        let mut lines = Vec::new();
        for (key, digest) in &manifest.digests {
            let known = Known {
                sha256: *digest,
                length: manifest.expert_bytes,
                level: Level::Manifest,
            };
            let subject = Subject::Expert(*key);
            let path = recover::expert_path(self.folder(), *key);
            let inspected = inspect(&*self.store().inner.disk, &path, Some(known));
            match inspected.map_err(|e| StoreError::io("read", &path, e))? {
                Inspected::Gone => checked.absent += 1,
                Inspected::Sound(bytes) => {
                    checked.proved += 1;
                    checked.bytes += bytes;
                    lines.push(line(subject, known));
                }
                Inspected::Damaged(damage) => {
                    // The line first: whatever happens next, the wrong digest is not believed again.
                    self.append(&[line(subject.clone(), known)])?;
                    self.remove_damaged(&subject, &path)?;
                    checked.wrong.push((path, damage));
                }
            }
            checked.seen += 1;
            let over = watch(&checked).is_break();
            if lines.len() >= BATCH || over {
                self.append(&std::mem::take(&mut lines))?;
            }
            if over {
                break;
            }
        }
        if !lines.is_empty() {
            self.append(&lines)?;
        }
        Ok(checked)
    }
}

fn line(subject: Subject, known: Known) -> Line<'static> {
    Line {
        subject,
        known,
        quick: None,
        source: "manifest",
        checked: true,
    }
}
