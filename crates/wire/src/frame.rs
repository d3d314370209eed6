//! Frames as values.

use ashlar_replication::configuration::MemberState;
use ashlar_replication::message::{BlockPosition, Refusal, Reply, Request};
use ashlar_replication::values::{BLOCK_BYTES, Block, DeviceId, Epoch, EpochNumber};
use zerocopy::little_endian::U32;

use crate::proof::{Nonce, Proof, Subject};

/// The version of the protocol that this crate speaks; it speaks no other yet.
pub const VERSION: u16 = 1;
/// The last block that a frame may name: the offset of the byte behind it still fits 63 bits.
pub const BLOCK_MAX: Block = Block((1 << 51) - 1);
/// The most entries of a list of positions or digests in one frame.
pub const POSITIONS_MAX: usize = 4096;
/// The most torn blocks in a promise: one extent short of 60 MiB of large writes in flight.
pub const TORN_MAX: usize = 15_000;
/// The most bytes of a Goodbye's text.
pub const GOODBYE_BYTES_MAX: usize = 512;

/// Whole blocks and their checksums, where they were received. Not yet checked.
#[derive(Clone, Copy, Debug)]
pub struct BlockData<'a> {
    /// One per block.
    pub crcs: &'a [U32],
    /// `crcs.len()` × 4096 bytes.
    pub data: &'a [u8],
}

impl BlockData<'_> {
    /// Index of the first block whose data does not match its checksum.
    pub fn first_bad_block(&self) -> Option<usize> {
        let blocks = self.data.chunks_exact(BLOCK_BYTES);
        blocks
            .zip(self.crcs)
            .position(|(block, crc)| crc32c::crc32c(block) != crc.get())
    }
}

impl PartialEq for BlockData<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.data == other.data && self.crcs.iter().eq(other.crcs)
    }
}

impl Eq for BlockData<'_> {}

/// What an initiator says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version it speaks.
    pub version_min: u16,
    /// The newest version it speaks.
    pub version_max: u16,
    /// Optional features it has; none is defined yet.
    pub features: u64,
    /// Its challenge.
    pub nonce: Nonce,
    /// Who it is, for messages and the status.
    pub initiator: [u8; 16],
}

/// What a storage node answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version of this connection.
    pub version: u16,
    /// The features that both have.
    pub features: u64,
    /// Its challenge.
    pub nonce: Nonce,
    /// Which node.
    pub node: [u8; 16],
    /// Which device: the initiator closes the connection when it is not the one it looks for.
    pub device: DeviceId,
    /// How many requests it admits at a time; the rest waits in the socket.
    pub operations_max: u32,
    /// How many bytes of requests it admits at a time.
    pub bytes_max: u64,
    /// How long a lease lasts, in milliseconds.
    pub lease_ms: u32,
}

/// M1 on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Volume, member, epoch, handle.
    pub subject: Subject,
    /// [`crate::proof::fence_proof`].
    pub proof: Proof,
}

/// The answer to a Fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The epoch asked for.
    pub epoch: Epoch,
    /// What the member holds.
    pub state: MemberState,
    /// Blocks of the volume.
    pub size_blocks: u64,
    /// Blocks that a crash left torn; at most [`TORN_MAX`].
    pub torn: Vec<BlockPosition>,
}

/// Why a connection is closed by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum GoodbyeCode {
    /// The process stops.
    ShuttingDown = 1,
    /// No common version.
    Version = 2,
    /// Framing was lost, or a frame came that has no place there.
    Protocol = 3,
    /// Too many connections.
    Busy = 4,
    /// The device is closed.
    DeviceClosed = 5,
}

impl GoodbyeCode {
    /// The code with that number.
    pub fn from_number(number: u64) -> Option<GoodbyeCode> {
        use GoodbyeCode::{Busy, DeviceClosed, Protocol, ShuttingDown, Version};
        [ShuttingDown, Version, Protocol, Busy, DeviceClosed]
            .into_iter()
            .find(|code| *code as u64 == number)
    }
}

/// A whole frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The first frame of an initiator.
    Hello(Hello),
    /// The first frame of a storage node.
    Welcome(Welcome),
    /// The last frame of a connection.
    Goodbye {
        /// Why.
        code: GoodbyeCode,
        /// The same in words.
        text: &'a str,
    },
    /// M1.
    Fence(Fence),
    /// M1's answer.
    Promised {
        /// The attachment.
        handle: u32,
        /// The answer.
        promise: Promise,
        /// The answer as the proof covers it.
        answer: &'a [u8],
        /// [`crate::proof::promise_proof`].
        proof: Proof,
    },
    /// A Fence that was refused.
    FenceRefused {
        /// The attachment.
        handle: u32,
        /// Why.
        refusal: Refusal,
    },
    /// The attachment is over; its handle may be used again.
    Release {
        /// The attachment.
        handle: u32,
    },
    /// L3.
    Renew {
        /// Comes back in the answer.
        echo: u64,
    },
    /// L3's answer.
    Renewed {
        /// From the request.
        echo: u64,
    },
    /// L3: this attachment was superseded.
    Fenced {
        /// The attachment.
        handle: u32,
        /// The number that the member has promised instead.
        promised: EpochNumber,
    },
    /// A request of an attachment.
    Request {
        /// The attachment.
        handle: u32,
        /// The request; never [`Request::Fence`].
        request: Request<BlockData<'a>>,
    },
    /// An answer.
    Reply {
        /// The attachment.
        handle: u32,
        /// The answer; never [`Reply::Promised`].
        reply: Reply<BlockData<'a>>,
    },
}
