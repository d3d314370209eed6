//! The store: skeleton of the interface.

use std::collections::VecDeque;
use std::io;

use ashlar_engine::IoBuf;
use ashlar_replication::configuration::MemberState;
use ashlar_replication::message::{CopyStep, TornBlocks};
use ashlar_replication::values::{Block, BlockRange, DeviceId, ExtentIndex, Position, VolumeId};

use crate::api::{Completion, Content, Counters, Replica, ReplicaSlot, ReplicaSpec, Usage};
use crate::device::Device;
use crate::index::Index;
use crate::{FormatError, OpenError, StoreError};

/// How a device is laid out.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// Identity of the device; fresh for every format.
    pub device: DeviceId,
    /// Bytes of the journal; None: a 256th of the device, 16 MiB to 128 MiB.
    pub journal_bytes: Option<u64>,
    /// Replicas that the device can hold; None: by size.
    pub replicas_max: Option<u32>,
    /// What to do with a store of ours that is there already.
    pub existing: Existing,
}

/// What format does with an Ashlar store that it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Refuse.
    Keep,
    /// Lay it out anew; everything on it is gone.
    Destroy,
}

/// Limits of an open store.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Bytes of data in memory that wait to be written home, before the store reports pressure.
    pub dirty_bytes_max: usize,
    /// Extent headers in memory (about 4.5 KiB each) that are kept for reuse.
    pub headers_max: usize,
    /// Writes of up to this many bytes go through the journal, larger ones are announced in it.
    pub journaled_bytes_max: usize,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            dirty_bytes_max: 32 << 20,
            headers_max: 4096,
            journaled_bytes_max: 64 << 10,
        }
    }
}

/// An open store. Its device is handed to every call that needs it.
pub struct Store {
    completions: VecDeque<Completion>,
}

#[allow(unused_variables)]
impl Store {
    /// Lays a store out. Nothing is written unless the device is blank (or ours and to be destroyed).
    ///
    /// # Errors
    /// [`FormatError`] says what was found, or what does not fit.
    pub fn format<D: Device>(dev: &mut D, options: FormatOptions) -> Result<(), FormatError> {
        Err(FormatError::Options(String::new()))
    }

    /// Opens a store and recovers what the last crash left. Reads only; the journal goes on where it ended.
    ///
    /// # Errors
    /// [`OpenError`]; nothing has been changed then.
    pub fn open<D: Device>(
        dev: &mut D,
        index: Box<dyn Index>,
        options: OpenOptions,
    ) -> Result<Store, OpenError> {
        Err(OpenError::SuperblockDamaged)
    }

    /// Identity of the device.
    pub fn device_id(&self) -> DeviceId {
        DeviceId::default()
    }
    /// The replica of a volume.
    pub fn lookup(&self, volume: VolumeId) -> Option<ReplicaSlot> {
        None
    }
    /// A replica, if there is one in that slot.
    pub fn replica(&self, slot: ReplicaSlot) -> Option<&Replica> {
        None
    }
    /// All replicas, by slot.
    pub fn replicas(&self) -> impl Iterator<Item = (ReplicaSlot, &Replica)> {
        std::iter::empty()
    }
    /// What is used and free.
    pub fn usage(&self) -> Usage {
        Usage::default()
    }
    /// Counters since open.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }
    /// Whether a write or a sync has failed; see [`StoreError::Closed`].
    pub fn is_closed(&self) -> bool {
        true
    }

    /// Makes a replica. The slot can be used at once; the replica is durable at completion.
    pub fn create_replica<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        spec: ReplicaSpec,
    ) -> Result<ReplicaSlot, StoreError> {
        Err(StoreError::Closed)
    }
    /// Deletes a replica. Operations on it that are under way end first.
    pub fn delete_replica<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Grows a replica; a smaller size than now is refused.
    pub fn grow_replica<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        size_blocks: u64,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Takes a replica out of service, or back.
    pub fn set_evicted<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        evicted: bool,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Replaces the member's state in one durable step (M1, M3, M5, M7, SetLast).
    pub fn set_state<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        state: MemberState,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// M4's durable step: the blocks, and `last` := `position`.
    pub fn write<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        position: Position,
        range: BlockRange,
        content: Content<'_>,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// M6. Completes as [`crate::Outcome::Copied`].
    pub fn copy<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        steps: &[CopyStep],
        content: Content<'_>,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// M8's Equalise.
    pub fn equalise<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        positions: &[Position],
        content: Content<'_>,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// R6: rewrites a block that has exactly `position`; else completes with
    /// [`StoreError::PositionChanged`].
    pub fn repair<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        block: Block,
        position: Position,
        content: Content<'_>,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Reads and verifies. Completes as [`crate::Outcome::Read`]; give the outcome back with
    /// [`Store::recycle`].
    pub fn read<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        range: BlockRange,
        torn: TornBlocks,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Gives the memory of a read back.
    pub fn recycle<D: Device>(&mut self, dev: &mut D, outcome: crate::ReadOutcome) {}
    /// Positions of an extent's blocks above zero. Completes as [`crate::Outcome::Positions`].
    pub fn extent_positions<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        extent: ExtentIndex,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Digests of the extents in [from, from + count) that hold a position above zero.
    pub fn digests<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        from: ExtentIndex,
        count: u32,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }
    /// Up to `limit` blocks from `from` on whose position is above `floor`.
    pub fn list_above<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        floor: Position,
        from: Block,
        limit: usize,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }

    /// Takes the result of a device operation. `buf` is what the operation was given.
    pub fn device_completed<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        result: io::Result<usize>,
        buf: Option<IoBuf>,
    ) {
    }
    /// End of a turn: starts the next journal write with everything that was submitted, and looks
    /// whether the index has got further.
    pub fn submit<D: Device>(&mut self, dev: &mut D) {}
    /// The next thing that has finished.
    pub fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }
    /// Bytes that the next home write would move; None when there is nothing to do or one is
    /// under way.
    pub fn home_write_cost(&self) -> Option<u64> {
        None
    }
    /// Starts a home write of about [`Store::home_write_cost`] bytes.
    pub fn start_home_write<D: Device>(&mut self, dev: &mut D) {}
    /// Whether the journal or the memory for dirty data is nearly full: home writes come first now, and
    /// no new writes should be admitted.
    pub fn is_under_pressure(&self) -> bool {
        false
    }
}
