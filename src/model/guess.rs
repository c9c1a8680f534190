//! A guess at what the next layer will choose: its router, applied to what this layer was given.
//!
//! A layer adds little to the sum that passes through it, so the next layer's router mostly sees what it would see
//! here. A guess is worth reading ahead for and nothing else: it is never computed with.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::OnceLock;

use crate::checkpoint::Ffn;
use crate::checkpoint::MoeSpec;
use crate::checkpoint::Spec;
use crate::kernel::Isa;
use crate::kernel::Kernel;
use crate::kernel::norm;
use crate::kernel::route;
use crate::model::error::ModelError;
use crate::model::moe;
use crate::model::order::ROUTER;
use crate::model::ports::CoreLease;
use crate::model::ports::CoreTensor;
use crate::model::weights::Weights;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

/// Applies routers before their time, on the thread that asks alone: the threads of the arithmetic
/// have better to do.
#[derive(Debug)]
pub struct Guesser {
    spec: Arc<Spec>,
    kernel: Kernel,
    vectors: Vec<OnceLock<Vectors>>,
}

/// What a router needs besides its matrix.
#[derive(Debug)]
struct Vectors {
    gain: Vec<f32>,
    bias: Vec<f32>,
}

impl Guesser {
    /// Guesses for a model of that kind.
    pub fn new(spec: Arc<Spec>, isa: Isa) -> Guesser {
        Guesser {
            vectors: spec.layers.iter().map(|_| OnceLock::new()).collect(),
            // One thread is none: what is asked of it runs where it is asked.
            kernel: Kernel::new(isa, 1),
            spec,
        }
    }

    /// Whether a layer has routed experts.
    pub fn is_routed(&self, layer: u16) -> bool {
        let kind = self.spec.layers.get(usize::from(layer));
        self.spec.moe.is_some() && kind.is_some_and(|kind| kind.ffn == Ffn::Moe)
    }

    /// The experts of `layer` that rows with these inputs `x` `[n, hidden]`, not yet normed, would choose: those that most
    /// rows choose first, then those that are chosen first. `lease` is that layer's part of the core. `contrary` guesses
    /// what they would choose last. `None` if the layer has no router, or its matrix is not in memory.
    ///
    /// # Errors
    ///
    /// If the part of the core is not what the model's is.
    pub fn guess(
        &self,
        lease: &dyn CoreLease,
        layer: u16,
        x: &[f32],
        contrary: bool,
    ) -> Result<Option<Vec<ExpertKey>>, ModelError> {
        let Some(moe) = self.spec.moe.as_ref().filter(|_| self.is_routed(layer)) else {
            return Ok(None);
        };
        let hidden = self.spec.hidden;
        let fits = !x.is_empty() && x.len().is_multiple_of(hidden);
        // Nothing is read or normed for a matrix that is not there.
        if !fits || lease.runs_here(&[ROUTER], &mut |_, _| {}).is_none() {
            return Ok(None);
        }
        let w = Weights {
            lease: &Here(lease),
            part: CorePart::Layer(layer),
        };
        let vectors = self.vectors(&w, moe, layer)?;
        let mut x = x.to_vec();
        norm::rms_norm_in_place(&self.kernel, &mut x, &vectors.gain, self.spec.eps);
        let mut logits = vec![0.0; x.len() / hidden * moe.experts];
        w.runs(&[ROUTER], (moe.experts, hidden), |run, parts| {
            let mut y = vec![0.0; x.len() / hidden * run.len()];
            self.kernel.matmul(parts[0], &x, &mut y);
            let rows = logits.chunks_mut(moe.experts).zip(y.chunks(run.len()));
            rows.for_each(|(logits, y)| logits[run.clone()].copy_from_slice(y));
        })?;
        let mut bias = vectors.bias.clone();
        if contrary {
            // The last become the first.
            logits.iter_mut().for_each(|logit| *logit = -*logit);
            bias.iter_mut().for_each(|bias| *bias = -*bias);
        }
        Ok(Some(choose(moe, layer, &logits, &bias)))
    }

    fn vectors(&self, w: &Weights<'_>, moe: &MoeSpec, layer: u16) -> Result<&Vectors, ModelError> {
        let cell = &self.vectors[usize::from(layer)];
        if let Some(vectors) = cell.get() {
            return Ok(vectors);
        }
        let bias = "block_sparse_moe.gate.e_score_correction_bias";
        let vectors = Vectors {
            gain: w.vector("post_attention_layernorm.weight", self.spec.hidden)?,
            bias: w.vector(bias, moe.experts)?,
        };
        Ok(cell.get_or_init(|| vectors))
    }
}

/// The union of what the rows choose.
fn choose(moe: &MoeSpec, layer: u16, logits: &[f32], bias: &[f32]) -> Vec<ExpertKey> {
    let spec = moe::router(moe);
    let mut ids = vec![0; moe.top_k];
    let mut weights = vec![0.0; moe.top_k];
    // Of each expert, how many rows choose it, and the best place that one gives it.
    let mut found: HashMap<u16, (usize, usize)> = HashMap::new();
    for logits in logits.chunks(moe.experts) {
        route::top_k(logits, bias, moe.top_k, spec, &mut ids, &mut weights);
        for (place, id) in ids.iter().enumerate() {
            let (rows, best) = found.entry(*id).or_insert((0, place));
            *rows += 1;
            *best = place.min(*best);
        }
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_unstable_by_key(|(id, (rows, best))| (std::cmp::Reverse(*rows), *best, *id));
    let keys = found.into_iter();
    keys.map(|(expert, _)| ExpertKey { layer, expert })
        .collect()
}

/// A lease that shows what is in memory and waits for nothing.
struct Here<'a>(&'a dyn CoreLease);

impl CoreLease for Here<'_> {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        self.0.tensor(local_name)
    }

    fn runs(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        self.0.runs_here(local_names, show)
    }
}
