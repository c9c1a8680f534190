//! Names on a simulated disk, and changes of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Folder,
    File(u64),
}

/// A change of names that a power loss may undo.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Add(PathBuf, Node),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf, Node),
}

impl Change {
    pub(super) fn touches(&self, folder: &Path) -> bool {
        let within = |path: &Path| path.parent() == Some(folder);
        match self {
            Change::Add(path, _) | Change::Remove(path) => within(path),
            Change::Rename(from, to, _) => within(from) || within(to),
        }
    }

    pub(super) fn apply(&self, names: &mut BTreeMap<PathBuf, Node>) {
        match self {
            Change::Add(path, node) => {
                names.insert(path.clone(), *node);
            }
            Change::Remove(path) => {
                names.retain(|name, _| !name.starts_with(path));
            }
            Change::Rename(from, to, node) => {
                names.remove(from);
                names.insert(to.clone(), *node);
            }
        }
    }
}

/// Whether a path is that of an expert which others may read: `experts/001/0002`.
pub(super) fn has_its_name(path: &Path) -> bool {
    let mut parts = path.components().rev().map(|part| part.as_os_str());
    let number = |part: &std::ffi::OsStr| part.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    parts.next().is_some_and(number)
        && parts.next().is_some_and(number)
        && parts.next().is_some_and(|above| above == "experts")
}
