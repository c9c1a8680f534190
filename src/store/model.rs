//! One model's folder: its source record and its small files.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde::Serialize;
use sha2::Digest as _;
use sha2::Sha256;

use super::Model;
use super::Store;
use super::budget::GATE_WAIT;
use super::disk::read_file;
use super::disk::write_file;
use super::error::Damage;
use super::error::StoreError;
use super::recover::model_name;
use super::settings::Settings;
use super::table::Known;
use super::table::Level;
use super::table::Line;
use super::table::Subject;
use crate::terms::Digest;
use crate::terms::RepoId;
use crate::terms::Revision;

/// Where what the hub said about a commit is kept.
pub(super) const SOURCE: &str = "source.json";

/// One model at one commit in a store. Cloning it shares it.
#[derive(Clone, Debug)]
pub struct ModelStore {
    store: Store,
    model: Arc<Model>,
}

/// A folder of small files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    /// `config.json`, tokenizer files and the like, as on the hub.
    Meta,
    /// The first 8 + N bytes of each shard, by the shard's name.
    Headers,
}

impl Area {
    fn folder(self) -> &'static str {
        match self {
            Area::Meta => "meta",
            Area::Headers => "headers",
        }
    }
}

/// `source.json`: what the hub said about a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// The repository.
    pub repo: RepoId,
    /// The commit.
    pub commit: Revision,
    /// Every file by its path.
    pub files: BTreeMap<String, FileRecord>,
    /// The length N of each shard's JSON header, as far as it is known.
    #[serde(default)]
    pub header_lens: BTreeMap<String, u64>,
}

/// What the hub said about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Bytes.
    pub size: u64,
    /// Its digest, where the hub publishes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Digest>,
}

impl ModelStore {
    pub(super) fn new(store: Store, model: Arc<Model>) -> Self {
        ModelStore { store, model }
    }

    /// The repository.
    pub fn repo(&self) -> &RepoId {
        &self.model.repo
    }

    /// The commit.
    pub fn commit(&self) -> &Revision {
        &self.model.commit
    }

    /// The model's folder. Only this room writes into it.
    pub fn folder(&self) -> &Path {
        &self.model.folder
    }

    /// The store this is a part of.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Bytes that may still be written to the disk, where it tells.
    pub fn free(&self) -> Option<u64> {
        let inner = &self.store.inner;
        inner.disk.free(&inner.home).ok()
    }

    pub(super) fn record(&self) -> &Arc<Model> {
        &self.model
    }

    /// What the hub said about this commit, if it was asked and the answer is whole.
    pub fn source(&self) -> Result<Option<SourceRecord>, StoreError> {
        let path = self.model.folder.join(SOURCE);
        let Some(bytes) = self.read_small(&path)? else {
            return Ok(None);
        };
        // Earlier versions recorded no digest of it.
        let told = self.told(&Subject::File(SOURCE.into()))?;
        if let Some(damage) = told.and_then(|known| unlike(&bytes, &known)) {
            self.remove_small(&path, &damage)?;
            return Ok(None);
        }
        let record = serde_json::from_slice::<SourceRecord>(&bytes).ok();
        Ok(record.filter(|r| r.repo == self.model.repo && r.commit == self.model.commit))
    }

    /// Keeps what the hub said about this commit.
    pub fn set_source(&self, record: &SourceRecord) -> Result<(), StoreError> {
        let path = self.model.folder.join(SOURCE);
        let text = serde_json::to_vec_pretty(record);
        let text = text.map_err(|e| StoreError::io("write", &path, e.into()))?;
        self.write_vouched(&path, Subject::File(SOURCE.into()), &text)
    }

    /// A small file, if it is stored and its bytes are those that were stored.
    pub fn read(&self, area: Area, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let (path, subject) = self.small_file(area, name)?;
        let Some(bytes) = self.read_small(&path)? else {
            return Ok(None);
        };
        let told = self.told(&subject)?;
        let damage = told.map_or(Some(Damage::Unknown), |known| unlike(&bytes, &known));
        let Some(damage) = damage else {
            return Ok(Some(bytes));
        };
        self.remove_small(&path, &damage)?;
        Ok(None)
    }

    /// A small file's bytes, whatever they are; a folder in its place is removed.
    fn read_small(&self, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
        match read_file(&*self.store.inner.disk, path) {
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => {
                self.remove_small(path, &Damage::NotAFile)?;
                Ok(None)
            }
            other => other.map_err(|e| StoreError::io("read", path, e)),
        }
    }

