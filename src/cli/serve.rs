//! `serve`: the OpenAI-compatible server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::args::Serve;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::scrub::Scrub;
use super::setup;
use super::share::address;
use crate::engine::AtLimit;
use crate::engine::Engine;
use crate::engine::Prefixes;
use crate::engine::StateMemory;
use crate::engine::StateStore;
use crate::hub::HubError;
use crate::jobs::Identity;
use crate::jobs::Journal;
use crate::jobs::States;
use crate::residency::ResidencyError;
use crate::server::Server;
use crate::server::ServerOptions;
use crate::share::Secret;

pub(super) fn command(args: &Serve, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let addr = address(&args.host, args.port)?;
    let api_key = args.api_key.clone().or(Env::read().api_key);
    if !addr.ip().is_loopback() && api_key.is_none() {
        return Err(CliError::Usage(
            format!(
                "--host {}: others could use this machine without a key",
                args.host
            ),
            Some("give --api-key or set DELTAFIN_API_KEY".to_owned()),
        ));
    }
    let options = ServerOptions {
        api_key: api_key.as_deref().map(Secret::new),
        origins: args.allow_origin.clone(),
        running_max: usize::from(args.parallel),
        waiting_max: usize::from(args.queue),
        body_max: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        connections_max: args.max_connections.map_or_else(connections, usize::from),
        ..ServerOptions::new()
    };
    // The door opens first: a large model's core takes hours to come, and until then `/health`
    // says what is awaited.
    let server = Server::start(addr, options)?;
    let base = format!("{}/v1", server.url());
    screen.note(&format!(
        "listening on {base}; the model is being made ready"
    ));
    server.loading("opening the model");
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let home = setup.opened.store.store().home().to_owned();
    let sequences = usize::from(args.parallel);
    let engine = setup::engine_of_many(setup.opened, &args.run, sequences, screen)?;
    // Whoever set the limit can move it: what is paused goes on.
    engine.set_at_limit(AtLimit::Wait);
    server.coming(Arc::clone(&engine) as _);
    install_core(&engine, &server, &interrupt, screen)?;
    // From here on the first signal lets the pass at work be finished, so that states can be kept.
    interrupt.gently();
    let name = engine.name().to_owned();
    let states = remember(&engine, &home, args)?;
    let journal = Journal::open(&home)?;
    server.keep(journal.clone(), Identity::of(&engine));
    server.keep_files(&home)?;
    let (store, meter) = {
        let opened = engine.opened();
        (opened.store.clone(), Arc::clone(&opened.meter))
    };
    // Memory answers too: a server whose experts are all there is not idle.
    let work = move || meter.counts().requested;
    let scrub = Scrub::telling(screen, store, args.scrub.scrub, work);
    server.ready(engine)?;
    screen.note(&format!("{name} is ready; clients use the base URL {base}"));
    // Not the flag: a client that leaves raises it too, to end its generation.
    while !interrupt.asked() {
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(scrub);
    screen.note("stopping: what runs is finished or kept; once more ends at once");
    server.drain(GRACE, PATIENCE);
    server.stop();
    journal.flush();
    if let Some(states) = states {
        states.flush();
    }
    Ok(exit::DONE)
}

/// Fetches the core. At the limit of fetched bytes it waits, as generations do, for a higher one.
fn install_core(
    engine: &Engine,
    server: &Server,
    interrupt: &Interrupt,
    screen: &Arc<Screen>,
) -> Result<(), CliError> {
    loop {
        server.loading("fetching the model's core");
        let installed = engine.opened().install_core(screen.as_ref());
        let Err(ResidencyError::Hub(HubError::CapReached { max })) = installed else {
            return Ok(installed?);
        };
        let paused = format!(
            "paused: the limit of {max} is reached, and the core is not all here; what came is \
             kept, and it goes on with a higher max_bytes, POST /limits"
        );
        server.paused(&paused);
        screen.note(&paused);
        while engine.fetch_limit().max == Some(max.0) {
            if interrupt.asked() {
                return Ok(installed?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Gives the engine its memory for running sequences and for what earlier ones have left.
fn remember(engine: &Engine, home: &Path, args: &Serve) -> Result<Option<Arc<States>>, CliError> {
    let (running, kept) = setup::state_memory(engine);
    // More sequences than fit take turns, by way of the disk.
    engine.set_state_memory(StateMemory {
        budget: Some(running),
        spill: Some(home.to_owned()),
    });
    let states = if args.states.0 == 0 {
        None
    } else {
        let spec = Arc::clone(&engine.opened().spec);
        let identity = Identity::of(engine);
        Some(Arc::new(States::open(home, identity, spec, args.states.0)?))
    };
    engine.set_prefixes(Prefixes {
        bytes: kept,
        every_tokens: Some(STATE_EVERY),
        store: states.clone().map(|states| states as Arc<dyn StateStore>),
    });
    Ok(states)
}

/// In a long prompt, a state is kept every so many tokens: a conversation that parts there goes on
/// from it.
const STATE_EVERY: usize = 512;
/// How long who is being answered may go on after the first signal, and how long a pass may take
/// after it. Whoever ends services kills after 90 s.
const GRACE: Duration = Duration::from_secs(15);
const PATIENCE: Duration = Duration::from_secs(50);

/// Connections that this process may hold beside the store's files. Systems start processes with few
/// files for programs of another time; every program may ask for more.
fn connections() -> usize {
    use rustix::process::Resource;
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(FILES).min(FILES);
    let mut files = limit.current.unwrap_or(FILES);
    if files < wanted {
        let raised = rustix::process::Rlimit {
            current: Some(wanted),
            ..limit
        };
        if rustix::process::setrlimit(Resource::Nofile, raised).is_ok() {
            files = wanted;
        }
    }
    usize::try_from(files / 2).map_or(4096, |half| half.clamp(64, 4096))
}

/// Open files that suffice.
const FILES: u64 = 16_384;
