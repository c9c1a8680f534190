//! Which bytes of which shard are which tensor; `config.json` of a K3-family model.
//!
//! ```text
//! config.json ────────────────► Spec ──────┐
//! model.safetensors.index.json ► Index ────┼─► Layout ─► .expert(key)  ranges to fetch, in computing order
//! each shard's first 8 + N bytes ► Header ─┘          ├─► .core()       files to write, tensor by tensor
//!                                                     └─► .rest()       what the text engine never reads
//! core/042 ─► CoreHead ─► where each tensor lies in a core file
//! ```
//!
//! 1. Nothing here reads a file or a socket: bytes come in, facts go out.
//! 2. Every byte that comes in may be wrong or hostile. Whatever it holds, the answer is a value or a
//!    [`CheckpointError`] that names the key, tensor or file; never a panic, never an allocation larger than the
//!    input.
//! 3. A [`Layout`] exists only when every tensor the [`Spec`] asks for is there, in the right shape and a known
//!    type, so that a wrong checkpoint is refused before its first weight is fetched.

mod catalogue;
mod config;
mod core;
mod error;
mod header;
mod implied;
mod index;
mod layout;
mod spec;

#[cfg(test)]
mod tests;

pub use self::core::CORE_ALIGN;
pub use self::core::CoreEntry;
pub use self::core::CoreHead;
pub use self::error::CheckpointError;
pub use self::error::HeaderFault;
pub use self::header::Dtype;
pub use self::header::HEADER_LEN_MAX;
pub use self::header::Header;
pub use self::header::TensorEntry;
pub use self::header::header_len;
pub use self::implied::implied_core;
pub use self::index::Index;
pub use self::index::SINGLE_SHARD;
pub use self::layout::CoreFile;
pub use self::layout::CorePiece;
pub use self::layout::Layout;
pub use self::layout::Part;
pub use self::spec::Act;
pub use self::spec::Attention;
pub use self::spec::ExpertShape;
pub use self::spec::Family;
pub use self::spec::Ffn;
pub use self::spec::KdaSpec;
pub use self::spec::LayerKind;
pub use self::spec::MlaSpec;
pub use self::spec::MoeSpec;
pub use self::spec::Score;
pub use self::spec::Spec;
