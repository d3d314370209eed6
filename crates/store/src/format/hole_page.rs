//! Hole pages: positions of extents that were discarded as a whole and have no slot (B1).

use ashlar_replication::values::{DeviceId, VolumeId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::page::{self, PREFIX};

pub(crate) const MAGIC: &[u8; 8] = b"ASHLARHO";
/// Extents that a page covers.
pub(crate) const EXTENTS: usize = 256;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Body {
    volume: [u8; 16],
    nonce: U64,
    group: U64,
    replica: U32,
    reserved: U32,
    positions: [U64; EXTENTS],
}

/// Whose extents a page covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoleOwner {
    pub volume: VolumeId,
    pub nonce: u64,
    pub replica: u32,
    /// Extents [256 × group, 256 × group + 256).
    pub group: u64,
}

/// Writes a page. A position of zero: the extent is no hole.
pub(crate) fn encode(
    page: &mut [u8],
    device: DeviceId,
    version: u64,
    lsn: u64,
    owner: &HoleOwner,
    positions: &[u64; EXTENTS],
) {
    page.fill(0);
    let body = Body {
        volume: owner.volume.0,
        nonce: U64::new(owner.nonce),
        group: U64::new(owner.group),
        replica: U32::new(owner.replica),
        reserved: U32::new(0),
        positions: positions.map(U64::new),
    };
    page[PREFIX..PREFIX + size_of::<Body>()].copy_from_slice(body.as_bytes());
    page::seal(page, MAGIC, 0, device, version, lsn);
}

/// Reads a valid page.
pub(crate) fn decode(page: &[u8]) -> (HoleOwner, [u64; EXTENTS]) {
    let (body, _) = Body::ref_from_prefix(&page[PREFIX..]).expect("a hole page fits into its page");
    let owner = HoleOwner {
        volume: VolumeId(body.volume),
        nonce: body.nonce.get(),
        replica: body.replica.get(),
        group: body.group.get(),
    };
    (owner, body.positions.map(U64::get))
}
