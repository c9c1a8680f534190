//! The forward pass.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::OnceLock;

use crate::checkpoint::Ffn;
use crate::checkpoint::Spec;
use crate::kernel::Kernel;
use crate::kernel::mix;
use crate::kernel::norm;
use crate::model::error::ModelError;
use crate::model::kda;
use crate::model::mla;
use crate::model::moe;
use crate::model::order::EMBEDDING;
use crate::model::order::HEAD;
use crate::model::pass::Pass;
use crate::model::pass::Run;
use crate::model::pass::Scratch;
use crate::model::pass::add;
use crate::model::ports::CoreSupply;
use crate::model::ports::ExpertSupply;
use crate::model::ports::Waited;
use crate::model::ports::Watch;
use crate::model::rows::LayerRoutes;
use crate::model::rows::Row;
use crate::model::rows::Shared;
use crate::model::rows::Sweep;
use crate::model::sequence::Sequence;
use crate::model::weights::AttentionVectors;
use crate::model::weights::LayerVectors;
use crate::model::weights::TopVectors;
use crate::model::weights::Weights;
use crate::terms::CorePart;

/// A model: what it is, what computes it, and the small vectors of its core, widened when they were first seen.
///
/// Because of these a `Model` belongs to one checkpoint: every supply given to it must bring the same weights.
#[derive(Debug)]
pub struct Model {
    spec: Arc<Spec>,
    kernel: Kernel,
    layers: Vec<OnceLock<LayerVectors>>,
    top: OnceLock<TopVectors>,
}

impl Model {
    /// A model of that kind, computed by that kernel.
    pub fn new(spec: Arc<Spec>, kernel: Kernel) -> Model {
        Model {
            layers: spec.layers.iter().map(|_| OnceLock::new()).collect(),
            top: OnceLock::new(),
            spec,
            kernel,
        }
    }

    /// What the model is.
    pub fn spec(&self) -> &Arc<Spec> {
        &self.spec
    }

    /// What computes it.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// The same as [`Model::sweep_shared`], for those who want all or nothing.
    ///
    /// # Errors
    ///
    /// As there; also where some sequences could have gone on.
    ///
    /// # Panics
    ///
    /// As there.
    pub fn sweep<C, X, E>(
        &self,
        core: &C,
        experts: &X,
        sequences: &mut [&mut Sequence],
        rows: &[Row],
        watch: &mut dyn Watch,
    ) -> Result<Sweep, E>
    where
        C: CoreSupply<Error = E>,
        X: ExpertSupply<Error = E>,
        E: From<ModelError> + Send,
    {
        let shared = self.sweep_shared(core, experts, sequences, rows, watch)?;
        if shared.lost.is_empty() {
            return Ok(shared.sweep);
        }
        for row in rows {
            sequences[row.sequence].poisoned = true;
        }
        Err(shared
            .failure
            .unwrap_or_else(|| ModelError::Abandoned.into()))
    }

    /// Passes `rows` through all layers. Each row is the next token of its sequence; afterwards the sequences have
    /// taken them in.
    ///
    /// What happens to one sequence harms no other: where an expert does not come, the sequences that need it are lost
    /// and the others go on; see [`Shared`].
    ///
    /// Rows of one sequence stand together and in position order; a sequence may have none. Supplies are called on one
    /// of the kernel's threads and may block it: what brings the weights has to run on others.
    ///
    /// # Errors
    ///
    /// The supplies' own, and [`ModelError`]. A token outside the vocabulary is found first and harms nothing; after
    /// any other error the sequences that have rows are [`Sequence::poisoned`].
    ///
    /// # Panics
    ///
    /// If a row names no sequence, rows of one sequence stand apart, or a sequence with rows is poisoned or was made
    /// for another spec.
    pub fn sweep_shared<C, X, E>(
        &self,
        core: &C,
        experts: &X,
        sequences: &mut [&mut Sequence],
        rows: &[Row],
        watch: &mut dyn Watch,
    ) -> Result<Shared<E>, E>
    where
        C: CoreSupply<Error = E>,
        X: ExpertSupply<Error = E>,
        E: From<ModelError> + Send,
    {
        let vocab = self.spec.vocab;
        if let Some(row) = rows.iter().find(|row| row.token as usize >= vocab) {
            let token = row.token;
            return Err(ModelError::NoSuchToken { token, vocab }.into());
        }
        let runs = runs(&self.spec, sequences, rows);
        if runs.is_empty() {
            return Ok(Shared {
                sweep: Sweep::default(),
                lost: Vec::new(),
                failure: None,
            });
        }
        // From here on a sequence is only whole again when all layers have taken its rows in.
        for run in &runs {
            sequences[run.sequence].poisoned = true;
        }
        let swept = self.kernel.install(|| {
            let mut pass = Pass::new(&self.spec, &self.kernel, &runs, watch);
            let mut failure = None;
            let sweep = self.run(&mut pass, core, experts, sequences, rows, &mut failure)?;
            Ok((sweep, pass.lost, failure))
        });
        // What a lease could not show is missing to the pass; the supply knows better.
        let (sweep, lost, failure) = swept.map_err(|error| core.failure().unwrap_or(error))?;
        let mut gone = Vec::new();
        for (run, lost) in runs.iter().zip(lost) {
            let sequence = &mut sequences[run.sequence];
            if lost {
                gone.push(run.sequence);
            } else {
                sequence.len += run.rows.len();
                sequence.poisoned = false;
            }
        }
        Ok(Shared {
            sweep,
            lost: gone,
            failure,
        })
    }

