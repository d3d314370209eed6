//! `ashlar node`: registering storage nodes, their status, replicas out of service and back.

use ashlar_control_api::storage_node::{
    Device, EvictReplicaRequest, ListReplicasRequest, ReadmitReplicaRequest, StatusRequest,
};
use clap::Subcommand;
use serde::Serialize;

use crate::context::Context;
use crate::control;
use crate::output::{self, Outcome};
use crate::units::Size;

/// `ashlar node …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Records control addresses of storage nodes, and of the initiator with --initiator.
    Add {
        /// Control addresses.
        #[arg(value_name = "HOST:PORT")]
        addresses: Vec<String>,
    },
    /// Forgets control addresses.
    Remove {
        /// Control addresses.
        #[arg(value_name = "HOST:PORT", required = true)]
        addresses: Vec<String>,
    },
    /// Lists the recorded addresses.
    List,
    /// Shows the devices of the nodes.
    Status {
        /// Control addresses; without any: all recorded ones.
        addresses: Vec<String>,
    },
    /// Takes a node's replicas out of service: they refuse writes until they are readmitted.
    Evict(Selection),
    /// Puts evicted replicas back into service; they are resynced.
    Readmit(Selection),
}

/// Replicas on a node.
#[derive(Debug, clap::Args)]
pub struct Selection {
    /// The node's control address.
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Only replicas of this volume.
    #[arg(long, value_name = "NAME")]
    volume: Option<String>,
}

/// A node in the output of `node status`.
#[derive(Debug, Serialize)]
pub struct NodeStatus {
    /// Control address.
    pub address: String,
    /// "up", or "unreachable".
    pub state: &'static str,
    /// Why it is unreachable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Its name.
    pub node: String,
    /// Its version.
    pub version: String,
    /// Its devices.
    pub devices: Vec<DeviceStatus>,
}

/// A device in the output of `node status`.
#[derive(Debug, Serialize)]
pub struct DeviceStatus {
    /// UUID.
    pub device_id: String,
    /// Path of the store.
    pub path: String,
    /// "open", or why it is closed.
    pub state: String,
    /// "io_uring" or "portable".
    pub engine: String,
    /// Where initiators connect.
    pub data_addresses: Vec<String>,
    /// Size of the store.
    pub size_bytes: u64,
    /// Room in extents of 1 MiB.
    pub extents_total: u64,
    /// Extents that hold nothing.
    pub extents_free: u64,
    /// Size of the journal.
    pub journal_bytes: u64,
    /// Of it in use.
    pub journal_used_bytes: u64,
    /// Blocks in memory that wait for their place.
    pub dirty_bytes: u64,
    /// Connections of initiators.
    pub connections: u64,
    /// Replicas on the device.
    pub replicas: u64,
    /// Bytes written to the device since the start.
    pub device_bytes_written: u64,
    /// Bytes that clients wrote since the start.
    pub client_bytes_written: u64,
}

/// A replica in the output of `node evict` and `node readmit`.
#[derive(Debug, Serialize)]
struct Changed {
    volume_id: String,
    device_id: String,
    state: &'static str,
}

