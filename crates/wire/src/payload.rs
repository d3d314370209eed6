//! Block data with its checksums: what the shells hand through the replication protocol.

use ashlar_engine::SharedBytes;
use ashlar_replication::values::BLOCK_BYTES;
use std::rc::Rc;

/// Checksums that fit without an allocation: writes up to 32 KiB.
const INLINE_CRCS: usize = 8;

#[derive(Clone, Debug)]
enum Crcs {
    Inline([u32; INLINE_CRCS]),
    Shared(Rc<[u32]>),
}

/// Whole blocks and the CRC-32C of each. Cloning shares the bytes.
#[derive(Clone, Debug)]
pub struct Payload {
    data: SharedBytes,
    crcs: Crcs,
}

impl Payload {
    /// Computes the checksums.
    ///
    /// # Panics
    /// When `data` is not a whole number of blocks.
    pub fn new(data: SharedBytes) -> Payload {
        assert_eq!(data.len() % BLOCK_BYTES, 0, "a payload is whole blocks");
        let crcs = data.chunks_exact(BLOCK_BYTES).map(crc32c::crc32c);
        let crcs = Payload::collect(data.len() / BLOCK_BYTES, crcs);
        Payload { data, crcs }
    }

    /// Takes checksums that came with the data; [`Payload::first_bad_block`] compares them.
    ///
    /// # Panics
    /// When there is not one per block.
    pub fn with_crcs(data: SharedBytes, crcs: impl ExactSizeIterator<Item = u32>) -> Payload {
        assert_eq!(
            data.len(),
            crcs.len() * BLOCK_BYTES,
            "one checksum per block"
        );
        let crcs = Payload::collect(crcs.len(), crcs);
        Payload { data, crcs }
    }

    fn collect(count: usize, crcs: impl Iterator<Item = u32>) -> Crcs {
        if count <= INLINE_CRCS {
            let mut inline = [0; INLINE_CRCS];
            inline
                .iter_mut()
                .zip(crcs)
                .for_each(|(to, from)| *to = from);
            Crcs::Inline(inline)
        } else {
            Crcs::Shared(crcs.collect())
        }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.data.len() / BLOCK_BYTES
    }

    /// The bytes.
    pub fn data(&self) -> &SharedBytes {
        &self.data
    }

    /// One per block.
    pub fn crcs(&self) -> &[u32] {
        match &self.crcs {
            Crcs::Inline(crcs) => &crcs[..self.blocks()],
            Crcs::Shared(crcs) => crcs,
        }
    }

    /// Index of the first block whose data does not match its checksum.
    pub fn first_bad_block(&self) -> Option<usize> {
        let blocks = self.data.chunks_exact(BLOCK_BYTES);
        blocks
            .zip(self.crcs())
            .position(|(block, crc)| crc32c::crc32c(block) != *crc)
    }

    /// The bytes of some of the blocks, with their checksums.
    ///
    /// # Panics
    /// When the range lies outside.
    pub fn slice(&self, first: usize, count: usize) -> Payload {
        let data = self
            .data
            .slice(first * BLOCK_BYTES..(first + count) * BLOCK_BYTES);
        Payload::with_crcs(data, self.crcs()[first..first + count].iter().copied())
    }
}

impl PartialEq for Payload {
    fn eq(&self, other: &Payload) -> bool {
        self.data == other.data && self.crcs() == other.crcs()
    }
}

impl Eq for Payload {}
