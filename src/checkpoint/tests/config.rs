use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use super::bytes;
use crate::checkpoint::Act;
use crate::checkpoint::Attention;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::Family;
use crate::checkpoint::Ffn;
use crate::checkpoint::Spec;

fn k3() -> Value {
    serde_json::from_slice(&bytes("tiny-k3", "config.json")).unwrap()
}

fn linear() -> Value {
    serde_json::from_slice(&bytes("tiny-linear", "config.json")).unwrap()
}

fn read(config: &Value) -> Result<Spec, CheckpointError> {
    Spec::from_config(config.to_string().as_bytes())
}

/// Reads the config after setting the value at `pointer`; removes the key if `value` is null.
fn with(mut config: Value, pointer: &str, value: Value) -> Result<Spec, CheckpointError> {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    parent.insert(key.to_owned(), value);
    read(&config)
}

fn message(outcome: Result<Spec, CheckpointError>) -> String {
    outcome.unwrap_err().to_string()
}

#[test]
fn a_nested_k3_config_is_read_whole() {
    let spec = read(&k3()).unwrap();
    assert_eq!(spec.family, Family::K3);
    assert_eq!((spec.vocab, spec.hidden, spec.dense_inner), (512, 128, 192));
    assert_eq!(spec.eps, 1e-5);
    let act = Act::Situ {
        beta: 4.0,
        linear_beta: Some(25.0),
    };
    assert_eq!(spec.act, act);
    assert_eq!(spec.attn_res_block, Some(3));
    let mla: Vec<usize> = (0..8)
        .filter(|l| spec.layers[*l].attention == Attention::Mla)
        .collect();
    assert_eq!(mla, [3, 7], "the lists count from 1");
    assert_eq!(spec.layers[0].ffn, Ffn::Dense);
    assert_eq!(spec.moe_layers().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((spec.kda.heads, spec.kda.dim, spec.kda.conv), (3, 32, 4));
    assert_eq!(
        (spec.kda.floor, spec.kda.full_rank_gate),
        (Some(-5.0), true)
    );
    assert_eq!((spec.mla.q_rank, spec.mla.gate), (Some(48), true));
    let moe = spec.moe.as_ref().unwrap();
    assert_eq!(
        (moe.experts, moe.top_k, moe.shared, moe.inner),
        (16, 4, 2, 96)
    );
    assert_eq!((moe.latent, moe.latent_norm), (Some(64), true));
    assert!(spec.experts_packed && !spec.tied);
    assert_eq!(
        (spec.bos, spec.eos.as_slice(), spec.pad),
        (Some(508), &[510][..], Some(511))
    );
    assert_eq!(spec.context, 4096);
    assert_eq!(spec.expert_keys().count(), 7 * 16);
    assert_eq!(spec.expert_shape().unwrap().bytes(), 3 * (96 * 32 + 96 * 2));
}

#[test]
fn a_flat_kimi_linear_config_is_read_whole() {
    let spec = read(&linear()).unwrap();
    assert_eq!(spec.family, Family::KimiLinear);
    assert_eq!(spec.act, Act::Silu);
    assert_eq!(spec.attn_res_block, None);
    assert_eq!((spec.kda.floor, spec.kda.full_rank_gate), (None, false));
    assert_eq!((spec.mla.q_rank, spec.mla.gate), (None, false));
    let moe = spec.moe.as_ref().unwrap();
    assert_eq!(
        (moe.latent, moe.latent_norm, moe.scale),
        (None, false, 2.446)
    );
    assert!(!spec.experts_packed);
    assert_eq!(
        spec.context, 4096,
        "model_max_length stands in for max_position_embeddings"
    );
    assert_eq!(spec.expert_width(), spec.hidden);
}

#[test]
fn real_k3_has_the_sizes_its_checkpoint_has() {
    let spec = read(&super::size::real_k3()).unwrap();
    assert_eq!(spec.expert_shape().unwrap().bytes(), 17_547_264);
    assert_eq!(spec.expert_keys().count(), 82_432);
    let mla = spec
        .layers
        .iter()
        .filter(|k| k.attention == Attention::Mla)
        .count();
    assert_eq!(mla, 24);
}

#[test]
fn absent_keys_take_the_defaults_of_the_family() {
    for key in [
        "hidden_act",
        "rms_norm_eps",
        "num_shared_experts",
        "moe_renormalize",
        "moe_layer_freq",
    ] {
        assert!(
            with(linear(), &format!("/{key}"), Value::Null).is_ok(),
            "{key}"
        );
    }
    let spec = with(linear(), "/rms_norm_eps", Value::Null).unwrap();
    assert_eq!(spec.eps, 1e-6);
    let dense = with(linear(), "/num_experts", Value::Null).unwrap();
    assert!(dense.moe.is_none() && dense.expert_keys().count() == 0);
    assert!(dense.layers.iter().all(|kind| kind.ffn == Ffn::Dense));
}

#[test]
fn stop_ids_may_be_a_number_a_list_or_nothing() {
    let eos = |value| with(linear(), "/eos_token_id", value).unwrap().eos;
    assert_eq!(eos(json!(7)), [7]);
    assert_eq!(eos(json!([7, 9])), [7, 9]);
    assert_eq!(eos(Value::Null), [] as [u32; 0]);
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let cases = [
        ("/model_type", json!("llama"), "`model_type` is `llama`"),
        (
            "/text_config/hidden_act",
            json!("gelu"),
            "`text_config.hidden_act` is `gelu`",
        ),
        (
            "/text_config/mla_use_nope",
            json!(false),
            "`text_config.mla_use_nope` is false",
        ),
        (
            "/text_config/topk_method",
            json!("greedy"),
            "`text_config.topk_method` is `greedy`",
        ),
        (
            "/text_config/moe_router_activation_func",
            json!("tanh"),
            "moe_router_activation_func` is `tanh`",
        ),
        (
            "/text_config/quantization_config/format",
            json!("pack-quantized"),
            "format` is \"pack-quantized\"",
        ),
        (
            "/text_config/quantization_config/quant_method",
            json!("awq"),
            "quant_method` is \"awq\"",
        ),
        (
            "/text_config/quantization_config/config_groups/group_0/weights/group_size",
            json!(64),
            "weights.group_size` is 64, which this engine cannot run; it runs 32",
        ),
        (
            "/text_config/quantization_config/config_groups/group_0/weights/num_bits",
            json!(8),
            "weights.num_bits` is 8",
        ),
    ];
    for (pointer, value, wanted) in cases {
        let outcome = with(k3(), pointer, value);
        assert!(
            matches!(outcome, Err(CheckpointError::Unsupported { .. })),
            "{pointer}: {outcome:?}"
        );
        let text = message(outcome);
        assert!(
            text.contains(wanted) && text.contains("it runs"),
            "{pointer}: {text}"
        );
    }
}

#[test]
fn missing_keys_are_named_with_their_path() {
    for key in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "mla_use_nope",
        "moe_intermediate_size",
        "num_experts_per_token",
        "max_position_embeddings",
        "linear_attn_config",
    ] {
        let text = message(with(k3(), &format!("/text_config/{key}"), Value::Null));
        assert!(
            text.contains(&format!("`text_config.{key}` is missing; expected")),
            "{key}: {text}"
        );
    }
    let text = message(with(
        k3(),
        "/text_config/linear_attn_config/head_dim",
        Value::Null,
    ));
    assert!(
        text.contains("`text_config.linear_attn_config.head_dim` is missing"),
        "{text}"
    );
    assert!(message(with(k3(), "/text_config", Value::Null)).contains("`text_config` is missing"));
    assert!(message(read(&json!({}))).contains("`model_type` is missing"));
}

