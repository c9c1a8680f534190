//! The core, as the pass is lent it: mapped from the store's files where all fits, else pinned in part and read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::PoisonError;

use memmap2::Mmap;

use super::MemoryPlan;
use super::ResidencyError;
use super::ahead::Ahead;
use super::direct::DirectFile;
use super::meter::Meter;
use super::open::Opened;
use super::shape::Group;
use super::shape::Piece;
use super::shape::Shape;
use crate::checkpoint::CoreHead;
use crate::checkpoint::Dtype;
use crate::model::CoreLease;
use crate::model::CoreTensor;
use crate::model::order;
use crate::store::CoreState;
use crate::terms::CorePart;

/// One part of the core, lent to the pass.
#[derive(Debug)]
pub enum CorePiece {
    /// In memory as a whole.
    Mapped(MappedPart),
    /// Brought as it is asked for.
    Read(ReadPart),
}

impl CoreLease for CorePiece {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        match self {
            CorePiece::Mapped(part) => part.tensor(local_name),
            CorePiece::Read(part) => part.tensor(local_name),
        }
    }

    fn runs(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        match self {
            CorePiece::Mapped(part) => part.runs(local_names, show),
            CorePiece::Read(part) => part.runs(local_names, show),
        }
    }

    fn runs_here(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        match self {
            CorePiece::Mapped(part) => part.runs(local_names, show),
            CorePiece::Read(part) => part.runs_here(local_names, show),
        }
    }

    fn rows(&self, local_name: &str, rows: &[usize], bytes: &mut Vec<u8>) -> Option<Dtype> {
        match self {
            CorePiece::Mapped(part) => part.rows(local_name, rows, bytes),
            CorePiece::Read(part) => part.rows(local_name, rows, bytes),
        }
    }
}

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

/// The core of an opened model.
pub(super) enum Core {
    /// The parts mapped so far.
    Mapped {
        opened: Opened,
        parts: Mutex<BTreeMap<CorePart, MappedPart>>,
    },
    Read(Arc<ReadCore>),
}

impl Core {
    pub(super) fn new(opened: &Opened, shape: Shape, plan: &MemoryPlan) -> Core {
        if plan.mapped {
            return Core::Mapped {
                opened: opened.clone(),
                parts: Mutex::default(),
            };
        }
        Core::Read(Arc::new(ReadCore {
            opened: opened.clone(),
            heads: shape.parts.iter().map(|_| OnceLock::new()).collect(),
            whole: shape.parts.iter().map(|_| OnceLock::new()).collect(),
            shape,
            plan: plan.clone(),
            ahead: OnceLock::new(),
            failure: Mutex::default(),
        }))
    }

    /// The part, to be read from.
    pub(super) fn part(&self, part: CorePart) -> Result<CorePiece, ResidencyError> {
        match self {
            Core::Mapped { opened, parts } => {
                let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(mapped) = parts.get(&part) {
                    return Ok(CorePiece::Mapped(mapped.clone()));
                }
                let mapped = mapped(&path(opened, part)?, &opened.meter)?;
                parts.insert(part, mapped.clone());
                Ok(CorePiece::Mapped(mapped))
            }
            Core::Read(core) => ReadCore::part(core, part).map(CorePiece::Read),
        }
    }

    /// What a lease could not say.
    pub(super) fn failure(&self) -> Option<ResidencyError> {
        match self {
            Core::Mapped { .. } => None,
            Core::Read(core) => core.failure().take(),
        }
    }

    /// Reads ahead, once they have begun.
    pub(super) fn ahead(&self) -> Option<&Ahead> {
        match self {
            Core::Mapped { .. } => None,
            Core::Read(core) => core.ahead.get(),
        }
    }
}

fn mapped(path: &Path, meter: &Meter) -> Result<MappedPart, ResidencyError> {
    let map = map(path).map_err(|source| ResidencyError::Map {
        path: path.display().to_string(),
        source,
    })?;
    meter.core_read(map.len() as u64);
    let head = CoreHead::parse(&map)?;
    Ok(MappedPart(Arc::new(Part { map, head })))
}

