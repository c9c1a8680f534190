//! Routed and shared experts.

use rayon::prelude::*;

use crate::checkpoint::ExpertShape;
use crate::checkpoint::MoeSpec;
use crate::checkpoint::Score;
use crate::kernel::math;
use crate::kernel::norm;
use crate::kernel::route;
use crate::model::error::ModelError;
use crate::model::order::ROUTER;
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

/// Rows of experts that are computed at once, about: enough work for every thread, little scratch.
const GROUP_ROWS: usize = 64;

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
    failure: &mut Option<E>,
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
    let plan = Plan::new(moe, layer, &routes.experts, &pass.lost_rows());
    let at_hand = plan.keys.iter().all(|key| supply.at_hand(*key));
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

    // Of each expert, whether it was asked for and has not come.
    let mut waiting = vec![false; moe.experts];
    for key in &plan.keys {
        waiting[usize::from(key.expert)] = true;
    }
    let mut slots = pass.take(pass.n * moe.top_k * width);
    if let Err(error) = compute(
        pass,
        &plan,
        &mut waiting,
        (arrivals, at_hand),
        input,
        &mut slots,
    ) {
        lose(
            pass,
            &plan,
            |place| waiting[usize::from(routes.experts[place])],
            error,
            failure,
        )?;
    }
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
    let logits = pass.project(w, ROUTER, shape, x)?;
    pass.tap("router_logits", &logits);
    if pass.taps() {
        let choice = choices(moe, &logits, &vectors.router_bias);
        pass.tap("router_choice", &choice);
    }
    let spec = router(moe);
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

/// The router's settings as its kernel takes them.
pub(super) fn router(moe: &MoeSpec) -> route::RouterSpec {
    route::RouterSpec {
        score: match moe.score {
            Score::Sigmoid => route::Score::Sigmoid,
            Score::Softmax => route::Score::Softmax,
        },
        renormalize: moe.renormalize,
        scale: moe.scale,
        groups: moe.groups,
        topk_groups: moe.topk_groups,
    }
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
    layer: u16,
    /// Every expert that some row chose, those that most rows chose first.
    keys: Vec<ExpertKey>,
    /// First place in `places` of each expert of the layer, and the end.
    starts: Vec<usize>,
    /// `row * top_k + slot`, expert by expert, rows in order.
    places: Vec<usize>,
    top_k: usize,
}

