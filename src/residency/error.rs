//! Why weights did not come.

use crate::checkpoint::CheckpointError;
use crate::hub::HubError;
use crate::model::ModelError;
use crate::store::StoreError;
use crate::terms::ExpertKey;
use crate::terms::RepoId;

/// Why a model could not be opened, or why a weight it needs did not come.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// The hub did not deliver.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The disk did not deliver.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The model's files are damaged, or of a kind this engine cannot run.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The weights that came are not what the forward pass needs.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A core file cannot be brought into memory.
    #[error("{path}: cannot be brought into memory")]
    Map {
        /// The file.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The store holds nothing of this model, and no hub may be asked.
    #[error("{repo} is not in the store, and no hub may be asked")]
    NotInstalled {
        /// The model.
        repo: RepoId,
    },
    /// A part of the model is not in the store, and no hub may be asked.
    #[error("{repo}: {what} is not in the store, and no hub may be asked")]
    Missing {
        /// The model.
        repo: RepoId,
        /// The part: a file's name, or a part of the core.
        what: String,
    },
    /// An expert is not in the store, and no hub may be asked.
    #[error("{key} is not in the store, and no hub may be asked")]
    MissingExpert {
        /// The expert.
        key: ExpertKey,
    },
    /// The repository has no such file.
    #[error("{repo}: the repository has no {file}")]
    NoSuchFile {
        /// The model.
        repo: RepoId,
        /// The file.
        file: String,
    },
    /// Threads that read cannot be started.
    #[error("cannot start the threads that read")]
    Threads(#[source] std::io::Error),
    /// Somebody asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl ResidencyError {
    /// One sentence a person can act on, shown as `hint:` under the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            ResidencyError::Hub(error) => error.hint().map(Into::into),
            ResidencyError::Store(error) => error.hint().map(Into::into),
            ResidencyError::Checkpoint(error) => Some(error.hint().to_owned()),
            ResidencyError::Model(error) => Some(error.hint().to_owned()),
            ResidencyError::NotInstalled { .. } | ResidencyError::Missing { .. } => {
                Some("go online once with `deltafin stream` or `deltafin fetch`, then it runs offline".to_owned())
            }
            ResidencyError::MissingExpert { .. } => Some(
                "use `deltafin stream` to fetch what is missing as it is needed, or `deltafin fetch` to install all of it"
                    .to_owned(),
            ),
            ResidencyError::NoSuchFile { .. } => {
                Some("check --model and --revision: this does not look like a K3-family checkpoint".to_owned())
            }
            ResidencyError::Map { .. } | ResidencyError::Threads(_) | ResidencyError::Interrupted => None,
        }
    }
}
