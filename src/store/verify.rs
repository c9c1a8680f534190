//! Comparing what is stored with its digests: all of it, a sample, or a little whenever there is time.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::path::PathBuf;

use sha2::Digest as _;
use sha2::Sha256;

use super::ModelStore;
use super::disk::Disk;
use super::disk::How;
use super::disk::Kind;
use super::disk::read_back_vec;
use super::disk::remove_any;
use super::error::Damage;
use super::error::StoreError;
use super::lock;
use super::model::SOURCE;
use super::recover;
use super::table::Known;
use super::table::Level;
use super::table::Line;
use super::table::Subject;
use crate::terms::Digest;
use crate::terms::ExpertKey;

const PIECE: u64 = 4 << 20;

/// What a verification does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyOptions {
    /// Every n-th file is read, beginning with the first; 1 reads all.
    pub every: usize,
    /// Removes what is damaged, so that it is fetched again when it is needed.
    pub repair: bool,
}

/// What a verification has found, so far or in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files to be read in all.
    pub of: usize,
    /// Files read.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Sound files that are first arrivals.
    pub first_use: usize,
    /// Sound files that were proved by whole shards.
    pub whole_shard: usize,
    /// Sound files that a published list names.
    pub manifest: usize,
    /// Files that are not what they should be.
    pub damaged: Vec<(PathBuf, Damage)>,
    /// How many of them were removed.
    pub removed: usize,
}

/// One step of a scrub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrubbed {
    /// The expert that was read.
    pub key: ExpertKey,
    /// What was wrong with it; it is then already removed.
    pub damage: Option<Damage>,
}

impl ModelStore {
    /// Compares what is stored with its digests. `watch` sees the state after each file and may end
    /// it early; what is being used by others meanwhile is left to them.
    ///
    /// # Errors
    ///
    /// If the disk refuses otherwise than by giving wrong bytes.
    pub fn verify(
        &self,
        options: VerifyOptions,
        watch: &mut dyn FnMut(&Verified) -> ControlFlow<()>,
    ) -> Result<Verified, StoreError> {
        let subjects = self.subjects();
        let subjects = subjects.map_err(|e| StoreError::io("list", self.folder(), e))?;
        let chosen: Vec<_> = subjects.into_iter().step_by(options.every.max(1)).collect();
        let mut verified = Verified {
            of: chosen.len(),
            ..Verified::default()
        };
        for subject in chosen {
            let path = self.folder().join(subject.path());
            let known = self.told(&subject)?;
            let inspected = inspect(&*self.store().inner.disk, &path, known);
            let bytes = match inspected.map_err(|e| StoreError::io("read", &path, e))? {
                Inspected::Gone => continue,
                Inspected::Sound(bytes) => bytes,
                Inspected::Damaged(damage) => {
                    if options.repair {
                        self.remove_damaged(&subject, &path)?;
                        verified.removed += 1;
                    }
                    verified.damaged.push((path, damage));
                    0
                }
            };
            verified.files += 1;
            verified.bytes += bytes;
            if let Some(known) = known
                && bytes > 0
            {
                match known.level {
                    Level::FirstUse => verified.first_use += 1,
                    Level::WholeShard => verified.whole_shard += 1,
                    Level::Manifest => verified.manifest += 1,
                }
                self.passed(&subject, known)?;
            }
            if watch(&verified).is_break() {
                break;
            }
        }
        Ok(verified)
    }

    /// Reads the next expert after `after`, in the order of the keys and from the top again after
    /// the last, and removes it if it is damaged. `None` if there are no experts. Meant to be called
    /// now and then while nothing else reads the disk.
    pub fn scrub(&self, after: Option<ExpertKey>) -> Result<Option<Scrubbed>, StoreError> {
        let Some(key) = self.next_expert(after) else {
            return Ok(None);
        };
        let subject = Subject::Expert(key);
        let path = recover::expert_path(self.folder(), key);
        let known = self.told(&subject)?;
        let inspected = inspect(&*self.store().inner.disk, &path, known);
        let damage = match inspected.map_err(|e| StoreError::io("read", &path, e))? {
            Inspected::Gone => None,
            Inspected::Sound(_) => {
                if let Some(known) = known {
                    self.passed(&subject, known)?;
                }
                None
            }
            Inspected::Damaged(damage) => {
                self.remove_damaged(&subject, &path)?;
                Some(damage)
            }
        };
        Ok(Some(Scrubbed { key, damage }))
    }

    fn next_expert(&self, after: Option<ExpertKey>) -> Option<ExpertKey> {
        let state = lock(&self.store().inner.state);
        let keys = || {
            let entries = state.index.of_model(self.record().id);
            entries.map(|(id, _)| id.key)
        };
        let next = keys().filter(|key| after.is_none_or(|after| *key > after));
        next.min().or_else(|| keys().min())
    }

