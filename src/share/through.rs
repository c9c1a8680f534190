//! Sharing a store that fetches what it lacks: one machine asks the hub, all get the bytes.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use bytes::Bytes;

use super::Backend;
use super::Content;
use super::Listing;
use super::Stored;
use crate::hub::HubError;
use crate::residency::Brought;
use crate::residency::Opened;
use crate::residency::ResidencyError;
use crate::residency::Through;
use crate::terms::ByteRange;

/// Damage found on the way is repaired by fetching again, this often.
const REPAIRS_MAX: u32 = 3;

/// One model of a store; what it lacks is fetched from the hub, kept as far as the store's budget
/// allows, and passed on. However many ask for the same bytes, they are fetched once.
pub struct ThroughStore {
    stored: Stored,
    through: Arc<Through>,
}

impl ThroughStore {
    /// Shares an opened model under its own name and commit, with its hub behind it.
    ///
    /// # Errors
    ///
    /// If the store's metadata cannot be read.
    pub fn new(opened: &Opened) -> Result<ThroughStore, ResidencyError> {
        Ok(ThroughStore {
            stored: Stored::new(opened)?,
            through: Arc::new(Through::new(opened.clone())),
        })
    }
}

impl Backend for ThroughStore {
    fn models(&self) -> Vec<Arc<Listing>> {
        self.stored.models()
    }

    fn open(&self, listing: &Listing, path: &str) -> io::Result<Arc<dyn Content>> {
        if self.stored.is_small(path) {
            return self.stored.open(listing, path);
        }
        Ok(Arc::new(Shard {
            through: Arc::clone(&self.through),
            name: path.to_owned(),
            brought: Mutex::new(None),
        }))
    }

    fn is_peer(&self) -> bool {
        true
    }
}

/// One request's view of a shard.
struct Shard {
    through: Arc<Through>,
    name: String,
    /// What the request reads from just now.
    brought: Mutex<Option<Brought>>,
}

impl Shard {
    /// Reads from `offset` on as much as one holder has, and at least a byte.
    fn read_some(
        &self,
        brought: &mut Option<Brought>,
        offset: u64,
        into: &mut [u8],
    ) -> io::Result<usize> {
        let mut repairs = 0;
        loop {
            let here = self.at(brought, offset)?;
            let left = usize::try_from(here.range.end - offset).unwrap_or(usize::MAX);
            let len = into.len().min(left);
            match self
                .through
                .read(here, &self.name, offset, &mut into[..len])
            {
                Ok(()) => return Ok(len),
                Err(error) if error.refetch() && repairs < REPAIRS_MAX => {
                    repairs += 1;
                    *brought = None;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }

    fn at<'a>(&self, brought: &'a mut Option<Brought>, offset: u64) -> io::Result<&'a Brought> {
        let holds = |b: &Brought| b.range.start <= offset && offset < b.range.end;
        // What is no longer needed goes first: it may hold one of few places in memory, and
        // requests that each hold one and wait for another would wait for ever.
        let old = brought.take_if(|b| !holds(b));
        drop(old);
        match brought {
            Some(here) => Ok(here),
            none => Ok(none.insert(self.through.bring(&self.name, offset).map_err(refused)?)),
        }
    }
}

/// `NotFound` where asking again changes nothing, so that a client asks its next source.
fn refused(error: ResidencyError) -> io::Error {
    let kind = match &error {
        ResidencyError::Hub(
            HubError::NotFound { .. } | HubError::CapReached { .. } | HubError::Offline { .. },
        )
        | ResidencyError::NoSuchFile { .. }
        | ResidencyError::Missing { .. }
        | ResidencyError::MissingExpert { .. } => io::ErrorKind::NotFound,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

impl Content for Shard {
    /// The first holder's bytes alone: a whole shard may take hours, and its reader wants to see it
    /// move.
    fn ready(&self, range: ByteRange) -> io::Result<bool> {
        if range.is_empty() {
            return Ok(true);
        }
        let mut brought = self.brought.lock().unwrap_or_else(PoisonError::into_inner);
        match self.at(&mut brought, range.start) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let mut bytes = vec![0; len];
        let mut brought = self.brought.lock().unwrap_or_else(PoisonError::into_inner);
        let mut filled = 0;
        while filled < len {
            let from = offset + filled as u64;
            filled += self.read_some(&mut brought, from, &mut bytes[filled..])?;
        }
        Ok(bytes.into())
    }
}
