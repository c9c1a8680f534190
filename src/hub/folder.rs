//! A local folder as a source: a model's own folder, a folder of `ORG/NAME` folders, or a Hugging
//! Face cache. Read only, and never trusted further than a server would be.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs;
use std::fs::File;
use std::io;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;

use bytes::Bytes;
use serde::Deserialize;
use sha2::Digest as _;
use sha2::Sha256;

use super::FileFacts;
use super::HubError;
use super::Snapshot;
use super::address::stays_inside;
use super::api::check_whole;
use crate::terms::ByteRange;
use crate::terms::Digest;
use crate::terms::RepoId;
use crate::terms::Revision;

/// Files one folder may hold, and folders inside folders: a model has a hundred files in one.
const FILES_MAX: usize = 100_000;
const DEPTH_MAX: usize = 8;
/// Longest shard header that is read for the folder's identity.
const HEADER_MAX: u64 = 100_000_000;

/// One folder that serves as a source.
pub(super) struct FolderSource {
    root: PathBuf,
    /// Commits worked out once a process: reading every header takes a while.
    commits: Mutex<HashMap<PathBuf, Revision>>,
}

/// Where a repository lies in the folder.
enum Place {
    /// Plain files; the commit is worked out from them.
    Model(PathBuf),
    /// `models--ORG--NAME` of a Hugging Face cache.
    Cache(PathBuf),
}

impl FolderSource {
    pub(super) fn open(root: &Path) -> Result<Self, HubError> {
        let wrong = |why: String| HubError::Address {
            address: root.display().to_string(),
            why,
        };
        match fs::metadata(root) {
            Ok(found) if found.is_dir() => Ok(FolderSource {
                root: root.to_owned(),
                commits: Mutex::default(),
            }),
            Ok(_) => Err(wrong("it is a file, not a folder".to_owned())),
            Err(e) => Err(wrong(e.to_string())),
        }
    }

    fn place(&self, repo: &RepoId) -> Option<Place> {
        let cached = self.root.join(format!("models--{}", repo.folder_name()));
        if cached.join("snapshots").is_dir() {
            return Some(Place::Cache(cached));
        }
        if self.root.join("config.json").is_file() {
            return Some(Place::Model(self.root.clone()));
        }
        let nested = self.root.join(repo.as_str());
        nested
            .join("config.json")
            .is_file()
            .then_some(Place::Model(nested))
    }

    fn missing(&self, what: impl ToString) -> HubError {
        HubError::NotFound {
            what: what.to_string(),
            place: self.root.display().to_string(),
        }
    }

    pub(super) fn commit(&self, repo: &RepoId, revision: &str) -> Result<Revision, HubError> {
        let unknown = || self.missing(format_args!("{repo} at {revision}"));
        match self.place(repo).ok_or_else(|| self.missing(repo))? {
            Place::Model(folder) => {
                let own = self.own_commit(&folder)?;
                let asked = revision.parse::<Revision>();
                asked
                    .map_or(true, |asked| asked == own)
                    .then_some(own)
                    .ok_or_else(unknown)
            }
            Place::Cache(folder) => {
                let commit = match revision.parse::<Revision>() {
                    Ok(commit) => commit,
                    Err(_) if stays_inside(revision) => {
                        let path = folder.join("refs").join(revision);
                        let text = fs::read_to_string(path).map_err(|_| unknown())?;
                        text.trim().parse().map_err(|_| unknown())?
                    }
                    Err(_) => return Err(unknown()),
                };
                let there = folder.join("snapshots").join(commit.as_str()).is_dir();
                there.then_some(commit).ok_or_else(unknown)
            }
        }
    }

