//! Opening a home: what is there, what a crash has left, what can be trusted.

use std::collections::HashMap;
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::Budget;
use super::Inner;
use super::Limits;
use super::Model;
use super::State;
use super::StoreOptions;
use super::StoreStats;
use super::SyncBehind;
use super::digests::Subject;
use super::digests::number;
use super::disk::Disk;
use super::disk::Kind;
use super::disk::Listed;
use super::disk::remove_any;
use super::error::StoreError;
use super::error::full;
use super::index::Entry;
use super::index::EntryId;
use super::index::Index;
use super::ledger::Entered;
use super::ledger::Gate;
use super::ledger::Ledger;
use super::ledger::Life;
use super::ledger::begin_session;
use super::ledger::life;
use super::ledger::session_of;
use super::ledger::session_path;
use super::lock;
use super::settings::Settings;
use super::syncer::Syncer;
use crate::terms::ExpertKey;
use crate::terms::RepoId;
use crate::terms::Revision;

/// Opening waits this long for another process that opens, counts or trims.
const OPEN_WAIT: Duration = Duration::from_secs(30);

pub(super) fn model_folder(home: &Path, repo: &RepoId, commit: &Revision) -> PathBuf {
    let models = home.join("models-v1");
    models.join(repo.folder_name()).join(commit.as_str())
}

pub(super) fn expert_path(model: &Path, key: ExpertKey) -> PathBuf {
    let layer = model.join("experts").join(format!("{:03}", key.layer));
    layer.join(format!("{:04}", key.expert))
}

/// The name under which a model stands in `store.json`.
pub(super) fn model_name(model: &Model) -> String {
    format!("{}/{}", model.repo.folder_name(), model.commit)
}

/// Every model folder of a home. A name that is none of ours is left alone.
pub(super) fn models_in(disk: &dyn Disk, home: &Path) -> Vec<(RepoId, Revision)> {
    let root = home.join("models-v1");
    let mut models = Vec::new();
    for repo in folders(disk, &root) {
        let Some(id) = repo
            .split_once("--")
            .map(|(org, name)| format!("{org}/{name}"))
        else {
            continue;
        };
        let Ok(id) = id.parse::<RepoId>() else {
            continue;
        };
        let commits = folders(disk, &root.join(&repo)).into_iter();
        models.extend(commits.filter_map(|c| Some((id.clone(), c.parse().ok()?))));
    }
    models
}

fn folders(disk: &dyn Disk, path: &Path) -> Vec<String> {
    let listed = disk.list(path).unwrap_or_default().into_iter();
    listed
        .filter(|l| l.facts.kind != Kind::File)
        .map(|l| l.name)
        .collect()
}

/// What lies in a model's `experts/`.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) entries: Vec<(EntryId, Entry)>,
    /// Names of experts that are no files.
    pub(super) wrong: Vec<PathBuf>,
    /// Files on their way.
    pub(super) temporary: Vec<Listed>,
}

/// Lists a model's experts: names, lengths, times; no content.
pub(super) fn scan_model(disk: &dyn Disk, model: &Model) -> Scan {
    let root = model.folder.join("experts");
    let mut scan = Scan::default();
    for layer in disk.list(&root).unwrap_or_default() {
        let folder = root.join(&layer.name);
        if layer.name == "tmp" {
            scan.temporary = disk.list(&folder).unwrap_or_default();
            continue;
        }
        let Some(number_of_layer) = number(&layer.name, 3) else {
            continue;
        };
        if layer.facts.kind == Kind::File {
            scan.wrong.push(folder);
            continue;
        }
        for file in disk.list(&folder).unwrap_or_default() {
            let Some(expert) = number(&file.name, 4) else {
                continue;
            };
            if file.facts.kind != Kind::File {
                scan.wrong.push(folder.join(&file.name));
                continue;
            }
            let key = ExpertKey {
                layer: number_of_layer,
                expert,
            };
            let model = model.id;
            let entry = Entry {
                len: file.facts.len,
                mtime: file.facts.mtime,
                pins: 0,
                checked: false,
            };
            scan.entries.push((EntryId { model, key }, entry));
        }
    }
    scan
}

