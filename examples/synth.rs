//! Writes a random checkpoint in K3's format, of any size, so that a machine can be measured
//! without the real weights: `cargo run --release --example synth -- OUT --layers 8 --hidden 3584`.
//!
//! Weights are scaled by fan-in, so activations stay finite and of order one. Routing differs from
//! token to token; `--skew` makes some experts more popular. The same seed gives the same bytes,
//! whatever the number of threads. One shard a layer; memory use is one piece of a tensor.

#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a program for a person at a terminal"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Parser;
use rayon::prelude::*;
use serde_json::{Value, json};

/// Bytes made and written at once.
const PIECE: usize = 32 << 20;
/// Bytes that one thread makes from one seed.
const GRAIN: usize = 1 << 18;
/// Names and settings of the special tokens, from the small trained model.
const TOKENIZER: &str = include_str!("../fixtures/austen-k3/model/tokenizer_config.json");
/// Special tokens end the vocabulary, as in every checkpoint of the family.
const SPECIALS: usize = 256;

/// Shapes. Defaults: a middle size, 4.2 GB.
#[derive(Parser)]
struct Shape {
    /// Folder to write; made if missing.
    out: PathBuf,
    #[arg(long, default_value_t = 8)]
    layers: usize,
    #[arg(long, default_value_t = 3584)]
    hidden: usize,
    /// Leading layers with a dense MLP.
    #[arg(long, default_value_t = 1)]
    dense_layers: usize,
    #[arg(long, default_value_t = 9216)]
    dense_inner: usize,
    /// Every so many layers one is MLA, the others KDA.
    #[arg(long, default_value_t = 4)]
    mla_every: usize,
    #[arg(long, default_value_t = 4)]
    res_block: usize,
    /// Heads of both kinds of attention.
    #[arg(long, default_value_t = 28)]
    heads: usize,
    /// Channels of a KDA head.
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    #[arg(long, default_value_t = 1536)]
    q_rank: usize,
    #[arg(long, default_value_t = 512)]
    kv_rank: usize,
    #[arg(long, default_value_t = 128)]
    nope: usize,
    #[arg(long, default_value_t = 64)]
    rope: usize,
    #[arg(long, default_value_t = 128)]
    vdim: usize,
    /// Width of the routed experts' input.
    #[arg(long, default_value_t = 1792)]
    latent: usize,
    /// Inner width of an expert.
    #[arg(long, default_value_t = 1536)]
    moe_inner: usize,
    #[arg(long, default_value_t = 64)]
    experts: usize,
    #[arg(long, default_value_t = 16)]
    top_k: usize,
    #[arg(long, default_value_t = 2)]
    shared: usize,
    #[arg(long, default_value_t = 32768)]
    vocab: usize,
    /// 0: all experts alike; 0.5: the most popular hold most of the routing.
    #[arg(long, default_value_t = 0.0)]
    skew: f32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What a tensor is filled with.
#[derive(Clone, Copy)]
enum Fill {
    /// Uniform in `lo..hi`.
    Bf16(f32, f32),
    /// Uniform in `lo..hi`.
    F32(f32, f32),
    /// Any byte: two E2M1 codes.
    Codes,
    /// `base - 1 ..= base + 1`.
    Scales(u8),
    /// Router bias: a draw of ±0.05, less the more an expert's rank is to be avoided.
    Bias(f32),
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
    fill: Fill,
}

impl Tensor {
    fn dtype(&self) -> (&'static str, usize) {
        match self.fill {
            Fill::Bf16(..) => ("BF16", 2),
            Fill::F32(..) | Fill::Bias(_) => ("F32", 4),
            Fill::Codes | Fill::Scales(_) => ("U8", 1),
        }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype().1
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `lo..hi`.
    fn between(&mut self, lo: f32, hi: f32) -> f32 {
        lo + (hi - lo) * ((self.next() >> 40) as f32 / (1u64 << 24) as f32)
    }
}

/// Fills one grain; `first` is its first value's index in the tensor.
fn fill(out: &mut [u8], fill: Fill, seed: u64, first: usize, count: usize) {
    let mut random = Random(seed);
    match fill {
        Fill::Bf16(lo, hi) => {
            let step = (hi - lo) / 65536.0;
            for out in out.chunks_mut(8) {
                let draw = random.next();
                for (i, out) in out.chunks_mut(2).enumerate() {
                    let x = lo + step * (f32::from((draw >> (16 * i)) as u16) + 0.5);
                    out.copy_from_slice(&((x.to_bits() + 0x8000) >> 16).to_le_bytes()[..2]);
                }
            }
        }
        Fill::F32(lo, hi) => {
            for out in out.chunks_mut(4) {
                out.copy_from_slice(&random.between(lo, hi).to_le_bytes());
            }
        }
        Fill::Codes => {
            for out in out.chunks_mut(8) {
                out.copy_from_slice(&random.next().to_le_bytes()[..out.len()]);
            }
        }
        Fill::Scales(base) => {
            for out in out {
                *out = base - 1 + (random.next() % 3) as u8;
            }
        }
        Fill::Bias(skew) => {
            for (i, out) in out.chunks_mut(4).enumerate() {
                // Popular experts stand scattered, not first: 7919 is prime.
                let rank = ((first + i) * 7919 % count) as f32 / count as f32;
                let bias = random.between(-0.05, 0.05) - skew * rank.sqrt();
                out.copy_from_slice(&bias.to_le_bytes());
            }
        }
    }
}

struct Writer<'a> {
    out: &'a Path,
    shards: usize,
    written: usize,
    total: u64,
    map: BTreeMap<String, String>,
    seed: Random,
}

impl Writer<'_> {
    fn shard(&mut self, tensors: &[Tensor]) -> io::Result<()> {
        self.written += 1;
        let name = format!(
            "model-{:05}-of-{:06}.safetensors",
            self.written, self.shards
        );
        let (mut head, mut at) = (serde_json::Map::new(), 0);
        for t in tensors {
            let end = at + t.bytes();
            let entry = json!({"dtype": t.dtype().0, "shape": t.shape, "data_offsets": [at, end]});
            head.insert(t.name.clone(), entry);
            self.map.insert(t.name.clone(), name.clone());
            at = end;
        }
        self.total += at as u64;
        let mut head = Value::Object(head).to_string().into_bytes();
        head.resize(head.len().next_multiple_of(8), b' ');
        let mut file = BufWriter::with_capacity(1 << 20, File::create(self.out.join(name))?);
        file.write_all(&(head.len() as u64).to_le_bytes())?;
        file.write_all(&head)?;
        let mut buffer = vec![0; PIECE];
        for t in tensors {
            let (bytes, size, count) = (t.bytes(), t.dtype().1, t.shape[0]);
            let seed = self.seed.next();
            for start in (0..bytes).step_by(PIECE) {
                let piece = &mut buffer[..PIECE.min(bytes - start)];
                piece
                    .par_chunks_mut(GRAIN)
                    .enumerate()
                    .for_each(|(i, out)| {
                        let at = start + i * GRAIN;
                        fill(
                            out,
                            t.fill,
                            seed ^ (at as u64).rotate_left(32),
                            at / size,
                            count,
                        );
                    });
                file.write_all(piece)?;
            }
        }
        file.flush()
    }
}

