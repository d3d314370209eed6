//! The second half of open: what the journal says is applied again, in order, on top of the headers.
//!
//! Headers may be older or newer than a record, and a newer header may stand before data that never
//! reached its place. Applying every record again from the tail on gives the right end in each case,
//! because each block ends with what the last record says of it. Only data that was to be written in place
//! has to be looked at: see [`Candidate`].

use std::collections::{BTreeMap, BTreeSet};

use ashlar_engine::IoBuf;
use ashlar_replication::message::BlockPosition;
use ashlar_replication::values::{Block, BlockRange, DeviceId, ExtentIndex, Position};

use super::load::HeaderFound;
use super::replicas::Volume;
use super::{Freed, Store};
use crate::OpenError;
use crate::device::{Device, Part};
use crate::format::extent_header::{self, BLOCKS, BlockMap};
use crate::format::hole_page::{self, HoleOwner};
use crate::format::page::{PAGE, PAIR, Pair, Side};
use crate::format::volume_header::VolumeImage;
use crate::journal::descriptor::{Announcement, Descriptor, ImageKind, Source, WriteIn};
use crate::journal::record::{self, RECORD_BYTES_MAX};
use crate::memory::extents::{self, BlockState, Load};
use crate::memory::pages;
use crate::memory::slots::Slots;
use crate::memory::table::{GROUP, NO_SLOT, Table};

/// A hole page as it was found.
pub(crate) struct HolePage {
    pub slot: u32,
    pub pair: Pair,
    pub owner: HoleOwner,
    pub positions: Box<[u64; hole_page::EXTENTS]>,
}

/// What the headers showed.
#[derive(Default)]
pub(crate) struct Findings {
    pub checkpoint_damaged: bool,
    /// Records up to this one are in the volume header.
    pub header_lsn: BTreeMap<u32, u64>,
    /// The highest record that any page includes.
    pub lsn_max: u64,
    pub unreadable_holes: Vec<u32>,
    /// Pages of replicas that are not there, newer than the tail. Their slots are not free.
    pub loose_holes: Vec<HolePage>,
    pub unreadable_headers: Vec<u32>,
}

/// Why recovery did not come to an end.
pub(crate) enum RecoverError {
    IndexWrong,
    Open(OpenError),
}

impl RecoverError {
    pub(crate) fn into_open(self) -> OpenError {
        match self {
            RecoverError::Open(error) => error,
            // After a scan the table comes from the headers themselves.
            RecoverError::IndexWrong => OpenError::JournalDamaged {
                sequence: 0,
                reason: "a header changed during the scan",
            },
        }
    }
}

impl From<OpenError> for RecoverError {
    fn from(error: OpenError) -> RecoverError {
        RecoverError::Open(error)
    }
}

impl From<std::io::Error> for RecoverError {
    fn from(error: std::io::Error) -> RecoverError {
        RecoverError::Open(error.into())
    }
}

/// (replica, extent, block in the extent)
type BlockKey = (u32, u64, u16);

/// What an announced write would have made of a block. The newest candidate whose CRC matches what is on
/// the device is what the block is; else the state before all of them, where that is known to be intact;
/// else the block is torn (B2).
struct Candidate {
    lsn: u64,
    /// Offset of the descriptor in its record.
    at: u64,
    /// Place of the descriptor among all that recovery applies.
    order: u64,
    position: u64,
    crc: u32,
}

/// What moves `last` of a replica.
enum Event {
    Write {
        position: u64,
    },
    /// Counts only if every block of it holds it or something later.
    Announced {
        position: u64,
        order: u64,
        extent: u64,
        first: usize,
        count: usize,
    },
    Explicit(Position),
}

#[derive(Default)]
struct Replay {
    findings: Findings,
    /// Headers as they were on the device, by (replica, extent): the record that they include, and what they say.
    bases: BTreeMap<(u32, u64), (u64, BlockMap)>,
    candidates: BTreeMap<BlockKey, Vec<Candidate>>,
    events: BTreeMap<u32, Vec<Event>>,
    /// Descriptors applied so far.
    order: u64,
    /// Offset in its record of the one that is being applied.
    at: u64,
    /// Per block of an extent: the last descriptor whose effect is certain.
    certain: BTreeMap<(u32, u64), Box<[u64; BLOCKS]>>,
    /// Slots that records name: not free before the tail has passed them.
    slots: BTreeSet<u32>,
    allocated: BTreeSet<u32>,
    /// A record wrote zeros, so that hole pages may have been written.
    zeros: bool,
    /// Blocks where an earlier recovery decided against an announced write.
    decided: BTreeSet<BlockKey>,
}

