//! What you typed, what it means, what you see.
//!
//! ```text
//! args.rs    what was typed: every flag and its help
//! env.rs     every environment variable
//! setup.rs   what both mean: store, sources, model, engine
//! generate   demo   fetch   serve   share   cache      one command a file
//! screen.rs, live.rs, report.rs                        what you see
//! exit.rs    what failures are called on the way out
//! ```

mod args;
mod cache;
mod demo;
mod env;
mod exit;
mod fetch;
mod generate;
mod interrupt;
mod live;
mod logits;
mod report;
mod screen;
mod serve;
mod setup;
mod share;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use self::args::Cli;
use self::args::Command;
use self::screen::Screen;

/// Reads the command line, does what it says, and names the exit code.
pub fn run() -> ExitCode {
    // clap prints help to stdout with code 0 and mistakes to stderr with code 2.
    let cli = Cli::parse();
    let (json, verbose) = match &cli.command {
        Command::Demo(a) => (a.run.json, a.run.verbose),
        Command::Stream(a) | Command::Run(a) => (a.run.json, a.run.verbose),
        Command::Fetch(a) => (a.json, a.verbose),
        Command::Serve(a) => (a.run.json, a.run.verbose),
        Command::Share(_) => (false, 0),
        Command::Cache(args::Cache::Stats(a)) => (a.json, 0),
        Command::Cache(args::Cache::Verify(a)) => (a.json, 0),
        Command::Cache(args::Cache::Trim(a)) => (a.json, 0),
    };
    let screen = Arc::new(Screen::new(json, verbose));
    let outcome = match &cli.command {
        Command::Demo(args) => demo::command(args, &screen),
        Command::Stream(args) => generate::command(args, true, &screen),
        Command::Run(args) => generate::command(args, false, &screen),
        Command::Fetch(args) => fetch::command(args, &screen),
        Command::Serve(args) => serve::command(args, &screen),
        Command::Share(args) => share::command(args, &screen),
        Command::Cache(args) => cache::command(args, &screen),
    };
    exit::process(outcome.unwrap_or_else(|error| {
        screen.error(&error);
        error.code()
    }))
}
