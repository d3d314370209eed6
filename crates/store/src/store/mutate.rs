//! Mutations of blocks: writes, copies, equalising, repair. All of them end in [`Store::apply`].

use ashlar_replication::message::{BlockPosition, Content, CopyStep};
use ashlar_replication::values::{BLOCK_BYTES, Block, BlockRange, Position};

use super::Store;
use super::jobs::{OwnedContent, Parked};
use super::replicas::MutationReply;
use crate::StoreError;
use crate::api::{Blocks, Completion, Content as BlockContent, Outcome, ReplicaSlot};
use crate::device::Device;
use crate::faults::{Fault, is_broken};
use crate::format::extent_header::Owner;
use crate::journal::descriptor::Positions;
use crate::memory::bits::Bits;
use crate::memory::extents::{self, BlockState, Load};
use crate::memory::table::NO_SLOT;

use super::apply::Apply;

impl Store {
    /// M4's durable step: the blocks, and `last` := `position`. Blocks that are known to hold a position of the
    /// same epoch at or above `position` are left as they are.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed then, `last` neither.
    pub fn write<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        position: Position,
        range: BlockRange,
        content: BlockContent<'_>,
    ) -> Result<(), StoreError> {
        self.check_range(slot, range)?;
        let packed = position.pack();
        let apply = Apply {
            replica: slot.0,
            range,
            positions: Positions::Same(packed),
            content,
            skip: self.newer_blocks(slot.0, range, packed),
            sets_last: Some(position),
            reply: MutationReply::Done,
            token,
        };
        self.apply(dev, apply)
    }

    /// M6. Completes as [`Outcome::Copied`] with the blocks whose position was not the expected one.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed then.
    pub fn copy<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        steps: &[CopyStep],
        content: BlockContent<'_>,
    ) -> Result<(), StoreError> {
        self.check_range(slot, range)?;
        if steps.len() != range.count as usize {
            return Err(StoreError::BadRange);
        }
        check_content(range, &content)?;
        if self.ensure_known(dev, slot.0, range) {
            return self.copy_known(dev, token, slot, range, steps, content);
        }
        let content = OwnedContent::of(&content);
        self.parked.push_back(Parked::Copy {
            token,
            slot,
            range,
            steps: steps.into(),
            content,
        });
        Ok(())
    }

    pub(super) fn copy_known<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        steps: &[CopyStep],
        content: BlockContent<'_>,
    ) -> Result<(), StoreError> {
        let mut skip = Bits::default();
        let mut changed = Vec::new();
        for (block, step) in range.blocks().zip(steps) {
            let position = self.known_block(slot.0, block).position;
            if position != step.expected.pack() {
                skip.set(block.within_extent() as usize, true);
                changed.push(BlockPosition {
                    block,
                    position: Position::unpack(position),
                });
            }
        }
        if changed.len() == range.count as usize {
            self.completions.push_back(Completion {
                token,
                outcome: Outcome::Copied(Ok(changed)),
            });
            return Ok(());
        }
        let mut list = std::mem::take(&mut self.scratch_positions);
        list.clear();
        list.extend(steps.iter().map(|step| step.position.pack()));
        let apply = Apply {
            replica: slot.0,
            range,
            positions: positions_of(&list),
            content,
            skip,
            sets_last: None,
            reply: MutationReply::Copied(changed),
            token,
        };
        let result = self.apply(dev, apply);
        self.scratch_positions = list;
        result
    }

    /// M8's Equalise: gives the blocks these positions and contents, whatever they held.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed then.
    pub fn equalise<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        positions: &[Position],
        content: BlockContent<'_>,
    ) -> Result<(), StoreError> {
        self.check_range(slot, range)?;
        if positions.len() != range.count as usize {
            return Err(StoreError::BadRange);
        }
        let mut list = std::mem::take(&mut self.scratch_positions);
        list.clear();
        list.extend(positions.iter().map(|position| position.pack()));
        let apply = Apply {
            replica: slot.0,
            range,
            positions: positions_of(&list),
            content,
            skip: Bits::default(),
            sets_last: None,
            reply: MutationReply::Done,
            token,
        };
        let result = self.apply(dev, apply);
        self.scratch_positions = list;
        result
    }

    /// R6: rewrites a bad block whose recorded position is exactly `position`, which it keeps; completes
    /// with [`StoreError::PositionChanged`] otherwise.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed then.
    pub fn repair<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        block: Block,
        position: Position,
        content: BlockContent<'_>,
    ) -> Result<(), StoreError> {
        let range = BlockRange {
            start: block,
            count: 1,
        };
        self.check_range(slot, range)?;
        check_content(range, &content)?;
        if self.ensure_known(dev, slot.0, range) {
            return self.repair_known(dev, token, slot, block, position, content);
        }
        let content = OwnedContent::of(&content);
        self.parked.push_back(Parked::Repair {
            token,
            slot,
            block,
            position,
            content,
        });
        Ok(())
    }

    pub(super) fn repair_known<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        block: Block,
        position: Position,
        content: BlockContent<'_>,
    ) -> Result<(), StoreError> {
        if self.known_block(slot.0, block).position != position.pack() {
            let outcome = Outcome::Done(Err(StoreError::PositionChanged));
            self.completions.push_back(Completion { token, outcome });
            return Ok(());
        }
        let apply = Apply {
            replica: slot.0,
            range: BlockRange {
                start: block,
                count: 1,
            },
            positions: Positions::Same(position.pack()),
            content,
            skip: Bits::default(),
            sets_last: None,
            reply: MutationReply::Done,
            token,
        };
        self.apply(dev, apply)
    }

    fn check_range(&self, slot: ReplicaSlot, range: BlockRange) -> Result<(), StoreError> {
        self.check_readable(slot, range)?;
        let role = self.check_replica(slot)?.replica.state.role;
        if role != ashlar_replication::configuration::Role::Data {
            return Err(StoreError::Witness);
        }
        Ok(())
    }

    /// M4: blocks of the extent that already hold a position of the same epoch at or above `packed`. A torn block holds
    /// nothing: the write that was cut short comes again, and must not be taken for done.
    fn newer_blocks(&self, replica: u32, range: BlockRange, packed: u64) -> Bits {
        let mut skip = Bits::default();
        let Some(volume) = self.live(replica) else {
            return skip;
        };
        let entry = volume.table.get(range.start.extent().0);
        if entry.position < packed || entry.memory == extents::NONE {
            return skip;
        }
        let extent = self.extents.get(entry.memory);
        for i in blocks_within(range) {
            let position = extent.map.positions[i];
            let is_torn = extent.map.torn.get(i) && !is_broken(Fault::SkipTorn);
            let holds = extent.known.get(i) && !is_torn;
            if holds && position >= packed && position >> 40 == packed >> 40 {
                skip.set(i, true);
            }
        }
        skip
    }

    /// The state of a block that is known, see [`Store::ensure_known`].
    pub(super) fn known_block(&self, replica: u32, block: Block) -> BlockState {
        let table = &self.live(replica).expect("a live replica").table;
        let entry = table.get(block.extent().0);
        if entry.slot == NO_SLOT {
            return BlockState::zeros(entry.position);
        }
        self.extents
            .get(entry.memory)
            .block(block.within_extent() as usize)
    }

    /// The extent's place in memory. It has a slot.
    pub(super) fn extent_memory(&mut self, replica: u32, extent: u64) -> u32 {
        let volume = self.volumes[replica as usize]
            .as_ref()
            .expect("the slot is in use");
        let entry = volume.table.get(extent);
        if entry.memory != extents::NONE {
            self.extents.get_mut(entry.memory).referenced = true;
            return entry.memory;
        }
        let owner = Owner {
            volume: volume.replica.volume,
            nonce: volume.nonce(),
            replica,
            extent,
        };
        let volumes = &mut self.volumes;
        let id = self.extents.insert(owner, entry.slot, |evicted| {
            if let Some(volume) = volumes[evicted.owner.replica as usize].as_mut() {
                volume.table.entry_mut(evicted.owner.extent).memory = extents::NONE;
            }
        });
        self.volume_mut(replica).table.entry_mut(extent).memory = id;
        id
    }

    /// Whether the positions of the blocks are known; starts to read the header otherwise.
    pub(super) fn ensure_known<D: Device>(
        &mut self,
        dev: &mut D,
        replica: u32,
        range: BlockRange,
    ) -> bool {
        let extent = range.start.extent().0;
        if self.volume_mut(replica).table.get(extent).slot == NO_SLOT {
            return true;
        }
        let id = self.extent_memory(replica, extent);
        let in_memory = self.extents.get(id);
        if in_memory.load == Load::Loaded || blocks_within(range).all(|i| in_memory.known.get(i)) {
            return true;
        }
        self.start_load(dev, id);
        false
    }
}

/// Indices within the extent.
pub(super) fn blocks_within(range: BlockRange) -> std::ops::Range<usize> {
    let first = range.start.within_extent() as usize;
    first..first + range.count as usize
}

/// One position where all are the same, so that a whole discarded extent is recognised.
fn positions_of(list: &[u64]) -> Positions<'_> {
    match list {
        [first, rest @ ..] if rest.iter().all(|p| p == first) => Positions::Same(*first),
        _ => Positions::Each(list),
    }
}

pub(super) fn check_content(
    range: BlockRange,
    content: &BlockContent<'_>,
) -> Result<(), StoreError> {
    let Content::Data(Blocks { data, crcs }) = content else {
        return Ok(());
    };
    let count = range.count as usize;
    if data.len() != count * BLOCK_BYTES || crcs.len() != count {
        return Err(StoreError::BadRange);
    }
    let good = data
        .chunks_exact(BLOCK_BYTES)
        .zip(*crcs)
        .all(|(b, c)| crc32c::crc32c(b) == c.get());
    if good {
        Ok(())
    } else {
        Err(StoreError::Checksum)
    }
}
