//! Batches: files of requests that are answered while nobody waits, and outlive the process.
//!
//! ```text
//! batches-v1/batch_…/lock         held by the process that answers it
//! batches-v1/batch_…/batch.json   how it stands; replaced by rename
//! batches-v1/batch_…/input        the input, also when its file is deleted
//! batches-v1/batch_…/log          what is answered: see [`log`]
//! ```
//!
//! Each line is a job of the journal while it is answered, so that a killed process loses of it what
//! it would have lost of a background response: a token. [`run`] is a batch's life.

mod input;
mod log;
pub(super) mod run;

use std::collections::HashMap;
use std::fs;
use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use self::log::Log;
use self::log::Tokens;
use super::cancel::Cancel;
use super::files;
use super::files::About;
use super::files::Files;
use super::reply::fresh_id;
use super::unix_nanos;
use super::unix_now;
use crate::jobs;
use crate::jobs::JobError;

const ABOUT: &str = "batch.json";
const INPUT: &str = "input";
const LOG: &str = "log";
/// What ids of batches begin with.
const PREFIX: &str = "batch_";
/// Batches that are kept; the oldest that are over go first.
const KEPT_MAX: usize = 1000;
/// Batches at work or in line at once.
const OPEN_MAX: usize = 100;

/// Where a batch is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Cancelling,
    Cancelled,
}

impl Status {
    /// Whether nothing more will change.
    pub(super) fn over(self) -> bool {
        matches!(self, Status::Failed | Status::Completed | Status::Cancelled)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Status::Validating => "validating",
            Status::Failed => "failed",
            Status::InProgress => "in_progress",
            Status::Finalizing => "finalizing",
            Status::Completed => "completed",
            Status::Cancelling => "cancelling",
            Status::Cancelled => "cancelled",
        }
    }
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Wish {
    /// The file with the requests.
    pub(super) input_file_id: String,
    /// The path they are all for.
    pub(super) endpoint: String,
    pub(super) metadata: Option<Map<String, Value>>,
}

/// A batch as it stands in `batch.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    id: String,
    wish: Wish,
    /// The model that answers it.
    model: String,
    status: Status,
    /// Nanoseconds since 1970.
    created: u64,
    /// When it came to each status, in seconds since 1970.
    since: Vec<(Status, u64)>,
    /// Requests of its input.
    total: usize,
    /// How many are answered, and how many failed, as of the last status.
    answered: (usize, usize),
    tokens: Tokens,
    /// What kept it from being a batch.
    faults: Vec<Value>,
    /// The files it writes: named from the start, so that a process that goes on writes the same.
    output: Written,
    errors: Written,
}

/// A file that a batch writes when it ends, if there is anything to be written.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Written {
    id: String,
    there: bool,
}

impl Written {
    fn later() -> Written {
        Written {
            id: files::fresh_file_id(),
            there: false,
        }
    }
}

impl State {
    /// OpenAI's object.
    fn json(&self) -> Value {
        let at = |status| {
            let mut since = self.since.iter().filter(|(one, _)| *one == status);
            since.next().map(|(_, at)| *at)
        };
        let (completed, failed) = self.answered;
        let faults = &self.faults;
        let errors = json!({ "object": "list", "data": faults });
        let file = |written: &Written| written.there.then(|| written.id.clone());
        json!({
            "id": self.id, "object": "batch", "endpoint": self.wish.endpoint,
            "errors": (!faults.is_empty()).then_some(errors),
            "input_file_id": self.wish.input_file_id, "completion_window": "24h",
            "status": self.status.name(), "model": self.model,
            "output_file_id": file(&self.output), "error_file_id": file(&self.errors),
            "created_at": self.created / 1_000_000_000,
            "in_progress_at": at(Status::InProgress), "expires_at": null,
            "finalizing_at": at(Status::Finalizing), "completed_at": at(Status::Completed),
            "failed_at": at(Status::Failed), "expired_at": null,
            "cancelling_at": at(Status::Cancelling), "cancelled_at": at(Status::Cancelled),
            "request_counts": { "total": self.total, "completed": completed, "failed": failed },
            "usage": self.tokens.json(), "metadata": self.wish.metadata,
        })
    }

