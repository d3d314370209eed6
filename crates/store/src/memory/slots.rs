//! Which slots of a fixed area are free.

/// A bitmap with a cursor: the next free slot after the last one that was given out, so that
/// extents that are written one after the other lie one after the other.
pub(crate) struct Slots {
    used: Vec<u64>,
    count: u32,
    free: u32,
    cursor: u32,
}

impl Slots {
    /// `count` free slots.
    pub(crate) fn new(count: u32) -> Slots {
        Slots {
            used: vec![0; count.div_ceil(64) as usize],
            count,
            free: count,
            cursor: 0,
        }
    }

    pub(crate) fn is_used(&self, slot: u32) -> bool {
        self.used[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    /// Marks a slot as used; false when it was already.
    pub(crate) fn take(&mut self, slot: u32) -> bool {
        assert!(slot < self.count);
        let fresh = !self.is_used(slot);
        if fresh {
            self.used[slot as usize / 64] |= 1 << (slot % 64);
            self.free -= 1;
        }
        fresh
    }

    /// A free slot.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        if self.free == 0 {
            return None;
        }
        let words = self.used.len();
        let start = self.cursor as usize / 64;
        for step in 0..=words {
            let word = (start + step) % words;
            let mut free = !self.used[word];
            if step == 0 {
                free &= u64::MAX << (self.cursor % 64);
            }
            while free != 0 {
                let slot = (word * 64) as u32 + free.trailing_zeros();
                if slot < self.count {
                    self.take(slot);
                    self.cursor = (slot + 1) % self.count;
                    return Some(slot);
                }
                free &= free - 1;
            }
        }
        None
    }

    pub(crate) fn release(&mut self, slot: u32) {
        assert!(self.is_used(slot), "slot {slot} is released twice");
        self.used[slot as usize / 64] &= !(1 << (slot % 64));
        self.free += 1;
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }
}
