//! `ashlar-storage-node`: serves replicas on this machine's devices.

use clap::Parser;

#[derive(Parser)]
#[command(name = "ashlar-storage-node", version, about)]
struct Command {
    #[command(flatten)]
    args: ashlar_storage_node::options::Args,
}

fn main() -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    ashlar_storage_node::run(Command::parse().args)
}
