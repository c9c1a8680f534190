//! What a plan will cost: bytes a token by source, and seconds from the rates of disk, link and arithmetic.

use super::plan::MemoryPlan;
use super::shape::Shape;

/// What a sweep's arithmetic takes beside its products, as a part of those: norms, states, routing, and what the threads
/// wait for each other. Measured on models of 1 and 4 GB.
const REST: f64 = 0.15;

/// How fast things move, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Experts read from the store's disk.
    pub disk: f64,
    /// The core read from it, in its pieces.
    pub core_disk: f64,
    /// The link to the hub; `None` where it is not known.
    pub link: Option<f64>,
    /// Core weights computed with, one row at a time.
    pub core: f64,
    /// Expert weights computed with, one row at a time.
    pub experts: f64,
    /// Multiply-adds of the core with many rows at once, a second.
    pub many: f64,
    /// Multiply-adds of experts with some rows each, a second.
    pub many_experts: f64,
}

/// What is already here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored {
    /// Core bytes that the store lacks.
    pub core_missing: u64,
    /// Part of the experts that the disk holds, 0 to 1.
    pub experts_here: f64,
}

/// Bytes by where they come from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moved {
    /// Core from memory.
    pub core_memory: f64,
    /// Core from disk.
    pub core_disk: f64,
    /// Experts from memory.
    pub expert_memory: f64,
    /// Experts from disk.
    pub expert_disk: f64,
    /// Experts from the hub.
    pub expert_hub: f64,
}

/// What a token and a prompt will cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Bytes of one token after the prompt.
    pub token: Moved,
    /// Its seconds; `None` if the link decides and its rate is not known.
    pub seconds: Option<f64>,
    /// Of these, arithmetic.
    pub compute: f64,
    /// Bytes of the whole prompt.
    pub prompt: Moved,
    /// From asking to the first token, with the core on disk.
    pub first_token: Option<f64>,
    /// Before that, once: the missing core over the link.
    pub core_fetch: Option<f64>,
}

/// Predicts what `plan` will cost for a prompt of `prompt` tokens. Experts are taken to be chosen alike: where some are
/// more popular than others, memory and disk hit more often than this says.
pub fn predict(
    shape: &Shape,
    plan: &MemoryPlan,
    rates: &Rates,
    stored: &Stored,
    prompt: usize,
) -> Prediction {
    let sum = Sum {
        shape,
        plan,
        rates,
        stored,
    };
    let (token, compute) = (sum.moved(1.0), sum.one_row());
    let mut all = Moved::default();
    let mut first_token = Some(0.0);
    let mut left = prompt;
    while left > 0 {
        let rows = left.min(plan.prefill_rows);
        left -= rows;
        let mut moved = sum.moved(rows as f64);
        if all == Moved::default() {
            // What is to stay comes from disk once.
            moved.core_disk += std::mem::take(&mut moved.core_memory);
        }
        let compute = sum.sweep(rows as f64);
        first_token = first_token.and_then(|all| Some(all + sum.seconds(&moved, compute)?));
        all.add(&moved);
    }
    let fetch = |link: f64| stored.core_missing as f64 / link;
    Prediction {
        seconds: sum.seconds(&token, compute),
        token,
        compute: compute.all(),
        prompt: all,
        first_token,
        core_fetch: match stored.core_missing {
            0 => Some(0.0),
            _ => rates.link.map(fetch),
        },
    }
}

impl Moved {
    fn add(&mut self, other: &Moved) {
        self.core_memory += other.core_memory;
        self.core_disk += other.core_disk;
        self.expert_memory += other.expert_memory;
        self.expert_disk += other.expert_disk;
        self.expert_hub += other.expert_hub;
    }
}

struct Sum<'a> {
    shape: &'a Shape,
    plan: &'a MemoryPlan,
    rates: &'a Rates,
    stored: &'a Stored,
}

impl Sum<'_> {
    /// What one sweep over `rows` rows moves.
    fn moved(&self, rows: f64) -> Moved {
        let (runs, whole) = self.shape.read_a_sweep();
        let core = (runs + whole) as f64;
        let core_disk = self.plan.streamed as f64;
        // Rows choose apart from each other: some choose the same.
        let total = self.shape.experts() as f64;
        let each = self.shape.experts_a_token() as f64 / total.max(1.0);
        let touched = total * (1.0 - (1.0 - each).powf(rows)) * self.shape.expert_len() as f64;
        let all = self.shape.expert_bytes().max(1) as f64;
        let memory = touched * (self.plan.expert_memory as f64 / all).min(1.0);
        let here = self.stored.experts_here.clamp(0.0, 1.0);
        Moved {
            core_memory: core - core_disk,
            core_disk,
            expert_memory: memory,
            expert_disk: (touched - memory) * here,
            expert_hub: (touched - memory) * (1.0 - here),
        }
    }

    fn expert_bytes(&self) -> f64 {
        (self.shape.experts_a_token() * self.shape.expert_len()) as f64
    }

    /// Arithmetic of one row.
    fn one_row(&self) -> Compute {
        let (runs, whole) = self.shape.read_a_sweep();
        Compute::of(
            (runs + whole) as f64 / self.rates.core,
            self.expert_bytes() / self.rates.experts,
        )
    }

    /// Arithmetic of a sweep over `rows` rows: no faster than its weights come from memory.
    fn sweep(&self, rows: f64) -> Compute {
        let (runs, whole) = self.shape.read_a_sweep();
        let packed = self.shape.spec.experts_packed;
        let expert_values = self.expert_bytes() * if packed { 32.0 / 17.0 } else { 0.5 };
        let many = Compute::of(
            rows * (runs + whole) as f64 / 2.0 / self.rates.many,
            rows * expert_values / self.rates.many_experts,
        );
        let one = self.one_row();
        Compute {
            core: one.core.max(many.core),
            experts: one.experts.max(many.experts),
        }
    }

    /// The core is read under the arithmetic; experts can only be read once they are chosen, under their own arithmetic
    /// and no other. So a sweep takes as long as its disk, which stands still once the ring is full and the layer's core
    /// is still computed with; or as its arithmetic with the wait for experts.
    fn seconds(&self, moved: &Moved, compute: Compute) -> Option<f64> {
        let link = match moved.expert_hub {
            hub if hub < 1.0 => 0.0,
            hub => hub / self.rates.link?,
        };
        let experts = moved.expert_disk / self.rates.disk;
        let layers = self.shape.spec.layers.len().max(1) as f64;
        let ahead = self.plan.ring as f64 / self.rates.core_disk;
        let idle = (compute.core / layers - ahead).max(0.0) * layers;
        let disk = match moved.core_disk {
            streamed if streamed < 1.0 => experts,
            streamed => experts + streamed / self.rates.core_disk + idle,
        };
        let chain = compute.core + compute.experts.max(experts.max(link));
        Some(disk.max(link).max(chain))
    }
}

/// Seconds of arithmetic.
#[derive(Clone, Copy, Debug)]
struct Compute {
    core: f64,
    experts: f64,
}

impl Compute {
    /// From those of the products.
    fn of(core: f64, experts: f64) -> Compute {
        Compute {
            core: core * (1.0 + REST),
            experts: experts * (1.0 + REST),
        }
    }

    fn all(self) -> f64 {
        self.core + self.experts
    }
}
