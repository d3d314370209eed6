//! Connections to the members' devices: one per device and thread, shared by all volumes there.
//!
//! ```text
//!  Waiting(until) ──connect, Hello──▶ Greeting(until) ──Welcome──▶ Up
//!        ▲                                  │                       │
//!        └── closed, late, not as expected, silent, or too far behind in reading ──┘
//! ```
//! A link is one member of one volume on a connection. Each Fence gets a handle that was not used
//! before on the connection, so that a late answer to an older epoch finds nobody.

mod handles;
mod incoming;
mod link;
mod one;
mod set;
#[cfg(test)]
mod tests;

pub(crate) use link::{LinkId, LinkSpec};
pub(crate) use one::Peer;
pub(crate) use set::{ConnectionId, Connections};

use std::time::Duration;

use ashlar_replication::message::Reply;
use ashlar_replication::values::{EpochNumber, MemberId, Time};
use ashlar_wire::Payload;

use crate::front_end::VolumeHandle;

/// What happened on a connection, for one of the volumes on it.
#[derive(Debug)]
pub(crate) struct Notice {
    /// Whose.
    pub volume: VolumeHandle,
    /// Which of its members.
    pub member: MemberId,
    /// What.
    pub kind: NoticeKind,
}

/// See [`Notice`].
#[allow(
    clippy::large_enum_variant,
    reason = "lives in a queue that keeps its memory; a box would be an allocation per answer"
)]
#[derive(Debug)]
pub(crate) enum NoticeKind {
    /// Requests can be sent, Fence first.
    Up,
    /// What was sent and not answered is lost.
    Down,
    /// An answer. Only those to a Fence come before the member has proved that it knows the key.
    Reply(Reply<Payload>),
    /// L3: the lease was renewed by a request sent then.
    Renewed {
        /// When the request was sent.
        sent_at: Time,
    },
    /// L3: the member has promised the volume to somebody else.
    Fenced {
        /// The epoch it promised.
        promised: EpochNumber,
    },
}

/// Settings of all connections of a thread.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionOptions {
    /// Who this initiator is, for the nodes' messages and status.
    pub initiator: [u8; 16],
    /// L, the same for all initiators and nodes of a cluster.
    pub lease: Duration,
}

/// A peer that does not answer Hello in this time is called again.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// A peer that has not answered a renewal for this long, or for two leases, is called again:
/// the way to notice a network that swallows everything.
const SILENCE_MIN: Duration = Duration::from_secs(5);
/// A peer whose member left the stream for its lag is cut off when this much output waits for it:
/// what it never reads must not stay in memory.
const LAGGING_QUEUE_BYTES_MAX: usize = 1 << 20;
/// No peer may have more output waiting. Above what the windows of a few busy volumes hold, so only
/// a peer that no longer reads gets there.
const QUEUE_BYTES_MAX: usize = 256 << 20;

/// Counters of the connections of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounters {
    /// Connections that were greeted.
    pub established: u64,
    /// Connections that ended, or attempts that failed.
    pub lost: u64,
    /// Frames from peers that were not as they must be.
    pub malformed: u64,
    /// Data from peers that did not match its checksum.
    pub checksum_mismatches: u64,
    /// Members that did not prove to know a volume's key.
    pub bad_proofs: u64,
    /// Peers cut off because they did not read.
    pub cut_off: u64,
    /// Bytes of frames sent, with their data.
    pub bytes_sent: u64,
    /// Bytes of frames received.
    pub bytes_received: u64,
}
