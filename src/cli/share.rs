//! `share`: a model's bytes for other machines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::args::Share;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use crate::residency::OpenRequest;
use crate::residency::Opened;
use crate::share;
use crate::terms::Bytes;

pub(super) fn command(args: &Share, screen: &Screen) -> Result<u8, CliError> {
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
    let (name, backend) = backend(args, &interrupt, screen)?;
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
    while !interrupt.asked() {
        std::thread::sleep(Duration::from_millis(100));
    }
    let stats = served.stats();
    served.stop();
    screen.note(&format!(
        "{} requests for bytes, {} sent",
        stats.body_requests,
        Bytes(stats.body_bytes)
    ));
    Ok(exit::DONE)
}

/// What is shared, and under which name.
fn backend(
    args: &Share,
    interrupt: &Interrupt,
    screen: &Screen,
) -> Result<(String, Arc<dyn share::Backend>), CliError> {
    if args.folder.is_none() && args.model.as_deref() == Some("demo") {
        let name = share::Embedded::REPO.to_owned();
        return Ok((name, Arc::new(share::Embedded::new())));
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
        let shared = share::Folder::open(named(&name)?, folder)?;
        return Ok((name, Arc::new(shared)));
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
    let opened = Opened::open(&store, None, &request, interrupt.flag(), screen)?;
    Ok((name, Arc::new(share::Stored::new(&opened)?)))
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