impl Plan {
    /// `chosen` is `[n, top_k]`; what a lost row chose does not count.
    fn new(moe: &MoeSpec, layer: u16, chosen: &[u16], lost: &[bool]) -> Plan {
        let counts = |place: &usize| !lost[place / moe.top_k];
        let mut starts = vec![0; moe.experts + 1];
        for place in (0..chosen.len()).filter(counts) {
            starts[chosen[place] as usize + 1] += 1;
        }
        for expert in 0..moe.experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let mut places = vec![0; starts[moe.experts]];
        for place in (0..chosen.len()).filter(counts) {
            let expert = chosen[place] as usize;
            places[next[expert]] = place;
            next[expert] += 1;
        }
        let rows = |expert: u16| starts[expert as usize + 1] - starts[expert as usize];
        let mut keys: Vec<ExpertKey> = (0u16..)
            .take(moe.experts)
            .filter(|expert| rows(*expert) > 0)
            .map(|expert| ExpertKey { layer, expert })
            .collect();
        keys.sort_by_key(|key| (std::cmp::Reverse(rows(key.expert)), key.expert));
        Plan {
            layer,
            keys,
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

/// After `error`: gives up the runs that lack an expert, keeps the first error for them, and goes on with the others.
/// An error that concerns no expert, or leaves nobody, ends the sweep.
fn lose<E>(
    pass: &mut Pass<'_>,
    plan: &Plan,
    missing: impl Fn(usize) -> bool,
    error: E,
    failure: &mut Option<E>,
) -> Result<(), E> {
    let places = plan.places.iter().filter(|place| missing(**place));
    let mut rows: Vec<usize> = places.map(|place| place / plan.top_k).collect();
    rows.sort_unstable();
    for (lost, run) in pass.lost.iter_mut().zip(pass.runs) {
        let at = rows.partition_point(|row| *row < run.rows.start);
        *lost |= rows.get(at).is_some_and(|row| run.rows.contains(row));
    }
    if rows.is_empty() || pass.all_lost() {
        return Err(failure.take().unwrap_or(error));
    }
    failure.get_or_insert(error);
    Ok(())
}

/// Computes each expert as it arrives, for all rows that chose it; outputs go to `slots` `[n, top_k, width]`.
///
/// Where all are `at_hand`, several are computed at once: with a handful of rows each, one after the other would have
/// the threads wait for one another twice an expert. While some are on their way each is computed alone, as bytes in a
/// group would wait there, beyond the memory that was planned for those that arrive.
///
/// Where several sequences are at work, an expert that fails is skipped, and the first error is returned when the
/// others are done.
fn compute<L: AsRef<[u8]>, E: From<ModelError>>(
    pass: &mut Pass<'_>,
    plan: &Plan,
    waiting: &mut [bool],
    (mut arrivals, at_hand): (impl Iterator<Item = Result<(ExpertKey, L), E>>, bool),
    input: &[f32],
    slots: &mut [f32],
) -> Result<(), E> {
    let Some(shape) = pass.spec.expert_shape() else {
        return Ok(());
    };
    let mut failed = None;
    let mut remaining = plan.keys.len();
    let (mut group, mut rows) = (Vec::new(), 0);
    let ended = loop {
        if remaining == 0 {
            break Ok(());
        }
        let arrival = pass.wait(Waited::Experts, || arrivals.next());
        let (key, lease) = match arrival {
            Some(Ok(arrived)) => arrived,
            Some(Err(error)) if pass.lost.len() > 1 => {
                failed.get_or_insert(error);
                continue;
            }
            Some(Err(error)) => break Err(error),
            None => break Ok(()),
        };
        let asked = key.layer == plan.layer && waiting.get(usize::from(key.expert)) == Some(&true);
        if !asked {
            break Err(ModelError::ExpertUnasked { key }.into());
        }
        let (found, expected) = (lease.as_ref().len(), shape.bytes());
        if found != expected {
            break Err(ModelError::ExpertLength {
                key,
                found,
                expected,
            }
            .into());
        }
        waiting[usize::from(key.expert)] = false;
        remaining -= 1;
        rows += plan.places(key.expert).len();
        group.push((key, lease));
        if !at_hand || rows >= GROUP_ROWS {
            products(pass, plan, shape, &group, input, slots);
            group.clear();
            rows = 0;
        }
    };
    // Before any error is looked at: what is no longer waited for is computed.
    products(pass, plan, shape, &group, input, slots);
    ended?;
    let missing = plan
        .keys
        .iter()
        .find(|key| waiting[usize::from(key.expert)]);
    match missing {
        None => Ok(()),
        Some(&key) => Err(failed.unwrap_or_else(|| ModelError::ExpertMissing { key }.into())),
    }
}

/// The outputs of some experts for all rows that chose them.
fn products<L: AsRef<[u8]>>(
    pass: &mut Pass<'_>,
    plan: &Plan,
    shape: ExpertShape,
    group: &[(ExpertKey, L)],
    input: &[f32],
    slots: &mut [f32],
) {
    let places = || {
        let places = group.iter().map(|(key, _)| plan.places(key.expert));
        places.flatten()
    };
    let rows = places().count();
    let mut x = pass.take(rows * shape.width);
    for (x, place) in x.chunks_mut(shape.width).zip(places()) {
        let row = place / plan.top_k;
        x.copy_from_slice(&input[row * shape.width..][..shape.width]);
    }
    let mut product = pass.take(rows * shape.inner);
    let (kernel, act) = (pass.kernel, pass.act);
    let one = |(expert, x, product): (ExpertWeights<'_>, &mut [f32], &mut [f32])| {
        kernel.gated(expert.gate, expert.up, act, x, product);
        kernel.matmul(expert.down, product, x);
    };
    let mut tasks = Vec::with_capacity(group.len());
    let (mut xs, mut inners) = (&mut x[..], &mut product[..]);
    for (key, lease) in group {
        let n = plan.places(key.expert).len();
        let expert = ExpertWeights::view(lease.as_ref(), shape);
        let (x, inner);
        (x, xs) = xs.split_at_mut(n * shape.width);
        (inner, inners) = inners.split_at_mut(n * shape.inner);
        tasks.push((expert, x, inner));
    }
    match tasks.len() {
        0 | 1 => tasks.into_iter().for_each(one),
        _ => kernel.install(|| tasks.into_par_iter().with_max_len(1).for_each(one)),
    }
    for (y, place) in x.chunks(shape.width).zip(places()) {
        slots[place * shape.width..][..shape.width].copy_from_slice(y);
    }
    pass.give(product);
    pass.give(x);
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
