//! All jobs of a home.

use std::fs;
use std::fs::File;
use std::fs::OpenOptions;
use std::fs::TryLockError;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use serde_json::Value;

use super::Identity;
use super::error::JobError;
use super::job;
use super::job::Description;
use super::job::Job;
use super::job::LOCK;
use super::job::Outcome;
use super::snapshot;
use super::writer::Writer;

/// The longest name.
const NAME_MAX: usize = 64;

/// A folder of jobs. Several processes may use one; a job belongs to one at a time.
#[derive(Clone)]
pub struct Journal {
    root: PathBuf,
    writer: Arc<Writer>,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal")
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

/// A job as it lies on the disk, whoever owns it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub id: String,
    /// What it is for.
    pub kind: String,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// When its request was last replaced.
    pub updated: u64,
    /// What it belongs to.
    pub identity: Identity,
    /// Its request.
    pub request: Value,
    /// Tokens generated so far.
    pub ids: Vec<crate::terms::TokenId>,
    /// How it ended, if it has.
    pub outcome: Option<Outcome>,
    /// Whether a process owns it.
    pub running: bool,
    /// Bytes it takes on the disk.
    pub bytes: u64,
}

impl Journal {
    /// The journal of a home: `jobs-v1`.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be made.
    pub fn open(home: &Path) -> Result<Journal, JobError> {
        Journal::at(home.join("jobs-v1"))
    }

    /// The sessions of a home: jobs with names that people gave them, in `sessions-v1`.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be made.
    pub fn sessions(home: &Path) -> Result<Journal, JobError> {
        Journal::at(home.join("sessions-v1"))
    }

    fn at(root: PathBuf) -> Result<Journal, JobError> {
        fs::create_dir_all(&root).map_err(JobError::disk("cannot be made", &root))?;
        let writer = Writer::start().map_err(JobError::disk("no thread to write with", &root))?;
        Ok(Journal {
            root,
            writer: Arc::new(writer),
        })
    }

    /// Makes a job with a name nobody guesses.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub fn create(&self, kind: &str, request: Value, identity: &Identity) -> Result<Job, JobError> {
        use std::hash::BuildHasher;
        // Every RandomState has keys of its own, the first of them from the system's randomness.
        let part = || std::hash::RandomState::new().hash_one(kind);
        let id = format!("{kind}-{:016x}{:016x}", part(), part());
        self.create_as(&id, kind, request, identity)
    }

    /// Makes a job, or opens the one that has this name.
    ///
    /// # Errors
    ///
    /// Where another process owns it, the name cannot be one, or the disk says no.
    pub fn create_as(
        &self,
        id: &str,
        kind: &str,
        request: Value,
        identity: &Identity,
    ) -> Result<Job, JobError> {
        let folder = self.folder(id)?;
        fs::create_dir_all(&folder).map_err(JobError::disk("cannot be made", &folder))?;
        let lock = lock(&folder, id)?;
        let description = match Description::read(&folder, id) {
            Err(JobError::NotFound { .. }) => {
                let now = unix_now();
                let description = Description {
                    kind: kind.to_owned(),
                    created: now,
                    updated: now,
                    turn: 0,
                    identity: identity.clone(),
                    request,
                };
                description.write(&folder)?;
                snapshot::sync_folder(&folder)
                    .map_err(JobError::disk("cannot be synced", &folder))?;
                description
            }
            read => read?,
        };
        Job::open(id, folder, description, lock, Arc::clone(&self.writer))
    }

    /// Opens a job that is there.
    ///
    /// # Errors
    ///
    /// Where there is none, another process owns it, or it cannot be read.
    pub fn get(&self, id: &str) -> Result<Job, JobError> {
        let folder = self.folder(id)?;
        Description::read(&folder, id)?;
        let lock = lock(&folder, id)?;
        let description = Description::read(&folder, id)?;
        Job::open(id, folder, description, lock, Arc::clone(&self.writer))
    }

    /// Looks at a job without owning it.
    ///
    /// # Errors
    ///
    /// Where there is none, or it cannot be read.
    pub fn look(&self, id: &str) -> Result<Listed, JobError> {
        let folder = self.folder(id)?;
        let description = Description::read(&folder, id)?;
        let running = File::open(folder.join(LOCK))
            .is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)));
        Ok(Listed {
            id: id.to_owned(),
            kind: description.kind,
            created: description.created,
            updated: description.updated,
            identity: description.identity,
            request: description.request,
            ids: job::read_ids(&folder, description.turn)?,
            outcome: job::outcome(&folder),
            running,
            bytes: bytes(&folder),
        })
    }

    /// All jobs of a kind that can be read, by time.
    pub fn list(&self, kind: &str) -> Vec<Listed> {
        let mut jobs: Vec<Listed> = self
            .ids()
            .iter()
            .filter_map(|id| self.look(id).ok())
            .filter(|job| job.kind == kind)
            .collect();
        jobs.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        jobs
    }

    /// The names of all folders, whatever they hold.
    pub fn ids(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut ids: Vec<String> = entries
            .filter(|entry| entry.path().is_dir())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        ids.sort();
        ids
    }

    /// Removes a job, readable or not.
    ///
    /// # Errors
    ///
    /// Where there is none, or another process owns it.
    pub fn remove(&self, id: &str) -> Result<(), JobError> {
        let folder = self.folder(id)?;
        if !folder.is_dir() {
            return Err(JobError::NotFound { id: id.to_owned() });
        }
        let _lock = lock(&folder, id)?;
        // A state of a job that was let go may still be on its way.
        self.writer.forget(&folder, None);
        fs::remove_dir_all(&folder).map_err(JobError::disk("cannot be removed", &folder))
    }

    /// Waits until what was to be written behind is written.
    pub fn flush(&self) {
        self.writer.flush();
    }

    fn folder(&self, id: &str) -> Result<PathBuf, JobError> {
        check_name(id)?;
        Ok(self.root.join(id))
    }
}

/// Whether a name can be a file's, here and on other systems.
pub(super) fn check_name(name: &str) -> Result<(), JobError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_name = !name.is_empty()
        && name.len() <= NAME_MAX
        && !name.starts_with(['.', '-'])
        && name.chars().all(fits);
    let wrong = || JobError::Name {
        name: name.to_owned(),
    };
    is_name.then_some(()).ok_or_else(wrong)
}

/// Owns a folder as long as the file is open.
///
/// # Errors
///
/// Where another process owns it, or the disk says no.
pub(crate) fn lock(folder: &Path, id: &str) -> Result<File, JobError> {
    let path = folder.join(LOCK);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(JobError::disk("cannot be locked", &path))?;
    let busy = || JobError::Busy { id: id.to_owned() };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(busy()),
        Err(TryLockError::Error(error)) => {
            return Err(JobError::disk("cannot be locked", &path)(error));
        }
    }
    // Whoever owned it may have removed it between the two: then this lock guards nothing.
    let same = match (file.metadata(), fs::metadata(&path)) {
        (Ok(locked), Ok(there)) => locked.ino() == there.ino(),
        _ => false,
    };
    if same { Ok(file) } else { Err(busy()) }
}

fn bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
}

pub(super) fn unix_now() -> u64 {
    // A clock before 1970 is told as 1970.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
