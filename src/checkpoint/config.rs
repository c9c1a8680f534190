//! Reads `config.json`: every key is looked up by name, and every refusal says which key it was.

use serde_json::Map;
use serde_json::Value;

use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::spec::Act;
use crate::checkpoint::spec::Attention;
use crate::checkpoint::spec::Family;
use crate::checkpoint::spec::Ffn;
use crate::checkpoint::spec::KdaSpec;
use crate::checkpoint::spec::LayerKind;
use crate::checkpoint::spec::MXFP4_GROUP;
use crate::checkpoint::spec::MlaSpec;
use crate::checkpoint::spec::MoeSpec;
use crate::checkpoint::spec::Score;
use crate::checkpoint::spec::Spec;
use crate::terms::TokenId;

/// Bounds far above any real model. Below them every product of dimensions fits in 64 bits, so that the rest of the
/// engine can multiply without checking.
const WIDTH_MAX: usize = 1 << 24;
/// Layers are numbered with three digits on disk.
const LAYERS_MAX: usize = 999;
/// Experts are numbered with four digits on disk.
const EXPERTS_MAX: usize = 9_999;
/// Heads times channels.
const HEADS_WIDTH_MAX: usize = 1 << 24;

type Result<T> = std::result::Result<T, CheckpointError>;

impl Spec {
    /// Reads `config.json` of either family.
    ///
    /// # Errors
    ///
    /// Names the key, what was found and what is expected: for JSON that breaks off, a missing key, a value no model
    /// can have, and a model this engine does not compute.
    pub fn from_config(json: &[u8]) -> Result<Spec> {
        let root: Value = serde_json::from_slice(json).map_err(|source| CheckpointError::Json {
            file: "config.json".to_owned(),
            source,
        })?;
        let Some(map) = root.as_object() else {
            return Err(CheckpointError::BadKey {
                key: "(the whole file)".to_owned(),
                found: show(&root),
                expected: "a JSON object".to_owned(),
            });
        };
        let root = Keys {
            path: String::new(),
            map,
        };
        match root.text("model_type")? {
            Some("kimi_k3") => read(Family::K3, &root, &root.object("text_config")?),
            Some("kimi_linear") => read(Family::KimiLinear, &root, &root),
            Some(other) => Err(root.unsupported(
                "model_type",
                format!("`{}`", cut(other)),
                "kimi_k3 and kimi_linear",
            )),
            None => Err(root.missing("model_type", "kimi_k3 or kimi_linear")),
        }
    }
}

fn read(family: Family, root: &Keys<'_>, text: &Keys<'_>) -> Result<Spec> {
    let vocab = text.need_count("vocab_size", WIDTH_MAX)?;
    let hidden = text.need_count("hidden_size", WIDTH_MAX)?;
    let experts_packed = quantization(root, text)?;
    let moe = moe(text, hidden, experts_packed)?;
    let layers = layers(text, moe.is_some())?;
    let dense = layers.iter().any(|kind| kind.ffn == Ffn::Dense);
    let dense_inner = if dense {
        text.need_count("intermediate_size", WIDTH_MAX)?
    } else {
        text.count("intermediate_size", WIDTH_MAX)?.unwrap_or(0)
    };
    Ok(Spec {
        family,
        vocab,
        hidden,
        eps: text.positive("rms_norm_eps")?.unwrap_or(1e-6),
        act: act(text)?,
        dense_inner,
        attn_res_block: text.count("attn_res_block_size", LAYERS_MAX)?,
        kda: kda(&text.object("linear_attn_config")?)?,
        mla: mla(text)?,
        tied: match text.flag("tie_word_embeddings")? {
            Some(tied) => tied,
            None => root.flag("tie_word_embeddings")?.unwrap_or(false),
        },
        bos: token_ids("bos_token_id", root, text, vocab)?
            .first()
            .copied(),
        eos: token_ids("eos_token_id", root, text, vocab)?,
        pad: token_ids("pad_token_id", root, text, vocab)?
            .first()
            .copied(),
        context: context(text)?,
        layers,
        moe,
        experts_packed,
    })
}

fn context(text: &Keys<'_>) -> Result<usize> {
    match text.count("max_position_embeddings", usize::MAX)? {
        Some(context) => Ok(context),
        None => text.count("model_max_length", usize::MAX)?.ok_or_else(|| {
            text.missing("max_position_embeddings", "the longest sequence in tokens")
        }),
    }
}

