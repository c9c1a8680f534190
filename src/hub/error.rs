//! Why bytes did not arrive, cut by what the caller does next.

use std::io;
use std::path::PathBuf;

use crate::terms::Bytes;
use crate::terms::Digest;

/// Why a hub did not deliver.
///
/// No variant carries a secret: addresses are stripped of user names and queries where the error
/// is made, and a token is named by where it came from, never by its value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// No source has the repository, the revision or the file.
    #[error("{what} was not found at {place}")]
    NotFound {
        /// The repository, revision or file.
        what: String,
        /// Where it was looked for.
        place: String,
    },
    /// The repository is private, gated or disabled, or the token is missing or refused.
    #[error("{url}: access denied ({status}): {message}")]
    Denied {
        /// What was asked for, without its query.
        url: String,
        /// HTTP status.
        status: u16,
        /// What the hub said, and which token was used.
        message: String,
    },
    /// Offline mode is on and no local source has the bytes. No socket was opened.
    #[error("{what} is not on this machine, and offline mode forbids fetching it")]
    Offline {
        /// What was asked for.
        what: String,
    },
    /// Worth trying again, and already tried as often as the options allow.
    #[error("{url}: gave up after {attempts} attempts: {last}")]
    Unreachable {
        /// What was asked for, without its query.
        url: String,
        /// How many requests were made.
        attempts: u32,
        /// What the last one met.
        last: String,
    },
    /// The server understood and declined: trying again changes nothing.
    #[error("{url}: refused ({status}): {message}")]
    Refused {
        /// What was asked for, without its query.
        url: String,
        /// HTTP status.
        status: u16,
        /// What the server said.
        message: String,
    },
    /// Something answers at this address, and it is no hub: a captive portal, a proxy's page.
    #[error("{url} does not answer as a Hugging Face hub: {why}")]
    NotAHub {
        /// What was asked for, without its query.
        url: String,
        /// What was missing.
        why: String,
    },
    /// The reply breaks the rules of ranged reads, so its body was not believed.
    #[error("{url}: {why}")]
    Protocol {
        /// What was asked for, without its query.
        url: String,
        /// What was asked against what was got.
        why: String,
    },
    /// A local folder that serves as a source could not be read.
    #[error("{}: {source}", path.display())]
    Disk {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes arrived and are not the bytes that were pinned.
    #[error("{url}: {what}: expected {expected}, got {actual}")]
    WrongContent {
        /// Where they came from, without its query.
        url: String,
        /// File and range.
        what: String,
        /// The pinned digest, ETag or size.
        expected: String,
        /// What arrived.
        actual: String,
    },
    /// A listing or a small file is not what it should be.
    #[error("{what} from {place} is damaged: {why}")]
    Damaged {
        /// The listing or file.
        what: String,
        /// Where it came from.
        place: String,
        /// What is wrong with it.
        why: String,
    },
    /// As many bytes were fetched as the options allow; raising the limit lets work go on.
    #[error("the limit of {max} fetched bytes is reached")]
    CapReached {
        /// The limit.
        max: Bytes,
    },
    /// A range that is handed over as it comes would have had to begin anew; ask for it again.
    #[error("{what} came from several places that may not hold the same file")]
    Discontinued {
        /// File and range.
        what: String,
    },
    /// The ticket was dropped, or the hub was closed.
    #[error("the fetch was cancelled")]
    Cancelled,
    /// An address in the options names no possible source.
    #[error("`{address}` cannot be a hub: {why}")]
    Address {
        /// The address, without user name and query.
        address: String,
        /// What is wrong with it.
        why: String,
    },
    /// The hub's threads could not be started.
    #[error("cannot start the network threads: {0}")]
    Threads(#[source] io::Error),
}

impl HubError {
    pub(super) fn wrong_digest(url: &str, what: String, expected: Digest, actual: Digest) -> Self {
        HubError::WrongContent {
            url: url.to_owned(),
            what,
            expected: format!("sha256 {expected}"),
            actual: actual.to_string(),
        }
    }

    /// One sentence a person can act on, shown as `hint:` under the error.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            HubError::NotFound { .. } => Some("check the spelling of --model and --revision"),
            HubError::Denied { status: 401, .. } => Some(
                "set HF_TOKEN (or run `hf auth login`), and accept the licence on the model's page if it has one",
            ),
            HubError::Denied { .. } => Some(
                "accept the licence on the model's page, or use a token that may read this repository",
            ),
            HubError::Offline { .. } => Some(
                "run once without --offline and HF_HUB_OFFLINE, or `deltafin fetch` the whole model",
            ),
            HubError::Unreachable { .. } => Some(
                "check the network and proxies (HTTPS_PROXY, SSL_CERT_FILE); what is stored keeps working with --offline",
            ),
            HubError::NotAHub { .. } => {
                Some("a login page or a proxy may be answering; check --hub and HF_ENDPOINT")
            }
            HubError::Refused { status: 407, .. } => Some(
                "the proxy wants a name and a password: HTTP_PROXY=http://NAME:PASSWORD@host:port",
            ),
            HubError::Refused { .. } | HubError::Protocol { .. } => {
                Some("try again later, or name another source with --hub")
            }
            HubError::WrongContent { .. } => {
                Some("nothing wrong was kept; name another source with --hub")
            }
            HubError::CapReached { .. } => Some(
                "everything fetched is kept: the same command goes on from there, with a larger --max-bytes or as many bytes again",
            ),
            HubError::Disk { .. } => Some("check the folder given with --hub"),
            HubError::Address { .. } => Some("a hub is an http(s) URL or a folder"),
            HubError::Discontinued { .. } => Some("run it again: it goes on where it stopped"),
            HubError::Damaged { .. } | HubError::Cancelled | HubError::Threads(_) => None,
        }
    }
}