    /// What is damaged is as good as missing: the caller fetches it again.
    fn remove_small(&self, path: &Path, damage: &Damage) -> Result<(), StoreError> {
        let removed = super::disk::remove_any(&*self.store.inner.disk, path);
        removed.map_err(|e| StoreError::io("remove", path, e))?;
        self.store.inner.damaged(path, damage);
        Ok(())
    }

    /// Stores a small file: after any stop its name holds the old bytes, the new ones, or nothing.
    pub fn write(&self, area: Area, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let (path, subject) = self.small_file(area, name)?;
        self.write_vouched(&path, subject, bytes)
    }

    fn write_vouched(&self, path: &Path, subject: Subject, bytes: &[u8]) -> Result<(), StoreError> {
        self.write_at(path, bytes)?;
        let known = Known {
            sha256: digest_of(bytes),
            length: bytes.len() as u64,
            level: Level::FirstUse,
        };
        self.vouch(subject, known, "hub", path)
    }

    /// The names stored in an area.
    pub fn names(&self, area: Area) -> Vec<String> {
        let folder = self.model.folder.join(area.folder());
        let listed = self.store.inner.disk.list(&folder).unwrap_or_default();
        let names = listed.into_iter().map(|l| l.name);
        let mut names: Vec<String> = names.filter(|n| !n.starts_with('.')).collect();
        names.sort_unstable();
        names
    }

    /// Writes the digest of a file that is published and synced already, and syncs that too.
    pub(super) fn vouch(
        &self,
        subject: Subject,
        known: Known,
        source: &str,
        path: &Path,
    ) -> Result<(), StoreError> {
        let log = &self.model.log;
        let line = Line {
            subject,
            known,
            quick: None,
            source,
            checked: false,
        };
        let n = log.append(&[line]);
        let n = n.map_err(|e| StoreError::io("write", log.path(), e))?;
        log.settle(n, Some(path.to_owned()));
        log.sync()
            .map_err(|e| StoreError::io("sync", log.path(), e))?;
        Ok(())
    }

    /// Lets this model out of the budget (a full install), or takes it back in. Taking it back in
    /// evicts nothing by itself.
    pub fn set_unlimited(&self, unlimited: bool) -> Result<(), StoreError> {
        let inner = &self.store.inner;
        let create = inner.disk.create_folder(&self.model.folder);
        create.map_err(|e| StoreError::io("create", &self.model.folder, e))?;
        let mut entered = inner.enter(GATE_WAIT)?;
        let path = inner.home.join("store.json");
        let settings = Settings::read(&*inner.disk, &inner.home);
        let mut settings = settings.map_err(|e| StoreError::io("read", &path, e))?;
        let name = model_name(&self.model);
        let changed = if unlimited {
            settings.unlimited.insert(name)
        } else {
            settings.unlimited.remove(&name)
        };
        if changed {
            settings.write(&*inner.disk, &inner.home)?;
        }
        let counted = inner.recount(&mut entered);
        counted.map_err(|e| StoreError::io("count", &inner.home, e))?;
        let path = inner.home.join("locks/ledger");
        entered
            .commit()
            .map_err(|e| StoreError::io("write", &path, e))
    }

    fn small_file(&self, area: Area, name: &str) -> Result<(PathBuf, Subject), StoreError> {
        if !is_plain(name) {
            return Err(StoreError::Name {
                name: name.to_owned(),
            });
        }
        let local = format!("{}/{name}", area.folder());
        let path = self.model.folder.join(&local);
        Ok((path, Subject::File(local.into())))
    }

    fn write_at(&self, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let disk = &*self.store.inner.disk;
        let folder = path.parent().unwrap_or(path);
        let failed = |e| StoreError::io("write", path, e);
        disk.create_folder(folder).map_err(failed)?;
        write_file(disk, path, bytes).map_err(failed)
    }
}

/// Whether a name from a hub is safe as a path below a folder of ours.
pub(super) fn is_plain(name: &str) -> bool {
    let part = |p: &str| !p.is_empty() && !p.starts_with('.') && !p.contains(['\\', '\0', ':']);
    name.len() <= 512 && name.split('/').all(part)
}

/// In what `bytes` differ from what is known of them.
fn unlike(bytes: &[u8], known: &Known) -> Option<Damage> {
    let (expected, actual) = (known.length, bytes.len() as u64);
    if actual != expected {
        return Some(Damage::Length { expected, actual });
    }
    let (expected, actual) = (known.sha256, digest_of(bytes));
    (actual != expected).then_some(Damage::Content { expected, actual })
}

pub(super) fn digest_of(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}
