//! What the control plane asks of a shard. Commands come by mailbox, answers go back by oneshot;
//! neither is on the way of a read or write.

use ashlar_replication::configuration::MemberState;
use ashlar_replication::values::{DeviceId, ExtentIndex, VolumeId};
use ashlar_store::{Counters, ReplicaSlot, ReplicaSpec, StoreError, Usage};
use tokio::sync::oneshot;

use crate::metrics::ShardMetrics;
use crate::scheduler::ClassDump;

/// A replica as the control API reports it.
#[derive(Clone, Debug)]
pub struct ReplicaInfo {
    /// Of which volume.
    pub volume: VolumeId,
    /// What the member holds.
    pub state: MemberState,
    /// Blocks of the volume.
    pub size_blocks: u64,
    /// Extents with a slot on the device.
    pub allocated_extents: u64,
    /// An administrator took it out of service.
    pub evicted: bool,
    /// An initiator has renewed its lease within the lease's length.
    pub attached: bool,
}

/// A device as the control API reports it.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Which device.
    pub device: DeviceId,
    /// Bytes of the medium.
    pub size_bytes: u64,
    /// Space.
    pub usage: Usage,
    /// Work of the store.
    pub counters: Counters,
    /// Whether it was closed after an error.
    pub closed: bool,
    /// "io_uring" or "portable".
    pub engine: String,
    /// Connections of initiators.
    pub connections: u64,
    /// Replicas on it.
    pub replicas: u64,
    /// Bytes written to the medium since the start.
    pub device_bytes_written: u64,
    /// Bytes of data that initiators wrote.
    pub client_bytes_written: u64,
}

/// Positions and checksums of an extent, as read and verified now.
#[derive(Clone, Debug)]
pub struct ExtentInfo {
    /// Which extent.
    pub extent: ExtentIndex,
    /// Packed, one per block.
    pub positions: Vec<u64>,
    /// One per block.
    pub crcs: Vec<u32>,
    /// Blocks that do not match their checksum.
    pub bad_blocks: Vec<u32>,
}

/// Why a command was not carried out.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CommandError {
    /// By the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No replica of that volume, or one with another nonce.
    #[error("no such replica on the device")]
    NotFound,
    /// There is a replica of the volume that differs from the one asked for.
    #[error("the device holds another replica of that volume: {0}")]
    Exists(String),
    /// The shard has stopped.
    #[error("the shard has stopped")]
    Stopped,
}

/// Where an answer goes.
pub type Answer<T> = oneshot::Sender<Result<T, CommandError>>;

/// A command to a shard.
pub enum Command {
    /// Idempotent.
    Create(Box<ReplicaSpec>, Answer<ReplicaInfo>),
    /// All replicas, or that of one volume.
    List(Option<VolumeId>, Answer<Vec<ReplicaInfo>>),
    /// Idempotent; the nonce must match.
    Delete(VolumeId, u64, Answer<()>),
    /// To a size in blocks.
    Grow(VolumeId, u64, Answer<ReplicaInfo>),
    /// Out of service, or back.
    SetEvicted(VolumeId, bool, Answer<()>),
    /// Status of the device.
    Device(Answer<DeviceInfo>),
    /// Extents among the given ones that hold any position.
    Extents(VolumeId, ExtentIndex, u32, Answer<Vec<ExtentIndex>>),
    /// Reads an extent and reports its positions and checksums.
    Describe(VolumeId, ExtentIndex, Answer<ExtentInfo>),
    /// The scheduler.
    Queue(Answer<Vec<(String, ClassDump)>>),
    /// Counters and histograms.
    Metrics(Answer<ShardMetrics>),
    /// Finish what is under way and end the thread.
    Stop,
}

/// A command that waits for the store.
pub enum Waiting {
    /// [`Command::Create`].
    Create(ReplicaSlot, Answer<ReplicaInfo>),
    /// [`Command::Delete`].
    Delete(Answer<()>),
    /// [`Command::Grow`].
    Grow(ReplicaSlot, Answer<ReplicaInfo>),
    /// [`Command::SetEvicted`].
    SetEvicted(Answer<()>),
    /// [`Command::Extents`].
    Extents(Answer<Vec<ExtentIndex>>),
    /// [`Command::Describe`]: of the whole extent, or block by block once that failed.
    Describe(Describe),
}

/// A [`Command::Describe`] under way.
pub struct Describe {
    /// Of which replica.
    pub slot: ReplicaSlot,
    /// Of which volume.
    pub volume: VolumeId,
    /// What has been found so far.
    pub found: ExtentInfo,
    /// None while the whole extent is read at once; else the block that is being read.
    pub block: Option<u32>,
    /// Blocks of the extent that lie within the volume.
    pub blocks: u32,
    /// Who waits.
    pub answer: Answer<ExtentInfo>,
}
