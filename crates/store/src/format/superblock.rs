//! The superblock: identity, format version and layout.

use ashlar_replication::values::DeviceId;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::layout::Layout;
use super::page::{self, PAGE, PREFIX};

/// Of the superblocks on the blocks device.
pub(crate) const MAGIC: &[u8; 8] = b"ASHLARSB";
/// Of the same page at the head of the journal's area, which ties a journal device to its store.
pub(crate) const JOURNAL_MAGIC: &[u8; 8] = b"ASHLARJS";
/// The newest format that this release reads and the one that it writes.
pub(crate) const FORMAT_VERSION: u32 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Body {
    size_bytes: U64,
    replicas: U32,
    hole_pairs: U32,
    hole_offset: U64,
    journal_offset: U64,
    ring_bytes: U64,
    extent_header_offset: U64,
    extent_offset: U64,
    extents: U32,
    /// Bit 0: the journal lies on a device of its own.
    flags: U32,
    /// Encryption of extents: zero, reserved.
    encryption: U32,
    extent_bytes: U32,
}

const JOURNAL_SEPARATE: u32 = 1;

/// What a page that may be a superblock holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Not ours.
    Foreign,
    /// Ours by its magic, and damaged.
    Damaged,
    Newer(u32),
    Superblock {
        device: DeviceId,
        layout: Layout,
    },
}

/// Writes a superblock into `page`.
pub(crate) fn encode(page: &mut [u8], magic: &[u8; 8], device: DeviceId, layout: &Layout) {
    page.fill(0);
    let body = Body {
        size_bytes: U64::new(layout.size_bytes),
        replicas: U32::new(layout.replicas),
        hole_pairs: U32::new(layout.hole_pairs),
        hole_offset: U64::new(layout.hole_offset),
        journal_offset: U64::new(layout.journal_offset),
        ring_bytes: U64::new(layout.ring_bytes),
        extent_header_offset: U64::new(layout.extent_header_offset),
        extent_offset: U64::new(layout.extent_offset),
        extents: U32::new(layout.extents),
        flags: U32::new(if layout.journal_separate {
            JOURNAL_SEPARATE
        } else {
            0
        }),
        encryption: U32::new(0),
        extent_bytes: U32::new(1 << 20),
    };
    page[PREFIX..PREFIX + size_of::<Body>()].copy_from_slice(body.as_bytes());
    page::seal(page, magic, FORMAT_VERSION, device, 0, 0);
}

/// Reads a superblock. Magic, CRC field and version keep their places in every later format, so that
/// a newer one can be named.
pub(crate) fn decode(page: &[u8], magic: &[u8; 8]) -> Found {
    assert_eq!(page.len(), PAGE);
    let prefix = page::prefix(page);
    if prefix.magic != *magic {
        return Found::Foreign;
    }
    if prefix.crc.get() != page::crc_without_field(page) {
        return Found::Damaged;
    }
    if prefix.format.get() > FORMAT_VERSION {
        return Found::Newer(prefix.format.get());
    }
    let Ok((body, _)) = Body::read_from_prefix(&page[PREFIX..]) else {
        return Found::Damaged;
    };
    let layout = Layout {
        size_bytes: body.size_bytes.get(),
        replicas: body.replicas.get(),
        hole_pairs: body.hole_pairs.get(),
        hole_offset: body.hole_offset.get(),
        journal_separate: body.flags.get() & JOURNAL_SEPARATE != 0,
        journal_offset: body.journal_offset.get(),
        ring_bytes: body.ring_bytes.get(),
        extent_header_offset: body.extent_header_offset.get(),
        extents: body.extents.get(),
        extent_offset: body.extent_offset.get(),
    };
    let known = body.flags.get() & !JOURNAL_SEPARATE == 0
        && body.encryption.get() == 0
        && body.extent_bytes.get() == 1 << 20;
    if prefix.format.get() == 0 || !known || !layout.is_sound() {
        return Found::Damaged;
    }
    Found::Superblock {
        device: DeviceId(prefix.device),
        layout,
    }
}
