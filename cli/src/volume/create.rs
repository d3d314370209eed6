//! Making and growing volumes.

use anyhow::{Context as _, bail, ensure};
use ashlar_control_api::storage_node::{
    CreateReplicaRequest, DeleteReplicaRequest, GrowReplicaRequest, Role as ProtoRole,
};

use crate::context::Context;
use crate::control;
use crate::node::{self, DeviceStatus};
use crate::output::{self, Outcome};
use crate::state::{Ack, MemberRecord, Role, StateDir, VolumeRecord, check_name};
use crate::units::Size;
use crate::volume::CreateArgs;

/// What a volume shall be.
#[derive(Clone, Debug)]
pub struct VolumePlan {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Copies.
    pub replicas: usize,
    /// Members that only vote.
    pub witnesses: usize,
    /// Which acknowledgements a write waits for.
    pub ack: Ack,
}

/// `ashlar volume create`
///
/// # Errors
/// When it could not be done; nothing is left behind then.
pub fn run(context: &Context, args: &CreateArgs) -> anyhow::Result<Outcome> {
    let plan = VolumePlan {
        name: args.name.clone(),
        size_bytes: args.size.0,
        replicas: args.replicas.into(),
        witnesses: args.witnesses.into(),
        ack: args.ack,
    };
    let volume = create(&context.state, &context.nodes()?, &plan)?;
    output::print(context.format, &super::show::Summary::from(&volume), |_| {
        format!(
            "created {} ({}, {} members); attach it with `ashlar attach {}`",
            volume.name,
            Size(volume.size_bytes),
            volume.members.len(),
            volume.name
        )
    })?;
    Ok(Outcome::Good)
}

/// Makes a volume on `nodes`, each member on another node, and records it.
///
/// # Errors
/// When there are too few nodes or one refuses; replicas already made are deleted again.
pub fn create(
    state: &StateDir,
    nodes: &[String],
    plan: &VolumePlan,
) -> anyhow::Result<VolumeRecord> {
    check_name(&plan.name)?;
    ensure!(
        !state.has_volume(&plan.name),
        "there is already a volume {:?}",
        plan.name
    );
    ensure!(
        plan.size_bytes > 0 && plan.size_bytes.is_multiple_of(4096),
        "the size must be a multiple of 4096 bytes, and not 0"
    );
    control::block_on(async {
        let members = choose_members(nodes, plan).await?;
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        let volume = VolumeRecord {
            name: plan.name.clone(),
            id: uuid::Uuid::new_v4().to_string(),
            size_bytes: plan.size_bytes,
            ack: plan.ack,
            key,
            members,
        };
        // Recorded first: should we die half-way, `volume delete` finds what there is.
        state.record_new_volume(&volume)?;
        for (done, member) in volume.members.iter().enumerate() {
            if let Err(error) = create_replica(&volume, member).await {
                for member in &volume.members[..done] {
                    // The first error is the one to report; what stays behind is unreachable.
                    let _ = delete_replica(&volume, member).await;
                }
                state.forget_volume(&volume.name)?;
                return Err(error);
            }
        }
        Ok(volume)
    })
}

