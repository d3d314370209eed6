//! `ashlar queue dump`: what the scheduler of each device holds now.

use ashlar_control_api::storage_node::DumpQueueRequest;
use clap::Subcommand;
use serde::Serialize;

use crate::context::Context;
use crate::control;
use crate::output::{self, Outcome};
use crate::units::Size;

/// `ashlar queue …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Prints every class of every device's queue.
    Dump {
        /// Only this device (UUID).
        #[arg(long, default_value = "")]
        device: String,
    },
}

/// One class of one device's queue.
#[derive(Debug, Serialize)]
pub struct QueueClass {
    /// The node's control address.
    pub node: String,
    /// UUID of the device.
    pub device_id: String,
    /// "volume UUID", "resync", "scrub" or "home writes".
    pub class: String,
    /// Requests that wait.
    pub depth: u64,
    /// Their bytes.
    pub queued_bytes: u64,
    /// Guaranteed rate; 0: none.
    pub reservation: f64,
    /// Share of what is left.
    pub weight: f64,
    /// Highest rate; 0: none.
    pub limit: f64,
    /// When the next reserved request is due, in ms from now.
    pub reservation_tag_ms: f64,
    /// Tag of the share.
    pub weight_tag: f64,
    /// When the limit next allows a request, in ms from now.
    pub limit_tag_ms: f64,
}

/// Runs the command.
///
/// # Errors
/// When a node does not answer.
pub fn run(context: &Context, command: Command) -> anyhow::Result<Outcome> {
    let Command::Dump { device } = command;
    let nodes = context.nodes()?;
    let classes = control::block_on(async {
        let mut classes = Vec::new();
        for address in &nodes {
            let mut node = control::node(address).await?;
            let request = DumpQueueRequest {
                device_id: device.clone(),
            };
            let reply = match node.dump_queue(request).await {
                // The device belongs to another node.
                Err(status) if status.code() == tonic::Code::NotFound && !device.is_empty() => {
                    continue;
                }
                result => control::answer(&format!("queue of {address}"), result)?,
            };
            classes.extend(reply.classes.into_iter().map(|c| QueueClass {
                node: address.clone(),
                device_id: c.device_id,
                class: c.class,
                depth: c.depth,
                queued_bytes: c.queued_bytes,
                reservation: c.reservation,
                weight: c.weight,
                limit: c.limit,
                reservation_tag_ms: c.reservation_tag_ms,
                weight_tag: c.weight_tag,
                limit_tag_ms: c.limit_tag_ms,
            }));
        }
        Ok(classes)
    })?;
    output::print(context.format, &classes, |classes| {
        let mut table = output::table([
            "node",
            "device",
            "class",
            "depth",
            "queued",
            "reservation",
            "weight",
            "limit",
        ]);
        for c in classes {
            table.add_row([
                c.node.clone(),
                c.device_id.clone(),
                c.class.clone(),
                c.depth.to_string(),
                Size(c.queued_bytes).to_string(),
                c.reservation.to_string(),
                c.weight.to_string(),
                c.limit.to_string(),
            ]);
        }
        table.to_string()
    })?;
    Ok(Outcome::Good)
}
