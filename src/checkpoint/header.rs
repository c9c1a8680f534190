//! A shard's safetensors header, held to every rule of the format.
//!
//! The format's own reader wants the whole file before it checks anything; a header that came by range has only the
//! file's size to be checked against, so the rules are applied here.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::Error as _;
use serde::de::MapAccess;
use serde::de::Visitor;

use crate::checkpoint::config::cut;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::error::HeaderFault;
use crate::terms::ByteRange;

/// Longest header that is read, in bytes. K3's are about 1 MB.
pub const HEADER_LEN_MAX: u64 = 100_000_000;

/// Bytes before the header: its length, little-endian.
const LENGTH_BYTES: u64 = 8;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the format's own")]
#[expect(non_camel_case_types, reason = "the names are the format's own")]
pub enum Dtype {
    Bool,
    F4,
    F6_E2M3,
    F6_E3M2,
    U8,
    I8,
    F8_E5M2,
    F8_E4M3,
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    F64,
    I64,
    U64,
    C64,
}

const DTYPES: [(Dtype, &str, u64); 22] = [
    (Dtype::Bool, "BOOL", 8),
    (Dtype::F4, "F4", 4),
    (Dtype::F6_E2M3, "F6_E2M3", 6),
    (Dtype::F6_E3M2, "F6_E3M2", 6),
    (Dtype::U8, "U8", 8),
    (Dtype::I8, "I8", 8),
    (Dtype::F8_E5M2, "F8_E5M2", 8),
    (Dtype::F8_E4M3, "F8_E4M3", 8),
    (Dtype::F8_E8M0, "F8_E8M0", 8),
    (Dtype::F8_E4M3FNUZ, "F8_E4M3FNUZ", 8),
    (Dtype::F8_E5M2FNUZ, "F8_E5M2FNUZ", 8),
    (Dtype::I16, "I16", 16),
    (Dtype::U16, "U16", 16),
    (Dtype::F16, "F16", 16),
    (Dtype::BF16, "BF16", 16),
    (Dtype::I32, "I32", 32),
    (Dtype::U32, "U32", 32),
    (Dtype::F32, "F32", 32),
    (Dtype::F64, "F64", 64),
    (Dtype::I64, "I64", 64),
    (Dtype::U64, "U64", 64),
    (Dtype::C64, "C64", 64),
];

impl Dtype {
    /// As headers write it.
    pub fn name(self) -> &'static str {
        DTYPES[self as usize].1
    }

    /// The type a header calls `name`.
    pub fn from_name(name: &str) -> Option<Dtype> {
        DTYPES.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        DTYPES[self as usize].2
    }

    /// Bytes of a dense tensor; `None` if they overflow or end inside a byte.
    pub fn bytes(self, shape: &[u64]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Where one tensor lies in its shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Full name, as in the shard.
    pub name: Box<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost first; empty is a single element.
    pub shape: Box<[u64]>,
    /// Where in the file, counted from its first byte.
    pub range: ByteRange,
}

/// A shard's tensors, in the order of their bytes, which fill the file from the header's end to its own.
#[derive(Clone, Debug)]
pub struct Header {
    entries: Vec<TensorEntry>,
    /// Places in `entries`, by name.
    by_name: Vec<u32>,
    data: ByteRange,
}

/// How many bytes at the front of a shard are its header (the 8 of the length, then the JSON), from its `first` 8 bytes
/// or more; asked before anything is allocated for it.
///
/// # Errors
///
/// If the file is too short to say, or its header would be longer than [`HEADER_LEN_MAX`] or than the file.
pub fn header_len(shard: &str, first: &[u8], file_size: u64) -> Result<u64, CheckpointError> {
    length(first, file_size).map_err(|fault| CheckpointError::Header {
        shard: shard.to_owned(),
        fault,
    })
}

fn length(first: &[u8], file_size: u64) -> Result<u64, HeaderFault> {
    let size = file_size.min(first.len() as u64);
    let no_length = || HeaderFault::NoLength { size };
    let available = file_size.checked_sub(LENGTH_BYTES).ok_or_else(no_length)?;
    let len = u64::from_le_bytes(*first.first_chunk().ok_or_else(no_length)?);
    if len > HEADER_LEN_MAX {
        let max = HEADER_LEN_MAX;
        return Err(HeaderFault::TooLong { len, max });
    }
    if len > available {
        return Err(HeaderFault::Truncated { len, available });
    }
    Ok(LENGTH_BYTES + len)
}

