//! Messages between an initiator and a member (M1–M10), without their encoding.
//!
//! `P` is a handle to block data that the shell owns (a pooled buffer in the real shells, plain
//! bytes in the simulator). Every request but Fence carries the epoch of the attachment; on the
//! wire that is the attachment's handle, so it is not a field here.

use crate::configuration::{Configuration, MemberState, ReplicaState};
use crate::values::MemberId;
use crate::values::{Block, BlockRange, Epoch, EpochNumber, ExtentIndex, Pass, Position, Sequence};

/// Number that an initiator gives a request, and that the answer repeats. Unique per member and
/// connection while it is outstanding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Content of a write or of copied blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<P> {
    /// `count` blocks of data with their CRC-32C, computed once by the initiator.
    Data(P),
    /// Zeros: discard and write-zeroes alike; the position outlives a freed extent (B1).
    Zeros,
}

/// A block and the position of its newest write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockPosition {
    /// Which block.
    pub block: Block,
    /// Its position.
    pub position: Position,
}

/// One block of a [`Request::Copy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyStep {
    /// The position that the target's block must have now (M6).
    pub expected: Position,
    /// The position that it has afterwards.
    pub position: Position,
}

/// What an initiator asks of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<P> {
    /// M1.
    Fence {
        /// The epoch to promise.
        epoch: Epoch,
    },
    /// M3.
    StoreConfig {
        /// Of this request.
        id: RequestId,
        /// What to store.
        configuration: Configuration,
        /// The members that start in this epoch (A7), the same list all through it.
        start: Vec<MemberId>,
    },
    /// M4. Answers are cumulative, so the sequence is the id.
    Write {
        /// The write's number in the epoch.
        sequence: Sequence,
        /// Within one extent.
        range: BlockRange,
        /// What to write.
        content: Content<P>,
    },
    /// M5.
    BeginResync {
        /// Of this request.
        id: RequestId,
        /// The attempt.
        pass: Pass,
        /// s0: the stream begins after it.
        sequence: Sequence,
    },
    /// M6, for consecutive blocks; each is applied or not on its own.
    Copy {
        /// Of this request.
        id: RequestId,
        /// The attempt.
        pass: Pass,
        /// Within one extent.
        range: BlockRange,
        /// One per block of `range`.
        steps: Vec<CopyStep>,
        /// New content of the whole range.
        content: Content<P>,
    },
    /// M7.
    MarkComplete {
        /// Of this request.
        id: RequestId,
        /// The attempt.
        pass: Pass,
    },
    /// M8: gives the blocks of `range` these positions and contents, whatever they held.
    Equalise {
        /// Of this request.
        id: RequestId,
        /// Within one extent.
        range: BlockRange,
        /// One per block of `range`.
        positions: Vec<Position>,
        /// New content.
        content: Content<P>,
    },
    /// M8.
    SetLast {
        /// Of this request.
        id: RequestId,
        /// The new `last`.
        position: Position,
    },
    /// M9.
    Read {
        /// Of this request.
        id: RequestId,
        /// Within one extent.
        range: BlockRange,
        /// Serve a torn block too (B2): the only way to find out what it holds.
        torn: TornBlocks,
    },
    /// M9 for a whole extent: the positions of its blocks. Zero positions are left out.
    Compare {
        /// Of this request.
        id: RequestId,
        /// Which extent.
        extent: ExtentIndex,
    },
    /// A digest over the positions of each extent that has any, from `from` on, for R3's coarse step.
    Digests {
        /// Of this request.
        id: RequestId,
        /// The first extent looked at.
        from: ExtentIndex,
        /// Extents looked at: [from, from + count).
        count: u32,
    },
    /// A5's candidates: blocks with a position above `floor`, ascending, from `from` on.
    ListAbove {
        /// Of this request.
        id: RequestId,
        /// Positions above this one.
        floor: Position,
        /// The first block looked at.
        from: Block,
    },
    /// R6: rewrite a bad block, only if its recorded position is exactly `position`.
    Repair {
        /// Of this request.
        id: RequestId,
        /// The block.
        block: Block,
        /// The position it must have, and keeps.
        position: Position,
        /// Its content.
        content: Content<P>,
    },
}

