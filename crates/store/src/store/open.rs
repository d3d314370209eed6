//! Format, and the first half of open: superblock, headers, hole pages, index.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use ashlar_engine::IoBuf;
use ashlar_replication::values::DeviceId;

use super::Store;
use super::checkpoint::{Checkpoint, State};
use super::complete::Operations;
use super::options::{Existing, FormatOptions, OpenOptions, Zeroed};
use super::recovery::{Findings, HolePage, RecoverError};
use super::replicas::Volume;
use crate::device::{Device, Part};
use crate::format::checkpoint_page::{self, Tail};
use crate::format::layout::{JOURNAL_HEAD_BYTES, Layout, REPLICAS_MAX, SUPERBLOCK_B_OFFSET};
use crate::format::page::{PAGE, PAIR, Pair, Side};
use crate::format::superblock::{self, Found};
use crate::format::{extent_header, hole_page, volume_header};
use crate::index::{Index, IndexBatch, IndexChange, IndexKey, IndexValue};
use crate::journal::record::RECORD_BYTES_MAX;
use crate::journal::ring::Ring;
use crate::memory::extents::Extents;
use crate::memory::pages::Pages;
use crate::memory::slots::Slots;
use crate::memory::table::{GROUP, Hole};
use crate::signature;
use crate::{Counters, FormatError, OpenError};

/// The smallest ring: an empty one has room for the largest record wherever its head is.
const RING_BYTES_MIN: u64 = 2 * RECORD_BYTES_MAX as u64 + PAGE as u64;
const MIB: u64 = 1 << 20;
/// Bytes that areas are read and cleared by.
const CHUNK: usize = 1 << 20;

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

/// Reads the newest valid superblock of the blocks device.
pub(crate) fn read_superblock<D: Device>(dev: &mut D) -> Result<(DeviceId, Layout), OpenError> {
    let geometry = dev
        .geometry(Part::Blocks)
        .ok_or_else(|| OpenError::Geometry("the device has no size".into()))?;
    let mut page = IoBuf::new(PAGE);
    let mut damaged = false;
    let mut newer = None;
    for offset in [0, SUPERBLOCK_B_OFFSET] {
        if offset + PAGE as u64 > geometry.size_bytes {
            continue;
        }
        dev.read_blocking(Part::Blocks, offset, &mut page)?;
        match superblock::decode(&page, superblock::MAGIC) {
            Found::Superblock { device, layout } => {
                if layout.size_bytes > geometry.size_bytes {
                    return Err(OpenError::Truncated {
                        size_bytes: geometry.size_bytes,
                        needed_bytes: layout.size_bytes,
                    });
                }
                return Ok((device, layout));
            }
            Found::Newer(found) => newer = Some(found),
            Found::Damaged => damaged = true,
            Found::Foreign => {}
        }
    }
    if let Some(found) = newer {
        return Err(OpenError::NewerVersion {
            found,
            supported: superblock::FORMAT_VERSION,
        });
    }
    if damaged {
        return Err(OpenError::SuperblockDamaged);
    }
    let found = signature::detect_on(dev, Part::Blocks)?.map(|found| found.to_string());
    Err(OpenError::NotAStore { found })
}

