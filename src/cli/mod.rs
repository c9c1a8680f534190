//! What you typed, what it means, what you see.
//!
//! ```text
//! args.rs    what was typed: every flag and its help
//! env.rs     every environment variable
//! setup.rs   what both mean: store, sources, model, engine
//! generate   demo   fetch   serve   share   cache      one command a file
//! batch   session   chat   sessions   prefix                  work that outlives the process
//! plan   bench   doctor   simulate   warm              what will be, what is, what would have been
//! screen.rs, live.rs, report.rs                        what you see
//! exit.rs    what failures are called on the way out
//! ```

mod args;
mod batch;
mod bench;
mod cache;
mod chat;
mod demo;
mod doctor;
mod env;
mod exit;
mod fetch;
mod generate;
mod interrupt;
mod live;
mod logits;
mod plan;
mod prefix;
mod report;
mod screen;
mod scrub;
mod serve;
mod session;
mod sessions;
mod setup;
mod share;
mod simulate;
mod warm;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use self::args::Cli;
use self::args::Command;
use self::screen::Screen;

/// Has the C library give large blocks back when they are freed. By itself it learns to keep ever larger ones, one heap a
/// thread: a long prompt's buffers then stay as holes, hundreds of megabytes beyond what memory was planned for.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "there is no other way to say so")]
fn give_memory_back() {
    const M_MMAP_THRESHOLD: i32 = -3;
    const M_ARENA_MAX: i32 = -8;
    unsafe extern "C" {
        fn mallopt(param: i32, value: i32) -> i32;
    }
    for (param, value) in [(M_MMAP_THRESHOLD, 1 << 20), (M_ARENA_MAX, 2)] {
        // SAFETY: a function of the C library that takes two numbers; no thread runs yet.
        unsafe { mallopt(param, value) };
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_memory_back() {}

/// Reads the command line, does what it says, and names the exit code.
pub fn run() -> ExitCode {
    give_memory_back();
    // clap prints help to stdout with code 0 and mistakes to stderr with code 2.
    let cli = Cli::parse();
    let (json, verbose) = match &cli.command {
        Command::Demo(a) => (a.run.json, a.run.verbose),
        Command::Stream(a) | Command::Run(a) => (a.run.json, a.run.verbose),
        Command::Fetch(a) => (a.json, a.verbose),
        Command::Batch(a) => (a.run.json, a.run.verbose),
        Command::Sessions(a) => (sessions::json(a), 0),
        Command::Prefix(a) => prefix::output(a),
        Command::Serve(a) => (a.run.json, a.run.verbose),
        Command::Share(_) => (false, 0),
        Command::Plan(a) => (a.json, 0),
        Command::Bench(a) => (bench::json(a), a.flags.run.verbose),
        Command::Doctor(a) => (a.json, 0),
        Command::Cache(args::Cache::Stats(a)) => (a.json, 0),
        Command::Cache(args::Cache::Verify(a)) => (a.json, 0),
        Command::Cache(args::Cache::Trim(a)) => (a.json, 0),
        Command::Cache(args::Cache::Import(a)) => (a.json, 0),
        Command::Cache(args::Cache::Manifest(a)) => (a.json, 0),
        Command::Cache(args::Cache::Simulate(a)) => (a.json, 0),
        Command::Cache(args::Cache::Warm(a)) => (a.json, a.verbose),
    };
    let screen = Arc::new(Screen::new(json, verbose));
    let outcome = match &cli.command {
        Command::Demo(args) => demo::command(args, &screen),
        Command::Stream(args) => generate::command(args, true, &screen),
        Command::Run(args) => generate::command(args, false, &screen),
        Command::Fetch(args) => fetch::command(args, &screen),
        Command::Batch(args) => batch::command(args, &screen),
        Command::Sessions(args) => sessions::command(args, &screen),
        Command::Prefix(args) => prefix::command(args, &screen),
        Command::Serve(args) => serve::command(args, &screen),
        Command::Share(args) => share::command(args, &screen),
        Command::Plan(args) => plan::command(args, &screen),
        Command::Bench(args) => bench::command(args, &screen),
        Command::Cache(args) => cache::command(args, &screen),
        Command::Doctor(args) => doctor::command(args, &screen),
    };
    exit::process(outcome.unwrap_or_else(|error| {
        screen.error(&error);
        error.code()
    }))
}
