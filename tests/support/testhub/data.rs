//! Repositories: files in memory, on disk, or made up from a seed.

use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use sha1::Digest as _;

/// Where a file's bytes come from.
#[derive(Clone, Debug)]
pub enum Content {
    Memory(Arc<Vec<u8>>),
    Path(PathBuf),
    /// Bytes made up from a seed: see [`virtual_bytes`].
    Virtual {
        seed: u64,
        size: u64,
    },
}

impl From<&[u8]> for Content {
    fn from(bytes: &[u8]) -> Self {
        Content::Memory(Arc::new(bytes.to_vec()))
    }
}

impl Content {
    pub fn size(&self) -> u64 {
        match self {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Path(path) => fs::metadata(path).unwrap().len(),
            Content::Virtual { size, .. } => *size,
        }
    }

    pub fn read(&self, start: u64, length: usize) -> Vec<u8> {
        match self {
            Content::Memory(bytes) => {
                let start = usize::try_from(start).unwrap();
                bytes[start..start + length].to_vec()
            }
            Content::Path(path) => {
                let mut bytes = vec![0; length];
                let file = File::open(path).unwrap();
                file.read_exact_at(&mut bytes, start).unwrap();
                bytes
            }
            Content::Virtual { seed, .. } => virtual_bytes(*seed, start, length),
        }
    }
}

/// Bytes `start..start + length` of the made-up file `seed`.
pub fn virtual_bytes(seed: u64, start: u64, length: usize) -> Vec<u8> {
    let first = start / 8;
    let last = (start + length as u64).div_ceil(8);
    let mut bytes = Vec::with_capacity((usize::try_from(last - first).unwrap()) * 8);
    for word in first..last {
        let mut z = (word ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    let skip = usize::try_from(start % 8).unwrap();
    bytes.drain(..skip);
    bytes.truncate(length);
    bytes
}

/// One file of one commit.
#[derive(Clone, Debug)]
pub struct TestFile {
    pub content: Content,
    pub size: u64,
    /// Stored apart, as large files are: redirected to the CDN, named by SHA-256.
    pub lfs: bool,
    /// Of the content; for made-up files above 64 MiB only made up too.
    pub sha256: String,
    pub git_sha1: String,
}

impl TestFile {
    pub fn new(name: &str, content: Content) -> Self {
        let size = content.size();
        let lfs = name.ends_with(".safetensors") || name.ends_with(".model") || size > 10 << 20;
        let (sha256, git_sha1) = if size <= 64 << 20 {
            let bytes = content.read(0, usize::try_from(size).unwrap());
            let mut git = sha1::Sha1::new();
            git.update(format!("blob {size}\0"));
            git.update(&bytes);
            (hex(&sha2::Sha256::digest(&bytes)), hex(&git.finalize()))
        } else {
            let name = format!("{content:?}");
            (
                hex(&sha2::Sha256::digest(&name)),
                hex(&sha1::Sha1::digest(&name)),
            )
        };
        TestFile {
            content,
            size,
            lfs,
            sha256,
            git_sha1,
        }
    }

    pub fn etag(&self) -> String {
        if self.lfs {
            self.sha256.clone()
        } else {
            self.git_sha1.clone()
        }
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Who may read a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    Public,
    /// Only this token; for all others it does not exist.
    Private(String),
    /// Any token sees it; only this one has accepted its terms.
    Gated(String),
    /// Taken down.
    Disabled,
}

/// A repository with its commits.
#[derive(Clone, Debug)]
pub struct Repo {
    pub name: String,
    pub access: Access,
    /// Commit to files.
    pub commits: BTreeMap<String, BTreeMap<String, TestFile>>,
    pub main: String,
}

impl Repo {
    /// A public repository with one empty commit.
    pub fn new(name: &str) -> Self {
        let main = commit_name(name, 0);
        Repo {
            name: name.to_owned(),
            access: Access::Public,
            commits: BTreeMap::from([(main.clone(), BTreeMap::new())]),
            main,
        }
    }

    /// Every file of a folder, hidden ones left out.
    pub fn folder(name: &str, folder: impl AsRef<Path>) -> Self {
        let mut repo = Repo::new(name);
        for entry in fs::read_dir(folder.as_ref()).unwrap() {
            let entry = entry.unwrap();
            let file = entry.file_name().into_string().unwrap();
            if entry.file_type().unwrap().is_file() && !file.starts_with('.') {
                repo = repo.file(&file, Content::Path(entry.path()));
            }
        }
        repo
    }

    /// Adds a file to the commit `main` points to.
    pub fn file(mut self, path: &str, content: impl Into<Content>) -> Self {
        let file = TestFile::new(path, content.into());
        self.commits
            .get_mut(&self.main)
            .unwrap()
            .insert(path.to_owned(), file);
        self
    }

    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// A new commit with one file changed; `main` moves to it.
    pub fn commit(&mut self, path: &str, content: Content) -> String {
        let mut files = self.commits[&self.main].clone();
        files.insert(path.to_owned(), TestFile::new(path, content));
        let name = commit_name(&self.name, self.commits.len());
        self.commits.insert(name.clone(), files);
        self.main.clone_from(&name);
        name
    }
}

fn commit_name(repo: &str, n: usize) -> String {
    hex(&sha1::Sha1::digest(format!("{repo} {n}")))
}