/// A bf16 matrix whose products have `gain` times the variance of their input.
fn matrix(name: String, rows: usize, cols: usize, gain: f32) -> Tensor {
    let size = gain * (3.0 / cols as f32).sqrt();
    Tensor {
        name,
        shape: vec![rows, cols],
        fill: Fill::Bf16(-size, size),
    }
}

/// A norm's gain.
fn gain(name: String, n: usize) -> Tensor {
    Tensor {
        name,
        shape: vec![n],
        fill: Fill::Bf16(0.8, 1.2),
    }
}

fn floats(name: String, shape: &[usize], lo: f32, hi: f32) -> Tensor {
    Tensor {
        name,
        shape: shape.to_vec(),
        fill: Fill::F32(lo, hi),
    }
}

/// The two tensors of one MXFP4 matrix.
fn packed(name: &str, rows: usize, cols: usize) -> [Tensor; 2] {
    // Uniform codes have a standard deviation of 2.93.
    let base = 127.0 - (2.93 * (cols as f32).sqrt()).log2().round();
    let tensor = |part, width, fill| Tensor {
        name: format!("{name}.{part}"),
        shape: vec![rows, width],
        fill,
    };
    [
        tensor("weight_packed", cols / 2, Fill::Codes),
        tensor("weight_scale", cols / 32, Fill::Scales(base as u8)),
    ]
}