    fn read(folder: &Path) -> Option<State> {
        let bytes = fs::read(folder.join(ABOUT)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// A batch that this process owns.
pub(super) struct Batch {
    folder: PathBuf,
    state: Mutex<State>,
    log: Mutex<Log>,
    /// Ends it.
    cancel: Cancel,
    /// Locked as long as it is open.
    _lock: File,
}

impl Batch {
    fn open(folder: PathBuf, state: State, lock: File) -> Result<Batch, JobError> {
        let log = Log::open(&folder.join(LOG))?;
        let cancel = Cancel::default();
        if state.status == Status::Cancelling {
            cancel.cancel();
        }
        Ok(Batch {
            folder,
            state: Mutex::new(state),
            log: Mutex::new(log),
            cancel,
            _lock: lock,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Replaced whole, so a panic elsewhere leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // Its file and its table change together, after the file was written.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn id(&self) -> String {
        self.state().id.clone()
    }

    fn status(&self) -> Status {
        self.state().status
    }

    /// OpenAI's object, as things stand.
    pub(super) fn json(&self) -> Value {
        let (answered, tokens) = {
            let log = self.log();
            (log.counts(), log.tokens())
        };
        let state = State {
            answered,
            tokens,
            ..self.state().clone()
        };
        state.json()
    }

    /// Brings it from one of some states to another, on the disk first; `false` where it is in none
    /// of them.
    fn bring(
        &self,
        from: &[Status],
        to: Status,
        change: impl FnOnce(&mut State),
    ) -> Result<bool, JobError> {
        let (answered, tokens) = {
            let log = self.log();
            (log.counts(), log.tokens())
        };
        let mut state = self.state();
        if !from.contains(&state.status) {
            return Ok(false);
        }
        let mut next = State {
            status: to,
            answered,
            tokens,
            ..state.clone()
        };
        next.since.push((to, unix_now()));
        change(&mut next);
        let bytes = serde_json::to_vec(&next).unwrap_or_default();
        jobs::write_whole(&self.folder.join(ABOUT), &bytes)?;
        *state = next;
        Ok(true)
    }

    /// Asks for its end; the status it has where it cannot end any more.
    ///
    /// # Errors
    ///
    /// Where the disk says no; it then goes on.
    pub(super) fn end(&self) -> Result<Result<(), Status>, JobError> {
        let from = [Status::Validating, Status::InProgress];
        if self.bring(&from, Status::Cancelling, |_| {})? {
            self.cancel.cancel();
            return Ok(Ok(()));
        }
        Ok(match self.status() {
            // Asked for twice.
            Status::Cancelling => Ok(()),
            status => Err(status),
        })
    }
}

/// A batch as it is found: owned here, or as it lies on the disk.
pub(super) enum Found {
    Here(Arc<Batch>),
    There {
        over: Option<Status>,
        object: Box<Value>,
    },
}

impl Found {
    pub(super) fn json(&self) -> Value {
        match self {
            Found::Here(batch) => batch.json(),
            Found::There { object, .. } => (**object).clone(),
        }
    }
}

/// Why a batch is not taken in.
#[derive(Debug)]
pub(super) enum NotTaken {
    /// So many are open already.
    Full(usize),
    /// The disk says no.
    Disk(JobError),
}

impl From<JobError> for NotTaken {
    fn from(error: JobError) -> NotTaken {
        NotTaken::Disk(error)
    }
}

/// The batches of a home.
pub(super) struct Batches {
    root: PathBuf,
    /// Those that this process answers.
    here: Mutex<HashMap<String, Arc<Batch>>>,
}

impl Batches {
    /// Those of a home, in `batches-v1`.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be made.
    pub(super) fn open(home: &Path) -> Result<Batches, JobError> {
        let root = home.join("batches-v1");
        fs::create_dir_all(&root).map_err(JobError::disk("cannot be made", &root))?;
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            let folder = entry.path();
            // Begun by a process that was killed before it could promise anything.
            let promised = folder.join(ABOUT).exists();
            if !promised && jobs::lock(&folder, "batch").is_ok() {
                let _ = fs::remove_dir_all(&folder);
            }
        }
        Ok(Batches {
            root,
            here: Mutex::default(),
        })
    }

    fn here(&self) -> MutexGuard<'_, HashMap<String, Arc<Batch>>> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a batch of this file's requests, for a model.
    ///
    /// # Errors
    ///
    /// Where too many are open, or the disk says no; nothing of it is then left.
    pub(super) fn begin(
        &self,
        wish: Wish,
        model: &str,
        input: &Path,
    ) -> Result<Arc<Batch>, NotTaken> {
        let open = self.states().iter().filter(|s| !s.status.over()).count();
        if open >= OPEN_MAX {
            return Err(NotTaken::Full(open));
        }
        let state = State {
            id: fresh_id(PREFIX),
            wish,
            model: model.to_owned(),
            status: Status::Validating,
            created: unix_nanos(),
            since: Vec::new(),
            total: 0,
            answered: (0, 0),
            tokens: Tokens::default(),
            faults: Vec::new(),
            output: Written::later(),
            errors: Written::later(),
        };
        let id = state.id.clone();
        let folder = self.root.join(&id);
        let begun = self.write(&folder, state, input);
        if begun.is_err() {
            // It was never promised to anybody.
            let _ = fs::remove_dir_all(&folder);
        }
        let batch = Arc::new(begun?);
        self.here().insert(id, Arc::clone(&batch));
        self.forget_old();
        Ok(batch)
    }

    fn write(&self, folder: &Path, state: State, input: &Path) -> Result<Batch, JobError> {
        fs::create_dir(folder).map_err(JobError::disk("cannot be made", folder))?;
        let lock = jobs::lock(folder, &state.id)?;
        let own = folder.join(INPUT);
        // A second name of the same bytes, where the file system has such; they never change.
        fs::hard_link(input, &own)
            .or_else(|_| fs::copy(input, &own).map(drop))
            .and_then(|()| File::open(&own)?.sync_all())
            .map_err(JobError::disk("the input cannot be kept", &own))?;
        let bytes = serde_json::to_vec(&state).unwrap_or_default();
        jobs::write_whole(&folder.join(ABOUT), &bytes)?;
        File::open(&self.root)
            .and_then(|root| root.sync_all())
            .map_err(JobError::disk("cannot be synced", &self.root))?;
        Batch::open(folder.to_owned(), state, lock)
    }

    /// Takes up what earlier processes left of this model's.
    pub(super) fn take_up(&self, model: &str) -> Vec<Arc<Batch>> {
        let mut left = self.states();
        // The oldest first, as they were begun.
        left.reverse();
        let mut taken = Vec::new();
        for state in left {
            if state.status.over() {
                tidy(&self.root.join(&state.id));
                continue;
            }
            if state.model != model || self.here().contains_key(&state.id) {
                continue;
            }
            // One that another process answers stays there; one that cannot be opened, where it is.
            if let Ok(batch) = self.take(&state.id) {
                self.here().insert(state.id, Arc::clone(&batch));
                taken.push(batch);
            }
        }
        taken
    }

    fn take(&self, id: &str) -> Result<Arc<Batch>, JobError> {
        let folder = self.root.join(id);
        let lock = jobs::lock(&folder, id)?;
        let gone = || JobError::NotFound { id: id.to_owned() };
        // As it stands now that nobody else changes it.
        let state = State::read(&folder).filter(|state| !state.status.over());
        let state = state.ok_or_else(gone)?;
        Batch::open(folder, state, lock).map(Arc::new)
    }

    /// The one of this id.
    pub(super) fn get(&self, id: &str) -> Option<Found> {
        if let Some(batch) = self.here().get(id) {
            return Some(Found::Here(Arc::clone(batch)));
        }
        let folder = self.root.join(files::is_id(id, PREFIX).then_some(id)?);
        let state = State::read(&folder)?;
        Some(Found::There {
            over: state.status.over().then_some(state.status),
            object: Box::new(self.there(state)),
        })
    }

    /// The object of one that this process does not answer, or not yet.
    fn there(&self, mut state: State) -> Value {
        if !state.status.over() {
            state.answered = log::glance(&self.root.join(&state.id).join(LOG));
        }
        state.json()
    }

    /// All, the newest first: ids and objects.
    pub(super) fn list(&self) -> Vec<(String, Value)> {
        let here = self.here().clone();
        let object = |state: State| {
            let live = here.get(&state.id).map(|batch| batch.json());
            let id = state.id.clone();
            (id, live.unwrap_or_else(|| self.there(state)))
        };
        self.states().into_iter().map(object).collect()
    }

    /// All as they lie on the disk, the newest first.
    fn states(&self) -> Vec<State> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut states: Vec<State> = entries
            .filter_map(|entry| State::read(&entry.path()))
            .collect();
        states.sort_by(|a, b| (b.created, &b.id).cmp(&(a.created, &a.id)));
        states
    }

    /// Lets go of one that is not over, so that another process can take it up.
    fn leave(&self, batch: &Batch) {
        self.here().remove(&batch.id());
    }

    /// One that is over needs nothing but its description.
    fn let_go(&self, batch: &Batch) {
        self.here().remove(&batch.id());
        tidy(&batch.folder);
    }

    /// Forgets the oldest that are over, beyond those that are kept. Their files stay.
    fn forget_old(&self) {
        let over = |state: &State| state.status.over();
        for state in self.states().into_iter().skip(KEPT_MAX).filter(over) {
            let _ = fs::remove_dir_all(self.root.join(&state.id));
        }
    }
}

/// Removes what only served to go on. What stays costs room and nothing else.
fn tidy(folder: &Path) {
    for name in [INPUT, LOG] {
        let _ = fs::remove_file(folder.join(name));
    }
}

/// The files and the batches of a home.
pub(super) struct Kept {
    pub(super) files: Files,
    pub(super) batches: Batches,
}

impl Kept {
    /// Those of a home.
    ///
    /// # Errors
    ///
    /// Where their folders cannot be made.
    pub(super) fn open(home: &Path) -> Result<Kept, JobError> {
        Ok(Kept {
            files: Files::open(home)?,
            batches: Batches::open(home)?,
        })
    }

    /// The file of this id, for a batch.
    pub(super) fn input(&self, id: &str) -> Option<(About, PathBuf)> {
        Some((self.files.get(id)?, self.files.path(id)?))
    }
}