fn check_journal_device<D: Device>(
    dev: &mut D,
    device: DeviceId,
    layout: &Layout,
) -> Result<(), OpenError> {
    if !layout.journal_separate {
        if dev.geometry(Part::Journal).is_some() {
            let text = "the store has its journal inside; no journal device belongs to it";
            return Err(OpenError::JournalDevice(text.into()));
        }
        return Ok(());
    }
    let Some(geometry) = dev.geometry(Part::Journal) else {
        let text = "the store has its journal on a device of its own, which was not given";
        return Err(OpenError::JournalDevice(text.into()));
    };
    let needed_bytes = layout.ring_offset() + layout.ring_bytes;
    if geometry.size_bytes < needed_bytes {
        return Err(OpenError::Truncated {
            size_bytes: geometry.size_bytes,
            needed_bytes,
        });
    }
    let mut page = IoBuf::new(PAGE);
    for offset in [0, PAGE as u64] {
        dev.read_blocking(Part::Journal, offset, &mut page)?;
        match superblock::decode(&page, superblock::JOURNAL_MAGIC) {
            Found::Superblock { device: found, .. } if found == device => return Ok(()),
            Found::Superblock { device: found, .. } => {
                let text = format!("the journal device belongs to the store {found}");
                return Err(OpenError::JournalDevice(text));
            }
            _ => {}
        }
    }
    Err(OpenError::JournalDevice(
        "the journal device holds no journal of Ashlar".into(),
    ))
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

    /// Identity of the store on a device, without opening it.
    ///
    /// # Errors
    /// [`OpenError`] as [`Store::open`].
    pub fn identify<D: Device>(dev: &mut D) -> Result<DeviceId, OpenError> {
        Ok(read_superblock(dev)?.0)
    }

    /// Opens a store and recovers what the last crash left. Nothing is written to the device: what recovery
    /// found goes home later like everything else.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open<D: Device>(
        dev: &mut D,
        index: Box<dyn Index>,
        options: OpenOptions,
    ) -> Result<Store, OpenError> {
        let (device, layout) = read_superblock(dev)?;
        check_journal_device(dev, device, &layout)?;
        let mut index = index;
        let mut entries = Vec::new();
        let covered = index.load(&mut |key, value| entries.push((key, value)));
        let covered = covered.ok().flatten();
        let mut store = Store::empty(device, layout, options, index);
        let mut findings = store.read_headers(dev)?;
        if covered.is_some_and(|covered| covered >= store.tail) && store.use_index(&entries) {
            match store.recover(dev, findings) {
                Err(RecoverError::IndexWrong) => {}
                result => return result.map(|()| store).map_err(RecoverError::into_open),
            }
            // An entry does not match the header that it names: the headers are the truth.
        }
        let mut store = Store::empty(device, layout, options, store.index);
        findings = store.read_headers(dev)?;
        store.scan_headers(dev, &mut findings)?;
        store
            .recover(dev, findings)
            .map_err(RecoverError::into_open)?;
        Ok(store)
    }

    /// Reads everything small: checkpoint, volume headers, hole pages.
    fn read_headers<D: Device>(&mut self, dev: &mut D) -> Result<Findings, OpenError> {
        let mut findings = Findings::default();
        self.read_checkpoint(dev, &mut findings)?;
        self.read_volumes(dev, &mut findings)?;
        self.read_holes(dev, &mut findings)?;
        Ok(findings)
    }

    fn empty(
        device: DeviceId,
        layout: Layout,
        options: OpenOptions,
        index: Box<dyn Index>,
    ) -> Store {
        let tail = Tail {
            lsn: 1,
            offset: 0,
            previous_crc: 0,
        };
        Store {
            device,
            layout,
            options,
            closed: false,
            counters: Counters::default(),
            completions: VecDeque::new(),
            operations: Operations::default(),
            volumes: (0..layout.replicas).map(|_| None).collect(),
            header_sides: vec![(Side::Neither, 0); layout.replicas as usize],
            by_volume: BTreeMap::new(),
            extents: Extents::new(options.headers_max),
            pages: Pages::default(),
            slots: Slots::new(layout.extents),
            holes: Slots::new(layout.hole_pairs),
            pending_free: VecDeque::new(),
            ring: Ring::new(layout.ring_bytes, tail),
            building: VecDeque::new(),
            journal_write: None,
            durable: 0,
            tail: 1,
            opened_tail: 1,
            journaled: VecDeque::new(),
            undo: VecDeque::new(),
            spare_records: Vec::new(),
            spare_descriptors: Vec::new(),
            scratch_positions: Vec::new(),
            larges: Vec::new(),
            in_place_notes: Vec::new(),
            parked: VecDeque::new(),
            home: None,
            blanks: Vec::new(),
            dirty_groups: Vec::new(),
            dirty_volumes: Vec::new(),
            checkpoint: Checkpoint {
                side: Side::Neither,
                state: State::Idle,
            },
            in_place_generation: 0,
            index,
            index_changes: Vec::new(),
        }
    }

    fn read_checkpoint<D: Device>(
        &mut self,
        dev: &mut D,
        findings: &mut Findings,
    ) -> Result<(), OpenError> {
        let mut pair_bytes = IoBuf::new(PAIR);
        dev.read_blocking(
            self.journal_part(),
            self.layout.checkpoint_pair(),
            &mut pair_bytes,
        )?;
        let pair = Pair::examine(&pair_bytes, checkpoint_page::MAGIC, self.device);
        let damaged = OpenError::JournalDamaged {
            sequence: 0,
            reason: "no checkpoint is readable",
        };
        let page = pair.page(&pair_bytes).ok_or(damaged)?;
        let tail = checkpoint_page::decode(page, self.layout.ring_bytes).ok_or(
            OpenError::JournalDamaged {
                sequence: pair.lsn,
                reason: "the checkpoint is impossible",
            },
        )?;
        self.checkpoint.side = pair.side;
        self.ring = Ring::new(self.layout.ring_bytes, tail);
        self.tail = tail.lsn;
        self.opened_tail = tail.lsn;
        self.durable = tail.lsn - 1;
        findings.checkpoint_damaged = pair.damaged;
        Ok(())
    }

    fn read_volumes<D: Device>(
        &mut self,
        dev: &mut D,
        findings: &mut Findings,
    ) -> Result<(), OpenError> {
        let mut found = Vec::new();
        read_pairs(
            dev,
            self.layout.volume_pair(0),
            self.layout.replicas,
            |slot, bytes| {
                let pair = Pair::examine(bytes, volume_header::MAGIC, self.device);
                if let Some(page) = pair.page(bytes) {
                    found.push((slot, pair, volume_header::decode_page(page)));
                }
                Ok(())
            },
        )?;
        for (slot, pair, header) in found {
            self.header_sides[slot as usize] = (pair.side, pair.version);
            match header {
                volume_header::Slot::Live(image) => {
                    let mut volume = Volume::new(image);
                    (volume.side, volume.version) = (pair.side, pair.version);
                    if !pair.settled {
                        volume.settle = true;
                        volume.queued = true;
                        self.dirty_volumes.push(slot);
                    }
                    findings.header_lsn.insert(slot, pair.lsn);
                    self.volumes[slot as usize] = Some(volume);
                }
                volume_header::Slot::Free => {}
                volume_header::Slot::Impossible => {
                    return Err(OpenError::HeaderDamaged {
                        what: "volume header",
                        number: slot,
                        reason: "a field is outside its range",
                    });
                }
            }
        }
        Ok(())
    }

    fn read_holes<D: Device>(
        &mut self,
        dev: &mut D,
        findings: &mut Findings,
    ) -> Result<(), OpenError> {
        let mut found = Vec::new();
        read_pairs(
            dev,
            self.layout.hole_pair(0),
            self.layout.hole_pairs,
            |slot, bytes| {
                let pair = Pair::examine(bytes, hole_page::MAGIC, self.device);
                match pair.page(bytes) {
                    Some(page) => found.push((slot, pair, hole_page::decode(page))),
                    // Torn while it was made, which the journal repairs, or both pages damaged later.
                    None if pair.damaged => findings.unreadable_holes.push(slot),
                    None => {}
                }
                Ok(())
            },
        )?;
        for (slot, pair, (owner, positions)) in found {
            let page = HolePage {
                slot,
                pair,
                owner,
                positions: Box::new(positions),
            };
            if self.attach_hole(&page) {
                findings.lsn_max = findings.lsn_max.max(pair.lsn);
            } else if pair.lsn >= self.tail {
                // Its replica may have been made by a record that is still in the journal.
                self.holes.take(slot);
                findings.loose_holes.push(page);
            }
        }
        Ok(())
    }

    /// Takes a hole page into the table; false when its replica is not there.
    pub(super) fn attach_hole(&mut self, page: &HolePage) -> bool {
        let HolePage {
            slot,
            pair,
            owner,
            positions,
        } = page;
        let volume = self
            .volumes
            .get_mut(owner.replica as usize)
            .and_then(Option::as_mut);
        let Some(volume) =
            volume.filter(|v| v.nonce() == owner.nonce && v.replica.volume == owner.volume)
        else {
            return false;
        };
        if positions.iter().all(|p| *p == 0) && pair.settled {
            return true;
        }
        // Even one without entries: its older page may have some, and must be rewritten.
        let group = volume.table.group_mut(owner.group);
        let mut hole = Hole::new(*slot);
        (hole.side, hole.version, hole.newest) = (pair.side, pair.version, pair.lsn);
        (hole.settle, hole.queued) = (!pair.settled, !pair.settled);
        // A group has one page: it gives it up only when both sides of it are empty.
        group.hole = Some(hole);
        for (entry, position) in group.entries.iter_mut().zip(positions.iter()) {
            entry.position = *position;
        }
        self.holes.take(*slot);
        if !pair.settled {
            self.dirty_groups.push((owner.replica, owner.group));
        }
        true
    }

    /// Fills the table from the index; false when it cannot be used.
    fn use_index(&mut self, entries: &[(IndexKey, IndexValue)]) -> bool {
        let mut seen = Slots::new(self.layout.extents);
        let plausible = |seen: &mut Slots, value: &IndexValue| {
            value.slot < self.layout.extents && seen.take(value.slot)
        };
        let volumes = &self.volumes;
        let is_live = |key: &IndexKey| {
            let volume = volumes.get(key.replica as usize).and_then(Option::as_ref);
            volume.is_some_and(|volume| volume.nonce() == key.nonce)
        };
        let live: Vec<_> = entries.iter().filter(|(key, _)| is_live(key)).collect();
        if !live.iter().all(|(_, value)| plausible(&mut seen, value)) {
            return false;
        }
        for (key, value) in live {
            self.enter(*key, *value, false);
        }
        true
    }

    /// Enters an extent into the table unless a hole page says that it was discarded since.
    fn enter(&mut self, key: IndexKey, value: IndexValue, suspect: bool) {
        let volume = self.volumes[key.replica as usize]
            .as_mut()
            .expect("a live replica");
        let is_hole = {
            let group = volume.table.group_mut(key.extent.0 / GROUP);
            group.entries[(key.extent.0 % GROUP) as usize].position != 0
        };
        if is_hole {
            return;
        }
        volume.table.set_slot(key.extent.0, value.slot);
        let entry = volume.table.entry_mut(key.extent.0);
        entry.position = value.position_max;
        entry.lsn = value.lsn;
        entry.torn = value.torn;
        entry.suspect = suspect;
        self.slots.take(value.slot);
    }

    /// Builds the table from the headers, and gives the result to the index.
    fn scan_headers<D: Device>(
        &mut self,
        dev: &mut D,
        findings: &mut Findings,
    ) -> Result<(), OpenError> {
        let mut found: BTreeMap<IndexKey, (IndexValue, bool)> = BTreeMap::new();
        read_pairs(
            dev,
            self.layout.header_pair(0),
            self.layout.extents,
            |slot, bytes| {
                let pair = Pair::examine(bytes, extent_header::MAGIC, self.device);
                let Some(page) = pair.page(bytes) else {
                    if pair.damaged {
                        findings.unreadable_headers.push(slot);
                    }
                    return Ok(());
                };
                let owner = extent_header::owner(page);
                let volume = self
                    .volumes
                    .get(owner.replica as usize)
                    .and_then(Option::as_ref);
                let live = volume.is_some_and(|volume| {
                    volume.nonce() == owner.nonce && volume.replica.volume == owner.volume
                });
                if !live {
                    return Ok(());
                }
                findings.lsn_max = findings.lsn_max.max(pair.lsn);
                let map = extent_header::block_map(page);
                let value = IndexValue {
                    slot,
                    position_max: map.positions.iter().copied().max().unwrap_or(0),
                    lsn: pair.lsn,
                    torn: !map.torn.is_empty(),
                };
                let key = IndexKey {
                    replica: owner.replica,
                    nonce: owner.nonce,
                    extent: ashlar_replication::values::ExtentIndex(owner.extent),
                };
                // A slot that was given up keeps its header: the newest one of an extent counts.
                let newer = found
                    .get(&key)
                    .is_none_or(|(other, _)| other.lsn < value.lsn);
                if newer {
                    found.insert(key, (value, pair.damaged));
                }
                Ok(())
            },
        )?;
        let changes = found
            .iter()
            .map(|(key, (value, _))| IndexChange::Put(*key, *value))
            .collect();
        self.index.apply(IndexBatch {
            changes,
            covers: self.tail,
            clear: true,
        });
        for (key, (value, suspect)) in found {
            self.enter(key, value, suspect);
        }
        Ok(())
    }
}

/// Reads an area of pairs in large pieces.
pub(crate) fn read_pairs<D: Device>(
    dev: &mut D,
    offset: u64,
    count: u32,
    mut visit: impl FnMut(u32, &[u8]) -> Result<(), OpenError>,
) -> Result<(), OpenError> {
    let per_chunk = (CHUNK / PAIR) as u32;
    let mut buf = IoBuf::new(CHUNK);
    let mut first = 0;
    while first < count {
        let pairs = per_chunk.min(count - first);
        let bytes = pairs as usize * PAIR;
        let at = offset + u64::from(first) * PAIR as u64;
        dev.read_blocking(Part::Blocks, at, &mut buf[..bytes])?;
        for (i, pair) in buf[..bytes].chunks_exact(PAIR).enumerate() {
            visit(first + i as u32, pair)?;
        }
        first += pairs;
    }
    Ok(())
}
