//! A core that is shown in runs of rows, as it comes from a disk: the same bits, and the order that was announced.

use std::sync::Mutex;

use deltafin::checkpoint::Dtype;
use deltafin::kernel::Isa;
use deltafin::model::CoreLease;
use deltafin::model::CoreSupply;
use deltafin::model::CoreTensor;
use deltafin::model::ModelError;
use deltafin::model::Row;
use deltafin::model::order;
use deltafin::terms::CorePart;

use crate::folder::Folder;
use crate::folder::Lease;
use crate::runner::Runner;
use crate::runner::bits;
use crate::runner::row;

/// Shows every matrix in runs of so many rows, and remembers what was asked for.
struct Cut<'a> {
    folder: &'a Folder,
    rows: usize,
    asked: Mutex<Vec<(CorePart, Vec<String>)>>,
}

struct CutLease<'a> {
    cut: &'a Cut<'a>,
    part: CorePart,
    lease: Lease,
}

impl<'a> CoreSupply for &'a Cut<'a> {
    type Lease = CutLease<'a>;
    type Error = ModelError;

    fn core(&self, part: CorePart) -> Result<CutLease<'a>, ModelError> {
        let lease = self.folder.core(part)?;
        Ok(CutLease {
            cut: self,
            part,
            lease,
        })
    }
}

impl CoreLease for CutLease<'_> {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        let tensor = self.lease.tensor(local_name)?;
        // What is no vector may be asked for as a whole only where this was announced.
        let long = tensor.shape.iter().filter(|axis| **axis > 8).count() > 1;
        assert!(!long || local_name == order::WHOLE, "{local_name}");
        Some(tensor)
    }

    fn runs(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        let names = local_names.iter().map(|name| (*name).to_owned()).collect();
        self.cut.asked.lock().unwrap().push((self.part, names));
        let whole: Option<Vec<_>> = local_names.iter().map(|n| self.lease.tensor(n)).collect();
        let whole = whole?;
        let rows = whole[0].shape[0];
        for first in (0..rows).step_by(self.cut.rows) {
            let here = self.cut.rows.min(rows - first);
            let part = |tensor: &CoreTensor<'_>| {
                let width = tensor.bytes.len() / rows;
                tensor.bytes[first * width..(first + here) * width].to_vec()
            };
            let bytes: Vec<Vec<u8>> = whole.iter().map(part).collect();
            let shown: Vec<CoreTensor<'_>> = whole
                .iter()
                .zip(&bytes)
                .map(|(tensor, bytes)| CoreTensor { bytes, ..*tensor })
                .collect();
            show(first, &shown);
        }
        Some(())
    }

    fn rows(&self, local_name: &str, rows: &[usize], bytes: &mut Vec<u8>) -> Option<Dtype> {
        self.lease.rows(local_name, rows, bytes)
    }
}

#[test]
fn a_core_shown_in_runs_of_rows_gives_the_same_bits_in_the_announced_order() {
    for model in ["tiny-k3", "tiny-linear"] {
        for isa in [Isa::Scalar, Isa::best()] {
            let runner = Runner::new(Folder::open(model), isa, 2);
            let ids = [3, 1, 4, 1, 5, 9, 2, 6, 5];
            let mut whole = runner.sequence();
            let wanted = runner.read(&mut whole, &ids, 9);
            let wanted = bits(&wanted, &whole);
            for rows in [1, 7, 64] {
                let cut = Cut {
                    folder: &runner.folder,
                    rows,
                    asked: Mutex::default(),
                };
                let mut sequence = runner.sequence();
                let rows: Vec<Row> = ids.iter().map(|id| row(0, *id)).collect();
                let sweep = runner
                    .model
                    .sweep(&&cut, &runner.folder, &mut [&mut sequence], &rows, &mut ())
                    .unwrap();
                assert!(bits(&sweep, &sequence) == wanted, "{model} {isa:?}");
                let spec = &runner.folder.spec;
                let layers = (0u16..).take(spec.layers.len()).map(CorePart::Layer);
                let announced: Vec<(CorePart, Vec<String>)> = layers
                    .chain([CorePart::Top])
                    .flat_map(|part| {
                        let order = order::order(spec, part);
                        order.into_iter().map(move |names| (part, names))
                    })
                    .collect();
                assert_eq!(*cut.asked.lock().unwrap(), announced, "{model}");
            }
        }
    }
}
