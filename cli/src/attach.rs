//! `ashlar attach` and `ashlar detach`: through the initiator daemon's attach interface.

use std::time::Duration;

use ashlar_control_api::initiator::{Attachment, DetachRequest, ListRequest};
use serde::Serialize;

use crate::context::Context;
use crate::control;
use crate::output::{self, Outcome};

/// Arguments of `ashlar attach`.
#[derive(Debug, clap::Args)]
pub struct AttachArgs {
    /// The volume's name.
    name: String,
    /// How long to wait for enough replicas, in seconds.
    #[arg(long, default_value_t = 30)]
    timeout: u64,
}

/// Arguments of `ashlar detach`.
#[derive(Debug, clap::Args)]
pub struct DetachArgs {
    /// The volume's name.
    name: String,
    /// How long to wait for writes in flight, in seconds.
    #[arg(long, default_value_t = 30)]
    timeout: u64,
}

/// An attachment in outputs.
#[derive(Clone, Debug, Serialize)]
pub struct AttachmentStatus {
    /// UUID of the volume.
    pub volume_id: String,
    /// Its name.
    pub name: String,
    /// "attaching", "open", "waiting" (no quorum) or "over".
    pub state: String,
    /// Why it is waiting or over.
    pub reason: String,
    /// The attachment's epoch.
    pub epoch: u32,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Where NBD clients connect.
    pub nbd_uris: Vec<String>,
    /// Its members as the initiator sees them.
    pub members: Vec<MemberStatus>,
}

/// A member as the initiator sees it.
#[derive(Clone, Debug, Serialize)]
pub struct MemberStatus {
    /// UUID of the device.
    pub device_id: String,
    /// Where it is.
    pub data_address: String,
    /// "in-sync", "resyncing" or "down".
    pub state: String,
    /// Writes it has not answered.
    pub lag_writes: u64,
    /// Of a resync under way.
    pub resync_blocks_done: u64,
    /// Of a resync under way.
    pub resync_blocks_total: u64,
}

impl From<Attachment> for AttachmentStatus {
    fn from(a: Attachment) -> AttachmentStatus {
        let members = a.members.into_iter().map(|m| MemberStatus {
            device_id: m.member.map(|m| m.device_id).unwrap_or_default(),
            data_address: m.data_address,
            state: m.state,
            lag_writes: m.lag_writes,
            resync_blocks_done: m.resync_blocks_done,
            resync_blocks_total: m.resync_blocks_total,
        });
        AttachmentStatus {
            volume_id: a.volume_id,
            name: a.name,
            state: a.state,
            reason: a.reason,
            epoch: a.epoch,
            size_bytes: a.size_bytes,
            nbd_uris: a.nbd_uris,
            members: members.collect(),
        }
    }
}

/// Attaches a volume.
///
/// # Errors
/// When the volume is unknown, the initiator cannot be reached, or the attach fails.
pub fn attach(context: &Context, args: &AttachArgs) -> anyhow::Result<Outcome> {
    let volume = context.state.volume(&args.name)?;
    let spinner = output::spinner("waiting for the replicas");
    let result = attach_volume(
        &context.initiator()?,
        &volume,
        Duration::from_secs(args.timeout),
    );
    spinner.finish_and_clear();
    output::print(context.format, &result?, |attachment| {
        let mut table = output::table(["volume", "state", "epoch", "address"]);
        for (i, uri) in attachment.nbd_uris.iter().enumerate() {
            let (epoch, uri) = (attachment.epoch.to_string(), uri.clone());
            if i == 0 {
                table.add_row([
                    attachment.name.clone(),
                    attachment.state.clone(),
                    epoch,
                    uri,
                ]);
            } else {
                table.add_row([String::new(), String::new(), String::new(), uri]);
            }
        }
        table.to_string()
    })?;
    Ok(Outcome::Good)
}

/// Attaches `volume` through the initiator at `address`.
///
/// # Errors
/// When the initiator cannot be reached or the attach fails.
pub fn attach_volume(
    address: &str,
    volume: &crate::state::VolumeRecord,
    timeout: Duration,
) -> anyhow::Result<AttachmentStatus> {
    control::block_on(async {
        let mut initiator = control::initiator(address, timeout).await?;
        let what = format!("attaching {}", volume.name);
        let response = control::answer(&what, initiator.attach(volume.attach_request()).await)?;
        Ok(response.attachment.unwrap_or_default().into())
    })
}

/// Detaches a volume.
///
/// # Errors
/// When the volume is unknown, the initiator cannot be reached, or writes do not end in time.
pub fn detach(context: &Context, args: &DetachArgs) -> anyhow::Result<Outcome> {
    let volume = context.state.volume(&args.name)?;
    detach_volume(
        &context.initiator()?,
        &volume.id,
        Duration::from_secs(args.timeout),
    )?;
    let document = serde_json::json!({ "name": volume.name, "state": "detached" });
    output::print(context.format, &document, |_| {
        format!("{} is detached", volume.name)
    })?;
    Ok(Outcome::Good)
}

/// Detaches the volume with `volume_id` from the initiator at `address`.
///
/// # Errors
/// When the initiator cannot be reached or refuses.
pub fn detach_volume(address: &str, volume_id: &str, timeout: Duration) -> anyhow::Result<()> {
    control::block_on(async {
        let mut initiator = control::initiator(address, timeout).await?;
        let request = DetachRequest {
            volume_id: volume_id.to_owned(),
        };
        control::answer("detaching", initiator.detach(request).await).map(|_| ())
    })
}

/// All attachments of the initiator at `address`.
///
/// # Errors
/// When it cannot be reached.
pub async fn attachments(address: &str) -> anyhow::Result<Vec<AttachmentStatus>> {
    let mut initiator = control::initiator(address, Duration::from_secs(5)).await?;
    let reply = control::answer("listing attachments", initiator.list(ListRequest {}).await)?;
    Ok(reply
        .attachments
        .into_iter()
        .map(AttachmentStatus::from)
        .collect())
}
