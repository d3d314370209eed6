//! What waits for a header or a large write, and the questions about positions.

use std::collections::VecDeque;

use ashlar_replication::digest::positions_digest;
use ashlar_replication::message::{BlockPosition, Content, CopyStep, ReadError};
use ashlar_replication::values::{Block, BlockRange, EXTENT_BLOCKS, ExtentIndex, Position};
use zerocopy::little_endian::U32;

use super::Store;
use super::read::Read;
use crate::StoreError;
use crate::api::{Blocks, Completion, Content as BlockContent, Outcome, PositionList, ReplicaSlot};
use crate::device::Device;
use crate::memory::extents::Load;
use crate::memory::table::NO_SLOT;

/// Cold headers that a question reads ahead of the one that it needs.
const READ_AHEAD: usize = 16;

/// Something that waits.
pub(crate) enum Parked {
    Read(Box<Read>),
    Copy {
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        steps: Box<[CopyStep]>,
        content: OwnedContent,
    },
    Repair {
        token: u64,
        slot: ReplicaSlot,
        block: Block,
        position: Position,
        content: OwnedContent,
    },
    Question(Question),
}

/// Content of a mutation that has to wait; the one case in which it is copied once more.
pub(crate) enum OwnedContent {
    Zeros,
    Data { data: Box<[u8]>, crcs: Box<[U32]> },
}

impl OwnedContent {
    pub(super) fn of(content: &BlockContent<'_>) -> OwnedContent {
        match content {
            Content::Zeros => OwnedContent::Zeros,
            Content::Data(blocks) => OwnedContent::Data {
                data: blocks.data.into(),
                crcs: blocks.crcs.into(),
            },
        }
    }

    fn borrow(&self) -> BlockContent<'_> {
        match self {
            OwnedContent::Zeros => Content::Zeros,
            OwnedContent::Data { data, crcs } => Content::Data(Blocks { data, crcs }),
        }
    }
}

/// A question about positions of a replica.
pub(crate) struct Question {
    token: u64,
    slot: ReplicaSlot,
    nonce: u64,
    kind: Kind,
    /// The extent that is looked at next.
    cursor: u64,
}

enum Kind {
    Positions(Vec<BlockPosition>),
    Digests {
        end: u64,
        found: Vec<(ExtentIndex, u64)>,
    },
    Above {
        floor: u64,
        from: u64,
        limit: usize,
        found: Vec<BlockPosition>,
    },
}

impl Kind {
    fn fail(&self, token: u64, error: StoreError) -> Completion {
        let outcome = match self {
            Kind::Digests { .. } => Outcome::Digests(Err(error)),
            Kind::Positions(_) | Kind::Above { .. } => Outcome::Positions(Err(error)),
        };
        Completion { token, outcome }
    }
}

impl Parked {
    /// Reports everything but a read as failed because the device is closed.
    pub(super) fn fail(self, completions: &mut VecDeque<Completion>) {
        self.fail_with(StoreError::Closed, completions);
    }

    fn fail_with(self, error: StoreError, completions: &mut VecDeque<Completion>) {
        completions.push_back(match self {
            Parked::Read(read) => Completion {
                token: read.token,
                outcome: Outcome::Read(Err(ReadError::Device)),
            },
            Parked::Copy { token, .. } => Completion {
                token,
                outcome: Outcome::Copied(Err(error)),
            },
            Parked::Repair { token, .. } => Completion {
                token,
                outcome: Outcome::Done(Err(error)),
            },
            Parked::Question(question) => question.kind.fail(question.token, error),
        });
    }

    fn waits_for(&self, slot: ReplicaSlot, extent: u64) -> bool {
        match self {
            Parked::Read(read) => read.is_of(slot, extent),
            Parked::Copy { slot: s, range, .. } => *s == slot && range.start.extent().0 == extent,
            Parked::Repair { slot: s, block, .. } => *s == slot && block.extent().0 == extent,
            Parked::Question(question) => question.slot == slot && question.cursor == extent,
        }
    }
}

