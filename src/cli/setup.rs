//! What was typed becomes what is meant: store, sources, model, engine.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::CoreArg;
use super::args::LookaheadArg;
use super::args::ModelArgs;
use super::args::Ram;
use super::args::RunArgs;
use super::args::StoreArgs;
use super::env::Env;
use super::exit::CliError;
use super::screen::Screen;
use crate::engine::Engine;
use crate::engine::EngineOptions;
use crate::hub::Hub;
use crate::hub::HubObserver;
use crate::hub::HubOptions;
use crate::hub::SourceAddress;
use crate::hub::Token;
use crate::kernel::Isa;
use crate::residency::CoreChoice;
use crate::residency::Demand;
use crate::residency::Lookahead;
use crate::residency::OpenRequest;
use crate::residency::Opened;
use crate::residency::Share;
use crate::residency::ram;
use crate::share;
use crate::store::Budget;
use crate::store::Policy;
use crate::store::Store;
use crate::store::StoreOptions;
use crate::terms::Bytes;
use crate::terms::RepoId;

/// The model used when none is named.
pub(super) const DEFAULT_MODEL: &str = "moonshotai/Kimi-K3";
/// The hub used when none is named.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// `--cache` when nothing was ever set: a machine with more to spare can say so.
const CACHE_DEFAULT: u64 = 200_000_000_000;
/// `--reserve` when nothing was ever set, at least.
const RESERVE_DEFAULT: u64 = 10_000_000_000;
/// Tokens of a sequence that memory is planned for.
const CONTEXT: usize = 8192;
/// Spans in flight from one source.
const LANES: usize = 16;

/// Everything a command needs before it can work.
pub(super) struct Setup {
    pub(super) opened: Opened,
    pub(super) hub: Option<Arc<Hub>>,
    /// The loopback hub of the embedded model, while it is needed.
    pub(super) _demo: Option<share::Server>,
}

impl Setup {
    /// Whether bytes come from elsewhere than this machine's folders.
    pub(super) fn over_network(&self) -> bool {
        let hub = self.hub.as_ref();
        hub.is_some_and(|hub| hub.stats().sources.iter().any(|s| s.name.contains("://")))
    }
}

/// Opens the store and the model. `network` is false for commands that never use it.
pub(super) fn open(
    args: &ModelArgs,
    network: bool,
    stop: &Arc<AtomicBool>,
    screen: &Arc<Screen>,
) -> Result<Setup, CliError> {
    open_in(&Env::read(), args, network, stop, screen)
}

/// The same, with another environment than the process's: the demo's loopback hub is meant even
/// where `HF_ENDPOINT` or offline mode is set.
pub(super) fn open_in(
    env: &Env,
    args: &ModelArgs,
    network: bool,
    stop: &Arc<AtomicBool>,
    screen: &Arc<Screen>,
) -> Result<Setup, CliError> {
    open_for(env, args, network, stop, screen, Remember::Chosen)
}

/// Whether what was chosen for the store holds from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remember {
    Chosen,
    Nothing,
}

/// The same, and where `remember` says so, without a trace in the store's settings.
pub(super) fn open_for(
    env: &Env,
    args: &ModelArgs,
    network: bool,
    stop: &Arc<AtomicBool>,
    screen: &Arc<Screen>,
    remember: Remember,
) -> Result<Setup, CliError> {
    let offline = !network || args.offline || env.offline.is_some();
    let demo = match args.model.as_deref() {
        Some("demo") if !offline => Some(start_demo(share::ShareOptions::default())?),
        _ => None,
    };
    let mut sources = sources(args, env, demo.as_ref());
    let repo = repo(args, &sources)?;
    sources.extend(hf_cache(env, &repo));
    let store = store(&args.store, env, remember)?;
    tell(&store, screen);
    let hub = hub(args, env, sources, offline, screen)?;
    // A folder that was named, or the demo's own hub; not a cache that others left here, which may
    // lag behind what the store already has.
    let named = args.hub.iter().any(|hub| !hub.contains("://"));
    let local = hub.is_some() && (demo.is_some() || (offline && named));
    let request = OpenRequest {
        repo,
        revision: args.revision.clone(),
        // A local folder is its own truth: whoever changed it means the new one.
        update: args.update || local,
    };
    let opened = Opened::open(
        &store,
        hub.clone(),
        &request,
        Arc::clone(stop),
        screen.as_ref(),
    )?;
    Ok(Setup {
        opened,
        hub,
        _demo: demo,
    })
}

