//! Home writes: what is durable in the journal goes to its place, a batch at a time, then one sync.
//!
//! A batch is composed from the durable state: [`Undo`] entries are laid over what is in memory.

use ashlar_engine::IoBuf;
use ashlar_replication::values::BLOCK_BYTES;

use super::complete::Operation;
use super::{Freed, Store, Undo};
use crate::device::{Device, Part, Persist};
use crate::format::extent_header::{self, BLOCKS, BlockMap};
use crate::format::hole_page::{self, HoleOwner};
use crate::format::page::{PAGE, PAIR, Side};
use crate::format::volume_header;
use crate::index::{IndexChange, IndexKey, IndexValue};
use crate::memory::bits::Bits;
use crate::memory::extents::{Extent, Load};
use crate::memory::table::{GROUP, NO_SLOT};
use crate::memory::{extents, pages};

/// Extents in a batch, and about how many bytes of data: a few milliseconds of a slow device, so that
/// what the shard wants to do next does not wait long.
const BATCH_EXTENTS: usize = 64;
const BATCH_BYTES: usize = 2 << 20;

/// A batch under way.
#[derive(Default)]
pub(crate) struct Home {
    writes: usize,
    extents: Vec<u32>,
    groups: Vec<(u32, u64)>,
    volumes: Vec<u32>,
    /// Extents that the batch turned into holes: out of the index when their page is there.
    converted: Vec<IndexKey>,
    /// Of [`Store::blanks`], from the front.
    blanks: usize,
}

impl Store {
    /// Bytes that the next home write would move; None while one is under way, or when so little is
    /// dirty that it is better left to gather.
    pub fn home_write_cost(&self) -> Option<u64> {
        if self.closed || self.home.is_some() {
            return None;
        }
        let dirty = self.pages.used_bytes();
        let enough = dirty > self.options.dirty_bytes_max / 4
            || self.ring.used() > self.ring.size() / 4
            || self.is_under_pressure();
        let headers = self.extents.dirty_len().min(BATCH_EXTENTS) * PAGE;
        (enough && self.has_dirty()).then_some((dirty.min(BATCH_BYTES) + headers) as u64)
    }

    /// Whether anything durable in the journal is not at home. A shard that goes down calls
    /// [`Store::start_home_write`] until this is false; the next open has nothing to recover then.
    pub fn has_dirty(&self) -> bool {
        self.extents.since_min().is_some()
            || !self.blanks.is_empty()
            || !self.dirty_groups.is_empty()
            || !self.dirty_volumes.is_empty()
    }

    /// Whether the journal or the memory for dirty data is nearly full, or extents wait to be freed on a
    /// full device: home writes come first now, and no new writes should be admitted.
    pub fn is_under_pressure(&self) -> bool {
        self.pages.used_bytes() > self.options.dirty_bytes_max
            || self.ring.used() > self.ring.size() / 2
            || self.is_journal_full()
            || self.extents.is_over_limit()
            || (self.slots.free() == 0 && self.freeing != 0)
    }

    /// Starts a home write of about [`Store::home_write_cost`] bytes. Does nothing while one is under way.
    pub fn start_home_write<D: Device>(&mut self, dev: &mut D) {
        if self.closed || self.home.is_some() {
            return;
        }
        self.home = Some(Home::default());
        self.in_place_generation += 1;
        let mut bytes = 0;
        for _ in 0..self.extents.dirty_len() {
            let full = self.batch().extents.len() >= BATCH_EXTENTS || bytes >= BATCH_BYTES;
            if full {
                break;
            }
            let Some(id) = self.extents.pop_dirty() else {
                break;
            };
            bytes += self.home_extent(dev, id);
        }
        for (replica, group) in std::mem::take(&mut self.dirty_groups) {
            self.home_group(dev, replica, group);
        }
        // The list keeps its memory: every write after a home write puts its replica on it again.
        let mut volumes = std::mem::take(&mut self.dirty_volumes);
        for replica in volumes.drain(..) {
            self.home_volume(dev, replica);
        }
        volumes.append(&mut self.dirty_volumes);
        self.dirty_volumes = volumes;
        // What was converted in this very batch included.
        for i in 0..self.blanks.len() {
            let mut buf = dev.buffer(PAIR);
            buf.fill(0);
            self.home_write(dev, self.blanks[i].0, buf, PAIR);
        }
        self.batch().blanks = self.blanks.len();
        self.home_progress(dev);
    }

