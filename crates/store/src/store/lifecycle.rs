//! Making, deleting and changing replicas: everything that is one descriptor in the journal.

use ashlar_replication::configuration::MemberState;

use super::Store;
use super::replicas::{Effect, LastOfImage, MutationReply, Outstanding, Volume};
use crate::StoreError;
use crate::api::{ReplicaSlot, ReplicaSpec};
use crate::device::Device;
use crate::format::volume_header::VolumeImage;
use crate::journal::descriptor::{self, IMAGE_DESCRIPTOR_BYTES, ImageKind};

impl Store {
    /// Makes a replica. The slot can be used at once; the replica is durable at completion.
    ///
    /// # Errors
    /// [`StoreError::AlreadyExists`], [`StoreError::ReplicasFull`], [`StoreError::Closed`].
    pub fn create_replica<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        spec: ReplicaSpec,
    ) -> Result<ReplicaSlot, StoreError> {
        if self.closed {
            return Err(StoreError::Closed);
        }
        if self.by_volume.contains_key(&spec.volume) {
            return Err(StoreError::AlreadyExists);
        }
        let slot = self
            .volumes
            .iter()
            .position(Option::is_none)
            .ok_or(StoreError::ReplicasFull)?;
        let image = VolumeImage {
            volume: spec.volume,
            key: spec.key,
            ack: spec.ack,
            size_blocks: spec.size_blocks,
            evicted: false,
            state: spec.state,
        };
        self.by_volume.insert(spec.volume, slot as u32);
        let mut volume = Volume::new(image.clone());
        (volume.side, volume.version) = self.header_sides[slot];
        self.volumes[slot] = Some(Box::new(volume));
        self.journal_image(dev, Some(token), slot as u32, image, ImageKind::Creates);
        Ok(ReplicaSlot(slot as u32))
    }

    /// Deletes a replica. Mutations of it that are under way end first; its slot knows it no more.
    ///
    /// # Errors
    /// [`StoreError::UnknownReplica`], [`StoreError::Closed`].
    pub fn delete_replica<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
    ) -> Result<(), StoreError> {
        let volume = self.check_replica(slot)?.replica.volume;
        let lsn = self.reserve(dev, IMAGE_DESCRIPTOR_BYTES, 0);
        descriptor::encode_delete(self.descriptors(), slot.0);
        self.by_volume.remove(&volume);
        self.volume_mut(slot.0).deleting = true;
        let outstanding = Outstanding {
            lsn,
            token: Some(token),
            reply: MutationReply::Done,
            effect: Effect::Delete,
            done: false,
        };
        self.push_outstanding(slot.0, outstanding, true);
        Ok(())
    }

    /// Grows a replica.
    ///
    /// # Errors
    /// [`StoreError::BadRange`] for a size below the present one, and as above.
    pub fn grow_replica<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        size_blocks: u64,
    ) -> Result<(), StoreError> {
        if size_blocks < self.check_replica(slot)?.replica.size_blocks {
            return Err(StoreError::BadRange);
        }
        let volume = self.volume_mut(slot.0);
        volume.replica.size_blocks = size_blocks;
        let image = volume.submitted_image();
        self.journal_image(dev, Some(token), slot.0, image, ImageKind::KeepsLast);
        Ok(())
    }

    /// Takes a replica out of service, or back.
    ///
    /// # Errors
    /// [`StoreError::UnknownReplica`], [`StoreError::Closed`].
    pub fn set_evicted<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        evicted: bool,
    ) -> Result<(), StoreError> {
        self.check_replica(slot)?;
        let volume = self.volume_mut(slot.0);
        volume.replica.evicted = evicted;
        let image = volume.submitted_image();
        self.journal_image(dev, Some(token), slot.0, image, ImageKind::KeepsLast);
        Ok(())
    }

    /// Replaces the member's state in one durable step (M1, M3, M5, M7, SetLast).
    ///
    /// A state whose `last` differs from the one submitted before sets `last`, also when a large write
    /// before it turns out not to have become durable. One whose `last` is the same leaves it to
    /// the writes.
    ///
    /// # Errors
    /// [`StoreError::BadRange`] for another identity, [`StoreError::UnknownReplica`], [`StoreError::Closed`].
    pub fn set_state<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        slot: ReplicaSlot,
        state: MemberState,
    ) -> Result<(), StoreError> {
        let before = &self.check_replica(slot)?.replica.state;
        if before.id != state.id {
            return Err(StoreError::BadRange);
        }
        let kind = if before.last == state.last {
            ImageKind::KeepsLast
        } else {
            ImageKind::SetsLast
        };
        let volume = self.volume_mut(slot.0);
        volume.replica.state = state;
        let image = volume.submitted_image();
        self.journal_image(dev, Some(token), slot.0, image, kind);
        Ok(())
    }

    pub(super) fn check_replica(&self, slot: ReplicaSlot) -> Result<&Volume, StoreError> {
        if self.closed {
            return Err(StoreError::Closed);
        }
        self.live(slot.0).ok_or(StoreError::UnknownReplica)
    }

    pub(super) fn journal_image<D: Device>(
        &mut self,
        dev: &mut D,
        token: Option<u64>,
        replica: u32,
        image: VolumeImage,
        kind: ImageKind,
    ) {
        let lsn = self.reserve(dev, IMAGE_DESCRIPTOR_BYTES, 0);
        descriptor::encode_image(self.descriptors(), replica, kind, &image);
        let last = match kind {
            ImageKind::KeepsLast => LastOfImage::Ignored,
            ImageKind::Creates | ImageKind::SetsLast => LastOfImage::Counts,
        };
        let outstanding = Outstanding {
            lsn,
            token,
            reply: MutationReply::Done,
            effect: Effect::Image(Box::new(image), last),
            done: false,
        };
        self.push_outstanding(replica, outstanding, true);
    }
}
