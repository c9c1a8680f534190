//! States after the beginnings that many prompts share, each one file fit to be published.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use serde_json::Value;

use super::Identity;
use super::error::JobError;
use super::error::Refusal;
use super::job;
use super::job::Loaded;
use super::snapshot;
use super::snapshot::Head;
use crate::checkpoint::Spec;
use crate::model::Sequence;
use crate::terms::TokenId;

/// What a prefix's file name ends with.
const ENDING: &str = "prefix";

/// The prefixes of a home, in `prefixes-v1`.
#[derive(Clone, Debug)]
pub struct Prefixes {
    root: PathBuf,
}

/// One of them.
#[derive(Debug)]
pub struct Prefix {
    /// Its name.
    pub name: String,
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// What it says of itself, or why it cannot be used.
    pub head: Result<Head, Refusal>,
}

impl Prefixes {
    /// Those of a home. Nothing is made on the disk before the first is kept.
    pub fn open(home: &Path) -> Prefixes {
        Prefixes {
            root: home.join("prefixes-v1"),
        }
    }

    /// Keeps a state.
    ///
    /// # Errors
    ///
    /// Where the name cannot be a file's, or the disk says no.
    pub fn keep(
        &self,
        name: &str,
        identity: &Identity,
        about: Value,
        ids: &[TokenId],
        sequence: &Sequence,
    ) -> Result<u64, JobError> {
        let path = self.make(name)?;
        snapshot::write(&path, identity, about, ids, sequence)
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<Prefix> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut found: Vec<Prefix> = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|ending| ending == ENDING))
            .filter_map(|path| {
                Some(Prefix {
                    name: path.file_stem()?.to_str()?.to_owned(),
                    bytes: fs::metadata(&path).ok()?.len(),
                    head: snapshot::read_head(&path),
                    path,
                })
            })
            .collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    /// The longest from which a text can go on.
    pub fn start_for(&self, text: &[TokenId], identity: &Identity, spec: &Spec) -> Loaded {
        let paths: Vec<PathBuf> = self.list().into_iter().map(|prefix| prefix.path).collect();
        job::longest(&paths, text, identity, spec)
    }

    /// Copies one out, verified.
    ///
    /// # Errors
    ///
    /// Where there is none of the name, it is damaged, or the disk says no.
    pub fn export(&self, name: &str, to: &Path) -> Result<Head, JobError> {
        let path = self.path(name)?;
        if !path.is_file() {
            let id = format!("prefix {name}");
            return Err(JobError::NotFound { id });
        }
        copy(&path, to)
    }

    /// Copies one in, verified.
    ///
    /// # Errors
    ///
    /// Where it is none, damaged, or the disk says no. What had the name before is then untouched.
    pub fn import(&self, name: &str, from: &Path) -> Result<Head, JobError> {
        copy(from, &self.make(name)?)
    }

    /// Removes one.
    ///
    /// # Errors
    ///
    /// Where there is none of the name, or the disk says no.
    pub fn remove(&self, name: &str) -> Result<(), JobError> {
        let path = self.path(name)?;
        if !path.is_file() {
            let id = format!("prefix {name}");
            return Err(JobError::NotFound { id });
        }
        fs::remove_file(&path).map_err(JobError::disk("cannot be removed", &path))
    }

    fn make(&self, name: &str) -> Result<PathBuf, JobError> {
        let path = self.path(name)?;
        fs::create_dir_all(&self.root).map_err(JobError::disk("cannot be made", &self.root))?;
        Ok(path)
    }

    fn path(&self, name: &str) -> Result<PathBuf, JobError> {
        super::journal::check_name(name)?;
        Ok(self.root.join(format!("{name}.{ENDING}")))
    }
}

/// Copies a state whose digest fits: the copy is checked rather than the original, since that is
/// what will be used.
fn copy(from: &Path, to: &Path) -> Result<Head, JobError> {
    let temporary = snapshot::beside(to);
    let damaged = |path: &Path, refusal: Refusal| JobError::Damaged {
        path: path.to_owned(),
        reason: refusal.to_string(),
    };
    let copied = fs::copy(from, &temporary).map_err(JobError::disk("cannot be copied", from));
    let checked = copied.and_then(|_| {
        let head = snapshot::verify(&temporary).map_err(|refusal| damaged(from, refusal))?;
        let publish = || {
            fs::File::open(&temporary)?.sync_all()?;
            fs::rename(&temporary, to)?;
            snapshot::sync_folder(to)
        };
        publish().map_err(JobError::disk("cannot be written", to))?;
        Ok(head)
    });
    if checked.is_err() {
        // Nobody would look for it again.
        let _ = fs::remove_file(&temporary);
    }
    checked
}