impl<P> Request<P> {
    /// Of this request; zero for Fence, and for Write, which is known by its sequence.
    pub fn id(&self) -> RequestId {
        match self {
            Request::Fence { .. } | Request::Write { .. } => RequestId(0),
            Request::StoreConfig { id, .. }
            | Request::BeginResync { id, .. }
            | Request::Copy { id, .. }
            | Request::MarkComplete { id, .. }
            | Request::Equalise { id, .. }
            | Request::SetLast { id, .. }
            | Request::Read { id, .. }
            | Request::Compare { id, .. }
            | Request::Digests { id, .. }
            | Request::ListAbove { id, .. }
            | Request::Repair { id, .. } => *id,
        }
    }

    /// The same request with another kind of content.
    pub fn map_content<Q>(self, map: impl Fn(Content<P>) -> Content<Q>) -> Request<Q> {
        match self {
            Request::Write {
                sequence,
                range,
                content,
            } => Request::Write {
                sequence,
                range,
                content: map(content),
            },
            Request::Copy {
                id,
                pass,
                range,
                steps,
                content,
            } => Request::Copy {
                id,
                pass,
                range,
                steps,
                content: map(content),
            },
            Request::Equalise {
                id,
                range,
                positions,
                content,
            } => Request::Equalise {
                id,
                range,
                positions,
                content: map(content),
            },
            Request::Repair {
                id,
                block,
                position,
                content,
            } => Request::Repair {
                id,
                block,
                position,
                content: map(content),
            },
            Request::Fence { epoch } => Request::Fence { epoch },
            Request::StoreConfig {
                id,
                configuration,
                start,
            } => Request::StoreConfig {
                id,
                configuration,
                start,
            },
            Request::BeginResync { id, pass, sequence } => {
                Request::BeginResync { id, pass, sequence }
            }
            Request::MarkComplete { id, pass } => Request::MarkComplete { id, pass },
            Request::SetLast { id, position } => Request::SetLast { id, position },
            Request::Read { id, range, torn } => Request::Read { id, range, torn },
            Request::Compare { id, extent } => Request::Compare { id, extent },
            Request::Digests { id, from, count } => Request::Digests { id, from, count },
            Request::ListAbove { id, floor, from } => Request::ListAbove { id, floor, from },
        }
    }
}

/// Whether a read may return a block that is known to be torn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TornBlocks {
    /// A torn block is an error.
    Refuse,
    /// The bytes that are there are returned, with their real CRC.
    Serve,
}

/// Why a member did not do what a request asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It promised an epoch with another number or nonce; the number it promised.
    #[error("fenced: the member has promised epoch {}", promised.0)]
    Fenced {
        /// What the member promised.
        promised: EpochNumber,
    },
    /// No replica of that volume with that nonce is on the device.
    #[error("the device holds no such replica")]
    UnknownReplica,
    /// M4: the stored configuration is of another epoch.
    #[error("the member has not stored a configuration of this epoch")]
    NotStarted,
    /// M4: the write is not the next one.
    #[error("gap in the stream: the member's last is {last:?}")]
    Gap {
        /// What the member has.
        last: Position,
    },
    /// M5, M6, M7: the pass is not the member's.
    #[error("the resync pass is not the current one")]
    StalePass,
    /// M8, M9: the member is not complete.
    #[error("the replica is not complete")]
    NotComplete,
    /// M8: the epoch has started here; equalising is over.
    #[error("the epoch has already started on this member")]
    AlreadyStarted,
    /// M10: the stored configuration does not name it.
    #[error("the member is not named in its configuration")]
    NotMember,
    /// The configuration sent is older than the stored one.
    #[error("the member holds a newer configuration")]
    OlderConfiguration,
    /// A witness has no blocks.
    #[error("a witness holds no blocks")]
    Witness,
    /// An administrator evicted the replica; it takes no writes until readmitted.
    #[error("the replica is evicted by an administrator")]
    Evicted,
    /// No free extent on the device.
    #[error("the device is full")]
    DeviceFull,
    /// A write or a sync failed; the device is closed until it is opened again.
    #[error("the device is closed after an error")]
    DeviceClosed,
    /// The range lies outside the volume, crosses an extent, or lists do not match it.
    #[error("the request is malformed or outside the volume")]
    BadRequest,
    /// The proof of the volume's key does not verify.
    #[error("the proof of the volume's key does not verify")]
    Unauthenticated,
}