/// Opens a home; see [`super::Store::open`].
pub(super) fn open(
    options: StoreOptions,
    disk: Arc<dyn Disk>,
    sync: SyncBehind,
) -> Result<Inner, StoreError> {
    let home = options.home;
    let locks = home.join("locks");
    let refused = |source| StoreError::Home {
        path: home.clone(),
        source,
    };
    for folder in [&home.join("models-v1"), &locks.join("claims")] {
        disk.create_folder(folder).map_err(refused)?;
    }
    let session = new_session(&*disk);
    let gate = Gate::open(Arc::clone(&disk), &home, session).map_err(refused)?;
    let syncer = match sync {
        SyncBehind::After(after) => Syncer::start(after),
        SyncBehind::Never => None,
    };
    let mut inner = Inner {
        gate,
        session,
        limits: Mutex::new(Limits {
            budget: options.budget,
            reserve: options.reserve,
        }),
        state: Mutex::new(State {
            index: Index::new(HashSet::new()),
            models: Vec::new(),
            flights: HashMap::new(),
            clock: 0,
            swept: 0,
            stats: StoreStats::default(),
        }),
        landed: Condvar::new(),
        open_leases: AtomicUsize::new(0),
        syncer,
        life_line: None,
        disk,
        home,
    };
    begin(&mut inner)?;
    if let Budget::Limit(bytes) = options.budget {
        inner.trim(bytes)?;
    }
    Ok(inner)
}

fn begin(inner: &mut Inner) -> Result<(), StoreError> {
    let locks = inner.home.join("locks");
    let mut entered = inner.gate.enter(OPEN_WAIT)?;
    adopt_new_models(inner);
    let (dead, alive) = roll_call(&*inner.disk, &locks);
    if !dead.is_empty() {
        clear_up(inner, &dead, &alive);
    }
    // The ledger of a home that nobody uses is worth nothing; else the others' reservations are.
    let others = entered.ledger.sessions.iter();
    let sessions = others
        .filter(|(id, _)| alive.contains(id))
        .copied()
        .collect();
    entered.ledger = Ledger {
        published: 0,
        sessions,
    };
    inner.recount(&mut entered);
    let newest = {
        let state = lock(&inner.state);
        let models = 0..u32::try_from(state.models.len()).unwrap_or(u32::MAX);
        let entries = models.flat_map(|model| state.index.of_model(model));
        entries.map(|(_, entry)| entry.mtime).max().unwrap_or(0)
    };
    lock(&inner.state).clock = newest;
    let line = begin_session(&*inner.disk, &locks, inner.session);
    let line = line.and_then(|line| entered.commit().map(|()| line));
    drop(entered);
    match line {
        Ok(line) => inner.life_line = Some(line),
        // A full disk must not keep anybody from running what is installed.
        Err(e) if full(&e) => {
            lock(&inner.state).trouble(|| format!("{}: the disk is full", inner.home.display()));
        }
        Err(source) => {
            let path = inner.home.clone();
            return Err(StoreError::Home { path, source });
        }
    }
    Ok(())
}

/// A number that no other process on this home has: time and process together.
fn new_session(disk: &dyn Disk) -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let words = [disk.now(), u64::from(std::process::id()), count];
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    super::ledger::fnv(&bytes).max(1)
}

/// The processes of this home: those that died, with the run of the system they died in, and those
/// that live.
fn roll_call(disk: &dyn Disk, locks: &Path) -> (Vec<(u64, Option<String>)>, HashSet<u64>) {
    let (mut dead, mut alive) = (Vec::new(), HashSet::new());
    for listed in disk.list(locks).unwrap_or_default() {
        let Some(session) = session_of(&listed.name) else {
            continue;
        };
        match life(disk, locks, session) {
            Life::Alive => {
                alive.insert(session);
            }
            Life::Dead { boot } => dead.push((session, boot)),
            Life::Absent => {}
        }
    }
    (dead, alive)
}

