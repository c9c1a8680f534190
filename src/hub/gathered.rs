//! A span's bytes while they arrive.
//!
//! A large span has memory of its own, which goes back to the system the moment it is dropped. The
//! allocator's would stay with this process: spans of one length that come and go on many threads leave
//! holes between each other, and the memory that sixteen lanes need grew to that of thirty.

use memmap2::MmapMut;

/// Spans shorter than this are left to the allocator.
const OWN: usize = 1 << 20;

/// Bytes that arrive one after another.
#[derive(Debug)]
pub(super) enum Gathered {
    /// As many as there are.
    Heap(Vec<u8>),
    /// The first `len` of so many.
    Own { memory: MmapMut, len: usize },
}

impl Default for Gathered {
    fn default() -> Self {
        Gathered::Heap(Vec::new())
    }
}

impl Gathered {
    /// Makes room for `whole` bytes in all; false if there is no memory for them.
    pub(super) fn reserve(&mut self, whole: usize) -> bool {
        match self {
            Gathered::Heap(bytes) if bytes.is_empty() && whole >= OWN => {
                match MmapMut::map_anon(whole) {
                    Ok(memory) => {
                        #[cfg(target_os = "linux")]
                        let _ = memory.advise(memmap2::Advice::HugePage); // fewer faults, where it is allowed
                        *self = Gathered::Own { memory, len: 0 };
                        true
                    }
                    Err(_) => false,
                }
            }
            Gathered::Heap(bytes) => {
                let missing = whole.saturating_sub(bytes.len());
                bytes.try_reserve_exact(missing).is_ok()
            }
            Gathered::Own { memory, .. } => memory.len() >= whole,
        }
    }

    /// Appends bytes, for which there should be room.
    pub(super) fn add(&mut self, chunk: &[u8]) {
        if let Gathered::Own { memory, len } = self
            && let Some(room) = memory.get_mut(*len..*len + chunk.len())
        {
            room.copy_from_slice(chunk);
            *len += chunk.len();
            return;
        }
        if let Gathered::Own { .. } = self {
            *self = Gathered::Heap(self.as_ref().to_vec());
        }
        if let Gathered::Heap(bytes) = self {
            bytes.extend_from_slice(chunk);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.as_ref().len()
    }
}

impl AsRef<[u8]> for Gathered {
    fn as_ref(&self) -> &[u8] {
        match self {
            Gathered::Heap(bytes) => bytes,
            Gathered::Own { memory, len } => memory.get(..*len).unwrap_or_default(),
        }
    }
}

impl Clone for Gathered {
    fn clone(&self) -> Self {
        let bytes = self.as_ref();
        let mut copy = Gathered::default();
        if copy.reserve(bytes.len()) {
            copy.add(bytes);
            return copy;
        }
        Gathered::Heap(bytes.to_vec())
    }
}

impl From<Gathered> for bytes::Bytes {
    fn from(gathered: Gathered) -> bytes::Bytes {
        match gathered {
            Gathered::Heap(bytes) => bytes.into(),
            own @ Gathered::Own { .. } => bytes::Bytes::from_owner(own),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_gather_gives_the_same_bytes() {
        let all: Vec<u8> = (0..OWN + 999).map(|i| (i % 251) as u8).collect();
        for whole in [0, 10, OWN - 1, OWN, OWN + 999, 2 * OWN] {
            for part in [1 << 12, 70_001] {
                let mut gathered = Gathered::default();
                assert!(gathered.reserve(whole));
                for (n, chunk) in all.chunks(part).enumerate() {
                    if n == 3 {
                        gathered = gathered.clone();
                        assert!(gathered.reserve(all.len()) || whole >= OWN);
                    }
                    gathered.add(chunk);
                }
                assert_eq!(gathered.len(), all.len());
                assert!(bytes::Bytes::from(gathered) == all);
            }
        }
        assert!(!Gathered::default().reserve(usize::MAX / 2));
    }
}