#[test]
fn impossible_values_are_refused_with_what_was_found() {
    let cases = [
        (
            "num_attention_heads",
            json!(0),
            "is 0; expected a whole number from 1",
        ),
        ("hidden_size", json!(-4), "is -4"),
        ("hidden_size", json!("big"), "is \"big\""),
        ("hidden_size", json!(1.5), "is 1.5"),
        ("hidden_size", json!(u64::MAX), "is 18446744073709551615"),
        (
            "num_key_value_heads",
            json!(2),
            "is 2; expected num_attention_heads = 4",
        ),
        (
            "num_experts_per_token",
            json!(17),
            "is 17; expected at most num_experts = 16",
        ),
        (
            "num_expert_group",
            json!(3),
            "is 3; expected a divisor of num_experts = 16",
        ),
        (
            "topk_group",
            json!(2),
            "is 2; expected at most num_expert_group = 1",
        ),
        (
            "moe_intermediate_size",
            json!(90),
            "is 90; expected a multiple of the quantization group size, 32",
        ),
        (
            "routed_expert_hidden_size",
            json!(72),
            "is 72; expected a multiple of the quantization group size",
        ),
        ("rms_norm_eps", json!(0), "is 0; expected a number above 0"),
        ("rms_norm_eps", json!([]), "is []; expected a number"),
        (
            "eos_token_id",
            json!(512),
            "is 512; expected token ids below vocab_size = 512",
        ),
        ("activation_situ_beta", json!(-1), "is -1"),
        (
            "tie_word_embeddings",
            json!("no"),
            "is \"no\"; expected true or false",
        ),
    ];
    for (key, value, wanted) in cases {
        let text = message(with(k3(), &format!("/text_config/{key}"), value));
        assert!(
            text.contains(&format!("`text_config.{key}` {wanted}")),
            "{key}: {text}"
        );
    }
    let text = message(with(
        k3(),
        "/text_config/linear_attn_config/gate_lower_bound",
        json!(5),
    ));
    assert!(
        text.contains("`text_config.linear_attn_config.gate_lower_bound` is 5"),
        "{text}"
    );
    let text = message(with(
        k3(),
        "/text_config/linear_attn_config/num_heads",
        json!(0),
    ));
    assert!(text.contains("num_heads` is 0"), "{text}");
}

