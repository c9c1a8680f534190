//! `serve`: the OpenAI-compatible server.

use std::sync::Arc;
use std::time::Duration;

use super::args::Serve;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use super::share::address;
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
        ..ServerOptions::new()
    };
    // The door opens first: a large model's core takes hours to come, and until then `/health`
    // says what is awaited.
    let server = Server::start(addr, options)?;
    let base = format!("{}/v1", server.url());
    screen.note(&format!(
        "listening on {base}; the model is being made ready"
    ));
    server.loading("opening the model and fetching its core");
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let engine = setup::engine(setup.opened, &args.run)?;
    engine.opened().install_core(screen.as_ref())?;
    let name = engine.name().to_owned();
    server.ready(engine)?;
    screen.note(&format!("{name} is ready; clients use the base URL {base}"));
    // Not the flag: a client that leaves raises it too, to end its generation.
    while !interrupt.asked() {
        std::thread::sleep(Duration::from_millis(50));
    }
    screen.note("stopping");
    server.stop();
    Ok(exit::DONE)
}
