//! States of earlier texts on the disk, for texts that begin like them after a restart.
//!
//! Each is one verified file, named by what it belongs to and its ids. They are a cache: what is
//! damaged is removed, what does not fit is left out, and the longest unused go first.

use std::collections::VecDeque;
use std::fs;
use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use serde_json::Value;
use sha2::Digest;
use sha2::Sha256;

use super::Identity;
use super::Prefixes;
use super::error::JobError;
use super::error::Refusal;
use super::snapshot;
use crate::checkpoint::Spec;
use crate::engine::Start;
use crate::engine::StateStore;
use crate::model::Sequence;
use crate::terms::TokenId;

/// What a state's file name ends with.
const ENDING: &str = "state";
/// States that wait to be written hold memory: no more than this many, and bytes, do.
const PENDING_MAX: usize = 16;
const PENDING_BYTES: u64 = 2 << 30;
/// Bytes that may be written in a burst, and for each second after it, so that the cache does not
/// wear the disk out.
const BURST: f64 = 4e9;
const RATE: f64 = 1e6;
/// A file that is being written is younger than this.
const ABANDONED: Duration = Duration::from_secs(3600);

/// The states of a home, in `states-v1`, for one engine.
pub struct States {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    root: PathBuf,
    identity: Identity,
    spec: Arc<Spec>,
    /// Bytes on the disk, at most.
    budget: u64,
    prefixes: Prefixes,
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    /// States that may serve.
    known: Vec<Known>,
    pending: VecDeque<Arc<Start>>,
    at_work: bool,
    stop: bool,
    allowance: Option<(f64, Instant)>,
}

struct Known {
    path: PathBuf,
    ids: Vec<TokenId>,
}

impl States {
    /// Opens those of a home: what is damaged is removed, what belongs to another model, commit or
    /// arithmetic stays within the budget and is not used. Published prefixes of the home serve too.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be made, or there is no thread to write with.
    pub fn open(
        home: &Path,
        identity: Identity,
        spec: Arc<Spec>,
        budget: u64,
    ) -> Result<States, JobError> {
        let root = home.join("states-v1");
        fs::create_dir_all(&root).map_err(JobError::disk("cannot be made", &root))?;
        let mut known = Vec::new();
        for (path, _, used) in files(&root) {
            if path.extension().is_none_or(|ending| ending != ENDING) {
                if used.elapsed().is_ok_and(|age| age > ABANDONED) {
                    // Of a process that died while it wrote.
                    let _ = fs::remove_file(&path);
                }
                continue;
            }
            match snapshot::read_head(&path) {
                Ok(head) if head.belongs_to(&identity).is_ok() => {
                    known.push(Known {
                        path,
                        ids: head.ids,
                    });
                }
                Ok(_) => {}
                Err(_) => {
                    // Nobody will ever use it. One that cannot be removed is met again.
                    let _ = fs::remove_file(&path);
                }
            }
        }
        let shared = Arc::new(Shared {
            prefixes: Prefixes::open(home),
            root: root.clone(),
            identity,
            spec,
            budget,
            state: Mutex::new(State {
                known,
                ..State::default()
            }),
            bell: Condvar::new(),
        });
        shared.make_room(0);
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("deltafin-states".to_owned())
            .spawn(move || own.work())
            .map_err(JobError::disk("no thread to write with", &root))?;
        Ok(States {
            shared,
            thread: Some(thread),
        })
    }

