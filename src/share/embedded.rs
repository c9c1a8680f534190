//! The small trained model inside this binary, for the demonstration and for tests.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use sha2::Digest as _;
use sha2::Sha256;

use super::Backend;
use super::Content;
use super::Entry;
use super::Listing;
use crate::terms::Digest;
use crate::terms::RepoId;

macro_rules! files {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../fixtures/austen-k3/model/", $name)))),+]
    };
}

/// Every file of the checkpoint, as it lies in `fixtures/`.
static FILES: &[(&str, &[u8])] = files![
    "config.json",
    "generation_config.json",
    "model-00001-of-000009.safetensors",
    "model-00002-of-000009.safetensors",
    "model-00003-of-000009.safetensors",
    "model-00004-of-000009.safetensors",
    "model-00005-of-000009.safetensors",
    "model-00006-of-000009.safetensors",
    "model-00007-of-000009.safetensors",
    "model-00008-of-000009.safetensors",
    "model-00009-of-000009.safetensors",
    "model.safetensors.index.json",
    "tiktoken.model",
    "tokenizer_config.json",
];

/// The model `deltafin/austen-k3`: K3's architecture in 11.5 MB, trained on six novels.
pub struct Embedded {
    listing: Arc<Listing>,
}

impl Embedded {
    /// The model's name.
    pub const REPO: &str = "deltafin/austen-k3";

    /// Reads through the embedded files once, for their digests.
    pub fn new() -> Embedded {
        let repo: RepoId = Self::REPO.parse().expect("a constant of the right form");
        let files = FILES
            .iter()
            .map(|(name, bytes)| {
                let entry = Entry {
                    size: bytes.len() as u64,
                    sha256: Digest(Sha256::digest(bytes).into()),
                };
                ((*name).to_owned(), entry)
            })
            .collect();
        Embedded {
            listing: Arc::new(Listing::new(repo, files)),
        }
    }

    /// Name, commit and files.
    pub fn listing(&self) -> &Listing {
        &self.listing
    }
}

impl Default for Embedded {
    fn default() -> Self {
        Embedded::new()
    }
}

impl Backend for Embedded {
    fn models(&self) -> Vec<Arc<Listing>> {
        vec![Arc::clone(&self.listing)]
    }

    fn open(&self, _: &Listing, path: &str) -> io::Result<Arc<dyn Content>> {
        let (_, bytes) = FILES
            .iter()
            .find(|(name, _)| *name == path)
            .ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(Static(bytes)))
    }
}

struct Static(&'static [u8]);

impl Content for Static {
    fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start.checked_add(len).ok_or(io::ErrorKind::UnexpectedEof)?;
        let bytes = self.0.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(Bytes::from_static(bytes))
    }
}
