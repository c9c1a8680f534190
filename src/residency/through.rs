//! Bytes of a shard for another machine: from the store, and fetched into it first if they are not
//! there.

use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use bytes::Bytes;
use sha2::Digest as _;
use sha2::Sha256;

use super::ResidencyError;
use super::fetch::Fetched;
use super::lanes::Halt;
use super::meter::Origin;
use super::open::Opened;
use crate::checkpoint::Part;
use crate::hub::Class;
use crate::hub::HubError;
use crate::store::CoreState;
use crate::store::Filled;
use crate::store::Holder;
use crate::store::Lease;
use crate::store::Lookup;
use crate::store::NotKept;
use crate::store::Shards;
use crate::store::Slot;
use crate::store::StoreError;
use crate::store::Stretch;
use crate::store::Waited;
use crate::terms::ByteRange;
use crate::terms::CorePart;
use crate::terms::Digest;
use crate::terms::ExpertKey;

/// How long another process's fetch is waited for before this one fetches too.
const OTHERS: Duration = Duration::from_secs(30);
/// How often a wait for the hub looks whether it should end.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// Experts fetched at once, and experts held in memory because the store has no room for them.
const IN_HAND_MAX: usize = 16;

/// Reads shards through a store: what is missing is fetched once, whoever asks for it and however
/// often, kept where the budget allows, and read from there.
pub struct Through {
    opened: Opened,
    shards: Shards,
    in_hand: Arc<Places>,
}

/// Bytes of a shard that can be read now.
pub struct Brought {
    /// Which bytes of the shard.
    pub range: ByteRange,
    at: At,
}

enum At {
    /// Header, core and rest: never evicted.
    Store,
    /// An expert on disk from `offset` on, not evicted meanwhile.
    Lease { lease: Lease, offset: u64 },
    /// An expert there was no room for.
    Memory {
        bytes: Bytes,
        offset: u64,
        _place: Place,
    },
}

impl Through {
    /// Reads through the store of `opened`, from its hub.
    pub fn new(opened: Opened) -> Through {
        Through {
            shards: Shards::new(&opened.layout),
            opened,
            in_hand: Arc::new(Places::new(IN_HAND_MAX)),
        }
    }

    /// The model.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Brings whatever holds byte `at` of a shard; waits as long as that takes. Many may ask for
    /// the same: one fetches.
    ///
    /// # Errors
    ///
    /// If there is no such byte, or the hub does not deliver it, or somebody asked to stop.
    pub fn bring(&self, shard: &str, at: u64) -> Result<Brought, ResidencyError> {
        let stretches = self.shards.stretches(shard).iter();
        let mut around = stretches.filter(|s| s.range.start <= at && at < s.range.end);
        let stretch = *around.next().ok_or_else(|| ResidencyError::NoSuchFile {
            repo: self.opened.repo.clone(),
            file: format!("byte {at} of {shard}"),
        })?;
        let Stretch { range, holder } = stretch;
        let at = match holder {
            Holder::Header => At::Store,
            Holder::Core { part, .. } => self.core(part).map(|()| At::Store)?,
            Holder::Rest => self.rest(shard, range).map(|()| At::Store)?,
            Holder::Expert { key, offset } => self.expert(key, offset)?,
        };
        Ok(Brought { range, at })
    }

    /// Fills `into` from byte `offset` of the shard on, out of what was brought.
    ///
    /// # Errors
    ///
    /// If the disk fails. Where [`StoreError::refetch`] holds, damage was found and removed: bring
    /// it again.
    ///
    /// # Panics
    ///
    /// If `brought` does not hold these bytes.
    pub fn read(
        &self,
        brought: &Brought,
        shard: &str,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let end = offset + into.len() as u64;
        assert!(
            brought.range.start <= offset && end <= brought.range.end,
            "other bytes were brought"
        );
        let skip = offset - brought.range.start;
        match &brought.at {
            At::Store => self
                .opened
                .store
                .read_shard(&self.shards, shard, offset, into),
            At::Lease { lease, offset } => lease.read_at(offset + skip, into),
            At::Memory { bytes, offset, .. } => {
                // Within an expert that is in memory, so it fits a `usize`.
                let from = (offset + skip) as usize;
                into.copy_from_slice(&bytes[from..from + into.len()]);
                Ok(())
            }
        }
    }

    fn core(&self, part: CorePart) -> Result<(), ResidencyError> {
        let opened = &self.opened;
        let mut files = opened.layout.core().iter();
        let Some(file) = files.find(|file| file.part == part) else {
            return Err(opened.absent(format!("core part {part}")));
        };
        if opened.store.core_ready(part, file.len).is_some() {
            return Ok(());
        }
        let mut state = opened.store.core(part, file.len)?;
        loop {
            opened.check_stop()?;
            match state {
                CoreState::Ready(_) => return Ok(()),
                CoreState::Partial(writer) => {
                    return opened
                        .fetch_core(file, writer, &Halt::new(&opened.stop), &|_| {})
                        .map(drop);
                }
                CoreState::Busy(other) => state = other.wait(STOP_CHECK)?,
            }
        }
    }