impl From<Device> for DeviceStatus {
    fn from(d: Device) -> DeviceStatus {
        DeviceStatus {
            device_id: d.device_id,
            path: d.path,
            state: d.state,
            engine: d.engine,
            data_addresses: d.data_addresses,
            size_bytes: d.size_bytes,
            extents_total: d.extents_total,
            extents_free: d.extents_free,
            journal_bytes: d.journal_bytes,
            journal_used_bytes: d.journal_used_bytes,
            dirty_bytes: d.dirty_bytes,
            connections: d.connections,
            replicas: d.replicas,
            device_bytes_written: d.device_bytes_written,
            client_bytes_written: d.client_bytes_written,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When it could not be done.
pub fn run(context: &Context, command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::Add { addresses } => change(context, |nodes| {
            for address in addresses {
                if !nodes.contains(&address) {
                    nodes.push(address);
                }
            }
        }),
        Command::Remove { addresses } => change(context, |nodes| {
            nodes.retain(|node| !addresses.contains(node))
        }),
        Command::List => print_cluster(context, &context.cluster()?),
        Command::Status { addresses } => {
            let addresses = if addresses.is_empty() {
                context.nodes()?
            } else {
                addresses
            };
            print_status(context, &addresses)
        }
        Command::Evict(selection) => set_service(context, &selection, Service::Out),
        Command::Readmit(selection) => set_service(context, &selection, Service::In),
    }
}

fn change(context: &Context, apply: impl FnOnce(&mut Vec<String>)) -> anyhow::Result<Outcome> {
    let mut cluster = context.state.cluster()?;
    apply(&mut cluster.nodes);
    if let Some(initiator) = context.cluster()?.initiator {
        cluster.initiator = Some(initiator);
    }
    context.state.save_cluster(&cluster)?;
    print_cluster(context, &cluster)
}

fn print_cluster(context: &Context, cluster: &crate::state::Cluster) -> anyhow::Result<Outcome> {
    output::print(context.format, cluster, |cluster| {
        let mut table = output::table(["kind", "address"]);
        for node in &cluster.nodes {
            table.add_row(["storage node", node]);
        }
        if let Some(initiator) = &cluster.initiator {
            table.add_row(["initiator", initiator]);
        }
        table.to_string()
    })?;
    Ok(Outcome::Good)
}

/// Asks a node for its status.
///
/// # Errors
/// When it does not answer.
pub async fn status(address: &str) -> anyhow::Result<NodeStatus> {
    let mut node = control::node(address).await?;
    let status = control::answer(
        &format!("status of {address}"),
        node.status(StatusRequest {}).await,
    )?;
    Ok(NodeStatus {
        address: address.to_owned(),
        state: "up",
        error: None,
        node: status.node,
        version: status.version,
        devices: status.devices.into_iter().map(DeviceStatus::from).collect(),
    })
}

fn print_status(context: &Context, addresses: &[String]) -> anyhow::Result<Outcome> {
    let nodes = control::block_on(async {
        let mut nodes = Vec::new();
        for address in addresses {
            nodes.push(status(address).await.unwrap_or_else(|error| NodeStatus {
                address: address.clone(),
                state: "unreachable",
                error: Some(format!("{error:#}")),
                node: String::new(),
                version: String::new(),
                devices: Vec::new(),
            }));
        }
        Ok(nodes)
    })?;
    output::print(context.format, &nodes, |nodes| {
        let mut table = output::table([
            "node", "device", "state", "engine", "free", "replicas", "dirty", "path",
        ]);
        for node in nodes {
            if node.devices.is_empty() {
                table.add_row([&node.address, "", node.state]);
            }
            for d in &node.devices {
                table.add_row([
                    node.address.clone(),
                    d.device_id.clone(),
                    d.state.clone(),
                    d.engine.clone(),
                    format!(
                        "{} of {}",
                        Size(d.extents_free << 20),
                        Size(d.extents_total << 20)
                    ),
                    d.replicas.to_string(),
                    Size(d.dirty_bytes).to_string(),
                    d.path.clone(),
                ]);
            }
        }
        table.to_string()
    })?;
    let good = nodes
        .iter()
        .all(|n| n.state == "up" && n.devices.iter().all(|d| d.state == "open"));
    Ok(if good { Outcome::Good } else { Outcome::Bad })
}

#[derive(Clone, Copy)]
enum Service {
    Out,
    In,
}

fn set_service(
    context: &Context,
    selection: &Selection,
    service: Service,
) -> anyhow::Result<Outcome> {
    let volume_id = match &selection.volume {
        Some(name) => context.state.volume(name)?.id,
        None => String::new(),
    };
    let address = &selection.address;
    let changed = control::block_on(async {
        let mut node = control::node(address).await?;
        let replicas = node.list_replicas(ListReplicasRequest { volume_id }).await;
        let replicas = control::answer(&format!("replicas of {address}"), replicas)?.replicas;
        let mut changed = Vec::new();
        for replica in replicas {
            let (volume_id, device_id) = (replica.volume_id, replica.device_id);
            let what = format!("replica of volume {volume_id} on {address}");
            let state = match service {
                Service::Out => {
                    let request = EvictReplicaRequest {
                        volume_id: volume_id.clone(),
                        device_id: device_id.clone(),
                    };
                    control::answer(&what, node.evict_replica(request).await)?;
                    "evicted"
                }
                Service::In => {
                    let request = ReadmitReplicaRequest {
                        volume_id: volume_id.clone(),
                        device_id: device_id.clone(),
                    };
                    control::answer(&what, node.readmit_replica(request).await)?;
                    "readmitted"
                }
            };
            changed.push(Changed {
                volume_id,
                device_id,
                state,
            });
        }
        Ok(changed)
    })?;
    output::print(context.format, &changed, |changed| {
        let mut table = output::table(["volume", "device", "state"]);
        for replica in changed {
            table.add_row([&replica.volume_id, &replica.device_id, replica.state]);
        }
        table.to_string()
    })?;
    Ok(Outcome::Good)
}
