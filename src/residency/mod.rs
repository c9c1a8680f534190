//! What is in RAM, what comes next, from where.
//!
//! ```text
//! Opened     which commit, where every tensor lies          open.rs
//!   ├─ install_core, install_experts: ahead of use          install.rs, fetch.rs
//!   └─ Supply: the forward pass's ports                     supply.rs
//!        ├─ core     mapped from the store's files          core.rs
//!        ├─ experts  memory ─► disk ─► hub, as they arrive
//!        └─ writer   keeps what came, behind the arithmetic writer.rs
//! Meter      every byte and every wait, by source           meter.rs
//! ```
//!
//! This is the one room where `store` and `hub` meet.

mod core;
mod error;
mod fetch;
mod install;
mod meter;
mod open;
mod supply;
mod writer;

pub use core::MappedPart;
pub use error::ResidencyError;
pub use install::Installed;
pub use install::Plan;
pub use install::Proved;
pub use meter::ByOrigin;
pub use meter::Counts;
pub use meter::Meter;
pub use meter::Origin;
pub use open::InstallObserver;
pub use open::OpenRequest;
pub use open::Opened;
pub use supply::ExpertBytes;
pub use supply::Supply;
