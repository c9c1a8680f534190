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
    /// them once, in the order of ARRIVAL. Dropping it early cancels what has not arrived.
    ///
    /// The order of arrival may not change any result, and does not: each expert's output has its own place, and
    /// places are added up in the router's order.
    fn request(
        &self,
        keys: &[ExpertKey],
    ) -> impl Iterator<Item = Result<(ExpertKey, Self::Lease), Self::Error>>;

    /// A hint that `keys` may be asked for soon. It may be wrong, late or ignored, and may not change any result.
    fn prefetch(&self, keys: &[ExpertKey]) {
        let _ = keys;
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
}

/// One part of the core in memory.
pub trait CoreLease {
    /// The tensor of that name, as `checkpoint` names it within the part: `self_attn.q_proj.weight`.
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>>;
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
