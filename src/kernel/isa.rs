//! The instruction set as a value.

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
}

impl Isa {
    /// Everything this CPU can run, slowest first. `Scalar` is always there.
    pub fn available() -> Vec<Isa> {
        let mut found = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(x86::Avx2::detect().map(Isa::Avx2));
            found.extend(x86::Avx512::detect().map(Isa::Avx512));
        }
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
        }
    }

    /// The available instruction set of that [`name`](Self::name); `None` where this CPU lacks it.
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::available().into_iter().find(|isa| isa.name() == name)
    }
}
