//! Multi-head latent attention without positions: a layer that remembers one short vector a token.

use crate::kernel::act;
use crate::kernel::mla;
use crate::kernel::norm;
use crate::model::error::ModelError;
use crate::model::pass::Pass;
use crate::model::pass::Scratch;
use crate::model::sequence::LayerState;
use crate::model::sequence::Sequence;
use crate::model::weights::Weights;

/// Epsilon of the two norms inside the projections: always this, whatever `rms_norm_eps` says.
const PROJECTION_EPS: f32 = 1e-6;

/// The attention of an MLA layer over its normed input `x` `[n, hidden]`; the answer is `[n, hidden]`, in scratch.
///
/// The cache keeps the latent AFTER its norm, and behind it the key part that all heads share, which is neither normed
/// nor rotated. The output gate reads `x` and multiplies the heads before the output projection.
pub(super) fn attention(
    pass: &mut Pass<'_>,
    w: &Weights<'_>,
    (q_norm, kv_norm): (Option<&[f32]>, &[f32]),
    sequences: &mut [&mut Sequence],
    layer: usize,
    x: &[f32],
) -> Result<Scratch, ModelError> {
    let spec = &pass.spec.mla;
    let hidden = pass.spec.hidden;
    let shape = mla::MlaShape {
        heads: spec.heads,
        nope: spec.nope,
        rope: spec.rope,
        rank: spec.kv_rank,
        vdim: spec.vdim,
    };
    let queries = spec.heads * (spec.nope + spec.rope);
    let values = spec.heads * spec.vdim;

    let q = match q_norm {
        Some(gain) => {
            let rank = gain.len();
            let mut low = pass.project(w, "self_attn.q_a_proj.weight", (rank, hidden), x)?;
            norm::rms_norm_in_place(pass.kernel, &mut low, gain, PROJECTION_EPS);
            let q = pass.project(w, "self_attn.q_b_proj.weight", (queries, rank), &low)?;
            pass.give(low);
            q
        }
        None => pass.project(w, "self_attn.q_proj.weight", (queries, hidden), x)?,
    };
    pass.tap("mla_q", &q);
    let name = "self_attn.kv_a_proj_with_mqa.weight";
    let mut kv = pass.project(w, name, (shape.width(), hidden), x)?;
    for row in kv.chunks_mut(shape.width()) {
        norm::rms_norm_in_place(pass.kernel, &mut row[..shape.rank], kv_norm, PROJECTION_EPS);
    }
    if pass.taps() {
        let rows = || kv.chunks(shape.width());
        pass.tap(
            "mla_latent",
            &rows()
                .flat_map(|row| &row[..shape.rank])
                .copied()
                .collect::<Vec<_>>(),
        );
        pass.tap(
            "mla_rot",
            &rows()
                .flat_map(|row| &row[shape.rank..])
                .copied()
                .collect::<Vec<_>>(),
        );
    }

    let kv_rows = spec.heads * (spec.nope + spec.vdim);
    let kv_b = w.matrix("self_attn.kv_b_proj.weight", kv_rows, spec.kv_rank)?;
    let mut o = pass.take(pass.n * values);
    for run in pass.runs {
        let LayerState::Mla(latents) = &mut sequences[run.sequence].layers[layer] else {
            continue; // a sequence is built from the same schedule as the pass
        };
        latents.reach(run.position + run.rows.len());
        let rows = kv.chunks(shape.width()).skip(run.rows.start);
        for (position, row) in (run.position..).zip(rows.take(run.rows.len())) {
            latents.at(position).copy_from_slice(row);
        }
        mla::attend(
            pass.kernel,
            shape,
            &q[run.rows.start * queries..run.rows.end * queries],
            kv_b,
            &latents.view(),
            run.position,
            &mut o[run.rows.start * values..run.rows.end * values],
        );
    }
    pass.tap("mla_o", &o);
    pass.give(q);
    pass.give(kv);

    if spec.gate {
        let gate = pass.project(w, "self_attn.g_proj.weight", (values, hidden), x)?;
        act::gate_by_sigmoid(pass.kernel, &mut o, &gate);
        pass.give(gate);
    }
    let y = pass.project(w, "self_attn.o_proj.weight", (hidden, values), &o)?;
    pass.give(o);
    Ok(y)
}
