//! What the processes on one home agree on: who is alive, and how many expert bytes there are.
//!
//! `locks/home` is held while the count changes. `locks/ledger` holds the count and, for each
//! process, the bytes it has reserved. `locks/s-<id>` is locked by its process for life, so that the
//! system itself tells the dead from the living. None of it needs to survive a power loss: who opens
//! a home alone counts anew.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::time::Duration;
use std::time::Instant;

use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::read_vec;
use super::error::StoreError;
use super::lock;

/// Processes that may use one home at a time.
const SESSIONS_MAX: usize = 64;
const MAGIC: &[u8; 8] = b"dfledge1";
const LEDGER_LEN: usize = 8 + 8 + SESSIONS_MAX * 16 + 8;
/// How long one try at a lock sleeps at most before the next.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// The bytes of all experts that count against the budget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ledger {
    /// Bytes under final names.
    pub(super) published: u64,
    /// Each process and the bytes it is about to write.
    pub(super) sessions: Vec<(u64, u64)>,
}

impl Ledger {
    /// Published and reserved bytes together.
    pub(super) fn used(&self) -> u64 {
        self.sessions
            .iter()
            .fold(self.published, |sum, (_, reserved)| {
                sum.saturating_add(*reserved)
            })
    }

    /// Sets what `session` has reserved; false if there is no place for one more process.
    pub(super) fn set_reserved(&mut self, session: u64, reserved: u64) -> bool {
        if let Some(slot) = self.sessions.iter_mut().find(|(id, _)| *id == session) {
            slot.1 = reserved;
            return true;
        }
        if self.sessions.len() < SESSIONS_MAX {
            self.sessions.push((session, reserved));
            return true;
        }
        false
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LEDGER_LEN);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.published.to_le_bytes());
        for slot in 0..SESSIONS_MAX {
            let (id, reserved) = self.sessions.get(slot).copied().unwrap_or_default();
            bytes.extend_from_slice(&id.to_le_bytes());
            bytes.extend_from_slice(&reserved.to_le_bytes());
        }
        let sum = fnv(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are no ledger, cut or torn: then the experts are counted anew.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, sum) = bytes.split_at_checked(LEDGER_LEN - 8)?;
        if sum != fnv(body).to_le_bytes() || !body.starts_with(MAGIC) {
            return None;
        }
        let mut numbers = body[8..]
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| u64::from_le_bytes(*b));
        let published = numbers.next()?;
        let mut sessions = Vec::new();
        while let (Some(id), Some(reserved)) = (numbers.next(), numbers.next()) {
            if id != 0 {
                sessions.push((id, reserved));
            }
        }
        Some(Ledger {
            published,
            sessions,
        })
    }
}

/// FNV-1a, 64 bits: tells a torn write from a whole one; proves nothing else.
pub(super) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The door through which every change of the count goes, one at a time over all processes.
#[derive(Debug)]
pub(super) struct Gate {
    disk: Arc<dyn Disk>,
    locks: PathBuf,
    session: u64,
    inner: Mutex<GateInner>,
}

#[derive(Debug)]
struct GateInner {
    lock: Box<dyn DiskFile>,
    ledger: Box<dyn DiskFile>,
    /// Bytes this process has reserved. This is the truth; the ledger repeats it.
    reserved: u64,
    /// The ledger could not be written: count anew at the next entry.
    stale: bool,
}

/// The count, while nobody else can change it.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    inner: MutexGuard<'a, GateInner>,
    session: u64,
    /// The count; [`Entered::commit`] writes it.
    pub(super) ledger: Ledger,
    /// Whether the ledger could be read. If not, `ledger` is empty and must be filled by counting.
    pub(super) valid: bool,
}

impl Gate {
    pub(super) fn open(disk: Arc<dyn Disk>, home: &Path, session: u64) -> io::Result<Self> {
        let locks = home.join("locks");
        let lock = disk.open(&locks.join("home"), How::Update)?;
        let ledger = disk.open(&locks.join("ledger"), How::Update)?;
        Ok(Gate {
            disk,
            locks,
            session,
            inner: Mutex::new(GateInner {
                lock,
                ledger,
                reserved: 0,
                stale: false,
            }),
        })
    }

