//! Who gets the memory: a pure function of sizes, told before anything is allocated.
//!
//! A core that does not fit is a cyclic scan, on which every cache that keeps the most recent hits nothing. So nothing
//! of it is cached: a fixed part is pinned and the rest passes through a small ring of buffers. In order of worth:
//!
//! ```text
//! must    program, sequence states, widened vectors, activations, buffers of reads under way
//! first   pinned core      a byte here saves a byte of disk in every sweep
//! then    expert memory    a byte here saves a byte when its expert is chosen again
//! ```

use super::lookahead::Lookahead;
use super::shape::Piece;
use super::shape::Shape;
use crate::checkpoint::CORE_ALIGN;
use crate::model::Sequence;

/// What the program takes before any model: code, heap, stacks.
const PROGRAM: u64 = 24_000_000;
/// What each thread takes.
const THREAD: u64 = 500_000;
/// Activations, core buffers and expert buffers get at most one part in so many of the memory each: what they take is
/// read again for every token. (A twenty-fourth each read a fifth more, and was no faster.)
const PART: u64 = 48;
/// States that take turns get at most one part in so many: more of them at once share each sweep of the
/// core, but what they take of it is read again in every sweep.
const STATES_PART: u64 = 8;
/// Most rows of a prompt in one sweep. Each expert is fetched and decoded once for all of them.
const ROWS_MAX: usize = 512;
/// Fewest: below this a prompt costs more than the memory is worth.
const ROWS_MIN: usize = 16;
/// Most experts under way or arrived and not yet used. Above the hub's 16 lanes, so that no lane idles.
const WINDOW_MAX: usize = 24;
/// Fewest: one at work, one arrived, two on the way.
const WINDOW_MIN: usize = 4;
/// Experts that may wait for the disk beside those.
const BEHIND_MAX: usize = 8;
/// Largest piece of the core that is read at once.
const PIECE_MAX: u64 = 16 << 20;
/// Smallest; already far below this a disk's rate suffers.
const PIECE_MIN: u64 = 64 << 10;
/// More than this ahead hides nothing further: it is longer than a layer's arithmetic on any disk.
const RING_MAX: u64 = 512 << 20;

/// How the core is held, if somebody insists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CoreChoice {
    /// As the budget allows: mapped if all fits, else pinned and read.
    #[default]
    Auto,
    /// Mapped whatever the budget: the kernel pages.
    Mapped,
    /// Pinned and read, even if all fits.
    Read,
}

/// What memory is needed for. The default is no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demand {
    /// Bytes of memory that may be used; `None` for as much as there is.
    pub budget: Option<u64>,
    /// Threads for arithmetic.
    pub threads: usize,
    /// Tokens of one sequence.
    pub context: usize,
    /// Sequences at once.
    pub sequences: usize,
    /// States take turns, by way of the disk, and are kept for later texts: they get twice what
    /// `sequences` would, one part in so many of the budget at most, and what one needs at least.
    pub taking_turns: bool,
    /// How the core is held.
    pub core: CoreChoice,
    /// Whether experts are read ahead on a guess, for which some memory is then kept.
    pub lookahead: Lookahead,
}

/// What a line of the plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Code, heap and threads.
    Program,
    /// The sequences' states.
    Sequences,
    /// Vectors of the core, widened once.
    Vectors,
    /// Values between layers.
    Activations,
    /// Core pieces read ahead.
    CoreBuffers,
    /// Experts under way.
    ExpertBuffers,
    /// Core that stays.
    PinnedCore,
    /// Experts read on a guess, until it is known whether they are wanted.
    Foreseen,
    /// Experts that stay.
    ExpertMemory,
}

impl Share {
    /// As people say it.
    pub fn name(self) -> &'static str {
        match self {
            Share::Program => "program",
            Share::Sequences => "sequence state",
            Share::Vectors => "vectors of the core",
            Share::Activations => "activations",
            Share::CoreBuffers => "core read ahead",
            Share::ExpertBuffers => "experts under way",
            Share::PinnedCore => "core in memory",
            Share::Foreseen => "experts read on a guess",
            Share::ExpertMemory => "experts in memory",
        }
    }
}

/// One line of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanLine {
    /// What for.
    pub share: Share,
    /// Bytes of memory.
    pub bytes: u64,
    /// Why so many.
    pub reason: String,
}

