//! The volumes of a thread by handle, by UUID and by name.

use std::collections::HashMap;

use ashlar_replication::values::VolumeId;

use crate::front_end::VolumeHandle;
use crate::volume::Volume;

/// Slots in the low bits of a handle: the most volumes of a thread. The rest counts uses of the slot.
const SLOT_BITS: u32 = 16;
const VOLUMES_MAX: usize = 1 << SLOT_BITS;

#[derive(Default)]
struct Slot {
    /// Of the volume in the slot, or of the next one.
    handle: u32,
    volume: Option<Box<Volume>>,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_id: HashMap<VolumeId, VolumeHandle>,
}

impl Table {
    /// The handle of the next volume; None when there are too many.
    pub(super) fn next_handle(&mut self) -> Option<VolumeHandle> {
        if self.free.is_empty() {
            let index = self.slots.len();
            if index == VOLUMES_MAX {
                return None;
            }
            self.slots.push(Slot {
                handle: index as u32,
                volume: None,
            });
            self.free.push(index as u32);
        }
        let index = *self.free.last()?;
        Some(VolumeHandle(self.slots[index as usize].handle))
    }

    /// Adds a volume under the handle that [`Table::next_handle`] gave.
    pub(super) fn insert(&mut self, handle: VolumeHandle, volume: Volume) {
        let index = self.free.pop();
        assert_eq!(
            index,
            Some(slot(handle) as u32),
            "handles are used in order"
        );
        self.by_id.insert(volume.spec.id, handle);
        self.slots[slot(handle)].volume = Some(Box::new(volume));
    }

    pub(super) fn remove(&mut self, handle: VolumeHandle) -> Option<Box<Volume>> {
        let slot = self
            .slots
            .get_mut(slot(handle))
            .filter(|slot| slot.handle == handle.0)?;
        let volume = slot.volume.take()?;
        slot.handle = slot.handle.wrapping_add(1 << SLOT_BITS);
        self.by_id.remove(&volume.spec.id);
        self.free.push(handle.0 & (VOLUMES_MAX as u32 - 1));
        Some(volume)
    }

    pub(super) fn get(&self, handle: VolumeHandle) -> Option<&Volume> {
        let slot = self
            .slots
            .get(slot(handle))
            .filter(|slot| slot.handle == handle.0)?;
        slot.volume.as_deref()
    }

    pub(super) fn get_mut(&mut self, handle: VolumeHandle) -> Option<&mut Volume> {
        let slot = self
            .slots
            .get_mut(slot(handle))
            .filter(|slot| slot.handle == handle.0)?;
        slot.volume.as_deref_mut()
    }

    pub(super) fn by_id(&self, id: VolumeId) -> Option<VolumeHandle> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (VolumeHandle, &Volume)> {
        let used = |slot: &'_ Slot| slot.volume.is_some();
        self.slots
            .iter()
            .filter(move |slot| used(slot))
            .filter_map(|slot| {
                slot.volume
                    .as_deref()
                    .map(|volume| (VolumeHandle(slot.handle), volume))
            })
    }

    pub(super) fn handles(&self) -> Vec<VolumeHandle> {
        self.iter().map(|(handle, _)| handle).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}

fn slot(handle: VolumeHandle) -> usize {
    handle.0 as usize & (VOLUMES_MAX - 1)
}
