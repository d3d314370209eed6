//! The second half of open: what the journal says is applied again, in order, on top of the headers.
//!
//! Headers may be older or newer than a record, and a newer header may stand before data that never
//! reached its place. Applying every record again from the tail on gives the right end in each case,
//! because each block ends with what the last record says of it. Only data that was to be written in place
//! has to be looked at: see [`Candidate`].

mod apply;
mod blocks;
mod decide;
mod journal;

use std::collections::{BTreeMap, BTreeSet};

use ashlar_engine::IoBuf;
use ashlar_replication::message::BlockPosition;
use ashlar_replication::values::{Block, ExtentIndex, Position};

use super::replicas::Volume;
use super::{Freed, Store};
use crate::OpenError;
use crate::device::{Device, Part};
use crate::format::extent_header::{self, BLOCKS, BlockMap};
use crate::format::hole_page::{self, HoleOwner};
use crate::format::page::{PAIR, Pair, Side};
use crate::journal::descriptor::ImageKind;
use crate::memory::extents::{self, Load};
use crate::memory::slots::Slots;
use crate::memory::table::NO_SLOT;

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
