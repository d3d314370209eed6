//! A replica in memory: what was submitted, what is durable, and the mutations in between.

use std::collections::VecDeque;

use ashlar_replication::message::BlockPosition;
use ashlar_replication::values::Position;

use super::{Freed, Store};
use crate::StoreError;
use crate::api::{Completion, Outcome, Replica};
use crate::format::page::Side;
use crate::format::volume_header::VolumeImage;
use crate::index::IndexChange;
use crate::memory::{extents, pages, table::NO_SLOT, table::Table};

/// A replica.
pub(crate) struct Volume {
    /// As submitted.
    pub replica: Replica,
    /// As it would be found after a crash now, for the header.
    pub durable: VolumeImage,
    pub deleting: bool,
    pub table: Table,
    pub side: Side,
    pub version: u64,
    /// First journal record whose effects are not in the header on the device; 0: clean.
    pub since: u64,
    /// `durable` changed after the home write under way began.
    pub changed: bool,
    /// The home write under way has everything before this record.
    pub homing_horizon: u64,
    /// The older page of the pair still has older content. It is rewritten in a later home write, so that
    /// at rest a damaged page is never the only one with the newest state.
    pub settle: bool,
    /// The home write under way does nothing but rewrite the older page.
    pub settling: bool,
    /// It is in the list of headers to be written home.
    pub queued: bool,
    pub outstanding: VecDeque<Outstanding>,
    /// Number of the first entry of `outstanding`.
    pub outstanding_first: u64,
}

/// A mutation that was submitted and has not been reported.
pub(crate) struct Outstanding {
    pub lsn: u64,
    /// None: the store's own.
    pub token: Option<u64>,
    pub reply: MutationReply,
    pub effect: Effect,
    pub done: bool,
}

/// What is reported at the end of a mutation.
pub(crate) enum MutationReply {
    Done,
    Copied(Vec<BlockPosition>),
}

/// What a mutation changes in the volume header.
pub(crate) enum Effect {
    None,
    Last(Position),
    /// The whole header; `last` only where it is changed on purpose.
    Image(Box<VolumeImage>, LastOfImage),
    Delete,
}

/// Whether the `last` of an image counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LastOfImage {
    Counts,
    Ignored,
}

impl Volume {
    /// A volume as it is in its header.
    pub(crate) fn new(image: VolumeImage) -> Volume {
        Volume {
            replica: Replica {
                volume: image.volume,
                key: image.key,
                ack: image.ack,
                size_blocks: image.size_blocks,
                state: image.state.clone(),
                evicted: image.evicted,
                torn: Vec::new(),
                allocated_extents: 0,
            },
            durable: image,
            deleting: false,
            table: Table::default(),
            side: Side::Neither,
            version: 0,
            since: 0,
            changed: false,
            homing_horizon: 0,
            settle: false,
            settling: false,
            queued: false,
            outstanding: VecDeque::new(),
            outstanding_first: 0,
        }
    }

    /// The header that says what was submitted.
    pub(crate) fn submitted_image(&self) -> VolumeImage {
        VolumeImage {
            volume: self.replica.volume,
            key: self.replica.key,
            ack: self.replica.ack,
            size_blocks: self.replica.size_blocks,
            evicted: self.replica.evicted,
            state: self.replica.state.clone(),
        }
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.replica.state.id.nonce
    }

    fn take_effect(&mut self, effect: Effect) {
        match effect {
            Effect::None => return,
            Effect::Last(last) => self.durable.state.last = last,
            Effect::Image(image, last_of_image) => {
                let last = self.durable.state.last;
                self.durable = *image;
                if last_of_image == LastOfImage::Ignored {
                    self.durable.state.last = last;
                }
            }
            Effect::Delete => {}
        }
        self.changed = true;
    }
}

impl Store {
    /// Queues a mutation whose descriptors are in record `lsn`. Returns its number in the queue.
    pub(super) fn push_outstanding(
        &mut self,
        replica: u32,
        outstanding: Outstanding,
        journaled: bool,
    ) -> u64 {
        let lsn = outstanding.lsn;
        let touches_header = !matches!(outstanding.effect, Effect::None);
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        let number = volume.outstanding_first + volume.outstanding.len() as u64;
        volume.outstanding.push_back(outstanding);
        if touches_header && volume.since == 0 {
            volume.since = lsn;
            if !std::mem::replace(&mut volume.queued, true) {
                self.dirty_volumes.push(replica);
            }
        }
        if journaled {
            self.journaled.push_back((lsn, replica, number));
        }
        number
    }

