//! Opening a store.

use std::collections::{BTreeMap, VecDeque};

use ashlar_engine::IoBuf;
use ashlar_replication::values::DeviceId;

use super::Store;
use super::checkpoint::{Checkpoint, State};
use super::complete::Operations;
use super::options::OpenOptions;
use super::recovery::RecoverError;
use crate::device::{Device, Part};
use crate::faults::{Fault, is_broken};
use crate::format::checkpoint_page::Tail;
use crate::format::layout::{Layout, SUPERBLOCK_B_OFFSET};
use crate::format::page::{PAGE, Side};
use crate::format::superblock::{self, Found};
use crate::index::Index;
use crate::journal::ring::Ring;
use crate::memory::extents::Extents;
use crate::memory::pages::Pages;
use crate::memory::slots::Slots;
use crate::signature;
use crate::{Counters, OpenError};

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
        let is_new_enough = |covered| covered >= store.tail || is_broken(Fault::TrustIndex);
        if covered.is_some_and(is_new_enough) && store.use_index(&entries) {
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
            freeing: 0,
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
}
