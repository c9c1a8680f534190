//! The whole checkpoint: every tensor the text model reads, found, checked and put in order.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::checkpoint::catalogue;
use crate::checkpoint::catalogue::CoreTensor;
use crate::checkpoint::core;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::header::Header;
use crate::checkpoint::header::TensorEntry;
use crate::checkpoint::index::Index;
use crate::checkpoint::spec::Family;
use crate::checkpoint::spec::Spec;
use crate::terms::ByteRange;
use crate::terms::CorePart;
use crate::terms::ExpertKey;

/// Bytes of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// Place in [`Layout::shards`].
    pub shard: u16,
    /// Bytes of that file.
    pub range: ByteRange,
}

/// One tensor on its way into a core file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorePiece {
    /// Where it comes from.
    pub source: Part,
    /// Where it goes: from the first byte of the core file, a multiple of 4,096.
    pub offset: u64,
}

/// A core file to be written: the head, then each piece at its offset, zeros between and after, `len` bytes in all.
#[derive(Clone, Debug)]
pub struct CoreFile {
    /// Which part of the core.
    pub part: CorePart,
    /// First bytes of the file, a multiple of 4,096; read back by `CoreHead`.
    pub head: Vec<u8>,
    /// In the order of their offsets, which is the order of their sources: neighbours in a shard stay neighbours, so
    /// that one request can fetch a run of them.
    pub pieces: Vec<CorePiece>,
    /// Length of the file, a multiple of 4,096.
    pub len: u64,
}

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Layout {
    shards: Vec<String>,
    experts: Experts,
    core: Vec<CoreFile>,
    rest: Vec<Part>,
}

/// Parts of all experts in one list: real K3 has 82,432 experts.
#[derive(Clone, Debug, Default)]
struct Experts {
    /// First place in `starts`, a layer; `None` for dense layers.
    bases: Vec<Option<usize>>,
    /// Experts a layer.
    count: usize,
    /// Where an expert's parts begin in `parts`; one more than experts.
    starts: Vec<u32>,
    parts: Vec<Part>,
    len: u64,
}

impl Layout {
    /// Finds every tensor that `spec` implies in the shards' headers (by shard name, one for each shard of `index`).
    ///
    /// # Errors
    ///
    /// If the index names a shard without header or a tensor its shard does not hold; if a tensor is missing, or has
    /// another shape or type than `spec` implies.
    pub fn new(
        spec: &Spec,
        index: &Index,
        headers: &BTreeMap<String, Header>,
    ) -> Result<Layout, CheckpointError> {
        let finder = Finder::new(spec, index, headers)?;
        let core = core_files(spec, &finder)?;
        let experts = experts(spec, &finder)?;
        let rest = rest(&finder, &core, &experts);
        Ok(Layout {
            shards: index.shards().to_vec(),
            experts,
            core,
            rest,
        })
    }

    /// All shards by name, whether the text model reads them or not.
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// Name of a part's shard.
    ///
    /// # Panics
    ///
    /// If the part is not of this layout.
    pub fn shard(&self, part: Part) -> &str {
        &self.shards[part.shard as usize]
    }

    /// The parts of one expert. Joined in this order they are its file: w1, w2, w3, packed codes before scales.
    /// Neighbours in a shard are one part; real K3 has one part an expert.
    ///
    /// # Panics
    ///
    /// If the model has no such expert; see [`Layout::has_expert`].
    #[track_caller]
    pub fn expert(&self, key: ExpertKey) -> &[Part] {
        let at = self.experts.place(key);
        let at = at.unwrap_or_else(|| panic!("the model has no {key}"));
        let (from, to) = (self.experts.starts[at], self.experts.starts[at + 1]);
        &self.experts.parts[from as usize..to as usize]
    }

    /// Whether the model has that expert.
    pub fn has_expert(&self, key: ExpertKey) -> bool {
        self.experts.place(key).is_some()
    }

    /// Experts in all layers.
    pub fn expert_count(&self) -> usize {
        self.experts.starts.len().saturating_sub(1)
    }

    /// Bytes of each expert; 0 if there are none.
    pub fn expert_len(&self) -> u64 {
        self.experts.len
    }

    /// The core's files: the layers from the bottom, then the top.
    pub fn core(&self) -> &[CoreFile] {
        &self.core
    }

    /// What the text model never reads, by shard and place: with headers, core and experts it makes each shard whole.
    pub fn rest(&self) -> &[Part] {
        &self.rest
    }
}

impl Experts {
    fn place(&self, key: ExpertKey) -> Option<usize> {
        let base = (*self.bases.get(key.layer as usize)?)?;
        ((key.expert as usize) < self.count).then_some(base + key.expert as usize)
    }
}

