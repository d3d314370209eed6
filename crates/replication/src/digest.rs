//! The digest that resync compares extents by before it compares blocks (R3).

use crate::values::{EXTENT_BLOCKS, Position};

/// Digest over the positions of an extent's 256 blocks: FNV-1a (64 bit) over the packed positions,
/// one multiplication per position, followed by the finaliser of splitmix64.
///
/// Two extents with equal digests are taken as equal; a collision (2⁻⁶⁴ for positions that were
/// not chosen by an adversary) would leave a stale block behind until a scrub finds it.
pub fn positions_digest(positions: impl Iterator<Item = Position>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut count = 0;
    for position in positions {
        hash = (hash ^ position.pack()).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
        count += 1;
    }
    debug_assert_eq!(count, EXTENT_BLOCKS);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}
