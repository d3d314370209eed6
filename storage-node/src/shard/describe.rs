//! Reading extents to compare replicas: block by block where an extent cannot be read as a whole, and
//! in the scheduler's class for scrubbing.

use ashlar_replication::message::{ReadError, TornBlocks};
use ashlar_replication::values::{
    BLOCK_BYTES, Block, BlockRange, EXTENT_BLOCKS, ExtentIndex, Time, VolumeId,
};
use ashlar_store::{ReadOutcome, StoreError};

use crate::scheduler::Cost;
use crate::shard::commands::{self, CommandError, Describe, ExtentInfo, Waiting};
use crate::shard::core::Core;
use crate::shard::pending::Owed;
use crate::shard::queued::Work;

impl Core {
    /// [`commands::Command::Describe`].
    pub(super) fn describe(
        &mut self,
        now: Time,
        volume: VolumeId,
        extent: ExtentIndex,
        answer: commands::Answer<ExtentInfo>,
    ) {
        let slot = self.store.lookup(volume);
        let replica = slot.and_then(|slot| self.store.replica(slot));
        let (Some(slot), Some(replica)) = (slot, replica) else {
            let _ = answer.send(Err(CommandError::NotFound));
            return;
        };
        let left = replica.size_blocks.checked_sub(extent.first_block().0);
        let Some(left) = left.filter(|left| *left > 0) else {
            let _ = answer.send(Err(StoreError::BadRange.into()));
            return;
        };
        let zeros = crc32c::crc32c(&[0; BLOCK_BYTES]);
        let found = ExtentInfo {
            extent,
            positions: vec![0; EXTENT_BLOCKS as usize],
            crcs: vec![zeros; EXTENT_BLOCKS as usize],
            bad_blocks: Vec::new(),
        };
        let describe = Describe {
            slot,
            volume,
            found,
            block: None,
            blocks: left.min(u64::from(EXTENT_BLOCKS)) as u32,
            answer,
        };
        self.describe_next(now, describe);
    }

    /// Starts the next read as soon as the scheduler lets it.
    fn describe_next(&mut self, now: Time, describe: Describe) {
        let blocks = if describe.block.is_some() {
            1
        } else {
            describe.blocks
        };
        let cost = Cost::of_bytes(u64::from(blocks) * BLOCK_BYTES as u64);
        let class = self.scrub_class;
        if self.scheduler.admit(now, class, cost) {
            self.describe_start(describe, cost);
        } else {
            let work = Work::Describe(Box::new(describe));
            self.scheduler.enqueue(class, cost, work);
        }
    }

    /// Starts the next read.
    pub(super) fn describe_start(&mut self, describe: Describe, cost: Cost) {
        let (slot, volume) = (describe.slot, describe.volume);
        let first = describe.found.extent.first_block();
        let range = match describe.block {
            None => BlockRange {
                start: first,
                count: describe.blocks,
            },
            Some(block) => BlockRange {
                start: Block(first.0 + u64::from(block)),
                count: 1,
            },
        };
        let owed = Owed::Control(Box::new(Waiting::Describe(describe)));
        let token = self.begin_control(slot, cost, owed);
        // It may have been deleted while this waited, and its slot given to another.
        let same = self.store.replica(slot).is_some_and(|r| r.volume == volume);
        let (store, device) = (&mut self.store, &mut self.device);
        let started = if same {
            store
                .read(device, token, slot, range, TornBlocks::Refuse)
                .map_err(CommandError::from)
        } else {
            Err(CommandError::NotFound)
        };
        if let Err(error) = started {
            self.fail_control(token, error);
        }
    }

    /// A read is done: the whole extent, or a block once the extent as a whole could not be read.
    pub(super) fn described(
        &mut self,
        now: Time,
        mut describe: Describe,
        result: Result<ReadOutcome, ReadError>,
    ) {
        let next = match (result, describe.block) {
            (Ok(read), block) => {
                let first = block.unwrap_or(0) as usize;
                for (n, (position, crc)) in read.positions.iter().zip(&read.crcs).enumerate() {
                    describe.found.positions[first + n] = position.pack();
                    describe.found.crcs[first + n] = *crc;
                }
                self.store.recycle(&mut self.device, read);
                block.map(|block| block + 1)
            }
            (Err(ReadError::Refused(_)), _) => {
                let _ = describe.answer.send(Err(StoreError::Closed.into()));
                return;
            }
            (Err(_), None) => Some(0),
            (Err(error), Some(block)) => {
                describe.found.bad_blocks.push(block);
                if let ReadError::Checksum { position, .. } | ReadError::Torn { position, .. } =
                    error
                {
                    describe.found.positions[block as usize] = position.pack();
                }
                Some(block + 1)
            }
        };
        match next {
            Some(block) if block < describe.blocks => {
                describe.block = Some(block);
                self.describe_next(now, describe);
            }
            _ => {
                let _ = describe.answer.send(Ok(describe.found));
            }
        }
    }
}
