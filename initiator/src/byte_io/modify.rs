//! Read-modify-write of partial blocks.

use ashlar_replication::message::Content;
use ashlar_replication::values::{BLOCK_BYTES, Block};
use ashlar_wire::Payload;

use super::locks::{Patch, one};
use super::{BlockRequest, Buffers, ByteIo, InFlight};
use crate::front_end::IoError;

impl ByteIo {
    pub(super) fn start_modify(&mut self, block: Block, patch: Patch) {
        self.locks.lock(block, patch);
        self.read_to_modify(block);
    }

    fn read_to_modify(&mut self, block: Block) {
        let ticket = self.issue(InFlight::ModifyRead { block });
        self.out.push_back(BlockRequest::Read {
            ticket,
            range: one(block),
        });
    }

    pub(super) fn modify_read(
        &mut self,
        block: Block,
        result: Result<Content<Payload>, IoError>,
        buffers: &mut impl Buffers,
    ) {
        match result {
            Ok(content) => {
                self.locks.gather(block);
                self.merge(block, &content, buffers);
            }
            Err(error) => {
                self.answer(block, &Err(error), buffers);
                self.release(block);
            }
        }
    }

    /// Writes what the block held with all patches over it.
    fn merge(&mut self, block: Block, held: &Content<Payload>, buffers: &mut impl Buffers) {
        let Some(busy) = self.locks.busy(block) else {
            debug_assert!(false, "a block that is not busy");
            return;
        };
        let mut merged = buffers.buffer(BLOCK_BYTES);
        match held {
            Content::Data(payload) => merged.copy_from_slice(payload.data()),
            Content::Zeros => merged.fill(0),
        }
        for patch in &busy.patches {
            let range = patch.from as usize..patch.to as usize;
            match &patch.bytes {
                Some(bytes) => merged[range.clone()].copy_from_slice(&bytes[range]),
                None => merged[range].fill(0),
            }
        }
        let payload = Payload::new(buffers.share(merged));
        busy.held = Some(payload.clone());
        let ticket = self.issue(InFlight::ModifyWrite { block });
        self.out.push_back(BlockRequest::Write {
            ticket,
            range: one(block),
            content: Content::Data(payload),
        });
    }

    pub(super) fn modify_written(
        &mut self,
        block: Block,
        result: &Result<(), IoError>,
        buffers: &mut impl Buffers,
    ) {
        let held = self.locks.busy(block).and_then(|busy| busy.held.take());
        self.answer(block, result, buffers);
        if !self.locks.gather(block) {
            self.release(block);
            return;
        }
        match held {
            Some(held) if result.is_ok() => self.merge(block, &Content::Data(held), buffers),
            // What the block holds after a failed write is not known.
            _ => self.read_to_modify(block),
        }
    }

    /// Ends the parts whose patches were merged, or could not be.
    fn answer(&mut self, block: Block, result: &Result<(), IoError>, buffers: &mut impl Buffers) {
        let mut patches = self.locks.take_patches(block);
        for patch in patches.drain(..) {
            if let Some(bytes) = patch.bytes {
                buffers.recycle(bytes);
            }
            self.part_done(patch.request, result.clone());
        }
        self.locks.recycle(patches);
    }

    fn release(&mut self, block: Block) {
        self.locks.release(block);
        while let Some(write) = self.locks.next_ready() {
            self.start(write);
        }
    }
}
