//! Scheduling never changes a result: the same bits for any number of rows, threads and calls.

use super::support::{Random, assert_same_bits};
use crate::kernel::act::Activation;
use crate::kernel::conv::short_conv;
use crate::kernel::kda::{self, KdaShape, Segment, Tokens};
use crate::kernel::mix::res_mix;
use crate::kernel::mla::{self, LatentView, MlaShape};
use crate::kernel::norm::{l2_norm_rows, rms_norm};
use crate::kernel::{Isa, Kernel, Matrix};

/// Every instruction set with 1, 2 and 3 threads.
fn kernels() -> Vec<Kernel> {
    let with = |isa: Isa| (1..=3).map(move |threads| Kernel::new(isa, threads));
    Isa::available().into_iter().flat_map(with).collect()
}

/// Runs `f` on rows `[n, wide]` in calls of `step` rows.
fn in_calls(
    x: &[f32],
    wide: usize,
    step: usize,
    mut f: impl FnMut(&[f32]) -> Vec<f32>,
) -> Vec<f32> {
    x.chunks(wide * step).flat_map(&mut f).collect()
}

/// Name, weights or codes, scales, rows, columns.
type Case = (&'static str, Vec<u8>, Vec<u8>, usize, usize);

/// Matrices large enough for several tasks, tiles and column blocks, with ragged edges.
fn matrices(random: &mut Random) -> Vec<Case> {
    let mut codes = |rows: usize, cols: usize| {
        let scales: Vec<u8> = (0..rows * cols / 32)
            .map(|_| 118 + (random.next() % 7) as u8)
            .collect();
        (random.bytes(rows * cols / 2), scales)
    };
    let (small, small_scales) = codes(37, 416);
    let (long, long_scales) = codes(19, 2336);
    let mut wide = codes(7, 96);
    wide.1[4] = 253;
    let f32s = random
        .units(23 * 75)
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    vec![
        ("mxfp4", small, small_scales, 37, 416),
        ("mxfp4 long", long, long_scales, 19, 2336),
        ("mxfp4 wide", wide.0, wide.1, 7, 96),
        ("bf16", random.bf16(41 * 333), vec![], 41, 333),
        ("bf16 long", random.bf16(13 * 2100), vec![], 13, 2100),
        ("f32", f32s, vec![], 23, 75),
    ]
}

fn view<'a>(name: &str, bytes: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Matrix<'a> {
    match &name[..3] {
        "mxf" => Matrix::mxfp4(bytes, scales, rows, cols),
        "bf1" => Matrix::bf16(bytes, rows, cols),
        _ => Matrix::f32(bytes, rows, cols),
    }
}

#[test]
fn a_product_has_the_same_bits_for_any_rows_threads_and_slices() {
    let mut random = Random(11);
    for (name, bytes, scales, rows, cols) in matrices(&mut random) {
        let w = view(name, &bytes, &scales, rows, cols);
        let n = 67;
        let x = random.units(n * cols);
        for isa in Isa::available() {
            let single = Kernel::new(isa, 1);
            let product = |k: &Kernel, w: Matrix<'_>, x: &[f32]| {
                let mut y = vec![f32::NAN; x.len() / cols * w.rows()];
                k.matmul(w, x, &mut y);
                y
            };
            let want = in_calls(&x, cols, 1, |x| product(&single, w, x));
            for threads in 1..=3 {
                let k = Kernel::new(isa, threads);
                for step in [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, n] {
                    let got = in_calls(&x, cols, step, |x| product(&k, w, x));
                    assert_same_bits(
                        &format!("{isa:?} {name}, {threads} threads, {step} rows"),
                        &got,
                        &want,
                    );
                }
            }
            for at in [0, 1, rows / 2, rows - 1] {
                let part = product(&single, w.slice(at..rows), &x);
                for (got, want) in part.chunks(rows - at).zip(want.chunks(rows)) {
                    assert_same_bits(&format!("{isa:?} {name} from row {at}"), got, &want[at..]);
                }
            }
        }
    }
}

