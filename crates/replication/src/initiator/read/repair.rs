//! R6: a bad copy that a read met is written again from a good one of exactly its position.

use crate::faults::{Fault, is_broken};
use crate::initiator::{Effects, Initiator};
use crate::message::{ReadData, ReadError, Request, RequestId, TornBlocks};
use crate::values::{Block, BlockRange, Position};

use super::bit;

/// Bad copies that are repaired at a time; more are found again by the next read or a scrub.
const REPAIRS_MAX: usize = 64;

/// A bad copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bad {
    peer: usize,
    block: Block,
    position: Position,
}

impl Bad {
    pub(super) fn is_at(&self, n: usize) -> bool {
        self.peer == n
    }

    /// The copy that the error is about, if another one can repair it.
    pub(super) fn of(peer: usize, error: ReadError) -> Option<Bad> {
        match error {
            ReadError::Checksum { block, position } | ReadError::Torn { block, position } => {
                Some(Bad {
                    peer,
                    block,
                    position,
                })
            }
            ReadError::Device | ReadError::Refused(_) => None,
        }
    }
}

/// A repair under way: a good copy is being read.
#[derive(Debug)]
pub(super) struct Repair {
    bad: Bad,
    id: RequestId,
    pub(super) source: usize,
}

impl Repair {
    pub(super) fn is_at(&self, n: usize) -> bool {
        self.bad.is_at(n)
    }
}

impl<P: Clone> Initiator<P> {
    /// Asks a member that did not fail for the block.
    pub(super) fn begin_repair(&mut self, bad: Bad, failed: u32, effects: &mut Effects<P>) {
        let known = |r: &Repair| r.bad.peer == bad.peer && r.bad.block == bad.block;
        if self.reads.repairs.len() >= REPAIRS_MAX || self.reads.repairs.iter().any(known) {
            return;
        }
        let Some(c) = &self.committed else { return };
        let has_copy = |n: &usize| {
            let peer = &self.peers[*n];
            failed & bit(*n) == 0 && peer.usable() && c.in_sync.contains(&peer.member.id)
        };
        let Some(source) = (0..self.peers.len()).find(has_copy) else {
            return;
        };
        let id = self.id();
        self.reads.repairs.push(Repair { bad, id, source });
        let range = BlockRange {
            start: bad.block,
            count: 1,
        };
        let torn = TornBlocks::Refuse;
        self.send(source, Request::Read { id, range, torn }, effects);
    }

    /// Hands the answer back when it is to none of the repairs.
    pub(super) fn repair_data(
        &mut self,
        n: usize,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) -> Option<Result<ReadData<P>, ReadError>> {
        let ours = |r: &Repair| r.id == id && r.source == n;
        let Some(at) = self.reads.repairs.iter().position(ours) else {
            return Some(result);
        };
        let Repair { bad, .. } = self.reads.repairs.swap_remove(at);
        let Ok(data) = result else { return None };
        let exact = data.positions == [bad.position] || is_broken(Fault::RepairAnyPosition);
        // What differs by now is on its way to the member by the stream.
        if exact && self.peers[bad.peer].usable() {
            let id = self.id();
            let request = Request::Repair {
                id,
                block: bad.block,
                position: bad.position,
                content: data.content,
            };
            self.send(bad.peer, request, effects);
        }
        None
    }
}