/// Why a read, or a block of it, has no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The content does not match its checksum (also found by the receiver).
    #[error("block {} at {position:?} does not match its checksum", block.0)]
    Checksum {
        /// The first bad block.
        block: Block,
        /// Its recorded position: only a copy of exactly this one repairs it (R6).
        position: Position,
    },
    /// The block is torn (B2).
    #[error("block {} at {position:?} is torn", block.0)]
    Torn {
        /// The first torn block.
        block: Block,
        /// Its recorded position.
        position: Position,
    },
    /// The device reported an error.
    #[error("the device failed to read")]
    Device,
    /// The member refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What a member answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply<P> {
    /// To Fence.
    Promised {
        /// The epoch that was asked for.
        epoch: Epoch,
        /// What the member holds.
        state: MemberState,
        /// Blocks of the volume.
        size_blocks: u64,
        /// Blocks that a crash left torn (B2); bounded by the writes in flight at the crash.
        torn: Vec<BlockPosition>,
    },
    /// To any request but Write and Read: it was not done.
    Refused {
        /// Of the request; zero for Fence.
        id: RequestId,
        /// Why.
        refusal: Refusal,
    },
    /// To a write that was not applied.
    WriteRefused {
        /// Of the write.
        sequence: Sequence,
        /// Why.
        refusal: Refusal,
    },
    /// StoreConfig, BeginResync, MarkComplete, Equalise, SetLast, Repair: done and durable.
    Done {
        /// Of the request.
        id: RequestId,
    },
    /// Write: everything up to `sequence` is durable.
    Applied {
        /// Cumulative.
        sequence: Sequence,
    },
    /// Copy: durable, except for blocks whose position was not the expected one.
    Copied {
        /// Of the request.
        id: RequestId,
        /// The blocks that had changed, with their positions now.
        changed: Vec<BlockPosition>,
    },
    /// Read.
    Data {
        /// Of the request.
        id: RequestId,
        /// Content and, where asked for by [`Request::Read`] in a resync, positions.
        result: Result<ReadData<P>, ReadError>,
    },
    /// Compare and ListAbove.
    Positions {
        /// Of the request.
        id: RequestId,
        /// Ascending.
        positions: Vec<BlockPosition>,
        /// Where ListAbove goes on; None at the end and for Compare.
        next: Option<Block>,
        /// The member's `last` when it looked (R3: the source must have applied s0).
        last: Position,
    },
    /// Digests of the extents that hold any position above zero, ascending.
    Digests {
        /// Of the request.
        id: RequestId,
        /// (extent, [`crate::digest::positions_digest`] of its 256 positions).
        digests: Vec<(ExtentIndex, u64)>,
    },
}

/// What a read returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadData<P> {
    /// One per block.
    pub positions: Vec<Position>,
    /// Zeros where no block of the range holds data.
    pub content: Content<P>,
}

impl ReplicaState {
    /// Whether the replica may serve reads and count as in sync.
    pub fn is_complete(self) -> bool {
        matches!(self, ReplicaState::Complete)
    }
}

impl<P> Reply<P> {
    /// The same reply with another kind of content.
    pub fn map_content<Q>(self, map: impl FnOnce(Content<P>) -> Content<Q>) -> Reply<Q> {
        match self {
            Reply::Promised {
                epoch,
                state,
                size_blocks,
                torn,
            } => Reply::Promised {
                epoch,
                state,
                size_blocks,
                torn,
            },
            Reply::Refused { id, refusal } => Reply::Refused { id, refusal },
            Reply::WriteRefused { sequence, refusal } => Reply::WriteRefused { sequence, refusal },
            Reply::Done { id } => Reply::Done { id },
            Reply::Applied { sequence } => Reply::Applied { sequence },
            Reply::Copied { id, changed } => Reply::Copied { id, changed },
            Reply::Positions {
                id,
                positions,
                next,
                last,
            } => Reply::Positions {
                id,
                positions,
                next,
                last,
            },
            Reply::Digests { id, digests } => Reply::Digests { id, digests },
            Reply::Data { id, result } => Reply::Data {
                id,
                result: result.map(|read| ReadData {
                    positions: read.positions,
                    content: map(read.content),
                }),
            },
        }
    }
}
