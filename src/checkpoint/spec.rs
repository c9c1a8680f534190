//! What a model is: every number of `config.json` that changes what is computed.

use crate::terms::ExpertKey;
use crate::terms::TokenId;

/// Values in one MXFP4 group: they share a scale.
pub(crate) const MXFP4_GROUP: usize = 32;

/// Which member of the family a checkpoint is; decided by the root `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `kimi_k3`: settings nested in `text_config`, tensors under `language_model.`.
    K3,
    /// `kimi_linear`: settings at the root, tensors without prefix.
    KimiLinear,
}

impl Family {
    /// The root `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            Family::K3 => "kimi_k3",
            Family::KimiLinear => "kimi_linear",
        }
    }

    /// What the names of the text model's tensors begin with.
    pub fn prefix(self) -> &'static str {
        match self {
            Family::K3 => "language_model.",
            Family::KimiLinear => "",
        }
    }
}

/// How a layer looks back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Kimi Delta Attention: a recurrent state of fixed size.
    Kda,
    /// Multi-head latent attention: a cache that grows with the sequence.
    Mla,
}

/// What follows attention in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ffn {
    /// One gated MLP.
    Dense,
    /// Routed and shared experts.
    Moe,
}

/// The two halves of one transformer layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// First half.
    pub attention: Attention,
    /// Second half.
    pub ffn: Ffn,
}

/// How the two branches of every gated MLP meet (`hidden_act`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// `beta * tanh(a / beta) * sigmoid(a) * cap(u)`, `cap(u) = linear_beta * tanh(u / linear_beta)`.
    Situ {
        /// `activation_situ_beta`.
        beta: f32,
        /// `activation_situ_linear_beta`; `None` leaves the up branch alone.
        linear_beta: Option<f32>,
    },
    /// `silu(a) * u`.
    Silu,
}

/// Kimi Delta Attention (`linear_attn_config`).
#[derive(Clone, Debug, PartialEq)]
pub struct KdaSpec {
    /// Heads.
    pub heads: usize,
    /// Key and value channels a head.
    pub dim: usize,
    /// Taps of the short convolution; the last one multiplies the current input.
    pub conv: usize,
    /// `gate_lower_bound`: the decay's logarithm is `floor * sigmoid(..)`; `None` is the softplus gate.
    pub floor: Option<f32>,
    /// The output gate is one full matrix (`g_proj`), not a low-rank pair (`g_b_proj · g_a_proj`).
    pub full_rank_gate: bool,
}

impl KdaSpec {
    /// Channels of all heads.
    pub fn width(&self) -> usize {
        self.heads * self.dim
    }
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaSpec {
    /// Heads.
    pub heads: usize,
    /// Rank of the query projection; `None` is one full matrix.
    pub q_rank: Option<usize>,
    /// Width of the cached latent.
    pub kv_rank: usize,
    /// Channels of query and key that come from the latent.
    pub nope: usize,
    /// Channels of query and key that all heads share. (Never rotated: the family encodes no positions.)
    pub rope: usize,
    /// Channels of a value.
    pub vdim: usize,
    /// Heads are multiplied by `sigmoid(g_proj x)` before the output projection.
    pub gate: bool,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Each expert by itself.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// Routed and shared experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// Routed experts a layer.
    pub experts: usize,
    /// Experts a row is sent to.
    pub top_k: usize,
    /// Shared experts, fused into one MLP of `shared * inner`; 0 is none.
    pub shared: usize,
    /// Inner width of one expert.
    pub inner: usize,
    /// Width in which routed experts work, if it is not `hidden` (`routed_expert_hidden_size`).
    pub latent: Option<usize>,
    /// The weighted sum is normed before it is projected up again. False without `latent`.
    pub latent_norm: bool,
    /// Weights of the chosen experts are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Score function.
    pub score: Score,
    /// Groups of experts; 1 turns grouping off.
    pub groups: usize,
    /// Groups a row may choose from.
    pub topk_groups: usize,
}

/// The shape of one routed expert, which with its bytes gives its three matrices.
///
/// | matrix | shape | reads |
/// |---|---|---|
/// | `w1` (gate), `w3` (up) | `[inner, width]` | the routed input |
/// | `w2` (down) | `[width, inner]` | the gated product |
///
/// The bytes are w1, w2, w3; each is BF16, or packed codes `[rows, cols / 2]` and then scales `[rows, cols / 32]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Inner width.
    pub inner: usize,
    /// Width of input and output.
    pub width: usize,
    /// MXFP4 rather than BF16.
    pub packed: bool,
}