    /// Waits for the door, at most `limit` beyond what this process's own threads need.
    pub(super) fn enter(&self, limit: Duration) -> Result<Entered<'_>, StoreError> {
        let inner = lock(&self.inner);
        let path = || self.locks.join("home");
        let start = Instant::now();
        let mut pause = Duration::from_micros(100);
        while !inner
            .lock
            .try_lock()
            .map_err(|e| StoreError::io("lock", &path(), e))?
        {
            if start.elapsed() >= limit {
                return Err(StoreError::Busy {
                    path: path(),
                    waited: start.elapsed(),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        let read = read_vec(&*inner.ledger, 0, LEDGER_LEN);
        let ledger = read.ok().and_then(|bytes| Ledger::decode(&bytes));
        Ok(Entered {
            valid: ledger.is_some() && !inner.stale,
            ledger: ledger.unwrap_or_default(),
            session: self.session,
            inner,
        })
    }

    /// Gives back a reservation without telling anybody: the next entry does.
    pub(super) fn release_later(&self, bytes: u64) {
        lock(&self.inner).reserved -= bytes;
    }

    /// Whether a process of that number lives. Our own lives.
    pub(super) fn life(&self, session: u64) -> Life {
        if session == self.session {
            return Life::Alive;
        }
        life(&*self.disk, &self.locks, session)
    }
}

impl Entered<'_> {
    /// Bytes this process has reserved and not yet published.
    pub(super) fn reserved(&mut self) -> &mut u64 {
        &mut self.inner.reserved
    }

    /// Takes published bytes off the count. A count that was too low stays at nothing.
    pub(super) fn subtract(&mut self, bytes: u64) {
        self.ledger.published = self.ledger.published.saturating_sub(bytes);
    }

    /// Writes the count. After an error nothing may be added on the strength of it.
    pub(super) fn commit(&mut self) -> io::Result<()> {
        let placed = self.ledger.set_reserved(self.session, self.inner.reserved);
        let written = if placed {
            self.inner.ledger.write_at(&self.ledger.encode(), 0)
        } else {
            Err(io::ErrorKind::ResourceBusy.into())
        };
        self.inner.stale = written.is_err();
        written
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Should it fail, the lock goes when the process does; others wait with a limit.
        let _ = self.inner.lock.unlock();
    }
}

/// Whether a process still runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Alive,
    /// It ended without saying so, in the named run of the operating system.
    Dead {
        boot: Option<String>,
    },
    /// It said good-bye, or never was.
    Absent,
}

/// The name of a process's life line under `locks/`.
pub(super) fn session_path(locks: &Path, session: u64) -> PathBuf {
    locks.join(format!("s-{session:016x}"))
}

/// The process of which `name` is the life line.
pub(super) fn session_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("s-").filter(|d| d.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

/// Whether a process still runs. A decision that rests on `Dead` is made inside the gate only: a
/// life line that is just being made is not locked yet.
pub(super) fn life(disk: &dyn Disk, locks: &Path, session: u64) -> Life {
    let file = match disk.open(&session_path(locks, session), How::Read) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Life::Absent,
        // What cannot be asked is taken to live: its bytes stay reserved until somebody can ask.
        Err(_) => return Life::Alive,
    };
    match file.try_lock() {
        Ok(true) => {
            let len = file.facts().map_or(0, |f| f.len.min(256));
            let text = read_vec(&*file, 0, usize::try_from(len).unwrap_or(0)).unwrap_or_default();
            let text = String::from_utf8(text).unwrap_or_default();
            Life::Dead {
                boot: Some(text).filter(|t| !t.is_empty()),
            }
        }
        Ok(false) | Err(_) => Life::Alive,
    }
}

/// Makes this process's life line and locks it. It survives a power loss, since its very presence
/// tells the next process that this one did not end in order.
pub(super) fn begin_session(
    disk: &dyn Disk,
    home: &Path,
    session: u64,
) -> io::Result<Box<dyn DiskFile>> {
    let locks = home.join("locks");
    let path = session_path(&locks, session);
    let file = disk.open(&path, How::CreateNew)?;
    let begun = (|| {
        if !file.try_lock()? {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        file.write_at(disk.boot().unwrap_or_default().as_bytes(), 0)?;
        file.sync()?;
        disk.sync_folder(&locks)?;
        disk.sync_folder(home)
    })();
    if begun.is_err() {
        let _ = disk.remove_file(&path);
    }
    begun.map(|()| file)
}
