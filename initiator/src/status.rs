//! Attachments as their thread sees them.

use ashlar_engine::Address;
use ashlar_replication::configuration::Member;
use ashlar_replication::values::{EpochNumber, VolumeId};

use crate::metrics::VolumeCounters;

/// How far an attachment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttachmentState {
    /// Members are being fenced and made equal; no I/O yet.
    Attaching,
    /// I/O goes on.
    Open,
    /// I/O waits for members: fewer are in sync than it needs.
    Waiting,
    /// Requests under way are finished, new ones are refused.
    Detaching,
    /// No more I/O; the reason is in [`AttachmentStatus::reason`].
    Over,
}

impl AttachmentState {
    /// As the attach API writes it.
    pub fn name(self) -> &'static str {
        match self {
            AttachmentState::Attaching => "attaching",
            AttachmentState::Open => "open",
            AttachmentState::Waiting => "waiting",
            AttachmentState::Detaching => "detaching",
            AttachmentState::Over => "over",
        }
    }
}

/// What a member is to an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemberState {
    /// Holds every acknowledged write or follows closely; for a witness: answers.
    InSync,
    /// Is being brought up to date.
    Resyncing,
    /// Takes no part.
    Down,
}

impl MemberState {
    /// As the attach API writes it.
    pub fn name(self) -> &'static str {
        match self {
            MemberState::InSync => "in-sync",
            MemberState::Resyncing => "resyncing",
            MemberState::Down => "down",
        }
    }
}

/// A member of an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Who.
    pub member: Member,
    /// Where.
    pub address: Address,
    /// How it is.
    pub state: MemberState,
    /// Writes that it has not answered.
    pub lag_writes: u64,
    /// Blocks of a resync that are done.
    pub resync_blocks_done: u64,
    /// Blocks that the resync has to look at.
    pub resync_blocks_total: u64,
    /// Why there is no connection to it, if there is none.
    pub trouble: Option<String>,
}

/// An attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentStatus {
    /// The volume.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// How far it is.
    pub state: AttachmentState,
    /// Why it waits or is over; empty while it is open.
    pub reason: String,
    /// Its epoch, once known.
    pub epoch: Option<EpochNumber>,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Its members.
    pub members: Vec<MemberStatus>,
    /// What became of its requests.
    pub counters: VolumeCounters,
}

impl AttachmentStatus {
    /// The members that cannot be reached, with the reason, for messages: "device … at …: …; …".
    pub fn missing(&self) -> String {
        let missing = self.members.iter().filter_map(|m| {
            let trouble = m.trouble.as_ref()?;
            Some(format!(
                "device {} at {}: {trouble}",
                m.member.id.device, m.address
            ))
        });
        missing.collect::<Vec<_>>().join("; ")
    }
}
