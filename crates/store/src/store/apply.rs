//! Applying a mutation of blocks: memory, undo list, and the descriptors in the record.

use ashlar_replication::message::Content;
use ashlar_replication::values::{BLOCK_BYTES, BlockRange, EXTENT_BLOCKS, Position};

use super::replicas::{Effect, MutationReply, Outstanding};
use super::{Store, Undo};
use crate::StoreError;
use crate::api::Content as BlockContent;
use crate::device::Device;
use crate::faults::{Fault, is_broken};
use crate::journal::descriptor::{Announcement, Positions, Source, WriteOut, write_bytes};
use crate::memory::bits::Bits;
use crate::memory::extents::BlockState;
use crate::memory::pages;
use crate::memory::table::{GROUP, NO_SLOT};

use super::mutate::check_content;

/// A mutation of consecutive blocks of an extent.
pub(super) struct Apply<'a> {
    pub replica: u32,
    pub range: BlockRange,
    /// Packed.
    pub positions: Positions<'a>,
    pub content: BlockContent<'a>,
    /// Blocks of the extent that are left as they are.
    pub skip: Bits,
    pub sets_last: Option<Position>,
    pub reply: MutationReply,
    pub token: u64,
}

/// Where the blocks of a mutation go.
enum Target {
    /// The whole extent becomes a hole; there is no slot.
    Hole,
    Extent {
        id: u32,
        /// The slot is new; before, all blocks were zeros at this position.
        allocates: Option<u64>,
    },
}

impl Store {
    /// Everything that can be refused is refused before anything is changed.
    pub(super) fn apply<D: Device>(
        &mut self,
        dev: &mut D,
        apply: Apply<'_>,
    ) -> Result<(), StoreError> {
        check_content(apply.range, &apply.content)?;
        let count = apply.range.count as usize;
        let whole = apply.skip.is_empty();
        let source = match &apply.content {
            Content::Zeros => Source::Zeros,
            Content::Data(_) if whole && count * BLOCK_BYTES > self.options.journaled_bytes_max => {
                Source::InPlace
            }
            Content::Data(_) => Source::Journal,
        };
        let data_blocks = if source == Source::Journal { count } else { 0 };
        let each = matches!(apply.positions, Positions::Each(_));
        // A skipped block splits the write in two; every other block skipped is the worst case.
        let descriptor_bytes = if whole {
            write_bytes(count, source, each)
        } else {
            write_bytes(count, source, each)
                + count.div_ceil(2) * (write_bytes(0, source, each) + 8)
        };
        let lsn = self.reserve(dev, descriptor_bytes, data_blocks);
        let announced = Announcement {
            lsn,
            at: self.descriptors().len() as u64,
        };
        let target = self.target(&apply, lsn)?;
        if source == Source::Zeros {
            self.freeing = lsn;
        }
        match target {
            Target::Hole => self.describe_hole(&apply),
            Target::Extent { id, allocates } => {
                self.change_blocks(&apply, id, allocates, lsn, source);
            }
        }
        self.untear(&apply);
        self.queue(dev, apply, target, source, announced);
        Ok(())
    }

