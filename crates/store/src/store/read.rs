//! Reads: header and data at the same time where the header is cold, everything verified.

use std::sync::OnceLock;

use ashlar_engine::IoBuf;
use ashlar_replication::message::{ReadError, Refusal, TornBlocks};
use ashlar_replication::values::{BLOCK_BYTES, BlockRange, Position};

use super::Store;
use super::complete::Operation;
use super::jobs::Parked;
use super::mutate::blocks_within;
use crate::StoreError;
use crate::api::{Completion, Outcome, ReadOutcome, ReplicaSlot};
use crate::device::{Device, Part};
use crate::memory::extents::Load;
use crate::memory::pages;
use crate::memory::table::NO_SLOT;

/// How often a read is repeated because the blocks were being rewritten while it was under way.
const ATTEMPTS_MAX: u32 = 16;

/// A read under way.
pub(crate) struct Read {
    pub token: u64,
    pub slot: ReplicaSlot,
    nonce: u64,
    range: BlockRange,
    torn: TornBlocks,
    buf: Option<IoBuf>,
    /// `buf` holds what the device had.
    has_data: bool,
    generation: u64,
    attempts: u32,
}

impl Read {
    pub(super) fn is_of(&self, slot: ReplicaSlot, extent: u64) -> bool {
        self.slot == slot && self.range.start.extent().0 == extent
    }
}

/// CRC-32C of a block of zeros.
pub(crate) fn zero_crc() -> u32 {
    static CRC: OnceLock<u32> = OnceLock::new();
    *CRC.get_or_init(|| crc32c::crc32c(&[0; BLOCK_BYTES]))
}

/// What the blocks of a read need.
enum Need {
    Nothing,
    /// Zeros throughout.
    Zeros,
    Device,
}