    /// Waits until what was to be written is written, or given up.
    pub fn flush(&self) {
        let mut state = self.shared.lock();
        while !state.pending.is_empty() || state.at_work {
            let bell = &self.shared.bell;
            state = bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for States {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.bell.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl StateStore for States {
    fn load(&self, ids: &[TokenId], longer_than: usize) -> Option<Arc<Start>> {
        let shared = &self.shared;
        let own = shared.load(ids, longer_than);
        let longest = own.as_ref().map_or(longer_than, |start| start.ids.len());
        let loaded = shared
            .prefixes
            .start_for(ids, &shared.identity, &shared.spec);
        let prefix = loaded.start.filter(|start| start.ids.len() > longest);
        prefix.map(Arc::new).or(own)
    }

    fn save(&self, start: &Arc<Start>) {
        let shared = &self.shared;
        let bytes = shared.bytes(start);
        let mut state = shared.lock();
        let same = |ids: &[TokenId]| ids == start.ids;
        if bytes > shared.budget
            || state.stop
            || state.known.iter().any(|known| same(&known.ids))
            || state.pending.iter().any(|pending| same(&pending.ids))
        {
            return;
        }
        state.pending.push_back(Arc::clone(start));
        let held = |state: &State| -> u64 { state.pending.iter().map(|s| shared.bytes(s)).sum() };
        // The newest are the likeliest to be gone on from.
        while state.pending.len() > PENDING_MAX
            || (state.pending.len() > 1 && held(&state) > PENDING_BYTES)
        {
            state.pending.pop_front();
        }
        drop(state);
        shared.bell.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Whole between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self, start: &Start) -> u64 {
        Sequence::bytes(&self.spec, start.ids.len())
    }

    fn load(&self, ids: &[TokenId], longer_than: usize) -> Option<Arc<Start>> {
        loop {
            let state = self.lock();
            let serves = |known: &&Known| {
                known.ids.len() > longer_than
                    && known.ids.len() < ids.len()
                    && ids.starts_with(&known.ids)
            };
            let best = state.known.iter().filter(serves);
            let path = best.max_by_key(|known| known.ids.len())?.path.clone();
            drop(state);
            match snapshot::read(&path, &self.identity, &self.spec) {
                Ok(start) if ids.starts_with(&start.ids) && start.ids.len() < ids.len() => {
                    // A time that cannot be set makes it go earlier than it should.
                    let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                    return Some(Arc::new(start));
                }
                Ok(_) | Err(Refusal::Unreadable(_) | Refusal::Other { .. }) => {}
                Err(_) => {
                    // Damaged: it is computed again, and written anew.
                    let _ = fs::remove_file(&path);
                }
            }
            self.lock().known.retain(|known| known.path != path);
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some(start) = state.pending.pop_front() else {
                if state.stop {
                    return;
                }
                let waited = self.bell.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if !state.may_write(self.bytes(&start)) {
                self.bell.notify_all();
                continue;
            }
            state.at_work = true;
            drop(state);
            let written = self.write(&start);
            state = self.lock();
            state.at_work = false;
            if let Some(path) = written {
                state.known.retain(|known| known.path != path);
                let ids = start.ids.clone();
                state.known.push(Known { path, ids });
            }
            self.bell.notify_all();
        }
    }

    /// A cache that cannot be written, as on a full disk, is one that does without.
    fn write(&self, start: &Start) -> Option<PathBuf> {
        self.make_room(self.bytes(start));
        let path = self.path(&start.ids);
        let (ids, sequence) = (&start.ids, &start.sequence);
        snapshot::write(&path, &self.identity, Value::Null, ids, sequence).ok()?;
        Some(path)
    }

    fn path(&self, ids: &[TokenId]) -> PathBuf {
        let mut hash = Sha256::new();
        for part in [
            &self.identity.model,
            &self.identity.revision,
            &self.identity.arithmetic,
        ] {
            hash.update(part.as_bytes());
            hash.update([0]);
        }
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        let digest = hash.finalize();
        let hex: String = digest.iter().take(16).map(|b| format!("{b:02x}")).collect();
        self.root.join(format!("{hex}.{ENDING}"))
    }

    /// Removes those that were unused for the longest, until so many bytes fit the budget. The
    /// folder is looked at anew: another process may use it too.
    fn make_room(&self, bytes: u64) {
        let mut files = files(&self.root);
        files.sort_by_key(|(_, _, used)| *used);
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (path, of, _) in files {
            if total.saturating_add(bytes) <= self.budget {
                return;
            }
            if path.extension().is_some_and(|ending| ending == ENDING)
                && fs::remove_file(&path).is_ok()
            {
                total -= of;
                self.lock().known.retain(|known| known.path != path);
            }
        }
    }
}

impl State {
    fn may_write(&mut self, bytes: u64) -> bool {
        let now = Instant::now();
        let allowed = self.allowance.map_or(BURST, |(left, at)| {
            (left + now.duration_since(at).as_secs_f64() * RATE).min(BURST)
        });
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let left = allowed - bytes as f64;
        let may = left >= 0.0;
        self.allowance = Some((if may { left } else { allowed }, now));
        may
    }
}

/// The files of a folder, their bytes and when they were last used.
fn files(root: &Path) -> Vec<(PathBuf, u64, SystemTime)> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            Some((entry.path(), metadata.len(), used))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Arc<Spec> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let config = fs::read(root.join("fixtures/tiny-k3/config.json"));
        Arc::new(Spec::from_config(&config.unwrap()).unwrap())
    }

    fn identity(revision: &str) -> Identity {
        Identity {
            model: "org/model".to_owned(),
            revision: revision.to_owned(),
            arithmetic: "generic-1".to_owned(),
        }
    }

    fn state(spec: &Spec, ids: &[TokenId]) -> Arc<Start> {
        let mut sequence = Sequence::with_len(spec, ids.len());
        for (n, slice) in sequence.slices_mut().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "any values do")]
            slice.values.fill(n as f32 + ids.len() as f32);
        }
        let ids = ids.to_vec();
        Arc::new(Start { ids, sequence })
    }

