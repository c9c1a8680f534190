//! Files that clients upload and batches write, on the disk.
//!
//! ```text
//! files-v1/file-…/content     the bytes
//! files-v1/file-…/file.json   what it is; without it the folder is no file
//! files-v1/.new-…/            one that is being written: renamed when it is whole
//! ```
//!
//! A client's words never become a path: ids are made here, and the name a client gives a file is
//! only told again.

use std::fs;
use std::fs::File;
use std::io;
use std::io::Write;
use std::path::Path;
use std::path::PathBuf;

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;
use serde_json::json;

use super::reply::fresh_id;
use super::unix_nanos;
use crate::jobs;
use crate::jobs::JobError;

const CONTENT: &str = "content";
const ABOUT: &str = "file.json";
const NEW: &str = ".new-";
/// What ids of files begin with.
const PREFIX: &str = "file-";
/// Bytes of a file's name that are kept.
const NAME_MAX: usize = 255;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Purpose {
    /// The requests of a batch.
    Batch,
    /// What a batch has written.
    BatchOutput,
}

impl Purpose {
    /// The purpose of this name.
    pub(super) fn named(name: &str) -> Option<Purpose> {
        [Purpose::Batch, Purpose::BatchOutput]
            .into_iter()
            .find(|purpose| purpose.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Purpose::Batch => "batch",
            Purpose::BatchOutput => "batch_output",
        }
    }
}

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct About {
    pub(super) id: String,
    pub(super) bytes: u64,
    /// Nanoseconds since 1970: two files of one second have an order too.
    pub(super) created: u64,
    pub(super) filename: String,
    pub(super) purpose: Purpose,
}

impl About {
    /// OpenAI's object.
    pub(super) fn json(&self) -> Value {
        json!({
            "id": self.id, "object": "file", "bytes": self.bytes,
            "created_at": self.created / 1_000_000_000, "expires_at": null,
            "filename": self.filename, "purpose": self.purpose.name(),
            "status": "processed", "status_details": null,
        })
    }
}

/// The files of a home.
#[derive(Debug)]
pub(super) struct Files {
    root: PathBuf,
}

impl Files {
    /// Those of a home, in `files-v1`. What a killed process was writing is removed.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be made.
    pub(super) fn open(home: &Path) -> Result<Files, JobError> {
        let root = home.join("files-v1");
        fs::create_dir_all(&root).map_err(JobError::disk("cannot be made", &root))?;
        for name in names(&root).filter(|name| name.starts_with(NEW)) {
            let folder = root.join(&name);
            // One that another process is writing stays.
            if jobs::lock(&folder, &name).is_ok() {
                let _ = fs::remove_dir_all(&folder);
            }
        }
        Ok(Files { root })
    }

    /// Begins to write one.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub(super) fn begin(&self) -> Result<Upload, JobError> {
        let name = fresh_id(NEW);
        let folder = self.root.join(&name);
        fs::create_dir(&folder).map_err(JobError::disk("cannot be made", &folder))?;
        // From here on it is removed where it does not come to be whole.
        let mut upload = Upload {
            root: self.root.clone(),
            folder,
            open: None,
            bytes: 0,
        };
        let lock = jobs::lock(&upload.folder, &name)?;
        let path = upload.folder.join(CONTENT);
        let content = File::create(&path).map_err(JobError::disk("cannot be made", &path))?;
        upload.open = Some((content, lock));
        Ok(upload)
    }

    /// What is known of a file; `None` where there is none of this id.
    pub(super) fn get(&self, id: &str) -> Option<About> {
        let bytes = fs::read(self.folder(id)?.join(ABOUT)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Opens a file's bytes.
    pub(super) fn content(&self, id: &str) -> Option<File> {
        self.get(id)?;
        File::open(self.path(id)?).ok()
    }

    /// Where a file's bytes are.
    pub(super) fn path(&self, id: &str) -> Option<PathBuf> {
        Some(self.folder(id)?.join(CONTENT))
    }

    /// All files, the newest first.
    pub(super) fn list(&self) -> Vec<About> {
        let mut all: Vec<About> = names(&self.root).filter_map(|id| self.get(&id)).collect();
        all.sort_by(|a, b| (b.created, &b.id).cmp(&(a.created, &a.id)));
        all
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.list().iter().map(|file| file.bytes).sum()
    }

    /// Removes a file; whether there was one.
    ///
    /// # Errors
    ///
    /// Where the disk says no.
    pub(super) fn remove(&self, id: &str) -> Result<bool, JobError> {
        let Some(folder) = self.folder(id).filter(|folder| folder.is_dir()) else {
            return Ok(false);
        };
        // Without its description it is no file any more, however far the rest gets.
        match fs::remove_file(folder.join(ABOUT)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            removed => removed.map_err(JobError::disk("cannot be removed", &folder))?,
        }
        let _ = fs::remove_dir_all(&folder);
        Ok(true)
    }

    fn folder(&self, id: &str) -> Option<PathBuf> {
        is_id(id, PREFIX).then(|| self.root.join(id))
    }
}

/// Whether this is a prefix and the 32 digits that ids made here have after it.
pub(super) fn is_id(id: &str, prefix: &str) -> bool {
    let digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    id.strip_prefix(prefix)
        .is_some_and(|rest| rest.len() == 32 && rest.chars().all(digit))
}

/// A new id of a file.
pub(super) fn fresh_file_id() -> String {
    fresh_id(PREFIX)
}

fn names(root: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// A file that is being written; removed unless it is finished.
#[derive(Debug)]
pub(super) struct Upload {
    root: PathBuf,
    folder: PathBuf,
    /// Its content, and the lock that says that it is at work.
    open: Option<(File, File)>,
    bytes: u64,
}

impl Upload {
    /// Bytes written so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes it a file under this id. One that has the id already is left as it is: it was written
    /// by a process that was killed before it could say so.
    ///
    /// # Errors
    ///
    /// Where the disk says no; nothing of it is then left.
    pub(super) fn finish(
        mut self,
        id: &str,
        filename: &str,
        purpose: Purpose,
    ) -> Result<About, JobError> {
        let folder = self.folder.clone();
        let failed = |source| JobError::disk("cannot be written", &folder)(source);
        let about = About {
            id: id.to_owned(),
            bytes: self.bytes,
            created: unix_nanos(),
            filename: shown(filename),
            purpose,
        };
        if let Some((content, _)) = &self.open {
            content.sync_all().map_err(failed)?;
        }
        let bytes = serde_json::to_vec(&about).unwrap_or_default();
        jobs::write_whole(&self.folder.join(ABOUT), &bytes)?;
        let to = self.root.join(id);
        if to.join(ABOUT).is_file() {
            return Ok(about);
        }
        fs::rename(&self.folder, &to).map_err(failed)?;
        self.folder = to;
        self.open = None;
        // Nobody else's business any more; one that stays is a few bytes.
        let _ = fs::remove_file(self.folder.join(jobs::LOCK));
        File::open(&self.root)
            .and_then(|root| root.sync_all())
            .map_err(failed)?;
        // Whole: nothing is to be removed any more.
        self.folder = PathBuf::new();
        Ok(about)
    }
}

impl Write for Upload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some((content, _)) = &mut self.open else {
            return Err(io::Error::other("the file is finished"));
        };
        let written = content.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.folder.as_os_str().is_empty() {
            // What stays is removed at the next start.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// A name as it is told again: without control characters, and not without end.
fn shown(name: &str) -> String {
    let mut shown: String = name.chars().filter(|c| !c.is_control()).collect();
    while shown.len() > NAME_MAX {
        shown.pop();
    }
    shown
}