    /// The folder of a commit's files; `None` in the second place for a plain folder.
    fn files_of(
        &self,
        repo: &RepoId,
        commit: &Revision,
    ) -> Result<(PathBuf, Option<PathBuf>), HubError> {
        let unknown = || self.missing(format_args!("{repo} at {commit}"));
        match self.place(repo).ok_or_else(|| self.missing(repo))? {
            Place::Model(folder) if self.own_commit(&folder)? == *commit => Ok((folder, None)),
            Place::Model(_) => Err(unknown()),
            Place::Cache(folder) => {
                let files = folder.join("snapshots").join(commit.as_str());
                if files.is_dir() {
                    Ok((files, Some(folder)))
                } else {
                    Err(unknown())
                }
            }
        }
    }

    /// First 40 hexadecimal digits of the SHA-256 over config, index, shard sizes and header
    /// digests: it changes with anything that changes what the bytes mean, and needs no reading of
    /// whole shards.
    fn own_commit(&self, folder: &Path) -> Result<Revision, HubError> {
        let mut known = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(commit) = known.get(folder) {
            return Ok(commit.clone());
        }
        let mut sum = Sha256::new();
        let mut add = |bytes: &[u8]| {
            sum.update((bytes.len() as u64).to_le_bytes());
            sum.update(bytes);
        };
        add(&read(&folder.join("config.json"))?);
        let index = folder.join("model.safetensors.index.json");
        add(&if index.is_file() {
            read(&index)?
        } else {
            Vec::new()
        });
        for (name, size) in walk(folder)? {
            if name.ends_with(".safetensors") {
                add(name.as_bytes());
                add(&size.to_le_bytes());
                add(&header_digest(&folder.join(&name), size)?);
            }
        }
        let digest = Digest(sum.finalize().into()).to_string();
        let commit: Revision = digest[..40].parse().map_err(|_| self.missing("a commit"))?;
        known.insert(folder.to_owned(), commit.clone());
        Ok(commit)
    }

    pub(super) fn list(&self, repo: &RepoId, commit: &Revision) -> Result<Snapshot, HubError> {
        let (folder, cache) = self.files_of(repo, commit)?;
        let known = cache
            .map(|cache| cached_tree(&cache, commit))
            .unwrap_or_default();
        let mut files = BTreeMap::new();
        for (name, size) in walk(&folder)? {
            let facts = match known.get(&name) {
                Some(facts) => facts.clone(),
                None => facts_by_blob_name(&folder.join(&name), size),
            };
            files.insert(name, facts);
        }
        Ok(Snapshot {
            repo: repo.clone(),
            commit: commit.clone(),
            files,
        })
    }

    /// A whole small file, checked.
    pub(super) fn get(
        &self,
        snapshot: &Snapshot,
        path: &str,
        facts: &FileFacts,
    ) -> Result<Bytes, HubError> {
        let bytes = self.read(snapshot, path, ByteRange::new(0, facts.size))?;
        check_whole(&bytes, facts).map_err(|why| HubError::Damaged {
            what: path.to_owned(),
            place: self.root.display().to_string(),
            why,
        })?;
        Ok(bytes.into())
    }

