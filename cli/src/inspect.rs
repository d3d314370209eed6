//! `ashlar store inspect`: what a store holds, read-only, also when its node is down.

use clap::Subcommand;

use crate::cli::Context;
use crate::output::Outcome;

/// `ashlar store …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// x
    Inspect,
}

/// Runs the command.
pub fn run(_: &Context, _: Command) -> anyhow::Result<Outcome> {
    Ok(Outcome::Good)
}