/// Token ids may be one number, a list or null, and K3 repeats them at the root.
fn token_ids(key: &str, root: &Keys<'_>, text: &Keys<'_>, vocab: usize) -> Result<Vec<TokenId>> {
    let Some((keys, value)) = [text, root]
        .into_iter()
        .find_map(|keys| keys.get(key).map(|value| (keys, value)))
    else {
        return Ok(Vec::new());
    };
    let one = std::slice::from_ref(value);
    let list = value.as_array().map_or(one, Vec::as_slice);
    list.iter()
        .map(|id| {
            id.as_u64()
                .and_then(|id| TokenId::try_from(id).ok())
                .filter(|id| (*id as usize) < vocab)
                .ok_or_else(|| keys.bad(key, format!("token ids below vocab_size = {vocab}")))
        })
        .collect()
}

fn act(text: &Keys<'_>) -> Result<Act> {
    match text.text("hidden_act")? {
        Some("situ") => Ok(Act::Situ {
            beta: text.positive("activation_situ_beta")?.unwrap_or(1.0),
            linear_beta: text.positive("activation_situ_linear_beta")?,
        }),
        Some("silu") | None => Ok(Act::Silu),
        Some(other) => {
            Err(text.unsupported("hidden_act", format!("`{}`", cut(other)), "situ and silu"))
        }
    }
}

/// The schedule: each layer stands in one of two lists, which count from 1.
fn layers(text: &Keys<'_>, moe: bool) -> Result<Vec<LayerKind>> {
    let count = text.need_count("num_hidden_layers", LAYERS_MAX)?;
    let linear = text.object("linear_attn_config")?;
    let mut attention = vec![None; count];
    for (key, kind) in [
        ("kda_layers", Attention::Kda),
        ("full_attn_layers", Attention::Mla),
    ] {
        let wrong = || {
            let expected = format!(
                "layer numbers from 1 to num_hidden_layers = {count}, each once in kda_layers or full_attn_layers"
            );
            linear.bad(key, expected)
        };
        let list = linear.need(key, "a list of layer numbers, counted from 1")?;
        for number in list.as_array().ok_or_else(wrong)? {
            let place = number
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .and_then(|n| n.checked_sub(1))
                .and_then(|n| attention.get_mut(n))
                .ok_or_else(wrong)?;
            if place.replace(kind).is_some() {
                return Err(wrong());
            }
        }
    }
    let dense_below = text.whole("first_k_dense_replace")?.unwrap_or(0);
    let every = text.count("moe_layer_freq", LAYERS_MAX)?.unwrap_or(1);
    attention
        .into_iter()
        .enumerate()
        .map(|(layer, attention)| {
            let attention = attention.ok_or_else(|| {
                let expected = format!("layer {} in kda_layers or full_attn_layers", layer + 1);
                linear.bad("kda_layers", expected)
            })?;
            let routed = moe && layer >= dense_below && layer % every == 0;
            let ffn = if routed { Ffn::Moe } else { Ffn::Dense };
            Ok(LayerKind { attention, ffn })
        })
        .collect()
}

fn kda(linear: &Keys<'_>) -> Result<KdaSpec> {
    let heads = linear.need_count("num_heads", WIDTH_MAX)?;
    let dim = linear.need_count("head_dim", WIDTH_MAX)?;
    linear.width("head_dim", heads, dim)?;
    let floor = linear.real("gate_lower_bound")?;
    if floor.is_some_and(|floor| floor >= 0.0) {
        return Err(linear.bad("gate_lower_bound", "a number below 0".to_owned()));
    }
    let conv = linear.need_count("short_conv_kernel_size", 16)?;
    if conv < 2 {
        return Err(linear.bad("short_conv_kernel_size", "2 taps or more".to_owned()));
    }
    Ok(KdaSpec {
        heads,
        dim,
        conv,
        floor,
        full_rank_gate: linear.flag("use_full_rank_gate")?.unwrap_or(false),
    })
}

fn mla(text: &Keys<'_>) -> Result<MlaSpec> {
    let heads = text.need_count("num_attention_heads", WIDTH_MAX)?;
    let kv_heads = text.count("num_key_value_heads", WIDTH_MAX)?;
    if kv_heads.is_some_and(|kv| kv != heads) {
        let expected =
            format!("num_attention_heads = {heads}: latent attention has no grouped heads");
        return Err(text.bad("num_key_value_heads", expected));
    }
    match text.flag("mla_use_nope")? {
        Some(true) => {}
        Some(false) => {
            let found = "false (rotary positions)".to_owned();
            return Err(text.unsupported(
                "mla_use_nope",
                found,
                "true, attention without positions",
            ));
        }
        None => return Err(text.missing("mla_use_nope", "true: attention without positions")),
    }
    let spec = MlaSpec {
        heads,
        q_rank: text.count("q_lora_rank", WIDTH_MAX)?,
        kv_rank: text.need_count("kv_lora_rank", WIDTH_MAX)?,
        nope: text.need_count("qk_nope_head_dim", WIDTH_MAX)?,
        rope: text.need_count("qk_rope_head_dim", WIDTH_MAX)?,
        vdim: text.need_count("v_head_dim", WIDTH_MAX)?,
        gate: text.flag("mla_use_output_gate")?.unwrap_or(false),
    };
    text.width("qk_nope_head_dim", heads, spec.nope + spec.rope)?;
    text.width("v_head_dim", heads, spec.nope + spec.vdim)?;
    Ok(spec)
}

