//! Cuts byte ranges into blocks, at the borders of extents.

use ashlar_replication::values::{BLOCK_BYTES, Block, BlockRange, EXTENT_BLOCKS};

const BYTES: u64 = BLOCK_BYTES as u64;

/// A part of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Whole blocks within one extent.
    Whole(BlockRange),
    /// Bytes `from`..`to` of a block, not all of it.
    Partial { block: Block, from: u32, to: u32 },
}

impl Part {
    /// The byte of the volume after it.
    pub(super) fn end_bytes(&self) -> u64 {
        match self {
            Part::Whole(range) => range.end().0 * BYTES,
            Part::Partial { block, to, .. } => block.0 * BYTES + u64::from(*to),
        }
    }
}

/// The longest range of blocks from `start` that ends at or before `end` and within one extent.
fn range(start: u64, end: u64) -> BlockRange {
    let left = u64::from(EXTENT_BLOCKS - Block(start).within_extent());
    BlockRange {
        start: Block(start),
        count: left.min(end - start) as u32,
    }
}

/// The parts of a write of bytes `offset`..`end`, ascending.
pub(super) fn split(offset: u64, end: u64) -> impl Iterator<Item = Part> {
    let mut at = offset;
    core::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (block, from) = (at / BYTES, at % BYTES);
        let whole_end = end / BYTES;
        if from == 0 && block < whole_end {
            let range = range(block, whole_end);
            at = range.end().0 * BYTES;
            return Some(Part::Whole(range));
        }
        let to = (end - block * BYTES).min(BYTES);
        at = block * BYTES + to;
        Some(Part::Partial {
            block: Block(block),
            from: from as u32,
            to: to as u32,
        })
    })
}

/// The reads for bytes `offset`..`end`: blocks, bytes to skip at their front, bytes wanted.
pub(super) fn reads(offset: u64, end: u64) -> impl Iterator<Item = (BlockRange, u32, u32)> {
    let mut at = offset;
    core::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let range = range(at / BYTES, end.div_ceil(BYTES));
        let head = at % BYTES;
        let stop = (range.end().0 * BYTES).min(end);
        let len = stop - at;
        at = stop;
        Some((range, head as u32, len as u32))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_within_a_block_is_one_partial_part() {
        let parts: Vec<_> = split(4097, 4099).collect();
        assert_eq!(
            parts,
            [Part::Partial {
                block: Block(1),
                from: 1,
                to: 3
            }]
        );
    }

    #[test]
    fn a_write_over_the_border_of_an_extent_is_cut_there() {
        let parts: Vec<_> = split(255 * BYTES + 1, 257 * BYTES + 5).collect();
        let whole = |start, count| {
            Part::Whole(BlockRange {
                start: Block(start),
                count,
            })
        };
        let expected = [
            Part::Partial {
                block: Block(255),
                from: 1,
                to: 4096,
            },
            whole(256, 1),
            Part::Partial {
                block: Block(257),
                from: 0,
                to: 5,
            },
        ];
        assert_eq!(parts, expected);
        assert_eq!(
            split(0, 512 * BYTES).collect::<Vec<_>>(),
            [whole(0, 256), whole(256, 256)]
        );
    }

    #[test]
    fn reads_cover_the_bytes_exactly() {
        let all: Vec<_> = reads(255 * BYTES + 7, 257 * BYTES + 3).collect();
        let range = |start, count| BlockRange {
            start: Block(start),
            count,
        };
        let expected = [(range(255, 1), 7, 4089), (range(256, 2), 0, 4099)];
        assert_eq!(all, expected);
    }
}
