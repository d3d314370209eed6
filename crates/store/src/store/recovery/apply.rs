//! Applying what records say of replicas and whole extents.

use ashlar_replication::values::{DeviceId, Position};

use super::super::replicas::Volume;
use super::super::{Freed, Store};
use super::{BlockKey, Event, RecoverError, Replay, impossible};
use crate::OpenError;
use crate::device::Device;
use crate::format::extent_header::BLOCKS;
use crate::format::volume_header::VolumeImage;
use crate::journal::descriptor::{Descriptor, ImageKind, WriteIn};
use crate::memory::extents::{self};
use crate::memory::table::{NO_SLOT, Table};

impl Store {
    pub(super) fn replay<D: Device>(
        &mut self,
        dev: &mut D,
        replay: &mut Replay,
        descriptor: &Descriptor,
        data: &[u8],
        lsn: u64,
    ) -> Result<(), RecoverError> {
        replay.order += 1;
        let (Descriptor::Write(WriteIn { replica, .. })
        | Descriptor::Image { replica, .. }
        | Descriptor::Delete { replica }
        | Descriptor::InPlace { replica, .. }) = descriptor;
        if *replica >= self.layout.replicas {
            return Err(impossible(lsn));
        }
        match descriptor {
            Descriptor::Write(write) => self.replay_write(dev, replay, write, data, lsn),
            Descriptor::Image {
                replica,
                kind,
                image,
            } => {
                self.replay_image(replay, *replica, *kind, image, lsn);
                Ok(())
            }
            Descriptor::Delete { replica } => {
                self.replay_delete(replay, *replica, lsn);
                Ok(())
            }
            Descriptor::InPlace {
                replica,
                extent,
                first,
                count,
                announced,
            } => {
                for block in *first..first + count {
                    let key = (*replica, *extent, block as u16);
                    self.replay_in_place(replay, key, *announced);
                }
                Ok(())
            }
        }
    }

    /// Notes that record `lsn` changed the header of a replica.
    pub(super) fn touch_volume(&mut self, replica: u32, lsn: u64) {
        let volume = self.volumes[replica as usize]
            .as_mut()
            .expect("the slot is in use");
        if volume.since == 0 {
            volume.since = lsn;
        }
        if !std::mem::replace(&mut volume.queued, true) {
            self.dirty_volumes.push(replica);
        }
    }

    pub(super) fn replay_image(
        &mut self,
        replay: &mut Replay,
        replica: u32,
        kind: ImageKind,
        image: &VolumeImage,
        lsn: u64,
    ) {
        let nonce = image.state.id.nonce;
        let known = self.volumes[replica as usize]
            .as_ref()
            .is_some_and(|v| v.nonce() == nonce);
        if known
            && replay
                .findings
                .header_lsn
                .get(&replica)
                .is_some_and(|header| lsn <= *header)
        {
            return;
        }
        if !known {
            if kind != ImageKind::Creates {
                // Deleted further on, and its header is free already.
                return;
            }
            self.drop_table(replay, replica, lsn);
            let mut volume = Volume::new(image.clone());
            (volume.side, volume.version) = self.header_sides[replica as usize];
            self.volumes[replica as usize] = Some(Box::new(volume));
            let mut loose = std::mem::take(&mut replay.findings.loose_holes);
            loose.retain(|page| !self.attach_hole(page));
            replay.findings.loose_holes = loose;
            replay.findings.header_lsn.remove(&replica);
            replay.events.remove(&replica);
        }
        let volume = self.volume_mut(replica);
        let last = volume.durable.state.last;
        volume.durable = image.clone();
        volume.durable.state.last = last;
        if kind != ImageKind::KeepsLast {
            let event = Event::Explicit(image.state.last);
            replay.events.entry(replica).or_default().push(event);
        }
        self.touch_volume(replica, lsn);
    }