/// The embedded small model, served on loopback.
pub(super) fn start_demo(options: share::ShareOptions) -> Result<share::Server, CliError> {
    let backend = Arc::new(share::Embedded::new());
    Ok(share::Server::start(
        ([127, 0, 0, 1], 0).into(),
        backend,
        options,
    )?)
}

pub(super) fn sources(
    args: &ModelArgs,
    env: &Env,
    demo: Option<&share::Server>,
) -> Vec<SourceAddress> {
    if let Some(demo) = demo {
        return vec![SourceAddress::Http(demo.url())];
    }
    let mut sources: Vec<SourceAddress> = args
        .hub
        .iter()
        .map(|hub| SourceAddress::parse(hub))
        .collect();
    if sources.is_empty() || env.endpoint.is_some() {
        let endpoint = env
            .endpoint
            .clone()
            .unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        sources.push(SourceAddress::Http(endpoint));
    }
    sources
}

/// What `hf download` or another program has already brought to this machine: one more source, read
/// and verified like any other.
fn hf_cache(env: &Env, repo: &RepoId) -> Option<SourceAddress> {
    let cache = env.hf_cache.as_ref()?;
    let model = cache.join(format!("models--{}", repo.folder_name()));
    model
        .join("snapshots")
        .is_dir()
        .then(|| SourceAddress::Folder(cache.clone()))
}

/// The repository: as named, else `local/FOLDER` for a model's own folder, else the real K3.
pub(super) fn repo(args: &ModelArgs, sources: &[SourceAddress]) -> Result<RepoId, CliError> {
    let name = match (args.model.as_deref(), sources.first()) {
        (Some("demo"), _) => share::Embedded::REPO.to_owned(),
        (Some(name), _) => name.to_owned(),
        (None, Some(SourceAddress::Folder(folder))) if folder.join("config.json").is_file() => {
            local_name(folder)
        }
        (None, _) => DEFAULT_MODEL.to_owned(),
    };
    name.parse()
        .map_err(|error| CliError::Usage(format!("--model: {error}"), None))
}

/// A folder's name, made fit for a repository's.
pub(super) fn local_name(folder: &Path) -> String {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = folder
        .file_name()
        .map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let mut clean: String = name
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || matches!(c, '.' | '_') {
                c
            } else {
                '-'
            }
        })
        .collect();
    while clean.contains("--") || clean.contains("..") {
        clean = clean.replace("--", "-").replace("..", ".");
    }
    let clean = clean.trim_matches(['-', '.']);
    format!("local/{}", if clean.is_empty() { "model" } else { clean })
}

/// The store's folder.
pub(super) fn home(args: &StoreArgs, env: &Env) -> Result<PathBuf, CliError> {
    args.home
        .clone()
        .or_else(|| env.home.clone())
        .or_else(|| dirs::data_dir().map(|d| d.join("deltafin")))
        .ok_or_else(|| {
            CliError::Usage(
                "no folder for the store: this system names no data folder".to_owned(),
                Some("give --home".to_owned()),
            )
        })
}

