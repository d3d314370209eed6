//! What had to wait in the scheduler. A request is a copy of what was in the receive buffer.

use ashlar_engine::IoBuf;
use ashlar_replication::message::{Content, Request};
use ashlar_replication::values::Time;
use ashlar_wire::BlockData;
use zerocopy::little_endian::U32;

use crate::shard::commands::Describe;
use crate::shard::connection::Asker;

/// Work that waits for the device.
pub enum Work {
    /// Of an initiator.
    Request(Box<Queued>),
    /// The store's next home write.
    HomeWrite,
    /// The next read of a comparison of replicas.
    Describe(Box<Describe>),
}

/// Block data that was copied out of a receive buffer.
pub struct OwnedBlocks {
    crcs: Vec<U32>,
    data: IoBuf,
}

/// A request with its own memory. Bounded by the connection's admission.
pub struct Queued {
    /// Who asked.
    pub asker: Asker,
    /// When it came.
    pub since: Time,
    request: Request<OwnedBlocks>,
}

impl Queued {
    /// Copies a request.
    pub fn new(asker: Asker, since: Time, request: Request<BlockData<'_>>) -> Queued {
        let own = |content: Content<BlockData<'_>>| match content {
            Content::Zeros => Content::Zeros,
            Content::Data(blocks) => Content::Data(OwnedBlocks {
                crcs: blocks.crcs.to_vec(),
                data: IoBuf::copy_of(blocks.data),
            }),
        };
        Queued {
            asker,
            since,
            request: request.map_content(own),
        }
    }

    /// The request as it was received.
    pub fn request(&self) -> Request<BlockData<'_>> {
        map_content_ref(&self.request)
    }
}

fn borrow(content: &Content<OwnedBlocks>) -> Content<BlockData<'_>> {
    match content {
        Content::Zeros => Content::Zeros,
        Content::Data(blocks) => Content::Data(BlockData {
            crcs: &blocks.crcs,
            data: &blocks.data,
        }),
    }
}

fn map_content_ref(request: &Request<OwnedBlocks>) -> Request<BlockData<'_>> {
    match request {
        Request::Write {
            sequence,
            range,
            content,
        } => Request::Write {
            sequence: *sequence,
            range: *range,
            content: borrow(content),
        },
        Request::Copy {
            id,
            pass,
            range,
            steps,
            content,
        } => Request::Copy {
            id: *id,
            pass: *pass,
            range: *range,
            steps: steps.clone(),
            content: borrow(content),
        },
        Request::Equalise {
            id,
            range,
            positions,
            content,
        } => Request::Equalise {
            id: *id,
            range: *range,
            positions: positions.clone(),
            content: borrow(content),
        },
        Request::Repair {
            id,
            block,
            position,
            content,
        } => Request::Repair {
            id: *id,
            block: *block,
            position: *position,
            content: borrow(content),
        },
        Request::Read { id, range, torn } => Request::Read {
            id: *id,
            range: *range,
            torn: *torn,
        },
        Request::Compare { id, extent } => Request::Compare {
            id: *id,
            extent: *extent,
        },
        Request::Digests { id, from, count } => Request::Digests {
            id: *id,
            from: *from,
            count: *count,
        },
        Request::ListAbove { id, floor, from } => Request::ListAbove {
            id: *id,
            floor: *floor,
            from: *from,
        },
        // Changes of state are never queued: they cost one small journal record.
        Request::Fence { .. }
        | Request::StoreConfig { .. }
        | Request::BeginResync { .. }
        | Request::MarkComplete { .. }
        | Request::SetLast { .. } => unreachable!("changes of state are not queued"),
    }
}