    /// `range` of a file, if the file is the one the snapshot means.
    pub(super) fn read(
        &self,
        snapshot: &Snapshot,
        path: &str,
        range: ByteRange,
    ) -> Result<Vec<u8>, HubError> {
        let (folder, _) = self.files_of(&snapshot.repo, &snapshot.commit)?;
        let facts = snapshot.files.get(path).ok_or_else(|| self.missing(path))?;
        if !stays_inside(path) {
            return Err(self.missing(path));
        }
        let file = folder.join(path);
        let disk = |source| HubError::Disk {
            path: file.clone(),
            source,
        };
        let open = match File::open(&file) {
            Ok(open) => open,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(self.missing(path)),
            Err(e) => return Err(disk(e)),
        };
        let size = open.metadata().map_err(disk)?.len();
        let named = facts_by_blob_name(&file, size).sha256;
        let other = named.is_some() && facts.sha256.is_some() && named != facts.sha256;
        if size != facts.size || other {
            return Err(HubError::WrongContent {
                url: file.display().to_string(),
                what: path.to_owned(),
                expected: format!("{} bytes", facts.size),
                actual: format!("another file of {size} bytes"),
            });
        }
        let length = usize::try_from(range.len()).map_err(|_| self.missing(path))?;
        let mut bytes = vec![0; length];
        open.read_exact_at(&mut bytes, range.start).map_err(disk)?;
        Ok(bytes)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, HubError> {
    fs::read(path).map_err(|source| HubError::Disk {
        path: path.to_owned(),
        source,
    })
}

/// SHA-256 of a shard's header, length field included; of the length field alone where that is
/// nonsense, which whoever reads the header will report.
fn header_digest(path: &Path, size: u64) -> Result<[u8; 32], HubError> {
    let disk = |source| HubError::Disk {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(disk)?;
    let mut length = [0; 8];
    let mut sum = Sha256::new();
    if size >= 8 {
        file.read_exact(&mut length).map_err(disk)?;
        sum.update(length);
        let header = u64::from_le_bytes(length);
        if header <= HEADER_MAX && header <= size - 8 {
            let mut bytes = Vec::new();
            file.take(header).read_to_end(&mut bytes).map_err(disk)?;
            sum.update(&bytes);
        }
    }
    Ok(sum.finalize().into())
}

/// Every regular file below `folder` with its size, hidden ones left out, in order of name.
fn walk(folder: &Path) -> Result<BTreeMap<String, u64>, HubError> {
    let mut files = BTreeMap::new();
    let mut open = vec![(folder.to_owned(), String::new(), 0)];
    while let Some((at, prefix, depth)) = open.pop() {
        let disk = |source| HubError::Disk {
            path: at.clone(),
            source,
        };
        for entry in fs::read_dir(&at).map_err(disk)? {
            let entry = entry.map_err(disk)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            // `metadata` follows links: a Hugging Face cache is made of them.
            let Ok(found) = fs::metadata(entry.path()) else {
                continue;
            };
            if name.starts_with('.') || files.len() >= FILES_MAX {
                continue;
            }
            if found.is_file() {
                files.insert(format!("{prefix}{name}"), found.len());
            } else if found.is_dir() && depth < DEPTH_MAX {
                open.push((entry.path(), format!("{prefix}{name}/"), depth + 1));
            }
        }
    }
    Ok(files)
}

/// What a cache's blob is named after: a SHA-256 for large files, a git object for small ones. The
/// name says what the file should be, not what it is; digests of spans are checked as ever.
fn facts_by_blob_name(path: &Path, size: u64) -> FileFacts {
    let blob = fs::canonicalize(path)
        .ok()
        .filter(|real| real.parent().and_then(Path::file_name) == Some("blobs".as_ref()));
    let name = blob
        .as_deref()
        .and_then(Path::file_name)
        .and_then(|n| n.to_str());
    FileFacts {
        size,
        sha256: name.and_then(|n| n.parse().ok()),
        git_sha1: name
            .filter(|n| n.parse::<Revision>().is_ok())
            .map(str::to_owned),
    }
}

/// What the cache recorded of the commit's tree, where it did.
fn cached_tree(cache: &Path, commit: &Revision) -> BTreeMap<String, FileFacts> {
    #[derive(Deserialize)]
    struct Tree {
        files: BTreeMap<String, Entry>,
    }
    #[derive(Deserialize)]
    struct Entry {
        size: u64,
        blob_id: Option<String>,
        lfs_sha256: Option<Digest>,
        lfs_size: Option<u64>,
    }
    let path = cache.join("trees").join(format!("{commit}.json"));
    let tree = fs::read(path)
        .ok()
        .and_then(|text| serde_json::from_slice::<Tree>(&text).ok());
    let entries = tree.map(|tree| tree.files).unwrap_or_default();
    let facts = |entry: Entry| FileFacts {
        size: entry.lfs_size.unwrap_or(entry.size),
        sha256: entry.lfs_sha256,
        git_sha1: entry.blob_id.filter(|_| entry.lfs_sha256.is_none()),
    };
    entries
        .into_iter()
        .map(|(name, entry)| (name, facts(entry)))
        .collect()
}
