//! Extents in memory: headers that are cached, and what was written since they were written home.

use super::bits::Bits;
use super::pages;
use crate::format::extent_header::{BLOCKS, BlockMap, Owner};
use crate::format::page::Side;

/// No extent.
pub(crate) const NONE: u32 = u32::MAX;

/// How far the header on the device has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Only blocks in `known` are known.
    Cold,
    /// A read of the header is under way.
    Loading,
    /// Every block is known.
    Loaded,
}

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockState {
    pub position: u64,
    pub crc: u32,
    pub present: bool,
    pub torn: bool,
    /// Where its data is in memory; [`pages::NONE`]: at home, or zeros.
    pub page: u32,
}

impl BlockState {
    /// What a header says of a block.
    pub(crate) fn at_home(map: &BlockMap, i: usize) -> BlockState {
        BlockState {
            position: map.positions[i],
            crc: map.crcs[i],
            present: map.present.get(i),
            torn: map.torn.get(i),
            page: pages::NONE,
        }
    }
    pub(crate) fn zeros(position: u64) -> BlockState {
        BlockState {
            position,
            crc: 0,
            present: false,
            torn: false,
            page: pages::NONE,
        }
    }
}

/// An extent in memory.
pub(crate) struct Extent {
    pub owner: Owner,
    /// Where it lies on the device.
    pub slot: u32,
    pub map: BlockMap,
    /// Data of a block that is not (known to be) at home.
    pub pages: [u32; BLOCKS],
    /// Blocks whose entry in `map` counts.
    pub known: Bits,
    /// Blocks that the home write under way writes, and that were not changed since it began.
    pub homing: Bits,
    pub load: Load,
    /// How often the header could not be read.
    pub load_failures: u32,
    /// Which page of the header is the newest on the device. Valid when loaded.
    pub side: Side,
    /// Journal record that changed it last.
    pub newest: u64,
    /// The last durable one.
    pub newest_durable: u64,
    /// The last one that is in the header on the device since the extent came into memory; 0: unknown.
    pub homed: u64,
    /// The home write under way was begun when this record was durable; 0: none is under way.
    pub homing_lsn: u64,
    /// Large writes whose announcement is durable and whose data may not be.
    pub in_place: u32,
    /// Entries of the undo list that refer to it.
    pub undo: u32,
    /// Second chance for the clock that evicts.
    pub referenced: bool,
    /// Its replica was deleted; it goes when what is under way has ended.
    pub orphan: bool,
}

impl Extent {
    fn new(owner: Owner, slot: u32) -> Extent {
        Extent {
            owner,
            slot,
            map: BlockMap::zeros(0),
            pages: [pages::NONE; BLOCKS],
            known: Bits::default(),
            homing: Bits::default(),
            load: Load::Cold,
            load_failures: 0,
            side: Side::Neither,
            newest: 0,
            newest_durable: 0,
            homed: 0,
            homing_lsn: 0,
            in_place: 0,
            undo: 0,
            referenced: true,
            orphan: false,
        }
    }

    /// Makes it an extent of zeros at `position` whose header has never been written.
    pub(crate) fn reset_to_zeros(&mut self, position: u64) {
        self.map = BlockMap::zeros(position);
        self.known = Bits::ALL;
        self.load = Load::Loaded;
        self.side = Side::Neither;
    }

    pub(crate) fn block(&self, i: usize) -> BlockState {
        BlockState {
            page: self.pages[i],
            ..BlockState::at_home(&self.map, i)
        }
    }

    pub(crate) fn set_block(&mut self, i: usize, state: BlockState) {
        self.map.positions[i] = state.position;
        self.map.crcs[i] = state.crc;
        self.map.present.set(i, state.present);
        self.map.torn.set(i, state.torn);
        self.pages[i] = state.page;
        self.known.set(i, true);
        self.homing.set(i, false);
    }

    /// Takes the blocks that are not known yet from the header on the device.
    pub(crate) fn merge(&mut self, map: &BlockMap) {
        for i in 0..BLOCKS {
            if !self.known.get(i) {
                self.map.positions[i] = map.positions[i];
                self.map.crcs[i] = map.crcs[i];
                self.map.present.set(i, map.present.get(i));
                self.map.torn.set(i, map.torn.get(i));
            }
        }
        self.known = Bits::ALL;
        self.load = Load::Loaded;
    }

    /// The position that all blocks share while all are zeros.
    pub(crate) fn uniform_zeros(map: &BlockMap) -> Option<u64> {
        let first = map.positions[0];
        (map.present.is_empty() && map.positions.iter().all(|p| *p == first)).then_some(first)
    }

    fn is_idle(&self) -> bool {
        self.load != Load::Loading
            && self.homing_lsn == 0
            && self.in_place == 0
            && self.undo == 0
            && self.load == Load::Loaded
    }
}

