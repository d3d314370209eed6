//! Reading the journal from the tail to its end.

use ashlar_engine::IoBuf;

use super::super::Store;
use super::{RecoverError, Replay};
use crate::OpenError;
use crate::device::Device;
use crate::format::page::PAGE;
use crate::journal::record::{self, RECORD_BYTES_MAX};

impl Store {
    pub(super) fn read_journal<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
    ) -> Result<(), RecoverError> {
        let mut buf = dev.buffer(RECORD_BYTES_MAX);
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
        let looked = self.look_for_later_records(dev, &mut buf);
        // The first record that is put together needs one.
        self.spare_records.push(buf);
        looked
    }

    /// Reads the next record into `buf`.
    pub(super) fn find_record<D: Device>(
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
    pub(super) fn look_for_later_records<D: Device>(
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
}
