//! Where an expert lies, for whoever only guesses that it will be wanted.

use std::path::PathBuf;

use super::ModelStore;
use super::lock;
use super::recover;
use crate::terms::ExpertKey;

impl ModelStore {
    /// Where an expert of `len` bytes lies, if it is here and its bytes were compared with their digest. It is neither used
    /// by that nor held: a guess may not change what goes for another, so the file may vanish at any moment.
    pub fn peek(&self, key: ExpertKey, len: u64) -> Option<PathBuf> {
        let known = lock(&self.store().inner.state)
            .index
            .get(self.entry_id(key));
        known.filter(|known| known.len == len && known.checked)?;
        Some(recover::expert_path(self.folder(), key))
    }
}
