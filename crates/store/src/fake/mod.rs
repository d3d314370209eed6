//! A device in memory that loses what a power cut loses, and an index that does.
//!
//! # Fault model
//! - A write that has not completed, or that completed as [`Persist::Cached`] and was not covered by a sync that
//!   was started after its completion and completed, is *volatile*. Reads see it.
//! - A crash keeps of each volatile write, sector (512 bytes) by sector, either the old or the new content,
//!   by [`Loss`]. Sectors of different writes are kept or lost independently: this is at once loss,
//!   tearing and reordering. A sector that was written twice may keep the first write and lose the second.
//! - A durable write and a sync keep their promise once they have completed.
//! - The Nth operation can fail ([`FakeDevice::fail_at`]); a failed write is volatile like an unfinished one.
//! - After [`FakeDevice::stop_after`] writes and syncs nothing completes any more: the moment of the crash.
//! - Bits flip when a test says so ([`FakeDevice::flip`]).

mod index;
mod medium;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::rc::Rc;

use ashlar_engine::IoBuf;

use crate::device::{Device, Geometry, Part, Persist};
pub use index::FakeIndex;
pub use medium::Loss;
use medium::{Medium, read_pages, write_pages};

const SECTOR: usize = 512;
const PAGE: usize = 4096;
/// Buffers of one length that are kept.
const SPARE_MAX: usize = 64;

thread_local! {
    /// Buffers for reuse by every device of the thread, by length: making one costs more than most operations.
    static SPARE: RefCell<BTreeMap<usize, Vec<IoBuf>>> = const { RefCell::new(BTreeMap::new()) };
}

/// splitmix64: the same numbers for the same seed, everywhere.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound.max(1)
    }
}

enum Pending {
    Read {
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
    },
    Write {
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
        persist: Persist,
    },
    Sync {
        part: Part,
        token: u64,
        writes: usize,
    },
}

/// The order in which operations complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they were started.
    Submitted,
    /// Any.
    Random,
}

/// A completed operation, to be handed to [`crate::Store::device_completed`].
pub struct Completed {
    /// Of the operation.
    pub token: u64,
    /// Its result.
    pub result: io::Result<usize>,
    /// What it was given.
    pub buf: Option<IoBuf>,
}

/// The device. See the module for what it does to data.
pub struct FakeDevice {
    blocks: Medium,
    journal: Option<Medium>,
    pending: VecDeque<Pending>,
    random: Random,
    order: Order,
    logical_block_bytes: u32,
    operations: u64,
    mutations: u64,
    fail_at: Option<u64>,
    stop_after: Option<u64>,
    /// Reads, writes and syncs that were started, for tests that count them.
    pub started: (u64, u64, u64),
}

impl FakeDevice {
    /// A blank device, with a journal device of its own where a size is given.
    pub fn new(size_bytes: u64, journal_bytes: Option<u64>, seed: u64) -> FakeDevice {
        let medium = |size_bytes| Medium {
            size_bytes,
            ..Medium::default()
        };
        FakeDevice {
            blocks: medium(size_bytes),
            journal: journal_bytes.map(medium),
            pending: VecDeque::new(),
            random: Random(seed),
            order: Order::Submitted,
            logical_block_bytes: 512,
            operations: 0,
            mutations: 0,
            fail_at: None,
            stop_after: None,
            started: (0, 0, 0),
        }
    }

    /// The same device with another source of chance.
    pub fn reseeded(mut self, seed: u64) -> FakeDevice {
        self.random = Random(seed);
        self
    }

    /// Sets the order of completion.
    pub fn set_order(&mut self, order: Order) {
        self.order = order;
    }

    /// Sets the logical block size that the device reports.
    pub fn set_logical_block_bytes(&mut self, bytes: u32) {
        self.logical_block_bytes = bytes;
    }

    /// Changes the size that the device reports; data beyond it stays.
    pub fn set_size_bytes(&mut self, part: Part, size_bytes: u64) {
        self.medium(part).size_bytes = size_bytes;
    }

    /// The `nth` started operation from now on (from 0) fails.
    pub fn fail_at(&mut self, nth: u64) {
        self.fail_at = Some(self.operations + nth);
    }

    /// After that many more writes and syncs nothing completes any more.
    pub fn stop_after(&mut self, mutations: u64) {
        self.stop_after = Some(self.mutations + mutations);
    }

    /// Whether that moment has come.
    pub fn is_stopped(&self) -> bool {
        self.stop_after.is_some_and(|stop| self.mutations >= stop)
    }

    /// Writes and syncs that completed so far.
    pub fn mutations(&self) -> u64 {
        self.mutations
    }

    /// Whether an operation waits to complete.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The power goes and comes back: what was under way or volatile is lost as `loss` says.
    pub fn crash(&mut self, loss: Loss) {
        for pending in std::mem::take(&mut self.pending) {
            if let Pending::Write {
                part,
                offset,
                buf,
                len,
                ..
            } = pending
            {
                self.medium(part)
                    .write(offset, &buf[..len], Persist::Cached);
                self.recycle(buf);
            }
        }
        let mut random = self.random.clone();
        self.blocks.crash(loss, &mut random);
        if let Some(journal) = &mut self.journal {
            journal.crash(loss, &mut random);
        }
        self.random = random;
        self.stop_after = None;
        self.fail_at = None;
    }

    /// A copy of what is on the device; nothing may be under way.
    ///
    /// # Panics
    /// When an operation is under way.
    pub fn image(&self) -> FakeDevice {
        assert!(self.pending.is_empty(), "operations are under way");
        FakeDevice {
            blocks: self.blocks.clone(),
            journal: self.journal.clone(),
            pending: VecDeque::new(),
            random: self.random.clone(),
            order: self.order,
            logical_block_bytes: self.logical_block_bytes,
            operations: 0,
            mutations: 0,
            fail_at: None,
            stop_after: None,
            started: (0, 0, 0),
        }
    }