impl Header {
    /// Reads a shard's header from its front: the 8 bytes of the length and all of the JSON; what follows is not
    /// looked at.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Header`] with the rule that is broken. A name that stands twice is found as such; reading
    /// into a map would keep the last and blame the offsets.
    pub fn read(shard: &str, front: &[u8], file_size: u64) -> Result<Header, CheckpointError> {
        let read = || {
            let end = length(front, file_size)?;
            let available = (front.len() as u64).saturating_sub(LENGTH_BYTES);
            let json = usize::try_from(end)
                .ok()
                .and_then(|end| front.get(LENGTH_BYTES as usize..end))
                .ok_or(HeaderFault::Truncated {
                    len: end - LENGTH_BYTES,
                    available,
                })?;
            parse(json, end, file_size)
        };
        read().map_err(|fault| CheckpointError::Header {
            shard: shard.to_owned(),
            fault,
        })
    }

    /// All tensors, in the order of their bytes.
    pub fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        let at = self
            .by_name
            .binary_search_by(|at| (*self.entries[*at as usize].name).cmp(name));
        Some(&self.entries[self.by_name[at.ok()?] as usize])
    }

    /// All names, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let name = |at: &u32| &*self.entries[*at as usize].name;
        self.by_name.iter().map(name)
    }

    /// Where tensors lie: from the end of the header to the end of the file.
    pub fn data(&self) -> ByteRange {
        self.data
    }
}

fn parse(json: &[u8], start: u64, file_size: u64) -> Result<Header, HeaderFault> {
    if json.first() != Some(&b'{') {
        return Err(HeaderFault::NoObject);
    }
    let Table(raw) = serde_json::from_slice(json)?;
    let mut entries = Vec::with_capacity(raw.len());
    for (name, fields) in raw {
        entries.push(entry(name, &fields, start)?);
    }
    entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
    let by_name = by_name(&entries)?;
    let mut end = start;
    for entry in &entries {
        if entry.range.start != end {
            return Err(HeaderFault::Tiling {
                tensor: cut(&entry.name),
                begin: entry.range.start - start,
                expected: end - start,
            });
        }
        end = entry.range.end;
    }
    if end != file_size {
        let size = file_size;
        return Err(HeaderFault::FileSize { end, size });
    }
    Ok(Header {
        entries,
        by_name,
        data: ByteRange::new(start, end),
    })
}

fn entry(name: Box<str>, fields: &Fields<'_>, start: u64) -> Result<TensorEntry, HeaderFault> {
    let dtype = Dtype::from_name(&fields.dtype).ok_or_else(|| HeaderFault::Dtype {
        tensor: cut(&name),
        dtype: cut(&fields.dtype),
    })?;
    let (begin, end) = fields.data_offsets;
    let size = dtype.bytes(&fields.shape);
    let file = start.checked_add(begin).zip(start.checked_add(end));
    match (size, file) {
        (Some(size), Some((from, to))) if end.checked_sub(begin) == Some(size) => Ok(TensorEntry {
            name,
            dtype,
            shape: fields.shape.as_slice().into(),
            range: ByteRange::new(from, to),
        }),
        _ => Err(HeaderFault::Size {
            tensor: cut(&name),
            dtype: dtype.name(),
            shape: fields.shape.iter().copied().take(8).collect(),
            begin,
            end,
        }),
    }
}

fn by_name(entries: &[TensorEntry]) -> Result<Vec<u32>, HeaderFault> {
    let name = |at: u32| &*entries[at as usize].name;
    let mut order: Vec<u32> = (0u32..).take(entries.len()).collect();
    order.sort_unstable_by_key(|at| name(*at));
    match order.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        Some(pair) => Err(HeaderFault::Duplicate {
            tensor: cut(name(pair[0])),
        }),
        None => Ok(order),
    }
}

/// One tensor's entry as written. A field that stands twice is an error of the derived reader.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's object, `__metadata__` checked and dropped.
struct Table<'a>(Vec<(Box<str>, Fields<'a>)>);

impl<'de> Deserialize<'de> for Table<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Tensors)
    }
}

struct Tensors;

impl<'de> Visitor<'de> for Tensors {
    type Value = Table<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to their type, shape and data offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table<'de>, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = false;
        while let Some(name) = map.next_key::<Box<str>>()? {
            if &*name != "__metadata__" {
                tensors.push((name, map.next_value()?));
            } else if metadata {
                return Err(A::Error::custom("`__metadata__` stands twice"));
            } else {
                metadata = true;
                map.next_value::<Metadata>()?;
            }
        }
        Ok(Table(tensors))
    }
}

/// `__metadata__`: strings to strings, of no use to us, but held to the format.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Metadata)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = Metadata;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`__metadata__` to map strings to strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
        while map.next_entry::<Cow<'de, str>, Cow<'de, str>>()?.is_some() {}
        Ok(Metadata)
    }
}
