//! `serve`: the OpenAI-compatible server.

use std::sync::Arc;

use super::args::Serve;
use super::env::Env;
use super::exit;
use super::exit::CliError;
use super::interrupt::Interrupt;
use super::screen::Screen;
use super::setup;
use super::share::address;

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
    let setup = setup::open(&args.model, true, &interrupt.flag(), screen)?;
    let _engine = setup::engine(setup.opened, &args.run)?;
    Ok(exit::DONE)
}
