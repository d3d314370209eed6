//! Device operations under way, and what happens when one has ended.

use std::io;

use ashlar_engine::IoBuf;

use super::Store;
use super::jobs::Parked;
use super::read::Read;
use crate::device::Device;

/// What a device operation is for.
pub(crate) enum Operation {
    Journal,
    /// The header of an extent in memory.
    Load(u32),
    Read(Box<Read>),
    /// A large write in place, by its number.
    Large(u64),
    Home,
    HomeSync,
    Checkpoint,
}

/// Operations under way, by token.
#[derive(Default)]
pub(crate) struct Operations {
    /// With the bytes that have to be transferred.
    slots: Vec<Option<(Operation, usize)>>,
    free: Vec<u32>,
}

impl Operations {
    pub(crate) fn add(&mut self, operation: Operation, bytes: usize) -> u64 {
        match self.free.pop() {
            Some(token) => {
                self.slots[token as usize] = Some((operation, bytes));
                u64::from(token)
            }
            None => {
                self.slots.push(Some((operation, bytes)));
                (self.slots.len() - 1) as u64
            }
        }
    }

    fn take(&mut self, token: u64) -> Option<(Operation, usize)> {
        let operation = self.slots.get_mut(usize::try_from(token).ok()?)?.take()?;
        self.free.push(token as u32);
        Some(operation)
    }
}

impl Store {
    /// Takes the result of a device operation. `buf` is what the operation was given.
    ///
    /// # Panics
    /// When no operation with that token is under way.
    pub fn device_completed<D: Device>(
        &mut self,
        dev: &mut D,
        token: u64,
        result: io::Result<usize>,
        buf: Option<IoBuf>,
    ) {
        let (operation, bytes) = self
            .operations
            .take(token)
            .expect("the token of an operation under way");
        let complete = result.is_ok_and(|transferred| transferred >= bytes);
        match operation {
            Operation::Read(read) => self.read_completed(dev, *read, complete, buf),
            Operation::Load(id) => self.header_read(dev, id, complete, buf),
            _ if self.closed || !complete => {
                if let Some(buf) = buf {
                    dev.recycle(buf);
                }
                self.close(dev);
            }
            Operation::Journal => self.journal_written(dev, buf),
            Operation::Large(number) => self.large_written(dev, number, buf),
            Operation::Home => self.home_written(dev, buf),
            Operation::HomeSync => self.home_synced(dev),
            Operation::Checkpoint => self.checkpoint_written(dev, buf),
        }
    }

    /// After a failed write or sync nobody knows what is on the device: everything that is under way
    /// fails, and nothing is served until the store is opened again.
    pub(super) fn close<D: Device>(&mut self, dev: &mut D) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.fail_outstanding();
        for parked in std::mem::take(&mut self.parked) {
            self.fail_parked(dev, parked);
        }
    }

    fn fail_parked<D: Device>(&mut self, dev: &mut D, parked: Parked) {
        match parked {
            Parked::Read(read) => self.fail_read(dev, *read),
            other => other.fail(&mut self.completions),
        }
    }
}