    pub(super) fn replay_delete(&mut self, replay: &mut Replay, replica: u32, lsn: u64) {
        self.drop_table(replay, replica, lsn);
        if self.volumes[replica as usize].is_none() {
            // The header is free already. The slot is not, until the tail has passed: records before this one
            // name it.
            let mut volume = Volume::new(placeholder(self.device));
            (volume.side, volume.version) = self.header_sides[replica as usize];
            self.volumes[replica as usize] = Some(Box::new(volume));
        }
        replay.events.remove(&replica);
        let volume = self.volume_mut(replica);
        volume.deleting = true;
        volume.since = if volume.since == 0 { lsn } else { volume.since };
        self.touch_volume(replica, lsn);
        self.pending_free.push_back((lsn, Freed::Volume(replica)));
    }

    /// Forgets the extents of a replica.
    pub(super) fn drop_table(&mut self, replay: &mut Replay, replica: u32, lsn: u64) {
        let Some(volume) = self.volumes[replica as usize].as_mut() else {
            return;
        };
        let table: Table = std::mem::take(&mut volume.table);
        for group in table.groups.values() {
            if let Some(hole) = group.hole {
                self.pending_free.push_back((lsn, Freed::Hole(hole.slot)));
            }
            for entry in group.entries.iter() {
                if entry.slot != NO_SLOT {
                    replay.slots.insert(entry.slot);
                }
                if entry.memory != extents::NONE {
                    self.drop_memory(entry.memory);
                }
            }
        }
        self.dirty_groups.retain(|(r, _)| *r != replica);
        replay.candidates.retain(|(r, _, _), _| *r != replica);
        replay.certain.retain(|(r, _), _| *r != replica);
        replay.bases.retain(|(r, _), _| *r != replica);
    }

    /// Forgets what is known of an extent.
    pub(super) fn drop_extent(&mut self, replay: &mut Replay, replica: u32, extent: u64) {
        let entry = self.volume_mut(replica).table.entry_mut(extent);
        let memory = std::mem::replace(&mut entry.memory, extents::NONE);
        if entry.slot != NO_SLOT {
            replay.slots.insert(entry.slot);
        }
        if memory != extents::NONE {
            self.drop_memory(memory);
        }
        replay.bases.remove(&(replica, extent));
        let blocks = (replica, extent, 0)..=(replica, extent, u16::MAX);
        let stale: Vec<BlockKey> = replay.candidates.range(blocks).map(|(k, _)| *k).collect();
        for key in stale {
            replay.candidates.remove(&key);
        }
    }

    pub(super) fn replay_hole(
        &mut self,
        replay: &mut Replay,
        write: &WriteIn,
        lsn: u64,
    ) -> Result<(), RecoverError> {
        self.drop_extent(replay, write.replica, write.extent);
        self.volume_mut(write.replica)
            .table
            .set_slot(write.extent, NO_SLOT);
        let certain = Box::new([replay.order; BLOCKS]);
        replay
            .certain
            .insert((write.replica, write.extent), certain);
        let position = write.positions[0];
        if !self.make_hole(write.replica, write.extent, position, lsn, lsn) {
            return Err(OpenError::JournalDamaged {
                sequence: lsn,
                reason: "it needs a hole page, and all are in use",
            }
            .into());
        }
        Ok(())
    }
}

/// Stands for a replica whose header is free already.
fn placeholder(device: DeviceId) -> VolumeImage {
    use ashlar_replication::configuration::{Ack, MemberState, ReplicaState, Role};
    use ashlar_replication::values::{Epoch, EpochNumber, MemberId, Pass, VolumeId};
    VolumeImage {
        volume: VolumeId::default(),
        key: [0; 32],
        ack: Ack::Majority,
        size_blocks: 0,
        evicted: false,
        state: MemberState {
            id: MemberId { device, nonce: 0 },
            role: Role::Data,
            promised: Epoch::default(),
            configuration: None,
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        },
    }
}