    /// Everything of this model that should have a digest, in the order in which it lies on disk.
    fn subjects(&self) -> io::Result<Vec<Subject>> {
        let disk = &*self.store().inner.disk;
        let mut subjects = Vec::new();
        let source = Subject::File(SOURCE.into());
        // Earlier versions recorded no digest of it.
        if self.record().log.get(&source)?.is_some() {
            subjects.push(source);
        }
        for folder in ["meta", "headers", "core", "rest"] {
            let mut files = Vec::new();
            self.files_below(folder, &mut files)?;
            files.sort_unstable();
            subjects.extend(files.into_iter().map(|f| Subject::File(f.into())));
        }
        let scan = recover::scan_model(disk, self.record())?;
        let mut keys: Vec<ExpertKey> = scan.entries.iter().map(|(id, _)| id.key).collect();
        keys.extend(scan.wrong.iter().filter_map(|path| {
            let local = path.strip_prefix(self.folder().join("experts")).ok()?;
            super::table::expert_of(local.to_str()?)
        }));
        keys.sort_unstable();
        subjects.extend(keys.into_iter().map(Subject::Expert));
        Ok(subjects)
    }

    /// Notes that a file was compared just now, if that was open.
    fn passed(&self, subject: &Subject, known: Known) -> Result<(), StoreError> {
        let log = &self.record().log;
        let told = log.get(subject);
        let told = told.map_err(|e| StoreError::io("read", log.path(), e))?;
        if told.is_some_and(|told| told.suspect) {
            let noted = self.append(&[Line {
                subject: subject.clone(),
                known,
                quick: None,
                source: "disk",
                checked: true,
            }]);
            match noted {
                // It is compared once more then; nobody is kept from comparing the rest.
                Err(StoreError::Full { .. }) => {}
                other => other?,
            }
        }
        if let Subject::Expert(key) = subject {
            let id = self.entry_id(*key);
            lock(&self.store().inner.state).index.set_checked(id);
        }
        Ok(())
    }

    pub(super) fn remove_damaged(&self, subject: &Subject, path: &Path) -> Result<(), StoreError> {
        let inner = &self.store().inner;
        match subject {
            Subject::Expert(key) => inner.discard(self.entry_id(*key), path),
            Subject::File(_) => {
                let removed = remove_any(&*inner.disk, path);
                removed.map_err(|e| StoreError::io("remove", path, e))?;
            }
        }
        lock(&inner.state).stats.damaged += 1;
        Ok(())
    }

    /// Files below a folder, as paths from the model's folder; what is on its way is left out. A folder
    /// that stands where a file should is named like the file.
    fn files_below(&self, local: &str, found: &mut Vec<String>) -> io::Result<()> {
        let disk = &*self.store().inner.disk;
        for listed in recover::list(disk, &self.folder().join(local))? {
            let local = format!("{local}/{}", listed.name);
            let growing = listed.name.ends_with(".part") || listed.name.ends_with(".progress");
            if listed.name.starts_with('.') || growing {
                continue;
            }
            let subject = Subject::File(local.as_str().into());
            if listed.facts.kind == Kind::Folder && self.record().log.get(&subject)?.is_none() {
                self.files_below(&local, found)?;
            } else {
                found.push(local);
            }
        }
        Ok(())
    }
}

pub(super) enum Inspected {
    /// Somebody removed it since it was listed.
    Gone,
    /// As it should be; so many bytes.
    Sound(u64),
    Damaged(Damage),
}

/// Compares a file with what is known of it.
pub(super) fn inspect(disk: &dyn Disk, path: &Path, known: Option<Known>) -> io::Result<Inspected> {
    let facts = match disk.facts(path) {
        Ok(facts) => facts,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Inspected::Gone),
        Err(e) => return Err(e),
    };
    if facts.kind != Kind::File {
        return Ok(Inspected::Damaged(Damage::NotAFile));
    }
    let Some(known) = known else {
        return Ok(Inspected::Damaged(Damage::Unknown));
    };
    if facts.len != known.length {
        return Ok(Inspected::Damaged(Damage::Length {
            expected: known.length,
            actual: facts.len,
        }));
    }
    match digest_file(disk, path, facts.len) {
        Ok(actual) if actual == known.sha256 => Ok(Inspected::Sound(facts.len)),
        Ok(actual) => Ok(Inspected::Damaged(Damage::Content {
            expected: known.sha256,
            actual,
        })),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Inspected::Gone),
        Err(e) => Ok(Inspected::Damaged(Damage::Unreadable(e.kind()))),
    }
}

fn digest_file(disk: &dyn Disk, path: &Path, len: u64) -> io::Result<Digest> {
    let file = disk.open(path, How::Read)?;
    let mut hasher = Sha256::new();
    let mut at = 0;
    while at < len {
        let piece = usize::try_from(PIECE.min(len - at)).unwrap_or(usize::MAX);
        hasher.update(read_back_vec(&*file, at, piece)?);
        at += piece as u64;
    }
    Ok(Digest(hasher.finalize().into()))
}