impl Shape {
    fn is_mla(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.mla_every)
    }

    fn layer(&self, layer: usize) -> Vec<Tensor> {
        let m = format!("language_model.model.layers.{layer}.");
        let h = self.hidden;
        let mut all = vec![
            gain(format!("{m}input_layernorm.weight"), h),
            gain(format!("{m}post_attention_layernorm.weight"), h),
        ];
        for part in ["self_attention_res", "mlp_res"] {
            all.push(gain(format!("{m}{part}_norm.weight"), h));
            all.push(matrix(format!("{m}{part}_proj.weight"), 1, h, 1.0));
        }
        let attention = format!("{m}self_attn.");
        if self.is_mla(layer) {
            self.mla(&attention, &mut all);
        } else {
            self.kda(&attention, &mut all);
        }
        if layer < self.dense_layers {
            self.mlp(&format!("{m}mlp."), self.dense_inner, &mut all);
        } else {
            self.moe(&format!("{m}block_sparse_moe."), &mut all);
        }
        all
    }

    fn kda(&self, s: &str, all: &mut Vec<Tensor>) {
        let (h, d) = (self.hidden, self.heads * self.head_dim);
        for part in ["q", "k", "v"] {
            all.push(matrix(format!("{s}{part}_proj.weight"), d, h, 1.0));
            all.push(floats(
                format!("{s}{part}_conv1d.weight"),
                &[d, 1, 4],
                -0.5,
                0.8,
            ));
        }
        all.extend([
            matrix(format!("{s}f_a_proj.weight"), self.head_dim, h, 1.0),
            matrix(format!("{s}f_b_proj.weight"), d, self.head_dim, 1.0),
            matrix(format!("{s}b_proj.weight"), self.heads, h, 1.0),
            matrix(format!("{s}g_proj.weight"), d, h, 1.0),
            floats(
                format!("{s}A_log"),
                &[self.head_dim.max(self.heads)],
                -1.0,
                1.0,
            ),
            floats(format!("{s}dt_bias"), &[d], -4.0, 0.0),
            floats(format!("{s}o_norm.weight"), &[self.head_dim], 0.8, 1.2),
            matrix(format!("{s}o_proj.weight"), h, d, 2.0),
        ]);
    }

    fn mla(&self, s: &str, all: &mut Vec<Tensor>) {
        let (h, heads) = (self.hidden, self.heads);
        all.extend([
            matrix(format!("{s}q_a_proj.weight"), self.q_rank, h, 1.0),
            gain(format!("{s}q_a_layernorm.weight"), self.q_rank),
            matrix(
                format!("{s}q_b_proj.weight"),
                heads * (self.nope + self.rope),
                self.q_rank,
                1.0,
            ),
            matrix(
                format!("{s}kv_a_proj_with_mqa.weight"),
                self.kv_rank + self.rope,
                h,
                1.0,
            ),
            gain(format!("{s}kv_a_layernorm.weight"), self.kv_rank),
            matrix(
                format!("{s}kv_b_proj.weight"),
                heads * (self.nope + self.vdim),
                self.kv_rank,
                1.0,
            ),
            matrix(format!("{s}g_proj.weight"), heads * self.vdim, h, 1.0),
            matrix(format!("{s}o_proj.weight"), h, heads * self.vdim, 2.0),
        ]);
    }

    fn mlp(&self, s: &str, inner: usize, all: &mut Vec<Tensor>) {
        all.push(matrix(
            format!("{s}gate_proj.weight"),
            inner,
            self.hidden,
            1.0,
        ));
        all.push(matrix(
            format!("{s}up_proj.weight"),
            inner,
            self.hidden,
            1.0,
        ));
        all.push(matrix(
            format!("{s}down_proj.weight"),
            self.hidden,
            inner,
            1.0,
        ));
    }

    fn moe(&self, b: &str, all: &mut Vec<Tensor>) {
        let (h, latent) = (self.hidden, self.latent);
        all.push(matrix(format!("{b}gate.weight"), self.experts, h, 1.0));
        all.push(Tensor {
            name: format!("{b}gate.e_score_correction_bias"),
            shape: vec![self.experts],
            fill: Fill::Bias(self.skew),
        });
        all.push(matrix(
            format!("{b}routed_expert_down_proj.weight"),
            latent,
            h,
            1.0,
        ));
        all.push(gain(format!("{b}routed_expert_norm.weight"), latent));
        all.push(matrix(
            format!("{b}routed_expert_up_proj.weight"),
            h,
            latent,
            1.0,
        ));
        self.mlp(
            &format!("{b}shared_experts."),
            self.moe_inner * self.shared,
            all,
        );
        for e in 0..self.experts {
            // In this order an expert is one range of its shard.
            for (part, rows, cols) in [
                ("w1", self.moe_inner, latent),
                ("w2", latent, self.moe_inner),
                ("w3", self.moe_inner, latent),
            ] {
                all.extend(packed(&format!("{b}experts.{e}.{part}"), rows, cols));
            }
        }
    }

    fn top(&self) -> Vec<Tensor> {
        let (h, t) = (self.hidden, "language_model.");
        vec![
            matrix(
                format!("{t}model.embed_tokens.weight"),
                self.vocab,
                h,
                (h as f32).sqrt(),
            ),
            gain(format!("{t}model.norm.weight"), h),
            gain(format!("{t}model.output_attn_res_norm.weight"), h),
            matrix(format!("{t}model.output_attn_res_proj.weight"), 1, h, 1.0),
            matrix(format!("{t}lm_head.weight"), self.vocab, h, 2.0),
        ]
    }

    fn text_config(&self) -> Value {
        let numbers = |mla: bool| -> Vec<usize> {
            (0..self.layers)
                .filter(|&l| self.is_mla(l) == mla)
                .map(|l| l + 1)
                .collect()
        };
        let mut config = json!({
            "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"],
            "dtype": "bfloat16", "vocab_size": self.vocab, "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "intermediate_size": self.dense_inner,
            "hidden_act": "situ", "rms_norm_eps": 1e-5, "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "attn_res_block_size": self.res_block,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank, "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope, "qk_rope_head_dim": self.rope,
            "v_head_dim": self.vdim, "mla_use_nope": true, "mla_use_output_gate": true,
            "linear_attn_config": {
                "full_attn_layers": numbers(true), "kda_layers": numbers(false),
                "num_heads": self.heads, "head_dim": self.head_dim, "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0, "use_full_rank_gate": true,
            },
        });
        let moe = json!({
            "num_experts": self.experts, "num_experts_per_token": self.top_k,
            "num_shared_experts": self.shared, "moe_intermediate_size": self.moe_inner,
            "routed_expert_hidden_size": self.latent, "latent_moe_use_norm": true,
            "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0, "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1, "num_expert_group": 1, "topk_group": 1,
            "use_grouped_topk": true, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
            "max_position_embeddings": 131_072, "tie_word_embeddings": false, "use_cache": true,
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": {
                    "format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {
                        "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group",
                        "symmetric": true, "dynamic": false, "scale_dtype": "torch.uint8",
                    }}},
                "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*",
                    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
            },
        });
        merge(&mut config, moe);
        config
    }

    /// config.json, generation_config.json and the tokenizer: bytes, then made-up pairs and triples.
    fn write_small_files(&self) -> io::Result<()> {
        let first = self.vocab - SPECIALS;
        let ids = json!({
            "bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": self.vocab - 1,
        });
        let mut text = self.text_config();
        merge(&mut text, ids.clone());
        let mut config = json!({
            "model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
            "dtype": "bfloat16", "media_placeholder_token_id": first + 21,
            "tie_word_embeddings": false, "text_config": text,
        });
        merge(&mut config, ids);
        let write = |name: &str, text: String| std::fs::write(self.out.join(name), text);
        write("config.json", format!("{config:#}"))?;
        let generation = json!({"max_length": 131_072, "eos_token_id": first + 2});
        write("generation_config.json", format!("{generation:#}"))?;
        let mut tokenizer: Value = serde_json::from_str(TOKENIZER)?;
        let named = tokenizer["added_tokens_decoder"].take();
        let base = 2048; // where the small model's special tokens begin
        let moved = named.as_object().into_iter().flatten().map(|(id, token)| {
            let id: usize = id.parse().unwrap_or(base);
            ((id - base + first).to_string(), token.clone())
        });
        tokenizer["added_tokens_decoder"] = Value::Object(moved.collect());
        write("tokenizer_config.json", format!("{tokenizer:#}"))?;
        let tokens: String = (0..first)
            .map(|i| format!("{} {i}\n", base64(&token(i))))
            .collect();
        write("tiktoken.model", tokens)
    }
}

