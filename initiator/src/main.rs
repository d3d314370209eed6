//! `ashlar-initiator`: attaches volumes and serves them as block devices.

use std::io::IsTerminal as _;

use clap::Parser;

/// Attaches replicated volumes and serves them to NBD clients on this machine
#[derive(Parser)]
#[command(name = "ashlar-initiator", version)]
struct Command {
    #[command(flatten)]
    args: ashlar_initiator::daemon::Args,
}

fn main() -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    ashlar_initiator::daemon::run(Command::parse().args)
}
