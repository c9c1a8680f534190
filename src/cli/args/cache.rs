//! `cache manifest` and `cache import`, and what serving does for the store.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::StoreArgs;
use super::values::span;

/// `cache manifest`.
#[derive(Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["write", "check"])))]
pub(crate) struct CacheManifest {
    /// Write a list of what every expert of the model should be; each must have been here
    #[arg(long, value_name = "FILE")]
    pub write: Option<PathBuf>,
    /// Read every expert that is here and hold it against such a list; what differs is removed, and
    /// the exit code is then 6
    #[arg(long, value_name = "FILE")]
    pub check: Option<PathBuf>,
    /// With --write: the model, ORG/NAME; `demo` is the embedded small model [default:
    /// moonshotai/Kimi-K3]
    #[arg(long, conflicts_with = "check", help_heading = "Model")]
    pub model: Option<String>,
    /// With --write: its commit [default: the one in the store]
    #[arg(long, conflicts_with = "check", help_heading = "Model")]
    pub revision: Option<String>,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `cache import`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheImport {
    /// A folder with a model's shards and config.json, such as `hf download --local-dir` makes, or a
    /// Hugging Face cache or a model's folder in one
    pub folder: PathBuf,
    /// The model, ORG/NAME [default: as the cache says, or `local/FOLDER`]
    #[arg(long, help_heading = "Model")]
    pub model: Option<String>,
    /// The branch, tag or commit, where a cache has several [default: main]
    #[arg(long, help_heading = "Model")]
    pub revision: Option<String>,
    /// Say what would be copied, and copy nothing but metadata
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout at the end, and no other text there
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// What is done for the store while nobody asks for anything.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ScrubArgs {
    /// When nothing was asked for so long, compare stored experts with their digests, one a second; 0
    /// never does
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = span, help_heading = "Store")]
    pub scrub: Duration,
}
