//! Laying out a device.

use std::io;

use ashlar_engine::IoBuf;

use super::Store;
use super::options::{Existing, FormatOptions, Zeroed};
use crate::FormatError;
use crate::device::{Device, Part};
use crate::format::checkpoint_page::{self, Tail};
use crate::format::layout::{JOURNAL_HEAD_BYTES, Layout, REPLICAS_MAX, SUPERBLOCK_B_OFFSET};
use crate::format::page::{PAGE, PAIR};
use crate::format::superblock::{self};
use crate::journal::record::RECORD_BYTES_MAX;
use crate::signature;

/// The smallest ring: an empty one has room for the largest record wherever its head is.
const RING_BYTES_MIN: u64 = 2 * RECORD_BYTES_MAX as u64 + PAGE as u64;
const MIB: u64 = 1 << 20;
/// Bytes that areas are read and cleared by.
pub(super) const CHUNK: usize = 1 << 20;

fn clear<D: Device>(dev: &mut D, part: Part, mut from: u64, to: u64) -> io::Result<()> {
    let zeros = IoBuf::new(CHUNK);
    while from < to {
        let bytes = (to - from).min(CHUNK as u64) as usize;
        dev.write_blocking(part, from, &zeros[..bytes])?;
        from += bytes as u64;
    }
    Ok(())
}

fn plan<D: Device>(dev: &D, options: &FormatOptions) -> Result<Layout, FormatError> {
    let blocks = dev
        .geometry(Part::Blocks)
        .ok_or_else(|| FormatError::Options("the device has no size".into()))?;
    let journal = dev.geometry(Part::Journal);
    for geometry in [Some(blocks), journal].into_iter().flatten() {
        if geometry.logical_block_bytes as usize > PAGE {
            return Err(FormatError::Options(format!(
                "logical blocks of {} bytes are not supported; up to {PAGE} are",
                geometry.logical_block_bytes
            )));
        }
    }
    let size_bytes = blocks.size_bytes / PAGE as u64 * PAGE as u64;
    let page_down = |bytes: u64| bytes / PAGE as u64 * PAGE as u64;
    let by_size = page_down(size_bytes / 256).clamp(16 * MIB, 128 * MIB);
    let ring_bytes = match (options.journal_bytes, journal) {
        (Some(bytes), _) => page_down(bytes),
        (None, Some(journal)) => {
            page_down(journal.size_bytes.saturating_sub(JOURNAL_HEAD_BYTES)).min(128 * MIB)
        }
        // Small stores have a small journal: at most an eighth of the device.
        (None, None) => by_size.min(page_down(size_bytes / 8)).max(RING_BYTES_MIN),
    };
    if ring_bytes < RING_BYTES_MIN {
        return Err(FormatError::Options(format!(
            "a journal of {ring_bytes} bytes is too small; at least {RING_BYTES_MIN} are needed"
        )));
    }
    if journal.is_some_and(|j| j.size_bytes < ring_bytes + JOURNAL_HEAD_BYTES) {
        return Err(FormatError::TooSmall {
            size_bytes: journal.map_or(0, |j| j.size_bytes),
            needed_bytes: ring_bytes + JOURNAL_HEAD_BYTES,
        });
    }
    let by_size = u32::try_from(size_bytes / (4 * MIB))
        .unwrap_or(u32::MAX)
        .clamp(64, 16384);
    let replicas = options.replicas_max.unwrap_or(by_size);
    if !(1..=REPLICAS_MAX).contains(&replicas) {
        return Err(FormatError::Options(format!(
            "1 to {REPLICAS_MAX} replicas are supported"
        )));
    }
    Layout::plan(size_bytes, replicas, journal.is_some(), ring_bytes).ok_or({
        FormatError::TooSmall {
            size_bytes,
            needed_bytes: (if journal.is_some() { 0 } else { ring_bytes })
                + u64::from(replicas) * PAIR as u64
                + 2 * MIB,
        }
    })
}

/// Refuses a part with something on it.
fn check_blank<D: Device>(dev: &mut D, part: Part, existing: Existing) -> Result<(), FormatError> {
    match signature::detect_on(dev, part)? {
        Some(found) if found.is_ours() && existing == Existing::Destroy => Ok(()),
        Some(found) => Err(FormatError::Foreign(found.to_string())),
        None => Ok(()),
    }
}

impl Store {
    /// Lays a store out. Nothing is written unless the device is blank (or ours and to be destroyed).
    ///
    /// # Errors
    /// [`FormatError`] says what was found, or what does not fit.
    pub fn format<D: Device>(dev: &mut D, options: FormatOptions) -> Result<(), FormatError> {
        let layout = plan(dev, &options)?;
        check_blank(dev, Part::Blocks, options.existing)?;
        let journal = if layout.journal_separate {
            Part::Journal
        } else {
            Part::Blocks
        };
        if layout.journal_separate {
            check_blank(dev, Part::Journal, options.existing)?;
        }
        // The superblocks go first and come last: a format that was interrupted leaves no store.
        clear(dev, Part::Blocks, 0, crate::format::layout::VOLUMES_OFFSET)?;
        dev.sync_blocking(Part::Blocks)?;
        if options.zeroed == Zeroed::No {
            let holes_end = layout.hole_pair(layout.hole_pairs);
            clear(
                dev,
                Part::Blocks,
                crate::format::layout::VOLUMES_OFFSET,
                holes_end,
            )?;
            let headers = layout.header_pair(0);
            clear(
                dev,
                Part::Blocks,
                headers,
                layout.header_pair(layout.extents),
            )?;
        }
        let ring_end = layout.ring_offset() + layout.ring_bytes;
        clear(dev, journal, layout.journal_offset, ring_end)?;
        let mut page = IoBuf::new(PAGE);
        superblock::encode(
            &mut page,
            superblock::JOURNAL_MAGIC,
            options.device,
            &layout,
        );
        dev.write_blocking(journal, layout.journal_offset, &page)?;
        dev.write_blocking(journal, layout.journal_offset + PAGE as u64, &page)?;
        let tail = Tail {
            lsn: 1,
            offset: 0,
            previous_crc: 0,
        };
        checkpoint_page::encode(&mut page, options.device, tail);
        dev.write_blocking(journal, layout.checkpoint_pair(), &page)?;
        dev.write_blocking(journal, layout.checkpoint_pair() + PAGE as u64, &page)?;
        dev.sync_blocking(journal)?;
        dev.sync_blocking(Part::Blocks)?;
        superblock::encode(&mut page, superblock::MAGIC, options.device, &layout);
        dev.write_blocking(Part::Blocks, SUPERBLOCK_B_OFFSET, &page)?;
        dev.sync_blocking(Part::Blocks)?;
        dev.write_blocking(Part::Blocks, 0, &page)?;
        dev.sync_blocking(Part::Blocks)?;
        Ok(())
    }
}