/// Opens the store with the budget and reserve that were typed, else those last set, else defaults.
fn store(args: &StoreArgs, env: &Env, remember: Remember) -> Result<Store, CliError> {
    let home = home(args, env)?;
    let last = Store::settings(&home)?;
    let (free, reserve_default) = disk(&home);
    let reserve_set = args.reserve.map(|b| b.0);
    let reserve = reserve_set.or(last.reserve).unwrap_or(reserve_default);
    let budget_set = args.cache;
    let default = Budget::Limit(CACHE_DEFAULT.min(free.saturating_sub(reserve)));
    let budget = budget_set.or(last.budget).unwrap_or(default);
    let policy_set = args.policy.map(Policy::from);
    let store = Store::open(StoreOptions {
        home,
        budget,
        reserve,
        policy: match remember {
            Remember::Chosen => policy_set.or(last.policy).unwrap_or_default(),
            Remember::Nothing => policy_set.unwrap_or_default(),
        },
        keep_heat: remember == Remember::Chosen,
    })?;
    // Also the default, the first time: it came from the free space, of which the cache itself
    // takes more and more, so that a default worked out anew would shrink with every run.
    let chosen = budget_set.or(last.budget.is_none().then_some(budget));
    let any = chosen.is_some() || reserve_set.is_some() || policy_set.is_some();
    if remember == Remember::Chosen && any {
        store.remember(chosen, reserve_set, policy_set)?;
    }
    Ok(store)
}

/// Has the person told what a store finds out behind everybody's back.
pub(super) fn tell(store: &Store, screen: &Arc<Screen>) {
    let screen = Arc::clone(screen);
    store.on_notice(move |text| screen.note(text));
}

/// Opens the store to look at it: looking may not evict, whatever budget was last set.
pub(super) fn look(args: &StoreArgs) -> Result<Store, CliError> {
    let home = home(args, &Env::read())?;
    let (_, reserve) = space(args)?;
    let budget = Budget::Unlimited;
    let last = Store::settings(&home)?;
    let policy = args.policy.map(Policy::from).or(last.policy);
    Ok(Store::open(StoreOptions {
        home,
        budget,
        reserve,
        policy: policy.unwrap_or_default(),
        keep_heat: true,
    })?)
}

/// Free bytes of the disk that a folder lies or will lie on.
pub(super) fn free(folder: &Path) -> Option<u64> {
    let found = folder.ancestors().find_map(|f| rustix::fs::statvfs(f).ok());
    found.map(|s| s.f_bavail.saturating_mul(s.f_frsize))
}

/// The same, and the reserve it has by default.
fn disk(folder: &Path) -> (u64, u64) {
    let found = folder.ancestors().find_map(|f| rustix::fs::statvfs(f).ok());
    let (free, total) = found.map_or((0, 0), |s| {
        (
            s.f_bavail.saturating_mul(s.f_frsize),
            s.f_blocks.saturating_mul(s.f_frsize),
        )
    });
    (free, RESERVE_DEFAULT.max(total / 20))
}

pub(super) fn hub(
    args: &ModelArgs,
    env: &Env,
    sources: Vec<SourceAddress>,
    offline: bool,
    screen: &Arc<Screen>,
) -> Result<Option<Arc<Hub>>, CliError> {
    let sources: Vec<SourceAddress> = sources
        .into_iter()
        .filter(|s| !offline || matches!(s, SourceAddress::Folder(_)))
        .collect();
    if sources.is_empty() {
        return Ok(None);
    }
    let mut extra_ca_pem = Vec::new();
    if let Some(file) = &env.ca_file {
        let read = std::fs::read(file);
        extra_ca_pem.push(read.map_err(|source| CliError::File {
            path: file.display().to_string(),
            source,
        })?);
    }
    let options = HubOptions {
        sources,
        token: env
            .token
            .as_ref()
            .and_then(|(secret, origin)| Token::new(secret, origin.clone())),
        offline,
        rate_bytes_per_s: args.rate,
        bytes_max: args.max_bytes.map(|b| b.0),
        lanes_max: LANES,
        extra_ca_pem,
        observer: Arc::clone(screen) as Arc<dyn HubObserver>,
        ..HubOptions::default()
    };
    let hub = Arc::new(Hub::open(options)?);
    screen.tell_limits_of(&hub);
    Ok(Some(hub))
}

