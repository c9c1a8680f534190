//! Every tensor the text model reads, by name: what a [`Spec`] implies about a checkpoint.

use crate::checkpoint::header::Dtype;
use crate::checkpoint::header::TensorEntry;
use crate::checkpoint::spec::Attention;
use crate::checkpoint::spec::ExpertShape;
use crate::checkpoint::spec::Ffn;
use crate::checkpoint::spec::MXFP4_GROUP;
use crate::checkpoint::spec::Spec;

/// Which shapes a tensor may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Exactly this.
    Exact(Vec<u64>),
    /// Taps of a depthwise convolution: `[channels, 1, taps]`, or without the middle axis.
    Taps { channels: u64, taps: u64 },
    /// One number a head: `[heads]`, the same among axes of length 1, or one axis padded beyond `heads`.
    PerHead(u64),
}

impl Wanted {
    pub(crate) fn fits(&self, shape: &[u64]) -> bool {
        match self {
            Wanted::Exact(wanted) => shape == wanted.as_slice(),
            Wanted::Taps { channels, taps } => {
                shape == [*channels, 1, *taps] || shape == [*channels, *taps]
            }
            Wanted::PerHead(heads) => match shape {
                [entries] => entries >= heads,
                shape => {
                    shape.contains(heads)
                        && shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)) == Some(*heads)
                }
            },
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Wanted::Exact(shape) => format!("{shape:?}"),
            Wanted::Taps { channels, taps } => format!("[{channels}, 1, {taps}]"),
            Wanted::PerHead(heads) => format!("[{heads}], or padded beyond"),
        }
    }
}

/// Whether a core tensor's type is one that is widened to f32 when it is used. What K3 ships in BF16 or F32 other
/// members of the family may ship in the other; nothing is lost either way.
pub(crate) fn widens(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F32)
}

/// Type and shape of an entry, for messages.
pub(crate) fn describe(entry: &TensorEntry) -> String {
    let shown = &entry.shape[..entry.shape.len().min(8)];
    format!("{} {shown:?}", entry.dtype.name())
}

/// A core tensor: its name within its part, and its shape.
pub(crate) type CoreTensor = (String, Wanted);

/// The tensors of one layer but its routed experts; names without `model.layers.N.`.
pub(crate) fn layer(spec: &Spec, layer: usize) -> Vec<CoreTensor> {
    let kind = spec.layers[layer];
    let hidden = spec.hidden;
    let mut list = List::default();
    list.vector("input_layernorm.weight", hidden);
    list.vector("post_attention_layernorm.weight", hidden);
    if spec.attn_res_block.is_some() {
        list.vector("self_attention_res_norm.weight", hidden);
        list.matrix("self_attention_res_proj.weight", 1, hidden);
        list.vector("mlp_res_norm.weight", hidden);
        list.matrix("mlp_res_proj.weight", 1, hidden);
    }
    match kind.attention {
        Attention::Kda => list.kda(spec),
        Attention::Mla => list.mla(spec),
    }
    match kind.ffn {
        Ffn::Dense => list.mlp("mlp", hidden, spec.dense_inner),
        Ffn::Moe => list.moe(spec),
    }
    list.0
}

/// The tensors outside the layers.
pub(crate) fn top(spec: &Spec) -> Vec<CoreTensor> {
    let mut list = List::default();
    list.matrix("model.embed_tokens.weight", spec.vocab, spec.hidden);
    if !spec.tied {
        list.matrix("lm_head.weight", spec.vocab, spec.hidden);
    }
    list.vector("model.norm.weight", spec.hidden);
    if spec.attn_res_block.is_some() {
        list.vector("model.output_attn_res_norm.weight", spec.hidden);
        list.matrix("model.output_attn_res_proj.weight", 1, spec.hidden);
    }
    list.0
}

/// The tensors of one expert in the order in which they are stored and computed: what follows `experts.N.`, the type
/// and the shape.
pub(crate) fn expert(shape: ExpertShape) -> Vec<(&'static str, Dtype, [u64; 2])> {
    let (inner, width) = (shape.inner as u64, shape.width as u64);
    let group = MXFP4_GROUP as u64;
    if shape.packed {
        vec![
            ("w1.weight_packed", Dtype::U8, [inner, width / 2]),
            ("w1.weight_scale", Dtype::U8, [inner, width / group]),
            ("w2.weight_packed", Dtype::U8, [width, inner / 2]),
            ("w2.weight_scale", Dtype::U8, [width, inner / group]),
            ("w3.weight_packed", Dtype::U8, [inner, width / 2]),
            ("w3.weight_scale", Dtype::U8, [inner, width / group]),
        ]
    } else {
        vec![
            ("w1.weight", Dtype::BF16, [inner, width]),
            ("w2.weight", Dtype::BF16, [width, inner]),
            ("w3.weight", Dtype::BF16, [inner, width]),
        ]
    }
}