    /// Finds or allocates where the blocks go.
    fn target(&mut self, apply: &Apply<'_>, lsn: u64) -> Result<Target, StoreError> {
        let extent = apply.range.start.extent().0;
        let entry = self.volume_mut(apply.replica).table.get(extent);
        if entry.slot != NO_SLOT {
            let id = self.extent_memory(apply.replica, extent);
            return Ok(Target::Extent {
                id,
                allocates: None,
            });
        }
        if let (Content::Zeros, true) = (&apply.content, apply.skip.is_empty())
            && apply.range.count == EXTENT_BLOCKS
            && let Positions::Same(position) = apply.positions
            // A hole page cannot say "zero again": the header of an earlier life would come back in a scan.
            && (position != 0 || entry.position == 0)
            && self.make_hole(apply.replica, extent, position, lsn, lsn)
        {
            self.undo.push_back(Undo::Hole {
                lsn,
                replica: apply.replica,
                extent,
                position: entry.position,
            });
            return Ok(Target::Hole);
        }
        let slot = self.slots.allocate().ok_or(StoreError::DeviceFull)?;
        if entry.position != 0 {
            self.undo.push_back(Undo::Hole {
                lsn,
                replica: apply.replica,
                extent,
                position: entry.position,
            });
            self.touch_group(apply.replica, extent / GROUP, lsn, lsn);
        }
        self.volume_mut(apply.replica).table.set_slot(extent, slot);
        self.note_allocated(apply.replica);
        let id = self.extent_memory(apply.replica, extent);
        self.extents.get_mut(id).reset_to_zeros(entry.position);
        Ok(Target::Extent {
            id,
            allocates: Some(entry.position),
        })
    }

    pub(super) fn note_allocated(&mut self, replica: u32) {
        let volume = self.volume_mut(replica);
        volume.replica.allocated_extents = volume.table.allocated;
    }

    /// Records an extent without a slot as zeros at `position`; false when there is no hole page left.
    pub(super) fn make_hole(
        &mut self,
        replica: u32,
        extent: u64,
        position: u64,
        since: u64,
        newest: u64,
    ) -> bool {
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        let group = volume.table.group_mut(extent / GROUP);
        if group.hole.is_none() && position != 0 {
            let Some(slot) = self.holes.allocate() else {
                return false;
            };
            group.hole = Some(crate::memory::table::Hole::new(slot));
        }
        group.entries[(extent % GROUP) as usize].position = position;
        self.touch_group(replica, extent / GROUP, since, newest);
        true
    }

    /// Notes that the hole page of a group has to be written.
    pub(super) fn touch_group(&mut self, replica: u32, group: u64, since: u64, newest: u64) {
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        let Some(hole) = &mut volume.table.group_mut(group).hole else {
            return;
        };
        hole.newest = hole.newest.max(newest);
        hole.since = if hole.since == 0 {
            since
        } else {
            hole.since.min(since)
        };
        if !std::mem::replace(&mut hole.queued, true) {
            self.dirty_groups.push((replica, group));
        }
    }

    fn describe_hole(&mut self, apply: &Apply<'_>) {
        let out = WriteOut {
            replica: apply.replica,
            extent: apply.range.start.extent().0,
            slot: NO_SLOT,
            allocates: None,
            first: 0,
            count: apply.range.count as u16,
            positions: Positions::Same(apply.positions.get(0)),
            crcs: &[],
            source: Source::Zeros,
            sets_last: apply.sets_last.map(Position::pack),
        };
        out.encode(self.descriptors());
    }

    /// Changes the blocks in memory and describes the change in the record, run by run.
    fn change_blocks(
        &mut self,
        apply: &Apply<'_>,
        id: u32,
        allocates: Option<u64>,
        lsn: u64,
        source: Source,
    ) {
        let first = apply.range.start.within_extent() as usize;
        let count = apply.range.count as usize;
        let mut allocates = allocates;
        let mut from = 0;
        let mut position_max = 0;
        let mut changed = false;
        while from < count {
            if apply.skip.get(first + from) {
                from += 1;
                continue;
            }
            let mut to = from + 1;
            while to < count && !apply.skip.get(first + to) {
                to += 1;
            }
            changed = true;
            for i in from..to {
                position_max = position_max.max(apply.positions.get(i));
                self.change_block(apply, id, i, lsn, source);
            }
            self.describe_run(apply, id, allocates.take(), from..to, source);
            from = to;
        }
        if let (Some(_), true) = (apply.sets_last, apply.skip.get(first + count - 1)) {
            // The run that carries `last` is the one that ends the range.
            self.describe_run(apply, id, None, count..count, source);
        }
        let extent = apply.range.start.extent().0;
        let entry = self.volume_mut(apply.replica).table.entry_mut(extent);
        entry.position = entry.position.max(position_max);
        if changed {
            self.extents.mark_dirty(id, lsn);
        }
    }

