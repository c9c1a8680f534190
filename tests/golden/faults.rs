//! What the forward pass does when its supplies misbehave.

use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;

use deltafin::checkpoint::Dtype;
use deltafin::kernel::Isa;
use deltafin::model::CoreLease;
use deltafin::model::CoreSupply;
use deltafin::model::CoreTensor;
use deltafin::model::ExpertSupply;
use deltafin::model::ModelError;
use deltafin::model::Row;
use deltafin::model::Sequence;
use deltafin::terms::CorePart;
use deltafin::terms::ExpertKey;

use crate::folder::Folder;
use crate::folder::Lease;
use crate::runner::Runner;
use crate::runner::row;

/// What goes wrong, always in layer 4.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Nothing.
    None,
    /// The last expert of a request never comes.
    ExpertMissing,
    /// Each expert comes twice.
    ExpertTwice,
    /// An expert nobody asked for comes first.
    ExpertUnasked,
    /// An expert lacks its last byte.
    ExpertShort,
    /// The supply itself fails.
    SupplyFails,
    /// A tensor of the core is not there.
    CoreMissing,
    /// A tensor of the core has fewer bytes than its shape.
    CoreShort,
    /// A tensor of the core is of another type.
    CoreDtype,
}

struct Faulty<'a>(&'a Folder, Fault);

#[derive(Debug, PartialEq)]
enum Failure {
    Model(ModelError),
    Supply,
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Failure::Model(error)
    }
}

const LAYER: u16 = 4;

impl ExpertSupply for Faulty<'_> {
    type Lease = Vec<u8>;
    type Error = Failure;

    fn request(
        &self,
        keys: &[ExpertKey],
    ) -> impl Iterator<Item = Result<(ExpertKey, Vec<u8>), Failure>> {
        let mut come: Vec<_> = self
            .0
            .request(keys)
            .map(|arrival| arrival.map_err(Failure::Model))
            .collect();
        let unasked = (0..16).map(|expert| ExpertKey {
            layer: LAYER,
            expert,
        });
        let unasked = unasked.into_iter().find(|key| !keys.contains(key));
        match self.1 {
            _ if keys[0].layer != LAYER => {}
            Fault::ExpertMissing => drop(come.pop()),
            Fault::ExpertTwice => come.insert(1, Ok((keys[0], Vec::new()))),
            Fault::ExpertUnasked => come.insert(0, Ok((unasked.unwrap(), Vec::new()))),
            Fault::ExpertShort => drop(come[0].as_mut().unwrap().1.pop()),
            Fault::SupplyFails => come.insert(1, Err(Failure::Supply)),
            _ => {}
        }
        come.into_iter()
    }

    fn at_hand(&self, key: ExpertKey) -> bool {
        self.0.at_hand(key)
    }
}

struct FaultyLease(Lease, Fault);

impl CoreSupply for Faulty<'_> {
    type Lease = FaultyLease;
    type Error = Failure;

    fn core(&self, part: CorePart) -> Result<FaultyLease, Failure> {
        let fault = match part {
            CorePart::Layer(LAYER) => self.1,
            _ => Fault::None,
        };
        Ok(FaultyLease(self.0.core(part)?, fault))
    }
}

impl CoreLease for FaultyLease {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        let mut tensor = self.0.tensor(local_name)?;
        match self.1 {
            _ if local_name != "self_attn.o_proj.weight" => {}
            Fault::CoreMissing => return None,
            Fault::CoreShort => tensor.bytes = &tensor.bytes[1..],
            Fault::CoreDtype => tensor.dtype = Dtype::F16,
            _ => {}
        }
        Some(tensor)
    }
}

/// Sweeps two tokens of the second of two sequences, after both took some in.
fn sweep(runner: &Runner, fault: Fault) -> (Result<(), Failure>, Sequence, Sequence) {
    let (mut idle, mut busy) = (runner.sequence(), runner.sequence());
    runner.read(&mut idle, &[1, 2], 2);
    runner.read(&mut busy, &[3, 4, 5], 3);
    let faulty = Faulty(&runner.folder, fault);
    let rows = [row(1, 6), row(1, 7)];
    let outcome = runner.model.sweep(
        &faulty,
        &faulty,
        &mut [&mut idle, &mut busy],
        &rows,
        &mut (),
    );
    (outcome.map(|_| ()), idle, busy)
}

