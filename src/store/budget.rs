//! Room for experts: counting, evicting, trimming.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use super::Budget;
use super::Inner;
use super::Limits;
use super::NotKept;
use super::Store;
use super::disk::Kind;
use super::error::StoreError;
use super::error::full;
use super::index::Entry;
use super::index::EntryId;
use super::index::Victim;
use super::ledger::Entered;
use super::lock;
use super::recover;

/// How long a token's expert waits for another process at the gate before it goes unkept.
pub(super) const GATE_WAIT: Duration = Duration::from_secs(5);
/// Dead processes are looked for, and experts counted anew, at most this often.
const SWEEP_EVERY_NS: u64 = 1_000_000_000;
/// Entries that refuse to go are skipped this many times before room is given up.
const STUBBORN_MAX: u32 = 8;

/// What a trim has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trimmed {
    /// Experts removed.
    pub experts: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that still count against the budget.
    pub left: u64,
}

/// What one eviction has brought.
enum Gone {
    /// So many bytes.
    Bytes(u64),
    /// Nothing: all that could go is worth more than the newcomer.
    Hotter,
    /// Nothing: nothing can go now.
    Nothing,
}

impl Store {
    /// Evicts, in the policy's order, until at most `bytes` are left. Experts that are being read stay.
    pub fn trim(&self, bytes: u64) -> Result<Trimmed, StoreError> {
        self.inner.trim(bytes)
    }

    /// The budget of this process.
    pub fn budget(&self) -> Budget {
        lock(&self.inner.limits).budget
    }

    /// Changes the budget of this process, evicting what is too much.
    pub fn set_budget(&self, budget: Budget) -> Result<Trimmed, StoreError> {
        lock(&self.inner.limits).budget = budget;
        match budget {
            Budget::Limit(bytes) => self.trim(bytes),
            Budget::Unlimited => Ok(Trimmed::default()),
        }
    }
}

