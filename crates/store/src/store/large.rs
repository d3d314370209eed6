//! Large writes: announced in the journal, then written in place once.
//!
//! ```text
//! announced ──record durable──► ready ──no home write of the extent, no older──► writing ──► done
//!                                       large write of the same blocks under way
//! ```
//!
//! A block that is torn after a crash must not take an older, finished write with it: was it the older one that
//! was cut short, or the newer one after the older had been reported? So a later record notes that a large
//! write is durable in place, and none of its blocks is written in place again before that
//! record is durable.

use ashlar_engine::IoBuf;
use ashlar_replication::values::BlockRange;

use super::Store;
use super::complete::Operation;
use crate::api::Blocks;
use crate::device::{Device, Part, Persist};
use crate::journal::descriptor::{Announcement, IN_PLACE_BYTES, encode_in_place};
use crate::journal::record::Builder;

/// A large write that is not durable yet.
pub(crate) struct Large {
    /// Unique among those under way.
    number: u64,
    replica: u32,
    extent: u32,
    range: BlockRange,
    announced: Announcement,
    outstanding: u64,
    state: State,
}

/// A large write that is durable in place, until a durable record says so.
pub(crate) struct InPlaceNote {
    replica: u32,
    range: BlockRange,
    announced: Announcement,
    /// The record that says so, once there is one.
    recorded: Option<u64>,
}

enum State {
    Announced(IoBuf),
    Ready(IoBuf),
    Writing,
}

impl Store {
    /// Keeps a copy of the data until the announcement is durable.
    #[allow(clippy::too_many_arguments)] // One caller; a struct would repeat `Large`.
    pub(super) fn announce<D: Device>(
        &mut self,
        dev: &mut D,
        replica: u32,
        extent: u32,
        range: BlockRange,
        blocks: &Blocks<'_>,
        announced: Announcement,
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
            announced,
            outstanding,
            state,
        });
    }

    /// Announcements up to record `lsn` are durable.
    pub(super) fn larges_announced(&mut self, lsn: u64) {
        for large in &mut self.larges {
            if large.announced.lsn > lsn {
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
        let notes = &self.in_place_notes;
        for i in 0..self.larges.len() {
            let (older, rest) = self.larges.split_at_mut(i);
            let large = &mut rest[0];
            let extent = self.extents.get(large.extent);
            // A home write of the extent may be writing the very blocks: two writes of one block under
            // way end in any order.
            let blocked = extent.homing_lsn != 0
                || older
                    .iter()
                    .any(|o| o.extent == large.extent && o.range.overlaps(large.range))
                || notes
                    .iter()
                    .any(|n| n.replica == large.replica && n.range.overlaps(large.range));
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
        let extent = self.extents.get_mut(large.extent);
        extent.in_place -= 1;
        self.in_place_notes.push(InPlaceNote {
            replica: large.replica,
            range: large.range,
            announced: large.announced,
            recorded: None,
        });
        self.outstanding_done(large.replica, large.outstanding);
        self.start_larges(dev);
        self.unpark(dev);
    }

    /// Recovery found announced blocks complete: as if they had been written just now.
    pub(super) fn note_recovered(
        &mut self,
        replica: u32,
        range: BlockRange,
        announced: Announcement,
    ) {
        if let Some(last) = self.in_place_notes.last_mut()
            && (last.replica, last.announced) == (replica, announced)
            && last.range.end() == range.start
            && last.range.start.extent() == range.start.extent()
        {
            last.range.count += range.count;
            return;
        }
        let recorded = None;
        self.in_place_notes.push(InPlaceNote {
            replica,
            range,
            announced,
            recorded,
        });
    }

    /// Whether a large write waits for a record that notes an earlier one.
    pub(super) fn is_note_wanted(&self) -> bool {
        let waits = |note: &InPlaceNote| {
            self.larges
                .iter()
                .any(|l| l.replica == note.replica && l.range.overlaps(note.range))
        };
        self.in_place_notes
            .iter()
            .any(|note| note.recorded.is_none() && waits(note))
    }

    /// Puts notes into the record that is about to be written, as far as there is room.
    pub(super) fn record_notes(&mut self, builder: &mut Builder) {
        for note in self
            .in_place_notes
            .iter_mut()
            .filter(|note| note.recorded.is_none())
        {
            if !builder.has_room(IN_PLACE_BYTES, 0) {
                break;
            }
            let first = note.range.start.within_extent() as u16;
            let count = note.range.count as u16;
            let (out, announced) = (&mut builder.descriptors, note.announced);
            encode_in_place(
                out,
                note.replica,
                note.range.start.extent().0,
                first,
                count,
                announced,
            );
            note.recorded = Some(builder.lsn);
        }
    }

    /// Records up to `durable` are durable, and so are the notes in them.
    pub(super) fn forget_notes(&mut self, durable: u64) {
        self.in_place_notes
            .retain(|note| note.recorded.is_none_or(|lsn| lsn > durable));
    }

    pub(super) fn forget_notes_of(&mut self, replica: u32) {
        self.in_place_notes.retain(|note| note.replica != replica);
    }

    /// Whether a large write of any of these blocks is not finished. Until it is, nobody can say what
    /// the device holds there.
    pub(super) fn is_being_written(&self, extent: u32, range: BlockRange) -> bool {
        self.larges
            .iter()
            .any(|l| l.extent == extent && l.range.overlaps(range))
    }
}