#[test]
fn what_a_supply_gets_wrong_is_an_error_with_its_name() {
    let runner = Runner::new(Folder::open("tiny-k3"), Isa::best(), 2);
    let (outcome, ..) = sweep(&runner, Fault::None);
    assert_eq!(outcome, Ok(()));
    let core = |found: &str| {
        let error = ModelError::Core {
            part: CorePart::Layer(LAYER),
            tensor: "self_attn.o_proj.weight".to_owned(),
            found: found.to_owned(),
            expected: "BF16 or F32 [128, 96]".to_owned(),
        };
        Some(Failure::Model(error))
    };
    for (fault, wanted) in [
        (Fault::ExpertMissing, None),
        (Fault::ExpertTwice, None),
        (Fault::ExpertUnasked, None),
        (Fault::ExpertShort, None),
        (Fault::SupplyFails, Some(Failure::Supply)),
        (Fault::CoreMissing, core("missing")),
        (Fault::CoreShort, core("BF16 [128, 96] in 24575 bytes")),
        (Fault::CoreDtype, core("F16 [128, 96]")),
    ] {
        let (outcome, idle, busy) = sweep(&runner, fault);
        let failure = outcome.unwrap_err();
        match (fault, &failure) {
            (Fault::ExpertMissing, Failure::Model(ModelError::ExpertMissing { key })) => {
                assert_eq!(key.layer, LAYER)
            }
            (Fault::ExpertTwice, Failure::Model(ModelError::ExpertUnasked { key })) => {
                assert_eq!(key.layer, LAYER)
            }
            (Fault::ExpertUnasked, Failure::Model(ModelError::ExpertUnasked { key })) => {
                assert_eq!(key.layer, LAYER)
            }
            (
                Fault::ExpertShort,
                Failure::Model(ModelError::ExpertLength {
                    found, expected, ..
                }),
            ) => {
                assert_eq!(found + 1, *expected);
            }
            _ => assert_eq!(Some(failure), wanted, "{fault:?}"),
        }
        assert!(
            busy.poisoned() && busy.len() == 3,
            "{fault:?}: half of the layers took its tokens in"
        );
        assert!(
            !idle.poisoned() && idle.len() == 2,
            "{fault:?}: a sequence without rows is as it was"
        );
    }
}

#[test]
fn a_token_outside_the_vocabulary_harms_nothing() {
    let runner = Runner::open("tiny-k3");
    let mut sequence = runner.sequence();
    runner.read(&mut sequence, &[3, 4, 5], 3);
    let rows = [row(0, 6), row(0, 512)];
    let outcome = runner.model.sweep(
        &runner.folder,
        &runner.folder,
        &mut [&mut sequence],
        &rows,
        &mut (),
    );
    assert_eq!(
        outcome.unwrap_err(),
        ModelError::NoSuchToken {
            token: 512,
            vocab: 512
        }
    );
    assert!(!sequence.poisoned() && sequence.len() == 3);
    let sweep = runner.sweep(&mut [&mut sequence], &[], &mut ());
    assert!(
        sweep.logits.is_empty() && sweep.routes.is_empty(),
        "no rows, no work"
    );
}

#[test]
fn our_own_mistakes_are_found_before_they_compute_nonsense() {
    let runner = Runner::open("tiny-k3");
    let other = Folder::open("tiny-linear");
    let panics = |sequences: &mut [&mut Sequence], rows: &[Row]| {
        let run = || runner.sweep(sequences, rows, &mut ());
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        panic.downcast_ref::<String>().cloned().unwrap_or_default()
    };
    let (mut a, mut b) = (runner.sequence(), runner.sequence());
    let apart = panics(&mut [&mut a, &mut b], &[row(0, 1), row(1, 1), row(0, 2)]);
    assert!(apart.contains("stand apart"), "{apart}");
    let foreign = panics(&mut [&mut Sequence::new(&other.spec)], &[row(0, 1)]);
    assert!(foreign.contains("another model"), "{foreign}");
    let (_, _, mut poisoned) = sweep(&runner, Fault::SupplyFails);
    let again = panics(&mut [&mut poisoned], &[row(0, 1)]);
    assert!(again.contains("poisoned"), "{again}");
}

/// Brings everything but one expert, whose request it answers with an error, at the place that it would have come in.
struct Lacking<'a>(&'a Folder, ExpertKey);

