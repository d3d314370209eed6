//! Where things lie on the device.

use super::page::PAIR;
use ashlar_replication::values::EXTENT_BYTES;

/// Offset of the second superblock: far enough from the first that one stray write spares it.
pub(crate) const SUPERBLOCK_B_OFFSET: u64 = 64 << 10;
/// Where the volume headers begin.
pub(crate) const VOLUMES_OFFSET: u64 = 128 << 10;
/// Bytes before the ring in the journal's area: its superblock twice, checkpoint pages A and B.
pub(crate) const JOURNAL_HEAD_BYTES: u64 = 16 << 10;
/// Areas begin at multiples of this.
pub(crate) const AREA_ALIGNMENT: u64 = 64 << 10;
/// A replica takes one pair of pages; more replicas than this on one device are not supported.
pub(crate) const REPLICAS_MAX: u32 = 1 << 16;

/// Offsets and counts of a store's areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of the part [`crate::Part::Blocks`] that the store uses.
    pub size_bytes: u64,
    pub replicas: u32,
    pub hole_pairs: u32,
    pub hole_offset: u64,
    /// Whether the journal lies on a device of its own, at offset 0.
    pub journal_separate: bool,
    pub journal_offset: u64,
    /// Bytes of the ring, a multiple of the page.
    pub ring_bytes: u64,
    pub extent_header_offset: u64,
    pub extents: u32,
    pub extent_offset: u64,
}

fn align(offset: u64) -> u64 {
    offset.next_multiple_of(AREA_ALIGNMENT)
}

impl Layout {
    /// Lays out a device; None when it is too small for a single extent.
    pub(crate) fn plan(
        size_bytes: u64,
        replicas: u32,
        journal_separate: bool,
        ring_bytes: u64,
    ) -> Option<Layout> {
        let guess = u32::try_from(size_bytes / EXTENT_BYTES).ok()?;
        // One hole page covers 256 extents of one volume. Four times what a single dense volume
        // of the device's size needs: thin volumes are larger than the device.
        let hole_pairs = (guess / 64).max(16);
        let hole_offset = align(VOLUMES_OFFSET + u64::from(replicas) * PAIR as u64);
        let after_holes = align(hole_offset + u64::from(hole_pairs) * PAIR as u64);
        let (journal_offset, extent_header_offset) = if journal_separate {
            (0, after_holes)
        } else {
            (
                after_holes,
                align(after_holes + JOURNAL_HEAD_BYTES + ring_bytes),
            )
        };
        let room = size_bytes.checked_sub(extent_header_offset + AREA_ALIGNMENT)?;
        let extents = u32::try_from(room / (EXTENT_BYTES + PAIR as u64)).ok()?;
        let extent_offset = align(extent_header_offset + u64::from(extents) * PAIR as u64);
        (extents > 0).then_some(Layout {
            size_bytes,
            replicas,
            hole_pairs,
            hole_offset,
            journal_separate,
            journal_offset,
            ring_bytes,
            extent_header_offset,
            extents,
            extent_offset,
        })
    }

    /// Whether the areas follow each other without overlap and end within the size.
    pub(crate) fn is_sound(&self) -> bool {
        let pair = PAIR as u64;
        let aligned = |v: u64| v.is_multiple_of(4096);
        let end = |offset: u64, count: u64, each: u64| {
            count
                .checked_mul(each)
                .and_then(|bytes| offset.checked_add(bytes))
        };
        let Some(volumes_end) = end(VOLUMES_OFFSET, u64::from(self.replicas), pair) else {
            return false;
        };
        let Some(holes_end) = end(self.hole_offset, u64::from(self.hole_pairs), pair) else {
            return false;
        };
        let Some(journal_end) = self
            .journal_offset
            .checked_add(JOURNAL_HEAD_BYTES)
            .and_then(|offset| offset.checked_add(self.ring_bytes))
        else {
            return false;
        };
        let Some(headers_end) = end(self.extent_header_offset, u64::from(self.extents), pair)
        else {
            return false;
        };
        let Some(extents_end) = end(self.extent_offset, u64::from(self.extents), EXTENT_BYTES)
        else {
            return false;
        };
        let journal_fits = if self.journal_separate {
            self.journal_offset == 0
        } else {
            holes_end <= self.journal_offset && journal_end <= self.extent_header_offset
        };
        (1..=REPLICAS_MAX).contains(&self.replicas)
            && self.extents > 0
            && aligned(self.hole_offset | self.journal_offset | self.ring_bytes)
            && aligned(self.extent_header_offset | self.extent_offset)
            && volumes_end <= self.hole_offset
            && holes_end <= self.extent_header_offset
            && journal_fits
            && headers_end <= self.extent_offset
            && extents_end <= self.size_bytes
    }

    pub(crate) fn volume_pair(&self, replica: u32) -> u64 {
        VOLUMES_OFFSET + u64::from(replica) * PAIR as u64
    }

    pub(crate) fn hole_pair(&self, hole: u32) -> u64 {
        self.hole_offset + u64::from(hole) * PAIR as u64
    }

    pub(crate) fn header_pair(&self, slot: u32) -> u64 {
        self.extent_header_offset + u64::from(slot) * PAIR as u64
    }

    pub(crate) fn block(&self, slot: u32, block: u32) -> u64 {
        self.extent_offset + u64::from(slot) * EXTENT_BYTES + u64::from(block) * 4096
    }

    /// Offset of the ring within its part.
    pub(crate) fn ring_offset(&self) -> u64 {
        self.journal_offset + JOURNAL_HEAD_BYTES
    }

    /// Offset of the pair of checkpoint pages.
    pub(crate) fn checkpoint_pair(&self) -> u64 {
        self.journal_offset + PAIR as u64
    }
}
