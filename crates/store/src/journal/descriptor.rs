//! Descriptors: what a journal record says was changed.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::extent_header::BLOCKS;
use crate::format::volume_header::{IMAGE_BYTES, VolumeImage};
use crate::memory::table::NO_SLOT;

const KIND_WRITE: u16 = 1;
const KIND_IMAGE: u16 = 2;
const KIND_DELETE: u16 = 3;
const KIND_IN_PLACE: u16 = 4;

const SETS_LAST: u16 = 1;
const ZEROS: u16 = 2;
const ANNOUNCED: u16 = 4;
const EACH_POSITION: u16 = 8;
const ALLOCATES: u16 = 16;
const CREATES: u16 = 32;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    kind: U16,
    flags: U16,
    /// Bytes of the descriptor with its lists, a multiple of 8.
    bytes: U32,
    replica: U32,
    /// Slot of the extent; all ones: none.
    slot: U32,
    extent: U64,
    position: U64,
    base_position: U64,
    first: U16,
    count: U16,
    reserved: U32,
}

const HEAD: usize = size_of::<Head>();

/// Where the blocks of a write come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Zeros,
    /// They follow in the record.
    Journal,
    /// They are written in place after the record is durable.
    InPlace,
}

/// Positions of the blocks of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Positions<'a> {
    Same(u64),
    Each(&'a [u64]),
}

impl Positions<'_> {
    pub(crate) fn get(&self, i: usize) -> u64 {
        match self {
            Positions::Same(position) => *position,
            Positions::Each(list) => list[i],
        }
    }
}

/// A change of consecutive blocks of one extent, as it is written into a record.
pub(crate) struct WriteOut<'a> {
    pub replica: u32,
    pub extent: u64,
    pub slot: u32,
    /// The slot was allocated by this write; before it all blocks were zeros at that position.
    pub allocates: Option<u64>,
    pub first: u16,
    pub count: u16,
    pub positions: Positions<'a>,
    /// One per block unless zeros.
    pub crcs: &'a [U32],
    pub source: Source,
    /// `last` becomes this position.
    pub sets_last: Option<u64>,
}

/// Bytes of the descriptor of a write.
pub(crate) fn write_bytes(count: usize, source: Source, each_position: bool) -> usize {
    let crcs = if source == Source::Zeros {
        0
    } else {
        (count * 4).next_multiple_of(8)
    };
    HEAD + crcs + if each_position { count * 8 } else { 0 }
}

impl WriteOut<'_> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let each = matches!(self.positions, Positions::Each(_));
        let position = match (&self.positions, self.sets_last) {
            (Positions::Same(position), _) => *position,
            (Positions::Each(_), last) => last.unwrap_or(0),
        };
        debug_assert!(self.sets_last.is_none_or(|last| last == position));
        let flag = |on: bool, flag: u16| if on { flag } else { 0 };
        let head = Head {
            kind: U16::new(KIND_WRITE),
            flags: U16::new(
                flag(self.sets_last.is_some(), SETS_LAST)
                    | flag(self.source == Source::Zeros, ZEROS)
                    | flag(self.source == Source::InPlace, ANNOUNCED)
                    | flag(each, EACH_POSITION)
                    | flag(self.allocates.is_some(), ALLOCATES),
            ),
            bytes: U32::new(write_bytes(usize::from(self.count), self.source, each) as u32),
            replica: U32::new(self.replica),
            slot: U32::new(self.slot),
            extent: U64::new(self.extent),
            position: U64::new(position),
            base_position: U64::new(self.allocates.unwrap_or(0)),
            first: U16::new(self.first),
            count: U16::new(self.count),
            reserved: U32::new(0),
        };
        out.extend_from_slice(head.as_bytes());
        if self.source != Source::Zeros {
            debug_assert_eq!(self.crcs.len(), usize::from(self.count));
            out.extend_from_slice(self.crcs.as_bytes());
            out.resize(out.len().next_multiple_of(8), 0);
        }
        if let Positions::Each(list) = self.positions {
            for position in list {
                out.extend_from_slice(U64::new(*position).as_bytes());
            }
        }
    }
}

/// Bytes of the descriptor of an image.
pub(crate) const IMAGE_DESCRIPTOR_BYTES: usize = HEAD + IMAGE_BYTES;

fn simple(kind: u16, flags: u16, replica: u32, bytes: usize) -> Head {
    Head {
        kind: U16::new(kind),
        flags: U16::new(flags),
        bytes: U32::new(bytes as u32),
        replica: U32::new(replica),
        slot: U32::new(NO_SLOT),
        extent: U64::new(0),
        position: U64::new(0),
        base_position: U64::new(0),
        first: U16::new(0),
        count: U16::new(0),
        reserved: U32::new(0),
    }
}

/// Whether an image is of a replica that was just made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageKind {
    Creates,
    /// `last` is changed on purpose and counts whatever became of announced writes before it.
    SetsLast,
    /// `last` in the image is whatever was submitted at the time and does not count.
    KeepsLast,
}

pub(crate) fn encode_image(out: &mut Vec<u8>, replica: u32, kind: ImageKind, image: &VolumeImage) {
    let flags = match kind {
        ImageKind::Creates => CREATES | SETS_LAST,
        ImageKind::SetsLast => SETS_LAST,
        ImageKind::KeepsLast => 0,
    };
    out.extend_from_slice(simple(KIND_IMAGE, flags, replica, IMAGE_DESCRIPTOR_BYTES).as_bytes());
    image.encode(out);
}

