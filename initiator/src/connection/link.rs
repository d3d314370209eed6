//! The members of volumes that share a connection.

use ashlar_replication::values::{Epoch, MemberId, VolumeId};
use ashlar_wire::proof::{Subject, VolumeKey};

use super::handle;
use crate::front_end::VolumeHandle;

/// Place of a link on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinkId(pub(super) u32);

/// How far the attachment of a link has come on the present connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attachment {
    /// No Fence was sent.
    None,
    /// The Fence is under way.
    Fencing(Epoch),
    /// The member promised, and proved that it knows the key.
    Promised(Epoch),
}

impl Attachment {
    pub(super) fn epoch(self) -> Option<Epoch> {
        match self {
            Attachment::None => None,
            Attachment::Fencing(epoch) | Attachment::Promised(epoch) => Some(epoch),
        }
    }
}

/// What a link is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkSpec {
    /// The volume on this thread, for notices.
    pub(crate) volume: VolumeHandle,
    /// The volume's UUID.
    pub(crate) volume_id: VolumeId,
    /// Its member on the peer's device.
    pub(crate) member: MemberId,
    /// The volume's key.
    pub(crate) key: VolumeKey,
}

/// One member of one volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) spec: LinkSpec,
    pub(super) handle: u32,
    pub(super) attachment: Attachment,
}

impl Link {
    pub(super) fn subject(&self, epoch: Epoch) -> Subject {
        let LinkSpec {
            volume_id, member, ..
        } = self.spec;
        Subject {
            volume: volume_id,
            member,
            epoch,
            handle: self.handle,
        }
    }
}

#[derive(Debug)]
enum Slot {
    /// The handle that the next user of the slot begins with.
    Free(u32),
    Used(Link),
}

/// All links of a connection.
#[derive(Debug, Default)]
pub(super) struct Links {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Links {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// None when there are too many.
    pub(super) fn insert(&mut self, spec: LinkSpec) -> Option<LinkId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < handle::LINKS_MAX => {
                let index = self.slots.len() as u32;
                self.slots.push(Slot::Free(handle::pack(index, 0)));
                index
            }
            None => return None,
        };
        let slot = &mut self.slots[index as usize];
        let Slot::Free(handle) = *slot else {
            unreachable!("a slot of the free list is free")
        };
        *slot = Slot::Used(Link {
            spec,
            handle,
            attachment: Attachment::None,
        });
        Some(LinkId(index))
    }

    pub(super) fn remove(&mut self, id: LinkId) -> Option<Link> {
        let slot = self.slots.get_mut(id.0 as usize)?;
        let Slot::Used(link) = slot else { return None };
        let link = *link;
        *slot = Slot::Free(handle::next(link.handle));
        self.free.push(id.0);
        Some(link)
    }

    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        match self.slots.get_mut(id.0 as usize) {
            Some(Slot::Used(link)) => Some(link),
            _ => None,
        }
    }

    /// The link that uses `handle` now.
    pub(super) fn by_handle(&mut self, handle: u32) -> Option<&mut Link> {
        let id = LinkId(handle::slot(handle) as u32);
        self.get_mut(id).filter(|link| link.handle == handle)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Link> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Used(link) => Some(link),
            Slot::Free(_) => None,
        })
    }

    /// Nothing that was sent on the connection counts any more.
    pub(super) fn reset(&mut self) {
        for slot in &mut self.slots {
            if let Slot::Used(link) = slot {
                link.attachment = Attachment::None;
                link.handle = handle::next(link.handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(volume: u32) -> LinkSpec {
        LinkSpec {
            volume: VolumeHandle(volume),
            volume_id: VolumeId([volume as u8; 16]),
            member: MemberId::default(),
            key: VolumeKey([0; 32]),
        }
    }

    #[test]
    fn a_late_answer_to_a_link_that_is_gone_finds_nobody_even_when_its_slot_is_used_again() {
        let mut links = Links::default();
        let first = links.insert(link(1)).unwrap();
        let handle = links.get_mut(first).unwrap().handle;
        assert_eq!(
            links.by_handle(handle).unwrap().spec.volume,
            VolumeHandle(1)
        );
        links.remove(first).unwrap();
        assert!(links.by_handle(handle).is_none() && links.len() == 0);
        let second = links.insert(link(2)).unwrap();
        assert_eq!(second, first);
        assert!(links.by_handle(handle).is_none());
        links.reset();
        assert_eq!(links.iter().count(), 1);
        assert!(links.by_handle(u32::MAX).is_none());
    }
}
