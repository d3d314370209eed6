//! Which blocks are busy with a read-modify-write, and what waits for them.

use std::collections::VecDeque;

use ashlar_engine::IoBuf;
use ashlar_replication::message::Content;
use ashlar_replication::values::{Block, BlockRange};
use ashlar_wire::Payload;

/// Vectors kept for reuse: as many as blocks are commonly busy.
const SPARE_MAX: usize = 32;

pub(super) fn one(block: Block) -> BlockRange {
    BlockRange {
        start: block,
        count: 1,
    }
}

/// New bytes of a part of a block.
#[derive(Debug)]
pub(super) struct Patch {
    pub(super) request: u32,
    pub(super) from: u32,
    pub(super) to: u32,
    /// A block's buffer of which `from..to` counts. None: zeros.
    pub(super) bytes: Option<IoBuf>,
}

/// A block that is being read, merged and written.
#[derive(Debug)]
pub(super) struct Busy {
    block: Block,
    /// What is merged into it, in order of arrival.
    pub(super) patches: Vec<Patch>,
    /// What was written last; the next merge needs no read then.
    pub(super) held: Option<Payload>,
}

/// A write that is not issued yet.
#[derive(Debug)]
pub(super) enum Waiting {
    Whole {
        request: u32,
        range: BlockRange,
        content: Content<Payload>,
    },
    Partial {
        block: Block,
        patch: Patch,
    },
}

impl Waiting {
    pub(super) fn range(&self) -> BlockRange {
        match self {
            Waiting::Whole { range, .. } => *range,
            Waiting::Partial { block, .. } => one(*block),
        }
    }
}

/// See the module's documentation. Both lists are empty while all writes are of whole blocks.
#[derive(Debug, Default)]
pub(super) struct Locks {
    busy: Vec<Busy>,
    waiting: VecDeque<Waiting>,
    /// Writes that may start now, in order.
    ready: VecDeque<Waiting>,
    freed: Vec<BlockRange>,
    spare: Vec<Vec<Patch>>,
}

impl Locks {
    /// Hands the write back if nothing is in its way; keeps it otherwise.
    pub(super) fn admit(&mut self, write: Waiting) -> Option<Waiting> {
        let range = write.range();
        let blocked = self.is_busy(range) || self.waiting.iter().any(|w| w.range().overlaps(range));
        if blocked {
            self.waiting.push_back(write);
            return None;
        }
        Some(write)
    }

    fn is_busy(&self, range: BlockRange) -> bool {
        self.busy.iter().any(|busy| range.overlaps(one(busy.block)))
    }

    /// Makes a block busy with its first patch.
    pub(super) fn lock(&mut self, block: Block, patch: Patch) {
        let mut patches = self.spare.pop().unwrap_or_default();
        patches.push(patch);
        self.busy.push(Busy {
            block,
            patches,
            held: None,
        });
    }

    pub(super) fn busy(&mut self, block: Block) -> Option<&mut Busy> {
        self.busy.iter_mut().find(|busy| busy.block == block)
    }

    /// Adds the patches of the block that wait, up to the first write of the whole block, so that
    /// one read-modify-write serves all of them. True if there is anything to merge.
    pub(super) fn gather(&mut self, block: Block) -> bool {
        let Some(busy) = self.busy.iter_mut().find(|busy| busy.block == block) else {
            return false;
        };
        let mut index = 0;
        while let Some(waiting) = self.waiting.get(index) {
            match waiting {
                Waiting::Partial { block: b, .. } if *b == block => {
                    if let Some(Waiting::Partial { patch, .. }) = self.waiting.remove(index) {
                        busy.patches.push(patch);
                    }
                }
                Waiting::Whole { range, .. } if range.overlaps(one(block)) => break,
                _ => index += 1,
            }
        }
        !busy.patches.is_empty()
    }

    /// Takes the patches of a block, which stays busy.
    pub(super) fn take_patches(&mut self, block: Block) -> Vec<Patch> {
        let fresh = self.spare.pop().unwrap_or_default();
        self.busy(block)
            .map(|busy| std::mem::replace(&mut busy.patches, fresh))
            .unwrap_or_default()
    }

    /// Takes an emptied vector back.
    pub(super) fn recycle(&mut self, mut patches: Vec<Patch>) {
        patches.clear();
        if self.spare.len() < SPARE_MAX {
            self.spare.push(patches);
        }
    }

    /// The block is no longer busy. What waited for it and may start is handed out by
    /// [`Locks::next_ready`].
    ///
    /// Only what overlaps something freed is looked at closely: many writes may wait for others.
    pub(super) fn release(&mut self, block: Block) {
        if let Some(at) = self.busy.iter().position(|busy| busy.block == block) {
            let busy = self.busy.swap_remove(at);
            self.recycle(busy.patches);
        }
        if self.waiting.is_empty() {
            return;
        }
        let mut freed = std::mem::take(&mut self.freed);
        freed.clear();
        freed.push(one(block));
        let mut index = 0;
        while index < self.waiting.len() {
            let range = self.waiting[index].range();
            let started = self.ready.iter().any(|ready| {
                // Whole blocks may overlap what is issued before them; a patch has to wait for none.
                matches!(ready, Waiting::Partial { .. }) && ready.range().overlaps(range)
            });
            let may_start = freed.iter().any(|freed| freed.overlaps(range))
                && !started
                && !self.is_busy(range)
                && !self.overlaps_earlier(index, range);
            if !may_start {
                index += 1;
            } else if let Some(write) = self.waiting.remove(index) {
                freed.push(range);
                self.ready.push_back(write);
            }
        }
        self.freed = freed;
    }

    fn overlaps_earlier(&self, index: usize, range: BlockRange) -> bool {
        self.waiting
            .iter()
            .take(index)
            .any(|w| w.range().overlaps(range))
    }

    /// The next write that has waited long enough.
    pub(super) fn next_ready(&mut self) -> Option<Waiting> {
        self.ready.pop_front()
    }

    /// Whether nothing is busy and nothing waits.
    #[cfg(test)]
    pub(super) fn are_free(&self) -> bool {
        self.busy.is_empty() && self.waiting.is_empty() && self.ready.is_empty()
    }
}