    fn bits(sequence: &Sequence) -> Vec<u32> {
        let values = sequence.slices().flat_map(|slice| slice.values);
        values.map(|x| x.to_bits()).collect()
    }

    #[test]
    fn the_longest_serves_the_next_process_bit_for_bit() {
        let (home, spec) = (tempfile::tempdir().unwrap(), spec());
        let open = |revision| {
            States::open(home.path(), identity(revision), Arc::clone(&spec), 1 << 30).unwrap()
        };
        let states = open("a");
        states.save(&state(&spec, &[1, 2]));
        states.save(&state(&spec, &[1, 2, 3]));
        drop(states);
        let states = open("a");
        let found = states.load(&[1, 2, 3, 4], 0).unwrap();
        assert_eq!(found.ids, [1, 2, 3]);
        let whole = state(&spec, &[1, 2, 3]);
        assert_eq!(bits(&found.sequence), bits(&whole.sequence));
        // The last token has to be computed; and what is held already is not read.
        assert_eq!(states.load(&[1, 2, 3], 0).unwrap().ids, [1, 2]);
        assert!(states.load(&[1, 2, 3, 4], 3).is_none());
        assert!(states.load(&[1, 4, 3], 0).is_none());
        assert!(open("b").load(&[1, 2, 3, 4], 0).is_none());
    }

    #[test]
    fn a_damaged_one_is_removed_and_the_next_longest_serves() {
        let (home, spec) = (tempfile::tempdir().unwrap(), spec());
        let open = || States::open(home.path(), identity("a"), Arc::clone(&spec), 1 << 30).unwrap();
        for damage in ["flip", "cut", "head"] {
            let states = open();
            states.save(&state(&spec, &[1, 2]));
            states.save(&state(&spec, &[1, 2, 3]));
            states.flush();
            let path = states.shared.path(&[1, 2, 3]);
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            match damage {
                "flip" => bytes[middle] ^= 1,
                "cut" => bytes.truncate(middle),
                _ => bytes[3] ^= 1,
            }
            fs::write(&path, bytes).unwrap();
            // Found while it serves, or when the next process looks.
            let states = if damage == "flip" { states } else { open() };
            let found = states.load(&[1, 2, 3, 4], 0).unwrap();
            assert_eq!(found.ids, [1, 2], "{damage}");
            assert!(!path.exists(), "{damage}");
        }
    }

    #[test]
    fn the_longest_unused_goes_first() {
        let (home, spec) = (tempfile::tempdir().unwrap(), spec());
        let one = {
            let states = States::open(home.path(), identity("a"), Arc::clone(&spec), 1 << 30);
            let states = states.unwrap();
            states.save(&state(&spec, &[9]));
            states.flush();
            fs::metadata(states.shared.path(&[9])).unwrap().len()
        };
        let budget = 3 * one + one / 2;
        let states = States::open(home.path(), identity("a"), Arc::clone(&spec), budget).unwrap();
        for id in [1, 2] {
            std::thread::sleep(Duration::from_millis(20));
            states.save(&state(&spec, &[id]));
            states.flush();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(states.load(&[9, 0], 0).is_some());
        std::thread::sleep(Duration::from_millis(20));
        states.save(&state(&spec, &[3]));
        states.flush();
        let there = |id: TokenId| states.load(&[id, 0], 0).is_some();
        assert_eq!([1, 2, 3, 9].map(there), [false, true, true, true]);
        let total: u64 = files(&states.shared.root).iter().map(|f| f.1).sum();
        assert!(total <= budget, "{total} of {budget}");
    }
}
