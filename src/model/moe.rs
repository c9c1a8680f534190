//! Routed and shared experts.

use rayon::prelude::*;

use crate::checkpoint::MoeSpec;
use crate::checkpoint::Score;
use crate::kernel::math;
use crate::kernel::norm;
use crate::kernel::route;
use crate::model::error::ModelError;
use crate::model::pass::Pass;
use crate::model::pass::Scratch;
use crate::model::pass::add;
use crate::model::ports::ExpertSupply;
use crate::model::ports::Waited;
use crate::model::rows::LayerRoutes;
use crate::model::weights::ExpertWeights;
use crate::model::weights::LayerVectors;
use crate::model::weights::Weights;
use crate::terms::ExpertKey;

/// The experts of one layer over its normed input `x` `[n, hidden]`; the answer is `[n, hidden]`, in scratch.
///
/// ```text
/// route every row ─► request the union ─► project down, shared experts   while bytes move
///                                      ─► each expert as it arrives: its rows together, each output into its own slot
///                    slots of a row summed in the router's order ─► latent norm ─► project up ─► plus shared
/// ```
///
/// Summing as experts arrive would be shorter and would make answers depend on the network.
pub(super) fn experts<X, E>(
    pass: &mut Pass<'_>,
    w: &Weights<'_>,
    vectors: &LayerVectors,
    supply: &X,
    layer: u16,
    x: &[f32],
) -> Result<(Scratch, LayerRoutes), E>
where
    X: ExpertSupply<Error = E>,
    E: From<ModelError>,
{
    let Some(moe) = &pass.spec.moe else {
        unreachable!("only a spec with experts has layers with them")
    };
    let (hidden, width) = (pass.spec.hidden, pass.spec.expert_width());
    let routes = routes(pass, w, vectors, moe, layer, x)?;
    let plan = Plan::new(moe, layer, &routes.experts);
    let arrivals = supply.request(&plan.keys);

    let latent = match moe.latent {
        Some(latent) => {
            let name = "block_sparse_moe.routed_expert_down_proj.weight";
            Some(pass.project(w, name, (latent, hidden), x)?)
        }
        None => None,
    };
    let input = latent.as_deref().unwrap_or(x);
    pass.tap("moe_in", input);
    let shared = match moe.shared {
        0 => None,
        shared => {
            let stem = "block_sparse_moe.shared_experts";
            Some(pass.mlp(w, stem, shared * moe.inner, x)?)
        }
    };

    let mut slots = pass.take(pass.n * moe.top_k * width);
    compute(pass, &plan, arrivals, input, &mut slots)?;
    let mut sum = pass.take(pass.n * width);
    combine(&routes.weights, &slots, moe.top_k, width, &mut sum);
    pass.tap("moe_sum", &sum);
    pass.give(slots);
    latent.into_iter().for_each(|buffer| pass.give(buffer));

    let mut y = match moe.latent {
        Some(latent) => {
            if let Some(gain) = &vectors.latent_norm {
                norm::rms_norm_in_place(pass.kernel, &mut sum, gain, pass.spec.eps);
            }
            let name = "block_sparse_moe.routed_expert_up_proj.weight";
            let y = pass.project(w, name, (hidden, latent), &sum)?;
            pass.give(sum);
            y
        }
        None => sum,
    };
    pass.tap("routed_out", &y);
    if let Some(shared) = shared {
        pass.tap("shared_out", &shared);
        add(&mut y, &shared);
        pass.give(shared);
    }
    Ok((y, routes))
}

/// Chooses the experts of every row, from its full-width input.
fn routes(
    pass: &mut Pass<'_>,
    w: &Weights<'_>,
    vectors: &LayerVectors,
    moe: &MoeSpec,
    layer: u16,
    x: &[f32],
) -> Result<LayerRoutes, ModelError> {
    let shape = (moe.experts, pass.spec.hidden);
    let logits = pass.project(w, "block_sparse_moe.gate.weight", shape, x)?;
    pass.tap("router_logits", &logits);
    if pass.taps() {
        let choice = choices(moe, &logits, &vectors.router_bias);
        pass.tap("router_choice", &choice);
    }
    let spec = route::RouterSpec {
        score: match moe.score {
            Score::Sigmoid => route::Score::Sigmoid,
            Score::Softmax => route::Score::Softmax,
        },
        renormalize: moe.renormalize,
        scale: moe.scale,
        groups: moe.groups,
        topk_groups: moe.topk_groups,
    };
    let (k, bias) = (moe.top_k, &vectors.router_bias);
    let mut experts = vec![0; pass.n * k];
    let mut weights = vec![0.0; pass.n * k];
    let rows = logits
        .par_chunks(moe.experts)
        .zip(experts.par_chunks_mut(k))
        .zip(weights.par_chunks_mut(k));
    rows.with_min_len(8).for_each(|((logits, ids), weights)| {
        route::top_k(logits, bias, k, spec, ids, weights);
    });
    pass.give(logits);
    Ok(LayerRoutes {
        layer,
        experts,
        weights,
    })
}

