//! `store.json`: what was set last for this home.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde::Serialize;

use super::Budget;
use super::Policy;
use super::Store;
use super::disk::Disk;
use super::disk::RealDisk;
use super::disk::read_file;
use super::disk::write_file;
use super::error::StoreError;

/// What was set last. A running process uses its own options; this is what others can show, and
/// which models are installed without a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The budget somebody chose, if anybody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Bytes of free disk that experts never touch, if somebody chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve: Option<u64>,
    /// Which expert goes when there is no room, if somebody chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Models that do not count against the budget, as `ORG--NAME/COMMIT`.
    #[serde(default)]
    pub unlimited: BTreeSet<String>,
}

impl Settings {
    /// What is set for a home; nothing, if nothing was ever set.
    ///
    /// # Errors
    ///
    /// Settings that cannot be read are not empty settings: they would tell which models must not be
    /// evicted.
    pub(super) fn read(disk: &dyn Disk, home: &Path) -> io::Result<Self> {
        match read_file(disk, &home.join("store.json"))? {
            Some(bytes) => Ok(serde_json::from_slice(&bytes)?),
            None => Ok(Settings::default()),
        }
    }

    pub(super) fn write(&self, disk: &dyn Disk, home: &Path) -> Result<(), StoreError> {
        let path = home.join("store.json");
        let failed = |e| StoreError::io("write", &path, e);
        let text = serde_json::to_vec_pretty(self).map_err(|e| failed(e.into()))?;
        write_file(disk, &path, &text).map_err(failed)
    }
}

impl Store {
    /// What was set last for the store in this folder, which need not exist yet.
    ///
    /// # Errors
    ///
    /// If the settings are there and cannot be read.
    pub fn settings(home: &Path) -> Result<Settings, StoreError> {
        let read = Settings::read(&RealDisk, home);
        read.map_err(|e| StoreError::io("read", &home.join("store.json"), e))
    }

    /// Remembers what somebody chose, for later processes; `None` leaves what was chosen before.
    ///
    /// # Errors
    ///
    /// If another process holds the lock for too long, or the disk refuses.
    pub fn remember(
        &self,
        budget: Option<Budget>,
        reserve: Option<u64>,
        policy: Option<Policy>,
    ) -> Result<(), StoreError> {
        let entered = self.inner.enter(super::budget::GATE_WAIT)?;
        let home = &self.inner.home;
        let read = Settings::read(&*self.inner.disk, home);
        let mut settings = read.map_err(|e| StoreError::io("read", &home.join("store.json"), e))?;
        let before = settings.clone();
        settings.budget = budget.or(settings.budget);
        settings.reserve = reserve.or(settings.reserve);
        settings.policy = policy.or(settings.policy);
        if settings != before {
            settings.write(&*self.inner.disk, home)?;
        }
        drop(entered);
        Ok(())
    }
}
