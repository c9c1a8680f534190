//! The `deltafin` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    deltafin::cli::run()
}
