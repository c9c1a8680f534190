//! Why a generation could not be made.

use std::sync::Arc;

use crate::checkpoint::CheckpointError;
use crate::residency::ResidencyError;
use crate::text::TextError;

/// Why an engine could not be opened, or could not generate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The weights did not come.
    ///
    /// Shared, as several generations may have needed the same one.
    #[error(transparent)]
    Residency(Arc<ResidencyError>),
    /// The words could not be turned into tokens.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model's files are damaged or unsupported.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint has no tokenizer that this engine reads.
    #[error("{model} has no K3 tokenizer ({missing} is not in the repository)")]
    NoTokenizer {
        /// The model.
        model: String,
        /// The file looked for.
        missing: &'static str,
    },
    /// The prompt holds no token.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt does not fit.
    #[error("the prompt has {tokens} tokens; the model's context holds {context}")]
    PromptTooLong {
        /// Tokens in the prompt.
        tokens: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A token id that the vocabulary does not have.
    #[error("token {id} is not in the vocabulary of {vocab}")]
    NoSuchToken {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The threads for arithmetic or reading could not be started.
    #[error("threads cannot be started")]
    Threads(#[source] std::io::Error),
}

impl From<ResidencyError> for EngineError {
    fn from(error: ResidencyError) -> EngineError {
        EngineError::Residency(Arc::new(error))
    }
}

impl EngineError {
    /// One sentence a person can act on, shown as `hint:` under the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            EngineError::Residency(error) => error.hint(),
            EngineError::Text(error) => error.hint().map(Into::into),
            EngineError::Checkpoint(error) => Some(error.hint().to_owned()),
            EngineError::NoTokenizer { .. } => {
                Some("give the prompt as token ids with --ids".to_owned())
            }
            EngineError::EmptyPrompt => Some("say something, or give --ids".to_owned()),
            EngineError::PromptTooLong { .. } => Some("shorten the prompt".to_owned()),
            EngineError::NoSuchToken { .. } | EngineError::Threads(_) => None,
        }
    }
}
