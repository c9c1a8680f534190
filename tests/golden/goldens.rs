//! Golden values from a safetensors file.

use deltafin::checkpoint::Dtype;
use deltafin::checkpoint::Header;
use deltafin::checkpoint::TensorEntry;

use crate::folder::fixture;

pub(crate) struct Goldens {
    file: Vec<u8>,
    header: Header,
}

impl Goldens {
    pub(crate) fn open(path: &str) -> Goldens {
        let file = std::fs::read(fixture(path)).unwrap();
        let header = Header::read(path, &file, file.len() as u64).unwrap();
        Goldens { file, header }
    }

    /// All names that begin with `prefix`.
    pub(crate) fn names(&self, prefix: &str) -> Vec<&str> {
        let names = self.header.entries().iter().map(|entry| &*entry.name);
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    fn entry(&self, name: &str, dtype: Dtype) -> (&TensorEntry, &[u8]) {
        let entry = self
            .header
            .get(name)
            .unwrap_or_else(|| panic!("no golden {name}"));
        assert_eq!(entry.dtype, dtype, "{name}");
        let range = entry.range.start as usize..entry.range.end as usize;
        (entry, &self.file[range])
    }

    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        let (_, bytes) = self.entry(name, Dtype::F32);
        let values = bytes.as_chunks().0.iter();
        values.map(|value| f32::from_le_bytes(*value)).collect()
    }

    pub(crate) fn i32(&self, name: &str) -> Vec<i32> {
        let (_, bytes) = self.entry(name, Dtype::I32);
        let values = bytes.as_chunks().0.iter();
        values.map(|value| i32::from_le_bytes(*value)).collect()
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        self.i32(name)
            .into_iter()
            .map(|id| id.try_into().unwrap())
            .collect()
    }
}

/// Within `tolerance` everywhere, NaN nowhere.
#[track_caller]
pub(crate) fn assert_close(name: &str, found: &[f32], wanted: &[f32], tolerance: f32) {
    assert_eq!(found.len(), wanted.len(), "{name}: number of values");
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let off = (found - wanted).abs();
        assert!(
            off <= tolerance,
            "{name}[{at}]: {found} instead of {wanted}, off by {off}"
        );
    }
}

/// The same experts for every row, in any order, with weights within `tolerance`.
#[track_caller]
pub(crate) fn assert_routes(
    name: &str,
    top_k: usize,
    (experts, weights): (&[u16], &[f32]),
    (wanted, wanted_weights): (&[i32], Option<&[f32]>),
    tolerance: f32,
) {
    assert_eq!(experts.len(), wanted.len(), "{name}: number of experts");
    for (row, (experts, wanted)) in experts.chunks(top_k).zip(wanted.chunks(top_k)).enumerate() {
        for (at, expert) in wanted.iter().enumerate() {
            let found = experts.iter().position(|e| i32::from(*e) == *expert);
            let found = found
                .unwrap_or_else(|| panic!("{name} row {row}: {experts:?} instead of {wanted:?}"));
            if let Some(all) = wanted_weights {
                let off = (weights[row * top_k + found] - all[row * top_k + at]).abs();
                assert!(
                    off <= tolerance,
                    "{name} row {row}: weight of expert {expert} off by {off}"
                );
            }
        }
    }
}
