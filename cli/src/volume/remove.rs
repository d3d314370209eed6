//! Deleting volumes.

use std::time::Duration;

use anyhow::{bail, ensure};
use ashlar_control_api::storage_node::ListReplicasRequest;

use crate::attach::{attachments, detach_volume};
use crate::context::Context;
use crate::control;
use crate::output::{self, Outcome};
use crate::state::{MemberRecord, VolumeRecord};
use crate::volume::DeleteArgs;
use crate::volume::create::delete_replica;

/// `ashlar volume delete`
///
/// # Errors
/// When the volume is attached, or a node does not answer; with --force only when the record
/// cannot be removed.
pub fn delete(context: &Context, args: &DeleteArgs) -> anyhow::Result<Outcome> {
    let volume = context.state.volume(&args.name)?;
    if args.force {
        // Left attached it would be an attachment that nothing here knows any more.
        let_go(context, &volume);
    }
    let left_behind = control::block_on(async {
        if !args.force {
            for member in &volume.members {
                ensure!(
                    !is_attached(&volume, member).await?,
                    "{name} is attached; detach it with `ashlar detach {name}` first, \
                     or delete it with --force",
                    name = volume.name
                );
            }
        }
        let mut left_behind = Vec::new();
        for member in &volume.members {
            match delete_replica(&volume, member).await {
                Ok(()) => {}
                Err(error) if args.force => left_behind.push(format!("{error:#}")),
                Err(error) => bail!("{error:#}; try again, or delete it with --force"),
            }
        }
        Ok(left_behind)
    })?;
    context.state.forget_volume(&volume.name)?;
    for reason in &left_behind {
        eprintln!("warning: a replica stays behind: {reason}");
    }
    let document = serde_json::json!({
        "name": volume.name,
        "state": "deleted",
        "left_behind": left_behind,
    });
    output::print(context.format, &document, |_| {
        format!("deleted {}", volume.name)
    })?;
    Ok(Outcome::Good)
}

/// Detaches the volume from the initiator that is known here, if it is attached there.
fn let_go(context: &Context, volume: &VolumeRecord) {
    let Ok(initiator) = context.initiator() else {
        return;
    };
    let attached = control::block_on(attachments(&initiator));
    let detached = attached.and_then(|attached| {
        if attached.iter().any(|a| a.volume_id == volume.id) {
            detach_volume(&initiator, &volume.id, Duration::from_secs(5))
        } else {
            Ok(())
        }
    });
    if let Err(error) = detached {
        let name = &volume.name;
        eprintln!("warning: {name} may still be attached at {initiator}: {error:#}");
    }
}

async fn is_attached(volume: &VolumeRecord, member: &MemberRecord) -> anyhow::Result<bool> {
    let mut node = control::node(&member.control).await?;
    let request = ListReplicasRequest {
        volume_id: volume.id.clone(),
    };
    let what = format!("replicas of {}", member.control);
    let replicas = control::answer(&what, node.list_replicas(request).await)?.replicas;
    Ok(replicas.iter().any(|replica| replica.attached))
}