    fn run<C, X, E>(
        &self,
        pass: &mut Pass<'_>,
        core: &C,
        experts: &X,
        sequences: &mut [&mut Sequence],
        rows: &[Row],
        failure: &mut Option<E>,
    ) -> Result<Sweep, E>
    where
        C: CoreSupply<Error = E>,
        X: ExpertSupply<Error = E>,
        E: From<ModelError>,
    {
        let mut h = {
            let lease = pass.wait(Waited::Core, || core.core(CorePart::Top))?;
            let part = CorePart::Top;
            self.embed(
                pass,
                &Weights {
                    lease: &lease,
                    part,
                },
                rows,
            )?
        };
        let mut blocks = Vec::new();
        let mut routes = Vec::new();
        for layer in (0u16..).take(self.spec.layers.len()) {
            pass.watch.layer(layer);
            pass.let_go();
            if pass.all_lost() {
                return Err(failure
                    .take()
                    .unwrap_or_else(|| ModelError::Abandoned.into()));
            }
            pass.layer = Some(layer);
            let part = CorePart::Layer(layer);
            let lease = pass.wait(Waited::Core, || core.core(part))?;
            let w = Weights {
                lease: &lease,
                part,
            };
            let chosen =
                self.layer(pass, &w, (experts, failure), sequences, &mut h, &mut blocks)?;
            routes.extend(chosen);
        }
        pass.layer = None;
        let logits = if rows.iter().any(|row| row.logits) {
            let lease = pass.wait(Waited::Core, || core.core(CorePart::Top))?;
            let part = CorePart::Top;
            self.head(
                pass,
                &Weights {
                    lease: &lease,
                    part,
                },
                rows,
                &h,
                &blocks,
            )?
        } else {
            Vec::new()
        };
        Ok(Sweep { logits, routes })
    }

    /// The rows' embeddings, `[n, hidden]`.
    fn embed(
        &self,
        pass: &mut Pass<'_>,
        w: &Weights<'_>,
        rows: &[Row],
    ) -> Result<Scratch, ModelError> {
        let hidden = self.spec.hidden;
        let tokens: Vec<usize> = rows.iter().map(|row| row.token as usize).collect();
        let mut bytes = Vec::new();
        // Rows, not the table: the table is gigabytes, and a token needs one row of it.
        let table = w.rows(EMBEDDING, &tokens, hidden, &mut bytes)?;
        let mut h = pass.take(pass.n * hidden);
        for (row, h) in h.chunks_mut(hidden).enumerate() {
            table.read_row(row, h);
        }
        pass.tap("embed", &h);
        Ok(h)
    }

    /// One layer. `h` `[n, hidden]` is the running sum; with an attention residual, `blocks` are the sums it was
    /// restarted from, and each half reads a mix of them and the running sum. The mix only feeds that half.
    fn layer<X, E>(
        &self,
        pass: &mut Pass<'_>,
        w: &Weights<'_>,
        (experts, failure): (&X, &mut Option<E>),
        sequences: &mut [&mut Sequence],
        h: &mut Scratch,
        blocks: &mut Vec<Scratch>,
    ) -> Result<Option<LayerRoutes>, E>
    where
        X: ExpertSupply<Error = E>,
        E: From<ModelError>,
    {
        let layer = pass.layer.unwrap_or_default();
        let vectors = self.vectors(w, layer)?;
        let scores = vectors.scores.as_ref();
        let mut x = pass.take(h.len());

        let names = ["attn_mix_p", "attn_mix"];
        let score = scores.map(|[attention, _]| attention.as_slice());
        read(pass, names, score, blocks, h, &mut x);
        norm::rms_norm_in_place(pass.kernel, &mut x, &vectors.attention_norm, self.spec.eps);
        pass.tap("attn_in", &x);
        let y = match &vectors.attention {
            AttentionVectors::Kda(kda) => {
                kda::attention(pass, w, kda, sequences, layer.into(), &x)?
            }
            AttentionVectors::Mla { q_norm, kv_norm } => {
                let norms = (q_norm.as_deref(), kv_norm.as_slice());
                mla::attention(pass, w, norms, sequences, layer.into(), &x)?
            }
        };
        pass.tap("attn_out", &y);
        let restarts = |every: usize| usize::from(layer).is_multiple_of(every);
        if self.spec.attn_res_block.is_some_and(restarts) {
            // The block is the sum as it entered the layer; the mix above did not see it, the one below does.
            blocks.push(std::mem::replace(h, y));
        } else {
            add(h, &y);
            pass.give(y);
        }

        let names = ["mlp_mix_p", "mlp_mix"];
        let score = scores.map(|[_, mlp]| mlp.as_slice());
        read(pass, names, score, blocks, h, &mut x);
        experts.foresee(layer, &x);
        norm::rms_norm_in_place(pass.kernel, &mut x, &vectors.ffn_norm, self.spec.eps);
        pass.tap("mlp_in", &x);
        let (y, routes) = match self.spec.layers[usize::from(layer)].ffn {
            Ffn::Dense => (pass.mlp(w, "mlp", self.spec.dense_inner, &x)?, None),
            Ffn::Moe => {
                let (y, routes) = moe::experts(pass, w, vectors, experts, layer, &x, failure)?;
                (y, Some(routes))
            }
        };
        pass.tap("mlp_out", &y);
        add(h, &y);
        pass.tap("out", h);
        pass.give(x);
        pass.give(y);
        Ok(routes)
    }

