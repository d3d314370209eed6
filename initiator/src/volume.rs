//! One attached volume: its replication, its byte requests, and where its members are.

use std::time::Duration;

use ashlar_replication::configuration::Role;
use ashlar_replication::initiator::{
    self, Initiator, IoError as BlockError, MemberCondition, OverReason, Phase,
};
use ashlar_replication::values::{BLOCK_BYTES, Block, EXTENT_BLOCKS, MemberId, Time};
use ashlar_wire::Payload;

use crate::byte_io::ByteIo;
use crate::connection::{ConnectionId, LinkId};
use crate::front_end::{FrontEndId, IoError, Ticket, VolumeInfo};
use crate::handle::{AttachError, Reply};
use crate::metrics::{Operation, VolumeCounters};
use crate::spec::VolumeSpec;
use crate::status::{AttachmentState, AttachmentStatus, MemberState, MemberStatus};

/// Byte requests that a volume takes at a time. Front ends hold back what is above.
const REQUESTS_MAX: usize = 1024;
/// Bytes of requests that a volume takes at a time, beyond the first request.
const REQUEST_BYTES_IN_FLIGHT_MAX: u64 = 32 << 20;

/// Where a member is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemberLink {
    pub(crate) member: MemberId,
    pub(crate) connection: ConnectionId,
    pub(crate) link: LinkId,
    /// As it was last reported.
    pub(crate) condition: Option<MemberCondition>,
}

/// A byte request under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestInFlight {
    pub(crate) front_end: FrontEndId,
    pub(crate) ticket: Ticket,
    pub(crate) operation: Operation,
    pub(crate) bytes: u64,
    pub(crate) started: Time,
}

/// Requests under way, in slots that are used again.
#[derive(Default)]
pub(crate) struct Requests {
    slots: Vec<Option<RequestInFlight>>,
    free: Vec<u32>,
    bytes: u64,
}

impl Requests {
    /// Keeps a request, under a ticket that is unique in the volume.
    pub(crate) fn insert(&mut self, request: RequestInFlight) -> Ticket {
        self.bytes += request.held_bytes();
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize] = Some(request);
        Ticket(index.into())
    }

    pub(crate) fn remove(&mut self, ticket: Ticket) -> Option<RequestInFlight> {
        let request = self.slots.get_mut(ticket.0 as usize)?.take()?;
        self.free.push(ticket.0 as u32);
        self.bytes -= request.held_bytes();
        Some(request)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Tickets of all that are under way.
    pub(crate) fn tickets(&self) -> Vec<Ticket> {
        let used = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.is_some());
        used.map(|(index, _)| Ticket(index as u64)).collect()
    }

    /// Whether another request may come.
    pub(crate) fn have_room(&self) -> bool {
        self.len() < REQUESTS_MAX && self.bytes < REQUEST_BYTES_IN_FLIGHT_MAX
    }
}

impl RequestInFlight {
    /// Bytes of memory that the request holds until it is done.
    fn held_bytes(&self) -> u64 {
        match self.operation {
            Operation::Read | Operation::Write => self.bytes,
            Operation::Zero | Operation::Flush | Operation::Allocation => 0,
        }
    }
}

/// A detach under way.
pub(crate) struct Detaching {
    /// What is not finished by then fails.
    pub(crate) deadline: Time,
    pub(crate) replies: Vec<Reply<bool>>,
}

/// Why there is no more I/O.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum End {
    /// The replication ended it.
    #[error(transparent)]
    Replication(#[from] OverReason),
    /// The replicas are smaller than what was to be attached.
    #[error("the replicas have only {0} bytes")]
    TooSmall(u64),
}

/// Who waits for I/O to open.
pub(crate) type OpenWaiter = Reply<Option<Result<AttachmentStatus, AttachError>>>;

pub(crate) struct Volume {
    pub(crate) spec: VolumeSpec,
    pub(crate) replication: Initiator<Payload>,
    pub(crate) bytes: ByteIo,
    pub(crate) links: Vec<MemberLink>,
    pub(crate) requests: Requests,
    pub(crate) waiters: Vec<OpenWaiter>,
    pub(crate) detaching: Option<Detaching>,
    pub(crate) over: Option<End>,
    /// Front ends know the volume.
    pub(crate) announced: bool,
    pub(crate) counters: VolumeCounters,
    /// The volume's earliest timer entry.
    pub(crate) armed: Time,
}

impl Volume {
    pub(crate) fn new(spec: VolumeSpec, lease: Duration) -> Volume {
        let defaults = initiator::Options::default();
        let options = initiator::Options {
            min_in_sync: spec.options.min_in_sync,
            lease,
            io_timeout: spec.options.io_timeout,
            lag_writes_max: spec
                .options
                .lag_writes_max
                .unwrap_or(defaults.lag_writes_max),
            lag_bytes_max: spec.options.lag_bytes_max.unwrap_or(defaults.lag_bytes_max),
            ..defaults
        };
        let members = spec.members.iter().map(|m| m.member).collect();
        let replication = Initiator::new(spec.size_blocks(), members, options);
        Volume {
            bytes: ByteIo::new(spec.size_bytes),
            spec,
            replication,
            links: Vec::new(),
            requests: Requests::default(),
            waiters: Vec::new(),
            detaching: None,
            over: None,
            announced: false,
            counters: VolumeCounters::default(),
            armed: Time::NEVER,
        }
    }

    pub(crate) fn info(&self) -> VolumeInfo {
        VolumeInfo {
            id: self.spec.id,
            name: self.spec.name.clone(),
            size_bytes: self.spec.size_bytes,
            access: self.spec.access,
        }
    }

    pub(crate) fn link(&self, member: MemberId) -> Option<MemberLink> {
        self.links
            .iter()
            .find(|link| link.member == member)
            .copied()
    }