    /// Flips bits of a byte, durably.
    pub fn flip(&mut self, part: Part, offset: u64, mask: u8) {
        let mut byte = [0];
        read_pages(&self.medium(part).current, offset, &mut byte);
        let flipped = [byte[0] ^ mask];
        let medium = self.medium(part);
        write_pages(&mut medium.current, offset, &flipped);
        write_pages(&mut medium.durable, offset, &flipped);
    }

    /// Bytes as a read would see them.
    pub fn peek(&mut self, part: Part, offset: u64, buf: &mut [u8]) {
        read_pages(&self.medium(part).current, offset, buf);
    }

    /// Offsets of the pages that hold anything but zeros, ascending.
    pub fn used_pages(&self, part: Part) -> Vec<u64> {
        let medium = match part {
            Part::Blocks => &self.blocks,
            Part::Journal => self.journal.as_ref().expect("a journal device"),
        };
        let used = |page: &&Rc<[u8; PAGE]>| page.iter().any(|b| *b != 0);
        medium
            .current
            .iter()
            .filter(|(_, p)| used(p))
            .map(|(n, _)| n * PAGE as u64)
            .collect()
    }

    fn medium(&mut self, part: Part) -> &mut Medium {
        match part {
            Part::Blocks => &mut self.blocks,
            Part::Journal => self.journal.as_mut().expect("a journal device"),
        }
    }

    /// Completes one operation; None when none is under way or the moment of the crash has come.
    pub fn complete_one(&mut self) -> Option<Completed> {
        if self.is_stopped() || self.pending.is_empty() {
            return None;
        }
        let place = match self.order {
            Order::Submitted => 0,
            Order::Random => self.random.below(self.pending.len() as u64) as usize,
        };
        let pending = self.pending.remove(place)?;
        let fails = self.fail_at == Some(self.operations);
        self.operations += 1;
        let failure = || Err(io::Error::other("injected failure"));
        Some(match pending {
            Pending::Read {
                part,
                token,
                offset,
                mut buf,
                len,
            } => {
                read_pages(&self.medium(part).current, offset, &mut buf[..len]);
                Completed {
                    token,
                    result: if fails { failure() } else { Ok(len) },
                    buf: Some(buf),
                }
            }
            Pending::Write {
                part,
                token,
                offset,
                buf,
                len,
                persist,
            } => {
                self.mutations += 1;
                let persist = if fails { Persist::Cached } else { persist };
                self.medium(part).write(offset, &buf[..len], persist);
                Completed {
                    token,
                    result: if fails { failure() } else { Ok(len) },
                    buf: Some(buf),
                }
            }
            Pending::Sync {
                part,
                token,
                writes,
            } => {
                self.mutations += 1;
                if !fails {
                    self.medium(part).sync(writes);
                }
                Completed {
                    token,
                    result: if fails { failure() } else { Ok(0) },
                    buf: None,
                }
            }
        })
    }
}

impl Device for FakeDevice {
    fn geometry(&self, part: Part) -> Option<Geometry> {
        let medium = match part {
            Part::Blocks => Some(&self.blocks),
            Part::Journal => self.journal.as_ref(),
        };
        medium.map(|medium| Geometry {
            size_bytes: medium.size_bytes,
            logical_block_bytes: self.logical_block_bytes,
        })
    }

    fn read_blocking(&mut self, part: Part, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let medium = self.medium(part);
        if offset + buf.len() as u64 > medium.size_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read_pages(&medium.current, offset, buf);
        Ok(())
    }

    fn write_blocking(&mut self, part: Part, offset: u64, buf: &[u8]) -> io::Result<()> {
        assert!(
            offset + buf.len() as u64 <= self.medium(part).size_bytes,
            "beyond the end"
        );
        self.medium(part).write(offset, buf, Persist::Cached);
        Ok(())
    }

    fn sync_blocking(&mut self, part: Part) -> io::Result<()> {
        let writes = self.medium(part).carried_out();
        self.medium(part).sync(writes);
        Ok(())
    }

    fn read(&mut self, part: Part, token: u64, offset: u64, buf: IoBuf, len: usize) {
        self.started.0 += 1;
        assert!(
            offset + len as u64 <= self.medium(part).size_bytes,
            "beyond the end"
        );
        self.pending.push_back(Pending::Read {
            part,
            token,
            offset,
            buf,
            len,
        });
    }

    fn write(
        &mut self,
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
        persist: Persist,
    ) {
        self.started.1 += 1;
        assert!(
            offset + len as u64 <= self.medium(part).size_bytes,
            "beyond the end"
        );
        self.pending.push_back(Pending::Write {
            part,
            token,
            offset,
            buf,
            len,
            persist,
        });
    }

    fn sync(&mut self, part: Part, token: u64) {
        self.started.2 += 1;
        let writes = self.medium(part).carried_out();
        self.pending.push_back(Pending::Sync {
            part,
            token,
            writes,
        });
    }

    fn buffer(&mut self, len: usize) -> IoBuf {
        let spare = SPARE.with_borrow_mut(|spare| spare.get_mut(&len).and_then(Vec::pop));
        if let Some(buf) = spare {
            return buf;
        }
        // Filled with what a careless user of reused memory would trip over.
        let mut buf = IoBuf::new(len);
        buf.fill(0xa5);
        buf
    }

    fn recycle(&mut self, buf: IoBuf) {
        SPARE.with_borrow_mut(|spare| {
            let spare = spare.entry(buf.len()).or_default();
            if spare.len() < SPARE_MAX {
                spare.push(buf);
            }
        });
    }
}
