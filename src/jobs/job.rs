//! One job's folder.
//!
//! ```text
//! lock           held by the process that owns the job
//! job.json       kind, time, turn, what it belongs to, the request; replaced by rename
//! ids            8 bytes a token: the id, and a check over turn, place and id
//! state, prompt  states (see `snapshot`): the newest, and that at the end of the prompt
//! outcome.json   the result or the error, once there is one
//! ```

use std::fs;
use std::fs::File;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;

use super::Identity;
use super::error::JobError;
use super::error::Refusal;
use super::snapshot;
use super::writer::Pending;
use super::writer::Writer;
use crate::checkpoint::Spec;
use crate::engine::Start;
use crate::model::Sequence;
use crate::terms::TokenId;

pub(super) const DESCRIPTION: &str = "job.json";
const IDS: &str = "ids";
const OUTCOME: &str = "outcome.json";
pub(crate) const LOCK: &str = "lock";
/// Bytes of a token in `ids`.
const RECORD: usize = 8;

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// With this.
    Result(Value),
    /// With this failure.
    Error(Value),
}

/// Which of a job's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The newest.
    Newest,
    /// That at the end of the prompt, from which another reply can begin.
    Prompt,
}

impl Slot {
    const ALL: [Slot; 2] = [Slot::Newest, Slot::Prompt];

    fn file(self) -> &'static str {
        match self {
            Slot::Newest => "state",
            Slot::Prompt => "prompt",
        }
    }
}

/// What `job.json` holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Description {
    pub(super) kind: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) updated: u64,
    /// Raised when the request is replaced; ids of another turn are nobody's.
    pub(super) turn: u64,
    pub(super) identity: Identity,
    pub(super) request: Value,
}

impl Description {
    pub(super) fn read(folder: &Path, id: &str) -> Result<Description, JobError> {
        let path = folder.join(DESCRIPTION);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(JobError::NotFound { id: id.to_owned() });
            }
            read => read.map_err(JobError::disk("cannot be read", &path))?,
        };
        serde_json::from_slice(&bytes).map_err(|error| JobError::Damaged {
            path,
            reason: error.to_string(),
        })
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), JobError> {
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        snapshot::write_whole(&folder.join(DESCRIPTION), &bytes)
    }
}

/// A state found for a text, and why others were passed over.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The longest usable one.
    pub start: Option<Start>,
    /// States that would have served and may not be used.
    pub refused: Vec<(PathBuf, Refusal)>,
}

/// A job that this process owns, until it is dropped.
pub struct Job {
    id: String,
    folder: PathBuf,
    description: Description,
    ids: Vec<TokenId>,
    /// How many of `ids` are in the log.
    logged: usize,
    log: Arc<File>,
    writer: Arc<Writer>,
    /// Locked as long as it is open.
    _lock: File,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("id", &self.id)
            .field("ids", &self.ids.len())
            .finish_non_exhaustive()
    }
}

impl Job {
    /// Opens a locked folder.
    pub(super) fn open(
        id: &str,
        folder: PathBuf,
        description: Description,
        lock: File,
        writer: Arc<Writer>,
    ) -> Result<Job, JobError> {
        let path = folder.join(IDS);
        let log = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(JobError::disk("cannot be opened", &path))?;
        let ids = read_ids(&folder, description.turn)?;
        // A cut or foreign tail goes, so that it can never be taken for a later token.
        log.set_len((ids.len() * RECORD) as u64)
            .map_err(JobError::disk("cannot be cut", &path))?;
        Ok(Job {
            id: id.to_owned(),
            folder,
            description,
            logged: ids.len(),
            ids,
            log: Arc::new(log),
            writer,
            _lock: lock,
        })
    }

    /// Its name in the journal.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The request it was made with.
    pub fn request(&self) -> &Value {
        &self.description.request
    }

    /// What it belongs to.
    pub fn identity(&self) -> &Identity {
        &self.description.identity
    }

    /// The tokens generated so far.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Replaces the request: a new turn, with no ids. States stay, as the next text may begin with
    /// what they have taken in.
    ///
    /// # Errors
    ///
    /// Where the disk says no; the turn before is then still there.
    pub fn replace(&mut self, request: Value, identity: &Identity) -> Result<(), JobError> {
        let description = Description {
            turn: self.description.turn + 1,
            updated: super::journal::unix_now(),
            identity: identity.clone(),
            request,
            ..self.description.clone()
        };
        description.write(&self.folder)?;
        self.description = description;
        self.ids.clear();
        self.logged = 0;
        // From here on what follows is tidying: ids of the turn before no longer pass the check.
        let _ = self.log.set_len(0);
        let _ = fs::remove_file(self.folder.join(OUTCOME));
        Ok(())
    }

    /// Takes tokens that were generated. Not synced: that happens behind.
    ///
    /// # Errors
    ///
    /// Where the disk says no. They are kept in memory, and written with the next that succeeds.
    pub fn append(&mut self, ids: &[TokenId]) -> Result<(), JobError> {
        self.ids.extend_from_slice(ids);
        let turn = self.description.turn;
        let missing = (self.logged..).zip(&self.ids[self.logged..]);
        let bytes: Vec<u8> = missing
            .flat_map(|(place, &id)| record(turn, place, id))
            .collect();
        // At its place rather than at the end: a write that failed half-way shifts nothing.
        self.log
            .write_all_at(&bytes, (self.logged * RECORD) as u64)
            .map_err(JobError::disk(
                "tokens cannot be kept",
                &self.folder.join(IDS),
            ))?;
        self.logged = self.ids.len();
        self.writer.dirty(&self.log);
        Ok(())
    }

