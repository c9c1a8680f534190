//! What the tests of this room share: goldens from disk, numbers from a seed, comparison.

use std::collections::BTreeMap;
use std::path::Path;

/// Every tensor of a small safetensors file: dtype and bytes.
pub(super) struct Tensors(BTreeMap<String, (String, Vec<u8>)>);

impl Tensors {
    /// Reads `fixtures/goldens/unit_NAME.safetensors`.
    pub(super) fn golden(name: &str) -> Tensors {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("fixtures/goldens/unit_{name}.safetensors"));
        let file = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (length, rest) = file.split_first_chunk::<8>().unwrap();
        let (head, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let head: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(head).unwrap();
        let tensors = head.into_iter().filter(|(name, _)| name != "__metadata__");
        Tensors(
            tensors
                .map(|(name, entry)| {
                    let offset = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
                    let bytes = data[offset(0)..offset(1)].to_vec();
                    (name, (entry["dtype"].as_str().unwrap().to_owned(), bytes))
                })
                .collect(),
        )
    }

    /// The bytes as they lie in the file.
    pub(super) fn bytes(&self, name: &str) -> &[u8] {
        &self
            .0
            .get(name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
            .1
    }

    /// F32 as stored, BF16 widened.
    pub(super) fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        match self.0[name].0.as_str() {
            "F32" => crate::kernel::bf16::read_f32(bytes),
            "BF16" => crate::kernel::bf16::widen(bytes),
            other => panic!("{name} is {other}"),
        }
    }

    /// I32.
    pub(super) fn i32(&self, name: &str) -> Vec<i32> {
        assert_eq!(self.0[name].0, "I32", "{name}");
        self.bytes(name)
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| i32::from_le_bytes(b))
            .collect()
    }
}

/// Fails unless every value is within 1e-5 of the largest wanted one.
#[track_caller]
pub(super) fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let size = want.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    assert!(size > 0.0, "{what}: nothing to compare with");
    let mut worst = (0, 0.0f32);
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let off = (g - w).abs();
        assert!(off.is_finite(), "{what}[{i}]: {g}, wanted {w}");
        if off > worst.1 {
            worst = (i, off);
        }
    }
    let (i, off) = worst;
    assert!(
        off <= 1e-5 * size,
        "{what}[{i}]: {} wanted {}, largest {size}",
        got[i],
        want[i]
    );
}

/// Fails unless the bits are the same; all NaNs count as one.
#[track_caller]
pub(super) fn assert_same_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
        assert!(
            same,
            "{what}[{i}]: {g:e} ({:08x}), wanted {w:e} ({:08x})",
            g.to_bits(),
            w.to_bits()
        );
    }
}

/// Numbers from a seed (SplitMix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `-1..1`.
    pub(super) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    pub(super) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    /// `n` bfloat16 in `-1..1`, as bytes.
    pub(super) fn bf16(&mut self, n: usize) -> Vec<u8> {
        (0..n)
            .flat_map(|_| ((self.unit().to_bits() >> 16) as u16).to_le_bytes())
            .collect()
    }
}
