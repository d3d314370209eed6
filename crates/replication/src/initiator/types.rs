//! What goes into the state machine and what comes out of it.

use core::time::Duration;

use crate::configuration::{Configuration, Member, Role};
use crate::message::{Content, ReadData, ReadError, Reply, Request};
use crate::values::{BlockRange, Epoch, EpochNumber, MemberId, Position, Time};

/// Number that the shell gives a client's request; comes back with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Settings of an attachment.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Writes wait while fewer members are in sync. None: 2 of 3 and more data members, else 1.
    pub min_in_sync: Option<usize>,
    /// Length of a lease; the same constant on every initiator and node of a volume.
    pub lease: Duration,
    /// Bound of the difference between two clocks' rates, added to what A6 waits.
    pub clock_drift_ppm: u32,
    /// How long an attach waits for further in-sync members once it could go on (A2).
    pub attach_wait: Duration,
    /// How long the members that answered may take to become equal to the source; one that takes
    /// longer leaves the in-sync set (A4).
    pub equalise_wait: Duration,
    /// How long an in-sync member may be down before it leaves the in-sync set.
    pub down_grace: Duration,
    /// How many writes a member may lag behind before it leaves the stream.
    pub lag_writes_max: u64,
    /// How many bytes of writes a member may lag behind before it leaves the stream.
    pub lag_bytes_max: u64,
    /// Writes issued and not acknowledged; more wait.
    pub window_writes_max: usize,
    /// Bytes of writes issued and not acknowledged; more wait.
    pub window_bytes_max: u64,
    /// Extents that a resync works on at a time.
    pub resync_extents_max: usize,
    /// How long a member may take to answer a read before another one is asked.
    pub read_timeout: Duration,
    /// How long I/O waits for a quorum before it fails. None: for ever.
    pub io_timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            min_in_sync: None,
            lease: Duration::from_secs(3),
            clock_drift_ppm: 500,
            attach_wait: Duration::from_millis(300),
            equalise_wait: Duration::from_secs(10),
            down_grace: Duration::from_secs(2),
            lag_writes_max: 8192,
            lag_bytes_max: 32 << 20,
            window_writes_max: 1024,
            window_bytes_max: 16 << 20,
            resync_extents_max: 4,
            read_timeout: Duration::from_secs(1),
            io_timeout: None,
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "moved once into the machine; a box would be an allocation per answer"
)]
pub enum Event<P> {
    /// Begin to attach. The seed feeds nonces and back-off; it must be fresh and unguessable.
    Attach {
        /// From the system's randomness.
        seed: u64,
    },
    /// A connection to the member is open.
    Up {
        /// Which member.
        member: MemberId,
    },
    /// The connection is lost, or never came up.
    Down {
        /// Which member.
        member: MemberId,
    },
    /// The member answered. For Promised the shell has checked the proof.
    Reply {
        /// Which member.
        member: MemberId,
        /// Its answer.
        reply: Reply<P>,
    },
    /// The member answered a renewal of the lease that was sent at that time (L1, L3).
    Renewed {
        /// Which member.
        member: MemberId,
        /// When the renewal was sent.
        sent_at: Time,
    },
    /// The member has promised a newer epoch (L3, C7).
    Fenced {
        /// Which member.
        member: MemberId,
        /// What it promised.
        promised: EpochNumber,
    },
    /// A client writes. The range lies within one extent and within the volume.
    Write {
        /// Of the request.
        ticket: Ticket,
        /// Where.
        range: BlockRange,
        /// What.
        content: Content<P>,
    },
    /// A client reads. The range lies within one extent and within the volume.
    Read {
        /// Of the request.
        ticket: Ticket,
        /// Where.
        range: BlockRange,
    },
    /// C6: change who the members are. Both together replace a member. Answered by
    /// [`Effect::MembersChanged`] or [`Effect::MembersChangeRefused`].
    ChangeMembers {
        /// Who becomes a member. Its replica has been made, as large as the volume, and no
        /// configuration has been given to it.
        add: Option<Member>,
        /// Who is one no more.
        remove: Option<MemberId>,
    },
    /// Give up a change of members that has not been proposed yet (C1: a proposal is never withdrawn).
    CancelChange,
    /// [`super::Initiator::next_timer`] has come.
    Timer,
    /// Finish what is under way and end.
    Detach,
}