    fn batch(&mut self) -> &mut Home {
        self.home.as_mut().expect("a batch is being put together")
    }

    /// Writes an extent home as far as it is durable; the bytes of data.
    fn home_extent<D: Device>(&mut self, dev: &mut D, id: u32) -> usize {
        let extent = self.extents.get(id);
        if self.extents.since(id) > self.durable || extent.in_place > 0 || extent.homing_lsn != 0 {
            self.extents.push_dirty(id);
            return 0;
        }
        if extent.load != Load::Loaded {
            self.start_load(dev, id);
            self.extents.push_dirty(id);
            return 0;
        }
        if extent.newest_durable == extent.homed {
            // What came since is not durable yet.
            let since = if extent.newest > self.durable {
                self.durable + 1
            } else {
                0
            };
            self.extents.set_since(id, since);
            return 0;
        }
        if self.turn_into_hole(id) {
            return 0;
        }
        let extent = self.extents.get_mut(id);
        let (mut map, mut data) = (extent.map.clone(), extent.pages);
        let mut undone = Bits::default();
        if extent.undo > 0 {
            for undo in self.undo.iter().rev() {
                if let Undo::Block {
                    extent,
                    block,
                    state,
                    ..
                } = undo
                    && *extent == id
                {
                    let i = usize::from(*block);
                    map.positions[i] = state.position;
                    map.crcs[i] = state.crc;
                    map.present.set(i, state.present);
                    map.torn.set(i, state.torn);
                    data[i] = state.page;
                    undone.set(i, true);
                }
            }
        }
        extent.homing_lsn = self.durable;
        extent.homed = extent.newest_durable;
        extent.homing = Bits::default();
        for (i, page) in data.iter().enumerate() {
            extent.homing.set(i, *page != pages::NONE && !undone.get(i));
        }
        self.batch().extents.push(id);
        self.write_header(dev, id, &map);
        self.write_data(dev, id, &data)
    }

    fn write_header<D: Device>(&mut self, dev: &mut D, id: u32, map: &BlockMap) {
        let extent = self.extents.get(id);
        let (within, bytes) = extent.side.next_write();
        let offset = self.layout.header_pair(extent.slot) + within;
        let mut buf = dev.buffer(bytes);
        let (device, lsn, owner) = (self.device, extent.newest_durable, extent.owner);
        extent_header::encode(&mut buf[..PAGE], device, lsn, &owner, map);
        double(&mut buf, bytes);
        self.home_write(dev, offset, buf, bytes);
    }

    /// Writes the blocks that are in memory, neighbours together.
    fn write_data<D: Device>(&mut self, dev: &mut D, id: u32, data: &[u32; BLOCKS]) -> usize {
        let slot = self.extents.get(id).slot;
        let mut total = 0;
        let mut from = 0;
        while from < BLOCKS {
            if data[from] == pages::NONE {
                from += 1;
                continue;
            }
            let run = data[from..]
                .iter()
                .take_while(|page| **page != pages::NONE)
                .count();
            let mut buf = dev.buffer(run * BLOCK_BYTES);
            for (page, out) in data[from..from + run]
                .iter()
                .zip(buf.chunks_exact_mut(BLOCK_BYTES))
            {
                out.copy_from_slice(self.pages.get(*page));
            }
            let offset = self.layout.block(slot, from as u32);
            self.home_write(dev, offset, buf, run * BLOCK_BYTES);
            total += run * BLOCK_BYTES;
            from += run;
        }
        total
    }

    fn home_write<D: Device>(&mut self, dev: &mut D, offset: u64, buf: IoBuf, bytes: usize) {
        self.batch().writes += 1;
        self.counters.home_bytes += bytes as u64;
        let token = self.operations.add(Operation::Home, bytes);
        dev.write(Part::Blocks, token, offset, buf, bytes, Persist::Cached);
    }

