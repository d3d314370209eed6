//! Which replica a request is for, and what a member answers to Fence.

use ashlar_replication::message::Refusal;
use ashlar_replication::values::{Epoch, Position, VolumeId};
use ashlar_store::{Replica, ReplicaSlot, Store};
use ashlar_wire::TORN_MAX;

use crate::Promised;

/// A replica that an initiator has fenced, from Fence to Release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The replica.
    pub slot: ReplicaSlot,
    /// Of which volume; a slot may be used again by another.
    pub volume: VolumeId,
    /// Which life of the volume's replica.
    pub nonce: u64,
    /// The epoch of every request.
    pub epoch: Epoch,
}

impl Attachment {
    /// The replica, if it is still the one that was fenced.
    pub fn replica<'a>(&self, store: &'a Store) -> Option<&'a Replica> {
        let replica = store.replica(self.slot)?;
        let is_same = (replica.volume, replica.state.id.nonce) == (self.volume, self.nonce);
        is_same.then_some(replica)
    }
}

/// What a member answers to a Fence that is durable; `promised` is what became durable with it. Of the epoch's own
/// writes the initiator is told what is `durable`, not what is on its way.
///
/// # Errors
/// When a newer epoch has been promised meanwhile, or more blocks are torn than can be told of.
pub fn promise(
    replica: &Replica,
    mut promised: Promised,
    durable: Position,
) -> Result<Promised, Refusal> {
    if promised.torn.len() > TORN_MAX {
        return Err(Refusal::DeviceClosed);
    }
    if replica.state.promised != promised.state.promised {
        return Err(Refusal::Fenced {
            promised: replica.state.promised.number,
        });
    }
    let state = &mut promised.state;
    let epoch = state.promised.number;
    if state.last.epoch == epoch {
        let known = Position::start_of(epoch).max(durable);
        state.last.sequence = state.last.sequence.min(known.sequence);
    }
    Ok(promised)
}
