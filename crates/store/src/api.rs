//! Types of the store's interface.

use ashlar_engine::IoBuf;
use ashlar_replication::configuration::{Ack, MemberState};
use ashlar_replication::message::{self, BlockPosition, ReadError};
use ashlar_replication::values::{Block, ExtentIndex, Position, VolumeId};
use zerocopy::little_endian::U32;

use crate::StoreError;

/// Place of a replica in the store's table of volumes; free to be used again after a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaSlot(pub u32);

/// A replica to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSpec {
    /// Of which volume.
    pub volume: VolumeId,
    /// Its first state; names the member's identity, whose nonce must be fresh.
    pub state: MemberState,
    /// Blocks of the volume.
    pub size_blocks: u64,
    /// The volume's key.
    pub key: [u8; 32],
    /// Which acknowledgements writes of the volume need.
    pub ack: Ack,
}

/// A replica as the store has it in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Of which volume.
    pub volume: VolumeId,
    /// The volume's key.
    pub key: [u8; 32],
    /// Which acknowledgements writes of the volume need.
    pub ack: Ack,
    /// Blocks of the volume.
    pub size_blocks: u64,
    /// The newest state that was submitted; durable once the completions so far have come.
    pub state: MemberState,
    /// An administrator took it out of service.
    pub evicted: bool,
    /// Blocks that a crash left torn (B2), ascending; they leave the list when they are written.
    pub torn: Vec<BlockPosition>,
    /// Extents with a slot on the device.
    pub allocated_extents: u64,
}

/// Blocks of data with their CRC-32C, borrowed from where they were received.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// `count` × 4096 bytes.
    pub data: &'a [u8],
    /// One per block. The store checks them before anything else, so the caller need not.
    pub crcs: &'a [U32],
}

/// What a mutation writes.
pub type Content<'a> = message::Content<Blocks<'a>>;

/// What has finished.
#[derive(Debug)]
pub struct Completion {
    /// The caller's.
    pub token: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// How an operation ended. Mutations are durable when they are reported as done.
#[derive(Debug)]
pub enum Outcome {
    /// Create, delete, grow, evict, state, write, equalise, repair.
    Done(Result<(), StoreError>),
    /// Copy: the blocks whose position was not the expected one.
    Copied(Result<Vec<BlockPosition>, StoreError>),
    /// Read.
    Read(Result<ReadOutcome, ReadError>),
    /// Positions of an extent, and list_above.
    Positions(Result<PositionList, StoreError>),
    /// Digests.
    Digests(Result<Vec<(ExtentIndex, u64)>, StoreError>),
}

/// What a read found.
#[derive(Debug)]
pub struct ReadOutcome {
    /// The blocks, verified; None when all of them are zeros. Belongs to the device's pool.
    pub buf: Option<IoBuf>,
    /// One CRC-32C per block, also of blocks of zeros.
    pub crcs: Vec<u32>,
    /// One per block.
    pub positions: Vec<Position>,
}

/// Positions of blocks, ascending; zero positions are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PositionList {
    /// What was found.
    pub positions: Vec<BlockPosition>,
    /// Where list_above goes on.
    pub next: Option<Block>,
}

/// What a store holds and has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Extents on the device.
    pub extents: u64,
    /// Extents that can be allocated now.
    pub extents_free: u64,
    /// Bytes of the journal between its tail and its head.
    pub journal_used_bytes: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Data in memory that has not been written home.
    pub dirty_bytes: u64,
}

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Journal records written.
    pub journal_records: u64,
    /// Bytes of them.
    pub journal_bytes: u64,
    /// Blocks and headers written home, in bytes.
    pub home_bytes: u64,
    /// Large writes in place, in bytes.
    pub in_place_bytes: u64,
    /// Reads that found a wrong checksum.
    pub checksum_errors: u64,
    /// Times that the journal's tail moved.
    pub checkpoints: u64,
}

/// What a device looks like and how far its journal is, for inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Of the superblock.
    pub format_version: u32,
    /// Bytes of the device that are used.
    pub size_bytes: u64,
    /// Replicas that the device can hold.
    pub replicas_max: u32,
    /// Hole pages, each for 256 extents of a replica.
    pub hole_pages: u32,
    /// Those that are not in use.
    pub hole_pages_free: u32,
    /// The journal lies on a device of its own.
    pub journal_separate: bool,
    /// The first record that recovery applies.
    pub journal_tail: u64,
    /// The newest durable record; below the tail when the journal holds none.
    pub journal_head: u64,
}

/// An extent of a replica, for inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentSummary {
    /// Which one.
    pub extent: ExtentIndex,
    /// Where it lies; None: all its blocks are zeros at one position.
    pub slot: Option<u32>,
    /// No block of it has a higher position.
    pub position_max: Position,
}
