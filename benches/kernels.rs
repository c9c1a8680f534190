//! What the kernels reach of what this machine can do, on K3's own shapes:
//! `cargo bench --bench kernels [-- ISA [PART OF A NAME]]`.
//!
//! One row reads every weight once, so its measure is a plain streaming read of the same bytes; many
//! rows reuse weights, so theirs is a loop of fused multiply-adds that touches no memory. Both are
//! measured in the same run, next to the kernel; every figure is the best of five. Other work on the
//! machine lowers all of them, and not evenly: look at the load it prints before comparing.

#![allow(
    unsafe_code,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a program for a person at a terminal; one read and one loop of vector instructions"
)]

use std::hint::black_box;
use std::time::Instant;

use deltafin::kernel::Isa;
use deltafin::kernel::Kernel;
use deltafin::kernel::Matrix;
use memmap2::MmapMut;
use rayon::prelude::*;

/// Best of five, in seconds.
fn best(mut f: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..5).map(time).fold(f64::INFINITY, f64::min)
}

/// A plain read of all of `bytes`: one stream from end to end, vectors of 256 bits, four sums. Wider
/// vectors, several streams and prefetching were tried: no faster here, and mostly slower.
fn read(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU was asked.
        black_box(unsafe { sum_avx2(bytes) });
        return;
    }
    black_box(sum(bytes));
}

