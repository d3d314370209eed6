//! What must always be true of an open store; for tests and simulation.

use std::collections::BTreeMap;

use super::{Freed, Store};
use crate::memory::extents;
use crate::memory::table::NO_SLOT;

impl Store {
    /// Gives the buffers of a store that crashed back to its device.
    #[cfg(any(test, feature = "test-support"))]
    pub fn abandon<D: crate::Device>(&mut self, dev: &mut D) {
        let building = self
            .building
            .drain(..)
            .map(crate::journal::record::Builder::into_buffer);
        for buf in self.spare_records.drain(..).chain(building) {
            dev.recycle(buf);
        }
    }

    /// Whether everything is at home and the journal holds nothing that recovery would look at.
    #[cfg(any(test, feature = "test-support"))]
    pub fn is_settled(&self) -> bool {
        self.tail > self.durable && self.building.is_empty() && self.journal_write.is_none()
    }

    /// Where a block's content lies on the device, if it lies there only: offset within [`crate::Part::Blocks`].
    #[cfg(any(test, feature = "test-support"))]
    pub fn place_of(
        &self,
        slot: crate::ReplicaSlot,
        block: ashlar_replication::values::Block,
    ) -> Option<u64> {
        let volume = self.volumes.get(slot.0 as usize)?.as_ref()?;
        let entry = volume.table.get(block.extent().0);
        if entry.slot == NO_SLOT || entry.memory == extents::NONE {
            return None;
        }
        let range = ashlar_replication::values::BlockRange {
            start: block,
            count: 1,
        };
        let extent = self.extents.get(entry.memory);
        let within = block.within_extent();
        let state = extent.block(within as usize);
        let is_at_home = extent.known.get(within as usize)
            && state.present
            && !state.torn
            && state.page == crate::memory::pages::NONE
            && extent.homing_lsn == 0
            && !self.is_being_written(entry.memory, range);
        is_at_home.then(|| self.layout.block(entry.slot, within))
    }

    /// Checks that every slot has one owner, and that tables and memory agree.
    ///
    /// # Panics
    /// When something does not hold.
    pub fn check_invariants(&self) {
        let mut owners: BTreeMap<u32, (usize, u64)> = BTreeMap::new();
        for (replica, volume) in self.volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            let mut allocated = 0;
            for (extent, entry) in volume.table.iter_from(0) {
                if entry.slot == NO_SLOT {
                    let group = &volume.table.groups[&(extent / 256)];
                    assert!(
                        group.hole.is_some(),
                        "extent {extent} is a hole without a hole page"
                    );
                    continue;
                }
                allocated += 1;
                let other = owners.insert(entry.slot, (replica, extent));
                assert_eq!(
                    other, None,
                    "slot {} of ({replica}, {extent}) has two owners",
                    entry.slot
                );
                assert!(
                    self.slots.is_used(entry.slot),
                    "slot {} is in use and free",
                    entry.slot
                );
                if entry.memory != extents::NONE {
                    let memory = self.extents.get(entry.memory);
                    assert_eq!((memory.slot, memory.owner.extent), (entry.slot, extent));
                }
            }
            assert_eq!(volume.table.allocated, allocated);
        }
        for (_, freed) in &self.pending_free {
            if let Freed::Extent(slot) = freed {
                assert!(
                    self.slots.is_used(*slot),
                    "slot {slot} waits to be freed and is free"
                );
                assert!(
                    !owners.contains_key(slot),
                    "slot {slot} waits to be freed and is in use"
                );
            }
        }
    }
}
