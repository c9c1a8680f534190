//! What keeps a job from being kept, and a state from being used.

use std::io;
use std::path::Path;
use std::path::PathBuf;

/// Why a job could not be opened or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The file system said no.
    #[error("{path}: {what}: {source}")]
    Disk {
        /// What was being done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Another process has it.
    #[error("{id} is in use by another process")]
    Busy {
        /// The job or session.
        id: String,
    },
    /// There is none of that name.
    #[error("there is no {id}")]
    NotFound {
        /// The job or session.
        id: String,
    },
    /// Its description cannot be read.
    #[error("{path} is damaged: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A name that cannot be a folder's.
    #[error("`{name}` cannot be a name: use letters, digits, `.`, `_` and `-`, at most 64")]
    Name {
        /// What was given.
        name: String,
    },
}

impl JobError {
    /// Says what was being done where.
    pub(crate) fn disk<'a>(
        what: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> JobError + 'a {
        move |source| JobError::Disk {
            what,
            path: path.to_owned(),
            source,
        }
    }

    /// What to do next.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            JobError::Disk { .. } => "check the disk's free space and the folder's rights".into(),
            JobError::Busy { .. } => "wait for it to end, or stop it".into(),
            JobError::NotFound { .. } | JobError::Name { .. } => return None,
            JobError::Damaged { path, .. } => {
                let folder = path.parent().unwrap_or(path);
                format!("remove {} to begin anew", folder.display())
            }
        })
    }
}

/// Why a state is not used. What it would have saved is computed again.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    /// It is something else.
    #[error("it is not a state of this format")]
    Format,
    /// It is shorter or longer than it says.
    #[error("it has {found} bytes where its head says {expected}")]
    Length {
        /// Bytes that its head announces.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// Its digest does not fit its bytes.
    #[error("its bytes do not fit its digest")]
    Digest,
    /// It was computed with something else.
    #[error("its {what} is {found}, not {wanted}")]
    Other {
        /// `model`, `revision` or `arithmetic`.
        what: &'static str,
        /// The state's.
        found: String,
        /// The engine's.
        wanted: String,
    },
    /// It does not have the values that this model's states have.
    #[error("it does not have the shape of this model's states")]
    Shape,
}
