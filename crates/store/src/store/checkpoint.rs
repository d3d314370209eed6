//! The journal's tail. It moves after what is before it is at home and synced, and the index
//! durably knows about it.

use ashlar_engine::IoBuf;

use super::complete::Operation;
use super::{Freed, Store};
use crate::device::{Device, Persist};
use crate::faults::{Fault, is_broken};
use crate::format::checkpoint_page;
use crate::format::page::{PAGE, Side};
use crate::index::IndexBatch;

/// How far a move of the tail is.
pub(crate) struct Checkpoint {
    pub side: Side,
    pub state: State,
}

pub(crate) enum State {
    Idle,
    /// The index was given everything before this record.
    Index(u64),
    Writing(u64),
}

impl Store {
    /// The first record whose effects are not all at home.
    fn tail_now(&self) -> u64 {
        let mut tail = self.durable + 1;
        if is_broken(Fault::MoveTailEarly) {
            return tail;
        }
        let mut lower = |since: u64| {
            if since != 0 {
                tail = tail.min(since);
            }
        };
        lower(self.extents.since_min().unwrap_or(0));
        for (_, since) in &self.blanks {
            lower(*since);
        }
        for (replica, group) in &self.dirty_groups {
            let volume = self.volumes[*replica as usize].as_ref();
            let state = volume.and_then(|v| v.table.groups.get(group));
            lower(state.and_then(|g| g.hole).map_or(0, |hole| hole.since));
        }
        for replica in &self.dirty_volumes {
            lower(
                self.volumes[*replica as usize]
                    .as_ref()
                    .map_or(0, |v| v.since),
            );
        }
        tail
    }

    /// Takes the next step of moving the tail, if there is one.
    pub(super) fn advance_checkpoint<D: Device>(&mut self, dev: &mut D) {
        if let State::Idle = self.checkpoint.state
            && self.home.is_none()
        {
            let tail = self.tail_now();
            if tail <= self.tail {
                return;
            }
            let changes = std::mem::take(&mut self.index_changes);
            self.index.apply(IndexBatch {
                changes,
                covers: tail,
                clear: false,
            });
            self.checkpoint.state = State::Index(tail);
        }
        let State::Index(tail) = self.checkpoint.state else {
            return;
        };
        // A failed index holds nothing up: it is behind the tail then, and the next open rebuilds it.
        if self.index.covered().is_ok_and(|covered| covered < tail) {
            return;
        }
        let mut buf = dev.buffer(PAGE);
        checkpoint_page::encode(&mut buf[..PAGE], self.device, self.ring.tail(tail));
        let within = if self.checkpoint.side == Side::A {
            PAGE as u64
        } else {
            0
        };
        let offset = self.layout.checkpoint_pair() + within;
        let token = self.operations.add(Operation::Checkpoint, PAGE);
        dev.write(
            self.journal_part(),
            token,
            offset,
            buf,
            PAGE,
            Persist::Durable,
        );
        self.checkpoint.state = State::Writing(tail);
    }

    pub(super) fn checkpoint_written<D: Device>(&mut self, dev: &mut D, buf: Option<IoBuf>) {
        if let Some(buf) = buf {
            dev.recycle(buf);
        }
        let State::Writing(tail) = self.checkpoint.state else {
            unreachable!("a checkpoint page was being written")
        };
        self.checkpoint.side = self.checkpoint.side.after_write();
        self.checkpoint.state = State::Idle;
        self.tail = tail;
        self.ring.advance(tail);
        self.counters.checkpoints += 1;
        while self
            .pending_free
            .front()
            .is_some_and(|(lsn, _)| *lsn < tail)
        {
            match self.pending_free.pop_front() {
                Some((_, Freed::Extent(slot))) => self.slots.release(slot),
                Some((_, Freed::Hole(slot))) => self.holes.release(slot),
                Some((_, Freed::Volume(slot))) => self.free_volume(slot),
                None => {}
            }
        }
        if self.freeing < tail && self.pending_free.is_empty() {
            self.freeing = 0;
        }
        self.advance_checkpoint(dev);
    }

    /// Frees the header of a deleted replica once both of its pages say so: neither comes back.
    fn free_volume(&mut self, slot: u32) {
        let volume = self.volume_mut(slot);
        if volume.settle || volume.since != 0 {
            self.pending_free
                .push_back((self.tail, Freed::Volume(slot)));
            return;
        }
        self.header_sides[slot as usize] = (volume.side, volume.version);
        self.volumes[slot as usize] = None;
    }
}