fn moe(text: &Keys<'_>, hidden: usize, packed: bool) -> Result<Option<MoeSpec>> {
    let Some(experts) = text.count("num_experts", EXPERTS_MAX)? else {
        return Ok(None);
    };
    let top_k = text.need_count("num_experts_per_token", EXPERTS_MAX)?;
    if top_k > experts {
        let expected = format!("at most num_experts = {experts}");
        return Err(text.bad("num_experts_per_token", expected));
    }
    let inner = text.need_count("moe_intermediate_size", WIDTH_MAX)?;
    let latent = text.count("routed_expert_hidden_size", WIDTH_MAX)?;
    if packed {
        let width_key = match latent {
            Some(_) => "routed_expert_hidden_size",
            None => "hidden_size",
        };
        let widths = [
            ("moe_intermediate_size", inner),
            (width_key, latent.unwrap_or(hidden)),
        ];
        for (key, width) in widths {
            if width % MXFP4_GROUP != 0 {
                let expected = format!("a multiple of the quantization group size, {MXFP4_GROUP}");
                return Err(text.bad(key, expected));
            }
        }
    }
    let shared = text.whole("num_shared_experts")?.unwrap_or(0);
    if shared.saturating_mul(inner) > WIDTH_MAX {
        let expected = format!("shared experts of at most {WIDTH_MAX} inner channels together");
        return Err(text.bad("num_shared_experts", expected));
    }
    let score = match text.text("moe_router_activation_func")? {
        Some("sigmoid") | None => Score::Sigmoid,
        Some("softmax") => Score::Softmax,
        Some(other) => {
            let found = format!("`{}`", cut(other));
            return Err(text.unsupported(
                "moe_router_activation_func",
                found,
                "sigmoid and softmax",
            ));
        }
    };
    match text.text("topk_method")? {
        Some("noaux_tc") | None => {}
        Some(other) => {
            return Err(text.unsupported("topk_method", format!("`{}`", cut(other)), "noaux_tc"));
        }
    }
    let (groups, topk_groups) = groups(text, experts, top_k)?;
    Ok(Some(MoeSpec {
        experts,
        top_k,
        shared,
        inner,
        latent,
        latent_norm: latent.is_some() && text.flag("latent_moe_use_norm")?.unwrap_or(false),
        renormalize: text.flag("moe_renormalize")?.unwrap_or(true),
        scale: text.real("routed_scaling_factor")?.unwrap_or(1.0),
        score,
        groups,
        topk_groups,
    }))
}

fn groups(text: &Keys<'_>, experts: usize, top_k: usize) -> Result<(usize, usize)> {
    let groups = text.count("num_expert_group", EXPERTS_MAX)?.unwrap_or(1);
    if !experts.is_multiple_of(groups) {
        let expected = format!("a divisor of num_experts = {experts}");
        return Err(text.bad("num_expert_group", expected));
    }
    if groups > 1 && experts / groups < 2 {
        let expected =
            "groups of two experts or more: a group's score is the sum of its two best".to_owned();
        return Err(text.bad("num_expert_group", expected));
    }
    let kept = text.count("topk_group", EXPERTS_MAX)?.unwrap_or(1);
    if kept > groups || kept * (experts / groups) < top_k {
        let expected = format!(
            "at most num_expert_group = {groups}, and enough groups of {} for {top_k} experts a token",
            experts / groups
        );
        return Err(text.bad("topk_group", expected));
    }
    Ok((groups, kept))
}

/// Whether routed experts are MXFP4. A quantization block that says anything else is refused, key by key.
fn quantization(root: &Keys<'_>, text: &Keys<'_>) -> Result<bool> {
    let Some(keys) = [text, root]
        .into_iter()
        .find(|keys| keys.get("quantization_config").is_some())
    else {
        return Ok(false);
    };
    let block = keys.object("quantization_config")?;
    block.must_be("quant_method", &Value::from("compressed-tensors"), true)?;
    block.must_be("format", &Value::from("mxfp4-pack-quantized"), true)?;
    block.must_be("quantization_status", &Value::from("compressed"), false)?;
    let groups = block.object("config_groups")?;
    if groups.map.is_empty() {
        return Err(groups.missing("group_0", "the MXFP4 weights of the experts"));
    }
    for name in groups.map.keys() {
        let group = groups.object(name)?;
        group.must_be("format", &Value::from("mxfp4-pack-quantized"), false)?;
        group.must_be("input_activations", &Value::Null, false)?;
        group.must_be("output_activations", &Value::Null, false)?;
        let weights = group.object("weights")?;
        weights.must_be("num_bits", &Value::from(4), true)?;
        weights.must_be("type", &Value::from("float"), true)?;
        weights.must_be("group_size", &Value::from(MXFP4_GROUP), true)?;
        weights.must_be("strategy", &Value::from("group"), false)?;
        weights.must_be("symmetric", &Value::from(true), false)?;
        weights.must_be("dynamic", &Value::from(false), false)?;
        weights.must_be("scale_dtype", &Value::from("torch.uint8"), false)?;
    }
    Ok(true)
}

