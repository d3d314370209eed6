//! The journal's writing side: records are put together, written one at a time, and what
//! follows from a record being durable.

use ashlar_engine::IoBuf;

use super::complete::Operation;
use super::{Store, Undo};
use crate::device::{Device, Persist};
use crate::faults::{Fault, is_broken};
use crate::journal::descriptor::IN_PLACE_BYTES;
use crate::journal::record::{Builder, DESCRIPTOR_BYTES_MAX, RECORD_BYTES_MAX};
use crate::memory::extents;

/// Record buffers kept for reuse: the one in flight, the one that is being filled, and two for bursts.
const SPARE_RECORDS: usize = 4;

/// Bytes that a record may have when it is written, with notes.
fn largest(builder: &Builder) -> u64 {
    (builder.bytes() + DESCRIPTOR_BYTES_MAX.next_multiple_of(4096)).min(RECORD_BYTES_MAX) as u64
}

impl Store {
    /// Makes room for descriptors and blocks in the record that is being put together; its number.
    pub(super) fn reserve<D: Device>(
        &mut self,
        dev: &mut D,
        descriptor_bytes: usize,
        data_blocks: usize,
    ) -> u64 {
        if let Some(builder) = self.building.back()
            && builder.has_room(descriptor_bytes, data_blocks)
        {
            return builder.lsn;
        }
        let lsn = self.next_lsn();
        let buf = match self.spare_records.pop() {
            Some(buf) => buf,
            None => dev.buffer(RECORD_BYTES_MAX),
        };
        let descriptors = self.spare_descriptors.pop().unwrap_or_default();
        self.building.push_back(Builder::new(lsn, buf, descriptors));
        lsn
    }

    /// Number of the record after all that were begun.
    pub(super) fn next_lsn(&self) -> u64 {
        self.building.back().map_or(self.ring.lsn(), |b| b.lsn) + 1
    }

    pub(super) fn builder(&mut self) -> &mut Builder {
        self.building.back_mut().expect("room was reserved")
    }

    pub(super) fn descriptors(&mut self) -> &mut Vec<u8> {
        &mut self.builder().descriptors
    }

    /// End of a turn: starts the next journal write with everything that was submitted, looks whether
    /// the index has got further, and starts a home write where one cannot wait.
    pub fn submit<D: Device>(&mut self, dev: &mut D) {
        if self.closed {
            return;
        }
        self.advance_checkpoint(dev);
        self.start_journal_write(dev);
        if self.is_under_pressure() {
            self.start_home_write(dev);
        }
    }

    fn start_journal_write<D: Device>(&mut self, dev: &mut D) {
        if self.journal_write.is_none() && self.is_note_wanted() {
            self.reserve(dev, IN_PLACE_BYTES, 0);
        }
        let noting = self.is_note_wanted();
        let ready = self.journal_write.is_none()
            && self.building.front().is_some_and(|builder| {
                (noting || !builder.descriptors.is_empty()) && self.ring.has_room(largest(builder))
            });
        if !ready {
            return;
        }
        let mut builder = self.building.pop_front().expect("there is a first one");
        self.record_notes(&mut builder);
        let lsn = builder.lsn;
        let (buf, bytes, crc, descriptors) = builder.seal(self.device, self.ring.crc());
        self.spare_descriptors.push(descriptors);
        let offset = self.layout.ring_offset() + self.ring.push(lsn, bytes as u64, crc);
        self.journal_write = Some(lsn);
        self.counters.journal_records += 1;
        self.counters.journal_bytes += bytes as u64;
        let token = self.operations.add(Operation::Journal, bytes);
        let persist = if is_broken(Fault::AcknowledgeBeforeSync) {
            Persist::Cached
        } else {
            Persist::Durable
        };
        dev.write(self.journal_part(), token, offset, buf, bytes, persist);
    }

    /// Whether the front record waits for room in the ring.
    pub(super) fn is_journal_full(&self) -> bool {
        self.building
            .front()
            .is_some_and(|builder| !self.ring.has_room(largest(builder)))
    }

    /// The record in flight is durable.
    pub(super) fn journal_written<D: Device>(&mut self, dev: &mut D, buf: Option<IoBuf>) {
        if let Some(mut buf) = buf {
            if self.spare_records.len() < SPARE_RECORDS {
                buf.set_len(RECORD_BYTES_MAX);
                self.spare_records.push(buf);
            } else {
                dev.recycle(buf);
            }
        }
        let lsn = self
            .journal_write
            .take()
            .expect("a journal write was in flight");
        self.durable = lsn;
        self.forget_undo(lsn);
        self.forget_notes(lsn);
        self.larges_announced(lsn);
        while self.journaled.front().is_some_and(|(l, _, _)| *l <= lsn) {
            let (_, replica, number) = self.journaled.pop_front().expect("there is a first one");
            self.outstanding_done(replica, number);
        }
        self.start_larges(dev);
    }

    fn forget_undo(&mut self, durable: u64) {
        while self.undo.front().is_some_and(|u| u.lsn() <= durable) {
            if let Some(Undo::Block {
                lsn, extent, state, ..
            }) = self.undo.pop_front()
                && extent != extents::NONE
            {
                self.pages.free(state.page);
                let changed = self.extents.get_mut(extent);
                changed.undo -= 1;
                changed.newest_durable = lsn;
            }
        }
    }
}
