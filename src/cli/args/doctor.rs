//! `doctor`: where to look, and how closely.

use clap::Args;

use super::StoreArgs;

/// `doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// Also read everything that is stored and compare it with its digests
    #[arg(long)]
    pub deep: bool,
    /// The hub to ask; repeat to name several, asked in order before `HF_ENDPOINT`
    #[arg(long, help_heading = "Model")]
    pub hub: Vec<String>,
    /// Ask no hub
    #[arg(long, help_heading = "Model")]
    pub offline: bool,
    /// The model to ask the hub for [default: moonshotai/Kimi-K3]
    #[arg(long, help_heading = "Model")]
    pub model: Option<String>,
    #[command(flatten)]
    pub store: StoreArgs,
    /// One JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}
