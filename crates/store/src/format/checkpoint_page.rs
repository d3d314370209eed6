//! The checkpoint page: where the journal's tail is.

use ashlar_replication::values::DeviceId;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::page::{self, PREFIX};

pub(crate) const MAGIC: &[u8; 8] = b"ASHLARCP";

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Body {
    offset: U64,
    previous_crc: U32,
    reserved: U32,
}

/// The first record that recovery has to apply, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    /// Sequence number of the record; one above the head's when the journal is empty.
    pub lsn: u64,
    /// Its offset in the ring, unless it was wrapped to 0.
    pub offset: u64,
    /// Header CRC of the record before it.
    pub previous_crc: u32,
}

pub(crate) fn encode(page: &mut [u8], device: DeviceId, tail: Tail) {
    page.fill(0);
    let body = Body {
        offset: U64::new(tail.offset),
        previous_crc: U32::new(tail.previous_crc),
        reserved: U32::new(0),
    };
    page[PREFIX..PREFIX + size_of::<Body>()].copy_from_slice(body.as_bytes());
    page::seal(page, MAGIC, 0, device, tail.lsn, tail.lsn);
}

/// Reads a page that [`page::Pair::examine`] found valid. None when the offset is impossible.
pub(crate) fn decode(page: &[u8], ring_bytes: u64) -> Option<Tail> {
    let (body, _) = Body::read_from_prefix(&page[PREFIX..]).ok()?;
    let offset = body.offset.get();
    (offset <= ring_bytes && offset.is_multiple_of(4096)).then_some(Tail {
        lsn: page::prefix(page).lsn.get(),
        offset,
        previous_crc: body.previous_crc.get(),
    })
}