impl Store {
    pub(super) fn recover<D: Device>(
        &mut self,
        dev: &mut D,
        findings: Findings,
    ) -> Result<(), RecoverError> {
        let mut replay = Replay {
            findings,
            ..Replay::default()
        };
        self.read_journal(dev, &mut replay)?;
        let damaged = |sequence, reason| OpenError::JournalDamaged { sequence, reason };
        let next = self.ring.lsn() + 1;
        if replay.findings.checkpoint_damaged && next == self.tail {
            // A torn checkpoint page was about records after the older one.
            return Err(damaged(
                next,
                "the checkpoint page that tells where it lies is damaged",
            )
            .into());
        }
        let newest = replay
            .findings
            .header_lsn
            .values()
            .copied()
            .max()
            .unwrap_or(0);
        if newest.max(replay.findings.lsn_max) >= next {
            return Err(
                damaged(next, "headers include records that are not in the journal").into(),
            );
        }
        self.durable = self.ring.lsn();
        let not_held = self.resolve_candidates(dev, &mut replay)?;
        let truncated = self.settle_last(&replay, &not_held);
        self.settle_slots(dev, &replay)?;

        self.collect_torn(dev)?;
        for replica in truncated {
            // What was decided here must not be decided differently after the next crash.
            let image = self.volume_mut(replica).submitted_image();
            self.journal_image(dev, None, replica, image, ImageKind::SetsLast);
        }
        Ok(())
    }

