use std::path::PathBuf;

use crate::checkpoint::Attention;
use crate::checkpoint::ExpertShape;
use crate::checkpoint::Ffn;
use crate::checkpoint::LayerKind;
use crate::checkpoint::Spec;
use crate::kernel::mla::BLOCK;
use crate::model::Sequence;
use crate::model::sequence::LayerState;
use crate::model::weights::ExpertWeights;

fn tiny() -> Spec {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let config = std::fs::read(root.join("fixtures/tiny-k3/config.json"));
    Spec::from_config(&config.unwrap()).unwrap()
}

/// The sizes of real K3 that a sequence's state depends on.
fn real_k3() -> Spec {
    let mut spec = tiny();
    (spec.kda.heads, spec.kda.dim) = (96, 128);
    (spec.mla.kv_rank, spec.mla.rope) = (512, 64);
    let attention = |layer| match layer % 4 == 3 || layer == 92 {
        true => Attention::Mla,
        false => Attention::Kda,
    };
    let ffn = Ffn::Moe;
    spec.layers = (0..93)
        .map(|layer| LayerKind {
            attention: attention(layer),
            ffn,
        })
        .collect();
    spec
}

#[test]
fn a_long_context_of_real_k3_fits_into_8_gb() {
    let spec = real_k3();
    assert_eq!(Sequence::bytes(&spec, 0), 464_633_856);
    assert_eq!(
        Sequence::bytes(&spec, BLOCK) - Sequence::bytes(&spec, 0),
        24 * 2304 * BLOCK as u64
    );
    assert!(Sequence::bytes(&spec, 128 * 1024) < 8_000_000_000);
}

#[test]
fn a_sequence_takes_the_memory_it_says() {
    let spec = tiny();
    for len in [0, 1, BLOCK, BLOCK + 1, 1000] {
        let sequence = Sequence::with_len(&spec, len);
        let held: usize = sequence
            .layers
            .iter()
            .map(|layer| match layer {
                LayerState::Kda(kda) => {
                    kda.state.len() + kda.history.iter().map(Vec::len).sum::<usize>()
                }
                LayerState::Mla(latents) => latents.values(),
            })
            .sum();
        assert_eq!(4 * held as u64, Sequence::bytes(&spec, len), "{len} tokens");
        // Slices hold what the tokens fill, no more.
        let width = spec.mla.kv_rank + spec.mla.rope;
        let latents: usize = sequence
            .slices()
            .filter(|s| s.name == "latent")
            .map(|s| s.values.len())
            .sum();
        assert_eq!(latents, 2 * len * width);
    }
}

#[test]
fn a_cache_that_grows_moves_nothing() {
    let mut sequence = Sequence::with_len(&tiny(), 1);
    let Some(LayerState::Mla(latents)) = sequence.layers.get_mut(3) else {
        panic!("layer 3 is MLA");
    };
    let first = latents.at(0).as_ptr();
    for len in 1..20 * BLOCK {
        latents.reach(len);
    }
    assert_eq!(latents.at(0).as_ptr(), first);
    assert_eq!(latents.values() % BLOCK, 0);
}

#[test]
fn an_experts_bytes_are_gate_then_down_then_up() {
    let (inner, width) = (32, 64);
    for packed in [true, false] {
        let shape = ExpertShape {
            inner,
            width,
            packed,
        };
        // Each of the three matrices is filled with its own value, in codes and scales.
        let third = shape.bytes() / 3;
        let mut bytes = vec![0; shape.bytes()];
        for (i, part) in bytes.chunks_mut(third).enumerate() {
            let value = (i + 1) as u8;
            if packed {
                let codes = inner * width / 2;
                part[..codes].fill(0x22); // 1.0
                part[codes..].fill(127 + value);
            } else {
                let low = [0x40, 0x80, 0xC0][i]; // of 3.0, 4.0 and 6.0, which all begin with 0x40
                part.chunks_mut(2)
                    .for_each(|pair| pair.copy_from_slice(&[low, 0x40]));
            }
        }
        let expert = ExpertWeights::view(&bytes, shape);
        assert_eq!((expert.gate.rows(), expert.gate.cols()), (inner, width));
        assert_eq!((expert.down.rows(), expert.down.cols()), (width, inner));
        let first = |matrix: crate::kernel::Matrix<'_>| {
            let mut row = vec![0.0; matrix.cols()];
            matrix.read_row(matrix.rows() - 1, &mut row);
            row[0]
        };
        let found = [expert.gate, expert.down, expert.up].map(first);
        let wanted = if packed {
            [2.0, 4.0, 8.0]
        } else {
            [3.0, 4.0, 6.0]
        };
        assert_eq!(found, wanted, "packed: {packed}");
    }
}
