//! Generations that outlive a process.
//!
//! ```text
//! snapshot   a sequence's state as one verified file                     snapshot.rs
//! journal    a folder a job: request, ids as they come, states, outcome  journal.rs, job.rs
//! writer     states and syncs, behind the arithmetic                     writer.rs
//! run        an engine's generation, kept in a job while it runs         run.rs
//! prefix     states after beginnings that many prompts share             prefix.rs
//! states     states of earlier texts, for the next process               states.rs
//! ```
//!
//! What a generation needs to go on is its request, the ids it has produced and, to save
//! arithmetic, a state. The sampler keeps none of its own: a draw depends on seed and position
//! alone, so the request's seed and the number of ids are all of it. Ids are written as they come,
//! so a killed process loses the token it was computing; rows after the last state are computed
//! again, together, like a prompt.

mod error;
mod job;
mod journal;
mod prefix;
mod run;
mod snapshot;
mod states;
mod writer;

pub use error::JobError;
pub use error::Refusal;
pub use job::Job;
pub(crate) use job::LOCK;
pub use job::Loaded;
pub use job::Outcome;
pub use job::Slot;
pub use journal::Journal;
pub use journal::Listed;
pub(crate) use journal::lock;
pub use prefix::Prefix;
pub use prefix::Prefixes;
pub use run::Keep;
pub use run::Notice;
pub use run::Ran;
pub use run::generate;
pub use snapshot::Head;
pub use snapshot::read as read_snapshot;
pub use snapshot::read_head as read_snapshot_head;
pub use snapshot::verify as verify_snapshot;
pub use snapshot::write as write_snapshot;
pub(crate) use snapshot::write_whole;
pub use states::States;

use serde::Deserialize;
use serde::Serialize;

use crate::engine::Engine;
use crate::kernel::Isa;
use crate::kernel::VERSION;

/// What a state belongs to: the bits of a state are equal only where all three are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The model, ORG/NAME.
    pub model: String,
    /// Its commit.
    pub revision: String,
    /// The instruction set and the version of the arithmetic, such as `avx512-1`.
    pub arithmetic: String,
}

impl Identity {
    /// That of an engine.
    pub fn of(engine: &Engine) -> Identity {
        Identity {
            model: engine.name().to_owned(),
            revision: engine.opened().snapshot.commit.to_string(),
            arithmetic: arithmetic(engine.kernel().isa()),
        }
    }
}

/// The arithmetic version of an instruction set.
pub fn arithmetic(isa: Isa) -> String {
    format!("{}-{VERSION}", isa.name())
}
