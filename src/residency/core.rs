//! The core, mapped from the store's files.
//!
//! One map a part, opened when the part is first asked for and kept. A core that does not fit in
//! memory is re-read by the kernel's pager on every token, since a cyclic scan defeats its LRU.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use memmap2::Mmap;

use super::ResidencyError;
use super::meter::Meter;
use crate::checkpoint::CoreHead;
use crate::model::CoreLease;
use crate::model::CoreTensor;
use crate::terms::CorePart;

/// One part of the core in memory; cheap to clone, stays put while any clone lives.
#[derive(Clone, Debug)]
pub struct MappedPart(Arc<Part>);

#[derive(Debug)]
struct Part {
    map: Mmap,
    head: CoreHead,
}

impl CoreLease for MappedPart {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        let entry = self.0.head.get(local_name)?;
        let range =
            usize::try_from(entry.range.start).ok()?..usize::try_from(entry.range.end).ok()?;
        Some(CoreTensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: self.0.map.get(range)?,
        })
    }
}

/// The parts mapped so far.
#[derive(Debug, Default)]
pub(super) struct MappedCore {
    parts: Mutex<BTreeMap<CorePart, MappedPart>>,
}

impl MappedCore {
    /// The part, mapped from `path` if it was not yet.
    pub(super) fn part(
        &self,
        part: CorePart,
        path: &Path,
        meter: &Meter,
    ) -> Result<MappedPart, ResidencyError> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapped) = parts.get(&part) {
            return Ok(mapped.clone());
        }
        let map = map(path).map_err(|source| ResidencyError::Map {
            path: path.display().to_string(),
            source,
        })?;
        meter.core_mapped(map.len() as u64);
        let head = CoreHead::parse(&map)?;
        let mapped = MappedPart(Arc::new(Part { map, head }));
        parts.insert(part, mapped.clone());
        Ok(mapped)
    }
}

#[expect(unsafe_code, reason = "mapping a file is the point")]
fn map(path: &Path) -> std::io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: core files are published by rename and never written again. Whoever truncates one
    // under a running process gets a SIGBUS, as with any mapped executable.
    unsafe { Mmap::map(&file) }
}