/// What the shell is to do, in this order.
#[derive(Clone, Debug)]
pub enum Effect<P> {
    /// Send to a member, in order. Dropped when its connection is down.
    Send {
        /// To whom.
        member: MemberId,
        /// What.
        request: Request<P>,
    },
    /// A write is acknowledged, or has failed.
    WriteDone {
        /// Of the request.
        ticket: Ticket,
        /// An error leaves the write undecided (W3).
        result: Result<(), IoError>,
    },
    /// A read is done.
    ReadDone {
        /// Of the request.
        ticket: Ticket,
        /// The data.
        result: Result<ReadData<P>, IoError>,
    },
    /// I/O is open (E1).
    Opened {
        /// In this epoch.
        epoch: Epoch,
    },
    /// The attachment is over. Everything that was under way has been answered.
    Over {
        /// Why.
        reason: OverReason,
    },
    /// The member's connection is of no use any more: close it and connect anew.
    Reconnect {
        /// Which member.
        member: MemberId,
    },
    /// A member's standing changed.
    MemberChanged {
        /// Which member.
        member: MemberId,
        /// How it stands now.
        condition: MemberCondition,
    },
    /// Connect to a member that the shell was not told of when the volume was attached, and report
    /// [`Event::Up`]: a newcomer, or one that a configuration names (A1).
    Connect {
        /// Which member.
        member: MemberId,
    },
    /// C6: the member set has changed, here or because an attach found a change half done. From now on,
    /// and not before, the removed member may drop its data; its connection is not used any more. An
    /// attachment that ends between the commit and this effect leaves it unsaid: whoever keeps book of
    /// members compares it with the committed configuration after [`Effect::Opened`].
    MembersChanged {
        /// Who is a member no more.
        removed: Option<MemberId>,
    },
    /// A change of members does not take place, or not by this attachment.
    MembersChangeRefused {
        /// Why.
        reason: ChangeRefusal,
    },
}

/// Why members do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefusal {
    /// The volume is not open, or is being detached.
    #[error("the volume is not open")]
    NotOpen,
    /// Another change has not ended: its newcomer is not in sync yet, or its configuration still names
    /// the previous members. Try again later.
    #[error("another change of members is under way")]
    UnderWay,
    /// Nobody is added or removed.
    #[error("nobody is to be added or removed")]
    Nothing,
    /// The member to remove is none.
    #[error("the member to remove is not a member")]
    Unknown,
    /// The member to add is one already.
    #[error("the member to add is a member already")]
    Duplicate,
    /// More members than a configuration may name.
    #[error("too many members")]
    TooMany,
    /// No data member would be left.
    #[error("no data member would be left")]
    NoDataMember,
    /// The in-sync set would become too small for writes, or empty.
    #[error("too few members would be in sync")]
    TooFewInSync,
    /// The newcomer has promised a newer epoch.
    #[error("the new member is fenced by epoch {}", by.0)]
    Fenced {
        /// Which.
        by: EpochNumber,
    },
    /// The newcomer's replica is smaller than the volume.
    #[error("the new member's replica is smaller than the volume")]
    TooSmall,
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The attachment ended. What was not proposed does not take place; else the next attachment
    /// finishes it, or finds nothing of it.
    #[error("the attachment ended before the change was done")]
    Interrupted,
}

/// Why a client's request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// No quorum within the time that was allowed.
    #[error("no quorum of replicas answered within the allowed time")]
    Timeout,
    /// Another initiator has attached the volume.
    #[error("fenced: another initiator attached the volume in epoch {}", by.0)]
    Fenced {
        /// Its epoch.
        by: EpochNumber,
    },
    /// Too few replicas have room.
    #[error("too few replicas have room for the write")]
    NoSpace,
    /// No replica has a good copy.
    #[error("no replica has a good copy: {0}")]
    Read(ReadError),
    /// The volume is not attached, or is being detached.
    #[error("the volume is not attached")]
    NotAttached,
}

/// Why an attachment is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverReason {
    /// It was asked for.
    #[error("detached")]
    Detached,
    /// Another initiator has attached the volume.
    #[error("fenced by another initiator in epoch {}", by.0)]
    Fenced {
        /// Its epoch.
        by: EpochNumber,
    },
    /// Members refuse the volume's key.
    #[error("the storage nodes refuse the volume's key")]
    Unauthenticated,
    /// The epoch has no sequence left; attach again (B3).
    #[error("the epoch has no sequence numbers left; attach again")]
    SequenceExhausted,
}

/// How a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberCondition {
    /// In the in-sync set.
    InSync,
    /// Being brought up to date.
    Resyncing,
    /// Neither.
    Down,
}

/// Phase of an attachment; the diagram is in the documentation of [`super`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not attached yet.
    Idle,
    /// A1, A2: waiting for promises.
    Fencing,
    /// A5: making the in-sync members equal.
    Equalising,
    /// A6: waiting for a lease to run out.
    WaitingLease,
    /// A7: waiting for the configuration to commit.
    Starting,
    /// E1: I/O.
    Open,
    /// The end.
    Over,
}

/// A member as the initiator sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberStatus {
    /// Who.
    pub id: MemberId,
    /// As what.
    pub role: Role,
    /// How it stands.
    pub condition: MemberCondition,
    /// Whether its connection is up and it has promised the epoch.
    pub connected: bool,
    /// Writes issued that it has not answered, while in the stream.
    pub lag_writes: u64,
    /// Of a resync: extents done.
    pub resync_done: u64,
    /// Of a resync: extents in all, as far as known.
    pub resync_total: u64,
}

/// An attachment as the initiator sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Where it stands.
    pub phase: Phase,
    /// Its epoch.
    pub epoch: Epoch,
    /// The committed configuration.
    pub configuration: Option<Configuration>,
    /// Writes wait because fewer members than `min_in_sync` are in sync, or no quorum answers.
    pub waiting: bool,
    /// The newest acknowledged write.
    pub acknowledged: Position,
    /// All members.
    pub members: Vec<MemberStatus>,
}