    /// Notes how a member stands; true when that is news.
    pub(crate) fn note_condition(&mut self, member: MemberId, condition: MemberCondition) -> bool {
        let link = self.links.iter_mut().find(|link| link.member == member);
        let before = link.and_then(|link| link.condition.replace(condition));
        // All are in sync at first, as it should be.
        before != Some(condition) && (before.is_some() || condition != MemberCondition::InSync)
    }

    /// When the volume wants to be called.
    pub(crate) fn next_timer(&self) -> Time {
        let deadline = self.detaching.as_ref().map_or(Time::NEVER, |d| d.deadline);
        let replication = if self.over.is_some() {
            Time::NEVER
        } else {
            self.replication.next_timer()
        };
        replication.min(deadline)
    }

    /// The error of every request, once there is one.
    pub(crate) fn refusal(&self) -> Option<IoError> {
        match &self.over {
            Some(End::Replication(OverReason::Fenced { by })) => Some(IoError::Fenced { by: *by }),
            Some(End::Replication(OverReason::Unauthenticated)) => {
                Some(IoError::Over("the storage nodes refuse the volume's key"))
            }
            Some(End::Replication(OverReason::SequenceExhausted)) => {
                Some(IoError::Over("its epoch has no sequence numbers left"))
            }
            Some(End::TooSmall(_)) => Some(IoError::Over("the replicas are too small")),
            Some(End::Replication(OverReason::Detached)) => Some(IoError::NotAttached),
            None if self.detaching.is_some() => Some(IoError::NotAttached),
            None => None,
        }
    }

    /// Whether a request would be taken or refused for good; false means "not now".
    pub(crate) fn can_accept(&self) -> bool {
        self.refusal().is_some() || (self.requests.have_room() && self.replication.can_accept())
    }

    /// Why an attach fails, if it does.
    pub(crate) fn attach_error(&self) -> Option<AttachError> {
        match &self.over {
            Some(End::Replication(OverReason::Fenced { by })) => {
                Some(AttachError::Fenced { by: *by })
            }
            Some(reason) => Some(AttachError::Over(reason.to_string())),
            None if self.detaching.is_some() => Some(AttachError::Detaching),
            None => None,
        }
    }

    pub(crate) fn state(&self, status: &initiator::Status) -> AttachmentState {
        if self.over.is_some() {
            AttachmentState::Over
        } else if self.detaching.is_some() {
            AttachmentState::Detaching
        } else if status.phase != Phase::Open {
            AttachmentState::Attaching
        } else if status.waiting {
            AttachmentState::Waiting
        } else {
            AttachmentState::Open
        }
    }
}

/// What a front end is told for what the replication reports.
pub(crate) fn io_error(error: BlockError) -> IoError {
    use ashlar_replication::message::ReadError;
    let offset = |block: Block| block.0 * BLOCK_BYTES as u64;
    match error {
        BlockError::Timeout => IoError::TimedOut,
        BlockError::Fenced { by } => IoError::Fenced { by },
        BlockError::NoSpace => IoError::NoSpace,
        BlockError::NotAttached => IoError::NotAttached,
        BlockError::Read(ReadError::Checksum { block, .. } | ReadError::Torn { block, .. }) => {
            IoError::Media {
                offset: offset(block),
            }
        }
        BlockError::Read(ReadError::Device | ReadError::Refused(_)) => IoError::Device,
    }
}

impl From<initiator::MemberCondition> for MemberState {
    fn from(condition: initiator::MemberCondition) -> MemberState {
        match condition {
            initiator::MemberCondition::InSync => MemberState::InSync,
            initiator::MemberCondition::Resyncing => MemberState::Resyncing,
            initiator::MemberCondition::Down => MemberState::Down,
        }
    }
}

/// The status of `volume`; `trouble` says why a connection is down.
pub(crate) fn status<'a>(
    volume: &Volume,
    trouble: impl Fn(ConnectionId) -> Option<&'a str>,
) -> AttachmentStatus {
    let replication = volume.replication.status();
    let state = volume.state(&replication);
    let members = volume.spec.members.iter().map(|spec| {
        let known = replication.members.iter().find(|m| m.id == spec.member.id);
        let link = volume.link(spec.member.id);
        let trouble = link.and_then(|link| trouble(link.connection));
        // A witness is never in the in-sync set; it does what it is for while it answers.
        let state = match spec.member.role {
            Role::Witness if trouble.is_none() && volume.over.is_none() => MemberState::InSync,
            _ => known.map_or(MemberState::Down, |m| m.condition.into()),
        };
        let blocks = u64::from(EXTENT_BLOCKS);
        MemberStatus {
            member: spec.member,
            address: spec.address.clone(),
            state,
            lag_writes: known.map_or(0, |m| m.lag_writes),
            resync_blocks_done: known.map_or(0, |m| m.resync_done * blocks),
            resync_blocks_total: known.map_or(0, |m| m.resync_total * blocks),
            trouble: trouble.map(str::to_owned),
        }
    });
    let mut counters = volume.counters;
    counters.in_flight = volume.requests.len() as u64;
    let mut status = AttachmentStatus {
        id: volume.spec.id,
        name: volume.spec.name.clone(),
        state,
        reason: String::new(),
        epoch: (replication.epoch.number.0 > 0).then_some(replication.epoch.number),
        size_bytes: volume.spec.size_bytes,
        members: members.collect(),
        counters,
    };
    status.reason = match (state, &volume.over) {
        (AttachmentState::Over, Some(reason)) => reason.to_string(),
        (AttachmentState::Attaching, _) => format!("no quorum yet; {}", status.missing()),
        (AttachmentState::Waiting, _) => format!("too few members; {}", status.missing()),
        _ => String::new(),
    };
    status
}