/// Who gets the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// What there was to divide; `None` is no limit.
    pub budget: Option<u64>,
    /// What goes where, in order of worth.
    pub lines: Vec<PlanLine>,
    /// Bytes by which the least that works exceeds the budget; 0 where it does not.
    pub short: u64,
    /// The core is mapped from its files, not read.
    pub mapped: bool,
    /// Core bytes that every sweep reads from disk.
    pub streamed: u64,
    /// Core bytes that stay in memory.
    pub pinned: u64,
    /// Most bytes of a piece of the core.
    pub piece: u64,
    /// Bytes of the largest piece that passes by, and of each buffer for one.
    pub(super) largest: u64,
    /// Bytes of the ring through which the core passes.
    pub ring: u64,
    /// Most rows of a prompt in one sweep.
    pub prefill_rows: usize,
    /// Experts under way at once.
    pub window: usize,
    /// Experts that may wait to be written.
    pub behind: usize,
    /// Bytes of experts that stay in memory.
    pub expert_memory: u64,
    /// Experts read on a guess at once; 0 where none are.
    pub foreseen: usize,
    /// Tensors that are read as a whole stay in memory.
    pub whole_pinned: bool,
    /// What was there for pieces of the core.
    pub(super) pin_room: u64,
}

impl MemoryPlan {
    /// Divides the memory. Never refuses: where even the least does not fit, [`MemoryPlan::short`] says by how much.
    pub fn new(shape: &Shape, demand: &Demand) -> MemoryPlan {
        let mut plan = MemoryPlan::least(shape, demand);
        let (runs, whole) = shape.read_a_sweep();
        let fixed: u64 = plan.lines.iter().map(|line| line.bytes).sum();
        let all = shape.core_bytes() + shape.expert_bytes();
        let room = demand.budget.map(|budget| budget.saturating_sub(fixed));
        let all_fits = room.is_none_or(|room| all <= room);
        plan.mapped = match demand.core {
            CoreChoice::Auto => all_fits,
            CoreChoice::Mapped => true,
            CoreChoice::Read => false,
        };
        if plan.mapped {
            plan.hold_mapped(shape, room);
        } else {
            plan.divide(shape, demand, (runs, whole));
        }
        let used: u64 = plan.lines.iter().map(|line| line.bytes).sum();
        let over = demand.budget.map(|budget| used.saturating_sub(budget));
        if !plan.mapped {
            plan.short = over.unwrap_or(0);
        }
        plan
    }

    /// What must be there whatever happens to the core.
    fn least(shape: &Shape, demand: &Demand) -> MemoryPlan {
        let spec = &shape.spec;
        let budget = demand.budget.unwrap_or(u64::MAX);
        let row = row_bytes(shape);
        let rows = usize::try_from(budget / PART / row).unwrap_or(usize::MAX);
        // A power of two: the same bits either way, but sweeps that are easy to compare.
        let rows = 1 << rows.clamp(ROWS_MIN, ROWS_MAX).ilog2();
        let each = shape.expert_len.max(1);
        let window = usize::try_from(budget / PART / each).unwrap_or(usize::MAX);
        let window = window.clamp(WINDOW_MIN, WINDOW_MAX);
        let behind = (window / 4).clamp(1, BEHIND_MAX);
        let (context, sequences) = (demand.context, demand.sequences.max(1));
        let state = Sequence::bytes(spec, context);
        let all = state.saturating_mul(sequences as u64);
        let (states, states_are) = if demand.taking_turns {
            let most = (budget / STATES_PART).max(state);
            let reason = format!("{sequences} of {context} tokens, taking turns, and earlier ones");
            (all.saturating_mul(2).min(most), reason)
        } else {
            (all, format!("{sequences} of {context} tokens"))
        };
        let logits = 8 * spec.vocab as u64 * sequences as u64;
        let threads = demand.threads as u64;
        let line = |share, bytes, reason| PlanLine {
            share,
            bytes,
            reason,
        };
        let mut lines = vec![
            line(
                Share::Program,
                PROGRAM + threads * THREAD,
                format!("code, heap and {threads} threads"),
            ),
            line(Share::Sequences, states, states_are),
            line(
                Share::Vectors,
                shape.parts.iter().map(|part| part.vectors).sum(),
                "norms and the like, widened once".to_owned(),
            ),
            line(
                Share::Activations,
                row * rows as u64 + logits,
                format!("a prompt in sweeps of {rows} rows"),
            ),
        ];
        if shape.expert_len > 0 {
            lines.push(line(
                Share::ExpertBuffers,
                (window + behind) as u64 * shape.expert_len,
                format!("{window} read or fetched at once, {behind} being written"),
            ));
        }
        MemoryPlan {
            budget: demand.budget,
            lines,
            short: 0,
            mapped: false,
            streamed: 0,
            pinned: 0,
            piece: PIECE_MAX,
            largest: 0,
            ring: 0,
            prefill_rows: rows,
            window,
            behind,
            expert_memory: 0,
            foreseen: 0,
            whole_pinned: true,
            pin_room: u64::MAX,
        }
    }

