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
