//! The ports between arithmetic and machinery: where weights come from and who watches.
//!
//! Declared by the room that needs them; `residency` implements them, tests implement them with a map. The forward
//! pass cannot tell memory from disk from network, and must not.

use std::time::Duration;

use crate::checkpoint::Dtype;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

/// Where the forward pass gets routed experts.
pub trait ExpertSupply: Sync {
    /// Weights that stay put while borrowed: the bytes of one expert, w1, w2, w3, packed codes before scales.
    type Lease: AsRef<[u8]>;
    /// What can go wrong on the way.
    type Error;

    /// Starts moving `keys` towards memory and returns at once; the iterator then waits for them and yields each of
    /// them once, in the order of ARRIVAL. Dropping it early cancels what has not arrived. After an error it goes on
    /// with the others, or ends.
    ///
    /// The keys come in the order in which they are best brought: first those that most rows need.
    ///
    /// The order of arrival may not change any result, and does not: each expert's output has its own place, and
    /// places are added up in the router's order.
    fn request(
        &self,
        keys: &[ExpertKey],
    ) -> impl Iterator<Item = Result<(ExpertKey, Self::Lease), Self::Error>>;

    /// Whether the expert lies in memory, and will as long as no other is requested: its arrival then takes no time and
    /// its lease no memory. It may not change any result.
    fn at_hand(&self, key: ExpertKey) -> bool {
        let _ = key;
        false
    }

    /// Shows what the second half of `layer` reads, `x` `[rows, hidden]` before its norm, to whoever guesses from it what
    /// the next layer will ask for. Returns at once, and may not change any result.
    fn foresee(&self, layer: u16, x: &[f32]) {
        let _ = (layer, x);
    }
}

/// Where the forward pass gets everything else.
pub trait CoreSupply: Sync {
    /// One part of the core, in memory while held.
    type Lease: CoreLease;
    /// What can go wrong on the way.
    type Error;

    /// Blocks until the part is in memory. Called for each layer from the bottom, in every sweep, and for the top part
    /// before the first and after the last layer.
    fn core(&self, part: CorePart) -> Result<Self::Lease, Self::Error>;

    /// Why a lease has answered `None` for a tensor that its part has. Asked once, after the sweep that failed by it.
    fn failure(&self) -> Option<Self::Error> {
        None
    }
}

/// One part of the core in memory.
pub trait CoreLease {
    /// The tensor of that name, as `checkpoint` names it within the part: `self_attn.q_proj.weight`.
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>>;

    /// Shows matrices of one shape in runs of whole rows from the first row to the last: `show(first, parts)` is given
    /// the same rows of each of `local_names`, which are gone when it returns. `None` if one is missing.
    ///
    /// This is how a part that is larger than the memory for it is read. [`order`](super::order) says which matrices
    /// the pass reads so, and when.
    fn runs(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        let whole = local_names.iter().map(|name| self.tensor(name));
        show(0, &whole.collect::<Option<Vec<_>>>()?);
        Some(())
    }

    /// Shows matrices as [`CoreLease::runs`] does if all of them are in memory this moment. `None`, and at once, if not:
    /// nothing is read or waited for.
    fn runs_here(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        let _ = (local_names, show);
        None
    }

    /// Copies those rows of a matrix, one after the other, into `bytes`, and answers their type. `None` if it is
    /// missing or has no such row.
    fn rows(&self, local_name: &str, rows: &[usize], bytes: &mut Vec<u8>) -> Option<Dtype> {
        let tensor = self.tensor(local_name)?;
        let width = tensor.bytes.len().checked_div(*tensor.shape.first()?)?;
        bytes.clear();
        for row in rows {
            bytes.extend_from_slice(tensor.bytes.get(row * width..(row + 1) * width)?);
        }
        Some(tensor.dtype)
    }
}

/// A tensor of the core as it lies in memory: dense, row-major, little-endian, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct CoreTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost first.
    pub shape: &'a [usize],
    /// The values.
    pub bytes: &'a [u8],
}

/// What a sweep waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// A part of the core.
    Core,
    /// Routed experts.
    Experts,
}

/// Follows a sweep. Every method may do nothing.
pub trait Watch: Send {
    /// The sweep turns to this layer.
    fn layer(&mut self, layer: u16) {
        let _ = layer;
    }

    /// The sweep stood still for so long; the rest of its time is arithmetic.
    fn waited(&mut self, what: Waited, time: Duration) {
        let _ = (what, time);
    }

    /// Whether nobody wants this sequence's rows any more. Asked before each layer: its rows then choose no more
    /// experts, and it ends poisoned.
    fn left(&self, sequence: usize) -> bool {
        let _ = sequence;
        false
    }

    /// Whether [`Watch::tap`] is to be called at all.
    fn taps(&self) -> bool {
        false
    }

    /// An intermediate value of all rows, `[n, ..]`, named as the goldens name it: of a layer, or of the sweep.
    fn tap(&mut self, layer: Option<u16>, name: &'static str, values: &[f32]) {
        let _ = (layer, name, values);
    }
}

/// Nobody watches.
impl Watch for () {}
