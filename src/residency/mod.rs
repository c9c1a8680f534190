//! What is in RAM, what comes next, from where.
//!
//! ```text
//! Opened     which commit, where every tensor lies          open.rs
//!   ├─ install_core, install_experts: ahead of use          install.rs, lanes.rs
//!   │    ├─ core files, written as they come                stretch.rs
//!   │    └─ large ranges of shards, split as they come      bulk.rs, todo.rs
//!   ├─ one expert, whatever its pieces                      fetch.rs
//!   ├─ warm: the hottest that the cache can hold            warm.rs
//!   ├─ Through: shards for other machines                   through.rs
//!   └─ Supply: the forward pass's ports                     supply.rs
//!        ├─ core     mapped, or pinned and read ahead       core.rs, ahead.rs
//!        ├─ experts  memory ─► disk ─► hub, as they arrive  tier.rs
//!        ├─ guesses  read while the disk is idle            lookahead.rs
//!        └─ writer   keeps what came, behind the arithmetic writer.rs
//! MemoryPlan who gets the memory, and what that costs      shape.rs, plan.rs, predict.rs, ram.rs, rates.rs
//! Trace      which experts each sweep has used, and what
//!            a cache would have made of it               trace.rs, policy.rs, simulate.rs
//! Meter      every byte and every wait, by source           meter.rs
//! ```
//!
//! This is the one room where `store` and `hub` meet.

mod ahead;
mod bulk;
mod core;
mod direct;
mod error;
mod fetch;
mod growing;
mod install;
mod lanes;
mod lookahead;
mod meter;
mod open;
mod plan;
#[cfg(test)]
mod plan_tests;
mod policy;
mod pool;
mod predict;
pub mod ram;
pub mod rates;
mod shape;
mod simulate;
mod stretch;
mod supply;
mod through;
mod tier;
mod todo;
mod trace;
mod warm;
mod writer;

pub use core::CorePiece;
pub use core::MappedPart;
pub use core::ReadPart;
pub use error::ResidencyError;
pub use install::Installed;
pub use install::Plan;
pub use install::Proved;
pub use lookahead::Lookahead;
pub use meter::ByOrigin;
pub use meter::Counts;
pub use meter::Meter;
pub use meter::Origin;
pub use meter::Recall;
pub use open::InstallObserver;
pub use open::OpenRequest;
pub use open::Opened;
pub use plan::CoreChoice;
pub use plan::Demand;
pub use plan::MemoryPlan;
pub use plan::PlanLine;
pub use plan::Share;
pub use policy::Lfu;
pub use policy::Lru;
pub use policy::Policy;
pub use policy::hottest;
pub use policy::policies;
pub use predict::Moved;
pub use predict::Prediction;
pub use predict::Rates;
pub use predict::Stored;
pub use predict::predict;
pub use shape::Shape;
pub use simulate::Replayed;
pub use simulate::belady;
pub use simulate::distinct;
pub use simulate::replay;
pub use supply::ExpertBytes;
pub use supply::Supply;
pub use through::Brought;
pub use through::Through;
pub use trace::Trace;
pub use trace::TraceError;
pub use trace::TraceHead;
pub use warm::Warming;