#[test]
fn every_layer_stands_in_exactly_one_list() {
    let lists = "/text_config/linear_attn_config";
    for (key, list) in [
        ("kda_layers", json!([1, 2, 3, 5, 6])),       // 7 is nowhere
        ("kda_layers", json!([1, 2, 3, 4, 5, 6, 7])), // 4 twice
        ("kda_layers", json!([0, 1, 2, 3, 5, 6, 7])), // counted from 0
        ("kda_layers", json!([1, 2, 3, 5, 6, 7, 9])), // beyond the last
        ("full_attn_layers", json!([4, "8"])),
        ("full_attn_layers", json!(4)),
    ] {
        let text = message(with(k3(), &format!("{lists}/{key}"), list.clone()));
        assert!(text.contains("_layers` is"), "{list}: {text}");
    }
}

#[test]
fn json_that_breaks_off_is_named() {
    let whole = bytes("tiny-k3", "config.json");
    let text = message(Spec::from_config(&whole[..whole.len() / 2]));
    assert!(
        text.contains("config.json cannot be read") && text.contains("line"),
        "{text}"
    );
    assert!(message(Spec::from_config(b"[1]")).contains("(the whole file)"));
    assert!(
        Spec::from_config(&b"[".repeat(100_000)).is_err(),
        "deep nesting is an error, not an overflow"
    );
}

/// Every path to a value of the two real configs.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    if let Some(map) = value.as_object() {
        for (key, value) in map {
            let at = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
            pointers(value, &at, found);
            found.push(at);
        }
    }
}

fn strange() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..200).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop::collection::vec(0u64..12, 0..12).prop_map(Value::from),
        Just(json!({})),
        Just(json!({"a": {}})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_change_of_a_config_panics(family in any::<bool>(), changes in prop::collection::vec((any::<prop::sample::Index>(), strange()), 1..4)) {
        let mut config = if family { k3() } else { linear() };
        for (at, value) in changes {
            let mut all = Vec::new();
            pointers(&config, "", &mut all);
            if let Some(place) = all.get(at.index(all.len().max(1))).and_then(|p| config.pointer_mut(p)) {
                *place = value;
            }
        }
        if let Ok(spec) = read(&config) {
            // What is accepted must also be safe to walk.
            prop_assert!(spec.expert_keys().count() <= 999 * 9_999);
            prop_assert_eq!(spec.moe_layers().count() > 0, spec.layers.iter().any(|k| k.ffn == Ffn::Moe));
            prop_assert!(spec.expert_shape().is_none_or(|s| s.bytes() > 0));
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Spec::from_config(&bytes).is_err());
    }
}