impl ExpertShape {
    /// Bytes of codes (or BF16 values) and of scales in each of the three matrices.
    pub fn matrix_bytes(self) -> (usize, usize) {
        let values = self.inner * self.width;
        if self.packed {
            (values / 2, values / MXFP4_GROUP)
        } else {
            (values * 2, 0)
        }
    }

    /// Bytes of the whole expert.
    pub fn bytes(self) -> usize {
        let (codes, scales) = self.matrix_bytes();
        3 * (codes + scales)
    }
}

/// Everything about a model that its tensors do not say.
///
/// A `Spec` from [`Spec::from_config`] is consistent: no dimension is zero, heads times channels do not overflow,
/// groups divide, every layer has one kind of attention.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Spec {
    /// Member of the family.
    pub family: Family,
    /// Rows of embedding and head.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The layers, from the bottom.
    pub layers: Vec<LayerKind>,
    /// `rms_norm_eps`. (The norms inside MLA's projections use 1e-6 whatever this says.)
    pub eps: f32,
    /// Activation of every gated MLP.
    pub act: Act,
    /// Inner width of dense layers; 0 if there are none and config.json is silent.
    pub dense_inner: usize,
    /// `attn_res_block_size`: attention over residual blocks; `None` is the plain residual.
    pub attn_res_block: Option<usize>,
    /// Kimi Delta Attention.
    pub kda: KdaSpec,
    /// Multi-head latent attention.
    pub mla: MlaSpec,
    /// Experts; `None` if every layer is dense.
    pub moe: Option<MoeSpec>,
    /// The head is the embedding.
    pub tied: bool,
    /// First token of a text, if config.json names one.
    pub bos: Option<TokenId>,
    /// Tokens that end a text, as config.json names them (generation_config.json may say more).
    pub eos: Vec<TokenId>,
    /// Padding, if config.json names it.
    pub pad: Option<TokenId>,
    /// Most positions in a sequence.
    pub context: usize,
    /// Routed experts are MXFP4: config.json holds a quantization block.
    pub experts_packed: bool,
}

impl Spec {
    /// Layers with routed experts, from the bottom.
    pub fn moe_layers(&self) -> impl Iterator<Item = u16> + '_ {
        (0u16..)
            .zip(&self.layers)
            .filter(|(_, kind)| kind.ffn == Ffn::Moe)
            .map(|(layer, _)| layer)
    }

    /// Every routed expert of the model, by layer, then expert.
    pub fn expert_keys(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        let experts = self.moe.as_ref().map_or(0, |moe| moe.experts);
        self.moe_layers().flat_map(move |layer| {
            (0u16..)
                .take(experts)
                .map(move |expert| ExpertKey { layer, expert })
        })
    }

    /// Width in which routed experts work.
    pub fn expert_width(&self) -> usize {
        self.moe
            .as_ref()
            .and_then(|moe| moe.latent)
            .unwrap_or(self.hidden)
    }

    /// Shape of one routed expert; `None` if every layer is dense.
    pub fn expert_shape(&self) -> Option<ExpertShape> {
        self.moe.as_ref().map(|moe| ExpertShape {
            inner: moe.inner,
            width: self.expert_width(),
            packed: self.experts_packed,
        })
    }
}
