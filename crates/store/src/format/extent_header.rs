//! The header of an extent: whose it is, and what is known of each of its 256 blocks.

use ashlar_replication::values::{DeviceId, VolumeId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::page::{self, PREFIX};
use crate::memory::bits::Bits;

pub(crate) const MAGIC: &[u8; 8] = b"ASHLAREX";
/// Blocks of an extent.
pub(crate) const BLOCKS: usize = 256;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawEntry {
    position: U64,
    crc: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Body {
    volume: [u8; 16],
    nonce: U64,
    extent: U64,
    /// The extent that absent blocks are read from (snapshots): zero, reserved.
    parent: U64,
    /// Zero, reserved (encryption).
    flags: U32,
    replica: U32,
    present: [U64; 4],
    torn: [U64; 4],
    entries: [RawEntry; BLOCKS],
}

/// Whose extent it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Owner {
    pub volume: VolumeId,
    /// Of the replica: a new replica of the same volume does not inherit extents.
    pub nonce: u64,
    /// Slot of the volume header.
    pub replica: u32,
    pub extent: u64,
}

/// What a header says of the blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockMap {
    pub positions: [u64; BLOCKS],
    pub crcs: [u32; BLOCKS],
    /// The block has data in the extent; else it is zeros.
    pub present: Bits,
    /// The data does not belong to the position (B2); with position 0 the header was lost.
    pub torn: Bits,
}

impl BlockMap {
    /// 256 blocks of zeros at one position.
    pub(crate) fn zeros(position: u64) -> BlockMap {
        BlockMap {
            positions: [position; BLOCKS],
            crcs: [0; BLOCKS],
            present: Bits::default(),
            torn: Bits::default(),
        }
    }

    /// What remains when both pages of a header are gone: nothing may be served.
    pub(crate) fn lost() -> BlockMap {
        BlockMap {
            present: Bits::ALL,
            torn: Bits::ALL,
            ..BlockMap::zeros(0)
        }
    }
}

pub(crate) fn encode(page: &mut [u8], device: DeviceId, lsn: u64, owner: &Owner, map: &BlockMap) {
    page.fill(0);
    let bits = |b: &Bits| b.0.map(U64::new);
    let body = Body {
        volume: owner.volume.0,
        nonce: U64::new(owner.nonce),
        extent: U64::new(owner.extent),
        parent: U64::new(0),
        flags: U32::new(0),
        replica: U32::new(owner.replica),
        present: bits(&map.present),
        torn: bits(&map.torn),
        entries: std::array::from_fn(|i| RawEntry {
            position: U64::new(map.positions[i]),
            crc: U32::new(map.crcs[i]),
        }),
    };
    page[PREFIX..PREFIX + size_of::<Body>()].copy_from_slice(body.as_bytes());
    page::seal(page, MAGIC, 0, device, lsn, lsn);
}

fn body(page: &[u8]) -> &Body {
    Body::ref_from_prefix(&page[PREFIX..])
        .map(|(b, _)| b)
        .expect("a header fits into its page")
}

/// Whose extent a valid page describes.
pub(crate) fn owner(page: &[u8]) -> Owner {
    let body = body(page);
    Owner {
        volume: VolumeId(body.volume),
        nonce: body.nonce.get(),
        replica: body.replica.get(),
        extent: body.extent.get(),
    }
}

/// What a valid page says of the blocks.
pub(crate) fn block_map(page: &[u8]) -> BlockMap {
    let body = body(page);
    BlockMap {
        positions: std::array::from_fn(|i| body.entries[i].position.get()),
        crcs: std::array::from_fn(|i| body.entries[i].crc.get()),
        present: Bits(body.present.map(U64::get)),
        torn: Bits(body.torn.map(U64::get)),
    }
}
