//! Every unit golden, on every instruction set this machine has.
//!
//! The goldens are float64 results rounded once; see `fixtures/goldens/README.md`.

use super::support::{Tensors, assert_close, assert_same_bits};
use crate::kernel::act::{Activation, activate, gate_by_sigmoid, sigmoid_in_place};
use crate::kernel::conv::short_conv;
use crate::kernel::kda::{self, KdaShape, Segment, Tokens};
use crate::kernel::mix::res_mix;
use crate::kernel::mla::{self, LatentView, MlaShape};
use crate::kernel::norm::{l2_norm_rows, rms_norm, rms_norm_in_place};
use crate::kernel::route::{RouterSpec, Score, top_k};
use crate::kernel::{Isa, Kernel, Matrix, bf16, mxfp4};

fn kernels() -> Vec<Kernel> {
    Isa::available()
        .into_iter()
        .map(|isa| Kernel::new(isa, 2))
        .collect()
}

#[test]
fn rms_norm_matches_also_on_a_row_that_its_epsilon_dominates() {
    let g = Tensors::golden("rmsnorm");
    let (x, gain) = (g.f32("x"), g.f32("weight"));
    for k in kernels() {
        for (name, eps) in [("y_1e-5", 1e-5), ("y_1e-6", 1e-6)] {
            let mut y = vec![f32::NAN; x.len()];
            rms_norm(&k, &x, &gain, eps, &mut y);
            let want = g.f32(name);
            for (y, want) in y.chunks(gain.len()).zip(want.chunks(gain.len())) {
                assert_close(name, y, want);
            }
            let mut z = x.clone();
            rms_norm_in_place(&k, &mut z, &gain, eps);
            assert_same_bits("in place", &z, &y);
        }
    }
}

#[test]
fn res_mix_weighs_the_raw_candidates() {
    let g = Tensors::golden("attnres");
    let (blocks, prefix) = (g.f32("blocks"), g.f32("prefix"));
    let score: Vec<f32> = g
        .f32("norm")
        .iter()
        .zip(g.f32("proj"))
        .map(|(a, b)| a * b)
        .collect();
    let mut candidates: Vec<&[f32]> = blocks.chunks(prefix.len()).collect();
    candidates.push(&prefix);
    for k in kernels() {
        let (mut out, mut probs) = (vec![f32::NAN; prefix.len()], Vec::new());
        res_mix(&k, &candidates, &score, 1e-5, &mut out, &mut probs);
        assert_close("probs", &probs, &g.f32("probs"));
        assert_close("mix", &out, &g.f32("mix"));
    }
}

#[test]
fn the_short_convolution_reads_its_history_oldest_first() {
    let g = Tensors::golden("conv");
    let (x, weight) = (g.f32("x"), g.f32("kernel"));
    for k in kernels() {
        let (mut history, mut y) = (g.f32("history"), vec![f32::NAN; x.len()]);
        short_conv(&k, &x, &weight, &mut history, &mut y);
        assert_close("y", &y, &g.f32("y"));
        assert_close("history", &history, &g.f32("history_out"));
    }
}

#[test]
fn kda_matches_step_by_step_and_as_a_whole() {
    let g = Tensors::golden("kda");
    let shape = KdaShape { heads: 2, dim: 128 };
    let tokens = 6;
    let lanes = shape.heads * shape.dim;
    for k in kernels() {
        let (mut q, mut key, mut beta) = (g.f32("q"), g.f32("k"), g.f32("beta_logit"));
        l2_norm_rows(&k, &mut q, shape.dim, 1e-6, 1.0 / 128f32.sqrt());
        l2_norm_rows(&k, &mut key, shape.dim, 1e-6, 1.0);
        sigmoid_in_place(&k, &mut beta);
        let want = (g.f32("q_normed_scaled"), g.f32("k_normed"));
        // Row by row: some rows are near zero, where only the right epsilon gives the right size.
        for (head, (got, want)) in q.chunks(128).zip(want.0.chunks(128)).enumerate() {
            assert_close(&format!("q of head {head}"), got, want);
        }
        for (head, (got, want)) in key.chunks(128).zip(want.1.chunks(128)).enumerate() {
            assert_close(&format!("k of head {head}"), got, want);
        }
        assert_close("beta", &beta, &g.f32("beta"));
        for (gate, floor) in [("floor", Some(-5.0)), ("softplus", None)] {
            let name = |part: &str| format!("{gate}.{part}");
            let (f, bias, a_log) = (g.f32("f"), g.f32("dt_bias"), g.f32("A_log"));
            let mut decay = vec![f32::NAN; f.len()];
            kda::log_decay(&k, &f, &bias, &a_log, shape.heads, floor, &mut decay);
            assert_close(&name("log_decay"), &decay, &g.f32(&name("log_decay")));
            let v = g.f32("v");
            let all = Tokens {
                q: &q,
                k: &key,
                v: &v,
                log_decay: &decay,
                beta: &beta,
            };
            let (mut state, mut o) = (g.f32("state_in"), vec![f32::NAN; v.len()]);
            let segments = vec![Segment {
                rows: 0..1,
                state: &mut state,
            }];
            kda::scan(&k, shape, all, segments, &mut o);
            assert!(
                o[lanes..].iter().all(|o| o.is_nan()),
                "rows outside the segment were written"
            );
            assert_close(&name("state_step0"), &state, &g.f32(&name("state_step0")));
            let segments = vec![Segment {
                rows: 1..tokens,
                state: &mut state,
            }];
            kda::scan(&k, shape, all, segments, &mut o);
            assert_close(&name("state_out"), &state, &g.f32(&name("state_out")));
            assert_close(&name("o"), &o, &g.f32(&name("o")));
            let mut gated = vec![f32::NAN; o.len()];
            kda::gate(&k, &o, &g.f32("o_norm"), 1e-5, &g.f32("gate"), &mut gated);
            assert_close(&name("gated"), &gated, &g.f32(&name("gated")));
        }
    }
}