/// One device per node, those with the most room first; the members in the order of their ids, as
/// configurations list them.
async fn choose_members(nodes: &[String], plan: &VolumePlan) -> anyhow::Result<Vec<MemberRecord>> {
    let wanted = plan.replicas + plan.witnesses;
    let mut candidates: Vec<(String, DeviceStatus)> = Vec::new();
    let mut unusable = Vec::new();
    for address in nodes {
        match node::status(address).await {
            Ok(status) => {
                let open = status.devices.into_iter().filter(|d| d.state == "open");
                match open.max_by_key(|d| d.extents_free) {
                    Some(device) => candidates.push((address.clone(), device)),
                    None => unusable.push(format!("{address} has no open device")),
                }
            }
            Err(error) => unusable.push(format!("{error:#}")),
        }
    }
    if candidates.len() < wanted {
        let mut reasons = unusable.join("; ");
        if reasons.is_empty() {
            reasons = format!("{} are known; add more with `ashlar node add`", nodes.len());
        }
        bail!(
            "{wanted} storage nodes are needed, {} can be used: {reasons}",
            candidates.len()
        );
    }
    candidates.sort_by_key(|(_, device)| std::cmp::Reverse(device.extents_free));
    let mut members = Vec::with_capacity(wanted);
    for (i, (control, device)) in candidates.into_iter().take(wanted).enumerate() {
        let mut nonce = [0; 8];
        getrandom::fill(&mut nonce)?;
        let role = if i < plan.replicas {
            Role::Data
        } else {
            Role::Witness
        };
        let data_address = device.data_addresses.into_iter().next();
        members.push(MemberRecord {
            device_id: device.device_id,
            nonce: u64::from_le_bytes(nonce),
            role,
            data_address: data_address.with_context(|| format!("{control} has no data address"))?,
            control,
        });
    }
    // The text form of a UUID orders like its bytes.
    members.sort_by(|a, b| (&a.device_id, a.nonce).cmp(&(&b.device_id, b.nonce)));
    if let Some(pair) = members
        .windows(2)
        .find(|pair| pair[0].device_id == pair[1].device_id)
    {
        bail!(
            "{} and {} are the same device; a volume's members lie on different nodes",
            pair[0].control,
            pair[1].control
        );
    }
    Ok(members)
}

async fn create_replica(volume: &VolumeRecord, member: &MemberRecord) -> anyhow::Result<()> {
    let mut node = control::node(&member.control).await?;
    let request = CreateReplicaRequest {
        volume_id: volume.id.clone(),
        device_id: member.device_id.clone(),
        size_bytes: volume.size_bytes,
        role: ProtoRole::from(member.role).into(),
        ack: ashlar_control_api::storage_node::Ack::from(volume.ack).into(),
        key: volume.key.to_vec(),
        nonce: member.nonce,
        members: volume.members.iter().map(MemberRecord::member).collect(),
    };
    let what = format!("creating the replica on {}", member.control);
    control::answer(&what, node.create_replica(request).await).map(|_| ())
}

/// Deletes one replica of a volume.
///
/// # Errors
/// When the node does not answer or refuses.
pub async fn delete_replica(volume: &VolumeRecord, member: &MemberRecord) -> anyhow::Result<()> {
    let mut node = control::node(&member.control).await?;
    let request = DeleteReplicaRequest {
        volume_id: volume.id.clone(),
        device_id: member.device_id.clone(),
        nonce: member.nonce,
    };
    let what = format!("deleting the replica on {}", member.control);
    control::answer(&what, node.delete_replica(request).await).map(|_| ())
}

/// `ashlar volume grow`
///
/// # Errors
/// When the size is not larger, or a node does not answer or refuses; growing again goes on then.
pub fn grow(context: &Context, name: &str, size: Size) -> anyhow::Result<Outcome> {
    let mut volume = context.state.volume(name)?;
    ensure!(
        size.0.is_multiple_of(4096),
        "the size must be a multiple of 4096 bytes"
    );
    ensure!(
        size.0 >= volume.size_bytes,
        "{name} has {} already; volumes only grow",
        Size(volume.size_bytes)
    );
    control::block_on(async {
        for member in &volume.members {
            let mut node = control::node(&member.control).await?;
            let request = GrowReplicaRequest {
                volume_id: volume.id.clone(),
                device_id: member.device_id.clone(),
                size_bytes: size.0,
            };
            let what = format!("growing the replica on {}", member.control);
            control::answer(&what, node.grow_replica(request).await)?;
        }
        Ok(())
    })?;
    // Only now may anybody attach with the new size: every member has it.
    volume.size_bytes = size.0;
    context.state.save_volume(&volume)?;
    output::print(context.format, &super::show::Summary::from(&volume), |_| {
        format!("{name} has {size} now; an attachment sees that when it is attached again")
    })?;
    Ok(Outcome::Good)
}