/// Token `i`: a byte, two bytes or three.
fn token(i: usize) -> Vec<u8> {
    match i {
        0..256 => vec![i as u8],
        256..65792 => vec![((i - 256) >> 8) as u8, (i - 256) as u8],
        _ => vec![
            ((i - 65792) >> 16) as u8,
            ((i - 65792) >> 8) as u8,
            (i - 65792) as u8,
        ],
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let part = |chunk: &[u8]| -> String {
        let word = chunk
            .iter()
            .chain(&[0; 3])
            .take(3)
            .fold(0, |w, &b| w << 8 | usize::from(b));
        let digit = |i: usize| char::from(DIGITS[word >> (18 - 6 * i) & 63]);
        (0..4)
            .map(|i| if i <= chunk.len() { digit(i) } else { '=' })
            .collect()
    };
    bytes.chunks(3).map(part).collect()
}

fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

fn main() -> io::Result<()> {
    let shape = Shape::parse();
    let whole_blocks = shape.latent.is_multiple_of(32) && shape.moe_inner.is_multiple_of(32);
    if !whole_blocks || shape.vocab < 2 * SPECIALS || shape.top_k > shape.experts {
        println!(
            "latent and moe-inner must be multiples of 32, vocab at least {}, top-k at most experts",
            2 * SPECIALS
        );
        std::process::exit(2);
    }
    let start = std::time::Instant::now();
    std::fs::create_dir_all(&shape.out)?;
    let mut writer = Writer {
        out: &shape.out,
        shards: shape.layers + 1,
        written: 0,
        total: 0,
        map: BTreeMap::new(),
        seed: Random(shape.seed),
    };
    for layer in 0..shape.layers {
        writer.shard(&shape.layer(layer))?;
    }
    writer.shard(&shape.top())?;
    let index = json!({"metadata": {"total_size": writer.total}, "weight_map": writer.map});
    std::fs::write(
        shape.out.join("model.safetensors.index.json"),
        format!("{index:#}"),
    )?;
    shape.write_small_files()?;
    let (size, seconds) = (writer.total as f64 / 1e9, start.elapsed().as_secs_f64());
    println!("{}: {size:.2} GB in {seconds:.1} s", shape.out.display());
    Ok(())
}