    fn hold_mapped(&mut self, shape: &Shape, room: Option<u64>) {
        let core = shape.core_bytes();
        self.pinned = core;
        self.lines.push(PlanLine {
            share: Share::PinnedCore,
            bytes: core,
            reason: "all of it, mapped from its files".to_owned(),
        });
        let experts = shape.expert_bytes();
        let room = room.map_or(experts, |room| room.saturating_sub(core).min(experts));
        self.give_experts(shape, room);
    }

    /// Pins what it can, streams the rest, and keeps experts in what is left.
    fn divide(&mut self, shape: &Shape, demand: &Demand, (runs, whole): (u64, u64)) {
        let budget = demand.budget;
        let fixed: u64 = self.lines.iter().map(|line| line.bytes).sum();
        let room = budget.map_or(u64::MAX, |budget| budget.saturating_sub(fixed));
        self.whole_pinned = whole <= room / 2;
        let whole_here = if self.whole_pinned {
            whole
        } else {
            largest_whole(shape)
        };
        let mut room = room.saturating_sub(whole_here);
        if runs > room {
            let share = budget.unwrap_or(u64::MAX) / PART;
            self.piece = (share / 4).clamp(PIECE_MIN, PIECE_MAX) / CORE_ALIGN * CORE_ALIGN;
            let pieces = shape.pieces(self.piece_len());
            let largest = pieces.iter().map(|piece| piece.bytes as u64).max();
            let largest = largest.unwrap_or(0);
            let buffers = (share.min(RING_MAX) / largest.max(1)).max(3);
            self.ring = buffers * largest;
            self.largest = largest;
            room = room.saturating_sub(self.ring);
            self.lines.push(PlanLine {
                share: Share::CoreBuffers,
                bytes: self.ring,
                reason: format!(
                    "pieces of {} MB, read ahead of the arithmetic",
                    self.piece >> 20
                ),
            });
            self.pin_room = room;
            let pins = self.pins(shape, &pieces, room);
            let held = pieces.iter().zip(&pins).filter(|(_, pin)| **pin);
            self.pinned = held.map(|(piece, _)| piece.bytes as u64).sum();
            self.streamed = pieces.iter().map(|p| p.bytes as u64).sum::<u64>() - self.pinned;
            // What is left over is less than a piece, or than pins can use.
            room = room.saturating_sub(self.pinned);
        } else {
            self.pinned = runs;
            room -= runs;
        }
        if self.whole_pinned {
            self.pinned += whole;
        } else {
            self.streamed += whole;
        }
        let reason = match self.streamed {
            0 => "all that a token reads".to_owned(),
            streamed => format!(
                "the other {} MB are read for every token",
                streamed / 1_000_000
            ),
        };
        self.lines.push(PlanLine {
            share: Share::PinnedCore,
            bytes: self.pinned + if self.whole_pinned { 0 } else { whole_here },
            reason,
        });
        if demand.lookahead != Lookahead::Off && room < shape.expert_bytes() {
            room = self.foresee(shape, room);
        }
        self.give_experts(shape, room.min(shape.expert_bytes()));
    }

    /// Keeps memory for what one layer uses to be read on a guess, at most half of it; answers what is left.
    fn foresee(&mut self, shape: &Shape, room: u64) -> u64 {
        let half = room / 2 / shape.expert_len.max(1);
        let top_k = shape.spec.moe.as_ref().map_or(0, |moe| moe.top_k);
        self.foreseen = top_k.min(usize::try_from(half).unwrap_or(usize::MAX));
        let bytes = self.foreseen as u64 * shape.expert_len;
        if bytes > 0 {
            self.lines.push(PlanLine {
                share: Share::Foreseen,
                bytes,
                reason: format!("{}, of the next layer", self.foreseen),
            });
        }
        room - bytes
    }

