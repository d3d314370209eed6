//! Listing volumes and showing one.

use ashlar_control_api::storage_node::ListReplicasRequest;
use serde::Serialize;

use crate::attach::{self, AttachmentStatus};
use crate::context::Context;
use crate::control;
use crate::output::{self, Outcome};
use crate::state::{Ack, MemberRecord, Role, VolumeRecord};
use crate::units::Size;

/// A volume in the output of `volume list`, `create` and `grow`. The key is never printed.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Its name.
    pub name: String,
    /// UUID.
    pub id: String,
    /// Its size.
    pub size_bytes: u64,
    /// "majority" or "all".
    pub ack: Ack,
    /// Its members.
    pub members: Vec<MemberSummary>,
}

/// A member in outputs.
#[derive(Debug, Serialize)]
pub struct MemberSummary {
    /// UUID.
    pub device_id: String,
    /// "data" or "witness".
    pub role: Role,
    /// Control address of its node.
    pub control: String,
    /// Where initiators connect.
    pub data_address: String,
}

/// `volume status`.
#[derive(Debug, Serialize)]
struct Status {
    #[serde(flatten)]
    volume: Summary,
    /// One per member, in the same order.
    replicas: Vec<ReplicaStatus>,
    /// What the initiator on this machine says, if it has the volume.
    attachment: Option<AttachmentStatus>,
}

/// A replica as its node sees it.
#[derive(Debug, Default, Serialize)]
struct ReplicaStatus {
    device_id: String,
    /// "complete", "resyncing", "evicted"; "missing" where the node has none; "unreachable".
    state: String,
    /// Why it is unreachable.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whether the configuration that this replica has stored calls it in sync.
    in_sync: bool,
    /// Whether an initiator holds a lease on it.
    attached: bool,
    promised_epoch: u32,
    /// Position of its last write.
    last_epoch: u32,
    last_sequence: u64,
    configuration_epoch: u32,
    configuration_generation: u64,
    allocated_bytes: u64,
}

impl From<&VolumeRecord> for Summary {
    fn from(volume: &VolumeRecord) -> Summary {
        Summary {
            name: volume.name.clone(),
            id: volume.id.clone(),
            size_bytes: volume.size_bytes,
            ack: volume.ack,
            members: volume
                .members
                .iter()
                .map(|m| MemberSummary {
                    device_id: m.device_id.clone(),
                    role: m.role,
                    control: m.control.clone(),
                    data_address: m.data_address.clone(),
                })
                .collect(),
        }
    }
}

/// `ashlar volume list`
pub fn list(context: &Context) -> anyhow::Result<Outcome> {
    let volumes: Vec<_> = context.state.volumes()?.iter().map(Summary::from).collect();
    output::print(context.format, &volumes, |volumes| {
        let mut table = output::table(["volume", "size", "replicas", "witnesses", "ack", "id"]);
        for volume in volumes {
            let data = volume
                .members
                .iter()
                .filter(|m| m.role == Role::Data)
                .count();
            table.add_row([
                volume.name.clone(),
                Size(volume.size_bytes).to_string(),
                data.to_string(),
                (volume.members.len() - data).to_string(),
                format!("{:?}", volume.ack).to_lowercase(),
                volume.id.clone(),
            ]);
        }
        table.to_string()
    })?;
    Ok(Outcome::Good)
}

/// `ashlar volume status`. A volume with replicas missing is shown like any other.
pub fn status(context: &Context, name: &str) -> anyhow::Result<Outcome> {
    let volume = context.state.volume(name)?;
    let initiator = context.cluster()?.initiator;
    let status =
        control::block_on(async {
            let mut replicas = Vec::new();
            for member in &volume.members {
                replicas.push(replica(&volume, member).await.unwrap_or_else(|error| {
                    ReplicaStatus {
                        device_id: member.device_id.clone(),
                        state: "unreachable".into(),
                        error: Some(format!("{error:#}")),
                        ..ReplicaStatus::default()
                    }
                }));
            }
            let mut attachment = None;
            if let Some(address) = initiator {
                match attach::attachments(&address).await {
                    Ok(list) => attachment = list.into_iter().find(|a| a.volume_id == volume.id),
                    Err(error) => eprintln!("warning: {error:#}"),
                }
            }
            Ok(Status {
                volume: Summary::from(&volume),
                replicas,
                attachment,
            })
        })?;
    output::print(context.format, &status, status_table)?;
    Ok(Outcome::Good)
}

async fn replica(volume: &VolumeRecord, member: &MemberRecord) -> anyhow::Result<ReplicaStatus> {
    let mut node = control::node(&member.control).await?;
    let request = ListReplicasRequest {
        volume_id: volume.id.clone(),
    };
    let what = format!("replicas of {}", member.control);
    let replicas = control::answer(&what, node.list_replicas(request).await)?.replicas;
    let found = replicas
        .into_iter()
        .find(|r| r.device_id == member.device_id && r.nonce == member.nonce);
    let Some(found) = found else {
        return Ok(ReplicaStatus {
            device_id: member.device_id.clone(),
            state: "missing".into(),
            ..ReplicaStatus::default()
        });
    };
    let me = |m: &ashlar_control_api::storage_node::Member| {
        m.device_id == member.device_id && m.nonce == member.nonce
    };
    Ok(ReplicaStatus {
        in_sync: found.in_sync.iter().any(me),
        device_id: found.device_id,
        state: found.state,
        error: None,
        attached: found.attached,
        promised_epoch: found.promised_epoch,
        last_epoch: found.last_epoch,
        last_sequence: found.last_sequence,
        configuration_epoch: found.configuration_epoch,
        configuration_generation: found.configuration_generation,
        allocated_bytes: found.allocated_bytes,
    })
}

fn status_table(status: &Status) -> String {
    let volume = &status.volume;
    let mut table = output::table([
        "device",
        "node",
        "role",
        "state",
        "in sync",
        "last write",
        "configuration",
        "allocated",
    ]);
    for (member, replica) in volume.members.iter().zip(&status.replicas) {
        table.add_row([
            member.device_id.clone(),
            member.control.clone(),
            format!("{:?}", member.role).to_lowercase(),
            replica.state.clone(),
            if replica.in_sync { "yes" } else { "no" }.into(),
            format!("{}.{}", replica.last_epoch, replica.last_sequence),
            format!(
                "{}.{}",
                replica.configuration_epoch, replica.configuration_generation
            ),
            Size(replica.allocated_bytes).to_string(),
        ]);
    }
    let mut text = format!(
        "{}  {}  ack {}  {}\n{table}\n",
        volume.name,
        Size(volume.size_bytes),
        format!("{:?}", volume.ack).to_lowercase(),
        volume.id
    );
    match &status.attachment {
        None => text.push_str("not attached through the initiator known here\n"),
        Some(a) => {
            text.push_str(&format!(
                "attached: {} {} (epoch {})\n",
                a.state, a.reason, a.epoch
            ));
            for m in &a.members {
                text.push_str(&format!("  {} {}", m.device_id, m.state));
                if m.resync_blocks_total > 0 {
                    let (done, total) = (m.resync_blocks_done, m.resync_blocks_total);
                    text.push_str(&format!(", {done} of {total} blocks"));
                }
                text.push('\n');
            }
            for uri in &a.nbd_uris {
                text.push_str(&format!("  {uri}\n"));
            }
        }
    }
    for replica in &status.replicas {
        if let Some(error) = &replica.error {
            text.push_str(&format!("{}: {error}\n", replica.device_id));
        }
    }
    text
}