    /// An extent that is zeros at one position needs no slot, only its position (B1). Its slot is free
    /// once the tail has passed everything that was written to it.
    fn turn_into_hole(&mut self, id: u32) -> bool {
        let extent = self.extents.get(id);
        let quiet = extent.undo == 0 && extent.newest <= self.durable;
        // Position 0 cannot be told from "no hole", and the header of the slot would come back in a scan.
        let Some(position) = Extent::uniform_zeros(&extent.map).filter(|p| quiet && *p != 0) else {
            return false;
        };
        let (owner, slot, since) = (extent.owner, extent.slot, self.extents.since(id));
        if !self.make_hole(owner.replica, owner.extent, position, since, self.durable) {
            return false;
        }
        self.blank_header(id);
        let durable = self.durable;
        let volume = self.volume_mut(owner.replica);
        volume.table.set_slot(owner.extent, NO_SLOT);
        let entry = volume.table.entry_mut(owner.extent);
        (entry.memory, entry.lsn, entry.torn, entry.suspect) = (extents::NONE, 0, false, false);
        self.note_allocated(owner.replica);
        self.extents.remove(id);
        self.pending_free.push_back((durable, Freed::Extent(slot)));
        let key = IndexKey {
            replica: owner.replica,
            nonce: owner.nonce,
            extent: index(owner.extent),
        };
        self.batch().converted.push(key);
        true
    }

    fn home_group<D: Device>(&mut self, dev: &mut D, replica: u32, group: u64) {
        let durable = self.durable;
        let Some(volume) = self.volumes[replica as usize].as_mut() else {
            return;
        };
        let (name, nonce) = (volume.replica.volume, volume.nonce());
        let Some(state) = volume.table.groups.get_mut(&group) else {
            return;
        };
        let Some(hole) = &mut state.hole else { return };
        hole.queued = false;
        let settling = hole.settle && hole.since == 0;
        if !settling && (hole.since == 0 || hole.since > durable) {
            if hole.since != 0 {
                hole.queued = true;
                self.dirty_groups.push((replica, group));
            }
            return;
        }
        hole.settling = settling;
        let mut positions = [0; hole_page::EXTENTS];
        for (position, entry) in positions.iter_mut().zip(state.entries.iter()) {
            *position = if entry.slot == NO_SLOT {
                entry.position
            } else {
                0
            };
        }
        for undo in self.undo.iter().rev() {
            if let Undo::Hole {
                replica: r,
                extent,
                position,
                ..
            } = undo
                && *r == replica
                && extent / GROUP == group
            {
                positions[(extent % GROUP) as usize] = *position;
            }
        }
        hole.version += u64::from(!settling);
        hole.homing_lsn = durable;
        let (within, bytes) = hole.side.next_write();
        let offset = self.layout.hole_pair(hole.slot) + within;
        let owner = HoleOwner {
            volume: name,
            nonce,
            replica,
            group,
        };
        let mut buf = dev.buffer(bytes);
        let page = &mut buf[..PAGE];
        hole_page::encode(page, self.device, hole.version, durable, &owner, &positions);
        double(&mut buf, bytes);
        self.batch().groups.push((replica, group));
        self.home_write(dev, offset, buf, bytes);
    }

    fn home_volume<D: Device>(&mut self, dev: &mut D, replica: u32) {
        let durable = self.durable;
        let device = self.device;
        let Some(volume) = self.volumes[replica as usize].as_mut() else {
            return;
        };
        volume.queued = false;
        let settling = volume.settle && volume.since == 0;
        if !settling && (volume.since == 0 || volume.since > durable) {
            if volume.since != 0 {
                volume.queued = true;
                self.dirty_volumes.push(replica);
            }
            return;
        }
        volume.settling = settling;
        // Everything before the first unreported mutation is in the image, and nothing that is not durable.
        let first = volume.outstanding.front().map_or(durable + 1, |o| o.lsn);
        let horizon = first.min(durable + 1);
        volume.version += u64::from(!settling);
        volume.changed = false;
        volume.homing_horizon = horizon;
        let gone = volume.deleting && volume.outstanding.is_empty();
        let image = (!gone).then_some(&volume.durable);
        let (within, bytes) = volume.side.next_write();
        let offset = self.layout.volume_pair(replica) + within;
        let mut buf = dev.buffer(bytes);
        let page = &mut buf[..PAGE];
        volume_header::encode_page(page, device, volume.version, horizon - 1, image);
        double(&mut buf, bytes);
        self.batch().volumes.push(replica);
        self.home_write(dev, offset, buf, bytes);
    }

    pub(super) fn home_written<D: Device>(&mut self, dev: &mut D, buf: Option<IoBuf>) {
        if let Some(buf) = buf {
            dev.recycle(buf);
        }
        self.batch().writes -= 1;
        self.home_progress(dev);
    }