impl ExpertSupply for Lacking<'_> {
    type Lease = Vec<u8>;
    type Error = Failure;

    fn request(
        &self,
        keys: &[ExpertKey],
    ) -> impl Iterator<Item = Result<(ExpertKey, Vec<u8>), Failure>> {
        let lacks = self.1;
        let come = self.0.request(keys).map(move |arrival| match arrival {
            Ok((key, _)) if key == lacks => Err(Failure::Supply),
            other => other.map_err(Failure::Model),
        });
        come.collect::<Vec<_>>().into_iter()
    }

    fn at_hand(&self, key: ExpertKey) -> bool {
        self.0.at_hand(key)
    }
}

impl CoreSupply for Lacking<'_> {
    type Lease = Lease;
    type Error = Failure;

    fn core(&self, part: CorePart) -> Result<Lease, Failure> {
        Ok(self.0.core(part)?)
    }
}

/// Leaves the third sequence's rows in the lurch at a layer.
struct Leaves(u16, std::sync::atomic::AtomicU64);

impl deltafin::model::Watch for Leaves {
    fn layer(&mut self, layer: u16) {
        self.1
            .store(layer.into(), std::sync::atomic::Ordering::Relaxed);
    }

    fn left(&self, sequence: usize) -> bool {
        sequence == 2 && self.1.load(std::sync::atomic::Ordering::Relaxed) >= self.0.into()
    }
}

#[test]
fn what_happens_to_one_sequence_of_a_sweep_harms_no_other() {
    let runner = Runner::open("tiny-k3");
    let vocab = runner.folder.spec.vocab;
    let top_k = runner.folder.spec.moe.as_ref().unwrap().top_k;
    let texts: Vec<Vec<u32>> = (0..4)
        .map(|n| (0..5).map(|i| n * 31 + i * 7).collect())
        .collect();
    let alone: Vec<_> = texts
        .iter()
        .map(|ids| {
            let mut sequence = runner.sequence();
            let sweep = runner.read(&mut sequence, ids, usize::MAX);
            (crate::runner::bits(&sweep, &sequence), sweep)
        })
        .collect();
    let chose = |sequence: usize, key: ExpertKey| {
        let mut routes = alone[sequence].1.routes.iter();
        let routes = routes.find(|r| r.layer == key.layer).unwrap();
        routes.experts.contains(&key.expert)
    };
    let mut partly = 0;
    for key in runner.folder.spec.expert_keys().step_by(7) {
        let mut sequences: Vec<Sequence> = texts.iter().map(|_| runner.sequence()).collect();
        let rows: Vec<Row> = (0..4)
            .flat_map(|n| texts[n].iter().map(move |id| row(n, *id)))
            .collect();
        let supply = Lacking(&runner.folder, key);
        let mut borrowed: Vec<&mut Sequence> = sequences.iter_mut().collect();
        let mut leaves = Leaves(2, 0.into());
        let swept = runner
            .model
            .sweep_shared(&supply, &supply, &mut borrowed, &rows, &mut leaves);
        // One that has left by then asks for nothing any more.
        let lost = |n: usize| n == 2 || chose(n, key);
        let lost: Vec<usize> = (0..4).filter(|n| lost(*n)).collect();
        let Ok(shared) = swept else {
            assert_eq!(lost.len(), 4, "{key}: somebody could have gone on");
            continue;
        };
        assert_eq!(shared.lost, lost, "{key}");
        let failed = lost.len() > 1 || (chose(2, key) && key.layer < 2);
        assert_eq!(shared.failure, failed.then_some(Failure::Supply), "{key}");
        partly += usize::from(lost.len() > 1);
        for (n, sequence) in sequences.iter().enumerate() {
            assert_eq!(sequence.poisoned(), lost.contains(&n), "{key}");
            if lost.contains(&n) {
                continue;
            }
            let mut mine = shared.sweep.clone();
            mine.logits = mine.logits[n * 5 * vocab..][..5 * vocab].to_vec();
            for routes in &mut mine.routes {
                routes.experts = routes.experts[n * 5 * top_k..][..5 * top_k].to_vec();
                routes.weights = routes.weights[n * 5 * top_k..][..5 * top_k].to_vec();
            }
            assert!(
                crate::runner::bits(&mine, sequence) == alone[n].0,
                "{key}: {n}"
            );
        }
    }
    assert!(
        partly > 3,
        "{partly} experts were needed by some and not by all"
    );
}
