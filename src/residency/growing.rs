//! A file of the store that grows as its bytes come: an expert, or a stretch of the rest.

use crate::store::CoreWriter;
use crate::store::ExpertWriter;
use crate::store::NotKept;
use crate::store::StoreError;

/// A file that grows as its bytes come.
pub(super) enum Growing {
    Expert(ExpertWriter),
    Rest(CoreWriter),
}

/// Why a piece was not taken.
pub(super) enum Refused {
    Store(StoreError),
    NotKept(NotKept),
}

impl Growing {
    pub(super) fn done(&self) -> u64 {
        match self {
            Growing::Expert(writer) => writer.done(),
            Growing::Rest(writer) => writer.done(),
        }
    }

    pub(super) fn missing(&self) -> u64 {
        match self {
            Growing::Expert(writer) => writer.missing(),
            Growing::Rest(writer) => writer.len() - writer.done(),
        }
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        match self {
            Growing::Expert(writer) => writer.append(bytes).map_err(Refused::NotKept),
            Growing::Rest(writer) => writer.append(bytes).map_err(Refused::Store),
        }
    }

    /// Forgets an expert's beginning. The rest of a shard is proved with the shard.
    pub(super) fn restart(&mut self) -> Result<(), NotKept> {
        match self {
            Growing::Expert(writer) => writer.restart(),
            Growing::Rest(_) => Ok(()),
        }
    }
}