    fn home_progress<D: Device>(&mut self, dev: &mut D) {
        let batch = self.batch();
        if batch.writes > 0 {
            return;
        }
        let empty = batch.extents.is_empty()
            && batch.groups.is_empty()
            && batch.volumes.is_empty()
            && batch.blanks == 0;
        if empty {
            self.home = None;
            return;
        }
        let token = self.operations.add(Operation::HomeSync, 0);
        dev.sync(Part::Blocks, token);
    }

    /// Everything in the batch is durable at home.
    pub(super) fn home_synced<D: Device>(&mut self, dev: &mut D) {
        let batch = self.home.take().expect("a batch is under way");
        self.in_place_generation += 1;
        for id in batch.extents {
            self.extent_homed(id);
        }
        for (replica, group) in batch.groups {
            self.group_homed(replica, group);
        }
        self.index_changes
            .extend(batch.converted.into_iter().map(IndexChange::Remove));
        self.blanks.drain(..batch.blanks);
        for replica in batch.volumes {
            self.volume_homed(replica);
        }
        self.start_larges(dev);
        self.advance_checkpoint(dev);
    }

    fn extent_homed(&mut self, id: u32) {
        let extent = self.extents.get_mut(id);
        let durable = std::mem::take(&mut extent.homing_lsn);
        let lsn = extent.homed;
        if extent.orphan {
            if extent.load != Load::Loading {
                self.extents.remove(id);
            }
            return;
        }
        for i in std::mem::take(&mut extent.homing).iter() {
            self.pages
                .free(std::mem::replace(&mut extent.pages[i], pages::NONE));
        }
        extent.side = extent.side.after_write();
        let (owner, slot, newest) = (extent.owner, extent.slot, extent.newest);
        let torn = !extent.map.torn.is_empty();
        self.extents
            .set_since(id, if newest > durable { durable + 1 } else { 0 });
        let entry = self.volume_mut(owner.replica).table.entry_mut(owner.extent);
        (entry.lsn, entry.torn, entry.suspect) = (lsn, torn, false);
        let key = IndexKey {
            replica: owner.replica,
            nonce: owner.nonce,
            extent: index(owner.extent),
        };
        let value = IndexValue {
            slot,
            position_max: entry.position,
            lsn,
            torn,
        };
        self.index_changes.push(IndexChange::Put(key, value));
    }

    fn group_homed(&mut self, replica: u32, group: u64) {
        let Some(volume) = self.volumes[replica as usize].as_mut() else {
            return;
        };
        let Some(state) = volume.table.groups.get_mut(&group) else {
            return;
        };
        let Some(hole) = &mut state.hole else { return };
        let lsn = std::mem::take(&mut hole.homing_lsn);
        let both = hole.side == Side::Neither;
        hole.side = hole.side.after_write();
        hole.settle = !both && !hole.settling;
        hole.since = if hole.newest > lsn { lsn + 1 } else { 0 };
        let empty = state
            .entries
            .iter()
            .all(|e| e.slot != NO_SLOT || e.position == 0);
        if hole.since != 0 || hole.settle {
            if !std::mem::replace(&mut hole.queued, true) {
                self.dirty_groups.push((replica, group));
            }
        } else if empty {
            // Both pages say so: nothing comes back when the pair is used for another group.
            self.holes.release(hole.slot);
            state.hole = None;
        }
    }

    fn volume_homed(&mut self, replica: u32) {
        let Some(volume) = self.volumes[replica as usize].as_mut() else {
            return;
        };
        let both = volume.side == Side::Neither;
        volume.side = volume.side.after_write();
        volume.settle = !both && !volume.settling;
        let more = volume.changed || !volume.outstanding.is_empty();
        volume.since = if more { volume.homing_horizon } else { 0 };
        if (volume.since != 0 || volume.settle) && !std::mem::replace(&mut volume.queued, true) {
            self.dirty_volumes.push(replica);
        }
    }
}

fn index(extent: u64) -> ashlar_replication::values::ExtentIndex {
    ashlar_replication::values::ExtentIndex(extent)
}

/// Copies the first page of a pair to the second where both are written.
fn double(buf: &mut [u8], bytes: usize) {
    if bytes == PAIR {
        let (a, b) = buf.split_at_mut(PAGE);
        b[..PAGE].copy_from_slice(a);
    }
}