#[expect(unsafe_code, reason = "mapping a file is the point")]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: core files are published by rename and never written again. Whoever truncates one
    // under a running process gets a SIGBUS, as with any mapped executable.
    unsafe { Mmap::map(&file) }
}

/// Where a part of the core lies.
fn path(opened: &Opened, part: CorePart) -> Result<PathBuf, ResidencyError> {
    let missing = || ResidencyError::Missing {
        repo: opened.repo.clone(),
        what: format!("core part {part}"),
    };
    let mut files = opened.layout.core().iter();
    let file = files.find(|file| file.part == part).ok_or_else(missing)?;
    match opened.store.core(part, file.len)? {
        CoreState::Ready(path) => Ok(path),
        CoreState::Partial(_) | CoreState::Busy(_) => Err(missing()),
    }
}

/// A core that does not fit, or shall not be mapped.
pub(super) struct ReadCore {
    opened: Opened,
    shape: Shape,
    plan: MemoryPlan,
    heads: Vec<OnceLock<CoreHead>>,
    /// What is read as a whole, where it stays.
    whole: Vec<OnceLock<Vec<u8>>>,
    /// Begun with the first part that is asked for: until then there may be no files.
    ahead: OnceLock<Ahead>,
    failure: Mutex<Option<ResidencyError>>,
}

/// A part that is brought as it is asked for.
pub struct ReadPart {
    core: Arc<ReadCore>,
    /// Place in the shape.
    at: usize,
    /// Tensors that were asked for as a whole, in the order of the head's entries.
    whole: Vec<OnceLock<Vec<u8>>>,
}

impl std::fmt::Debug for ReadPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadPart")
            .field("part", &self.core.shape.parts[self.at].part)
            .finish_non_exhaustive()
    }
}

impl ReadCore {
    fn failure(&self) -> std::sync::MutexGuard<'_, Option<ResidencyError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part(core: &Arc<ReadCore>, part: CorePart) -> Result<ReadPart, ResidencyError> {
        let at = core.shape.parts.iter().position(|p| p.part == part);
        let at = at.ok_or_else(|| ResidencyError::Missing {
            repo: core.opened.repo.clone(),
            what: format!("core part {part}"),
        })?;
        let entries = core.head(at)?.entries().len();
        Ok(ReadPart {
            core: Arc::clone(core),
            at,
            whole: (0..entries).map(|_| OnceLock::new()).collect(),
        })
    }

    fn ahead(&self) -> Result<&Ahead, ResidencyError> {
        if let Some(ahead) = self.ahead.get() {
            return Ok(ahead);
        }
        let (opened, parts) = (self.opened.clone(), self.parts());
        let largest = self.plan.ring.checked_div(self.plan.largest).unwrap_or(0);
        let ahead = Ahead::start(
            self.shape.clone(),
            self.plan.pieces(&self.shape),
            usize::try_from(largest).unwrap_or(0),
            Box::new(move |at| open(&opened, parts[at])),
            Arc::clone(&self.opened.meter),
            Arc::clone(&self.opened.stop),
        );
        let ahead = ahead.map_err(|source| ResidencyError::Map {
            path: "memory for the core".to_owned(),
            source,
        })?;
        Ok(self.ahead.get_or_init(|| ahead))
    }

    fn parts(&self) -> Vec<CorePart> {
        self.shape.parts.iter().map(|part| part.part).collect()
    }

    /// The head of a part's file, which must be what the plan was made by.
    fn head(&self, at: usize) -> Result<&CoreHead, ResidencyError> {
        if let Some(head) = self.heads[at].get() {
            return Ok(head);
        }
        let planned = &self.opened.layout.core()[at];
        let mut front = vec![0; planned.head.len()];
        self.read(at, 0, &mut front)?;
        let head = CoreHead::parse_front(&front, planned.len)?;
        let wanted = CoreHead::parse_front(&planned.head, planned.len)?;
        if head.entries() != wanted.entries() || head.part() != planned.part {
            return Err(ResidencyError::Missing {
                repo: self.opened.repo.clone(),
                what: format!("core part {} in this layout", planned.part),
            });
        }
        Ok(self.heads[at].get_or_init(|| head))
    }

    fn read(&self, at: usize, offset: u64, bytes: &mut [u8]) -> Result<(), ResidencyError> {
        let file = self.ahead()?.file(at)?;
        let read = file.read_any(bytes, offset);
        read.map_err(|source| ResidencyError::Map {
            path: format!("core part {}", self.shape.parts[at].part),
            source,
        })?;
        self.opened.meter.core_read(bytes.len() as u64);
        Ok(())
    }

    /// What is so, or `None` and why.
    fn told<T>(&self, outcome: Result<T, ResidencyError>) -> Option<T> {
        outcome.map_err(|error| *self.failure() = Some(error)).ok()
    }
}