/// The sum of all words, in vectors as wide as the caller's features.
#[inline(always)]
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 16];
    for words in bytes.as_chunks::<128>().0 {
        for (sum, word) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
            *sum ^= u64::from_le_bytes(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(bytes: &[u8]) -> u64 {
    sum(bytes)
}

/// Multiply-adds in registers alone on all of the kernel's threads at once, in FLOP a second; `None`
/// where the instruction set has no such loop here.
fn peak(kernel: &Kernel) -> Option<f64> {
    const STEPS: usize = 400_000;
    let (run, lanes): (fn(), f64) = match kernel.isa().name() {
        // SAFETY: the instruction set is available, so the CPU has these features.
        #[cfg(target_arch = "x86_64")]
        "avx2" => (|| unsafe { fma_avx2(STEPS) }, 8.0),
        // SAFETY: the instruction set is available, so the CPU has these features.
        #[cfg(target_arch = "x86_64")]
        "avx512" => (|| unsafe { fma_avx512(STEPS) }, 16.0),
        #[cfg(target_arch = "aarch64")]
        "neon" => (|| fma_neon(STEPS), 4.0),
        _ => return None,
    };
    let threads = kernel.threads();
    let all = || (0..threads).into_par_iter().for_each(|_| run());
    let flops = 2.0 * lanes * 12.0 * (STEPS * threads) as f64;
    Some(flops / kernel.install(|| best(all)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_avx2(steps: usize) {
    use std::arch::x86_64::*;
    let (a, b) = (
        _mm256_set1_ps(black_box(0.99)),
        _mm256_set1_ps(black_box(1e-9)),
    );
    let mut sums = [_mm256_set1_ps(black_box(1.0)); 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_avx512(steps: usize) {
    use std::arch::x86_64::*;
    let (a, b) = (
        _mm512_set1_ps(black_box(0.99)),
        _mm512_set1_ps(black_box(1e-9)),
    );
    let mut sums = [_mm512_set1_ps(black_box(1.0)); 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "aarch64")]
fn fma_neon(steps: usize) {
    let (a, b) = (black_box(0.99f32), black_box(1e-9f32));
    let mut sums = [[black_box(1.0f32); 4]; 12];
    for _ in 0..steps {
        for sum in sums.as_flattened_mut() {
            *sum = sum.mul_add(a, b);
        }
    }
    black_box(sums);
}

/// One matrix shape, several copies of it side by side, so that no cache holds them.
struct Case {
    name: &'static str,
    rows: usize,
    cols: usize,
    packed: bool,
    copies: usize,
}

const CASES: [Case; 5] = [
    Case {
        name: "expert gate, up",
        rows: 3072,
        cols: 3584,
        packed: true,
        copies: 72,
    },
    Case {
        name: "expert down",
        rows: 3584,
        cols: 3072,
        packed: true,
        copies: 72,
    },
    Case {
        name: "kda q, k, v, gate",
        rows: 12288,
        cols: 7168,
        packed: false,
        copies: 3,
    },
    Case {
        name: "mla q_b",
        rows: 18432,
        cols: 1536,
        packed: false,
        copies: 8,
    },
    Case {
        name: "head, a slice",
        rows: 10240,
        cols: 7168,
        packed: false,
        copies: 3,
    },
];

impl Case {
    fn bytes(&self) -> usize {
        let n = self.rows * self.cols;
        if self.packed { n / 2 + n / 32 } else { 2 * n }
    }

    /// Well-behaved random weights for all copies, in huge pages where the system gives them, as the
    /// engine holds its weights.
    fn draw(&self) -> MmapMut {
        let mut state = 1u64;
        let mut all =
            MmapMut::map_anon(self.bytes() * self.copies).expect("memory for the weights");
        #[cfg(target_os = "linux")]
        let _ = all.advise(memmap2::Advice::HugePage);
        for word in all.as_chunks_mut::<8>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        for copy in all.chunks_mut(self.bytes()) {
            if self.packed {
                let scales = &mut copy[self.rows * self.cols / 2..];
                scales.iter_mut().for_each(|s| *s = 118 + *s % 7);
            } else {
                copy.as_chunks_mut::<2>()
                    .0
                    .iter_mut()
                    .for_each(|w| w[1] = w[1] & 0x80 | 0x3c);
            }
        }
        all
    }

    fn matrix<'a>(&self, bytes: &'a [u8]) -> Matrix<'a> {
        if self.packed {
            let (codes, scales) = bytes.split_at(self.rows * self.cols / 2);
            Matrix::mxfp4(codes, scales, self.rows, self.cols)
        } else {
            Matrix::bf16(bytes, self.rows, self.cols)
        }
    }
}

fn measure(case: &Case, weights: &[u8], isa: Isa, threads: usize) {
    let kernel = Kernel::new(isa, threads);
    let piece = weights.len().div_ceil(4 * threads).next_multiple_of(1024);
    let read = kernel.install(|| best(|| weights.par_chunks(piece).for_each(read)));
    let peak = peak(&kernel);
    let rate = weights.len() as f64 / read / 1e9;
    println!(
        "{}, {}, {threads} threads: plain read {rate:.1} GB/s",
        case.name,
        isa.name()
    );
    let matrices: Vec<Matrix<'_>> = weights
        .chunks(case.bytes())
        .map(|b| case.matrix(b))
        .collect();
    for n in [1, 2, 4, 16, 64, 512] {
        let copies = if n > 4 { 1 } else { case.copies };
        let x: Vec<f32> = (0..n * case.cols)
            .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
            .collect();
        let mut y = vec![0.0; n * case.rows];
        let run = || {
            matrices[..copies]
                .iter()
                .for_each(|&w| kernel.matmul(w, &x, &mut y))
        };
        let seconds = kernel.install(|| best(run)) / copies as f64;
        let flops = 2.0 * (n * case.rows * case.cols) as f64 / seconds;
        println!(
            "  {n:3} rows  {:6.2} GB/s, {:3.0} % of the read   {:6.1} GFLOP/s{}",
            case.bytes() as f64 / seconds / 1e9,
            100.0 * case.bytes() as f64 / seconds / 1e9 / rate,
            flops / 1e9,
            peak.map_or(String::new(), |p| format!(
                ", {:3.0} % of {:.0}",
                100.0 * flops / p,
                p / 1e9
            )),
        );
    }
}

fn main() {
    let mut words = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let (asked, part) = (words.next(), words.next().unwrap_or_default());
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{all} CPUs; load before: {}", load.trim());
    let chosen = |isa: &Isa| match &asked {
        Some(name) => isa.name() == name,
        None => isa.name() != "scalar",
    };
    for case in CASES.iter().filter(|case| case.name.contains(&part)) {
        let weights = case.draw();
        for isa in Isa::available().into_iter().filter(chosen) {
            measure(case, &weights, isa, 1);
            if all > 1 {
                measure(case, &weights, isa, all);
            }
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load after: {}", load.trim());
}
