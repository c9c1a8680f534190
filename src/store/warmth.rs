//! Heat that outlives a process: which experts of a model were used most, lately.
//!
//! Written now and then and when a process ends in order. It only ever tells what is worth having:
//! a count that a kill has lost costs an expert its place at worst, and a file that is damaged is no
//! file. Where several processes use a store at once, an expert is as hot as the one that has used
//! it most has found it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Inner;
use super::Model;
use super::ModelStore;
use super::State;
use super::disk::How;
use super::disk::read_file;
use super::index::EntryId;
use super::lock;
use super::quick::Quick;
use crate::terms::ExpertKey;

/// Heat is written at most this often.
const EVERY_NS: u64 = 30_000_000_000;
const FILE: &str = "heat";
/// The form of the file: this, the sweeps, a check of the rest, then the experts.
const MAGIC: &[u8; 8] = b"heat-v1\n";
/// Layer, expert, log2 of the worth.
const RECORD: usize = 12;

/// What a file told.
struct Told {
    sweeps: u64,
    experts: Vec<(ExpertKey, f64)>,
}

impl Told {
    fn parse(bytes: &[u8]) -> Option<Told> {
        let bytes = bytes.strip_prefix(MAGIC)?;
        let (sweeps, bytes) = bytes.split_first_chunk::<8>()?;
        let (check, records) = bytes.split_first_chunk::<8>()?;
        if check_of(*sweeps, records) != u64::from_le_bytes(*check) || records.len() % RECORD != 0 {
            return None;
        }
        let record = |r: &[u8]| {
            let (layer, r) = r.split_first_chunk::<2>()?;
            let (expert, r) = r.split_first_chunk::<2>()?;
            let log2 = f64::from_le_bytes(*r.first_chunk::<8>()?);
            let key = ExpertKey {
                layer: u16::from_le_bytes(*layer),
                expert: u16::from_le_bytes(*expert),
            };
            log2.is_finite().then_some((key, log2))
        };
        Some(Told {
            sweeps: u64::from_le_bytes(*sweeps),
            experts: records.chunks_exact(RECORD).filter_map(record).collect(),
        })
    }

    fn bytes(mut self) -> Vec<u8> {
        self.experts.sort_unstable_by_key(|(key, _)| *key);
        let mut records = Vec::with_capacity(self.experts.len() * RECORD);
        for (key, log2) in self.experts {
            records.extend_from_slice(&key.layer.to_le_bytes());
            records.extend_from_slice(&key.expert.to_le_bytes());
            records.extend_from_slice(&log2.to_le_bytes());
        }
        let sweeps = self.sweeps.to_le_bytes();
        let check = check_of(sweeps, &records).to_le_bytes();
        [MAGIC.as_slice(), &sweeps, &check, &records].concat()
    }
}

fn check_of(sweeps: [u8; 8], records: &[u8]) -> u64 {
    let mut quick = Quick::new();
    quick.update(&sweeps);
    quick.update(records);
    quick.finish()
}

impl ModelStore {
    /// Counts a use of each expert that a layer asks for, here or not; call it before any of them is
    /// looked up. Until the next call, what is here of them does not go for the others.
    pub fn ask(&self, keys: &[ExpertKey]) {
        let ids: Vec<EntryId> = keys.iter().map(|key| self.entry_id(*key)).collect();
        lock(&self.store().inner.state).index.ask(&ids);
    }

    /// A sweep over the layers is over: what is used from now on counts more.
    pub fn end_of_sweep(&self) {
        let inner = &self.store().inner;
        lock(&inner.state).index.end_of_sweep();
        let now = inner.disk.now();
        let due = inner.heat_kept.load(Ordering::Relaxed) + EVERY_NS;
        if now > due {
            inner.heat_kept.store(now, Ordering::Relaxed);
            let models = lock(&inner.state).models.clone();
            inner.keep_heat(&models);
            for model in models.iter().filter(|_| inner.life_line.is_some()) {
                // A sweep does not wait for it: the next time will do.
                inner.keep_lookups(model, Duration::ZERO);
            }
        }
    }

    /// The experts that were used most, lately, hottest first; those that were never used are not
    /// named.
    pub fn hottest(&self) -> Vec<ExpertKey> {
        let own = self.record().id;
        let state = lock(&self.store().inner.state);
        let mut all: Vec<(ExpertKey, f64)> = of_model(&state, own);
        drop(state);
        all.sort_unstable_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        all.into_iter().map(|(key, _)| key).collect()
    }

    /// Has each of these at least as hot as if it was used just now: what is brought on purpose is
    /// worth keeping.
    pub fn warm_up(&self, keys: &[ExpertKey]) {
        let mut state = lock(&self.store().inner.state);
        let ids = keys.iter().map(|key| self.entry_id(*key));
        state.index.warm_up(ids);
    }
}

fn of_model(state: &State, model: u32) -> Vec<(ExpertKey, f64)> {
    let all = state.index.heat().all();
    let own = all.filter(|(id, _)| id.model == model);
    own.map(|(id, log2)| (id.key, log2)).collect()
}

impl Inner {
    /// Adds what earlier processes have found.
    pub(super) fn read_heat(&self, state: &mut State, model: &Model) {
        if !self.keep_heat {
            return;
        }
        if let Some(told) = self.told(model) {
            let id = |key| EntryId {
                model: model.id,
                key,
            };
            let experts = told.experts.iter().map(|(key, log2)| (id(*key), *log2));
            state
                .index
                .change_heat(|heat| heat.at_least(told.sweeps, experts));
        }
    }

    /// Writes what this process has found of all models, over what others have.
    pub(super) fn keep_heat(&self, models: &[Arc<Model>]) {
        let kept = self.keep_heat && self.life_line.is_some();
        if kept && lock(&self.state).index.was_warmed() {
            models.iter().for_each(|model| self.write_heat(model));
        }
    }

    fn write_heat(&self, model: &Model) {
        let mut told = {
            let state = lock(&self.state);
            Told {
                sweeps: state.index.heat().sweeps(),
                experts: of_model(&state, model.id),
            }
        };
        if told.experts.is_empty() || self.disk.facts(&model.folder).is_err() {
            return;
        }
        let mut heat = super::Heat::default();
        heat.at_least(told.sweeps, told.experts.into_iter());
        if let Some(others) = self.told(model) {
            heat.at_least(others.sweeps, others.experts.into_iter());
        }
        told = Told {
            sweeps: heat.sweeps(),
            experts: heat.all().collect(),
        };
        // Neither the gate nor a sync: what is lost or torn is worth less than a token's time.
        let temporary = format!(".{FILE}.{:x}.tmp", self.session);
        let temporary = model.folder.join(temporary);
        let written = self.disk.open(&temporary, How::CreateNew).and_then(|file| {
            file.write_at(&told.bytes(), 0)?;
            self.disk.rename(&temporary, &model.folder.join(FILE))
        });
        if written.is_err() {
            let _ = self.disk.remove_file(&temporary);
        }
    }

    fn told(&self, model: &Model) -> Option<Told> {
        let bytes = read_file(&*self.disk, &model.folder.join(FILE)).ok()??;
        Told::parse(&bytes)
    }
}
