//! Deciding what became of writes that were announced and not carried out for certain.

use std::collections::BTreeMap;

use ashlar_engine::IoBuf;
use ashlar_replication::values::{Block, BlockRange, ExtentIndex, Position};

use super::super::Store;
use super::{BlockKey, Event, RecoverError, Replay};
use crate::device::{Device, Part};
use crate::faults::{Fault, is_broken};
use crate::format::extent_header::BLOCKS;
use crate::format::page::PAGE;
use crate::journal::descriptor::Announcement;
use crate::memory::extents::BlockState;
use crate::memory::pages;

impl Store {
    /// Decides what became of blocks that were to be written in place. Returns those that hold less than
    /// the newest announcement, with the descriptor of what they hold or are certain to have held.
    pub(super) fn resolve_candidates<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
    ) -> Result<BTreeMap<BlockKey, u64>, RecoverError> {
        let mut not_held = BTreeMap::new();
        let mut content = IoBuf::new(PAGE);
        for (key, candidates) in std::mem::take(&mut replay.candidates) {
            let (replica, extent, block) = key;
            let id = self.extent_memory(replica, extent);
            let block = usize::from(block);
            let offset = self.layout.block(self.extents.get(id).slot, block as u32);
            dev.read_blocking(Part::Blocks, offset, &mut content)?;
            let crc = crc32c::crc32c(&content);
            let newest = candidates.last().expect("a list is never empty");
            let before = self.extents.get(id).block(block);
            let in_place = |position| BlockState {
                position,
                crc,
                present: true,
                torn: false,
                page: pages::NONE,
            };
            if let Some(place) = candidates.iter().rposition(|c| c.crc == crc) {
                let found = &candidates[place];
                let start = Block(ExtentIndex(extent).first_block().0 + block as u64);
                let announced = Announcement {
                    lsn: found.lsn,
                    at: found.at,
                };
                self.note_recovered(replica, BlockRange { start, count: 1 }, announced);
                self.replace_block(id, block, in_place(found.position));
                let certain = replay.certain.entry((replica, extent));
                certain.or_insert_with(|| Box::new([0; BLOCKS]))[block] = found.order;
                if found.order < newest.order {
                    not_held.insert(key, found.order);
                }
                continue;
            }
            let certain = replay
                .certain
                .get(&(replica, extent))
                .map_or(0, |c| c[block]);
            not_held.insert(key, certain);
            // Zeros need nothing from the device, and data from the journal is in memory.
            let intact = !before.present || before.page != pages::NONE || before.crc == crc;
            if !intact {
                let torn = BlockState {
                    torn: !is_broken(Fault::ReuseTornPosition),
                    ..in_place(newest.position)
                };
                self.replace_block(id, block, torn);
            }
        }
        Ok(not_held)
    }

    /// Moves `last` of each replica as far as the writes before it are held. Returns those where
    /// that is less than the journal has.
    pub(super) fn settle_last(
        &mut self,
        replay: &Replay,
        not_held: &BTreeMap<BlockKey, u64>,
    ) -> Vec<u32> {
        let mut truncated = Vec::new();
        for (replica, events) in &replay.events {
            let Some(volume) = self.volumes[*replica as usize].as_mut() else {
                continue;
            };
            let mut last = volume.durable.state.last;
            let mut stopped = false;
            for event in events {
                match event {
                    Event::Explicit(position) => (last, stopped) = (*position, false),
                    _ if stopped => {}
                    Event::Write { position } => last = Position::unpack(*position),
                    Event::Announced {
                        position,
                        order,
                        extent,
                        first,
                        count,
                    } => {
                        let certain = replay.certain.get(&(*replica, *extent));
                        let held = (*first..first + count).all(|block| {
                            let key = (*replica, *extent, block as u16);
                            let doubted = replay.decided.contains(&key);
                            let certain = certain.map_or(0, |c| c[block]);
                            let holds = not_held.get(&key).copied().or(doubted.then_some(certain));
                            holds.is_none_or(|holds| holds.max(certain) >= *order)
                        });
                        if held {
                            last = Position::unpack(*position);
                        } else {
                            stopped = true;
                        }
                    }
                }
            }
            volume.durable.state.last = last;
            if stopped {
                truncated.push(*replica);
            }
        }
        truncated
    }
}
