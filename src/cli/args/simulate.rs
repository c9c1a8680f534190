//! `cache simulate`: which trace, which sizes.

use std::path::PathBuf;

use clap::Args;

use crate::terms::Bytes;

/// `cache simulate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheSimulate {
    /// What --trace of a generating command has written
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// A size of the cache, such as 50GB; repeatable [default: parts of what the trace has used]
    #[arg(long)]
    pub cache: Vec<Bytes>,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}
