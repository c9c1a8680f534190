//! x86-64: the proofs that a CPU has an instruction set, and the products that use it.
//!
//! Safety argument, once for the folder: `#[target_feature]` functions are reached only through
//! [`Avx2`] and [`Avx512`], whose single constructor asks the CPU. Inside them arithmetic intrinsics
//! are safe; the remaining `unsafe` is loads and stores of fixed-size arrays, where the type is the
//! bound.

#![expect(
    clippy::needless_range_loop,
    reason = "several arrays share each index"
)]

mod avx2;
mod avx512;

/// Proof that this CPU has AVX2 and FMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// Asks the CPU.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Avx2(()))
    }

    /// See [`Isa::run`](super::Isa::run).
    pub(super) fn run<A, R>(self, f: impl FnOnce(A) -> R, args: A) -> R {
        // SAFETY: `self` exists, so `detect` found AVX2.
        unsafe { with_avx2(f, args) }
    }
}

/// Proof that this CPU has AVX-512F (and AVX2 and FMA, as every such CPU).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

impl Avx512 {
    /// Asks the CPU.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && Avx2::detect().is_some()).then_some(Avx512(()))
    }

    /// See [`Isa::run`](super::Isa::run).
    pub(super) fn run<A, R>(self, f: impl FnOnce(A) -> R, args: A) -> R {
        // SAFETY: `self` exists, so `detect` found AVX-512F and AVX2.
        unsafe { with_avx512(f, args) }
    }
}

#[target_feature(enable = "avx2")]
fn with_avx2<A, R>(f: impl FnOnce(A) -> R, args: A) -> R {
    f(args)
}

#[target_feature(enable = "avx2,avx512f")]
fn with_avx512<A, R>(f: impl FnOnce(A) -> R, args: A) -> R {
    f(args)
}

/// How far ahead of use `R` rows of `len` bytes, read side by side, are asked for. Short rows end
/// before the CPU's own prefetcher has understood them, so the next `R` rows are fetched while these
/// are used; along a long row a fixed distance does.
#[inline(always)]
fn ahead(rows: usize, len: usize) -> usize {
    if len < 4096 { rows * len } else { 2048 }
}

/// Asks for the line `ahead` bytes behind `at`, into the second level: it is wanted in some thousand
/// cycles, and the first is full of activations.
#[inline(always)]
fn prefetch<const N: usize>(at: &[u8; N], ahead: usize) {
    let line = at.as_ptr().wrapping_add(ahead).cast();
    // SAFETY: a prefetch reads nothing into the program and faults at no address.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line) }
}

/// Asks for all lines of `bytes`, into the second level: they are wanted soon, not next.
#[inline(always)]
fn ask(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        // SAFETY: a prefetch reads nothing into the program and faults at no address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(
                line.as_ptr().cast(),
            );
        }
    }
}
