//! The command line: every command and where it goes.

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::context::{Context, Global};
use crate::output::{EXIT_CODES_HELP, Outcome};
use crate::{attach, bench, compare, inspect, node, queue, quickstart, volume};

/// Replicated block storage with low latency.
#[derive(Debug, Parser)]
#[command(name = "ashlar", version, after_help = EXIT_CODES_HELP)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Every command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows a three-replica volume on this machine: writes, a killed node, resync, proof.
    Quickstart(quickstart::Args),
    /// Creates, lists, shows, grows and deletes volumes.
    #[command(subcommand)]
    Volume(volume::Command),
    /// Attaches a volume through the initiator daemon and prints its NBD addresses.
    Attach(attach::AttachArgs),
    /// Detaches a volume.
    Detach(attach::DetachArgs),
    /// Measures reads and writes beside two baselines.
    Bench(bench::Args),
    /// Looks into a store on disk, also when its node is down.
    #[command(subcommand)]
    Store(inspect::Command),
    /// Checks replicas.
    #[command(subcommand)]
    Replicas(compare::Command),
    /// Shows what the schedulers of the devices hold.
    #[command(subcommand)]
    Queue(queue::Command),
    /// Registers storage nodes, shows them, takes replicas out of service and back.
    #[command(subcommand)]
    Node(node::Command),
    /// Prints a completion script.
    Completion {
        /// The shell it is for.
        shell: clap_complete::Shell,
    },
    /// Runs a storage node in this process.
    StorageNode(Box<crate::daemons::StorageNodeArgs>),
    /// Runs an initiator daemon in this process.
    Initiator(Box<crate::daemons::InitiatorArgs>),
    /// Runs one replica of the floor of `bench`.
    #[command(hide = true)]
    FloorReplica(bench::floor_replica::Args),
}

impl Cli {
    /// Does what was asked for.
    ///
    /// # Errors
    /// When it could not be done.
    pub fn run(self) -> anyhow::Result<Outcome> {
        let context = Context::new(self.global)?;
        match self.command {
            Command::Quickstart(args) => quickstart::run(&context, &args),
            Command::Volume(command) => volume::run(&context, command),
            Command::Attach(args) => attach::attach(&context, &args),
            Command::Detach(args) => attach::detach(&context, &args),
            Command::Bench(args) => bench::run(&context, &args),
            Command::Store(command) => inspect::run(&context, command),
            Command::Replicas(command) => compare::run(&context, command),
            Command::Queue(command) => queue::run(&context, command),
            Command::Node(command) => node::run(&context, command),
            Command::Completion { shell } => {
                let mut command = visible(&Cli::command());
                clap_complete::generate(shell, &mut command, "ashlar", &mut std::io::stdout());
                Ok(Outcome::Good)
            }
            Command::StorageNode(args) => {
                crate::daemons::storage_node(*args).map(|()| Outcome::Good)
            }
            Command::Initiator(args) => crate::daemons::initiator(*args).map(|()| Outcome::Good),
            Command::FloorReplica(args) => bench::floor_replica::run(&args).map(|()| Outcome::Good),
        }
    }
}

/// The command without its hidden subcommands, which completion would offer.
fn visible(command: &clap::Command) -> clap::Command {
    let subcommands = command.get_subcommands().filter(|c| !c.is_hide_set());
    clap::Command::new("ashlar")
        .args(command.get_arguments().cloned())
        .subcommands(subcommands.cloned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Format;
    use crate::state::Cluster;

    #[test]
    fn the_command_line_has_no_contradictions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_documented_bench_command_is_understood() {
        let line = "ashlar bench randwrite --size 4k --depth 1 --replicas 3 --store ram \
                    --seconds 10 -o json";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        assert_eq!(cli.global.output, Format::Json);
        assert!(matches!(cli.command, Command::Bench(_)));
    }

    #[test]
    fn addresses_on_the_command_line_come_before_the_recorded_ones() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().to_str().unwrap();
        let context = |line: &[&str]| {
            let all = [&["ashlar", "--state", state], line, &["node", "list"]].concat();
            Context::new(Cli::try_parse_from(all).unwrap().global).unwrap()
        };
        let empty = context(&[]);
        assert!(
            empty
                .nodes()
                .unwrap_err()
                .to_string()
                .contains("ashlar node add")
        );
        let recorded = Cluster {
            nodes: vec!["a:1".into()],
            initiator: None,
        };
        empty.state.save_cluster(&recorded).unwrap();
        assert_eq!(empty.nodes().unwrap(), ["a:1"]);
        assert_eq!(context(&["--node", "b:2"]).nodes().unwrap(), ["b:2"]);
    }
}