    fn rest(&self, shard: &str, range: ByteRange) -> Result<(), ResidencyError> {
        let opened = &self.opened;
        if opened.store.rest_ready(shard, range).is_some() {
            return Ok(());
        }
        let names = self.shards.names().iter();
        let place = names.enumerate().find(|(_, name)| *name == shard);
        let Some(number) = place.and_then(|(n, _)| u16::try_from(n).ok()) else {
            return Err(opened.absent(shard.to_owned()));
        };
        let part = Part {
            shard: number,
            range,
        };
        let mut state = opened.store.rest(shard, range)?;
        loop {
            opened.check_stop()?;
            match state {
                CoreState::Ready(_) => return Ok(()),
                CoreState::Partial(writer) => {
                    return opened
                        .fetch_stretch(part, writer, &Halt::new(&opened.stop), &|_| {})
                        .map(drop);
                }
                CoreState::Busy(other) => state = other.wait(STOP_CHECK)?,
            }
        }
    }

    fn expert(&self, key: ExpertKey, offset: u64) -> Result<At, ResidencyError> {
        let store = &self.opened.store;
        let len = self.opened.layout.expert_len();
        loop {
            self.opened.check_stop()?;
            match store.lookup(key, len) {
                Lookup::Hit(lease) => return Ok(At::Lease { lease, offset }),
                Lookup::Miss(slot) => return self.fetch(key, slot, offset),
                Lookup::Filling(wait) => match wait.wait(OTHERS) {
                    Waited::Again => {}
                    Waited::Late(slot) => return self.fetch(key, slot, offset),
                    Waited::Filled(bytes) => return self.hold(key, bytes, offset),
                },
            }
        }
    }

    /// From disk if it was kept, else from memory.
    fn hold(&self, key: ExpertKey, bytes: Bytes, offset: u64) -> Result<At, ResidencyError> {
        let len = self.opened.layout.expert_len();
        if let Some(lease) = self.opened.store.lease(key, len) {
            return Ok(At::Lease { lease, offset });
        }
        // Whoever fetched them hands them to everybody, also where they are not what was here before.
        let sha256 = Digest(Sha256::digest(&bytes).into());
        let known = self.opened.store.known(key);
        if let Some(known) = known.filter(|known| known.sha256 != sha256) {
            return Err(conflict(key, "another request", known.sha256, sha256));
        }
        let place = self.in_hand.take(|| self.opened.check_stop())?;
        Ok(At::Memory {
            bytes,
            offset,
            _place: place,
        })
    }

    fn fetch(&self, key: ExpertKey, slot: Slot, offset: u64) -> Result<At, ResidencyError> {
        let opened = &self.opened;
        if opened.hub.is_none() {
            return Err(ResidencyError::MissingExpert { key });
        }
        let place = self.in_hand.take(|| opened.check_stop())?;
        let began = Instant::now();
        let (sender, arrivals) = mpsc::channel();
        let _tickets = opened.fetch_expert(key, Class::Demand, move |outcome| {
            // Nobody listens any more once a stop was asked for.
            let _ = sender.send(outcome);
        });
        let fetched: Fetched = loop {
            opened.check_stop()?;
            match arrivals.recv_timeout(STOP_CHECK) {
                Ok(outcome) => break outcome?,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(ResidencyError::Interrupted);
                }
            }
        };
        let origin = if fetched.peer {
            Origin::Peer
        } else {
            Origin::Hub
        };
        let Fetched {
            bytes,
            sha256,
            source,
            ..
        } = fetched;
        opened
            .meter
            .arrived(origin, bytes.len() as u64, began.elapsed());
        match slot.fill(bytes.clone(), sha256, &source) {
            // What was here before had another digest: these bytes are passed on to nobody.
            Filled::NotKept(NotKept::Conflict(known)) => {
                Err(conflict(key, &source, known.sha256, sha256))
            }
            Filled::NotKept(_) => Ok(At::Memory {
                bytes,
                offset,
                _place: place,
            }),
            Filled::Kept => {
                drop(place);
                self.hold(key, bytes, offset)
            }
        }
    }
}

fn conflict(key: ExpertKey, source: &str, expected: Digest, actual: Digest) -> ResidencyError {
    let error = HubError::WrongContent {
        url: source.to_owned(),
        what: key.to_string(),
        expected: format!("sha256 {expected}"),
        actual: actual.to_string(),
    };
    error.into()
}

impl Opened {
    fn absent(&self, what: String) -> ResidencyError {
        ResidencyError::Missing {
            repo: self.repo.clone(),
            what,
        }
    }
}

/// A number of places that threads wait for.
struct Places {
    free: Mutex<usize>,
    freed: Condvar,
}

struct Place(Arc<Places>);

impl Places {
    fn new(number: usize) -> Places {
        Places {
            free: Mutex::new(number),
            freed: Condvar::new(),
        }
    }

    /// Waits for a place; `go_on` is asked now and then whether to wait on.
    fn take(
        self: &Arc<Self>,
        go_on: impl Fn() -> Result<(), ResidencyError>,
    ) -> Result<Place, ResidencyError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            go_on()?;
            let waited = self.freed.wait_timeout(free, STOP_CHECK);
            free = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *free -= 1;
        Ok(Place(Arc::clone(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}
