//! `cache warm`: which experts are worth fetching before they are asked for.

use std::path::PathBuf;

use clap::Args;

use super::ModelArgs;

/// `cache warm`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheWarm {
    /// Those first that were used most in what --trace of a generating command has written, late uses
    /// counting more than early ones
    #[arg(long, value_name = "FILE", required_unless_present = "heat")]
    pub trace: Option<PathBuf>,
    /// Those first that were used most here, lately
    #[arg(long, conflicts_with = "trace")]
    pub heat: bool,
    /// Fetch only while no other process fetches experts of this store, such as a server that somebody waits for
    #[arg(long)]
    pub idle: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Say what would be fetched, and fetch nothing but metadata
    #[arg(long)]
    pub dry_run: bool,
    /// One JSON object on stdout at the end, and no other text there
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Say more on stderr
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = "Output")]
    pub verbose: u8,
}
