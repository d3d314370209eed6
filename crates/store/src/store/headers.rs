//! What open reads before the journal: checkpoint, volume headers, hole pages, and the index or all extent headers.

use std::collections::BTreeMap;

use ashlar_engine::IoBuf;

use super::Store;
use super::recovery::{Findings, HolePage};
use super::replicas::Volume;
use crate::OpenError;
use crate::device::{Device, Part};
use crate::format::checkpoint_page::{self};
use crate::format::page::{PAIR, Pair};
use crate::format::{extent_header, hole_page, volume_header};
use crate::index::{IndexBatch, IndexChange, IndexKey, IndexValue};
use crate::journal::ring::Ring;
use crate::memory::slots::Slots;
use crate::memory::table::{GROUP, Hole};

use super::format_device::CHUNK;

impl Store {
    /// Reads everything small: checkpoint, volume headers, hole pages.
    pub(super) fn read_headers<D: Device>(&mut self, dev: &mut D) -> Result<Findings, OpenError> {
        let mut findings = Findings::default();
        self.read_checkpoint(dev, &mut findings)?;
        self.read_volumes(dev, &mut findings)?;
        self.read_holes(dev, &mut findings)?;
        Ok(findings)
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
                    let mut volume = Volume::new(*image);
                    (volume.side, volume.version) = (pair.side, pair.version);
                    if !pair.settled {
                        volume.settle = true;
                        volume.queued = true;
                        self.dirty_volumes.push(slot);
                    }
                    findings.header_lsn.insert(slot, pair.lsn);
                    self.volumes[slot as usize] = Some(Box::new(volume));
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
    pub(super) fn use_index(&mut self, entries: &[(IndexKey, IndexValue)]) -> bool {
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
    pub(super) fn scan_headers<D: Device>(
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
    let mut buf = dev.buffer(CHUNK);
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
    dev.recycle(buf);
    Ok(())
}