impl Store {
    /// Positions of an extent's blocks above zero. Completes as [`Outcome::Positions`].
    ///
    /// # Errors
    /// [`StoreError::Closed`], [`StoreError::UnknownReplica`].
    pub fn extent_positions<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        extent: ExtentIndex,
    ) -> Result<(), StoreError> {
        self.ask(dev, token, slot, extent.0, Kind::Positions(Vec::new()))
    }

    /// Digests of the extents in [from, from + count) that hold a position above zero. Completes as
    /// [`Outcome::Digests`].
    ///
    /// # Errors
    /// [`StoreError::Closed`], [`StoreError::UnknownReplica`].
    pub fn digests<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        from: ExtentIndex,
        count: u32,
    ) -> Result<(), StoreError> {
        let end = from.0.saturating_add(u64::from(count));
        self.ask(
            dev,
            token,
            slot,
            from.0,
            Kind::Digests {
                end,
                found: Vec::new(),
            },
        )
    }

    /// Blocks from `from` on whose position is above `floor`, about `limit` of them (an extent is not cut in two).
    /// Completes as [`Outcome::Positions`].
    ///
    /// # Errors
    /// [`StoreError::Closed`], [`StoreError::UnknownReplica`].
    pub fn list_above<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        floor: Position,
        from: Block,
        limit: usize,
    ) -> Result<(), StoreError> {
        let kind = Kind::Above {
            floor: floor.pack(),
            from: from.0,
            limit,
            found: Vec::new(),
        };
        self.ask(dev, token, slot, from.extent().0, kind)
    }

    fn ask<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        cursor: u64,
        kind: Kind,
    ) -> Result<(), StoreError> {
        let nonce = self.check_replica(slot)?.nonce();
        self.advance_question(
            dev,
            Question {
                token,
                slot,
                nonce,
                kind,
                cursor,
            },
        );
        Ok(())
    }

    /// Goes through the extents until the end, or until a header has to be read.
    fn advance_question<D: Device>(&mut self, dev: &mut D, mut question: Question) {
        let volume = match self.live(question.slot.0) {
            Some(volume) if volume.nonce() == question.nonce => volume,
            _ => {
                let failed = question
                    .kind
                    .fail(question.token, StoreError::UnknownReplica);
                self.completions.push_back(failed);
                return;
            }
        };
        let (floor, end) = match question.kind {
            Kind::Positions(_) => (0, question.cursor.saturating_add(1)),
            Kind::Digests { end, .. } => (0, end),
            Kind::Above { floor, .. } => (floor, u64::MAX),
        };
        let mut cold = None;
        let mut next = None;
        for (extent, entry) in volume.table.iter_from(question.cursor) {
            if extent >= end {
                break;
            }
            if entry.position <= floor {
                continue;
            }
            if is_full(&question.kind) {
                next = Some(ExtentIndex(extent).first_block());
                break;
            }
            if entry.slot == NO_SLOT {
                take(
                    &mut question.kind,
                    extent,
                    &[entry.position; EXTENT_BLOCKS as usize],
                );
                continue;
            }
            let loaded = (entry.memory != crate::memory::extents::NONE)
                .then(|| self.extents.get(entry.memory))
                .filter(|e| e.load == Load::Loaded);
            match loaded {
                Some(loaded) => take(&mut question.kind, extent, &loaded.map.positions),
                None => {
                    cold = Some(extent);
                    break;
                }
            }
        }
        if let Some(extent) = cold {
            question.cursor = extent;
            self.read_ahead(dev, &question, floor, end);
            self.parked.push_back(Parked::Question(question));
            return;
        }
        self.completions.push_back(answer(question, next));
    }

    fn read_ahead<D: Device>(&mut self, dev: &mut D, question: &Question, floor: u64, end: u64) {
        let mut wanted = [0; READ_AHEAD];
        let mut count = 0;
        let volume = self.live(question.slot.0).expect("a live replica");
        for (extent, entry) in volume.table.iter_from(question.cursor) {
            if extent >= end || count == READ_AHEAD {
                break;
            }
            if entry.slot != NO_SLOT && entry.position > floor {
                wanted[count] = extent;
                count += 1;
            }
        }
        for extent in &wanted[..count] {
            let id = self.extent_memory(question.slot.0, *extent);
            self.start_load(dev, id);
        }
    }

    /// Lets everything that waits try again.
    pub(super) fn unpark<D: Device>(&mut self, dev: &mut D) {
        for parked in std::mem::take(&mut self.parked) {
            match parked {
                Parked::Read(read) => self.advance_read(dev, *read),
                Parked::Question(question) => self.advance_question(dev, question),
                Parked::Copy {
                    token,
                    slot,
                    range,
                    steps,
                    content,
                } => {
                    let result = self.copy(dev, token, slot, range, &steps, content.borrow());
                    if let Err(error) = result {
                        let outcome = Outcome::Copied(Err(error));
                        self.completions.push_back(Completion { token, outcome });
                    }
                }
                Parked::Repair {
                    token,
                    slot,
                    block,
                    position,
                    content,
                } => {
                    let result = self.repair(dev, token, slot, block, position, content.borrow());
                    if let Err(error) = result {
                        let outcome = Outcome::Done(Err(error));
                        self.completions.push_back(Completion { token, outcome });
                    }
                }
            }
        }
    }

    /// The header of an extent could not be read.
    pub(super) fn fail_waiting_for<D: Device>(&mut self, dev: &mut D, id: u32) {
        let owner = self.extents.get(id).owner;
        for parked in std::mem::take(&mut self.parked) {
            if !parked.waits_for(ReplicaSlot(owner.replica), owner.extent) {
                self.parked.push_back(parked);
                continue;
            }
            match parked {
                Parked::Read(read) => self.fail_read(dev, *read),
                other => other.fail_with(StoreError::HeaderDamaged, &mut self.completions),
            }
        }
    }
}

