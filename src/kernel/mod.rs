//! Arithmetic on slices: scalar is the meaning, SIMD twins are only faster.
//!
//! No I/O, no knowledge of models. Every operation exists once as a plain loop, which is the
//! definition; faster twins agree with it within the bound stated on the operation.
//!
//! Two rules make results independent of scheduling:
//!
//! 1. Every output's sum has one order per instruction set. How many rows a call has, how it is
//!    split between threads and how often a sequence is cut into calls changes no bit.
//! 2. exp, tanh, sigmoid and softplus are our own ([`math`]): the standard library's differ between
//!    systems.
//!
//! Lengths that disagree panic: sizes from a file are checked where the file is read, so a mismatch
//! here is our own mistake. NaN and infinities are values like others and stay in their own row.

pub mod act;
#[cfg(target_arch = "aarch64")]
#[expect(
    unsafe_code,
    reason = "vendor intrinsics; see the module's safety argument"
)]
mod arm;
pub mod bf16;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod chunks;
pub mod conv;
mod isa;
pub mod kda;
mod lanes;
pub mod math;
mod matmul;
mod matrix;
pub mod mix;
pub mod mla;
pub mod mxfp4;
pub mod norm;
mod pool;
pub mod route;
mod scalar;
#[cfg(test)]
mod tests;
mod twin;
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "vendor intrinsics; see the module's safety argument"
)]
mod x86;

/// The version of this room's arithmetic: one more whenever a change may change a bit of any result.
///
/// Together with the instruction set it names what a saved state was computed by: only the same of
/// both continues it exactly.
pub const VERSION: u32 = 1;

pub use act::Activation;
pub use isa::Isa;
pub use matrix::Matrix;
pub use pool::Kernel;
