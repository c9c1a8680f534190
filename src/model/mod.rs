//! The forward pass and a sequence's state.
//!
//! One **sweep** passes over all layers for a set of **rows**; a row is one token position of one sequence. Reading a
//! prompt is a sweep of many rows, decoding one of a single row a sequence. There is one forward pass, and it takes
//! rows.
//!
//! A row's result has the same bits whatever else is in the sweep, however a prompt is cut into sweeps, in whatever
//! order experts arrive, and whatever the number of threads: no sum is ever taken in an order that these decide.
//!
//! Weights come through the ports [`CoreSupply`] and [`ExpertSupply`]; this room sees slices, not files or sockets.

mod error;
mod forward;
mod guess;
mod kda;
mod mla;
mod moe;
pub mod order;
mod pass;
mod ports;
mod rows;
mod sequence;
mod weights;

#[cfg(test)]
mod tests;

pub use self::error::ModelError;
pub use self::forward::Model;
pub use self::guess::Guesser;
pub use self::ports::CoreLease;
pub use self::ports::CoreSupply;
pub use self::ports::CoreTensor;
pub use self::ports::ExpertSupply;
pub use self::ports::Waited;
pub use self::ports::Watch;
pub use self::rows::LayerRoutes;
pub use self::rows::Row;
pub use self::rows::Shared;
pub use self::rows::Sweep;
pub use self::sequence::Sequence;
pub use self::sequence::Slice;
