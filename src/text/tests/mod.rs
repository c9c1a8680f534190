//! Proofs of the room.

mod chat;
mod messages;
mod reply;
mod tokenizer;
mod utf8;

use std::fs;
use std::path::PathBuf;

use super::tokenizer::Tokenizer;

fn fixture(path: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(path);
    fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The tokenizer of the small trained checkpoint: 2,048 ordinary tokens, K3's special ones.
fn austen() -> Tokenizer {
    Tokenizer::new(
        &fixture("austen-k3/model/tiktoken.model"),
        &fixture("austen-k3/model/tokenizer_config.json"),
    )
    .unwrap()
}

/// A number generator for seeded tests: the same strings on every machine.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// The integers of a tensor in a small safetensors file.
fn int_tensor(path: &str, name: &str) -> Vec<u32> {
    let file = fixture(path);
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap());
    let body = 8 + usize::try_from(header_len).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&file[8..body]).unwrap();
    let entry = &header[name];
    assert_eq!(entry["dtype"], "I32", "{path} {name}");
    let at = |n: usize| body + usize::try_from(entry["data_offsets"][n].as_u64().unwrap()).unwrap();
    file[at(0)..at(1)]
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}