/// Models that another process, or an earlier run, has made.
pub(super) fn adopt_new_models(inner: &Inner) {
    let settings = Settings::read(&*inner.disk, &inner.home);
    let found = models_in(&*inner.disk, &inner.home);
    let mut state = lock(&inner.state);
    for (repo, commit) in found {
        let known = |m: &Arc<Model>| m.repo == repo && m.commit == commit;
        if !state.models.iter().any(known) {
            let model = inner.new_model(state.models.len(), &repo, &commit);
            state.models.push(Arc::new(model));
        }
    }
    for model in state.models.clone() {
        let fixed = settings.unlimited.contains(&model_name(&model));
        state.index.set_fixed(model.id, fixed);
    }
}

/// Looks for processes that died since, and clears up after them.
pub(super) fn sweep_dead(inner: &Inner, entered: &mut Entered<'_>) {
    let locks = inner.home.join("locks");
    adopt_new_models(inner);
    let (dead, mut alive) = roll_call(&*inner.disk, &locks);
    alive.insert(inner.session);
    if !dead.is_empty() {
        clear_up(inner, &dead, &alive);
    }
    entered.ledger.sessions.retain(|(id, _)| alive.contains(id));
}

/// After an unclean stop: temporary files and claims of the dead go, and so does every expert for
/// which nothing vouches. The life lines of the dead go last, so that a crash in here is only a
/// reason to do it again.
fn clear_up(inner: &Inner, dead: &[(u64, Option<String>)], alive: &HashSet<u64>) {
    let boot = inner.disk.boot();
    // As long as the system has not been started anew, the page cache holds every byte that a killed
    // process has written, and a line that was written vouches for its file. After a power loss only
    // what was synced is known to be there.
    let same_boot = |b: &Option<String>| b.is_some() && *b == boot;
    let power_lost = !dead.iter().all(|(_, boot)| same_boot(boot));
    let models = lock(&inner.state).models.clone();
    let mut complete = true;
    for model in &models {
        complete &= clear_up_model(inner, model, alive, power_lost).is_ok();
    }
    let claims = inner.home.join("locks/claims");
    for claim in inner.disk.list(&claims).unwrap_or_default() {
        let path = claims.join(&claim.name);
        if !super::experts::claim_owner(&*inner.disk, &path).is_some_and(|o| alive.contains(&o)) {
            let _ = inner.disk.remove_file(&path);
        }
    }
    if complete {
        for (session, _) in dead {
            let line = session_path(&inner.home.join("locks"), *session);
            let _ = inner.disk.remove_file(&line);
        }
    }
}

fn clear_up_model(
    inner: &Inner,
    model: &Model,
    alive: &HashSet<u64>,
    power_lost: bool,
) -> io::Result<()> {
    let scan = scan_model(&*inner.disk, model);
    let temporary = model.folder.join("experts/tmp");
    for file in &scan.temporary {
        let owner = session_of(file.name.split('.').next().unwrap_or_default());
        if !owner.is_some_and(|owner| alive.contains(&owner)) {
            remove_any(&*inner.disk, &temporary.join(&file.name))?;
        }
    }
    for path in &scan.wrong {
        remove_any(&*inner.disk, path)?;
        lock(&inner.state).stats.damaged += 1;
    }
    if scan.entries.is_empty() && inner.disk.facts(model.log.path()).is_err() {
        return Ok(());
    }
    for (id, _) in &scan.entries {
        let told = model.log.get(&Subject::Expert(id.key))?;
        if !told.is_some_and(|told| told.synced || !power_lost) {
            remove_any(&*inner.disk, &expert_path(&model.folder, id.key))?;
            lock(&inner.state).stats.distrusted += 1;
        }
    }
    model.log.mark_unclean()
}
