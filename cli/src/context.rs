//! What commands know of the rest: the state, the addresses and the output format.

use std::path::PathBuf;

use anyhow::Context as _;

use crate::output::Format;
use crate::state::{Cluster, StateDir};

/// Options of every command.
#[derive(Clone, Debug, clap::Args)]
pub struct Global {
    /// How results are printed.
    #[arg(short, long, global = true, value_enum, default_value_t)]
    pub output: Format,
    /// Where addresses and volumes are recorded [default: $XDG_STATE_HOME/ashlar].
    #[arg(long, global = true, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Control address of a storage node, instead of those recorded. Repeatable.
    #[arg(long = "node", global = true, value_name = "HOST:PORT")]
    pub nodes: Vec<String>,
    /// Socket of the initiator, instead of the one recorded.
    #[arg(long, global = true, value_name = "unix:PATH")]
    pub initiator: Option<String>,
}

/// What commands need to know of the rest: the state, the addresses and the output format.
#[derive(Clone, Debug)]
pub struct Context {
    /// How results are printed.
    pub format: Format,
    /// The state directory.
    pub state: StateDir,
    nodes: Vec<String>,
    initiator: Option<String>,
}

impl Context {
    pub(crate) fn new(global: Global) -> anyhow::Result<Context> {
        Ok(Context {
            format: global.output,
            state: StateDir::new(global.state)?,
            nodes: global.nodes,
            initiator: global.initiator,
        })
    }

    /// The addresses that apply: those of the command line, else those recorded.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn cluster(&self) -> anyhow::Result<Cluster> {
        let mut cluster = self.state.cluster()?;
        if !self.nodes.is_empty() {
            cluster.nodes.clone_from(&self.nodes);
        }
        if self.initiator.is_some() {
            cluster.initiator.clone_from(&self.initiator);
        }
        Ok(cluster)
    }

    /// Control addresses of the storage nodes.
    ///
    /// # Errors
    /// When none is known.
    pub fn nodes(&self) -> anyhow::Result<Vec<String>> {
        let nodes = self.cluster()?.nodes;
        anyhow::ensure!(
            !nodes.is_empty(),
            "no storage nodes are known; register them with `ashlar node add HOST:PORT`, \
             or try `ashlar quickstart --keep`"
        );
        Ok(nodes)
    }

    /// The initiator's socket.
    ///
    /// # Errors
    /// When none is known.
    pub fn initiator(&self) -> anyhow::Result<String> {
        self.cluster()?.initiator.context(
            "no initiator is known; start one with `ashlar initiator --listen unix:PATH --nbd unix:PATH`, \
             and record it with `ashlar node add --initiator unix:PATH`",
        )
    }
}
