//! `share`: a model's bytes for other machines.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::args::Share;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use crate::share;
use crate::terms::Bytes;

pub(super) fn command(args: &Share, screen: &Screen) -> Result<u8, CliError> {
    let interrupt = Interrupt::listen();
    let addr = address(&args.host, args.port)?;
    let (name, backend): (String, Arc<dyn share::Backend>) = if args.folder == "demo" {
        (
            share::Embedded::REPO.to_owned(),
            Arc::new(share::Embedded::new()),
        )
    } else {
        let folder = Path::new(&args.folder);
        let name = args
            .name
            .clone()
            .unwrap_or_else(|| setup::local_name(folder));
        let repo = name
            .parse()
            .map_err(|error| CliError::Usage(format!("--name: {error}"), None))?;
        (name, Arc::new(share::Folder::open(repo, folder)?))
    };
    let served = share::Server::start(addr, backend, share::ShareOptions::default())?;
    screen.note(&format!(
        "{name} is shared at {}; another machine uses it with",
        served.url()
    ));
    screen.note(&format!(
        "  deltafin stream --hub {} --model {name} \"Who are you?\"",
        served.url()
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
