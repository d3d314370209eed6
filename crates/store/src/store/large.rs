//! Large writes: announced in the journal, then written in place once.
//!
//! ```text
//! announced ──record durable──► ready ──no home write of the extent, no older──► writing ──► done
//!                                       large write of the same blocks under way
//! ```

use ashlar_engine::IoBuf;
use ashlar_replication::values::BlockRange;

use super::Store;
use super::complete::Operation;
use crate::api::Blocks;
use crate::device::{Device, Part, Persist};

/// A large write that is not durable yet.
pub(crate) struct Large {
    /// Unique among those under way.
    number: u64,
    replica: u32,
    extent: u32,
    range: BlockRange,
    lsn: u64,
    outstanding: u64,
    state: State,
}

enum State {
    Announced(IoBuf),
    Ready(IoBuf),
    Writing,
}

impl Store {
    /// Keeps a copy of the data until the announcement in record `lsn` is durable.
    #[allow(clippy::too_many_arguments)] // One caller; a struct would repeat `Large`.
    pub(super) fn announce<D: Device>(
        &mut self,
        dev: &mut D,
        replica: u32,
        extent: u32,
        range: BlockRange,
        blocks: &Blocks<'_>,
        lsn: u64,
        outstanding: u64,
    ) {
        let mut buf = dev.buffer(blocks.data.len());
        buf[..blocks.data.len()].copy_from_slice(blocks.data);
        let number = self.larges.last().map_or(0, |l| l.number + 1);
        let state = State::Announced(buf);
        self.larges.push(Large {
            number,
            replica,
            extent,
            range,
            lsn,
            outstanding,
            state,
        });
    }

    /// Announcements up to record `lsn` are durable.
    pub(super) fn larges_announced(&mut self, lsn: u64) {
        for large in &mut self.larges {
            if large.lsn > lsn {
                break;
            }
            large.state = match std::mem::replace(&mut large.state, State::Writing) {
                State::Announced(buf) => {
                    self.extents.get_mut(large.extent).in_place += 1;
                    State::Ready(buf)
                }
                other => other,
            };
        }
    }

    /// Starts what can be started.
    pub(super) fn start_larges<D: Device>(&mut self, dev: &mut D) {
        for i in 0..self.larges.len() {
            let (older, rest) = self.larges.split_at_mut(i);
            let large = &mut rest[0];
            let extent = self.extents.get(large.extent);
            // A home write of the extent may be writing the very blocks: two writes of one block under
            // way end in any order.
            let blocked = extent.homing_lsn != 0
                || older
                    .iter()
                    .any(|o| o.extent == large.extent && o.range.overlaps(large.range));
            if blocked || !matches!(large.state, State::Ready(_)) {
                continue;
            }
            let State::Ready(buf) = std::mem::replace(&mut large.state, State::Writing) else {
                unreachable!("checked above")
            };
            let bytes = large.range.count as usize * 4096;
            let offset = self
                .layout
                .block(extent.slot, large.range.start.within_extent());
            let token = self.operations.add(Operation::Large(large.number), bytes);
            self.in_place_generation += 1;
            self.counters.in_place_bytes += bytes as u64;
            dev.write(Part::Blocks, token, offset, buf, bytes, Persist::Durable);
        }
    }

    pub(super) fn large_written<D: Device>(
        &mut self,
        dev: &mut D,
        number: u64,
        buf: Option<IoBuf>,
    ) {
        if let Some(buf) = buf {
            dev.recycle(buf);
        }
        self.in_place_generation += 1;
        let place = self
            .larges
            .iter()
            .position(|l| l.number == number)
            .expect("under way");
        let large = self.larges.remove(place);
        self.extents.get_mut(large.extent).in_place -= 1;
        self.outstanding_done(large.replica, large.outstanding);
        self.start_larges(dev);
        self.unpark(dev);
    }

    /// Whether a large write of any of these blocks is not finished. Until it is, nobody can say what
    /// the device holds there.
    pub(super) fn is_being_written(&self, extent: u32, range: BlockRange) -> bool {
        self.larges
            .iter()
            .any(|l| l.extent == extent && l.range.overlaps(range))
    }
}