    fn change_block(&mut self, apply: &Apply<'_>, id: u32, i: usize, lsn: u64, source: Source) {
        let block = apply.range.start.within_extent() as usize + i;
        let position = apply.positions.get(i);
        let (crc, page) = match (&apply.content, source) {
            (Content::Data(blocks), Source::Journal) => {
                let data = &blocks.data[i * BLOCK_BYTES..(i + 1) * BLOCK_BYTES];
                (blocks.crcs[i].get(), self.pages.store(data))
            }
            (Content::Data(blocks), _) => (blocks.crcs[i].get(), pages::NONE),
            (Content::Zeros, _) => (0, pages::NONE),
        };
        let extent = self.extents.get_mut(id);
        let undo = Undo::Block {
            lsn,
            extent: id,
            block: block as u16,
            known: extent.known.get(block),
            state: extent.block(block),
        };
        extent.undo += 1;
        let present = source != Source::Zeros;
        let position = if !present && is_broken(Fault::LoseDiscardPosition) {
            0
        } else {
            position
        };
        extent.set_block(
            block,
            BlockState {
                position,
                crc,
                present,
                torn: false,
                page,
            },
        );
        self.undo.push_back(undo);
    }

    fn describe_run(
        &mut self,
        apply: &Apply<'_>,
        id: u32,
        allocates: Option<u64>,
        run: std::ops::Range<usize>,
        source: Source,
    ) {
        let is_last = run.end == apply.range.count as usize;
        let crcs = match &apply.content {
            Content::Data(blocks) => &blocks.crcs[run.clone()],
            Content::Zeros => &[],
        };
        let positions = match apply.positions {
            Positions::Same(position) => Positions::Same(position),
            Positions::Each(list) => Positions::Each(&list[run.clone()]),
        };
        let out = WriteOut {
            replica: apply.replica,
            extent: apply.range.start.extent().0,
            slot: self.extents.get(id).slot,
            allocates,
            first: (apply.range.start.within_extent() as usize + run.start) as u16,
            count: run.len() as u16,
            positions,
            crcs,
            source,
            sets_last: apply.sets_last.filter(|_| is_last).map(Position::pack),
        };
        let builder = self.builder();
        out.encode(&mut builder.descriptors);
        if let (Content::Data(blocks), Source::Journal) = (&apply.content, source) {
            builder.push_data(&blocks.data[run.start * BLOCK_BYTES..run.end * BLOCK_BYTES]);
        }
    }

    /// Blocks that are written are torn no more.
    fn untear(&mut self, apply: &Apply<'_>) {
        let torn = &mut self.volume_mut(apply.replica).replica.torn;
        if !torn.is_empty() {
            torn.retain(|t| {
                let within = t.block >= apply.range.start && t.block < apply.range.end();
                !within || apply.skip.get(t.block.within_extent() as usize)
            });
        }
    }

    fn queue<D: Device>(
        &mut self,
        dev: &mut D,
        apply: Apply<'_>,
        target: Target,
        source: Source,
        announced: Announcement,
    ) {
        if let Some(last) = apply.sets_last {
            self.volume_mut(apply.replica).replica.state.last = last;
        }
        let outstanding = Outstanding {
            lsn: announced.lsn,
            token: Some(apply.token),
            reply: apply.reply,
            effect: apply.sets_last.map_or(Effect::None, Effect::Last),
            done: false,
        };
        let number = self.push_outstanding(apply.replica, outstanding, source != Source::InPlace);
        if let (Content::Data(blocks), Source::InPlace, Target::Extent { id, .. }) =
            (&apply.content, source, &target)
        {
            self.announce(
                dev,
                apply.replica,
                *id,
                apply.range,
                blocks,
                announced,
                number,
            );
        }
    }
}
