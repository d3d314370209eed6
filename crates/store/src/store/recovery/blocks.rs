//! Applying what records say of blocks.

use ashlar_engine::IoBuf;

use super::super::Store;
use super::super::load::HeaderFound;
use super::{BlockKey, Candidate, Event, RecoverError, Replay, impossible};
use crate::device::{Device, Part};
use crate::format::extent_header::{self, BLOCKS, BlockMap};
use crate::format::page::{PAGE, PAIR, Pair, Side};
use crate::journal::descriptor::{Announcement, Source, WriteIn};
use crate::memory::extents::{BlockState, Load};
use crate::memory::pages;
use crate::memory::table::{GROUP, NO_SLOT};

impl Store {
    pub(super) fn replay_write<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
        write: &WriteIn,
        data: &[u8],
        lsn: u64,
    ) -> Result<(), RecoverError> {
        let replica = write.replica;
        replay.zeros |= write.source == Source::Zeros;
        if write.allocates.is_some() {
            replay.allocated.insert(write.slot);
        }
        if write.slot != NO_SLOT {
            replay.slots.insert(write.slot);
        }
        if self.volumes[replica as usize]
            .as_ref()
            .is_none_or(|v| v.deleting)
        {
            // Deleted further on, and its header is free already.
            return Ok(());
        }
        let in_header = replay
            .findings
            .header_lsn
            .get(&replica)
            .is_some_and(|h| lsn <= *h);
        if let Some(position) = write.sets_last.filter(|_| !in_header) {
            let (extent, first, count) = (write.extent, write.first, write.positions.len());
            let event = match write.source {
                Source::InPlace => Event::Announced {
                    position,
                    order: replay.order,
                    extent,
                    first,
                    count,
                },
                Source::Journal | Source::Zeros => Event::Write { position },
            };
            replay.events.entry(replica).or_default().push(event);
            self.touch_volume(replica, lsn);
        }
        if write.positions.is_empty() {
            return Ok(());
        }
        if write.slot == NO_SLOT {
            return self.replay_hole(replay, write, lsn);
        }
        if write.slot >= self.layout.extents {
            return Err(impossible(lsn));
        }
        let id = self.replay_extent(dev, replay, write, lsn)?;
        self.replay_blocks(replay, write, id, data, lsn);
        let max = write.positions.iter().copied().max().unwrap_or(0);
        let entry = self.volume_mut(replica).table.entry_mut(write.extent);
        entry.position = entry.position.max(max);
        self.extents.mark_dirty(id, lsn);
        self.extents.get_mut(id).newest_durable = lsn;
        Ok(())
    }

    /// Finds or makes the extent that a record writes to, as it was before.
    pub(super) fn replay_extent<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
        write: &WriteIn,
        lsn: u64,
    ) -> Result<u32, RecoverError> {
        let (replica, extent, slot) = (write.replica, write.extent, write.slot);
        let entry = self.volume_mut(replica).table.get(extent);
        if entry.slot == slot && write.allocates.is_none() {
            let id = self.extent_memory(replica, extent);
            if self.extents.get(id).load != Load::Loaded {
                self.load_blocking(dev, replay, id)?;
            }
            return Ok(id);
        }
        self.drop_extent(replay, replica, extent);
        self.volume_mut(replica).table.set_slot(extent, slot);
        let id = self.extent_memory(replica, extent);
        let mut pair_bytes = IoBuf::new(PAIR);
        dev.read_blocking(Part::Blocks, self.layout.header_pair(slot), &mut pair_bytes)?;
        let pair = Pair::examine(&pair_bytes, extent_header::MAGIC, self.device);
        let owner = self.extents.get(id).owner;
        let own = pair
            .page(&pair_bytes)
            .filter(|page| extent_header::owner(page) == owner);
        match write.allocates {
            Some(base) => {
                // Everything before it, and not yet what it writes itself.
                let before = replay.order - 1;
                replay
                    .certain
                    .insert((replica, extent), Box::new([before; BLOCKS]));
                self.extents.get_mut(id).reset_to_zeros(base);
                self.volume_mut(replica).table.entry_mut(extent).position = base;
                // A newer page may call it a hole again, whatever it was at the time.
                self.touch_group(replica, extent / GROUP, lsn, lsn);
                // A header of this very life of the slot.
                if let Some(page) = own.filter(|_| pair.lsn >= lsn) {
                    let map = extent_header::block_map(page);
                    replay.bases.insert((replica, extent), (pair.lsn, map));
                    self.extents.get_mut(id).side = pair.side;
                }
            }
            // It became a hole, or moved to another slot, further on: only that end matters.
            None if entry.slot != NO_SLOT || entry.position != 0 => {
                let position = if entry.slot == NO_SLOT {
                    entry.position
                } else {
                    0
                };
                self.extents.get_mut(id).reset_to_zeros(position);
                self.extents.get_mut(id).side = pair.side;
                if position != 0 {
                    self.touch_group(replica, extent / GROUP, lsn, lsn);
                }
            }
            // Its header is gone.
            None => self.take_header(id, &BlockMap::lost(), Side::Neither),
        }
        Ok(id)
    }

    pub(super) fn load_blocking<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
        id: u32,
    ) -> Result<(), RecoverError> {
        let extent = self.extents.get(id);
        let (owner, slot) = (extent.owner, extent.slot);
        let mut pair_bytes = IoBuf::new(PAIR);
        dev.read_blocking(Part::Blocks, self.layout.header_pair(slot), &mut pair_bytes)?;
        let pair = Pair::examine(&pair_bytes, extent_header::MAGIC, self.device);
        // A home write since the tail may have been torn: the journal has what is missing.
        let volume = self.volume_mut(owner.replica);
        volume.table.entry_mut(owner.extent).suspect = false;
        match self.examine_header(id, &pair_bytes) {
            HeaderFound::Good(map, side) => {
                replay
                    .bases
                    .insert((owner.replica, owner.extent), (pair.lsn, (*map).clone()));
                self.take_header(id, &map, side);
            }
            HeaderFound::Damaged(side) => self.take_header(id, &BlockMap::lost(), side),
            HeaderFound::IndexWrong => return Err(RecoverError::IndexWrong),
        }
        Ok(())
    }

    pub(super) fn replay_blocks(
        &mut self,
        replay: &mut Replay,
        write: &WriteIn,
        id: u32,
        data: &[u8],
        lsn: u64,
    ) {
        let base = replay.bases.get(&(write.replica, write.extent));
        for (i, position) in write.positions.iter().copied().enumerate() {
            let block = write.first + i;
            let key = (write.replica, write.extent, block as u16);
            let mut is_certain = true;
            let state = match write.source {
                Source::Zeros => BlockState::zeros(position),
                Source::Journal => BlockState {
                    position,
                    crc: write.crcs[i],
                    present: true,
                    torn: false,
                    page: self.pages.store(&data[i * PAGE..(i + 1) * PAGE]),
                },
                Source::InPlace => match base {
                    // The header was written after this had been carried out, or decided on by an
                    // earlier recovery.
                    Some((base_lsn, map)) if *base_lsn >= lsn => {
                        let decided = BlockState::at_home(map, block);
                        let now = self.extents.get(id).block(block);
                        let wanted = (position, write.crcs[i], false);
                        if (decided.position, decided.crc, decided.torn) != wanted {
                            // Or it was overwritten, by a record that comes later here.
                            replay.decided.insert(key);
                            is_certain = false;
                            let unchanged = BlockState {
                                page: pages::NONE,
                                ..now
                            };
                            if decided == unchanged {
                                // What the journal holds, which may not have got home.
                                continue;
                            }
                        }
                        decided
                    }
                    _ => {
                        let (at, order, crc) = (replay.at, replay.order, write.crcs[i]);
                        let candidate = Candidate {
                            lsn,
                            at,
                            order,
                            position,
                            crc,
                        };
                        replay.candidates.entry(key).or_default().push(candidate);
                        continue;
                    }
                },
            };
            replay.candidates.remove(&key);
            if is_certain {
                let certain = replay.certain.entry((write.replica, write.extent));
                certain.or_insert_with(|| Box::new([0; BLOCKS]))[block] = replay.order;
            }
            self.replace_block(id, block, state);
        }
    }

    /// An announced write is known to be complete, and so is what was announced before it for the block.
    pub(super) fn replay_in_place(
        &mut self,
        replay: &mut Replay,
        key: BlockKey,
        announced: Announcement,
    ) {
        let Some(list) = replay.candidates.get_mut(&key) else {
            return;
        };
        let Some(place) = list
            .iter()
            .position(|c| (c.lsn, c.at) == (announced.lsn, announced.at))
        else {
            return;
        };
        let found = list.drain(..=place).next_back().expect("it was found");
        if list.is_empty() {
            replay.candidates.remove(&key);
        }
        let (replica, extent, block) = key;
        let block = usize::from(block);
        let certain = replay.certain.entry((replica, extent));
        certain.or_insert_with(|| Box::new([0; BLOCKS]))[block] = found.order;
        let id = self.extent_memory(replica, extent);
        let state = BlockState {
            position: found.position,
            crc: found.crc,
            present: true,
            torn: false,
            page: pages::NONE,
        };
        self.replace_block(id, block, state);
    }

    pub(super) fn replace_block(&mut self, id: u32, block: usize, state: BlockState) {
        let extent = self.extents.get_mut(id);
        self.pages.free(extent.pages[block]);
        extent.set_block(block, state);
    }
}
