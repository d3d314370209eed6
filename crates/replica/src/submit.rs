//! From a decided request to the store's call.

use ashlar_replication::message::{Content, Request};
use ashlar_replication::values::{EXTENT_BLOCKS, Epoch};
use ashlar_store::{Blocks, Device, ReplicaSlot, Store, StoreError};
use ashlar_wire::{BlockData, POSITIONS_MAX};

use crate::Step;
use crate::decide::position;

/// Block data as the store takes it.
pub trait BlockSource {
    /// The blocks with their checksums.
    fn blocks(&self) -> Blocks<'_>;
}

impl BlockSource for BlockData<'_> {
    fn blocks(&self) -> Blocks<'_> {
        Blocks {
            data: self.data,
            crcs: self.crcs,
        }
    }
}

fn content<P: BlockSource>(content: &Content<P>) -> ashlar_store::Content<'_> {
    match content {
        Content::Zeros => Content::Zeros,
        Content::Data(data) => Content::Data(data.blocks()),
    }
}

/// Hands a decided request to the store, which will report `token`.
///
/// # Errors
/// Of the store; nothing has been begun then.
pub fn submit<D: Device, P: BlockSource>(
    store: &mut Store,
    device: &mut D,
    token: u64,
    slot: ReplicaSlot,
    epoch: Epoch,
    request: &Request<P>,
    step: Step,
) -> Result<(), StoreError> {
    if let Step::State(next) = step {
        return store.set_state(device, token, slot, *next);
    }
    match request {
        Request::Write {
            sequence,
            range,
            content: data,
        } => {
            let position = position(epoch, *sequence);
            store.write(device, token, slot, position, *range, content(data))
        }
        Request::Copy {
            range,
            steps,
            content: data,
            ..
        } => store.copy(device, token, slot, *range, steps, content(data)),
        Request::Equalise {
            range,
            positions,
            content: data,
            ..
        } => store.equalise(device, token, slot, *range, positions, content(data)),
        Request::Repair {
            block,
            position,
            content: data,
            ..
        } => store.repair(device, token, slot, *block, *position, content(data)),
        Request::Read { range, torn, .. } => store.read(device, token, slot, *range, *torn),
        Request::Compare { extent, .. } => store.extent_positions(device, token, slot, *extent),
        Request::Digests { from, count, .. } => store.digests(device, token, slot, *from, *count),
        Request::ListAbove { floor, from, .. } => {
            // The store ends a list at an extent's border: it may add one extent less a block.
            let limit = POSITIONS_MAX - EXTENT_BLOCKS as usize;
            store.list_above(device, token, slot, *floor, *from, limit)
        }
        Request::Fence { .. }
        | Request::StoreConfig { .. }
        | Request::BeginResync { .. }
        | Request::MarkComplete { .. }
        | Request::SetLast { .. } => unreachable!("these are decided as changes of state"),
    }
}