    /// Whether a state of so many bytes should be written now, for the disk's sake.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.writer.has_room(bytes)
    }

    /// Has a state written, behind; a copy is made of it first.
    pub fn snapshot(&self, slot: Slot, identity: &Identity, ids: &[TokenId], sequence: &Sequence) {
        self.writer.offer(Pending {
            path: self.folder.join(slot.file()),
            identity: identity.clone(),
            about: Value::Null,
            ids: ids.to_vec(),
            sequence: sequence.clone(),
            log: Arc::clone(&self.log),
        });
    }

    /// Waits until what was to be written behind is written.
    ///
    /// # Errors
    ///
    /// What failed behind since the last time this was asked.
    pub fn flush(&self) -> Result<(), JobError> {
        self.writer.flush();
        self.writer.trouble().map_or(Ok(()), Err)
    }

    /// The longest state from which `text` (prompt and generated tokens) can go on.
    pub fn start_for(&self, text: &[TokenId], identity: &Identity, spec: &Spec) -> Loaded {
        let paths = Slot::ALL.map(|slot| self.folder.join(slot.file()));
        longest(&paths, text, identity, spec)
    }

    /// Keeps the result. What only served to go on is removed.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub fn finish(&mut self, result: Value) -> Result<(), JobError> {
        self.conclude(&Outcome::Result(result))
    }

    /// Keeps a failure.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub fn fail(&mut self, error: Value) -> Result<(), JobError> {
        self.conclude(&Outcome::Error(error))
    }

    fn conclude(&mut self, outcome: &Outcome) -> Result<(), JobError> {
        let bytes = serde_json::to_vec(outcome).unwrap_or_default();
        snapshot::write_whole(&self.folder.join(OUTCOME), &bytes)?;
        self.drop_states();
        Ok(())
    }

    /// Removes the states.
    pub fn drop_states(&self) {
        self.writer.forget(&self.folder, Some(&self.log));
        for slot in Slot::ALL {
            // One that was never written is as good as removed.
            let _ = fs::remove_file(self.folder.join(slot.file()));
        }
    }

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<Outcome> {
        outcome(&self.folder)
    }

    /// Removes it from the disk.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub fn remove(self) -> Result<(), JobError> {
        self.writer.forget(&self.folder, Some(&self.log));
        // Without its description it is no job any more, however far the rest gets.
        let _ = fs::remove_file(self.folder.join(DESCRIPTION));
        fs::remove_dir_all(&self.folder).map_err(JobError::disk("cannot be removed", &self.folder))
    }
}

/// The longest of some states from which `text` can go on: at least its last token is then left to
/// be taken in. One that would have served and may not be used is named, with the reason.
pub(super) fn longest(
    paths: &[PathBuf],
    text: &[TokenId],
    identity: &Identity,
    spec: &Spec,
) -> Loaded {
    let mut loaded = Loaded::default();
    let mut found = Vec::new();
    for path in paths.iter().filter(|path| path.exists()) {
        match snapshot::read_head(path) {
            Ok(head) if head.ids.len() < text.len() && text.starts_with(&head.ids) => {
                found.push((head.ids.len(), path));
            }
            Ok(_) => {}
            Err(refusal) => loaded.refused.push((path.clone(), refusal)),
        }
    }
    found.sort_by_key(|(len, _)| std::cmp::Reverse(*len));
    for (_, path) in found {
        match snapshot::read(path, identity, spec) {
            Ok(start) => {
                loaded.start = Some(start);
                break;
            }
            Err(refusal) => loaded.refused.push((path.clone(), refusal)),
        }
    }
    loaded
}

pub(super) fn outcome(folder: &Path) -> Option<Outcome> {
    let bytes = fs::read(folder.join(OUTCOME)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// The ids of a turn: as far as their checks fit.
pub(super) fn read_ids(folder: &Path, turn: u64) -> Result<Vec<TokenId>, JobError> {
    let path = folder.join(IDS);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(JobError::disk("cannot be read", &path))?,
    };
    let (records, _) = bytes.as_chunks::<RECORD>();
    let id = |(place, bytes): (usize, &[u8; RECORD])| {
        let id = TokenId::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        (record(turn, place, id) == *bytes).then_some(id)
    };
    Ok(records.iter().enumerate().map_while(id).collect())
}

/// A token as it is written: the check covers its turn and place, so that neither an older turn's
/// bytes nor the zeros that a power cut leaves can pass for a token.
fn record(turn: u64, place: usize, id: TokenId) -> [u8; RECORD] {
    let mut check: u64 = 0xcbf2_9ce4_8422_2325;
    let place = (place as u64).to_le_bytes();
    for byte in turn
        .to_le_bytes()
        .into_iter()
        .chain(place)
        .chain(id.to_le_bytes())
    {
        check = (check ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let [a, b, c, d] = id.to_le_bytes();
    let [e, f, g, h, ..] = (check ^ (check >> 32)).to_le_bytes();
    [a, b, c, d, e, f, g, h]
}