/// All extents in memory.
pub(crate) struct Extents {
    slab: Vec<Option<Box<Extent>>>,
    /// Per extent: the first journal record whose effects are not at home; 0: clean. Apart from the
    /// extents, because each checkpoint looks for the lowest one.
    since: Vec<u64>,
    free: Vec<u32>,
    /// Memory of extents that were dropped, for the next ones.
    spare: Vec<Box<Extent>>,
    /// In the order in which they became dirty; may name clean or reused ones.
    dirty: std::collections::VecDeque<u32>,
    live: usize,
    live_max: usize,
    hand: usize,
}

impl Extents {
    pub(crate) fn new(live_max: usize) -> Extents {
        Extents {
            slab: Vec::new(),
            since: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            dirty: std::collections::VecDeque::new(),
            live: 0,
            live_max: live_max.max(16),
            hand: 0,
        }
    }

    pub(crate) fn get(&self, id: u32) -> &Extent {
        self.slab[id as usize]
            .as_deref()
            .expect("an extent in memory")
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> &mut Extent {
        self.slab[id as usize]
            .as_deref_mut()
            .expect("an extent in memory")
    }

    pub(crate) fn since(&self, id: u32) -> u64 {
        self.since[id as usize]
    }

    /// Notes that record `lsn` changed the extent.
    pub(crate) fn mark_dirty(&mut self, id: u32, lsn: u64) {
        self.get_mut(id).newest = lsn;
        if self.since[id as usize] == 0 {
            self.since[id as usize] = lsn;
            self.dirty.push_back(id);
        }
    }

    /// Sets what is not at home after a home write. It goes to the end of the dirty list.
    pub(crate) fn set_since(&mut self, id: u32, since: u64) {
        self.since[id as usize] = since;
        if since != 0 {
            self.dirty.push_back(id);
        }
    }

    /// The lowest record whose effects on any extent are not at home.
    pub(crate) fn since_min(&self) -> Option<u64> {
        self.since.iter().copied().filter(|s| *s != 0).min()
    }

    pub(crate) fn dirty_len(&self) -> usize {
        self.dirty.len()
    }

    /// Takes the oldest entry of the dirty list; the caller skips what is clean.
    pub(crate) fn pop_dirty(&mut self) -> Option<u32> {
        while let Some(id) = self.dirty.pop_front() {
            if self.slab[id as usize].is_some() && self.since[id as usize] != 0 {
                return Some(id);
            }
        }
        None
    }

    /// Puts an entry back that could not be written home yet.
    pub(crate) fn push_dirty(&mut self, id: u32) {
        self.dirty.push_back(id);
    }

    /// Whether more extents are in memory than the limit allows, so that home writes have to come first.
    pub(crate) fn is_over_limit(&self) -> bool {
        self.live > self.live_max + self.live_max / 4
    }

    /// Makes room for and adds a cold extent. `evicted` is told of each one that was dropped for it.
    pub(crate) fn insert(
        &mut self,
        owner: Owner,
        slot: u32,
        mut evicted: impl FnMut(&Extent),
    ) -> u32 {
        if self.live >= self.live_max {
            self.evict(&mut evicted);
        }
        let mut extent = self
            .spare
            .pop()
            .unwrap_or_else(|| Box::new(Extent::new(owner, slot)));
        *extent = Extent::new(owner, slot);
        self.live += 1;
        match self.free.pop() {
            Some(id) => {
                self.slab[id as usize] = Some(extent);
                self.since[id as usize] = 0;
                id
            }
            None => {
                self.slab.push(Some(extent));
                self.since.push(0);
                (self.slab.len() - 1) as u32
            }
        }
    }

    /// Looks at a bounded number of extents, so that a memory full of dirty ones costs no scan per write.
    fn evict(&mut self, evicted: &mut impl FnMut(&Extent)) {
        for _ in 0..64 {
            self.hand = (self.hand + 1) % self.slab.len();
            let clean = self.since[self.hand] == 0;
            let Some(extent) = self.slab[self.hand].as_deref_mut() else {
                continue;
            };
            if !clean || !extent.is_idle() {
                continue;
            }
            if std::mem::take(&mut extent.referenced) {
                continue;
            }
            evicted(extent);
            self.remove(self.hand as u32);
            return;
        }
    }

    /// Drops an extent. Its pages must have been freed.
    pub(crate) fn remove(&mut self, id: u32) {
        if let Some(extent) = self.slab[id as usize].take() {
            if self.spare.len() < 64 {
                self.spare.push(extent);
            }
            self.since[id as usize] = 0;
            self.free.push(id);
            self.live -= 1;
        }
    }
}
