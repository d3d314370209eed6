//! The table of a replica: which slot holds which extent, and which extents are holes.

use std::collections::BTreeMap;

use super::extents;
use crate::format::hole_page;
use crate::format::page::Side;

/// No slot: the extent is a hole, or was never written.
pub(crate) const NO_SLOT: u32 = u32::MAX;
/// Extents per group, the unit of hole pages.
pub(crate) const GROUP: u64 = hole_page::EXTENTS as u64;

/// What is known of an extent without its header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Where it lies, or [`NO_SLOT`].
    pub slot: u32,
    /// Its place in memory, or [`extents::NONE`].
    pub memory: u32,
    /// With a slot: the highest position of a block. Else the one that all blocks have.
    pub position: u64,
    /// Log sequence number of its header on the device.
    pub lsn: u64,
    /// The header on the device has torn blocks.
    pub torn: bool,
    /// A rebuild found a damaged page beside this header: it may not be the newest.
    pub suspect: bool,
}

impl Entry {
    const NONE: Entry = Entry {
        slot: NO_SLOT,
        memory: extents::NONE,
        position: 0,
        lsn: 0,
        torn: false,
        suspect: false,
    };
}

/// The hole page of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hole {
    /// Its slot in the area of hole pages.
    pub slot: u32,
    pub side: Side,
    pub version: u64,
    /// First journal record whose effects are not in the page on the device; 0: clean.
    pub since: u64,
    pub newest: u64,
    /// A home write of it is under way, with everything up to this record.
    pub homing_lsn: u64,
    /// The older page of the pair still has older content.
    pub settle: bool,
    /// The home write under way does nothing but rewrite the older page.
    pub settling: bool,
    /// It is in the list of groups to be written home.
    pub queued: bool,
}

impl Hole {
    /// A page that was just given to a group.
    pub(crate) fn new(slot: u32) -> Hole {
        Hole {
            slot,
            side: Side::Neither,
            version: 0,
            since: 0,
            newest: 0,
            homing_lsn: 0,
            settle: false,
            settling: false,
            queued: false,
        }
    }
}

/// 256 consecutive extents.
pub(crate) struct Group {
    pub entries: Box<[Entry; GROUP as usize]>,
    pub hole: Option<Hole>,
}

/// The extents of a replica.
#[derive(Default)]
pub(crate) struct Table {
    pub groups: BTreeMap<u64, Group>,
    pub allocated: u64,
}

impl Table {
    pub(crate) fn get(&self, extent: u64) -> Entry {
        self.groups
            .get(&(extent / GROUP))
            .map_or(Entry::NONE, |group| {
                group.entries[(extent % GROUP) as usize]
            })
    }

    pub(crate) fn group_mut(&mut self, group: u64) -> &mut Group {
        self.groups.entry(group).or_insert_with(|| Group {
            entries: Box::new([Entry::NONE; GROUP as usize]),
            hole: None,
        })
    }

    /// The entry, which is made when there was none.
    pub(crate) fn entry_mut(&mut self, extent: u64) -> &mut Entry {
        &mut self.group_mut(extent / GROUP).entries[(extent % GROUP) as usize]
    }

    /// Gives an extent a slot, or takes it away.
    pub(crate) fn set_slot(&mut self, extent: u64, slot: u32) {
        let entry = self.entry_mut(extent);
        let before = std::mem::replace(&mut entry.slot, slot);
        self.allocated += u64::from(slot != NO_SLOT);
        self.allocated -= u64::from(before != NO_SLOT);
    }

    /// Extents from `from` on that have a slot or a position, ascending.
    pub(crate) fn iter_from(&self, from: u64) -> impl Iterator<Item = (u64, &Entry)> {
        self.groups
            .range(from / GROUP..)
            .flat_map(move |(number, group)| {
                group
                    .entries
                    .iter()
                    .enumerate()
                    .map(move |(i, entry)| (number * GROUP + i as u64, entry))
                    .filter(move |(extent, entry)| {
                        *extent >= from && (entry.slot != NO_SLOT || entry.position != 0)
                    })
            })
    }
}
