//! Buffers for experts, aligned as direct reads want them and used again and again: fresh memory costs as much time as
//! the read itself.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use bytes::Bytes;
use memmap2::MmapMut;

use super::direct;

/// Buffers that wait for their next use. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    len: usize,
    free: Arc<Mutex<Vec<MmapMut>>>,
}

/// A buffer on loan; it returns when it drops.
#[derive(Debug)]
pub(super) struct Pooled {
    memory: Option<MmapMut>,
    len: usize,
    pool: Pool,
}

impl Pool {
    /// Buffers of `len` bytes.
    pub(super) fn new(len: usize) -> Pool {
        let free = Arc::default();
        Pool { len, free }
    }

    pub(super) fn take(&self) -> io::Result<Pooled> {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let memory = match free {
            Some(memory) => memory,
            None => direct::memory(self.len)?,
        };
        Ok(Pooled {
            memory: Some(memory),
            len: self.len,
            pool: self.clone(),
        })
    }
}

impl Pooled {
    /// The whole buffer, which may be longer than what it is for.
    pub(super) fn space(&mut self) -> &mut [u8] {
        self.memory.as_deref_mut().unwrap_or_default()
    }

    /// What it is for, now filled.
    pub(super) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Pooled {
    fn as_ref(&self) -> &[u8] {
        let memory = self.memory.as_deref().unwrap_or_default();
        &memory[..self.len.min(memory.len())]
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mut free = self
            .pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.extend(self.memory.take());
    }
}