#[test]
fn absorbed_attention_matches_the_expanded_golden() {
    let g = Tensors::golden("mla");
    let shape = MlaShape {
        heads: 2,
        nope: 128,
        rope: 64,
        rank: 512,
        vdim: 128,
    };
    for k in kernels() {
        let mut latent = g.f32("kv_latent_raw");
        rms_norm_in_place(&k, &mut latent, &g.f32("kv_a_layernorm"), 1e-6);
        assert_close("latent", &latent, &g.f32("latent"));
        // What lies behind the last position must not be read.
        let mut block = vec![f32::NAN; mla::BLOCK * shape.width()].into_boxed_slice();
        let rot = g.f32("k_rot");
        for (p, position) in block.chunks_mut(shape.width()).take(7).enumerate() {
            position[..512].copy_from_slice(&latent[p * 512..][..512]);
            position[512..].copy_from_slice(&rot[p * 64..][..64]);
        }
        let blocks = [std::sync::Arc::from(block)];
        let kv_b = Matrix::bf16(g.bytes("kv_b_proj"), 512, 512);
        let mut out = vec![f32::NAN; 4 * 256];
        let cache = LatentView::new(&blocks, shape.width());
        mla::attend(&k, shape, &g.f32("q"), kv_b, &cache, 3, &mut out);
        assert_close("o", &out, &g.f32("o"));
        gate_by_sigmoid(&k, &mut out, &g.f32("gate_logit"));
        assert_close("o_gated", &out, &g.f32("o_gated"));
    }
}

#[test]
fn activations_match() {
    let g = Tensors::golden("situ");
    let acts = [
        (
            "situ_4_25",
            Activation::Situ {
                beta: 4.0,
                linear_beta: Some(25.0),
            },
        ),
        (
            "situ_4_none",
            Activation::Situ {
                beta: 4.0,
                linear_beta: None,
            },
        ),
        ("silu_glu", Activation::Silu),
    ];
    for k in kernels() {
        for (name, act) in acts {
            let mut gate = g.f32("gate");
            activate(&k, act, &mut gate, &g.f32("up"));
            assert_close(name, &gate, &g.f32(name));
        }
    }
}

#[test]
fn the_router_chooses_with_the_bias_and_weighs_without_it() {
    let g = Tensors::golden("router");
    let (logits, bias, ids) = (g.f32("logits"), g.f32("bias"), g.i32("ids"));
    for (name, scale) in [("weights_k3", 1.0), ("weights_scale2446", 2.446)] {
        let spec = RouterSpec {
            score: Score::Sigmoid,
            renormalize: true,
            scale,
            groups: 1,
            topk_groups: 1,
        };
        let want = g.f32(name);
        for (row, logits) in logits.chunks(896).enumerate() {
            let (mut got, mut weights) = ([0; 16], [f32::NAN; 16]);
            top_k(logits, &bias, 16, spec, &mut got, &mut weights);
            assert_eq!(got.map(i32::from), ids[row * 16..][..16], "row {row}");
            assert_close(name, &weights, &want[row * 16..][..16]);
        }
    }
}

#[test]
fn mxfp4_decodes_to_the_bit() {
    let g = Tensors::golden("mxfp4");
    let mut out = vec![f32::NAN; 64 * 64];
    mxfp4::decode(g.bytes("packed"), g.bytes("scale"), 64, &mut out);
    assert_same_bits("decoded", &out, &g.f32("decoded"));
    let matrix = Matrix::mxfp4(g.bytes("packed"), g.bytes("scale"), 64, 64);
    for (row, want) in out.chunks(64).enumerate() {
        let mut got = vec![f32::NAN; 64];
        matrix.read_row(row, &mut got);
        assert_same_bits("row", &got, want);
    }
    let mut out = vec![0.0; 32];
    mxfp4::decode(g.bytes("nan.packed"), g.bytes("nan.scale"), 32, &mut out);
    assert!(
        out.iter().all(|x| x.is_nan()),
        "scale byte 255 is NaN: {out:?}"
    );
}

#[test]
fn every_instruction_set_multiplies_with_the_decoded_weights() {
    let g = Tensors::golden("mxfp4");
    let decoded = g.f32("decoded");
    let matrix = Matrix::mxfp4(g.bytes("packed"), g.bytes("scale"), 64, 64);
    for k in kernels() {
        // One column at a time: each product is a weight as it is.
        let mut x = vec![0.0; 64 * 64];
        (0..64).for_each(|i| x[i * 64 + i] = 1.0);
        let mut y = vec![f32::NAN; 64 * 64];
        k.matmul(matrix, &x, &mut y);
        for (col, y) in y.chunks(64).enumerate() {
            let want: Vec<f32> = decoded.chunks(64).map(|row| row[col] + 0.0).collect();
            assert_same_bits(&format!("column {col} by {:?}", k.isa()), y, &want);
        }
    }
}

#[test]
fn widening_is_exact() {
    assert_eq!(
        bf16::widen(&[0x80, 0x3f, 0x00, 0xc0, 0x01, 0x00]),
        [1.0, -2.0, 2f32.powi(-133)]
    );
    assert_eq!(bf16::read_f32(&1.1f32.to_le_bytes()), [1.1]);
}