fn is_full(kind: &Kind) -> bool {
    matches!(kind, Kind::Above { limit, found, .. } if found.len() >= *limit)
}

/// Takes the positions of an extent into the answer.
fn take(kind: &mut Kind, extent: u64, positions: &[u64; EXTENT_BLOCKS as usize]) {
    let blocks = || {
        let first = ExtentIndex(extent).first_block().0;
        positions
            .iter()
            .enumerate()
            .map(move |(i, position)| (first + i as u64, *position))
    };
    let found = |(block, position): (u64, u64)| BlockPosition {
        block: Block(block),
        position: Position::unpack(position),
    };
    match kind {
        Kind::Positions(list) => list.extend(blocks().filter(|(_, p)| *p != 0).map(found)),
        Kind::Digests { found, .. } => {
            if positions.iter().any(|p| *p != 0) {
                let digest = positions_digest(positions.iter().map(|p| Position::unpack(*p)));
                found.push((ExtentIndex(extent), digest));
            }
        }
        Kind::Above {
            floor,
            from,
            found: list,
            ..
        } => {
            list.extend(
                blocks()
                    .filter(|(b, p)| *p > *floor && *b >= *from)
                    .map(found),
            );
        }
    }
}

fn answer(question: Question, next: Option<Block>) -> Completion {
    let outcome = match question.kind {
        Kind::Positions(positions) => Outcome::Positions(Ok(PositionList {
            positions,
            next: None,
        })),
        Kind::Above { found, .. } => Outcome::Positions(Ok(PositionList {
            positions: found,
            next,
        })),
        Kind::Digests { found, .. } => Outcome::Digests(Ok(found)),
    };
    Completion {
        token: question.token,
        outcome,
    }
}
