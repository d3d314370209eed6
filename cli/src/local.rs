//! Storage nodes and an initiator on this machine, as real processes: for quickstart and bench.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;

use crate::pinning::Pinning;
use crate::process::{Lifetime, Process, ProcessSpec};
use crate::scratch::Scratch;
use crate::state::{Cluster, StateDir};

/// What the kernel takes as the path of a unix socket.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The engine of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// io_uring.
    #[value(name = "io_uring")]
    IoUring,
    /// epoll and pwritev2, which every kernel and container allows.
    Portable,
}

impl Engine {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Engine::IoUring => "io_uring",
            Engine::Portable => "portable",
        }
    }
}

/// How processes are started.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Size of a new store.
    pub store_bytes: u64,
    /// `None`: io_uring, or portable where that is forbidden.
    pub engine: Option<Engine>,
    /// Spin this long before sleeping.
    pub busy_poll: Duration,
    /// Which CPUs they use.
    pub pinning: Pinning,
    /// Whether they outlive this process.
    pub lifetime: Lifetime,
}

/// What a storage node prints when it serves.
#[derive(Clone, Debug, Deserialize)]
pub struct NodeAnnouncement {
    /// Control address.
    pub control: String,
    /// Where `/metrics` is, "HOST:PORT".
    pub metrics: String,
    /// Data addresses, one per store.
    pub data: Vec<String>,
}

/// What an initiator prints when it serves.
#[derive(Clone, Debug, Deserialize)]
pub struct InitiatorAnnouncement {
    /// The attach API's socket.
    pub control: String,
    /// Where `/metrics` is, if it is served.
    #[serde(default)]
    pub metrics: Option<String>,
}

/// A storage node process.
#[derive(Debug)]
pub struct LocalNode {
    /// The process.
    pub process: Process,
    /// Its addresses.
    pub addresses: NodeAnnouncement,
    store: PathBuf,
}

/// An initiator process.
#[derive(Debug)]
pub struct LocalInitiator {
    /// The process.
    pub process: Process,
    /// Its addresses.
    pub addresses: InitiatorAnnouncement,
}

/// Starts the processes and records their addresses.
#[derive(Debug)]
pub struct LocalCluster {
    /// The storage nodes.
    pub nodes: Vec<LocalNode>,
    /// The initiator, when there is one.
    pub initiator: Option<LocalInitiator>,
    /// Where its addresses and volumes are recorded.
    pub state: StateDir,
    scratch: Scratch,
    options: LocalOptions,
}

/// Addresses that a node shall listen on.
struct Listen<'a> {
    control: &'a str,
    metrics: &'a str,
    data: &'a str,
}

