//! Kimi Delta Attention: a layer that remembers a matrix a head, whatever the length of the text.

use crate::kernel::act;
use crate::kernel::conv;
use crate::kernel::kda;
use crate::kernel::norm;
use crate::model::error::ModelError;
use crate::model::pass::Pass;
use crate::model::pass::Scratch;
use crate::model::sequence::KdaState;
use crate::model::sequence::LayerState;
use crate::model::sequence::Sequence;
use crate::model::weights::KdaVectors;
use crate::model::weights::Weights;

/// Added under the root of the L2 norms of q and k: to the sum of squares, not to their mean.
const L2_EPS: f32 = 1e-6;

/// The attention of a KDA layer over its normed input `x` `[n, hidden]`; the answer is `[n, hidden]`, in scratch.
///
/// ```text
/// q, k, v = silu(conv(proj x))        a short convolution over time, channel by channel
/// q = l2(q) · dim^-1/2, k = l2(k)     a head at a time
/// decay   = f_b f_a x, beta = sigmoid(b x)
/// o       = recurrence                token by token: chunked algebra would change the bits
/// y       = o_proj( rms(o) · sigmoid(gate x) )
/// ```
///
/// The decay, beta and the gate read `x` itself, not what the convolution made of it.
pub(super) fn attention(
    pass: &mut Pass<'_>,
    w: &Weights<'_>,
    vectors: &KdaVectors,
    sequences: &mut [&mut Sequence],
    layer: usize,
    x: &[f32],
) -> Result<Scratch, ModelError> {
    let spec = &pass.spec.kda;
    let (heads, dim, width) = (spec.heads, spec.dim, spec.width());
    let (hidden, eps) = (pass.spec.hidden, pass.spec.eps);
    let mut states = states(pass, sequences, layer);

    let [mut q, mut k, v] = convolved(pass, w, vectors, &mut states, x)?;
    pass.tap("kda_q", &q);
    pass.tap("kda_k", &k);
    pass.tap("kda_v", &v);
    // The scale matters although a norm follows the recurrence: that norm's epsilon is not small against its input.
    let scale = 1.0 / (dim as f32).sqrt();
    norm::l2_norm_rows(pass.kernel, &mut q, dim, L2_EPS, scale);
    norm::l2_norm_rows(pass.kernel, &mut k, dim, L2_EPS, 1.0);

    let low = pass.project(w, "self_attn.f_a_proj.weight", (dim, hidden), x)?;
    let logits = pass.project(w, "self_attn.f_b_proj.weight", (width, dim), &low)?;
    pass.give(low);
    let mut log_decay = pass.take(pass.n * width);
    kda::log_decay(
        pass.kernel,
        &logits,
        &vectors.dt_bias,
        &vectors.a_log,
        heads,
        spec.floor,
        &mut log_decay,
    );
    pass.give(logits);
    pass.tap("kda_logdecay", &log_decay);
    let mut beta = pass.project(w, "self_attn.b_proj.weight", (heads, hidden), x)?;
    act::sigmoid_in_place(pass.kernel, &mut beta);
    pass.tap("kda_beta", &beta);

    let mut o = pass.take(pass.n * width);
    let tokens = kda::Tokens {
        q: &q,
        k: &k,
        v: &v,
        log_decay: &log_decay,
        beta: &beta,
    };
    let segments = states.into_iter().zip(pass.runs).map(|(state, run)| {
        let rows = run.rows.clone();
        let state = &mut state.state;
        kda::Segment { rows, state }
    });
    let shape = kda::KdaShape { heads, dim };
    kda::scan(pass.kernel, shape, tokens, segments.collect(), &mut o);
    for buffer in [q, k, v, log_decay, beta] {
        pass.give(buffer);
    }
    pass.tap("kda_o", &o);

    let gate = if spec.full_rank_gate {
        pass.project(w, "self_attn.g_proj.weight", (width, hidden), x)?
    } else {
        let low = pass.project(w, "self_attn.g_a_proj.weight", (dim, hidden), x)?;
        let gate = pass.project(w, "self_attn.g_b_proj.weight", (width, dim), &low)?;
        pass.give(low);
        gate
    };
    let mut gated = pass.take(pass.n * width);
    kda::gate(pass.kernel, &o, &vectors.o_norm, eps, &gate, &mut gated);
    pass.tap("kda_gated", &gated);
    let y = pass.project(w, "self_attn.o_proj.weight", (hidden, width), &gated)?;
    for buffer in [o, gate, gated] {
        pass.give(buffer);
    }
    Ok(y)
}

/// The states of the sweep's runs, in their order.
fn states<'s>(
    pass: &Pass<'_>,
    sequences: &'s mut [&mut Sequence],
    layer: usize,
) -> Vec<&'s mut KdaState> {
    let mut all: Vec<Option<&mut KdaState>> = sequences
        .iter_mut()
        .map(|sequence| match &mut sequence.layers[layer] {
            LayerState::Kda(state) => Some(state),
            LayerState::Mla(_) => None,
        })
        .collect();
    let state = |run: &super::pass::Run| all[run.sequence].take();
    pass.runs.iter().filter_map(state).collect()
}

/// Projections of `x` for q, k and v, `[n, heads * dim]` each, after convolution and SiLU.
fn convolved(
    pass: &mut Pass<'_>,
    w: &Weights<'_>,
    vectors: &KdaVectors,
    states: &mut [&mut KdaState],
    x: &[f32],
) -> Result<[Scratch; 3], ModelError> {
    const NAMES: [&str; 3] = [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ];
    let (width, hidden) = (pass.spec.kda.width(), pass.spec.hidden);
    let mut convolve = |i: usize| -> Result<Scratch, ModelError> {
        let raw = pass.project(w, NAMES[i], (width, hidden), x)?;
        let mut output = pass.take(pass.n * width);
        for (state, run) in states.iter_mut().zip(pass.runs) {
            let at = run.rows.start * width..run.rows.end * width;
            conv::short_conv(
                pass.kernel,
                &raw[at.clone()],
                &vectors.conv[i],
                &mut state.history[i],
                &mut output[at],
            );
        }
        pass.give(raw);
        Ok(output)
    };
    Ok([convolve(0)?, convolve(1)?, convolve(2)?])
}