    fn give_experts(&mut self, shape: &Shape, room: u64) {
        if shape.expert_len == 0 {
            return;
        }
        let count = room / shape.expert_len;
        self.expert_memory = count * shape.expert_len;
        self.lines.push(PlanLine {
            share: Share::ExpertMemory,
            bytes: self.expert_memory,
            reason: format!("{count} of {}", shape.experts()),
        });
    }

    pub(super) fn piece_len(&self) -> usize {
        usize::try_from(self.piece).unwrap_or(usize::MAX)
    }

    /// Which pieces stay in memory, of `room` bytes. First the small ones, each of which would take a buffer as a large
    /// one does, and the routers. Then some of the large, spread evenly, so that the disk has something to do at any
    /// time and the arithmetic never meets a long stretch of either kind.
    fn pins(&self, shape: &Shape, pieces: &[Piece], room: u64) -> Vec<bool> {
        // A router in memory can be asked ahead of its turn; any other matrix is as good as the next.
        let large = |piece: &Piece| piece.bytes as u64 > self.piece / 2 && !shape.is_router(piece);
        let sum = |which: bool| -> u64 {
            let some = pieces.iter().filter(|piece| large(piece) == which);
            some.map(|piece| piece.bytes as u64).sum()
        };
        let small_room = room.min(sum(false));
        let rooms = [small_room, (room - small_room).min(sum(true))];
        let sums = [sum(false), sum(true)];
        let (mut seen, mut held) = ([0u128; 2], [0u128; 2]);
        pieces
            .iter()
            .map(|piece| {
                let kind = usize::from(large(piece));
                seen[kind] += piece.bytes as u128;
                let due = seen[kind] * u128::from(rooms[kind]) / u128::from(sums[kind].max(1));
                let pin = held[kind] + piece.bytes as u128 <= due;
                if pin {
                    held[kind] += piece.bytes as u128;
                }
                pin
            })
            .collect()
    }

    /// The pieces of the core and whether each stays in memory.
    pub(super) fn pieces(&self, shape: &Shape) -> (Vec<Piece>, Vec<bool>) {
        let pieces = shape.pieces(self.piece_len());
        let pins = self.pins(shape, &pieces, self.pin_room);
        (pieces, pins)
    }

    /// What every sweep reads of the core in runs of rows, in order: the part's number from the bottom, where in its file,
    /// and bytes.
    pub fn core_reads(&self, shape: &Shape) -> Vec<(usize, u64, usize)> {
        let (pieces, pins) = self.pieces(shape);
        let passing = pieces.iter().zip(&pins).filter(|(_, pin)| !**pin);
        let reads = passing.flat_map(|(piece, _)| {
            let group = &shape.parts[piece.part].groups[piece.group];
            let first = (piece.rows.start * group.row_bytes) as u64;
            let len = group.stride(&piece.rows);
            let offsets = group.offsets.iter();
            offsets.map(move |offset| (piece.part, offset + first, len))
        });
        reads.collect()
    }

    /// Bytes of all lines.
    pub fn total(&self) -> u64 {
        self.lines.iter().map(|line| line.bytes).sum()
    }

    /// Bytes of one line, 0 if there is none.
    pub fn bytes(&self, share: Share) -> u64 {
        let line = self.lines.iter().find(|line| line.share == share);
        line.map_or(0, |line| line.bytes)
    }
}

fn largest_whole(shape: &Shape) -> u64 {
    let whole = shape.parts.iter().filter_map(|part| part.whole);
    whole
        .map(|range| range.len().next_multiple_of(CORE_ALIGN))
        .max()
        .unwrap_or(0)
}

/// What one row of a sweep takes while it passes, about: the widest layer, and what is kept beside it.
fn row_bytes(shape: &Shape) -> u64 {
    let spec = &shape.spec;
    let hidden = spec.hidden;
    let blocks = spec
        .attn_res_block
        .map_or(0, |every| spec.layers.len().div_ceil(every));
    let kda = 10 * spec.kda.width();
    let mla = spec.mla.heads * (spec.mla.nope + spec.mla.rope + 2 * spec.mla.vdim);
    let width = spec.expert_width();
    let moe = spec.moe.as_ref().map_or(0, |moe| {
        moe.top_k * width + 4 * width + (moe.shared.max(1) + 1) * moe.inner + moe.experts
    });
    let ffn = moe.max(spec.dense_inner + hidden);
    // Whoever takes scratch takes the tightest fit, which is larger than what was asked for.
    let values = (blocks + 6) * hidden + (kda.max(mla)).max(ffn) * 5 / 4;
    4 * values as u64
}
