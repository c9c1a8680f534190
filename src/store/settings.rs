//! `store.json`: what was set last for this home.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use serde::Serialize;

use super::disk::Disk;
use super::disk::read_file;
use super::disk::write_file;
use super::error::StoreError;

/// What was set last. A running process uses its own options; this is what others can show, and
/// which models are installed without a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Budget in bytes; none is unlimited.
    #[serde(default)]
    pub budget: Option<u64>,
    /// Bytes of free disk that experts never touch.
    #[serde(default)]
    pub reserve: u64,
    /// Models that do not count against the budget, as `ORG--NAME/COMMIT`.
    #[serde(default)]
    pub unlimited: BTreeSet<String>,
}

impl Settings {
    /// What is set for a home. Missing or unreadable settings are empty ones: they only say what a
    /// person can say again.
    pub(super) fn read(disk: &dyn Disk, home: &Path) -> Self {
        let bytes = read_file(disk, &home.join("store.json")).ok().flatten();
        bytes
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    pub(super) fn write(&self, disk: &dyn Disk, home: &Path) -> Result<(), StoreError> {
        let path = home.join("store.json");
        let failed = |e| StoreError::io("write", &path, e);
        let text = serde_json::to_vec_pretty(self).map_err(|e| failed(e.into()))?;
        write_file(disk, &path, &text).map_err(failed)
    }
}