/// Small enough for Miri, and still through every load and store of an instruction set: both paths,
/// all formats, whole and ragged chunks, tiles and panels.
fn small_products(isa: &str) {
    let Some(isa) = Isa::from_name(isa) else {
        if cfg!(miri) {
            panic!("Miri is told of every feature");
        }
        return;
    };
    let mut random = Random(19);
    let (rows, n) = (5, 7);
    let k = Kernel::new(isa, 1);
    for (name, cols) in [("mxfp4", 160), ("bf16", 35), ("f32", 19)] {
        let scales = vec![119; if name == "mxfp4" { 25 } else { 0 }];
        let bytes = match name {
            "mxfp4" => random.bytes(rows * cols / 2),
            "bf16" => random.bf16(rows * cols),
            _ => {
                let values = random.units(rows * cols);
                values.iter().flat_map(|w| w.to_le_bytes()).collect()
            }
        };
        let w = view(name, &bytes, &scales, rows, cols);
        let x = random.units(n * cols);
        let (mut want, mut y) = (vec![f32::NAN; n * rows], vec![f32::NAN; rows]);
        k.matmul(w, &x, &mut want);
        k.matmul(w, &x[..cols], &mut y);
        assert_same_bits(&format!("{isa:?} {name}"), &y, &want[..rows]);
    }
    let mut normed = vec![f32::NAN; 19];
    rms_norm(&k, &random.units(19), &random.units(19), 1e-5, &mut normed);
    assert!(normed.iter().all(|x| x.is_finite()));
}

#[test]
fn small_products_agree_on_scalar() {
    small_products("scalar");
}

#[test]
fn small_products_agree_on_avx2() {
    small_products("avx2");
}

#[test]
fn small_products_agree_on_avx512() {
    small_products("avx512");
}

#[test]
fn small_products_agree_on_neon() {
    if cfg!(target_arch = "aarch64") {
        small_products("neon");
    }
}

/// The few-row path may hold sums in other units than the many-row path does: where the numbers leave
/// the range in which that is exact, it must notice.
#[test]
fn extreme_scales_and_activations_keep_their_bits() {
    let mut random = Random(18);
    let (rows, cols) = (9, 352);
    let ranges = [
        (77, 40),
        (76, 40),
        (147, 40),
        (148, 40),
        (100, 41),
        (0, 1),
        (0, 252),
        (120, 6),
    ];
    let sizes = [-149, -126, -100, -51, -50, -49, 0, 39, 40, 41, 90];
    let cases = ranges.into_iter().flat_map(|r| sizes.map(|s| (r, s)));
    for ((least, spread), size) in cases {
        let codes = random.bytes(rows * cols / 2);
        let mut scale = || least + (random.next() % (spread + 1)) as u8;
        let scales: Vec<u8> = (0..rows * cols / 32).map(|_| scale()).collect();
        let w = Matrix::mxfp4(&codes, &scales, rows, cols);
        // Ordinary values and a few of that size, among them the smallest and a zero.
        let few = 2f64.powi(size);
        let value = |x: f32, n: usize| match n % 37 {
            0 => few as f32,
            1 => (f64::from(x) * few) as f32,
            2 => 0.0,
            _ => x,
        };
        let x: Vec<f32> = (0..12 * cols).map(|n| value(random.unit(), n)).collect();
        for isa in Isa::available() {
            let k = Kernel::new(isa, 1);
            let product = |x: &[f32]| {
                let mut y = vec![f32::NAN; x.len() / cols * rows];
                k.matmul(w, x, &mut y);
                y
            };
            let want = product(&x);
            for step in [1, 2, 4] {
                let what = format!("{isa:?}, scales {least}+{spread}, 2^{size}, {step} rows");
                assert_same_bits(&what, &in_calls(&x, cols, step, product), &want);
            }
        }
    }
}