fn open(opened: &Opened, part: CorePart) -> Result<DirectFile, ResidencyError> {
    let path = path(opened, part)?;
    DirectFile::open(&path).map_err(|source| ResidencyError::Map {
        path: path.display().to_string(),
        source,
    })
}

impl CoreLease for ReadPart {
    fn tensor(&self, local_name: &str) -> Option<CoreTensor<'_>> {
        let core = &*self.core;
        let head = core.told(core.head(self.at))?;
        let place = head.entries().iter().position(|e| &*e.name == local_name)?;
        let entry = &head.entries()[place];
        let stays = local_name == order::WHOLE && core.plan.whole_pinned;
        let cell = match stays {
            true => &core.whole[self.at],
            false => &self.whole[place],
        };
        if cell.get().is_none() {
            let mut bytes = vec![0; usize::try_from(entry.range.len()).ok()?];
            core.told(core.read(self.at, entry.range.start, &mut bytes))?;
            let _ = cell.set(bytes);
        }
        Some(CoreTensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: cell.get()?,
        })
    }

    fn runs(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        let core = &*self.core;
        let groups = &core.shape.parts[self.at].groups;
        let Some(group) = groups.iter().position(|group| group.names == local_names) else {
            // Nothing that was announced: it is read here and now, and let go with the lease.
            let whole = local_names.iter().map(|name| self.tensor(name));
            show(0, &whole.collect::<Option<Vec<_>>>()?);
            return Some(());
        };
        let ahead = core.told(core.ahead())?;
        let shown = ahead.show(self.at, group, &mut |group, piece, bytes| {
            show_piece(group, piece, bytes, show);
        });
        core.told(shown)
    }

    fn runs_here(
        &self,
        local_names: &[&str],
        show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
    ) -> Option<()> {
        let core = &*self.core;
        let groups = &core.shape.parts[self.at].groups;
        let group = groups.iter().position(|group| group.names == local_names)?;
        let ahead = core.ahead.get()?;
        ahead.show_pinned(self.at, group, &mut |group, piece, bytes| {
            show_piece(group, piece, bytes, show);
        })
    }

    fn rows(&self, local_name: &str, rows: &[usize], bytes: &mut Vec<u8>) -> Option<Dtype> {
        let core = &*self.core;
        let entry = core.told(core.head(self.at))?.get(local_name)?;
        let table = *entry.shape.first()?;
        let width = entry.range.len().checked_div(table as u64)?;
        let len = usize::try_from(width).ok()?;
        bytes.clear();
        bytes.resize(rows.len() * len, 0);
        for (row, bytes) in rows.iter().zip(bytes.chunks_mut(len.max(1))) {
            if *row >= table {
                return None;
            }
            let from = entry.range.start + *row as u64 * width;
            core.told(core.read(self.at, from, bytes))?;
        }
        Some(entry.dtype)
    }
}

/// Shows a piece of a group as the rows of its matrices.
fn show_piece(
    group: &Group,
    piece: &Piece,
    bytes: &[u8],
    show: &mut dyn FnMut(usize, &[CoreTensor<'_>]),
) {
    let len = piece.rows.len() * group.row_bytes;
    let shape = [piece.rows.len()];
    let tensors: Vec<CoreTensor<'_>> = bytes
        .chunks(group.stride(&piece.rows))
        .take(group.names.len())
        .map(|bytes| CoreTensor {
            dtype: group.dtype,
            shape: &shape,
            bytes: &bytes[..len],
        })
        .collect();
    show(piece.rows.start, &tensors);
}
