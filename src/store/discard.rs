//! Giving up what has turned out to be wrong from the first.

use std::collections::HashSet;

use super::ModelStore;
use super::Shards;
use super::error::StoreError;
use super::shards::subject_of;
use super::table::Subject;

impl ModelStore {
    /// Removes every file that holds bytes of a shard, and forgets their digests: the whole shard has
    /// another sha256 than it should, and nobody can say which of them is to blame. Returns how many
    /// files that were.
    ///
    /// To remove them alone would not do: what is fetched next is held against what is known, and the
    /// right bytes would be refused for not being the wrong ones.
    ///
    /// # Errors
    ///
    /// If the disk refuses.
    pub fn discard_shard(&self, shards: &Shards, shard: &str) -> Result<usize, StoreError> {
        let mut seen = HashSet::new();
        let stretches = shards.stretches(shard).iter();
        let subjects: Vec<Subject> = stretches
            .map(|stretch| subject_of(shard, stretch))
            .filter(|subject| seen.insert(subject.clone()))
            .collect();
        let log = &self.record().log;
        // Before they go: a stop in between leaves files that nothing vouches for, which are removed.
        let forgotten = log.forget(&subjects);
        forgotten.map_err(|e| StoreError::io("write", log.path(), e))?;
        let disk = &self.store().inner.disk;
        let mut removed = 0;
        for subject in &subjects {
            let path = self.folder().join(subject.path());
            if disk.facts(&path).is_ok() {
                self.remove_damaged(subject, &path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}