    /// The layer's vectors, widened if this is the first sweep.
    fn vectors(&self, w: &Weights<'_>, layer: u16) -> Result<&LayerVectors, ModelError> {
        let cell = &self.layers[usize::from(layer)];
        match cell.get() {
            Some(vectors) => Ok(vectors),
            None => {
                let vectors = LayerVectors::read(&self.spec, w, layer)?;
                Ok(cell.get_or_init(|| vectors))
            }
        }
    }

    /// Distributions of the rows that asked, `[asked, vocab]`.
    fn head(
        &self,
        pass: &mut Pass<'_>,
        w: &Weights<'_>,
        rows: &[Row],
        h: &[f32],
        blocks: &[Scratch],
    ) -> Result<Vec<f32>, ModelError> {
        let top = match self.top.get() {
            Some(top) => top,
            None => {
                let top = TopVectors::read(&self.spec, w)?;
                self.top.get_or_init(|| top)
            }
        };
        let head = if self.spec.tied { EMBEDDING } else { HEAD };
        let asked = |values: &[f32]| {
            let rows = rows.iter().zip(values.chunks(self.spec.hidden));
            let asked = rows.filter(|(row, _)| row.logits);
            asked
                .flat_map(|(_, values)| values)
                .copied()
                .collect::<Vec<f32>>()
        };
        let h = asked(h);
        let blocks: Vec<Vec<f32>> = blocks.iter().map(|block| asked(block)).collect();
        let mut x = pass.take(h.len());
        read(
            pass,
            ["final_mix_p", "final_mix"],
            top.score.as_deref(),
            &blocks,
            &h,
            &mut x,
        );
        norm::rms_norm_in_place(pass.kernel, &mut x, &top.norm, self.spec.eps);
        pass.tap("final_norm", &x);
        let mut logits = vec![0.0; x.len() / self.spec.hidden * self.spec.vocab];
        let shape = (self.spec.vocab, self.spec.hidden);
        w.runs(&[head], shape, |run, parts| {
            pass.outputs(shape.0, run, &mut logits, |y| {
                self.kernel.matmul(parts[0], &x, y);
            });
        })?;
        Ok(logits)
    }
}

/// What a half of a layer reads, into `x`: a mix of the blocks and the running sum `h`; `h` itself before the first
/// block, and where there is no attention residual.
fn read(
    pass: &mut Pass<'_>,
    [probabilities, mixed]: [&'static str; 2],
    score: Option<&[f32]>,
    blocks: &[impl Deref<Target = [f32]>],
    h: &[f32],
    x: &mut [f32],
) {
    let Some(score) = score else {
        x.copy_from_slice(h);
        return;
    };
    if blocks.is_empty() {
        x.copy_from_slice(h);
    } else {
        let blocks = blocks.iter().map(|block| &**block);
        let candidates: Vec<&[f32]> = blocks.chain([h]).collect();
        let mut p = Vec::new();
        mix::res_mix(pass.kernel, &candidates, score, pass.spec.eps, x, &mut p);
        pass.tap(probabilities, &p);
    }
    pass.tap(mixed, x);
}

/// The rows of each sequence.
#[track_caller]
fn runs(spec: &Spec, sequences: &[&mut Sequence], rows: &[Row]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.sequence == row.sequence => run.rows.end = at + 1,
            _ => {
                let sequence = &sequences[row.sequence];
                assert!(!sequence.poisoned, "sequence {} is poisoned", row.sequence);
                assert!(
                    sequence.fits(spec),
                    "sequence {} is of another model",
                    row.sequence
                );
                let apart = runs.iter().any(|run| run.sequence == row.sequence);
                assert!(!apart, "rows of sequence {} stand apart", row.sequence);
                runs.push(Run {
                    sequence: row.sequence,
                    rows: at..at + 1,
                    position: sequence.len,
                });
            }
        }
    }
    runs
}