    fn read_journal<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
    ) -> Result<(), RecoverError> {
        let mut buf = IoBuf::new(RECORD_BYTES_MAX);
        while let Some((offset, header)) = self.find_record(dev, &mut buf)? {
            let Some(record) = record::decode(&header, &buf) else {
                break;
            };
            for (descriptor, first, at) in &record.descriptors {
                replay.at = *at;
                let data = &record.data[first * PAGE..];
                self.replay(dev, replay, descriptor, data, header.lsn)?;
            }
            self.ring
                .found(header.lsn, offset, header.bytes as u64, header.crc);
        }
        self.look_for_later_records(dev, &mut buf)
    }

    /// Reads the next record into `buf`.
    fn find_record<D: Device>(
        &mut self,
        dev: &mut D,
        buf: &mut IoBuf,
    ) -> Result<Option<(u64, record::RecordHeader)>, RecoverError> {
        let part = self.journal_part();
        let (head, size) = (self.ring.head(), self.ring.size());
        for offset in [head, 0] {
            if offset + PAGE as u64 > size || (offset == 0 && head == 0 && self.ring.used() > 0) {
                continue;
            }
            let at = self.layout.ring_offset() + offset;
            dev.read_blocking(part, at, &mut buf[..PAGE])?;
            let Some(header) = record::decode_header(&buf[..PAGE], self.device) else {
                continue;
            };
            let fits = offset + header.bytes as u64 <= size;
            let wrapped = offset == head || head + header.bytes as u64 > size;
            let next = header.lsn == self.ring.lsn() + 1 && header.previous_crc == self.ring.crc();
            if next && fits && wrapped && self.ring.has_room(header.bytes as u64) {
                dev.read_blocking(part, at, &mut buf[..header.bytes])?;
                return Ok(Some((offset, header)));
            }
        }
        Ok(None)
    }

    /// Only one record is ever in flight, so nothing can follow one that a crash tore. A later record behind the end
    /// means that one which was durable cannot be read any more.
    fn look_for_later_records<D: Device>(
        &mut self,
        dev: &mut D,
        buf: &mut IoBuf,
    ) -> Result<(), RecoverError> {
        let part = self.journal_part();
        let (head, size) = (self.ring.head(), self.ring.size());
        for start in [head, 0] {
            for offset in [start, start + RECORD_BYTES_MAX as u64] {
                let bytes = size.saturating_sub(offset).min(RECORD_BYTES_MAX as u64) as usize;
                if bytes == 0 {
                    continue;
                }
                dev.read_blocking(part, self.layout.ring_offset() + offset, &mut buf[..bytes])?;
                for page in buf[..bytes].chunks_exact(PAGE) {
                    let header = record::decode_header(page, self.device);
                    if header.is_some_and(|header| header.lsn > self.ring.lsn() + 1) {
                        let reason = "later records follow it";
                        let sequence = self.ring.lsn() + 1;
                        return Err(OpenError::JournalDamaged { sequence, reason }.into());
                    }
                }
            }
        }
        Ok(())
    }

    fn replay<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
        descriptor: &Descriptor,
        data: &[u8],
        lsn: u64,
    ) -> Result<(), RecoverError> {
        replay.order += 1;
        let (Descriptor::Write(WriteIn { replica, .. })
        | Descriptor::Image { replica, .. }
        | Descriptor::Delete { replica }
        | Descriptor::InPlace { replica, .. }) = descriptor;
        if *replica >= self.layout.replicas {
            return Err(impossible(lsn));
        }
        match descriptor {
            Descriptor::Write(write) => self.replay_write(dev, replay, write, data, lsn),
            Descriptor::Image {
                replica,
                kind,
                image,
            } => {
                self.replay_image(replay, *replica, *kind, image, lsn);
                Ok(())
            }
            Descriptor::Delete { replica } => {
                self.replay_delete(replay, *replica, lsn);
                Ok(())
            }
            Descriptor::InPlace {
                replica,
                extent,
                first,
                count,
                announced,
            } => {
                for block in *first..first + count {
                    let key = (*replica, *extent, block as u16);
                    self.replay_in_place(replay, key, *announced);
                }
                Ok(())
            }
        }
    }

    /// Notes that record `lsn` changed the header of a replica.
    fn touch_volume(&mut self, replica: u32, lsn: u64) {
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        if volume.since == 0 {
            volume.since = lsn;
        }
        if !std::mem::replace(&mut volume.queued, true) {
            self.dirty_volumes.push(replica);
        }
    }

    fn replay_image(
        &mut self,
        replay: &mut Replay,
        replica: u32,
        kind: ImageKind,
        image: &VolumeImage,
        lsn: u64,
    ) {
        let nonce = image.state.id.nonce;
        let known = self.volumes[replica as usize]
            .as_ref()
            .is_some_and(|v| v.nonce() == nonce);
        if known
            && replay
                .findings
                .header_lsn
                .get(&replica)
                .is_some_and(|header| lsn <= *header)
        {
            return;
        }
        if !known {
            if kind != ImageKind::Creates {
                // Deleted further on, and its header is free already.
                return;
            }
            self.drop_table(replay, replica, lsn);
            let mut volume = Volume::new(image.clone());
            (volume.side, volume.version) = self.header_sides[replica as usize];
            self.volumes[replica as usize] = Some(volume);
            let mut loose = std::mem::take(&mut replay.findings.loose_holes);
            loose.retain(|page| !self.attach_hole(page));
            replay.findings.loose_holes = loose;
            replay.findings.header_lsn.remove(&replica);
            replay.events.remove(&replica);
        }
        let volume = self.volume_mut(replica);
        let last = volume.durable.state.last;
        volume.durable = image.clone();
        volume.durable.state.last = last;
        if kind != ImageKind::KeepsLast {
            let event = Event::Explicit(image.state.last);
            replay.events.entry(replica).or_default().push(event);
        }
        self.touch_volume(replica, lsn);
    }

    fn replay_delete(&mut self, replay: &mut Replay, replica: u32, lsn: u64) {
        self.drop_table(replay, replica, lsn);
        if self.volumes[replica as usize].is_none() {
            // The header is free already. The slot is not, until the tail has passed: records before this one
            // name it.
            let mut volume = Volume::new(placeholder(self.device));
            (volume.side, volume.version) = self.header_sides[replica as usize];
            self.volumes[replica as usize] = Some(volume);
        }
        replay.events.remove(&replica);
        let volume = self.volume_mut(replica);
        volume.deleting = true;
        volume.since = if volume.since == 0 { lsn } else { volume.since };
        self.touch_volume(replica, lsn);
        self.pending_free.push_back((lsn, Freed::Volume(replica)));
    }

    /// Forgets the extents of a replica.
    fn drop_table(&mut self, replay: &mut Replay, replica: u32, lsn: u64) {
        let Some(volume) = self.volumes[replica as usize].as_mut() else {
            return;
        };
        let table: Table = std::mem::take(&mut volume.table);
        for group in table.groups.values() {
            if let Some(hole) = group.hole {
                self.pending_free.push_back((lsn, Freed::Hole(hole.slot)));
            }
            for entry in group.entries.iter() {
                if entry.slot != NO_SLOT {
                    replay.slots.insert(entry.slot);
                }
                if entry.memory != extents::NONE {
                    self.drop_memory(entry.memory);
                }
            }
        }
        self.dirty_groups.retain(|(r, _)| *r != replica);
        replay.candidates.retain(|(r, _, _), _| *r != replica);
        replay.certain.retain(|(r, _), _| *r != replica);
        replay.bases.retain(|(r, _), _| *r != replica);
    }

    /// Forgets what is known of an extent.
    fn drop_extent(&mut self, replay: &mut Replay, replica: u32, extent: u64) {
        let entry = self.volume_mut(replica).table.entry_mut(extent);
        let memory = std::mem::replace(&mut entry.memory, extents::NONE);
        if entry.slot != NO_SLOT {
            replay.slots.insert(entry.slot);
        }
        if memory != extents::NONE {
            self.drop_memory(memory);
        }
        replay.bases.remove(&(replica, extent));
        let blocks = (replica, extent, 0)..=(replica, extent, u16::MAX);
        let stale: Vec<BlockKey> = replay.candidates.range(blocks).map(|(k, _)| *k).collect();
        for key in stale {
            replay.candidates.remove(&key);
        }
    }

    fn replay_write<D: Device>(
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

    fn replay_hole(
        &mut self,
        replay: &mut Replay,
        write: &WriteIn,
        lsn: u64,
    ) -> Result<(), RecoverError> {
        self.drop_extent(replay, write.replica, write.extent);
        self.volume_mut(write.replica)
            .table
            .set_slot(write.extent, NO_SLOT);
        let certain = Box::new([replay.order; BLOCKS]);
        replay
            .certain
            .insert((write.replica, write.extent), certain);
        let position = write.positions[0];
        if !self.make_hole(write.replica, write.extent, position, lsn, lsn) {
            return Err(OpenError::JournalDamaged {
                sequence: lsn,
                reason: "it needs a hole page, and all are in use",
            }
            .into());
        }
        Ok(())
    }

    /// Finds or makes the extent that a record writes to, as it was before.
    fn replay_extent<D: Device>(
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

    fn load_blocking<D: Device>(
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
                    .insert((owner.replica, owner.extent), (pair.lsn, map.clone()));
                self.take_header(id, &map, side);
            }
            HeaderFound::Damaged(side) => self.take_header(id, &BlockMap::lost(), side),
            HeaderFound::IndexWrong => return Err(RecoverError::IndexWrong),
        }
        Ok(())
    }

    fn replay_blocks(
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
                        let decided = BlockState {
                            position: map.positions[block],
                            crc: map.crcs[block],
                            present: map.present.get(block),
                            torn: map.torn.get(block),
                            page: pages::NONE,
                        };
                        let now = self.extents.get(id).block(block);
                        let wanted = (position, write.crcs[i], false);
                        if (decided.position, decided.crc, decided.torn) != wanted {
                            // Or it was overwritten, by a record that comes later here.
                            replay.decided.insert(key);
                            is_certain = false;
                            if decided
                                == (BlockState {
                                    page: pages::NONE,
                                    ..now
                                })
                            {
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
    fn replay_in_place(&mut self, replay: &mut Replay, key: BlockKey, announced: Announcement) {
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

    fn replace_block(&mut self, id: u32, block: usize, state: BlockState) {
        let extent = self.extents.get_mut(id);
        self.pages.free(extent.pages[block]);
        extent.set_block(block, state);
    }

    /// Decides what became of blocks that were to be written in place. Returns those that hold less than
    /// the newest announcement, with the descriptor of what they hold or are certain to have held.
    fn resolve_candidates<D: Device>(
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
                    torn: true,
                    ..in_place(newest.position)
                };
                self.replace_block(id, block, torn);
            }
        }
        Ok(not_held)
    }

    /// Moves `last` of each replica as far as the writes before it are held. Returns those where
    /// that is less than the journal has.
    fn settle_last(&mut self, replay: &Replay, not_held: &BTreeMap<BlockKey, u64>) -> Vec<u32> {
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

    /// Counts slots again, and makes what was recovered what was submitted.
    fn settle_slots<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &Replay,
    ) -> Result<(), RecoverError> {
        let unreadable = |what, slot: &u32| OpenError::HeaderDamaged {
            what,
            number: *slot,
            reason: "neither of its pages can be read, and the journal does not say what it held",
        };
        let lost = replay
            .findings
            .unreadable_headers
            .iter()
            .find(|s| !replay.allocated.contains(s));
        if let Some(slot) = lost {
            return Err(unreadable("extent header", slot).into());
        }
        // What was dropped on the way may be in use again at the end.
        self.blanks.clear();
        self.slots = Slots::new(self.layout.extents);

        let mut owned_holes = BTreeSet::new();
        for slot in 0..self.layout.replicas {
            let Some(volume) = self.volumes[slot as usize].as_mut() else {
                continue;
            };
            for group in volume.table.groups.values() {
                owned_holes.extend(group.hole.map(|hole| hole.slot));

                for entry in group.entries.iter().filter(|e| e.slot != NO_SLOT) {
                    self.slots.take(entry.slot);
                }
            }
            let header = volume.durable.clone();
            let table = std::mem::take(&mut volume.table);
            volume.replica = Volume::new(header).replica;
            volume.table = table;
            volume.replica.allocated_extents = volume.table.allocated;
            if !volume.deleting {
                self.by_volume.insert(volume.replica.volume, slot);
            }
        }
        for page in &replay.findings.loose_holes {
            self.pending_free
                .push_back((self.durable, Freed::Hole(page.slot)));
        }
        for slot in &replay.findings.unreadable_holes {
            if !replay.zeros {
                return Err(unreadable("hole page", slot).into());
            }
            if !owned_holes.contains(slot) {
                self.blanks.push((self.layout.hole_pair(*slot), self.tail));
                if self.holes.take(*slot) {
                    self.pending_free
                        .push_back((self.durable, Freed::Hole(*slot)));
                }
            }
        }
        for slot in &replay.slots {
            if *slot < self.layout.extents && self.slots.take(*slot) {
                self.pending_free
                    .push_back((self.durable, Freed::Extent(*slot)));
                self.blank_if_unreadable(dev, *slot)?;
            }
        }
        Ok(())
    }

    /// A slot that a record names and nobody owns any more: its header may have been torn.
    fn blank_if_unreadable<D: Device>(
        &mut self,
        dev: &mut D,
        slot: u32,
    ) -> Result<(), RecoverError> {
        let mut pair_bytes = IoBuf::new(PAIR);
        let offset = self.layout.header_pair(slot);
        dev.read_blocking(Part::Blocks, offset, &mut pair_bytes)?;
        let pair = Pair::examine(&pair_bytes, extent_header::MAGIC, self.device);
        if pair.damaged && pair.side == Side::Neither {
            self.blanks.push((offset, self.tail));
        }
        Ok(())
    }

    /// Lists the torn blocks of every replica.
    fn collect_torn<D: Device>(&mut self, dev: &mut D) -> Result<(), RecoverError> {
        for replica in 0..self.layout.replicas {
            let Some(volume) = self.live(replica) else {
                continue;
            };
            let suspects: Vec<u64> = volume
                .table
                .iter_from(0)
                .filter(|(_, entry)| entry.torn || entry.memory != extents::NONE)
                .map(|(extent, _)| extent)
                .collect();
            let mut torn = Vec::new();
            for extent in suspects {
                let id = self.extent_memory(replica, extent);
                if self.extents.get(id).load != Load::Loaded {
                    self.load_blocking(dev, &mut Replay::default(), id)?;
                }
                let map = &self.extents.get(id).map;
                let first = ExtentIndex(extent).first_block().0;
                torn.extend(map.torn.iter().filter(|i| map.positions[*i] != 0).map(|i| {
                    let position = Position::unpack(map.positions[i]);
                    BlockPosition {
                        block: Block(first + i as u64),
                        position,
                    }
                }));
            }
            self.volume_mut(replica).replica.torn = torn;
        }
        Ok(())
    }
}

fn impossible(lsn: u64) -> RecoverError {
    OpenError::JournalDamaged {
        sequence: lsn,
        reason: "it names something that cannot exist",
    }
    .into()
}

/// Stands for a replica whose header is free already.
fn placeholder(device: DeviceId) -> VolumeImage {
    use ashlar_replication::configuration::{Ack, MemberState, ReplicaState, Role};
    use ashlar_replication::values::{Epoch, EpochNumber, MemberId, Pass, VolumeId};
    VolumeImage {
        volume: VolumeId::default(),
        key: [0; 32],
        ack: Ack::Majority,
        size_blocks: 0,
        evicted: false,
        state: MemberState {
            id: MemberId { device, nonce: 0 },
            role: Role::Data,
            promised: Epoch::default(),
            configuration: None,
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        },
    }
}