#[derive(Default)]
struct List(Vec<CoreTensor>);

impl List {
    fn vector(&mut self, name: &str, len: usize) {
        self.0
            .push((name.to_owned(), Wanted::Exact(vec![len as u64])));
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) {
        let shape = vec![rows as u64, cols as u64];
        self.0.push((name.to_owned(), Wanted::Exact(shape)));
    }

    fn mlp(&mut self, stem: &str, hidden: usize, inner: usize) {
        self.matrix(&format!("{stem}.gate_proj.weight"), inner, hidden);
        self.matrix(&format!("{stem}.up_proj.weight"), inner, hidden);
        self.matrix(&format!("{stem}.down_proj.weight"), hidden, inner);
    }

    fn kda(&mut self, spec: &Spec) {
        let (hidden, kda) = (spec.hidden, &spec.kda);
        let width = kda.width();
        for x in ["q", "k", "v"] {
            self.matrix(&format!("self_attn.{x}_proj.weight"), width, hidden);
            let taps = Wanted::Taps {
                channels: width as u64,
                taps: kda.conv as u64,
            };
            self.0.push((format!("self_attn.{x}_conv1d.weight"), taps));
        }
        self.matrix("self_attn.f_a_proj.weight", kda.dim, hidden);
        self.matrix("self_attn.f_b_proj.weight", width, kda.dim);
        self.matrix("self_attn.b_proj.weight", kda.heads, hidden);
        self.vector("self_attn.dt_bias", width);
        let per_head = Wanted::PerHead(kda.heads as u64);
        self.0.push(("self_attn.A_log".to_owned(), per_head));
        self.vector("self_attn.o_norm.weight", kda.dim);
        if kda.full_rank_gate {
            self.matrix("self_attn.g_proj.weight", width, hidden);
        } else {
            self.matrix("self_attn.g_a_proj.weight", kda.dim, hidden);
            self.matrix("self_attn.g_b_proj.weight", width, kda.dim);
        }
        self.matrix("self_attn.o_proj.weight", hidden, width);
    }

    fn mla(&mut self, spec: &Spec) {
        let (hidden, mla) = (spec.hidden, &spec.mla);
        let (queries, values) = (mla.heads * (mla.nope + mla.rope), mla.heads * mla.vdim);
        match mla.q_rank {
            Some(rank) => {
                self.matrix("self_attn.q_a_proj.weight", rank, hidden);
                self.vector("self_attn.q_a_layernorm.weight", rank);
                self.matrix("self_attn.q_b_proj.weight", queries, rank);
            }
            None => self.matrix("self_attn.q_proj.weight", queries, hidden),
        }
        let kv_a = mla.kv_rank + mla.rope;
        self.matrix("self_attn.kv_a_proj_with_mqa.weight", kv_a, hidden);
        self.vector("self_attn.kv_a_layernorm.weight", mla.kv_rank);
        let kv_b = mla.heads * (mla.nope + mla.vdim);
        self.matrix("self_attn.kv_b_proj.weight", kv_b, mla.kv_rank);
        if mla.gate {
            self.matrix("self_attn.g_proj.weight", values, hidden);
        }
        self.matrix("self_attn.o_proj.weight", hidden, values);
    }

    fn moe(&mut self, spec: &Spec) {
        let Some(moe) = &spec.moe else { return };
        let hidden = spec.hidden;
        self.matrix("block_sparse_moe.gate.weight", moe.experts, hidden);
        let bias = "block_sparse_moe.gate.e_score_correction_bias";
        self.vector(bias, moe.experts);
        if let Some(latent) = moe.latent {
            let stem = "block_sparse_moe.routed_expert";
            self.matrix(&format!("{stem}_down_proj.weight"), latent, hidden);
            if moe.latent_norm {
                self.vector(&format!("{stem}_norm.weight"), latent);
            }
            self.matrix(&format!("{stem}_up_proj.weight"), hidden, latent);
        }
        if moe.shared > 0 {
            let inner = moe.shared * moe.inner;
            self.mlp("block_sparse_moe.shared_experts", hidden, inner);
        }
    }
}
