//! Journal records: a header and descriptors, then blocks of data, then what did not fit in front.

use ashlar_engine::IoBuf;
use ashlar_replication::values::DeviceId;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::descriptor::{self, Descriptor, Source};
use crate::format::page::{PAGE, crc_without_field};

const MAGIC: &[u8; 8] = b"ASHLARJR";
/// Blocks of data in a record. One extent: a copy that was applied in part goes through the journal
/// whatever its size.
pub(crate) const DATA_BLOCKS_MAX: usize = 256;
/// Pages after the data for descriptors that do not fit into the first page.
const OVERFLOW_PAGES: usize = 8;
/// Bytes of the largest record.
pub(crate) const RECORD_BYTES_MAX: usize = (1 + DATA_BLOCKS_MAX + OVERFLOW_PAGES) * PAGE;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    /// CRC-32C of the header with this field zero.
    crc: U32,
    version: U32,
    device: [u8; 16],
    lsn: U64,
    /// Header CRC of the record before.
    previous_crc: U32,
    /// CRC-32C of the descriptors, which hold the CRC-32C of every block.
    descriptors_crc: U32,
    /// Pages of the record.
    pages: U32,
    data_blocks: U32,
    descriptor_bytes: U32,
    reserved: U32,
}

const HEADER: usize = size_of::<Header>();
const INLINE: usize = PAGE - HEADER;
/// Bytes of descriptors in a record.
pub(crate) const DESCRIPTOR_BYTES_MAX: usize = INLINE + OVERFLOW_PAGES * PAGE;

/// A record that is being put together.
pub(crate) struct Builder {
    pub lsn: u64,
    buf: IoBuf,
    pub descriptors: Vec<u8>,
    data_blocks: usize,
}

impl Builder {
    /// The buffer that it was given.
    #[cfg(any(test, feature = "test-support"))]
    pub(crate) fn into_buffer(self) -> IoBuf {
        self.buf
    }

    pub(crate) fn new(lsn: u64, buf: IoBuf, mut descriptors: Vec<u8>) -> Builder {
        assert!(buf.len() >= RECORD_BYTES_MAX);
        descriptors.clear();
        Builder {
            lsn,
            buf,
            descriptors,
            data_blocks: 0,
        }
    }

    /// Whether something of that size still fits.
    pub(crate) fn has_room(&self, descriptor_bytes: usize, data_blocks: usize) -> bool {
        self.descriptors.len() + descriptor_bytes <= DESCRIPTOR_BYTES_MAX
            && self.data_blocks + data_blocks <= DATA_BLOCKS_MAX
    }

    pub(crate) fn push_data(&mut self, data: &[u8]) {
        let at = (1 + self.data_blocks) * PAGE;
        self.buf[at..at + data.len()].copy_from_slice(data);
        self.data_blocks += data.len() / PAGE;
    }

    /// Bytes that the record takes in the ring.
    pub(crate) fn bytes(&self) -> usize {
        let overflow = self.descriptors.len().saturating_sub(INLINE).div_ceil(PAGE);
        (1 + self.data_blocks + overflow) * PAGE
    }

    /// Completes the record: its bytes, its length, its header CRC, and the memory of its descriptors.
    pub(crate) fn seal(
        mut self,
        device: DeviceId,
        previous_crc: u32,
    ) -> (IoBuf, usize, u32, Vec<u8>) {
        let bytes = self.bytes();
        let inline = self.descriptors.len().min(INLINE);
        let (front, back) = self.descriptors.split_at(inline);
        // Reused memory: what follows the descriptors is cleared, so that nothing else leaks out.
        self.buf[HEADER..HEADER + inline].copy_from_slice(front);
        self.buf[HEADER + inline..PAGE].fill(0);
        let at = (1 + self.data_blocks) * PAGE;
        self.buf[at..at + back.len()].copy_from_slice(back);
        self.buf[at + back.len()..bytes].fill(0);
        let mut header = Header {
            magic: *MAGIC,
            crc: U32::new(0),
            version: U32::new(0),
            device: device.0,
            lsn: U64::new(self.lsn),
            previous_crc: U32::new(previous_crc),
            descriptors_crc: U32::new(crc32c::crc32c(&self.descriptors)),
            pages: U32::new((bytes / PAGE) as u32),
            data_blocks: U32::new(self.data_blocks as u32),
            descriptor_bytes: U32::new(self.descriptors.len() as u32),
            reserved: U32::new(0),
        };
        let crc = crc_without_field(header.as_bytes());
        header.crc = U32::new(crc);
        self.buf[..HEADER].copy_from_slice(header.as_bytes());
        (self.buf, bytes, crc, self.descriptors)
    }
}

/// The header of a record whose CRC is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub lsn: u64,
    pub crc: u32,
    pub previous_crc: u32,
    pub bytes: usize,
    descriptors_crc: u32,
    data_blocks: usize,
    descriptor_bytes: usize,
}

/// Reads the header at the start of a record's first page.
pub(crate) fn decode_header(page: &[u8], device: DeviceId) -> Option<RecordHeader> {
    let (header, _) = Header::read_from_prefix(page).ok()?;
    if header.magic != *MAGIC
        || header.device != device.0
        || header.version.get() != 0
        || header.crc.get() != crc_without_field(header.as_bytes())
    {
        return None;
    }
    let data_blocks = header.data_blocks.get() as usize;
    let descriptor_bytes = header.descriptor_bytes.get() as usize;
    if data_blocks > DATA_BLOCKS_MAX || descriptor_bytes > DESCRIPTOR_BYTES_MAX {
        return None;
    }
    let pages = 1 + data_blocks + descriptor_bytes.saturating_sub(INLINE).div_ceil(PAGE);
    (header.pages.get() as usize == pages).then_some(RecordHeader {
        lsn: header.lsn.get(),
        crc: header.crc.get(),
        previous_crc: header.previous_crc.get(),
        bytes: pages * PAGE,
        descriptors_crc: header.descriptors_crc.get(),
        data_blocks,
        descriptor_bytes,
    })
}

/// A record with everything checked.
pub(crate) struct Record<'a> {
    /// Each with the place of its first block in `data` (counted in blocks), and its offset.
    pub descriptors: Vec<(Descriptor, usize, u64)>,
    pub data: &'a [u8],
}

/// Checks descriptors and blocks of a record; None when something does not match.
pub(crate) fn decode<'a>(header: &RecordHeader, bytes: &'a [u8]) -> Option<Record<'a>> {
    let bytes = bytes.get(..header.bytes)?;
    let inline = header.descriptor_bytes.min(INLINE);
    let at = (1 + header.data_blocks) * PAGE;
    let mut list = bytes[HEADER..HEADER + inline].to_vec();
    list.extend_from_slice(&bytes[at..at + header.descriptor_bytes - inline]);
    if crc32c::crc32c(&list) != header.descriptors_crc {
        return None;
    }
    let data = &bytes[PAGE..at];
    let mut descriptors = Vec::new();
    let (mut rest, mut block) = (list.as_slice(), 0);
    while !rest.is_empty() {
        let (descriptor, length) = descriptor::decode(rest)?;
        let at = (list.len() - rest.len()) as u64;
        rest = &rest[length..];
        let first = block;
        if let Descriptor::Write(write) = &descriptor
            && write.source == Source::Journal
        {
            for crc in &write.crcs {
                let content = data.get(block * PAGE..(block + 1) * PAGE)?;
                if crc32c::crc32c(content) != *crc {
                    return None;
                }
                block += 1;
            }
        }
        descriptors.push((descriptor, first, at));
    }
    (block == header.data_blocks).then_some(Record { descriptors, data })
}