/// Looks tensors up by full name.
struct Finder<'a> {
    index: &'a Index,
    /// In the order of the index's shards.
    headers: Vec<&'a Header>,
    /// Shards that hold no name which the index puts elsewhere: what is found there need not be asked of the index.
    agreed: Vec<bool>,
    prefix: &'static str,
}

impl<'a> Finder<'a> {
    fn new(
        spec: &Spec,
        index: &'a Index,
        headers: &'a BTreeMap<String, Header>,
    ) -> Result<Finder<'a>, CheckpointError> {
        let found = index.shards().iter().enumerate().map(|(place, shard)| {
            headers.get(shard).ok_or_else(|| {
                let names = index.names().unwrap_or_default();
                let tensor = names.iter().find(|(_, at)| *at as usize == place);
                CheckpointError::MissingShard {
                    shard: shard.clone(),
                    tensor: tensor.map_or("every tensor".to_owned(), |(name, _)| name.to_string()),
                }
            })
        });
        let mut finder = Finder {
            index,
            headers: found.collect::<Result<_, _>>()?,
            agreed: Vec::new(),
            prefix: spec.family.prefix(),
        };
        finder.agreed = finder.check_index()?;
        // A member of the family may come without the wrapper of the multimodal model, or with it.
        for prefix in [Family::K3.prefix(), Family::KimiLinear.prefix()] {
            if finder
                .find(&format!("{prefix}model.embed_tokens.weight"))
                .is_ok()
            {
                finder.prefix = prefix;
            }
        }
        Ok(finder)
    }

    /// Every name of the index must be where the index says. Both sides are sorted, so one walk compares them. Answers
    /// which shards hold nothing else.
    fn check_index(&self) -> Result<Vec<bool>, CheckpointError> {
        let mut extra: Vec<usize> = self.headers.iter().map(|h| h.entries().len()).collect();
        let mut left: Vec<_> = self.headers.iter().map(|h| h.names().peekable()).collect();
        for (name, place) in self.index.names().unwrap_or_default() {
            let names = &mut left[*place as usize];
            while names.next_if(|held| *held < &**name).is_some() {}
            if names.next_if(|held| *held == &**name).is_none() {
                return Err(CheckpointError::NotInShard {
                    tensor: name.to_string(),
                    shard: self.index.shards()[*place as usize].clone(),
                });
            }
            extra[*place as usize] -= 1;
        }
        Ok(extra.into_iter().map(|extra| extra == 0).collect())
    }

    /// As [`Finder::find`], trying the shard `near` first: real K3 has half a million names, and a layer's are together.
    fn find_near(
        &self,
        near: &mut usize,
        name: &str,
    ) -> Result<(u16, &'a TensorEntry), CheckpointError> {
        if self.agreed.get(*near) == Some(&true)
            && let Some(entry) = self.headers[*near].get(name)
        {
            return Ok((shard_number(*near), entry));
        }
        let (shard, entry) = self.find(name)?;
        *near = shard.into();
        Ok((shard, entry))
    }

    fn find(&self, name: &str) -> Result<(u16, &'a TensorEntry), CheckpointError> {
        let missing = || CheckpointError::MissingTensor {
            tensor: name.to_owned(),
        };
        let place = self.index.place(name).ok_or_else(missing)?;
        let entry = self.headers[place].get(name).ok_or_else(missing)?;
        Ok((shard_number(place), entry))
    }

    fn wrong(&self, (shard, entry): (u16, &TensorEntry), expected: String) -> CheckpointError {
        CheckpointError::WrongTensor {
            shard: self.index.shards()[shard as usize].clone(),
            tensor: entry.name.to_string(),
            found: catalogue::describe(entry),
            expected,
        }
    }
}

/// The index refuses more shards than this can number.
#[expect(
    clippy::cast_possible_truncation,
    reason = "bounded where the index is read"
)]
fn shard_number(place: usize) -> u16 {
    place as u16
}

fn core_files(spec: &Spec, finder: &Finder<'_>) -> Result<Vec<CoreFile>, CheckpointError> {
    let mut files = Vec::with_capacity(spec.layers.len() + 1);
    for layer in (0u16..).take(spec.layers.len()) {
        let stem = format!("{}model.layers.{layer}.", finder.prefix);
        let tensors = catalogue::layer(spec, layer.into());
        files.push(core_file(CorePart::Layer(layer), &stem, &tensors, finder)?);
    }
    let tensors = catalogue::top(spec);
    files.push(core_file(CorePart::Top, finder.prefix, &tensors, finder)?);
    Ok(files)
}