    /// Notes that a mutation is durable, and reports all that have nothing unfinished before them.
    pub(super) fn outstanding_done(&mut self, replica: u32, number: u64) {
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        let place = (number - volume.outstanding_first) as usize;
        volume.outstanding[place].done = true;
        while volume.outstanding.front().is_some_and(|o| o.done) {
            let finished = volume
                .outstanding
                .pop_front()
                .expect("there is a first one");
            volume.outstanding_first += 1;
            let deleted = matches!(finished.effect, Effect::Delete);
            volume.take_effect(finished.effect);
            if let Some(token) = finished.token {
                let outcome = match finished.reply {
                    MutationReply::Done => Outcome::Done(Ok(())),
                    MutationReply::Copied(changed) => Outcome::Copied(Ok(changed)),
                };
                self.completions.push_back(Completion { token, outcome });
            }
            if deleted {
                self.drop_replica(replica, finished.lsn);
                return;
            }
        }
    }

    /// Frees what a deleted replica had. Its slots wait for the tail: until then recovery may still
    /// apply records that name them.
    fn drop_replica(&mut self, replica: u32, lsn: u64) {
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        let table = std::mem::take(&mut volume.table);
        let nonce = volume.nonce();
        for group in table.groups.values() {
            if let Some(hole) = group.hole {
                if hole.side == Side::Neither {
                    self.blanks
                        .push((self.layout.hole_pair(hole.slot), self.durable));
                }
                self.pending_free.push_back((lsn, Freed::Hole(hole.slot)));
            }
            for entry in group.entries.iter() {
                if entry.slot != NO_SLOT {
                    self.pending_free
                        .push_back((lsn, Freed::Extent(entry.slot)));
                }
                if entry.memory != extents::NONE {
                    self.drop_memory(entry.memory);
                }
            }
        }
        self.freeing = lsn;
        self.forget_notes_of(replica);
        self.dirty_groups.retain(|(r, _)| *r != replica);
        self.pending_free.push_back((lsn, Freed::Volume(replica)));
        self.index_changes
            .push(IndexChange::RemoveReplica { replica, nonce });
    }

    /// A header that was never written whole may be torn since a crash. Nobody writes it once its slot is free, and
    /// a scan must not stumble over it: it is cleared before the tail moves on.
    pub(super) fn blank_header(&mut self, id: u32) {
        let extent = self.extents.get(id);
        if extent.load == crate::memory::extents::Load::Loaded && extent.side == Side::Neither {
            let since = self.extents.since(id).max(1);
            self.blanks
                .push((self.layout.header_pair(extent.slot), since));
        }
    }

    /// Drops an extent from memory, or leaves it to what is under way on it.
    pub(super) fn drop_memory(&mut self, id: u32) {
        self.blank_header(id);
        if self.extents.get(id).undo > 0 {
            for undo in &mut self.undo {
                if let super::Undo::Block { extent, state, .. } = undo
                    && *extent == id
                {
                    self.pages.free(state.page);
                    state.page = pages::NONE;
                    *extent = extents::NONE;
                }
            }
        }
        let extent = self.extents.get_mut(id);
        extent.undo = 0;
        for page in &mut extent.pages {
            self.pages.free(std::mem::replace(page, pages::NONE));
        }
        if extent.load == crate::memory::extents::Load::Loading || extent.homing_lsn != 0 {
            extent.orphan = true;
            self.extents.set_since(id, 0);
        } else {
            self.extents.remove(id);
        }
    }

    /// Reports everything that is under way as failed. Called once, when the device is closed.
    pub(super) fn fail_outstanding(&mut self) {
        for volume in self.volumes.iter_mut().flatten() {
            for outstanding in volume.outstanding.drain(..) {
                volume.outstanding_first += 1;
                if let Some(token) = outstanding.token {
                    let outcome = match outstanding.reply {
                        MutationReply::Done => Outcome::Done(Err(StoreError::Closed)),
                        MutationReply::Copied(_) => Outcome::Copied(Err(StoreError::Closed)),
                    };
                    self.completions.push_back(Completion { token, outcome });
                }
            }
        }
    }
}
