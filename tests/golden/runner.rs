//! Runs prompts through a model, in every way a prompt can be cut.

use std::collections::BTreeMap;
use std::sync::Arc;

use deltafin::kernel::Isa;
use deltafin::kernel::Kernel;
use deltafin::model::LayerRoutes;
use deltafin::model::Model;
use deltafin::model::Row;
use deltafin::model::Sequence;
use deltafin::model::Sweep;
use deltafin::model::Watch;

use crate::folder::Folder;

/// A model and where its weights come from.
pub(crate) struct Runner {
    pub(crate) folder: Folder,
    pub(crate) model: Model,
}

impl Runner {
    pub(crate) fn new(folder: Folder, isa: Isa, threads: usize) -> Runner {
        let model = Model::new(Arc::clone(&folder.spec), Kernel::new(isa, threads));
        Runner { folder, model }
    }

    pub(crate) fn open(path: &str) -> Runner {
        Runner::new(Folder::open(path), Isa::best(), 2)
    }

    pub(crate) fn sequence(&self) -> Sequence {
        Sequence::new(&self.folder.spec)
    }

    pub(crate) fn sweep(
        &self,
        sequences: &mut [&mut Sequence],
        rows: &[Row],
        watch: &mut dyn Watch,
    ) -> Sweep {
        self.model
            .sweep(&self.folder, &self.folder, sequences, rows, watch)
            .unwrap()
    }

    /// Takes `ids` in with sweeps of at most `rows` rows; asks for every distribution.
    pub(crate) fn read(&self, sequence: &mut Sequence, ids: &[u32], rows: usize) -> Sweep {
        let mut whole = Sweep::default();
        for ids in ids.chunks(rows) {
            let rows: Vec<Row> = ids.iter().map(|id| row(0, *id)).collect();
            append(&mut whole, self.sweep(&mut [sequence], &rows, &mut ()));
        }
        whole
    }

    /// Continues greedily: the ids, the distribution each was taken from, and the routes while each was processed.
    /// Ends after `steps` ids or with one of `stops`, which is not processed.
    pub(crate) fn greedy(
        &self,
        sequence: &mut Sequence,
        first: &[f32],
        steps: usize,
        stops: &[u32],
    ) -> (Vec<u32>, Vec<f32>, Sweep) {
        let (mut ids, mut rows, mut whole) = (Vec::new(), Vec::new(), Sweep::default());
        let mut logits = first.to_vec();
        while ids.len() < steps {
            let id = best(&logits);
            rows.extend_from_slice(&logits);
            ids.push(id);
            if stops.contains(&id) {
                break;
            }
            let sweep = self.sweep(&mut [sequence], &[row(0, id)], &mut ());
            logits = sweep.logits.clone();
            append(&mut whole, sweep);
        }
        (ids, rows, whole)
    }
}

pub(crate) fn row(sequence: usize, token: u32) -> Row {
    Row {
        sequence,
        token,
        logits: true,
    }
}

pub(crate) fn best(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best.try_into().unwrap()
}

/// Adds a later sweep of the same sequence to what is there.
pub(crate) fn append(whole: &mut Sweep, sweep: Sweep) {
    whole.logits.extend(sweep.logits);
    if whole.routes.is_empty() {
        whole.routes = sweep.routes;
        return;
    }
    for (routes, new) in whole.routes.iter_mut().zip(sweep.routes) {
        assert_eq!(routes.layer, new.layer);
        routes.experts.extend(new.experts);
        routes.weights.extend(new.weights);
    }
}

/// Everything a sweep leaves, to the bit: distributions, routes and the sequence's state.
pub(crate) fn bits(sweep: &Sweep, sequence: &Sequence) -> Vec<u32> {
    let routes = |r: &LayerRoutes| {
        let ids = r.experts.iter().map(|e| u32::from(*e));
        ids.chain(r.weights.iter().map(|w| w.to_bits()))
            .collect::<Vec<_>>()
    };
    let mut bits: Vec<u32> = sweep.logits.iter().map(|x| x.to_bits()).collect();
    bits.extend(sweep.routes.iter().flat_map(routes));
    bits.extend(
        sequence
            .slices()
            .flat_map(|slice| slice.values)
            .map(|x| x.to_bits()),
    );
    bits
}

/// Keeps every intermediate value, under its golden's name.
#[derive(Default)]
pub(crate) struct Taps(pub(crate) BTreeMap<String, Vec<f32>>);

impl Watch for Taps {
    fn taps(&self) -> bool {
        true
    }

    fn tap(&mut self, layer: Option<u16>, name: &'static str, values: &[f32]) {
        let name = match layer {
            Some(layer) => format!("L{layer}.{name}"),
            None => name.to_owned(),
        };
        let twice = self.0.insert(name.clone(), values.to_vec());
        assert!(twice.is_none(), "{name} came twice");
    }
}
