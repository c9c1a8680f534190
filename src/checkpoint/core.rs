//! The head of a core file: where each tensor of one part lies in the file that holds it.
//!
//! ```text
//! {"format":..,"part":"042","tensors":{..}}  spaces, up to a multiple of 4,096
//! tensor, tensor, ...                         each at a multiple of 4,096, zeros between
//! ```
//!
//! In a shard a tensor may start anywhere; here it starts where direct reads and vector loads want it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::Serialize;
use serde::de::Error as _;

use crate::checkpoint::config::cut;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::header::Dtype;
use crate::terms::ByteRange;
use crate::terms::CorePart;

/// Every tensor of a core file starts at a multiple of this, and the file's length is one.
pub const CORE_ALIGN: u64 = 4096;

/// Names the layout; another layout gets another name, so that an old reader refuses it.
const FORMAT: &str = "deltafin-core-1";

/// Longest head that is looked for.
const HEAD_LEN_MAX: usize = 1 << 20;

/// One tensor of a core file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreEntry {
    /// Name within the part: `self_attn.q_proj.weight`, or in the top part the whole name without prefix.
    pub name: Box<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost first.
    pub shape: Box<[usize]>,
    /// Where in the core file.
    pub range: ByteRange,
}

/// The head of a core file: its tensors by name, all inside the file.
#[derive(Clone, Debug)]
pub struct CoreHead {
    part: CorePart,
    entries: Vec<CoreEntry>,
}

/// Offsets count from the head's end, so that the head's length does not depend on what it says.
#[derive(Serialize, Deserialize)]
struct HeadFile {
    format: String,
    part: String,
    tensors: BTreeMap<String, HeadEntry>,
}

#[derive(Serialize, Deserialize)]
struct HeadEntry {
    dtype: String,
    shape: Vec<u64>,
    offsets: (u64, u64),
}

/// `n` up to the next multiple of [`CORE_ALIGN`].
pub(crate) fn align(n: u64) -> u64 {
    n.next_multiple_of(CORE_ALIGN)
}

/// The head for tensors `(name, type, shape, offset from the head's end, length)`.
pub(crate) fn write_head<'a>(
    part: CorePart,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64], u64, u64)>,
) -> Vec<u8> {
    let file = HeadFile {
        format: FORMAT.to_owned(),
        part: part.to_string(),
        tensors: tensors
            .map(|(name, dtype, shape, offset, len)| {
                let entry = HeadEntry {
                    dtype: dtype.name().to_owned(),
                    shape: shape.to_vec(),
                    offsets: (offset, offset + len),
                };
                (name.to_owned(), entry)
            })
            .collect(),
    };
    #[expect(clippy::expect_used, reason = "strings and numbers always serialise")]
    let mut head = serde_json::to_vec(&file).expect("a head is plain JSON");
    let len = head.len().next_multiple_of(CORE_ALIGN as usize);
    head.resize(len, b' ');
    head
}

impl CoreHead {
    /// Reads the head of a core file, given the whole file (mapped, say: only the head is looked at).
    ///
    /// # Errors
    ///
    /// If there is no head, or it places a tensor outside the file, across another, off its alignment or in a length
    /// that its shape does not have.
    pub fn parse(file: &[u8]) -> Result<CoreHead, CheckpointError> {
        CoreHead::parse_front(file, file.len() as u64)
    }

    /// The same, given the first bytes alone of a file of `len` bytes.
    ///
    /// # Errors
    ///
    /// As [`CoreHead::parse`].
    pub fn parse_front(file: &[u8], len: u64) -> Result<CoreHead, CheckpointError> {
        let broken = |source| CheckpointError::CoreHead { source };
        let front = &file[..file.len().min(HEAD_LEN_MAX)];
        let mut values = serde_json::Deserializer::from_slice(front).into_iter::<HeadFile>();
        let head = values
            .next()
            .unwrap_or_else(|| Err(serde_json::Error::custom("the file is empty")))
            .map_err(broken)?;
        if head.format != FORMAT {
            let unknown = format!("format `{}` instead of {FORMAT}", cut(&head.format));
            return Err(broken(serde_json::Error::custom(unknown)));
        }
        let part = part_from_name(&head.part).ok_or_else(|| {
            let unknown = format!("part `{}` is neither a layer nor top", cut(&head.part));
            broken(serde_json::Error::custom(unknown))
        })?;
        let head_len = align(values.byte_offset() as u64);
        let entries = head
            .tensors
            .into_iter()
            .map(|(name, entry)| place(name, &entry, head_len, len))
            .collect::<Result<Vec<_>, _>>()?;
        let mut order: Vec<&CoreEntry> = entries.iter().collect();
        order.sort_by_key(|entry| entry.range);
        if let Some(pair) = order.windows(2).find(|p| p[1].range.start < p[0].range.end) {
            return Err(misplaced(&pair[1].name, "overlaps the one before it"));
        }
        Ok(CoreHead { part, entries })
    }

    /// Which part of the core the file says it is.
    pub fn part(&self) -> CorePart {
        self.part
    }

    /// All tensors, by name.
    pub fn entries(&self) -> &[CoreEntry] {
        &self.entries
    }

    /// The tensor of that local name.
    pub fn get(&self, name: &str) -> Option<&CoreEntry> {
        let at = self
            .entries
            .binary_search_by(|e| (*e.name).cmp(name))
            .ok()?;
        Some(&self.entries[at])
    }
}

fn misplaced(tensor: &str, fault: &'static str) -> CheckpointError {
    CheckpointError::CoreTensor {
        tensor: cut(tensor),
        fault,
    }
}

fn place(
    name: String,
    entry: &HeadEntry,
    head_len: u64,
    file_len: u64,
) -> Result<CoreEntry, CheckpointError> {
    let wrong = |fault| misplaced(&name, fault);
    let dtype = Dtype::from_name(&entry.dtype).ok_or_else(|| wrong("has an unknown dtype"))?;
    let (begin, end) = entry.offsets;
    if dtype.bytes(&entry.shape).is_none() || dtype.bytes(&entry.shape) != end.checked_sub(begin) {
        return Err(wrong("has a length that is not its shape's"));
    }
    if begin % CORE_ALIGN != 0 {
        return Err(wrong("does not start at a multiple of 4,096"));
    }
    let to = end.checked_add(head_len).filter(|to| *to <= file_len);
    let to = to.ok_or_else(|| wrong("lies beyond the end of the file"))?;
    let shape = entry.shape.iter().map(|d| usize::try_from(*d));
    let shape = shape.collect::<Result<_, _>>();
    Ok(CoreEntry {
        dtype,
        shape: shape.map_err(|_| wrong("is too large for this machine"))?,
        range: ByteRange::new(begin + head_len, to),
        name: name.into(),
    })
}

fn part_from_name(name: &str) -> Option<CorePart> {
    match name {
        "top" => Some(CorePart::Top),
        digits => digits.parse().ok().map(CorePart::Layer),
    }
}
