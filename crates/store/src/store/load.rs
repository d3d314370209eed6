//! Headers of extents that are not in memory.

use ashlar_engine::IoBuf;

use super::complete::Operation;
use super::{Store, Undo};
use crate::device::{Device, Part};
use crate::faults::{Fault, is_broken};
use crate::format::extent_header::{self, BlockMap};
use crate::format::page::{PAIR, Pair, Side};
use crate::index::IndexBatch;
use crate::memory::extents::{BlockState, Load};

/// Reads of a header that may fail before it counts as lost.
const LOAD_FAILURES_MAX: u32 = 3;

/// What was found where the header of an extent should be.
pub(crate) enum HeaderFound {
    Good(Box<BlockMap>, Side),
    /// The newest page is gone: nothing of the blocks may be served.
    Damaged(Side),
    /// Another extent's, or one newer than the index knows.
    IndexWrong,
}

impl Store {
    /// Starts to read the header of an extent unless that is under way or done.
    pub(super) fn start_load<D: Device>(&mut self, dev: &mut D, id: u32) {
        let extent = self.extents.get_mut(id);
        if extent.load != Load::Cold {
            return;
        }
        extent.load = Load::Loading;
        let offset = self.layout.header_pair(extent.slot);
        let buf = dev.buffer(PAIR);
        let token = self.operations.add(Operation::Load(id), PAIR);
        dev.read(Part::Blocks, token, offset, buf, PAIR);
    }

    /// Compares a pair of pages with what the table says of the extent.
    pub(super) fn examine_header(&self, id: u32, pair_bytes: &[u8]) -> HeaderFound {
        let owner = self.extents.get(id).owner;
        let volume = self.volumes[owner.replica as usize]
            .as_ref()
            .expect("the slot is in use");
        let entry = volume.table.get(owner.extent);
        let pair = Pair::examine(pair_bytes, extent_header::MAGIC, self.device);
        let Some(page) = pair.page(pair_bytes) else {
            return if pair.damaged {
                HeaderFound::Damaged(Side::Neither)
            } else {
                HeaderFound::IndexWrong
            };
        };
        // A header may have got here after the index, but only since the tail: what it has more than
        // the index knows is in the journal.
        let too_new = pair.lsn > entry.lsn && pair.lsn < self.opened_tail;
        let is_wrong = extent_header::owner(page) != owner || too_new;
        if is_wrong && !is_broken(Fault::TrustIndex) {
            return HeaderFound::IndexWrong;
        }
        // A page that is older than what was synced: the newer one is damaged, or was lost.
        if (pair.lsn < entry.lsn && !is_broken(Fault::TrustIndex)) || entry.suspect {
            return HeaderFound::Damaged(pair.side);
        }
        HeaderFound::Good(Box::new(extent_header::block_map(page)), pair.side)
    }

    pub(super) fn header_read<D: Device>(
        &mut self,
        dev: &mut D,
        id: u32,
        complete: bool,
        buf: Option<IoBuf>,
    ) {
        if self.extents.get(id).orphan {
            if self.extents.get(id).homing_lsn == 0 {
                self.extents.remove(id);
            } else {
                self.extents.get_mut(id).load = Load::Loaded;
            }
            buf.into_iter().for_each(|buf| dev.recycle(buf));
            return;
        }
        match (complete, &buf) {
            (true, Some(bytes)) => match self.examine_header(id, bytes) {
                HeaderFound::Good(map, side) => self.take_header(id, &map, side),
                HeaderFound::Damaged(side) => self.take_header(id, &BlockMap::lost(), side),
                HeaderFound::IndexWrong => {
                    // Never serve from it: close, and let the next open rebuild the index.
                    self.extents.get_mut(id).load = Load::Cold;
                    self.index.apply(IndexBatch {
                        clear: true,
                        ..IndexBatch::default()
                    });
                    self.close(dev);
                }
            },
            // What waits for the header fails, the next one tries again. In the end the header counts as
            // lost: a dirty extent that never gets home would hold the journal's tail for ever.
            _ => {
                let extent = self.extents.get_mut(id);
                extent.load = Load::Cold;
                extent.load_failures += 1;
                if extent.load_failures >= LOAD_FAILURES_MAX {
                    self.take_header(id, &BlockMap::lost(), Side::Neither);
                }
                self.fail_waiting_for(dev, id);
            }
        }
        buf.into_iter().for_each(|buf| dev.recycle(buf));
        if !self.closed {
            self.unpark(dev);
        }
    }

    pub(super) fn take_header(&mut self, id: u32, map: &BlockMap, side: Side) {
        if self.extents.get(id).undo > 0 {
            for undo in &mut self.undo {
                if let Undo::Block {
                    extent,
                    block,
                    known,
                    state,
                    ..
                } = undo
                    && *extent == id
                    && !*known
                {
                    *known = true;
                    *state = BlockState::at_home(map, usize::from(*block));
                }
            }
        }
        let extent = self.extents.get_mut(id);
        extent.merge(map);
        extent.side = side;
    }
}
