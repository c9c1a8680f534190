//! Sharing what a store holds: each shard put together again from headers, core, experts and rest.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use sha2::Digest as _;
use sha2::Sha256;

use super::Backend;
use super::Content;
use super::Entry;
use super::Listing;
use crate::residency::Opened;
use crate::residency::ResidencyError;
use crate::store::ModelStore;
use crate::store::Shards;
use crate::store::StoreError;
use crate::terms::ByteRange;
use crate::terms::Digest;

/// One model of a store, complete or not. What is missing is not found here, and the client asks its
/// next source.
pub struct Stored {
    listing: Arc<Listing>,
    store: ModelStore,
    shards: Arc<Shards>,
    small: BTreeMap<String, Bytes>,
}

impl Stored {
    /// Shares an opened model under its own name and commit.
    ///
    /// Only files whose sha256 is known are listed: that is what a client checks them by.
    ///
    /// # Errors
    ///
    /// If the store's metadata cannot be read.
    pub fn new(opened: &Opened) -> Result<Stored, ResidencyError> {
        let shards = Shards::new(&opened.layout);
        let mut files = BTreeMap::new();
        let mut small = BTreeMap::new();
        for (path, facts) in &opened.snapshot.files {
            let size = facts.size;
            if shards.names().contains(path) {
                if let Some(sha256) = facts.sha256 {
                    files.insert(path.clone(), Entry { size, sha256 });
                }
            } else if let Some(bytes) = opened.meta(path)? {
                let sha256 = Digest(Sha256::digest(&bytes).into());
                let size = bytes.len() as u64;
                files.insert(path.clone(), Entry { size, sha256 });
                small.insert(path.clone(), Bytes::from(bytes));
            }
        }
        let listing = Listing {
            repo: opened.snapshot.repo.clone(),
            commit: opened.snapshot.commit.clone(),
            files,
        };
        Ok(Stored {
            listing: Arc::new(listing),
            store: opened.store.clone(),
            shards: Arc::new(shards),
            small,
        })
    }

    /// Name, commit and files.
    pub fn listing(&self) -> &Listing {
        &self.listing
    }

    /// Whether a file is held as it is, rather than put together from parts.
    pub(super) fn is_small(&self, path: &str) -> bool {
        self.small.contains_key(path)
    }
}

impl Backend for Stored {
    fn models(&self) -> Vec<Arc<Listing>> {
        vec![Arc::clone(&self.listing)]
    }

    fn open(&self, _: &Listing, path: &str) -> io::Result<Arc<dyn Content>> {
        if let Some(bytes) = self.small.get(path) {
            return Ok(Arc::new(Small(bytes.clone())));
        }
        Ok(Arc::new(Shard {
            store: self.store.clone(),
            shards: Arc::clone(&self.shards),
            name: path.to_owned(),
        }))
    }

    fn is_peer(&self) -> bool {
        true
    }
}

struct Small(Bytes);

impl Content for Small {
    fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start.checked_add(len);
        let end = end
            .filter(|end| *end <= self.0.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(self.0.slice(start..end))
    }
}

struct Shard {
    store: ModelStore,
    shards: Arc<Shards>,
    name: String,
}

impl Content for Shard {
    fn has(&self, range: ByteRange) -> bool {
        self.store.has_range(&self.shards, &self.name, range)
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let mut bytes = vec![0; len];
        let read = self
            .store
            .read_shard(&self.shards, &self.name, offset, &mut bytes);
        match read {
            Ok(()) => Ok(Bytes::from(bytes)),
            Err(error @ StoreError::Absent { .. }) => {
                Err(io::Error::new(io::ErrorKind::NotFound, error))
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }
}
