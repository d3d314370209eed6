//! Bytes that survive a crash, and bytes that may not.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{PAGE, Random, SECTOR};
use crate::device::Persist;

pub(super) type Pages = BTreeMap<u64, Rc<[u8; PAGE]>>;

pub(super) fn read_pages(pages: &Pages, offset: u64, buf: &mut [u8]) {
    let mut done = 0;
    while done < buf.len() {
        let at = offset + done as u64;
        let within = (at % PAGE as u64) as usize;
        let bytes = (PAGE - within).min(buf.len() - done);
        match pages.get(&(at / PAGE as u64)) {
            Some(page) => buf[done..done + bytes].copy_from_slice(&page[within..within + bytes]),
            None => buf[done..done + bytes].fill(0),
        }
        done += bytes;
    }
}

pub(super) fn write_pages(pages: &mut Pages, offset: u64, data: &[u8]) {
    let mut done = 0;
    while done < data.len() {
        let at = offset + done as u64;
        let within = (at % PAGE as u64) as usize;
        let bytes = (PAGE - within).min(data.len() - done);
        let piece = &data[done..done + bytes];
        done += bytes;
        let number = at / PAGE as u64;
        match pages.get_mut(&number) {
            Some(page) => Rc::make_mut(page)[within..within + bytes].copy_from_slice(piece),
            // A page that is not there reads as zeros.
            None if piece.iter().all(|byte| *byte == 0) => {}
            None => {
                let mut page = Rc::new([0; PAGE]);
                Rc::make_mut(&mut page)[within..within + bytes].copy_from_slice(piece);
                pages.insert(number, page);
            }
        }
    }
}

/// What a crash does to volatile writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// All are lost.
    All,
    /// All are kept.
    Nothing,
    /// Each sector is kept or lost, by a coin.
    Sectors,
    /// Each write is kept or lost as a whole, by a coin.
    Writes,
}

#[derive(Clone, Default)]
pub(super) struct Medium {
    pub(super) size_bytes: u64,
    /// What survives.
    pub(super) durable: Pages,
    /// What reads see.
    pub(super) current: Pages,
    /// Volatile writes in the order in which they were carried out.
    pub(super) volatile: Vec<(u64, Vec<u8>)>,
    /// Volatile writes that were made durable so far.
    pub(super) synced: usize,
}

impl Medium {
    pub(super) fn write(&mut self, offset: u64, data: &[u8], persist: Persist) {
        write_pages(&mut self.current, offset, data);
        match persist {
            Persist::Cached => self.volatile.push((offset, data.to_vec())),
            Persist::Durable => {
                write_pages(&mut self.durable, offset, data);
                // Whatever an older volatile write of these bytes does, it came before.
                for (at, bytes) in &mut self.volatile {
                    overlay(*at, bytes, offset, data);
                }
            }
        }
    }

    /// Volatile writes that were carried out so far.
    pub(super) fn carried_out(&self) -> usize {
        self.synced + self.volatile.len()
    }

    /// Makes the first `writes` of them durable.
    pub(super) fn sync(&mut self, writes: usize) {
        let count = writes.saturating_sub(self.synced);
        for (offset, data) in self.volatile.drain(..count) {
            write_pages(&mut self.durable, offset, &data);
        }
        self.synced += count;
    }

    pub(super) fn crash(&mut self, loss: Loss, random: &mut Random) {
        self.synced = 0;
        for (offset, data) in std::mem::take(&mut self.volatile) {
            let whole = random.below(2) == 0;
            for (i, sector) in data.chunks(SECTOR).enumerate() {
                let kept = match loss {
                    Loss::All => false,
                    Loss::Nothing => true,
                    Loss::Sectors => random.below(2) == 0,
                    Loss::Writes => whole,
                };
                if kept {
                    write_pages(&mut self.durable, offset + (i * SECTOR) as u64, sector);
                }
            }
        }
        self.current = self.durable.clone();
    }
}

/// Replaces the part of `bytes` (at `at`) that `data` (at `offset`) covers.
fn overlay(at: u64, bytes: &mut [u8], offset: u64, data: &[u8]) {
    let from = at.max(offset);
    let to = (at + bytes.len() as u64).min(offset + data.len() as u64);
    if from < to {
        let target = &mut bytes[(from - at) as usize..(to - at) as usize];
        target.copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
    }
}
