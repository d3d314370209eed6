//! What every page of 4 KiB begins with, and how the newer page of a pair is found.

use super::extent_header;
use crate::faults::{Fault, is_broken};
use ashlar_replication::values::DeviceId;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a page: the unit of headers and of the journal. Fixed by the format; nothing to do with
/// the page size of the system.
pub(crate) const PAGE: usize = 4096;
/// Bytes of a pair of pages.
pub(crate) const PAIR: usize = 2 * PAGE;
/// Bytes of [`Prefix`].
pub(crate) const PREFIX: usize = 48;

/// The beginning of every page.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Prefix {
    pub magic: [u8; 8],
    /// CRC-32C over the 4096 bytes with this field zero.
    pub crc: U32,
    /// Format version in a superblock, else zero.
    pub format: U32,
    pub device: [u8; 16],
    /// Of the two pages of a pair the one with the higher version counts.
    pub version: U64,
    /// Effects of all journal records up to this one are in the page.
    pub lsn: U64,
}

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageState {
    /// Zeros: never written since the format.
    Blank,
    /// Neither blank nor valid: torn by a crash or damaged later.
    Damaged,
    Valid {
        version: u64,
        lsn: u64,
    },
}

/// CRC-32C of a page or header with its CRC field (bytes 8 to 12) taken as zero.
pub(crate) fn crc_without_field(bytes: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&bytes[..8]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[12..])
}

/// Writes prefix and CRC of a page whose body is in place.
pub(crate) fn seal(
    page: &mut [u8],
    magic: &[u8; 8],
    format: u32,
    device: DeviceId,
    version: u64,
    lsn: u64,
) {
    assert_eq!(page.len(), PAGE);
    let mut prefix = Prefix {
        magic: *magic,
        crc: U32::new(0),
        format: U32::new(format),
        device: device.0,
        version: U64::new(version),
        lsn: U64::new(lsn),
    };
    page[..PREFIX].copy_from_slice(prefix.as_bytes());
    prefix.crc = U32::new(crc_without_field(page));
    page[..PREFIX].copy_from_slice(prefix.as_bytes());
}

/// The prefix of a page, unchecked.
pub(crate) fn prefix(page: &[u8]) -> Prefix {
    Prefix::read_from_prefix(page)
        .map(|(p, _)| p)
        .expect("a page is longer than its prefix")
}

/// Checks magic, device and CRC.
pub(crate) fn check(page: &[u8], magic: &[u8; 8], device: DeviceId) -> PageState {
    assert_eq!(page.len(), PAGE);
    let prefix = prefix(page);
    if prefix.magic == *magic
        && prefix.device == device.0
        && (prefix.crc.get() == crc_without_field(page)
            || (is_broken(Fault::SkipHeaderChecksum) && magic == extent_header::MAGIC))
    {
        return PageState::Valid {
            version: prefix.version.get(),
            lsn: prefix.lsn.get(),
        };
    }
    if is_zero(page) {
        PageState::Blank
    } else {
        PageState::Damaged
    }
}

/// Whether all bytes are zero. A scan asks this of every page that was never written.
fn is_zero(page: &[u8]) -> bool {
    let (chunks, rest) = page.as_chunks::<64>();
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    chunks.iter().all(|chunk| is_zero(chunk)) && is_zero(rest)
}

/// Which page of a pair is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Nothing that counts is in either page; both are written next.
    Neither,
    A,
    B,
}

impl Side {
    /// The pages that the next version goes to: byte offset within the pair, and bytes.
    pub(crate) fn next_write(self) -> (u64, usize) {
        match self {
            Side::Neither => (0, PAIR),
            Side::A => (PAGE as u64, PAGE),
            Side::B => (0, PAGE),
        }
    }

    /// The side that is newest after that write.
    pub(crate) fn after_write(self) -> Side {
        match self {
            Side::Neither | Side::B => Side::A,
            Side::A => Side::B,
        }
    }
}

/// A pair of pages as it was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub side: Side,
    pub version: u64,
    pub lsn: u64,
    /// A page of the pair is neither blank nor valid.
    pub damaged: bool,
    /// Both pages are valid and of one version.
    pub settled: bool,
}

impl Pair {
    /// Finds the newest valid page of a pair of 8 KiB.
    pub(crate) fn examine(pair: &[u8], magic: &[u8; 8], device: DeviceId) -> Pair {
        let a = check(&pair[..PAGE], magic, device);
        let b = check(&pair[PAGE..PAIR], magic, device);
        let damaged = a == PageState::Damaged || b == PageState::Damaged;
        let (side, version, lsn) = match (a, b) {
            (
                PageState::Valid { version, lsn },
                PageState::Valid {
                    version: other,
                    lsn: other_lsn,
                },
            ) => {
                if (version, lsn) >= (other, other_lsn) {
                    (Side::A, version, lsn)
                } else {
                    (Side::B, other, other_lsn)
                }
            }
            (PageState::Valid { version, lsn }, _) => (Side::A, version, lsn),
            (_, PageState::Valid { version, lsn }) => (Side::B, version, lsn),
            _ => (Side::Neither, 0, 0),
        };
        let settled = matches!((a, b),
            (PageState::Valid { version: a, .. }, PageState::Valid { version: b, .. }) if a == b);
        Pair {
            side,
            version,
            lsn,
            damaged,
            settled,
        }
    }

    /// The newest page.
    pub(crate) fn page<'a>(&self, pair: &'a [u8]) -> Option<&'a [u8]> {
        match self.side {
            Side::Neither => None,
            Side::A => Some(&pair[..PAGE]),
            Side::B => Some(&pair[PAGE..PAIR]),
        }
    }
}
