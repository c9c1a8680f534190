//! Opening a home: what is there, what a crash has left, what can be trusted.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
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
use super::disk::Disk;
use super::disk::Kind;
use super::disk::Listed;
use super::disk::is_unfinished;
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
use super::table::Subject;
use super::table::number;
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
pub(super) fn models_in(disk: &dyn Disk, home: &Path) -> io::Result<Vec<(RepoId, Revision)>> {
    let root = home.join("models-v1");
    let mut models = Vec::new();
    for repo in folders(disk, &root)? {
        let Some(id) = repo
            .split_once("--")
            .map(|(org, name)| format!("{org}/{name}"))
        else {
            continue;
        };
        let Ok(id) = id.parse::<RepoId>() else {
            continue;
        };
        let commits = folders(disk, &root.join(&repo))?.into_iter();
        models.extend(commits.filter_map(|c| Some((id.clone(), c.parse().ok()?))));
    }
    Ok(models)
}

fn folders(disk: &dyn Disk, path: &Path) -> io::Result<Vec<String>> {
    let listed = list(disk, path)?.into_iter();
    let folders = listed.filter(|l| l.facts.kind != Kind::File);
    Ok(folders.map(|l| l.name).collect())
}

/// What is in a folder; nothing, if there is none. Any other refusal is an error: to take an
/// unreadable folder for an empty one would be to forget what it holds, and the budget with it.
pub(super) fn list(disk: &dyn Disk, folder: &Path) -> io::Result<Vec<Listed>> {
    match disk.list(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
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
pub(super) fn scan_model(disk: &dyn Disk, model: &Model) -> io::Result<Scan> {
    let root = model.folder.join("experts");
    let mut scan = Scan::default();
    let layers = match list(disk, &root) {
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => {
            scan.wrong.push(root);
            return Ok(scan);
        }
        other => other?,
    };
    for layer in layers {
        let folder = root.join(&layer.name);
        let number_of_layer = number(&layer.name, 3);
        let ours = number_of_layer.is_some() || matches!(&*layer.name, "tmp" | "part");
        if ours && layer.facts.kind == Kind::File {
            scan.wrong.push(folder);
            continue;
        }
        if layer.name == "tmp" {
            scan.temporary = list(disk, &folder)?;
        }
        let Some(number_of_layer) = number_of_layer else {
            continue;
        };
        for file in list(disk, &folder)? {
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
    Ok(scan)
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
            index: Index::new(options.policy),
            models: Vec::new(),
            flights: HashMap::new(),
            clock: 0,
            swept: 0,
            lookups: BTreeMap::new(),
            stats: StoreStats::default(),
            told_damage: false,
        }),
        landed: Condvar::new(),
        open_leases: AtomicUsize::new(0),
        syncer,
        life_line: None,
        listener: OnceLock::new(),
        keep_heat: options.keep_heat,
        heat_kept: AtomicU64::new(disk.now()),
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
    let home = inner.home.clone();
    let counting = |e| StoreError::io("count", &home, e);
    let locks = home.join("locks");
    let mut entered = inner.gate.enter(OPEN_WAIT)?;
    adopt_new_models(inner).map_err(counting)?;
    let (dead, alive) = roll_call(&*inner.disk, &locks).map_err(counting)?;
    sweep_leftovers(inner, &alive).map_err(counting)?;
    if !dead.is_empty() {
        distrust(inner, &dead).map_err(counting)?;
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
    inner.recount(&mut entered).map_err(counting)?;
    {
        let mut state = lock(&inner.state);
        state.clock = state.index.newest();
    }
    if alive.is_empty() {
        inner.shorten_logs();
    }
    let line = begin_session(&*inner.disk, &home, inner.session);
    let line = line.and_then(|line| entered.commit().map(|()| line));
    drop(entered);
    match line {
        Ok(line) => inner.life_line = Some(line),
        // A full disk must not keep anybody from running what is installed.
        Err(e) if full(&e) => {
            inner.trouble(|| format!("{}: the disk is full", home.display()));
        }
        Err(source) => return Err(StoreError::Home { path: home, source }),
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
fn roll_call(disk: &dyn Disk, locks: &Path) -> io::Result<(Vec<Dead>, HashSet<u64>)> {
    let (mut dead, mut alive) = (Vec::new(), HashSet::new());
    for listed in list(disk, locks)? {
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
    Ok((dead, alive))
}

/// A process that ended without saying so, and the run of the system in which it lived.
type Dead = (u64, Option<String>);

/// Models that another process, or an earlier run, has made.
///
/// # Errors
///
/// If it cannot be known which models are exempt from the budget, nothing may be evicted.
pub(super) fn adopt_new_models(inner: &Inner) -> io::Result<()> {
    let settings = Settings::read(&*inner.disk, &inner.home)?;
    let found = models_in(&*inner.disk, &inner.home)?;
    let mut state = lock(&inner.state);
    for (repo, commit) in found {
        let known = |m: &Arc<Model>| m.repo == repo && m.commit == commit;
        if !state.models.iter().any(known) {
            let model = inner.new_model(state.models.len(), &repo, &commit);
            inner.read_heat(&mut state, &model);
            state.models.push(Arc::new(model));
        }
    }
    for model in state.models.clone() {
        let fixed = settings.unlimited.contains(&model_name(&model));
        state.index.set_fixed(model.id, fixed);
    }
    Ok(())
}

/// Looks for processes that died since, and clears up after them.
pub(super) fn sweep_dead(inner: &Inner, entered: &mut Entered<'_>) -> io::Result<()> {
    adopt_new_models(inner)?;
    let (dead, mut alive) = roll_call(&*inner.disk, &inner.home.join("locks"))?;
    alive.insert(inner.session);
    if !dead.is_empty() {
        sweep_leftovers(inner, &alive)?;
        distrust(inner, &dead)?;
    }
    entered.ledger.sessions.retain(|(id, _)| alive.contains(id));
    Ok(())
}

/// Removes what nobody alive has anything to do with: temporary files and claims of the dead, and
/// things in the place of an expert. A power loss brings such things back even after a clean stop.
fn sweep_leftovers(inner: &Inner, alive: &HashSet<u64>) -> io::Result<()> {
    let disk = &*inner.disk;
    let of_the_living = |owner: Option<u64>| owner.is_some_and(|owner| alive.contains(&owner));
    let models = lock(&inner.state).models.clone();
    for model in models {
        let scan = scan_model(disk, &model)?;
        let temporary = model.folder.join("experts/tmp");
        for file in &scan.temporary {
            let owner = session_of(file.name.split('.').next().unwrap_or_default());
            if !of_the_living(owner) {
                // Left where it is, it would count against no budget.
                remove_any(disk, &temporary.join(&file.name))?;
            }
        }
        for path in &scan.wrong {
            if remove_any(disk, path).is_ok() {
                lock(&inner.state).stats.damaged += 1;
            }
        }
        super::arrival::sweep_parts(inner, &model)?;
        if alive.is_empty() {
            sweep_unfinished(disk, &model.folder)?;
        }
    }
    let claims = inner.home.join("locks/claims");
    for claim in list(disk, &claims)? {
        let path = claims.join(&claim.name);
        // One without a name may be getting it right now.
        let over = match super::experts::claim_owner(disk, &path) {
            None => alive.is_empty() || super::experts::is_abandoned(disk, &path),
            owner => !of_the_living(owner),
        };
        if over {
            let _ = disk.remove_file(&path);
        }
    }
    Ok(())
}

/// Whether another process that lives fetches experts now.
pub(super) fn others_fetch(inner: &Inner) -> io::Result<bool> {
    let claims = inner.home.join("locks/claims");
    let mut owners = HashSet::new();
    for claim in list(&*inner.disk, &claims)? {
        owners.extend(super::experts::claim_owner(
            &*inner.disk,
            &claims.join(&claim.name),
        ));
    }
    owners.remove(&inner.session);
    Ok(owners
        .into_iter()
        .any(|owner| inner.gate.life(owner) == Life::Alive))
}

/// Removes small files, and a rewritten log, that never got their names. Only while nobody else is
/// here: they tell no owner.
fn sweep_unfinished(disk: &dyn Disk, model: &Path) -> io::Result<()> {
    for folder in ["", "meta", "headers", "core"] {
        let folder = model.join(folder);
        for file in list(disk, &folder).unwrap_or_default() {
            if is_unfinished(&file.name) {
                remove_any(disk, &folder.join(&file.name))?;
            }
        }
    }
    Ok(())
}

/// Whether another process is on this home. Asked inside the gate only, where none can come in.
pub(super) fn others_alive(inner: &Inner) -> io::Result<bool> {
    let (_, alive) = roll_call(&*inner.disk, &inner.home.join("locks"))?;
    Ok(alive.iter().any(|session| *session != inner.session))
}

/// After an unclean stop every expert goes for which nothing vouches, and the others are compared
/// with their digests when they are used next. The life lines of the dead go last, so that a crash in
/// here is only a reason to do it again; a disk too full to note it is one as well.
fn distrust(inner: &Inner, dead: &[Dead]) -> io::Result<()> {
    let boot = inner.disk.boot();
    // As long as the system has not been started anew, the page cache holds every byte that a killed
    // process has written, and a line that was written vouches for its file. After a power loss only
    // what was synced is known to be there.
    let same_boot = |b: &Option<String>| b.is_some() && *b == boot;
    let power_lost = !dead.iter().all(|(_, boot)| same_boot(boot));
    let models = lock(&inner.state).models.clone();
    let mut noted = true;
    for model in &models {
        noted &= distrust_model(inner, model, power_lost)?;
    }
    for (session, _) in dead.iter().filter(|_| noted) {
        let line = session_path(&inner.home.join("locks"), *session);
        let _ = inner.disk.remove_file(&line);
    }
    Ok(())
}

/// Whether others will know as well.
fn distrust_model(inner: &Inner, model: &Model, power_lost: bool) -> io::Result<bool> {
    let scan = scan_model(&*inner.disk, model)?;
    if scan.entries.is_empty() && inner.disk.facts(model.log.path()).is_err() {
        return Ok(true);
    }
    let mut folders = HashSet::new();
    for (id, entry) in &scan.entries {
        let told = model.log.get(&Subject::Expert(id.key))?;
        let vouched =
            told.is_some_and(|told| (told.synced || !power_lost) && told.known.length == entry.len);
        if !vouched {
            let path = expert_path(&model.folder, id.key);
            remove_any(&*inner.disk, &path)?;
            folders.extend(path.parent().map(Path::to_owned));
            lock(&inner.state).stats.distrusted += 1;
        }
    }
    // Else another power loss could bring them back, with nobody left to suspect them.
    for folder in &folders {
        inner.disk.sync_folder(folder)?;
    }
    model.log.mark_unclean()
}
