//! `ashlar store inspect`: what a store holds, read-only, also when its node is down.

mod device;
mod read;

use std::path::PathBuf;

use ashlar_replication::configuration::{ReplicaState, Role};
use clap::Subcommand;
use serde::Serialize;

use crate::context::Context;
use crate::output::{self, Outcome};
use crate::units::{Size, count_text};

/// `ashlar store …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows the replicas in a store. Writes nothing, and needs no running node.
    Inspect(InspectArgs),
}

/// Arguments of `ashlar store inspect`.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The store's directory.
    #[arg(value_name = "DIR")]
    pub store: PathBuf,
    /// The journal, when it lies on another device.
    #[arg(long, value_name = "PATH")]
    pub journal: Option<PathBuf>,
    /// Read every block and check it against its checksum. Exit code 1 when one does not match.
    #[arg(long)]
    pub verify: bool,
}

/// The output of `store inspect`. Keys of volumes are never printed.
#[derive(Debug, Serialize)]
pub struct Inspection {
    /// The store's directory.
    pub path: String,
    /// UUID of the device.
    pub device_id: String,
    /// Size of the device.
    pub size_bytes: u64,
    /// Room in extents of 1 MiB.
    pub extents_total: u64,
    /// Extents that hold nothing.
    pub extents_free: u64,
    /// Size of the journal.
    pub journal_bytes: u64,
    /// Of it in use: what the next start replays.
    pub journal_used_bytes: u64,
    /// The replicas.
    pub replicas: Vec<InspectedReplica>,
}

/// A replica in a store.
#[derive(Debug, Serialize)]
pub struct InspectedReplica {
    /// UUID of the volume.
    pub volume_id: String,
    /// The replica's nonce, in hexadecimal digits.
    pub nonce: String,
    /// "data" or "witness".
    pub role: &'static str,
    /// "complete", "resyncing" or "evicted".
    pub state: &'static str,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Of it with a place on the device.
    pub allocated_bytes: u64,
    /// The highest epoch it promised.
    pub promised_epoch: u32,
    /// Position of its last write.
    pub last_epoch: u32,
    /// Position of its last write.
    pub last_sequence: u64,
    /// Epoch of the configuration it has stored, if it has one.
    pub configuration_epoch: Option<u32>,
    /// Its number in that epoch.
    pub configuration_generation: Option<u64>,
    /// Devices that it names as members.
    pub members: Vec<String>,
    /// Of these in sync.
    pub in_sync: Vec<String>,
    /// Blocks that a crash left torn; they are repaired from other replicas.
    pub torn_blocks: u64,
    /// Blocks read and checked (with --verify).
    pub blocks_checked: Option<u64>,
    /// The first blocks that do not match their checksum (with --verify).
    pub bad_blocks: Option<Vec<u64>>,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read.
pub fn run(context: &Context, command: Command) -> anyhow::Result<Outcome> {
    let Command::Inspect(args) = command;
    let inspection = read::inspect(&args)?;
    output::print(context.format, &inspection, text)?;
    let bad = |r: &InspectedReplica| r.bad_blocks.as_ref().is_some_and(|b| !b.is_empty());
    Ok(if inspection.replicas.iter().any(bad) {
        Outcome::Bad
    } else {
        Outcome::Good
    })
}

impl InspectedReplica {
    fn new(replica: &ashlar_store::Replica) -> InspectedReplica {
        let state = &replica.state;
        let configuration = state.configuration.as_ref();
        let members = configuration.iter().flat_map(|c| &c.members);
        let in_sync = configuration.iter().flat_map(|c| &c.in_sync);
        InspectedReplica {
            volume_id: replica.volume.to_string(),
            nonce: format!("{:016x}", state.id.nonce),
            role: match state.role {
                Role::Data => "data",
                Role::Witness => "witness",
            },
            state: match state.state {
                _ if replica.evicted => "evicted",
                ReplicaState::Complete => "complete",
                ReplicaState::Resyncing { .. } => "resyncing",
            },
            size_bytes: replica.size_blocks * 4096,
            allocated_bytes: replica.allocated_extents << 20,
            promised_epoch: state.promised.number.0,
            last_epoch: state.last.epoch.0,
            last_sequence: state.last.sequence.0,
            configuration_epoch: configuration.map(|c| c.epoch.0),
            configuration_generation: configuration.map(|c| c.generation.0),
            members: members.map(|m| m.id.device.to_string()).collect(),
            in_sync: in_sync.map(|id| id.device.to_string()).collect(),
            torn_blocks: replica.torn.len() as u64,
            blocks_checked: None,
            bad_blocks: None,
        }
    }
}

fn text(inspection: &Inspection) -> String {
    let mut text = format!(
        "{}  device {}  {}\n{} of {} free, journal {} of {} in use\n",
        inspection.path,
        inspection.device_id,
        Size(inspection.size_bytes),
        Size(inspection.extents_free << 20),
        Size(inspection.extents_total << 20),
        Size(inspection.journal_used_bytes),
        Size(inspection.journal_bytes),
    );
    let mut table = output::table([
        "volume",
        "role",
        "state",
        "size",
        "allocated",
        "promised",
        "last write",
        "configuration",
        "in sync",
        "torn",
        "checked",
    ]);
    for r in &inspection.replicas {
        let configuration = match (r.configuration_epoch, r.configuration_generation) {
            (Some(epoch), Some(generation)) => format!("{epoch}.{generation}"),
            _ => "none".into(),
        };
        let checked = match (&r.blocks_checked, &r.bad_blocks) {
            (Some(n), Some(bad)) if bad.is_empty() => format!("{} good", count_text(*n)),
            (Some(_), Some(bad)) => format!("BAD: {bad:?}"),
            _ => "no".into(),
        };
        table.add_row([
            r.volume_id.clone(),
            r.role.into(),
            r.state.into(),
            Size(r.size_bytes).to_string(),
            Size(r.allocated_bytes).to_string(),
            r.promised_epoch.to_string(),
            format!("{}.{}", r.last_epoch, r.last_sequence),
            configuration,
            format!("{} of {}", r.in_sync.len(), r.members.len()),
            r.torn_blocks.to_string(),
            checked,
        ]);
    }
    text.push_str(&table.to_string());
    text
}
