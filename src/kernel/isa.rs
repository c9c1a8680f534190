//! The instruction set as a value.

#[cfg(target_arch = "aarch64")]
use super::arm;
#[cfg(target_arch = "x86_64")]
use super::x86;

/// The instruction set a kernel runs on.
///
/// Chosen once when the engine opens and passed down by value, so a test can run every variant in
/// one process and a bug report can name the one it met. A variant other than `Scalar` carries a
/// token that only detection can create: holding the value is the proof that the CPU has the
/// instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Portable loops; the meaning of every kernel.
    Scalar,
    /// 256-bit: AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    /// 512-bit: AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
    /// 128-bit: Advanced SIMD.
    #[cfg(target_arch = "aarch64")]
    Neon(arm::Neon),
}

impl Isa {
    /// Everything this CPU can run, slowest first. `Scalar` is always there.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "other targets have the scalar definition alone")]
        let mut found = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(x86::Avx2::detect().map(Isa::Avx2));
            found.extend(x86::Avx512::detect().map(Isa::Avx512));
        }
        #[cfg(target_arch = "aarch64")]
        found.extend(arm::Neon::detect().map(Isa::Neon));
        found
    }

    /// The widest of [`available`](Self::available).
    pub fn best() -> Isa {
        Isa::available().pop().unwrap_or(Isa::Scalar)
    }

    /// The name a report shows and `--isa` takes: `scalar`, `avx2`, `avx512` or `neon`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => "neon",
        }
    }

    /// Calls `f(args)` as compiled for this instruction set, if `f` is an `#[inline(always)]`
    /// function (a closure would be compiled once, for the plain CPU).
    ///
    /// For loops whose order of operations is fixed in the source, such as those over
    /// [`lanes`](super::lanes): wider vectors then change no bit, as neither Rust nor LLVM joins a
    /// multiplication and an addition on its own.
    #[inline(always)]
    pub(super) fn run<A, R>(self, f: impl FnOnce(A) -> R, args: A) -> R {
        match self {
            Isa::Scalar => f(args),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(cpu) => cpu.run(f, args),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(cpu) => cpu.run(f, args),
            // Part of every AArch64 target: all code is compiled for it.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => f(args),
        }
    }

    /// The available instruction set of that [`name`](Self::name); `None` where this CPU lacks it.
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }
}
