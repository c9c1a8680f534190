use std::time::Duration;
use std::time::Instant;

use serde_json::Value;
use serde_json::json;

use super::bytes;
use super::front;
use crate::checkpoint::Dtype;
use crate::checkpoint::Header;
use crate::checkpoint::Index;
use crate::checkpoint::Layout;
use crate::checkpoint::Spec;
use crate::checkpoint::catalogue;
use crate::terms::ExpertKey;

/// config.json of real Kimi K3, as far as the text model reads it.
pub(super) fn real_k3() -> Value {
    let mut config: Value = serde_json::from_slice(&bytes("tiny-k3", "config.json")).unwrap();
    let mla: Vec<u64> = (1..=93).filter(|n| n % 4 == 0 || *n == 93).collect();
    let kda: Vec<u64> = (1..=93).filter(|n| !mla.contains(n)).collect();
    let text = &mut config["text_config"];
    for (key, value) in [
        ("vocab_size", 163_840),
        ("hidden_size", 7168),
        ("num_hidden_layers", 93),
        ("intermediate_size", 33_792),
        ("attn_res_block_size", 12),
        ("num_attention_heads", 96),
        ("num_key_value_heads", 96),
        ("q_lora_rank", 1536),
        ("kv_lora_rank", 512),
        ("qk_nope_head_dim", 128),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 128),
        ("num_experts", 896),
        ("num_experts_per_token", 16),
        ("moe_intermediate_size", 3072),
        ("routed_expert_hidden_size", 3584),
        ("max_position_embeddings", 1_048_576),
    ] {
        text[key] = value.into();
    }
    text["linear_attn_config"] = json!({"full_attn_layers": mla, "kda_layers": kda, "num_heads": 96,
        "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": true});
    config
}

/// The shards of a checkpoint of real K3's shape, experts sorted as text: file name, header with its length, file size.
fn synthetic(spec: &Spec) -> (String, Vec<(String, Vec<u8>, u64)>) {
    let layers = spec.layers.len();
    let mut shards = Vec::new();
    let mut names = Vec::new();
    for part in 0..=layers {
        let shard = format!("model-{:05}-of-{:06}.safetensors", part + 1, layers + 1);
        let (stem, core) = if part < layers {
            (
                format!("language_model.model.layers.{part}."),
                catalogue::layer(spec, part),
            )
        } else {
            ("language_model.".to_owned(), catalogue::top(spec))
        };
        let mut tensors: Vec<(String, Dtype, Vec<u64>)> = Vec::new();
        for (name, wanted) in core {
            let shape = match wanted {
                catalogue::Wanted::Exact(shape) => shape,
                catalogue::Wanted::Taps { channels, taps } => vec![channels, 1, taps],
                catalogue::Wanted::PerHead(_) => vec![128],
            };
            tensors.push((format!("{stem}{name}"), Dtype::BF16, shape));
        }
        if spec.moe_layers().any(|layer| layer as usize == part) {
            let mut numbers: Vec<String> = (0..spec.moe.as_ref().unwrap().experts)
                .map(|e| e.to_string())
                .collect();
            numbers.sort();
            for (e, (name, dtype, shape)) in numbers.iter().flat_map(|e| {
                catalogue::expert(spec.expert_shape().unwrap())
                    .into_iter()
                    .map(move |t| (e, t))
            }) {
                tensors.push((
                    format!("{stem}block_sparse_moe.experts.{e}.{name}"),
                    dtype,
                    shape.to_vec(),
                ));
            }
        }
        names.extend(tensors.iter().map(|t| format!("\"{}\":\"{shard}\"", t.0)));
        let mut end = 0;
        let rows: Vec<String> = tensors
            .iter()
            .map(|(name, dtype, shape)| {
                let begin = end;
                end += dtype.bytes(shape).unwrap();
                format!(
                    r#""{name}":{{"dtype":"{}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#,
                    dtype.name()
                )
            })
            .collect();
        let front = front(&format!("{{{}}}", rows.join(",")));
        let size = front.len() as u64 + end;
        shards.push((shard, front, size));
    }
    (
        format!(r#"{{"weight_map":{{{}}}}}"#, names.join(",")),
        shards,
    )
}

/// The whole description of a checkpoint of real K3's shape with `layers` layers, read and laid out.
fn read_synthetic(layers: usize) -> (Layout, Duration) {
    let mut spec = Spec::from_config(real_k3().to_string().as_bytes()).unwrap();
    spec.layers.truncate(layers);
    let (index, shards) = synthetic(&spec);
    let began = Instant::now();
    let index = Index::parse(index.as_bytes()).unwrap();
    let read = |(name, front, size): &(String, Vec<u8>, u64)| {
        (name.clone(), Header::read(name, front, *size).unwrap())
    };
    let headers = shards.iter().map(read).collect();
    let layout = Layout::new(&spec, &index, &headers).unwrap();
    (layout, began.elapsed())
}

#[test]
fn a_checkpoint_of_k3_shape_is_laid_out_with_one_part_an_expert() {
    let (layout, _) = read_synthetic(6);
    assert_eq!(layout.expert_count(), 5 * 896);
    assert_eq!(layout.expert_len(), 17_547_264);
    // Sorted as text, expert 10 follows expert 1.
    let at = |expert| layout.expert(ExpertKey { layer: 2, expert })[0].range;
    assert_eq!(at(1).end, at(10).start);
    for key in (0..896).map(|expert| ExpertKey { layer: 5, expert }) {
        assert_eq!(layout.expert(key).len(), 1);
    }
}

#[test]
#[ignore = "takes half a minute unoptimised: cargo test --release --lib checkpoint -- --ignored"]
fn the_whole_of_k3_is_laid_out_in_about_a_second() {
    let (layout, took) = read_synthetic(93);
    assert_eq!(layout.expert_count(), 82_432);
    let pieces = layout.core().iter().flat_map(|core| &core.pieces);
    let core: u64 = pieces.map(|piece| piece.source.range.len()).sum();
    // As published, less the 2 bytes by which each F32 value is a BF16 one here.
    assert_eq!(core, 113_509_540_864 - 44_489_728 / 2);
    assert!(took < Duration::from_secs(10), "{took:?}");
}
