//! The `ashlar` command.

use std::process::ExitCode;

use ashlar_cli::cli::Cli;
use ashlar_cli::output::EXIT_ERROR;
use clap::Parser as _;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(EXIT_ERROR)
        }
    }
}