/// What the router chooses by, for those who look: scores plus bias.
fn choices(moe: &MoeSpec, logits: &[f32], bias: &[f32]) -> Vec<f32> {
    let mut scores = logits.to_vec();
    for row in scores.chunks_mut(moe.experts) {
        match moe.score {
            Score::Sigmoid => row.iter_mut().for_each(|s| *s = math::sigmoid(*s)),
            Score::Softmax => math::softmax(row),
        }
        add(row, bias);
    }
    scores
}

/// Which rows go to which expert.
struct Plan {
    /// Every expert that some row chose, by number.
    keys: Vec<ExpertKey>,
    /// First place in `places` of each expert of the layer, and the end.
    starts: Vec<usize>,
    /// `row * top_k + slot`, expert by expert, rows in order.
    places: Vec<usize>,
    top_k: usize,
}

impl Plan {
    /// `chosen` is `[n, top_k]`.
    fn new(moe: &MoeSpec, layer: u16, chosen: &[u16]) -> Plan {
        let mut starts = vec![0; moe.experts + 1];
        for &expert in chosen {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..moe.experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let mut places = vec![0; chosen.len()];
        for (place, &expert) in chosen.iter().enumerate() {
            places[next[expert as usize]] = place;
            next[expert as usize] += 1;
        }
        let keys = (0u16..)
            .take(moe.experts)
            .map(|expert| ExpertKey { layer, expert });
        Plan {
            keys: keys
                .filter(|key| starts[key.expert as usize] < starts[key.expert as usize + 1])
                .collect(),
            starts,
            places,
            top_k: moe.top_k,
        }
    }

    /// The places of one expert's outputs.
    fn places(&self, expert: u16) -> &[usize] {
        let expert = expert as usize;
        &self.places[self.starts[expert]..self.starts[expert + 1]]
    }
}

/// Computes each expert as it arrives, for all rows that chose it; outputs go to `slots` `[n, top_k, width]`.
fn compute<L: AsRef<[u8]>, E: From<ModelError>>(
    pass: &mut Pass<'_>,
    plan: &Plan,
    mut arrivals: impl Iterator<Item = Result<(ExpertKey, L), E>>,
    input: &[f32],
    slots: &mut [f32],
) -> Result<(), E> {
    let Some(shape) = pass.spec.expert_shape() else {
        return Ok(());
    };
    let mut waiting = plan.keys.clone();
    while !waiting.is_empty() {
        let arrival = pass.wait(Waited::Experts, || arrivals.next());
        let Some(arrival) = arrival else {
            return Err(ModelError::ExpertMissing { key: waiting[0] }.into());
        };
        let (key, lease) = arrival?;
        let Ok(at) = waiting.binary_search(&key) else {
            return Err(ModelError::ExpertUnasked { key }.into());
        };
        waiting.remove(at);
        let bytes = lease.as_ref();
        if bytes.len() != shape.bytes() {
            let (found, expected) = (bytes.len(), shape.bytes());
            return Err(ModelError::ExpertLength {
                key,
                found,
                expected,
            }
            .into());
        }
        let places = plan.places(key.expert);
        let expert = ExpertWeights::view(bytes, shape);
        let mut x = pass.take(places.len() * shape.width);
        for (x, place) in x.chunks_mut(shape.width).zip(places) {
            let row = place / plan.top_k;
            x.copy_from_slice(&input[row * shape.width..][..shape.width]);
        }
        let mut product = pass.take(places.len() * shape.inner);
        pass.kernel
            .gated(expert.gate, expert.up, pass.act, &x, &mut product);
        let mut y = x;
        pass.kernel.matmul(expert.down, &product, &mut y);
        for (y, place) in y.chunks(shape.width).zip(places) {
            slots[place * shape.width..][..shape.width].copy_from_slice(y);
        }
        pass.give(product);
        pass.give(y);
    }
    Ok(())
}

/// `sum[row] = Σ_i weights[row, i] · slots[row, i]`, `i` in the router's order.
fn combine(weights: &[f32], slots: &[f32], top_k: usize, width: usize, sum: &mut [f32]) {
    let rows = sum.par_chunks_mut(width).zip(weights.par_chunks(top_k));
    let rows = rows.zip(slots.par_chunks(top_k * width));
    rows.with_min_len(8).for_each(|((sum, weights), slots)| {
        sum.fill(0.0);
        for (weight, slot) in weights.iter().zip(slots.chunks(width)) {
            sum.iter_mut()
                .zip(slot)
                .for_each(|(sum, s)| *sum += weight * s);
        }
    });
}
