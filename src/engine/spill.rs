//! Sequences that do not fit into memory, on disk for as long as this process wants them.
//!
//! Not a snapshot: a spilled state is read back by the process that wrote it, or by nobody.

use std::fs::File;
use std::io;
use std::io::Read;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use std::time::Instant;

use sha2::Digest;
use sha2::Sha256;
use tempfile::TempPath;

use crate::checkpoint::Spec;
use crate::model::Sequence;

/// What spilling has cost since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spilled {
    /// States written.
    pub writes: u64,
    /// States read back.
    pub reads: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes read back.
    pub bytes_read: u64,
    /// Time for both; no sweep runs meanwhile.
    pub time: Duration,
    /// States that could not be written or read back. They were kept, or computed again.
    pub failed: u64,
}

impl Spilled {
    /// Time that writing and reading a state of `bytes` takes, as far as is known.
    pub(super) fn cost(&self, bytes: u64) -> Duration {
        /// Until something was measured: a disk that is not fast.
        const GUESS: f64 = 300e6;
        let moved = self.bytes_written + self.bytes_read;
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let rate = match moved {
            0 => GUESS,
            moved => moved as f64 / self.time.as_secs_f64().max(1e-9),
        };
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        Duration::from_secs_f64(2.0 * bytes as f64 / rate.max(1.0))
    }

    pub(super) fn wrote(&mut self, file: &SpillFile, began: Instant) {
        self.writes += 1;
        self.bytes_written += file.bytes;
        self.time += began.elapsed();
    }

    pub(super) fn read(&mut self, file: &SpillFile, began: Instant) {
        self.reads += 1;
        self.bytes_read += file.bytes;
        self.time += began.elapsed();
    }
}

/// One state on disk; removed when dropped.
#[derive(Debug)]
pub(super) struct SpillFile {
    path: TempPath,
    len: usize,
    bytes: u64,
    sha256: [u8; 32],
}

/// Values handled at a time.
const PIECE: usize = 1 << 16;

impl SpillFile {
    /// Writes a state into a new file in `folder`. Nothing is synced: after a crash nobody reads it.
    pub(super) fn write(folder: &Path, sequence: &Sequence) -> io::Result<SpillFile> {
        std::fs::create_dir_all(folder)?;
        let file = tempfile::Builder::new()
            .prefix("sequence-")
            .tempfile_in(folder)?;
        let (mut file, path) = file.into_parts();
        let mut hash = Sha256::new();
        let mut bytes = Vec::with_capacity(4 * PIECE);
        let mut total = 0;
        for slice in sequence.slices() {
            for piece in slice.values.chunks(PIECE) {
                bytes.clear();
                bytes.extend(piece.iter().flat_map(|x| x.to_le_bytes()));
                hash.update(&bytes);
                file.write_all(&bytes)?;
                total += bytes.len() as u64;
            }
        }
        Ok(SpillFile {
            path,
            len: sequence.len(),
            bytes: total,
            sha256: hash.finalize().into(),
        })
    }

    /// The state again. What came back is checked: a disk that errs may cost time, not a result.
    pub(super) fn read(&self, spec: &Spec) -> io::Result<Sequence> {
        let mut sequence = Sequence::with_len(spec, self.len);
        let mut file = File::open(&self.path)?;
        let mut hash = Sha256::new();
        let mut bytes = vec![0; 4 * PIECE];
        for slice in sequence.slices_mut() {
            for piece in slice.values.chunks_mut(PIECE) {
                let bytes = &mut bytes[..4 * piece.len()];
                file.read_exact(bytes)?;
                hash.update(&*bytes);
                let (values, _) = bytes.as_chunks();
                for (x, value) in piece.iter_mut().zip(values) {
                    *x = f32::from_le_bytes(*value);
                }
            }
        }
        if <[u8; 32]>::from(hash.finalize()) == self.sha256 {
            Ok(sequence)
        } else {
            Err(io::Error::other("a spilled state came back changed"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Spec {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let config = std::fs::read(root.join("fixtures/tiny-k3/config.json"));
        Spec::from_config(&config.unwrap()).unwrap()
    }

    fn some(spec: &Spec, len: usize) -> Sequence {
        let mut sequence = Sequence::with_len(spec, len);
        let mut next = 0_u32;
        for slice in sequence.slices_mut() {
            for x in slice.values {
                next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *x = f32::from_bits(next);
            }
        }
        sequence
    }

    #[test]
    fn a_state_comes_back_bit_for_bit_and_its_file_goes() {
        let folder = tempfile::tempdir().unwrap();
        let spec = tiny();
        let sequence = some(&spec, 130);
        let file = SpillFile::write(folder.path(), &sequence).unwrap();
        let back = file.read(&spec).unwrap();
        let bits = |s: &Sequence| {
            s.slices()
                .flat_map(|s| s.values)
                .map(|x| x.to_bits())
                .collect::<Vec<_>>()
        };
        assert_eq!(bits(&back), bits(&sequence));
        assert_eq!(file.bytes, 4 * bits(&sequence).len() as u64);
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_changed_or_cut_on_disk_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let spec = tiny();
        let file = SpillFile::write(folder.path(), &some(&spec, 3)).unwrap();
        let whole = std::fs::read(&file.path).unwrap();
        for at in [0, whole.len() / 2, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            std::fs::write(&file.path, damaged).unwrap();
            assert!(file.read(&spec).is_err(), "byte {at}");
        }
        std::fs::write(&file.path, &whole[1..]).unwrap();
        assert!(file.read(&spec).is_err());
        std::fs::write(&file.path, &whole).unwrap();
        assert!(file.read(&spec).is_ok());
    }
}