impl Store {
    /// Reads and verifies. Completes as [`Outcome::Read`]; give the outcome back with
    /// [`Store::recycle`]. A read that overlaps a large write waits for it.
    ///
    /// # Errors
    /// [`StoreError::Closed`], [`StoreError::UnknownReplica`], [`StoreError::BadRange`].
    pub fn read<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        torn: TornBlocks,
    ) -> Result<(), StoreError> {
        self.check_readable(slot, range)?;
        let nonce = self.check_replica(slot)?.nonce();
        let read = Read {
            token,
            slot,
            nonce,
            range,
            torn,
            buf: None,
            has_data: false,
            generation: 0,
            attempts: 0,
        };
        self.advance_read(dev, read);
        Ok(())
    }

    /// Gives the memory of a read back.
    pub fn recycle<D: Device>(&mut self, dev: &mut D, outcome: ReadOutcome) {
        if let Some(buf) = outcome.buf {
            dev.recycle(buf);
        }
    }

    pub(super) fn check_readable(
        &self,
        slot: ReplicaSlot,
        range: BlockRange,
    ) -> Result<(), StoreError> {
        let size = self.check_replica(slot)?.replica.size_blocks;
        let end = range.start.0.checked_add(u64::from(range.count));
        if !range.is_within_one_extent() || end.is_none_or(|end| end > size) {
            return Err(StoreError::BadRange);
        }
        Ok(())
    }

    pub(super) fn read_completed<D: Device>(
        &mut self,
        dev: &mut D,
        mut read: Read,
        complete: bool,
        buf: Option<IoBuf>,
    ) {
        read.buf = buf;
        read.has_data = complete;
        if self.closed {
            self.fail_read(dev, read);
        } else if complete {
            self.advance_read(dev, read);
        } else {
            self.finish_read(dev, read, Err(ReadError::Device));
        }
    }

    /// Goes on with a read as far as it gets without waiting.
    pub(super) fn advance_read<D: Device>(&mut self, dev: &mut D, read: Read) {
        let same = self
            .live(read.slot.0)
            .is_some_and(|volume| volume.nonce() == read.nonce);
        if !same {
            let error = ReadError::Refused(Refusal::UnknownReplica);
            return self.finish_read(dev, read, Err(error));
        }
        let extent = read.range.start.extent().0;
        let entry = self.volume_mut(read.slot.0).table.get(extent);
        if entry.slot == NO_SLOT {
            return self.finish_zeros(dev, read, |_| entry.position);
        }
        let id = self.extent_memory(read.slot.0, extent);
        if self.is_being_written(id, read.range) {
            self.parked.push_back(Parked::Read(Box::new(read)));
            return;
        }
        let in_memory = self.extents.get(id);
        let known = in_memory.load == Load::Loaded
            || blocks_within(read.range).all(|i| in_memory.known.get(i));
        if !known {
            self.start_load(dev, id);
            if read.has_data {
                self.parked.push_back(Parked::Read(Box::new(read)));
            } else {
                self.read_device(dev, read, entry.slot);
            }
            return;
        }
        match self.need(id, read.range) {
            Need::Zeros => {
                let positions = self.extents.get(id).map.positions;
                self.finish_zeros(dev, read, |i| positions[i]);
            }
            Need::Device if !read.has_data => self.read_device(dev, read, entry.slot),
            Need::Nothing | Need::Device => self.assemble(dev, read, id, entry.slot),
        }
    }

    fn need(&self, id: u32, range: BlockRange) -> Need {
        let extent = self.extents.get(id);
        let mut zeros = true;
        for i in blocks_within(range) {
            if extent.map.present.get(i) {
                if extent.pages[i] == pages::NONE {
                    return Need::Device;
                }
                zeros = false;
            }
        }
        if zeros { Need::Zeros } else { Need::Nothing }
    }

    fn read_device<D: Device>(&mut self, dev: &mut D, mut read: Read, slot: u32) {
        let bytes = read.range.count as usize * BLOCK_BYTES;
        let buf = read.buf.take().unwrap_or_else(|| dev.buffer(bytes));
        read.generation = self.in_place_generation;
        read.attempts += 1;
        read.has_data = false;
        let offset = self.layout.block(slot, read.range.start.within_extent());
        let token = self.operations.add(Operation::Read(Box::new(read)), bytes);
        dev.read(Part::Blocks, token, offset, buf, bytes);
    }

    fn finish_zeros<D: Device>(
        &mut self,
        dev: &mut D,
        mut read: Read,
        position: impl Fn(usize) -> u64,
    ) {
        if let Some(buf) = read.buf.take() {
            dev.recycle(buf);
        }
        let positions = blocks_within(read.range)
            .map(|i| Position::unpack(position(i)))
            .collect();
        let crcs = vec![zero_crc(); read.range.count as usize];
        self.finish_read(
            dev,
            read,
            Ok(ReadOutcome {
                buf: None,
                crcs,
                positions,
            }),
        );
    }

    /// Puts the blocks together from memory and from what the device returned, as the state is now.
    fn assemble<D: Device>(&mut self, dev: &mut D, mut read: Read, id: u32, slot: u32) {
        let bytes = read.range.count as usize * BLOCK_BYTES;
        let mut buf = read.buf.take().unwrap_or_else(|| dev.buffer(bytes));
        let mut crcs = Vec::with_capacity(read.range.count as usize);
        let mut positions = Vec::with_capacity(read.range.count as usize);
        let mut error = None;
        let extent = self.extents.get(id);
        for ((i, number), content) in blocks_within(read.range)
            .zip(read.range.blocks())
            .zip(buf.chunks_exact_mut(BLOCK_BYTES))
        {
            let block = extent.block(i);
            let position = Position::unpack(block.position);
            let mut crc = block.crc;
            if !block.present {
                content.fill(0);
                crc = zero_crc();
            } else if block.page != pages::NONE {
                content.copy_from_slice(self.pages.get(block.page));
            } else if block.torn && block.position != 0 {
                if read.torn == TornBlocks::Refuse {
                    error = Some(ReadError::Torn {
                        block: number,
                        position,
                    });
                    break;
                }
                crc = crc32c::crc32c(content);
            } else if block.torn || crc32c::crc32c(content) != crc {
                error = Some(ReadError::Checksum {
                    block: number,
                    position,
                });
                break;
            }
            crcs.push(crc);
            positions.push(position);
        }
        let Some(error) = error else {
            return self.finish_read(
                dev,
                read,
                Ok(ReadOutcome {
                    buf: Some(buf),
                    crcs,
                    positions,
                }),
            );
        };
        read.buf = Some(buf);
        let rewritten = read.generation != self.in_place_generation;
        if matches!(error, ReadError::Checksum { .. }) && rewritten && read.attempts < ATTEMPTS_MAX
        {
            return self.read_device(dev, read, slot);
        }
        self.counters.checksum_errors += 1;
        self.finish_read(dev, read, Err(error));
    }

    fn finish_read<D: Device>(
        &mut self,
        dev: &mut D,
        read: Read,
        result: Result<ReadOutcome, ReadError>,
    ) {
        if let Some(buf) = read.buf {
            dev.recycle(buf);
        }
        self.completions.push_back(Completion {
            token: read.token,
            outcome: Outcome::Read(result),
        });
    }

    /// The device is closed, or the header cannot be read.
    pub(super) fn fail_read<D: Device>(&mut self, dev: &mut D, read: Read) {
        let error = if self.closed {
            ReadError::Refused(Refusal::DeviceClosed)
        } else {
            ReadError::Device
        };
        self.finish_read(dev, read, Err(error));
    }
}