/// Makes an engine of an opened model. Its core may still be missing: what can be refused without
/// it is refused before a hundred gigabytes are fetched.
pub(super) fn engine(
    opened: Opened,
    run: &RunArgs,
    screen: &Arc<Screen>,
) -> Result<Arc<Engine>, CliError> {
    engine_within(opened, run, demand(run), screen)
}

/// The same for so many sequences at once, and states of earlier ones.
pub(super) fn engine_of_many(
    opened: Opened,
    run: &RunArgs,
    sequences: usize,
    screen: &Arc<Screen>,
) -> Result<Arc<Engine>, CliError> {
    let demand = Demand {
        sequences,
        taking_turns: true,
        ..demand(run)
    };
    engine_within(opened, run, demand, screen)
}

/// Memory for the states of running sequences, and for those of earlier texts: what the plan gave to
/// states, and of what it gave to nobody a part.
pub(super) fn state_memory(engine: &Engine) -> (u64, u64) {
    let plan = engine.memory();
    let states = plan.bytes(Share::Sequences);
    let unused = match plan.budget {
        Some(budget) => budget.saturating_sub(plan.total()),
        // Nothing tells how much there is but what is free now.
        None => super::env::memory_available(),
    };
    // A limit of fetched bytes has a sweep's states copied where it may break off.
    let capped = engine.fetch_limit().max.is_some();
    let running = states / 4 * 3 + unused / 2;
    (
        if capped { running / 2 } else { running },
        states / 4 + unused / 8,
    )
}

fn engine_within(
    opened: Opened,
    run: &RunArgs,
    memory: Demand,
    screen: &Arc<Screen>,
) -> Result<Arc<Engine>, CliError> {
    let isa = match &run.isa {
        None => Isa::best(),
        Some(name) => Isa::available()
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| {
                let names: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
                CliError::Usage(
                    format!("--isa: this machine has no `{name}`"),
                    Some(format!("it has {}", names.join(", "))),
                )
            })?,
    };
    let threads = run.threads.map_or_else(default_threads, usize::from);
    let engine = Engine::new(
        opened,
        EngineOptions {
            isa,
            threads,
            memory,
        },
    )?;
    if let Some(file) = &run.trace {
        let screen = Arc::clone(screen);
        engine.trace_to(file, move |error| {
            screen.note(&format!("{error}; no more is traced"));
        })?;
    }
    Ok(Arc::new(engine))
}

/// What memory may be used, as the flags say.
pub(super) fn demand(run: &RunArgs) -> Demand {
    Demand {
        budget: match run.ram {
            Ram::Size(bytes) => Some(bytes),
            Ram::Auto => ram::available().map(|ram| ram.budget),
        },
        threads: 0,
        context: CONTEXT,
        sequences: 1,
        taking_turns: false,
        core: match run.core {
            None => CoreChoice::Auto,
            Some(CoreArg::Mmap) => CoreChoice::Mapped,
            Some(CoreArg::Read) => CoreChoice::Read,
        },
        lookahead: match run.lookahead {
            LookaheadArg::Off => Lookahead::Off,
            LookaheadArg::On => Lookahead::On,
            LookaheadArg::Auto => Lookahead::Auto,
            LookaheadArg::Wrong => Lookahead::Contrary,
        },
    }
}

/// Physical cores, or fewer where this process may not use them all: a second thread on a core
/// adds nothing to work that is bound by memory.
pub(super) fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    num_cpus::get_physical().min(allowed).max(1)
}

/// Free disk at the store, and the part of it that experts never touch.
pub(super) fn space(args: &StoreArgs) -> Result<(u64, u64), CliError> {
    let home = home(args, &Env::read())?;
    let (free, reserve) = disk(&home);
    let set = args
        .reserve
        .map(|b| b.0)
        .or(Store::settings(&home)?.reserve);
    Ok((free, set.unwrap_or(reserve)))
}

/// The budget as people say it.
pub(super) fn budget(budget: Budget) -> String {
    match budget {
        Budget::Limit(bytes) => Bytes(bytes).to_string(),
        Budget::Unlimited => "unlimited".to_owned(),
    }
}
