//! What can go wrong in a sweep that no supply reports.

use crate::terms::CorePart;
use crate::terms::ExpertKey;
use crate::terms::TokenId;

/// Why a sweep stopped, when the supplies themselves did not fail.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A token that is not in the vocabulary. Found before anything is computed; the sequences are as they were.
    #[error("token {token} is not in the vocabulary of {vocab}")]
    NoSuchToken {
        /// The token.
        token: TokenId,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A part of the core came without a tensor, or with another type or shape than the model has. What was fetched
    /// was checked, so its file has been damaged since.
    #[error("core part {part}: tensor {tensor} is {found}; the model needs {expected}")]
    Core {
        /// The part.
        part: CorePart,
        /// The tensor.
        tensor: String,
        /// What came.
        found: String,
        /// What should have come.
        expected: String,
    },
    /// An expert came with another length than experts of this model have.
    #[error("{key} came with {found} bytes instead of {expected}")]
    ExpertLength {
        /// The expert.
        key: ExpertKey,
        /// Bytes that came.
        found: usize,
        /// Bytes an expert has.
        expected: usize,
    },
    /// The supply ended before it brought an expert that was asked for.
    #[error("{key} was asked for and never came")]
    ExpertMissing {
        /// The expert.
        key: ExpertKey,
    },
    /// Everybody whose rows were in the sweep has left it.
    #[error("nobody waits for the sweep any more")]
    Abandoned,
    /// The supply brought what nobody asked for, or brought it twice.
    #[error("{key} came without being asked for")]
    ExpertUnasked {
        /// The expert.
        key: ExpertKey,
    },
}

impl ModelError {
    /// One sentence a person can act on, shown as `hint:` under the error.
    pub fn hint(&self) -> &'static str {
        match self {
            ModelError::NoSuchToken { .. } => "give token ids below the vocabulary's size",
            ModelError::Core { .. } => {
                "remove the file of that core part, and it is fetched and written again"
            }
            ModelError::ExpertLength { .. } => {
                "remove the file of that expert, and it is fetched again"
            }
            ModelError::Abandoned => "ask again",
            ModelError::ExpertMissing { .. } | ModelError::ExpertUnasked { .. } => {
                "this is a bug in the supply of experts, not in your files: please report it"
            }
        }
    }
}
