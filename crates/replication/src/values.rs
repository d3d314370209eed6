//! Identifiers, numbers and time of the replication protocol ("Values" in docs/protocol.md).

use core::fmt;
use core::ops::{Add, Sub};
use core::time::Duration;

/// Bytes in a block, the unit of atomicity, checksums and positions.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks in an extent. A write, a read and a copy never cross the border of an extent.
pub const EXTENT_BLOCKS: u32 = 256;
/// Bytes in an extent (1 MiB).
pub const EXTENT_BYTES: u64 = EXTENT_BLOCKS as u64 * BLOCK_BYTES as u64;
/// The most members (data and witness) that a configuration may name.
///
/// Chosen for three data members and two witnesses, one of them being replaced, with one to spare.
pub const MEMBERS_MAX: usize = 7;

/// Monotonic time in nanoseconds since a start that the shell chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The time that never comes; used for "no timer".
    pub const NEVER: Time = Time(u64::MAX);

    /// The time that has passed since `earlier`, zero when `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, rhs: Duration) -> Time {
        Time(
            self.0
                .saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, rhs: Duration) -> Time {
        Time(
            self.0
                .saturating_sub(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// A volume's UUID, as 16 bytes in the order of its text form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct VolumeId(pub [u8; 16]);

/// A device's UUID, written into its superblock when the store is formatted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceId(pub [u8; 16]);

fn fmt_uuid(bytes: &[u8; 16], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            f.write_str("-")?;
        }
        write!(f, "{byte:02x}")?;
    }
    Ok(())
}

macro_rules! uuid_fmt {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt_uuid(&self.0, f)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt_uuid(&self.0, f)
            }
        }
    };
}
uuid_fmt!(VolumeId);
uuid_fmt!(DeviceId);

/// Identity of a member: the device and the nonce drawn when this replica was made on it.
///
/// A device that was wiped and given the same volume again is another member (holes 17).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MemberId {
    /// The device that holds the replica.
    pub device: DeviceId,
    /// Fresh for every replica that is made.
    pub nonce: u64,
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:016x}", self.device, self.nonce)
    }
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of an attachment; the part of an epoch that is compared. 24 bits wide (B3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpochNumber(pub u32);

impl EpochNumber {
    /// The largest number that a packed [`Position`] holds.
    pub const MAX: EpochNumber = EpochNumber((1 << 24) - 1);
}

/// An attachment of a volume. Two nonces with the same number are two different epochs (M1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Epoch {
    /// What members compare.
    pub number: EpochNumber,
    /// Fresh for every attempt to attach, also by the same process.
    pub nonce: u64,
}

/// Number of a write in its epoch, from 1; 0 is the start of the epoch. 40 bits wide (B3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(pub u64);

impl Sequence {
    /// The largest sequence that a packed [`Position`] holds.
    pub const MAX: Sequence = Sequence((1 << 40) - 1);

    /// The sequence after this one.
    pub fn next(self) -> Sequence {
        Sequence(self.0 + 1)
    }
}

/// Place of a write in the history of a volume: (epoch number, sequence), compared in that order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The epoch that issued the write.
    pub epoch: EpochNumber,
    /// The write's number in it.
    pub sequence: Sequence,
}

impl Position {
    /// The position of a block that nobody has written.
    pub const ZERO: Position = Position {
        epoch: EpochNumber(0),
        sequence: Sequence(0),
    };

    /// (e, 0), "EpochStart" of `epoch`.
    pub fn start_of(epoch: EpochNumber) -> Position {
        Position {
            epoch,
            sequence: Sequence(0),
        }
    }

    /// 24 bits of epoch above 40 bits of sequence; the order of packed values is the order of positions.
    pub fn pack(self) -> u64 {
        debug_assert!(self.epoch <= EpochNumber::MAX && self.sequence <= Sequence::MAX);
        (u64::from(self.epoch.0) << 40) | self.sequence.0
    }

    /// The inverse of [`Position::pack`]. Every value is a valid position.
    pub fn unpack(packed: u64) -> Position {
        Position {
            epoch: EpochNumber((packed >> 40) as u32),
            sequence: Sequence(packed & Sequence::MAX.0),
        }
    }
}

/// Number of an attempt to resync a member within an epoch (M5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pass(pub u32);

/// Index of a block within its volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u64);

impl Block {
    /// The extent that the block lies in.
    pub fn extent(self) -> ExtentIndex {
        ExtentIndex(self.0 / u64::from(EXTENT_BLOCKS))
    }

    /// The block's place within its extent, 0..256.
    pub fn within_extent(self) -> u32 {
        (self.0 % u64::from(EXTENT_BLOCKS)) as u32
    }
}

/// Index of an extent within its volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentIndex(pub u64);

impl ExtentIndex {
    /// The first block of the extent.
    pub fn first_block(self) -> Block {
        Block(self.0 * u64::from(EXTENT_BLOCKS))
    }
}

/// `count` ≥ 1 blocks from `start`; within one extent wherever the protocol carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRange {
    /// The first block.
    pub start: Block,
    /// How many.
    pub count: u32,
}

impl BlockRange {
    /// The block after the last one.
    pub fn end(self) -> Block {
        Block(self.start.0 + u64::from(self.count))
    }

    /// Whether the two ranges share a block.
    pub fn overlaps(self, other: BlockRange) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// Whether the range is non-empty and lies within a single extent.
    pub fn is_within_one_extent(self) -> bool {
        self.count >= 1
            && self
                .start
                .within_extent()
                .checked_add(self.count)
                .is_some_and(|end| end <= EXTENT_BLOCKS)
    }

    /// The blocks of the range in ascending order.
    pub fn blocks(self) -> impl Iterator<Item = Block> {
        (self.start.0..self.end().0).map(Block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_positions_keep_their_order_and_come_back() {
        let a = Position {
            epoch: EpochNumber(1),
            sequence: Sequence::MAX,
        };
        let b = Position {
            epoch: EpochNumber(2),
            sequence: Sequence(0),
        };
        assert!(a < b && a.pack() < b.pack());
        assert_eq!(Position::unpack(a.pack()), a);
        assert_eq!(Position::unpack(b.pack()), b);
        assert_eq!(Position::unpack(0), Position::ZERO);
    }

    #[test]
    fn a_range_that_crosses_the_border_of_an_extent_is_recognised() {
        assert!(
            BlockRange {
                start: Block(255),
                count: 1
            }
            .is_within_one_extent()
        );
        assert!(
            !BlockRange {
                start: Block(255),
                count: 2
            }
            .is_within_one_extent()
        );
        assert!(
            !BlockRange {
                start: Block(0),
                count: 0
            }
            .is_within_one_extent()
        );
        assert!(
            !BlockRange {
                start: Block(1),
                count: u32::MAX
            }
            .is_within_one_extent()
        );
    }
}
