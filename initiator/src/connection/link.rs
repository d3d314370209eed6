//! The members of volumes that share a connection.

use ashlar_replication::values::{Epoch, MemberId, VolumeId};
use ashlar_wire::proof::{Subject, VolumeKey};

use super::handles::Handles;
use crate::front_end::VolumeHandle;

/// Place of a link on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinkId(pub(super) u32);

/// How far the attachment of a link has come on the present connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attachment {
    /// Nothing is asked, nothing that comes is listened to.
    None,
    /// The Fence is under way.
    Fencing(Epoch),
    /// The member promised, and proved that it knows the key.
    Promised(Epoch),
    /// It has promised a newer epoch since. What it answers to older requests is a fact still (W2).
    Superseded(Epoch),
}

impl Attachment {
    /// Whether answers to other requests than Fence are listened to.
    pub(super) fn is_proved(self) -> bool {
        matches!(self, Attachment::Promised(_) | Attachment::Superseded(_))
    }

    pub(super) fn epoch(self) -> Option<Epoch> {
        match self {
            Attachment::None => None,
            Attachment::Fencing(epoch)
            | Attachment::Promised(epoch)
            | Attachment::Superseded(epoch) => Some(epoch),
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
    /// On the present connection, once it was fenced there.
    pub(super) handle: Option<u32>,
    pub(super) attachment: Attachment,
}

impl Link {
    /// What its proofs are about.
    pub(super) fn subject(&self, epoch: Epoch, handle: u32) -> Subject {
        let LinkSpec {
            volume_id, member, ..
        } = self.spec;
        Subject {
            volume: volume_id,
            member,
            epoch,
            handle,
        }
    }
}

/// All links of a connection.
#[derive(Debug, Default)]
pub(super) struct Links {
    slots: Vec<Option<Link>>,
    free: Vec<u32>,
    handles: Handles,
}

impl Links {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// None when there are too many.
    pub(super) fn insert(&mut self, spec: LinkSpec) -> Option<LinkId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < Handles::LINKS_MAX => {
                self.slots.push(None);
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let link = Link {
            spec,
            handle: None,
            attachment: Attachment::None,
        };
        self.slots[index as usize] = Some(link);
        Some(LinkId(index))
    }

    pub(super) fn remove(&mut self, id: LinkId) -> Option<Link> {
        let link = self.slots.get_mut(id.0 as usize)?.take()?;
        self.free.push(id.0);
        if let Some(handle) = link.handle {
            self.handles.give_back(handle);
        }
        Some(link)
    }

    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// The link that has `handle` now.
    pub(super) fn by_handle(&mut self, handle: u32) -> Option<&mut Link> {
        let id = self.handles.owner(handle)?;
        self.get_mut(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Link> {
        self.slots.iter().flatten()
    }

    /// Takes the handle of a link away: what still comes for it finds nobody. Returns it.
    pub(super) fn release(&mut self, id: LinkId) -> Option<u32> {
        let link = self.slots.get_mut(id.0 as usize)?.as_mut()?;
        link.attachment = Attachment::None;
        let handle = link.handle.take()?;
        self.handles.give_back(handle);
        Some(handle)
    }

    /// The handle of a link, a fresh one if it has none.
    pub(super) fn handle(&mut self, id: LinkId) -> Option<(u32, &mut Link)> {
        let link = self.slots.get_mut(id.0 as usize)?.as_mut()?;
        let handle = *link.handle.get_or_insert_with(|| self.handles.take(id));
        Some((handle, link))
    }

    /// Nothing that was sent on the connection counts any more.
    pub(super) fn reset(&mut self) {
        for link in self.slots.iter_mut().flatten() {
            link.attachment = Attachment::None;
            link.handle = None;
        }
        self.handles.clear();
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
        let (handle, _) = links.handle(first).unwrap();
        assert_eq!(
            links.by_handle(handle).unwrap().spec.volume,
            VolumeHandle(1)
        );
        links.remove(first).unwrap();
        assert!(links.by_handle(handle).is_none() && links.len() == 0);
        let second = links.insert(link(2)).unwrap();
        assert_eq!(second, first);
        assert_ne!(links.handle(second).unwrap().0, handle);
        assert!(links.by_handle(handle).is_none());
        links.reset();
        assert_eq!(links.iter().count(), 1);
        assert!(links.by_handle(u32::MAX).is_none());
    }
}