#[test]
fn a_large_product_is_shared_and_keeps_its_bits() {
    let mut random = Random(12);
    let (rows, cols, n) = (513, 768, 5);
    let bytes = random.bf16(rows * cols);
    let w = Matrix::bf16(&bytes, rows, cols);
    let x = random.units(n * cols);
    for isa in Isa::available() {
        let results: Vec<Vec<f32>> = (1..=3)
            .map(|threads| {
                let k = Kernel::new(isa, threads);
                assert_eq!(
                    k.worth_sharing(n * rows * cols),
                    threads > 1,
                    "the case is too small"
                );
                let mut y = vec![f32::NAN; n * rows];
                k.matmul(w, &x, &mut y);
                let inside = k.install(|| {
                    let mut y = vec![f32::NAN; n * rows];
                    k.matmul(w, &x, &mut y);
                    y
                });
                assert_same_bits("inside the pool", &inside, &y);
                y
            })
            .collect();
        assert_same_bits("two threads", &results[1], &results[0]);
        assert_same_bits("three threads", &results[2], &results[0]);
    }
}

#[test]
fn gated_is_two_products_and_an_activation() {
    let mut random = Random(13);
    let (rows, cols) = (150, 352);
    let (gate, up) = (random.bytes(rows * cols / 2), random.bytes(rows * cols / 2));
    let scales = vec![119; rows * cols / 32];
    let gate = Matrix::mxfp4(&gate, &scales, rows, cols);
    let up = Matrix::mxfp4(&up, &scales, rows, cols);
    let act = Activation::Situ {
        beta: 4.0,
        linear_beta: Some(25.0),
    };
    for k in kernels() {
        for n in [1, 3, 18] {
            let x = random.units(n * cols);
            let mut y = [(); 3].map(|()| vec![f32::NAN; n * rows]);
            k.matmul(gate, &x, &mut y[0]);
            k.matmul(up, &x, &mut y[1]);
            let [want, other, got] = &mut y;
            act.apply(k.isa(), want, other);
            k.gated(gate, up, act, &x, got);
            assert_same_bits(&format!("{:?}, {n} rows", k.isa()), got, want);
        }
    }
}

#[test]
fn norms_and_mixes_work_row_by_row() {
    let mut random = Random(14);
    let (n, d) = (70, 1111);
    let x = random.units(n * d);
    let (gain, other) = (random.units(d), random.units(n * d));
    let single = Kernel::new(Isa::Scalar, 1);
    let norm = |k: &Kernel, x: &[f32]| {
        let mut y = vec![f32::NAN; x.len()];
        rms_norm(k, x, &gain, 1e-5, &mut y);
        y
    };
    let mix = |k: &Kernel, x: &[f32], other: &[f32]| {
        let (mut y, mut probs) = (vec![f32::NAN; x.len()], Vec::new());
        res_mix(k, &[other, x], &gain, 1e-5, &mut y, &mut probs);
        y.extend(probs);
        y
    };
    let mut heads = x.clone();
    l2_norm_rows(&single, &mut heads, 101, 1e-6, 0.5);
    let want = (norm(&single, &x), mix(&single, &x, &other));
    for k in kernels() {
        let name = format!("{:?}, {} threads", k.isa(), k.threads());
        let got = in_calls(&x, d, 9, |x| norm(&k, x));
        assert_same_bits(&format!("rms {name}"), &got, &want.0);
        assert_same_bits(&format!("mix {name}"), &mix(&k, &x, &other), &want.1);
        let row = mix(&k, &x[d..2 * d], &other[d..2 * d]);
        assert_same_bits(
            &format!("mix of one row {name}"),
            &row[..d],
            &want.1[d..2 * d],
        );
        let mut got = x.clone();
        l2_norm_rows(&k, &mut got, 101, 1e-6, 0.5);
        assert_same_bits(&format!("l2 {name}"), &got, &heads);
    }
}

#[test]
fn a_convolution_does_not_care_where_a_call_ends() {
    let mut random = Random(15);
    let (t, channels, taps) = (23, 1300, 4);
    let (x, weight) = (random.units(t * channels), random.units(channels * taps));
    let history = random.units(channels * (taps - 1));
    let run = |k: &Kernel, step: usize| {
        let mut history = history.clone();
        let y = in_calls(&x, channels, step, |x| {
            let mut y = vec![f32::NAN; x.len()];
            short_conv(k, x, &weight, &mut history, &mut y);
            y
        });
        (y, history)
    };
    let want = run(&Kernel::new(Isa::Scalar, 1), 1);
    for k in kernels() {
        for step in [1, 2, 3, 5, t] {
            let got = run(&k, step);
            assert_same_bits(&format!("{:?}, {step} rows", k.isa()), &got.0, &want.0);
            assert_same_bits(
                &format!("history, {:?}, {step} rows", k.isa()),
                &got.1,
                &want.1,
            );
        }
    }
}

