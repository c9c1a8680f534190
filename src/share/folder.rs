//! A model's folder in Hugging Face layout.

use std::collections::BTreeMap;
use std::fs::File;
use std::fs::Metadata;
use std::io;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use bytes::BytesMut;
use sha2::Digest as _;
use sha2::Sha256;

use super::Backend;
use super::Content;
use super::Entry;
use super::Listing;
use super::ShareError;
use crate::terms::Digest;
use crate::terms::RepoId;

/// Folders inside folders, at most; a model has none or one.
const DEPTH_MAX: usize = 8;

/// One model's folder, listed and digested once.
///
/// A link to a file is followed (a Hugging Face cache is made of them), a link to a folder is not.
pub struct Folder {
    listing: Arc<Listing>,
    files: BTreeMap<String, Known>,
}

/// Where a file lies, and how it looked when its digest was computed.
struct Known {
    path: PathBuf,
    stamp: Stamp,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    size: u64,
    seconds: i64,
    nanos: i64,
}

impl Stamp {
    fn of(meta: &Metadata) -> Stamp {
        Stamp {
            size: meta.len(),
            seconds: meta.mtime(),
            nanos: meta.mtime_nsec(),
        }
    }
}

impl Folder {
    /// Reads every file of `root` once, for its digest, and serves them as `repo`.
    ///
    /// # Errors
    ///
    /// [`ShareError::NoModel`] without a config.json, [`ShareError::Read`] where something in the
    /// folder cannot be read.
    pub fn open(repo: RepoId, root: &Path) -> Result<Folder, ShareError> {
        let mut files = BTreeMap::new();
        collect(root, "", 0, &mut files)?;
        if !files.contains_key("config.json") {
            return Err(ShareError::NoModel(root.to_owned()));
        }
        let mut known = BTreeMap::new();
        let mut entries = BTreeMap::new();
        for (name, path) in files {
            let (entry, stamp) = digest(&path).map_err(|source| ShareError::Read {
                path: path.clone(),
                source,
            })?;
            entries.insert(name.clone(), entry);
            known.insert(name, Known { path, stamp });
        }
        Ok(Folder {
            listing: Arc::new(Listing::new(repo, entries)),
            files: known,
        })
    }

    /// Name, commit and files.
    pub fn listing(&self) -> &Listing {
        &self.listing
    }
}

fn collect(
    folder: &Path,
    prefix: &str,
    depth: usize,
    files: &mut BTreeMap<String, PathBuf>,
) -> Result<(), ShareError> {
    let read = |source| ShareError::Read {
        path: folder.to_owned(),
        source,
    };
    for item in std::fs::read_dir(folder).map_err(read)? {
        let item = item.map_err(read)?;
        // Names that no URL and no JSON can carry, and hidden files (a download's own state),
        // are no part of a model.
        let name = match item.file_name().into_string() {
            Ok(name) if !name.starts_with('.') => name,
            _ => continue,
        };
        let path = item.path();
        let kind = item.file_type().map_err(read)?;
        if kind.is_dir() {
            if depth < DEPTH_MAX {
                collect(&path, &format!("{prefix}{name}/"), depth + 1, files)?;
            }
        } else if std::fs::metadata(&path).is_ok_and(|meta| meta.is_file()) {
            files.insert(format!("{prefix}{name}"), path);
        }
    }
    Ok(())
}

fn digest(path: &Path) -> io::Result<(Entry, Stamp)> {
    let mut file = File::open(path)?;
    let stamp = Stamp::of(&file.metadata()?);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        size += n as u64;
        hash.update(&buffer[..n]);
    }
    let sha256 = Digest(hash.finalize().into());
    Ok((Entry { size, sha256 }, Stamp { size, ..stamp }))
}

impl Backend for Folder {
    fn models(&self) -> Vec<Arc<Listing>> {
        vec![Arc::clone(&self.listing)]
    }

    fn open(&self, _: &Listing, path: &str) -> io::Result<Arc<dyn Content>> {
        let known = self.files.get(path).ok_or(io::ErrorKind::NotFound)?;
        let file = File::open(&known.path)?;
        // The digest went out as this file's ETag; other bytes must not go out under it.
        if Stamp::of(&file.metadata()?) != known.stamp {
            return Err(io::Error::other("the file changed since it was listed"));
        }
        Ok(Arc::new(Open(file)))
    }
}

struct Open(File);

impl Content for Open {
    fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let mut bytes = BytesMut::zeroed(len);
        self.0.read_exact_at(&mut bytes, offset)?;
        Ok(bytes.freeze())
    }
}
