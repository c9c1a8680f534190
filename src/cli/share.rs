//! `share`: a model's bytes for other machines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::args::ModelArgs;
use super::args::Share;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::scrub::Scrub;
use super::setup;
use crate::hub::Hub;
use crate::residency::OpenRequest;
use crate::residency::Opened;
use crate::share;
use crate::store::ModelStore;
use crate::terms::Bytes;

pub(super) fn command(args: &Share, screen: &Arc<Screen>) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let addr = address(&args.host, args.port)?;
    if !addr.ip().is_loopback() && args.token.is_none() {
        return Err(CliError::Usage(
            format!(
                "--host {}: others could read this store without a secret",
                args.host
            ),
            Some("give --token".to_owned()),
        ));
    }
    let Shared {
        name,
        backend,
        hub,
        store,
        _demo,
    } = shared(args, &interrupt, screen)?;
    let options = share::ShareOptions {
        token: args.token.as_deref().map(share::Secret::new),
        ..share::ShareOptions::default()
    };
    let served = share::Server::start(addr, backend, options)?;
    screen.note(&format!(
        "{name} is shared at {}; another machine uses it with",
        served.url()
    ));
    let secret = if args.token.is_some() { ":SECRET@" } else { "" };
    let url = served.url().replacen("://", &format!("://{secret}"), 1);
    screen.note(&format!(
        "  deltafin stream --hub {url} --model {name} \"Who are you?\""
    ));
    screen.note("Ctrl-C ends");
    let served = Arc::new(served);
    let scrub = store.and_then(|store| {
        let served = Arc::clone(&served);
        let work = move || served.stats().body_bytes;
        Scrub::telling(screen, store, args.scrub.scrub, work)
    });
    while !interrupt.asked() {
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(scrub);
    let stats = served.stats();
    // The last that holds it: its end is that of the server.
    drop(served);
    screen.note(&format!(
        "{} requests for bytes, {} sent",
        stats.body_requests,
        Bytes(stats.body_bytes)
    ));
    if let Some(hub) = hub {
        let fetched = hub.stats().body_bytes;
        screen.note(&format!("{} fetched from the hub", Bytes(fetched)));
    }
    Ok(exit::DONE)
}

/// What is shared, under which name, and the hub behind it.
struct Shared {
    name: String,
    backend: Arc<dyn share::Backend>,
    hub: Option<Arc<Hub>>,
    /// Where its experts lie, unless they come from elsewhere than a store.
    store: Option<ModelStore>,
    /// The embedded model's own hub, for as long as it is needed.
    _demo: Option<share::Server>,
}

fn shared(args: &Share, interrupt: &Interrupt, screen: &Arc<Screen>) -> Result<Shared, CliError> {
    let alone = |name: String, backend| Shared {
        name,
        backend,
        hub: None,
        store: None,
        _demo: None,
    };
    if args.through {
        return through(args, interrupt, screen);
    }
    if args.folder.is_none() && args.model.as_deref() == Some("demo") {
        let name = share::Embedded::REPO.to_owned();
        return Ok(alone(name, Arc::new(share::Embedded::new())));
    }
    let named = |name: &str| {
        name.parse()
            .map_err(|error| CliError::Usage(format!("--model: {error}"), None))
    };
    if let Some(folder) = &args.folder {
        let name = args
            .model
            .clone()
            .unwrap_or_else(|| setup::local_name(folder));
        let folder = share::Folder::open(named(&name)?, folder)?;
        return Ok(alone(name, Arc::new(folder)));
    }
    let name = args
        .model
        .clone()
        .unwrap_or_else(|| setup::DEFAULT_MODEL.to_owned());
    let request = OpenRequest {
        repo: named(&name)?,
        revision: None,
        update: false,
    };
    // Sharing reads; it may not evict.
    let store = setup::look(&args.store)?;
    setup::tell(&store, screen);
    let opened = Opened::open(&store, None, &request, interrupt.flag(), screen.as_ref())?;
    Ok(Shared {
        store: Some(opened.store.clone()),
        ..alone(name, Arc::new(share::Stored::new(&opened)?))
    })
}

/// A store with its hub behind it. The core comes first: every client needs all of it, and a part
/// of it is too large to fetch while one waits.
fn through(args: &Share, interrupt: &Interrupt, screen: &Arc<Screen>) -> Result<Shared, CliError> {
    let model = ModelArgs {
        model: args.model.clone(),
        revision: None,
        update: false,
        hub: args.hub.clone(),
        offline: false,
        rate: args.rate,
        max_bytes: args.max_bytes,
        store: args.store.clone(),
    };
    let setup = setup::open(&model, true, &interrupt.flag(), screen)?;
    setup.opened.install_core(screen.as_ref())?;
    Ok(Shared {
        name: setup.opened.repo.to_string(),
        backend: Arc::new(share::ThroughStore::new(&setup.opened)?),
        hub: setup.hub,
        store: Some(setup.opened.store.clone()),
        _demo: setup._demo,
    })
}

/// A host and port to listen on.
pub(super) fn address(host: &str, port: u16) -> Result<SocketAddr, CliError> {
    let host = if host == "localhost" {
        "127.0.0.1"
    } else {
        host
    };
    host.parse()
        .map(|ip| SocketAddr::new(ip, port))
        .map_err(|_| {
            CliError::Usage(
                format!("--host: `{host}` is not an address"),
                Some("use 127.0.0.1, or 0.0.0.0 for every interface".to_owned()),
            )
        })
}