impl LocalCluster {
    /// Starts `nodes` storage nodes with new stores under `folder`.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start(
        nodes: usize,
        folder: &Path,
        scratch: &Scratch,
        options: LocalOptions,
    ) -> anyhow::Result<LocalCluster> {
        let state = StateDir::new(Some(scratch.path().join("state")))?;
        let mut cluster = LocalCluster {
            nodes: Vec::new(),
            initiator: None,
            state,
            scratch: scratch.clone(),
            options,
        };
        for index in 0..nodes {
            let store = folder.join(format!("store-{}", index + 1));
            std::fs::create_dir(&store).with_context(|| format!("making {}", store.display()))?;
            let listen = Listen {
                control: "tcp:127.0.0.1:0",
                metrics: "127.0.0.1:0",
                data: "tcp:127.0.0.1:0",
            };
            let node = cluster.start_node(index, &store, &listen, true)?;
            cluster.nodes.push(node);
        }
        cluster.record()?;
        Ok(cluster)
    }

    fn start_node(
        &self,
        index: usize,
        store: &Path,
        listen: &Listen<'_>,
        format: bool,
    ) -> anyhow::Result<LocalNode> {
        let mut arguments: Vec<OsString> = vec!["storage-node".into(), "--announce".into()];
        arguments.extend(["--store".into(), store.as_os_str().to_owned()]);
        arguments.extend(["--listen".into(), listen.data.into()]);
        arguments.extend(["--control".into(), listen.control.into()]);
        arguments.extend(["--metrics".into(), listen.metrics.into()]);
        if format {
            arguments.extend([
                "--format-size".into(),
                self.options.store_bytes.to_string().into(),
            ]);
        }
        self.engine_arguments(&mut arguments);
        let name = format!("storage-node-{}", index + 1);
        let cpu = self.options.pinning.replica(index);
        let (process, line) = Process::start(self.spec(name, arguments, cpu), &self.scratch)?;
        let addresses = serde_json::from_str(&line)
            .with_context(|| format!("{} announced {line:?}", process.name()))?;
        Ok(LocalNode {
            process,
            addresses,
            store: store.to_owned(),
        })
    }

    fn engine_arguments(&self, arguments: &mut Vec<OsString>) {
        if let Some(engine) = self.options.engine {
            arguments.extend(["--engine".into(), engine.name().into()]);
        }
        if !self.options.busy_poll.is_zero() {
            let micros = self.options.busy_poll.as_micros().to_string();
            arguments.extend(["--busy-poll-us".into(), micros.into()]);
        }
    }

    fn spec(&self, name: String, arguments: Vec<OsString>, cpu: Option<usize>) -> ProcessSpec {
        ProcessSpec {
            log: self.scratch.path().join(format!("{name}.log")),
            name,
            arguments,
            cpu,
            lifetime: self.options.lifetime,
        }
    }

    /// Starts an initiator daemon.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_initiator(&mut self) -> anyhow::Result<()> {
        let path = self.scratch.path();
        anyhow::ensure!(
            path.as_os_str().len() + "/initiator.sock".len() <= SOCKET_PATH_BYTES_MAX,
            "{} is too long a path for a unix socket; choose a directory with a shorter one",
            path.display()
        );
        let mut arguments: Vec<OsString> = vec!["initiator".into(), "--announce".into()];
        let control = format!("unix:{}", path.join("initiator.sock").display());
        arguments.extend(["--listen".into(), control.into()]);
        let nbd = format!("unix:{}", path.join("nbd.sock").display());
        arguments.extend(["--nbd".into(), nbd.into()]);
        self.engine_arguments(&mut arguments);
        let cpu = self.options.pinning.client();
        let spec = self.spec("initiator".into(), arguments, cpu);
        let (process, line) = Process::start(spec, &self.scratch)?;
        let addresses = serde_json::from_str(&line)
            .with_context(|| format!("the initiator announced {line:?}"))?;
        self.initiator = Some(LocalInitiator { process, addresses });
        self.record()
    }

    /// Starts node `index` again on its store and its addresses, after it was killed.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_node(&mut self, index: usize) -> anyhow::Result<()> {
        let node = &self.nodes[index];
        let data = node
            .addresses
            .data
            .first()
            .context("the node has no data address")?;
        let listen = Listen {
            control: &node.addresses.control,
            metrics: &node.addresses.metrics,
            data,
        };
        self.nodes[index] = self.start_node(index, &node.store, &listen, false)?;
        Ok(())
    }

    /// Control addresses of the nodes.
    pub fn node_addresses(&self) -> Vec<String> {
        self.nodes
            .iter()
            .map(|node| node.addresses.control.clone())
            .collect()
    }

    /// Names and ids of all processes.
    pub fn processes(&self) -> Vec<(String, u32)> {
        let nodes = self.nodes.iter().map(|node| &node.process);
        let all = nodes.chain(self.initiator.iter().map(|initiator| &initiator.process));
        all.map(|process| (process.name().to_owned(), process.id()))
            .collect()
    }

    /// The initiator's socket.
    ///
    /// # Errors
    /// When there is no initiator.
    pub fn initiator_address(&self) -> anyhow::Result<&str> {
        let initiator = self
            .initiator
            .as_ref()
            .context("no initiator was started")?;
        Ok(&initiator.addresses.control)
    }

    /// Fails when a process has ended by itself.
    ///
    /// # Errors
    /// Then, with the end of its log.
    pub fn check_running(&mut self) -> anyhow::Result<()> {
        let nodes = self.nodes.iter_mut().map(|node| &mut node.process);
        nodes
            .chain(
                self.initiator
                    .iter_mut()
                    .map(|initiator| &mut initiator.process),
            )
            .try_for_each(Process::check_running)
    }

    fn record(&self) -> anyhow::Result<()> {
        let initiator = self.initiator.as_ref().map(|i| i.addresses.control.clone());
        self.state.save_cluster(&Cluster {
            nodes: self.node_addresses(),
            initiator,
        })
    }
}