/// One object of the file and the path that leads to it. `null` counts as absent.
struct Keys<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn full(&self, key: &str) -> String {
        if self.path.is_empty() {
            cut(key)
        } else {
            format!("{}.{}", self.path, cut(key))
        }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn missing(&self, key: &str, expected: &'static str) -> CheckpointError {
        CheckpointError::MissingKey {
            key: self.full(key),
            expected,
        }
    }

    fn bad(&self, key: &str, expected: String) -> CheckpointError {
        CheckpointError::BadKey {
            key: self.full(key),
            found: self.map.get(key).map_or("absent".to_owned(), show),
            expected,
        }
    }

    fn unsupported(&self, key: &str, found: String, supported: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            key: self.full(key),
            found,
            supported: supported.to_owned(),
        }
    }

    fn need(&self, key: &str, expected: &'static str) -> Result<&'a Value> {
        self.get(key).ok_or_else(|| self.missing(key, expected))
    }

    fn object(&self, key: &str) -> Result<Keys<'a>> {
        let map = self
            .need(key, "an object")?
            .as_object()
            .ok_or_else(|| self.bad(key, "an object".to_owned()))?;
        Ok(Keys {
            path: self.full(key),
            map,
        })
    }

    /// A whole number, 0 allowed.
    fn whole(&self, key: &str) -> Result<Option<usize>> {
        self.get(key)
            .map(|value| {
                value
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .ok_or_else(|| self.bad(key, "a whole number, 0 or more".to_owned()))
            })
            .transpose()
    }

    /// A whole number from 1 to `max`.
    fn count(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.get(key)
            .map(|value| {
                value
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .filter(|n| (1..=max).contains(n))
                    .ok_or_else(|| {
                        let most = if max == usize::MAX {
                            "more".to_owned()
                        } else {
                            max.to_string()
                        };
                        self.bad(key, format!("a whole number from 1 to {most}"))
                    })
            })
            .transpose()
    }

    fn need_count(&self, key: &str, max: usize) -> Result<usize> {
        self.count(key, max)?
            .ok_or_else(|| self.missing(key, "a whole number above 0"))
    }

    fn real(&self, key: &str) -> Result<Option<f32>> {
        self.get(key)
            .map(|value| {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "settings are written in decimal, used in f32"
                )]
                value
                    .as_f64()
                    .map(|x| x as f32)
                    .filter(|x| x.is_finite())
                    .ok_or_else(|| self.bad(key, "a number".to_owned()))
            })
            .transpose()
    }

    fn positive(&self, key: &str) -> Result<Option<f32>> {
        match self.real(key)? {
            Some(x) if x <= 0.0 => Err(self.bad(key, "a number above 0".to_owned())),
            x => Ok(x),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key)
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| self.bad(key, "true or false".to_owned()))
            })
            .transpose()
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key)
            .map(|value| {
                value
                    .as_str()
                    .ok_or_else(|| self.bad(key, "a string".to_owned()))
            })
            .transpose()
    }

    /// Heads times channels, bounded.
    fn width(&self, key: &str, heads: usize, channels: usize) -> Result<()> {
        if heads.saturating_mul(channels) > HEADS_WIDTH_MAX {
            let expected = format!("at most {HEADS_WIDTH_MAX} channels in all {heads} heads");
            return Err(self.bad(key, expected));
        }
        Ok(())
    }

    /// Holds `key` to the one value this engine computes; absent is fine unless `needed`.
    fn must_be(&self, key: &str, value: &Value, needed: bool) -> Result<()> {
        match self.get(key) {
            Some(found) if found != value => {
                Err(self.unsupported(key, show(found), &value.to_string()))
            }
            None if needed => Err(self.missing(key, "the settings of MXFP4")),
            _ => Ok(()),
        }
    }
}

/// A value as it stands in the file, short enough for a message.
fn show(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        value => cut(&value.to_string()),
    }
}

/// At most 60 characters, so that a hostile file cannot fill the terminal.
pub(crate) fn cut(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '\u{FFFD}' } else { c };
    let mut short: String = text.chars().take(60).map(plain).collect();
    if text.chars().nth(60).is_some() {
        short.push('…');
    }
    short
}