fn core_file(
    part: CorePart,
    stem: &str,
    tensors: &[CoreTensor],
    finder: &Finder<'_>,
) -> Result<CoreFile, CheckpointError> {
    let mut found = Vec::with_capacity(tensors.len());
    for (name, wanted) in tensors {
        let (shard, entry) = finder.find(&format!("{stem}{name}"))?;
        if !wanted.fits(&entry.shape) || !catalogue::widens(entry.dtype) {
            let expected = format!("BF16 or F32 {}", wanted.describe());
            return Err(finder.wrong((shard, entry), expected));
        }
        let range = entry.range;
        found.push((Part { shard, range }, name, entry));
    }
    found.sort_by_key(|(source, ..)| *source);
    let mut end = 0;
    let mut offsets = Vec::with_capacity(found.len());
    for (source, ..) in &found {
        offsets.push(end);
        end = core::align(end + source.range.len());
    }
    let rows = found
        .iter()
        .zip(&offsets)
        .map(|((source, name, entry), offset)| {
            let len = source.range.len();
            (name.as_str(), entry.dtype, &*entry.shape, *offset, len)
        });
    let head = core::write_head(part, rows);
    let head_len = head.len() as u64;
    let pieces = found
        .iter()
        .zip(&offsets)
        .map(|((source, ..), offset)| CorePiece {
            source: *source,
            offset: head_len + offset,
        });
    Ok(CoreFile {
        part,
        pieces: pieces.collect(),
        head,
        len: head_len + end,
    })
}

fn experts(spec: &Spec, finder: &Finder<'_>) -> Result<Experts, CheckpointError> {
    let Some((moe, shape)) = spec.moe.as_ref().zip(spec.expert_shape()) else {
        return Ok(Experts::default());
    };
    let tensors = catalogue::expert(shape);
    let mut experts = Experts {
        bases: vec![None; spec.layers.len()],
        count: moe.experts,
        starts: vec![0],
        parts: Vec::new(),
        len: shape.bytes() as u64,
    };
    let mut name = String::new();
    for layer in spec.moe_layers() {
        experts.bases[layer as usize] = Some(experts.starts.len() - 1);
        name.clear();
        let _ = write!(
            name,
            "{}model.layers.{layer}.block_sparse_moe.experts.",
            finder.prefix
        );
        let (stem, mut near) = (name.len(), 0);
        for expert in 0..moe.experts {
            let first = experts.parts.len();
            for (tensor, dtype, wanted) in &tensors {
                name.truncate(stem);
                let _ = write!(name, "{expert}.{tensor}");
                let (shard, entry) = finder.find_near(&mut near, &name)?;
                if entry.dtype != *dtype || *entry.shape != *wanted {
                    let expected = format!("{} {wanted:?}", dtype.name());
                    return Err(finder.wrong((shard, entry), expected));
                }
                let range = entry.range;
                join(&mut experts.parts, first, Part { shard, range });
            }
            #[expect(
                clippy::cast_possible_truncation,
                reason = "six parts each of at most 999 x 9,999 experts"
            )]
            experts.starts.push(experts.parts.len() as u32);
        }
    }
    Ok(experts)
}

/// Adds `part` to `parts[first..]`, or lengthens the last of them if it follows on.
fn join(parts: &mut Vec<Part>, first: usize, part: Part) {
    match parts[first..].last_mut() {
        Some(last) if last.shard == part.shard && last.range.end == part.range.start => {
            last.range.end = part.range.end;
        }
        _ => parts.push(part),
    }
}

/// All bytes between the headers' ends and the files' ends that neither core nor experts take.
fn rest(finder: &Finder<'_>, core: &[CoreFile], experts: &Experts) -> Vec<Part> {
    let pieces = core.iter().flat_map(|file| &file.pieces);
    let mut taken: Vec<Part> = pieces.map(|piece| piece.source).collect();
    taken.extend(&experts.parts);
    taken.sort_unstable();
    let mut taken = taken.into_iter().peekable();
    let mut rest = Vec::new();
    for (place, header) in finder.headers.iter().enumerate() {
        let shard = shard_number(place);
        let data = header.data();
        let mut free = data.start;
        while let Some(part) = taken.next_if(|part| part.shard == shard) {
            if part.range.start > free {
                let range = ByteRange::new(free, part.range.start);
                rest.push(Part { shard, range });
            }
            free = part.range.end;
        }
        if free < data.end {
            let range = ByteRange::new(free, data.end);
            rest.push(Part { shard, range });
        }
    }
    rest
}