impl Inner {
    /// Enters the gate with a count that is true.
    pub(super) fn enter(&self, limit: Duration) -> Result<Entered<'_>, StoreError> {
        let mut entered = self.gate.enter(limit)?;
        if !entered.valid {
            let counted = self.recount(&mut entered);
            counted.map_err(|e| StoreError::io("count", &self.home, e))?;
        }
        Ok(entered)
    }

    pub(super) fn trim(&self, bytes: u64) -> Result<Trimmed, StoreError> {
        let mut entered = self.enter(GATE_WAIT)?;
        let mut trimmed = Trimmed::default();
        let (mut recounted, mut stubborn) = (false, 0);
        while entered.ledger.used() > bytes {
            match self.evict_one(&mut entered, None) {
                Ok(Gone::Bytes(len)) => {
                    trimmed.experts += 1;
                    trimmed.bytes += len;
                }
                Ok(_) if !recounted => {
                    recounted = true;
                    let counted = self.recount(&mut entered);
                    counted.map_err(|e| StoreError::io("count", &self.home, e))?;
                }
                Ok(_) => break,
                Err(_) if stubborn < STUBBORN_MAX => stubborn += 1,
                Err((path, e)) => {
                    let _ = entered.commit();
                    return Err(StoreError::io("remove", &path, e));
                }
            }
        }
        trimmed.left = entered.ledger.used();
        // Should the write fail, the ledger tells too much, and is counted anew at the next entry.
        let _ = entered.commit();
        Ok(trimmed)
    }

    /// Makes room for `need` bytes that count against the budget (or, for a model without a limit,
    /// against the disk alone), and reserves it. On return nothing is over any limit.
    pub(super) fn reserve(&self, id: EntryId, need: u64, fixed: bool) -> Result<(), NotKept> {
        let limits = *lock(&self.limits);
        if !fixed && limits.budget.limit() < need {
            return Err(NotKept::Budget); // never worth evicting anything for
        }
        let mut entered = self.enter(GATE_WAIT).map_err(|e| unentered(&e))?;
        let made = self.make_room(&mut entered, id, need, fixed, limits);
        if made.is_ok() && !fixed {
            *entered.reserved() += need;
            lock(&self.state).index.comes(id);
        }
        // Evictions are committed even if the room was not enough.
        match entered.commit() {
            Ok(()) => made,
            Err(e) => {
                if made.is_ok() && !fixed {
                    *entered.reserved() -= need;
                    lock(&self.state).index.comes_not(id);
                }
                Err(not_kept(&e))
            }
        }
    }

    /// Gives back what [`Inner::reserve`] took.
    pub(super) fn release(&self, need: u64) {
        if let Ok(mut entered) = self.enter(GATE_WAIT) {
            *entered.reserved() -= need;
            let _ = entered.commit();
        } else {
            self.gate.release_later(need);
        }
    }

    fn make_room(
        &self,
        entered: &mut Entered<'_>,
        id: EntryId,
        need: u64,
        fixed: bool,
        limits: Limits,
    ) -> Result<(), NotKept> {
        let (mut swept, mut stubborn) = (false, 0);
        loop {
            let used = entered.ledger.used();
            let over_budget = match limits.budget {
                Budget::Limit(limit) if !fixed => used.saturating_add(need).saturating_sub(limit),
                _ => 0,
            };
            let free = self.disk.free(&self.home).map_err(|e| not_kept(&e))?;
            let wanted = limits.reserve.saturating_add(need);
            let over_disk = wanted.saturating_sub(free);
            if over_budget == 0 && over_disk == 0 {
                return Ok(());
            }
            let why = if over_budget > 0 {
                NotKept::Budget
            } else {
                NotKept::Reserve
            };
            // Evicting everything for nothing would be the worst of both.
            let enough = lock(&self.state).index.evictable() >= over_budget.max(over_disk);
            if !enough {
                if swept || !self.sweep_if_due(entered).map_err(|e| not_kept(&e))? {
                    return Err(why);
                }
                swept = true;
                continue;
            }
            match self.evict_one(entered, Some(id)) {
                Ok(Gone::Bytes(_)) => {}
                Ok(Gone::Nothing) => return Err(why),
                Ok(Gone::Hotter) => return Err(NotKept::Colder),
                Err(_) if stubborn < STUBBORN_MAX => stubborn += 1,
                Err((_, e)) => return Err(not_kept(&e)),
            }
        }
    }

    /// Removes the expert that goes next, and takes its bytes off the count.
    fn evict_one(
        &self,
        entered: &mut Entered<'_>,
        newcomer: Option<EntryId>,
    ) -> Result<Gone, (PathBuf, io::Error)> {
        // The index stays locked over the removal, so that no lookup can lease what is going.
        let mut state = lock(&self.state);
        let mut second_looks = state.index.len();
        loop {
            let (id, entry) = match state.index.victim(newcomer) {
                Victim::Held(id, entry) => (id, entry),
                Victim::Hotter => return Ok(Gone::Hotter),
                Victim::Coming | Victim::Nobody => return Ok(Gone::Nothing),
            };
            let Some(model) = state.models.get(id.model as usize) else {
                state.index.remove(id);
                continue;
            };
            let path = recover::expert_path(&model.folder, id.key);
            match self.disk.facts(&path) {
                Ok(facts) if facts.mtime > entry.mtime && second_looks > 0 => {
                    second_looks -= 1; // another process has used it since
                    state.index.spare(id, facts.mtime);
                    continue;
                }
                _ => {}
            }
            match self.disk.remove_file(&path) {
                Ok(()) => {
                    state.index.remove(id);
                    state.stats.evicted += 1;
                    state.stats.evicted_bytes += entry.len;
                    entered.subtract(entry.len);
                    return Ok(Gone::Bytes(entry.len));
                }
                // Another process has evicted it, and has counted that.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    state.index.remove(id);
                }
                Err(e) => {
                    state.index.spare(id, entry.mtime); // or it would be tried again before all others
                    return Err((path, e));
                }
            }
        }
    }

    /// Removes a damaged expert and takes what it occupied off the count.
    pub(super) fn discard(&self, id: EntryId, path: &Path) {
        let Ok(mut entered) = self.enter(GATE_WAIT) else {
            lock(&self.state).index.remove(id);
            return;
        };
        self.discard_inside(&mut entered, id, path);
        let _ = entered.commit();
    }

    pub(super) fn discard_inside(&self, entered: &mut Entered<'_>, id: EntryId, path: &Path) {
        let mut state = lock(&self.state);
        let fixed = state.index.is_fixed(id.model);
        let file = self.disk.facts(path).ok().filter(|f| f.kind == Kind::File);
        // What was counted comes off the count, whatever the damage did to the length since.
        let counted = state.index.remove(id).map(|entry| entry.len);
        let counted = counted.or(file.map(|f| f.len)).unwrap_or(0);
        if super::disk::remove_any(&*self.disk, path).is_ok() && !fixed {
            entered.subtract(counted);
        }
    }

    /// Looks for processes that died and clears up after them; counts anew. Not more than once a
    /// second: false if it was not its time.
    fn sweep_if_due(&self, entered: &mut Entered<'_>) -> io::Result<bool> {
        let now = self.disk.now();
        {
            let mut state = lock(&self.state);
            if now.saturating_sub(state.swept) < SWEEP_EVERY_NS {
                return Ok(false);
            }
            state.swept = now;
        }
        recover::sweep_dead(self, entered)?;
        self.recount(entered)?;
        Ok(true)
    }

    /// Counts the experts on disk and takes that for the truth.
    pub(super) fn recount(&self, entered: &mut Entered<'_>) -> io::Result<()> {
        entered.valid = false;
        recover::adopt_new_models(self)?;
        let mut state = lock(&self.state);
        let mut found: Vec<(EntryId, Entry)> = Vec::new();
        for model in &state.models {
            found.extend(recover::scan_model(&*self.disk, model)?.entries);
        }
        state.index.recount(found);
        entered.ledger.published = state.index.bytes();
        entered.valid = true;
        Ok(())
    }
}

impl Budget {
    /// Bytes at most; `u64::MAX` for no limit.
    pub fn limit(self) -> u64 {
        match self {
            Budget::Limit(bytes) => bytes,
            Budget::Unlimited => u64::MAX,
        }
    }
}

/// Why the disk did not take an expert.
pub(super) fn not_kept(error: &io::Error) -> NotKept {
    if full(error) {
        NotKept::Full
    } else {
        NotKept::Disk(error.kind())
    }
}

/// Why the gate stayed shut.
pub(super) fn unentered(error: &StoreError) -> NotKept {
    match error {
        StoreError::Full { .. } => NotKept::Full,
        StoreError::Io { source, .. } => NotKept::Disk(source.kind()),
        _ => NotKept::Busy,
    }
}
