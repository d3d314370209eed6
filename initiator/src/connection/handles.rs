//! Handles of attachments on a connection: small numbers, because nodes look them up in a table.

use std::collections::VecDeque;

use super::link::LinkId;

/// Nodes refuse handles from here on.
const HANDLES_MAX: usize = 1 << 16;
/// A handle is used again only after so many others were given back: an answer that is still on its way
/// to the former owner must find nobody.
const REST: usize = 4096;

/// Who has which handle.
#[derive(Debug, Default)]
pub(super) struct Handles {
    owners: Vec<Option<LinkId>>,
    resting: VecDeque<u32>,
}

impl Handles {
    /// Links that a connection can have: each has a handle, or is about to take one while it gives
    /// one back.
    pub(super) const LINKS_MAX: usize = HANDLES_MAX - REST - 1;

    /// A handle that nobody has had for long.
    ///
    /// # Panics
    /// With more than [`Handles::LINKS_MAX`] owners.
    pub(super) fn take(&mut self, owner: LinkId) -> u32 {
        if self.resting.len() <= REST && self.owners.len() < HANDLES_MAX {
            self.owners.push(Some(owner));
            return self.owners.len() as u32 - 1;
        }
        let handle = self.resting.pop_front().expect("fewer links than handles");
        self.owners[handle as usize] = Some(owner);
        handle
    }

    pub(super) fn give_back(&mut self, handle: u32) {
        if let Some(owner) = self.owners.get_mut(handle as usize)
            && owner.take().is_some()
        {
            self.resting.push_back(handle);
        }
    }

    pub(super) fn owner(&self, handle: u32) -> Option<LinkId> {
        *self.owners.get(handle as usize)?
    }

    /// For a new connection: all are fresh.
    pub(super) fn clear(&mut self) {
        self.owners.clear();
        self.resting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_rests_before_it_is_used_again_and_none_is_too_large() {
        let mut handles = Handles::default();
        let kept = handles.take(LinkId(1));
        let first = handles.take(LinkId(2));
        handles.give_back(first);
        handles.give_back(first);
        assert_eq!(
            (handles.owner(first), handles.owner(u32::MAX)),
            (None, None)
        );
        let mut again = None;
        for uses in 0..100_000 {
            let handle = handles.take(LinkId(3));
            assert!((handle as usize) < HANDLES_MAX && handle != kept);
            if handle == first {
                again = again.or(Some(uses));
            }
            handles.give_back(handle);
        }
        assert!(again >= Some(REST), "{again:?}");
        assert!(handles.owners.len() <= REST + 3);
        assert_eq!(handles.owner(kept), Some(LinkId(1)));
    }
}
