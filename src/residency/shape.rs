//! A core seen as what the pass reads of it, in the order in which it does.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::CORE_ALIGN;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::CoreFile;
use crate::checkpoint::CoreHead;
use crate::checkpoint::Dtype;
use crate::checkpoint::Spec;
use crate::checkpoint::implied_core;
use crate::model::order;
use crate::terms::ByteRange;
use crate::terms::CorePart;

/// What memory is planned by: the sizes of everything a model has, in reading order.
#[derive(Clone, Debug)]
pub struct Shape {
    pub(super) spec: Arc<Spec>,
    /// The layers from the bottom, then the top.
    pub(super) parts: Vec<PartShape>,
    pub(super) expert_len: u64,
}

/// One part of the core.
#[derive(Clone, Debug)]
pub(super) struct PartShape {
    pub(super) part: CorePart,
    /// Length of the file.
    pub(super) len: u64,
    /// Matrices that are read in runs of rows, in order.
    pub(super) groups: Vec<Group>,
    /// The tensor that is read as a whole in every sweep.
    pub(super) whole: Option<ByteRange>,
    /// Bytes of the vectors, as f32.
    pub(super) vectors: u64,
}

/// Matrices of one shape that are read together.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) names: Vec<String>,
    /// Where each begins in the file.
    pub(super) offsets: Vec<u64>,
    pub(super) dtype: Dtype,
    pub(super) rows: usize,
    /// Bytes of one row of one of them.
    pub(super) row_bytes: usize,
}

/// Some rows of a group: what is pinned, or read, at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Place in [`Shape::parts`].
    pub(super) part: usize,
    /// Place in the part's groups.
    pub(super) group: usize,
    pub(super) rows: Range<usize>,
    /// Bytes in memory: for each matrix its rows, filled up to a multiple of [`CORE_ALIGN`].
    pub(super) bytes: usize,
}

impl Group {
    /// Bytes that `rows` of one matrix take where they are read to.
    pub(super) fn stride(&self, rows: &Range<usize>) -> usize {
        (rows.len() * self.row_bytes).next_multiple_of(CORE_ALIGN as usize)
    }

    /// Rows of which the first byte lies where a direct read may begin.
    fn grain(&self) -> usize {
        let (mut a, mut b) = (CORE_ALIGN as usize, self.row_bytes.max(1));
        while b > 0 {
            (a, b) = (b, a % b);
        }
        CORE_ALIGN as usize / a
    }

    fn cut(&self, piece_max: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, grain) = (self.rows, self.grain());
        let fit = (piece_max / (self.row_bytes * self.names.len()).max(1)).max(1);
        // Pieces of one size, so that none wastes a buffer made for the largest.
        let step = rows.div_ceil(rows.div_ceil(fit).max(1));
        let step = (step.next_multiple_of(grain)).max(grain);
        (0..rows)
            .step_by(step)
            .map(move |first| first..(first + step).min(rows))
    }
}

impl Shape {
    /// The shape of a checkpoint whose core files are known.
    ///
    /// # Errors
    ///
    /// If a head of `core` is damaged, or lacks what `spec` implies.
    pub fn new(spec: &Arc<Spec>, core: &[CoreFile]) -> Result<Shape, CheckpointError> {
        let parts = core.iter().map(|file| {
            let head = CoreHead::parse_front(&file.head, file.len)?;
            Ok(part(spec, file.part, file.len, &head))
        });
        Ok(Shape {
            parts: parts.collect::<Result<_, CheckpointError>>()?,
            expert_len: spec.expert_shape().map_or(0, |shape| shape.bytes() as u64),
            spec: Arc::clone(spec),
        })
    }

    /// The shape that a spec implies, before any header was seen: to the byte that of K3.
    ///
    /// # Errors
    ///
    /// As [`Shape::new`].
    pub fn implied(spec: &Arc<Spec>) -> Result<Shape, CheckpointError> {
        Shape::new(spec, &implied_core(spec))
    }

    /// Parts of the core, each a file: the layers from the bottom, then the top.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Bytes of all core files.
    pub fn core_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Bytes of all routed experts.
    pub fn expert_bytes(&self) -> u64 {
        self.experts() * self.expert_len
    }

    /// Bytes of one routed expert.
    pub fn expert_len(&self) -> u64 {
        self.expert_len
    }

    /// Routed experts of all layers.
    pub fn experts(&self) -> u64 {
        let a_layer = self.spec.moe.as_ref().map_or(0, |moe| moe.experts as u64);
        a_layer * self.spec.moe_layers().count() as u64
    }

    /// Routed experts that one token touches.
    pub fn experts_a_token(&self) -> u64 {
        let k = self.spec.moe.as_ref().map_or(0, |moe| moe.top_k as u64);
        k * self.spec.moe_layers().count() as u64
    }

    /// Core bytes that every sweep reads in runs, and as a whole.
    pub(super) fn read_a_sweep(&self) -> (u64, u64) {
        let runs = self.pieces(usize::MAX).iter().map(|p| p.bytes as u64).sum();
        let whole = self.parts.iter().filter_map(|part| part.whole);
        (
            runs,
            whole
                .map(|range| range.len().next_multiple_of(CORE_ALIGN))
                .sum(),
        )
    }

    /// Whether a piece is a router's.
    pub(super) fn is_router(&self, piece: &Piece) -> bool {
        let group = &self.parts[piece.part].groups[piece.group];
        group.names == [order::ROUTER]
    }

    /// Everything read in runs, cut into pieces of about `piece_max` bytes, in reading order.
    pub(super) fn pieces(&self, piece_max: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (at, part) in self.parts.iter().enumerate() {
            for (place, group) in part.groups.iter().enumerate() {
                pieces.extend(group.cut(piece_max).map(|rows| Piece {
                    part: at,
                    group: place,
                    bytes: group.stride(&rows) * group.names.len(),
                    rows,
                }));
            }
        }
        pieces
    }
}

fn part(spec: &Spec, part: CorePart, len: u64, head: &CoreHead) -> PartShape {
    let order = order::order(spec, part);
    let group = |names: Vec<String>| {
        let entries: Option<Vec<_>> = names.iter().map(|name| head.get(name)).collect();
        let entries = entries?;
        let first = entries.first()?;
        let rows = *first.shape.first()?;
        let row_bytes = usize::try_from(first.range.len()).ok()?.checked_div(rows)?;
        // What is stored otherwise than its companion is read as a whole, and slowly.
        let alike = entries
            .iter()
            .all(|entry| entry.dtype == first.dtype && entry.shape == first.shape && row_bytes > 0);
        alike.then(|| Group {
            offsets: entries.iter().map(|entry| entry.range.start).collect(),
            dtype: first.dtype,
            rows,
            row_bytes,
            names,
        })
    };
    let groups: Vec<Group> = order.into_iter().filter_map(group).collect();
    let in_runs = |name: &str| groups.iter().any(|g| g.names.iter().any(|n| n == name));
    let vectors = head.entries().iter().filter(|entry| {
        !in_runs(&entry.name) && &*entry.name != order::WHOLE && &*entry.name != order::EMBEDDING
    });
    let values =
        |entry: &crate::checkpoint::CoreEntry| entry.shape.iter().product::<usize>() as u64;
    PartShape {
        part,
        len,
        vectors: 4 * vectors.map(values).sum::<u64>(),
        whole: head.get(order::WHOLE).map(|entry| entry.range),
        groups,
    }
}
