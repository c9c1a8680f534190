//! What a failure is called on the way out: an exit code, a sentence, a hint.

use std::process::ExitCode;

use crate::engine::EngineError;
use crate::hub::HubError;
use crate::jobs::JobError;
use crate::residency::ResidencyError;
use crate::residency::TraceError;
use crate::server::ServerError;
use crate::share::ShareError;
use crate::store::StoreError;
use crate::text::TextError;

/// Done.
pub(super) const DONE: u8 = 0;
/// `doctor` found something that somebody has to do something about.
pub(super) const FINDINGS: u8 = 1;
/// Bad size, empty or too long prompt.
pub(super) const USAGE: u8 = 2;
/// Not found, not allowed, or offline and missing.
pub(super) const MISSING: u8 = 3;
/// The network failed.
pub(super) const NETWORK: u8 = 4;
/// The disk failed: not writable, full.
pub(super) const DISK: u8 = 5;
/// Damaged or unsupported data.
pub(super) const DAMAGED: u8 = 6;
/// Out of memory, threads or other resources of the machine.
pub(super) const MEMORY: u8 = 7;
/// Interrupted; the state is kept.
pub(super) const INTERRUPTED: u8 = 130;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CliError {
    /// What was typed cannot be meant.
    #[error("{0}")]
    Usage(String, Option<String>),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A file the user named cannot be written or read.
    #[error("{path}: {source}")]
    File {
        path: String,
        source: std::io::Error,
    },
    /// The disk cannot hold what was asked for.
    #[error("{0}")]
    NoSpace(String, String),
    /// Something is not what it has to be.
    #[error("{0}")]
    Damaged(String, String),
    /// Something is not there.
    #[error("{0}")]
    Missing(String, String),
}

impl From<ResidencyError> for CliError {
    fn from(error: ResidencyError) -> Self {
        CliError::Engine(error.into())
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        ResidencyError::from(error).into()
    }
}

impl From<HubError> for CliError {
    fn from(error: HubError) -> Self {
        ResidencyError::from(error).into()
    }
}

impl CliError {
    /// The exit code; see the `--help` of the program.
    pub(super) fn code(&self) -> u8 {
        match self {
            CliError::Usage(..) => USAGE,
            CliError::Engine(error) => engine(error),
            CliError::Server(ServerError::Open(_)) => USAGE,
            CliError::Server(ServerError::Start(_)) => MEMORY,
            CliError::Share(ShareError::Bind { .. })
            | CliError::Server(ServerError::Bind { .. }) => NETWORK,
            CliError::Share(ShareError::Start(_)) => MEMORY,
            CliError::Share(_) => MISSING,
            CliError::Job(JobError::NotFound { .. }) | CliError::Missing(..) => MISSING,
            CliError::Job(JobError::Damaged { .. }) | CliError::Damaged(..) => DAMAGED,
            CliError::Job(JobError::Name { .. } | JobError::Busy { .. }) => USAGE,
            CliError::Trace(TraceError::Other { .. }) => USAGE,
            CliError::Trace(TraceError::Form { .. }) => DAMAGED,
            CliError::Trace(TraceError::Io { .. })
            | CliError::Job(_)
            | CliError::File { .. }
            | CliError::NoSpace(..) => DISK,
        }
    }

    /// What to do next.
    pub(super) fn hint(&self) -> Option<String> {
        match self {
            CliError::Usage(_, hint) => hint.clone(),
            CliError::Engine(error) => error.hint(),
            CliError::Share(error) => Some(error.hint().to_owned()),
            CliError::Server(error) => error.hint().map(Into::into),
            CliError::Job(error) => error.hint(),
            CliError::Trace(error) => error.hint(),
            CliError::File { .. } => None,
            CliError::NoSpace(_, hint)
            | CliError::Damaged(_, hint)
            | CliError::Missing(_, hint) => Some(hint.clone()),
        }
    }
}

fn engine(error: &EngineError) -> u8 {
    match error {
        EngineError::Residency(error) => residency(error),
        EngineError::Text(TextError::NoChatMarkup { .. } | TextError::Invalid { .. }) => USAGE,
        EngineError::Text(_) | EngineError::Checkpoint(_) => DAMAGED,
        EngineError::NoTokenizer { .. }
        | EngineError::EmptyPrompt
        | EngineError::PromptTooLong { .. }
        | EngineError::NoSuchToken { .. } => USAGE,
        EngineError::Threads(_) => MEMORY,
    }
}

fn residency(error: &ResidencyError) -> u8 {
    match error {
        ResidencyError::Hub(error) => hub(error),
        ResidencyError::Store(_) | ResidencyError::Map { .. } => DISK,
        ResidencyError::Checkpoint(_) | ResidencyError::Model(_) => DAMAGED,
        ResidencyError::NotInstalled { .. }
        | ResidencyError::Missing { .. }
        | ResidencyError::MissingExpert { .. }
        | ResidencyError::NoSuchFile { .. } => MISSING,
        ResidencyError::Threads(_) => MEMORY,
        ResidencyError::Interrupted => INTERRUPTED,
    }
}

fn hub(error: &HubError) -> u8 {
    match error {
        HubError::NotFound { .. } | HubError::Denied { .. } | HubError::Offline { .. } => MISSING,
        HubError::Disk { .. } => DISK,
        HubError::WrongContent { .. } | HubError::Damaged { .. } => DAMAGED,
        HubError::Cancelled | HubError::CapReached { .. } => INTERRUPTED,
        HubError::Address { .. } => USAGE,
        HubError::Threads(_) => MEMORY,
        _ => NETWORK,
    }
}

/// The process's exit code.
pub(super) fn process(code: u8) -> ExitCode {
    ExitCode::from(code)
}