#[test]
fn the_recurrence_is_the_same_token_by_token_and_beside_other_sequences() {
    let mut random = Random(16);
    let shape = KdaShape { heads: 3, dim: 80 };
    let (n, lanes) = (150, 240);
    let mut draw =
        |scale: f32| -> Vec<f32> { random.units(n * lanes).iter().map(|x| x * scale).collect() };
    let (q, key, v) = (draw(0.1), draw(0.1), draw(1.0));
    let decay: Vec<f32> = draw(2.0).iter().map(|x| -x.abs()).collect();
    let beta: Vec<f32> = random.units(n * 3).iter().map(|b| b.abs()).collect();
    let start = random.units(2 * lanes * 80);
    let tokens = Tokens {
        q: &q,
        k: &key,
        v: &v,
        log_decay: &decay,
        beta: &beta,
    };
    // Rows 0..100 are one sequence, 110..150 another; ten rows belong to none.
    let run = |k: &Kernel, step: usize| {
        let (mut states, mut out) = (start.clone(), vec![f32::NAN; n * lanes]);
        for at in (0..100).step_by(step) {
            let (first, second) = states.split_at_mut(lanes * 80);
            let mut segments = vec![Segment {
                rows: at..(at + step).min(100),
                state: first,
            }];
            if at == 0 {
                segments.push(Segment {
                    rows: 110..150,
                    state: second,
                });
            }
            kda::scan(k, shape, tokens, segments, &mut out);
        }
        (out, states)
    };
    let want = run(&Kernel::new(Isa::Scalar, 1), 1);
    assert!(
        want.0[100 * lanes..110 * lanes].iter().all(|x| x.is_nan()),
        "rows of no segment"
    );
    assert!(
        want.0[110 * lanes..].iter().all(|x| x.is_finite()),
        "the second sequence"
    );
    for k in kernels() {
        for step in [1, 7, 64, 65, 100] {
            let got = run(&k, step);
            let name = format!("{:?}, {} threads, {step} tokens", k.isa(), k.threads());
            assert_same_bits(&name, &got.0, &want.0);
            assert_same_bits(&format!("state, {name}"), &got.1, &want.1);
        }
    }
}

#[test]
fn attention_of_a_row_does_not_depend_on_its_neighbours() {
    let mut random = Random(17);
    let shape = MlaShape {
        heads: 5,
        nope: 24,
        rope: 8,
        rank: 40,
        vdim: 24,
    };
    let (t, past) = (90, 50);
    let kv_b = random.bf16(5 * 48 * 40);
    let kv_b = Matrix::bf16(&kv_b, 5 * 48, 40);
    let q = random.units(t * 5 * 32);
    let blocks: Vec<std::sync::Arc<[f32]>> = (0..3)
        .map(|_| random.units(mla::BLOCK * 48).into())
        .collect();
    let cache = LatentView::new(&blocks, shape.width());
    for isa in Isa::available() {
        let run = |k: &Kernel, step: usize| {
            let mut first = past;
            in_calls(&q, 5 * 32, step, |q| {
                let mut out = vec![f32::NAN; q.len() / (5 * 32) * 5 * 24];
                mla::attend(k, shape, q, kv_b, &cache, first, &mut out);
                first += step;
                out
            })
        };
        let want = run(&Kernel::new(isa, 1), 1);
        for threads in 1..=3 {
            let k = Kernel::new(isa, threads);
            for step in [1, 2, 3, 17, 64, t] {
                let name = format!("{isa:?}, {threads} threads, {step} rows");
                assert_same_bits(&name, &run(&k, step), &want);
            }
        }
    }
}
