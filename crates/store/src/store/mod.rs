//! The open store: its parts, and the questions that need no I/O.

mod apply;
mod checkpoint;
mod complete;
mod format_device;
mod headers;
mod home;
#[cfg(any(test, feature = "test-support"))]
mod invariants;
mod jobs;
mod large;
mod lifecycle;
mod load;
mod mutate;
mod open;
mod options;
mod read;
mod recovery;
mod replicas;
mod write;

use std::collections::{BTreeMap, VecDeque};

use ashlar_engine::IoBuf;
use ashlar_replication::values::{DeviceId, ExtentIndex, Position, VolumeId};

use crate::api::{Completion, Counters, ExtentSummary, Replica, ReplicaSlot, Summary, Usage};
use crate::device::Part;
use crate::format::layout::Layout;
use crate::index::{Index, IndexChange};
use crate::journal::record::Builder;
use crate::journal::ring::Ring;
use crate::memory::extents::{BlockState, Extents};
use crate::memory::pages::Pages;
use crate::memory::slots::Slots;
use crate::memory::table::NO_SLOT;

use checkpoint::Checkpoint;
use complete::Operations;
use home::Home;
use jobs::Parked;
use large::{InPlaceNote, Large};
pub use options::{Existing, FormatOptions, OpenOptions, Zeroed};
use replicas::Volume;

/// An open store. Its device is handed to every call that needs it.
///
/// Guarantees: a mutation is durable when it is reported as done, mutations of a replica are reported
/// in the order in which they were submitted, and what a read returns has matched its checksum.
/// After a failed write or sync nothing is served any more.
pub struct Store {
    device: DeviceId,
    layout: Layout,
    options: OpenOptions,
    closed: bool,
    counters: Counters,
    completions: VecDeque<Completion>,
    operations: Operations,

    volumes: Vec<Option<Box<Volume>>>,
    /// Of the headers that are free: the newest page and its version.
    header_sides: Vec<(crate::format::page::Side, u64)>,
    by_volume: BTreeMap<VolumeId, u32>,
    extents: Extents,
    pages: Pages,
    slots: Slots,
    holes: Slots,
    /// Slots that become free when the tail has passed the record.
    pending_free: VecDeque<(u64, Freed)>,
    /// The newest record that will free extents when it is at home; 0: none. A full device hurries with it.
    freeing: u64,

    ring: Ring,
    /// Records that are being put together or wait for room in the ring.
    building: VecDeque<Builder>,
    journal_write: Option<u64>,
    /// The newest record that is durable.
    durable: u64,
    /// The first record that recovery would apply.
    tail: u64,
    /// The same when the store was opened.
    opened_tail: u64,
    /// What waits for its record, in the order of the records: (record, replica, number in the replica's queue).
    journaled: VecDeque<(u64, u32, u64)>,
    /// State before changes whose record is not durable yet, oldest first. Home writes see the durable
    /// state through it, so that a block that is rewritten all the time cannot hold the tail for ever.
    undo: VecDeque<Undo>,
    spare_records: Vec<IoBuf>,
    spare_descriptors: Vec<Vec<u8>>,
    scratch_positions: Vec<u64>,

    larges: Vec<Large>,
    in_place_notes: Vec<InPlaceNote>,
    parked: VecDeque<Parked>,
    home: Option<Home>,
    /// Pairs of pages to be cleared, each with the record that the tail must not pass before.
    blanks: Vec<(u64, u64)>,
    dirty_groups: Vec<(u32, u64)>,
    dirty_volumes: Vec<u32>,
    checkpoint: Checkpoint,
    /// Counts home writes and writes in place as they begin and end: a read whose checksum is wrong
    /// is repeated when it changed.
    in_place_generation: u64,

    index: Box<dyn Index>,
    index_changes: Vec<IndexChange>,
}

/// What a slot that waits to be free is a slot of.
#[derive(Clone, Copy, Debug)]
enum Freed {
    Extent(u32),
    Hole(u32),
    Volume(u32),
}

/// The state before a change that is not durable yet.
#[derive(Clone, Copy, Debug)]
enum Undo {
    Block {
        lsn: u64,
        extent: u32,
        block: u16,
        /// False: it is what the header on the device says.
        known: bool,
        state: BlockState,
    },
    Hole {
        lsn: u64,
        replica: u32,
        extent: u64,
        position: u64,
    },
}

impl Undo {
    fn lsn(&self) -> u64 {
        match self {
            Undo::Block { lsn, .. } | Undo::Hole { lsn, .. } => *lsn,
        }
    }
}

impl Store {
    /// Identity of the device.
    pub fn device_id(&self) -> DeviceId {
        self.device
    }

    /// The replica of a volume.
    pub fn lookup(&self, volume: VolumeId) -> Option<ReplicaSlot> {
        self.by_volume.get(&volume).map(|slot| ReplicaSlot(*slot))
    }

    /// A replica, if there is one in that slot.
    pub fn replica(&self, slot: ReplicaSlot) -> Option<&Replica> {
        self.live(slot.0).map(|volume| &volume.replica)
    }

    /// All replicas, by slot.
    pub fn replicas(&self) -> impl Iterator<Item = (ReplicaSlot, &Replica)> {
        self.volumes
            .iter()
            .enumerate()
            .filter_map(|(slot, volume)| {
                let volume = volume.as_ref().filter(|v| !v.deleting)?;
                Some((ReplicaSlot(slot as u32), &volume.replica))
            })
    }

    /// What is used and free.
    pub fn usage(&self) -> Usage {
        Usage {
            extents: u64::from(self.layout.extents),
            extents_free: u64::from(self.slots.free()),
            journal_used_bytes: self.ring.used(),
            journal_bytes: self.ring.size(),
            dirty_bytes: self.pages.used_bytes() as u64,
        }
    }

    /// Counters since open.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether a write or a sync has failed; see [`crate::StoreError::Closed`].
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The next thing that has finished.
    pub fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// What the device looks like and how far the journal is.
    pub fn summary(&self) -> Summary {
        Summary {
            format_version: crate::format::superblock::FORMAT_VERSION,
            size_bytes: self.layout.size_bytes,
            replicas_max: self.layout.replicas,
            hole_pages: self.layout.hole_pairs,
            hole_pages_free: self.holes.free(),
            journal_separate: self.layout.journal_separate,
            journal_tail: self.tail,
            journal_head: self.durable,
        }
    }

    /// Extents of a replica that hold a slot or a position, ascending.
    pub fn extents(&self, slot: ReplicaSlot) -> impl Iterator<Item = ExtentSummary> {
        self.live(slot.0).into_iter().flat_map(|volume| {
            volume
                .table
                .iter_from(0)
                .map(|(extent, entry)| ExtentSummary {
                    extent: ExtentIndex(extent),
                    slot: (entry.slot != NO_SLOT).then_some(entry.slot),
                    position_max: Position::unpack(entry.position),
                })
        })
    }

    fn journal_part(&self) -> Part {
        if self.layout.journal_separate {
            Part::Journal
        } else {
            Part::Blocks
        }
    }

    fn live(&self, slot: u32) -> Option<&Volume> {
        self.volumes
            .get(slot as usize)?
            .as_deref()
            .filter(|volume| !volume.deleting)
    }

    /// The volume in a slot that is known to be in use, also while it is being deleted.
    fn volume_mut(&mut self, slot: u32) -> &mut Volume {
        self.volumes[slot as usize]
            .as_deref_mut()
            .expect("the slot is in use")
    }
}