pub(crate) fn encode_delete(out: &mut Vec<u8>, replica: u32) {
    out.extend_from_slice(simple(KIND_DELETE, 0, replica, HEAD).as_bytes());
}

/// Names the descriptor that announced a large write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    /// Its record.
    pub lsn: u64,
    /// Its offset among the bytes of the record's descriptors.
    pub at: u64,
}

/// Bytes of the descriptor of [`Descriptor::InPlace`].
pub(crate) const IN_PLACE_BYTES: usize = HEAD;

/// Describes that the announced blocks are durable in place.
pub(crate) fn encode_in_place(
    out: &mut Vec<u8>,
    replica: u32,
    extent: u64,
    first: u16,
    count: u16,
    announced: Announcement,
) {
    let mut head = simple(KIND_IN_PLACE, 0, replica, HEAD);
    head.extent = U64::new(extent);
    head.position = U64::new(announced.lsn);
    head.base_position = U64::new(announced.at);
    head.first = U16::new(first);
    head.count = U16::new(count);
    out.extend_from_slice(head.as_bytes());
}

/// A write as it is read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WriteIn {
    pub replica: u32,
    pub extent: u64,
    pub slot: u32,
    pub allocates: Option<u64>,
    pub first: usize,
    /// One per block.
    pub positions: Vec<u64>,
    /// One per block; empty for zeros.
    pub crcs: Vec<u32>,
    pub source: Source,
    pub sets_last: Option<u64>,
}

/// A descriptor as it is read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Descriptor {
    Write(WriteIn),
    Image {
        replica: u32,
        kind: ImageKind,
        image: Box<VolumeImage>,
    },
    Delete {
        replica: u32,
    },
    /// Announced blocks are durable in place.
    InPlace {
        replica: u32,
        extent: u64,
        first: usize,
        count: usize,
        announced: Announcement,
    },
}

/// Reads the descriptor at the start of `bytes`; also its length. None: not a descriptor.
pub(crate) fn decode(bytes: &[u8]) -> Option<(Descriptor, usize)> {
    let (head, _) = Head::read_from_prefix(bytes).ok()?;
    let length = head.bytes.get() as usize;
    if length < HEAD || !length.is_multiple_of(8) {
        return None;
    }
    let body = bytes.get(HEAD..length)?;
    let flags = head.flags.get();
    let replica = head.replica.get();
    let descriptor = match head.kind.get() {
        KIND_WRITE => Descriptor::Write(decode_write(&head, body)?),
        KIND_IMAGE if body.len() == IMAGE_BYTES => Descriptor::Image {
            replica,
            kind: match flags {
                0 => ImageKind::KeepsLast,
                SETS_LAST => ImageKind::SetsLast,
                f if f == CREATES | SETS_LAST => ImageKind::Creates,
                _ => return None,
            },
            image: Box::new(VolumeImage::decode(body)?),
        },
        KIND_DELETE if body.is_empty() => Descriptor::Delete { replica },
        KIND_IN_PLACE if body.is_empty() => {
            let (first, count) = (usize::from(head.first.get()), usize::from(head.count.get()));
            if first + count > BLOCKS {
                return None;
            }
            let announced = Announcement {
                lsn: head.position.get(),
                at: head.base_position.get(),
            };
            let extent = head.extent.get();
            Descriptor::InPlace {
                replica,
                extent,
                first,
                count,
                announced,
            }
        }
        _ => return None,
    };
    Some((descriptor, length))
}

fn decode_write(head: &Head, body: &[u8]) -> Option<WriteIn> {
    let flags = head.flags.get();
    let has = |flag: u16| flags & flag != 0;
    let (first, count) = (usize::from(head.first.get()), usize::from(head.count.get()));
    let source = match (has(ZEROS), has(ANNOUNCED)) {
        (true, false) => Source::Zeros,
        (false, false) => Source::Journal,
        (false, true) => Source::InPlace,
        (true, true) => return None,
    };
    if first + count > BLOCKS || HEAD + body.len() != write_bytes(count, source, has(EACH_POSITION))
    {
        return None;
    }
    let (crc_bytes, position_bytes) = body.split_at_checked(if source == Source::Zeros {
        0
    } else {
        (count * 4).next_multiple_of(8)
    })?;
    let crcs = if source == Source::Zeros {
        Vec::new()
    } else {
        <[U32]>::ref_from_bytes(&crc_bytes[..count * 4])
            .ok()?
            .iter()
            .map(|c| c.get())
            .collect()
    };
    let positions = if has(EACH_POSITION) {
        <[U64]>::ref_from_bytes(position_bytes)
            .ok()?
            .iter()
            .map(|p| p.get())
            .collect()
    } else {
        vec![head.position.get(); count]
    };
    // Without a slot only an extent that is zeros as a whole, at one position, can be described.
    let whole_hole = source == Source::Zeros && count == BLOCKS && !has(EACH_POSITION);
    if head.slot.get() == NO_SLOT && count > 0 && (!whole_hole || has(ALLOCATES)) {
        return None;
    }
    Some(WriteIn {
        replica: head.replica.get(),
        extent: head.extent.get(),
        slot: head.slot.get(),
        allocates: has(ALLOCATES).then_some(head.base_position.get()),
        first,
        positions,
        crcs,
        source,
        sets_last: has(SETS_LAST).then_some(head.position.get()),
    })
}
