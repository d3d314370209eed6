//! R3: comparing the target with a source, by digests of extents and then block by block, and copying
//! what differs.

use std::collections::BTreeMap;

use crate::faults::{Fault, is_broken};
use crate::initiator::attach::runs;
use crate::initiator::{Effects, Initiator};
use crate::message::{
    BlockPosition, CopyStep, ReadData, ReadError, Request, RequestId, TornBlocks,
};
use crate::values::{
    Block, BlockRange, EXTENT_BLOCKS, EpochNumber, ExtentIndex, Position, Sequence, Time,
};

use super::Stage;

/// Extents compared by digest at a time.
const DIGESTS: u32 = 4096;
/// Blocks copied by one request.
const RUN_BLOCKS_MAX: u32 = 64;

/// A request of a resync.
#[derive(Debug)]
pub(super) enum Task {
    Begin,
    SourceDigests,
    TargetDigests,
    SourceCompare(ExtentIndex),
    TargetCompare(ExtentIndex),
    /// At the source; what the target's blocks have now.
    Read {
        extent: ExtentIndex,
        range: BlockRange,
        expected: Vec<Position>,
    },
    Copy(ExtentIndex),
    Mark,
}

impl Task {
    pub(super) fn is_of_source(&self) -> bool {
        matches!(
            self,
            Task::SourceDigests | Task::SourceCompare(_) | Task::Read { .. }
        )
    }
}

/// An extent that is being compared or copied.
#[derive(Debug, Default)]
pub(super) struct Work {
    target: Option<Vec<BlockPosition>>,
    source: Option<Vec<BlockPosition>>,
    /// Reads and copies under way.
    copies: usize,
    /// A block changed under a copy: compare again.
    again: bool,
}

/// What R3 does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Done,
    /// The stream brings it, at this sequence.
    Follows(Sequence),
    Copy,
}

/// R3 for one block. `is_torn`: the target called it torn (B2), so an equal position is not enough.
fn judge(
    target: Position,
    source: Position,
    is_torn: bool,
    epoch: EpochNumber,
    s0: Sequence,
) -> Verdict {
    if source.epoch == epoch
        && source.sequence > s0
        && source != target
        && !is_broken(Fault::SourceWins)
    {
        // R2: the target receives every write after s0, this one too; R4 waits for it. A copy would only
        // race with it.
        return Verdict::Follows(source.sequence);
    }
    let newer = target.epoch == epoch && target >= source && !is_broken(Fault::SourceWins);
    match (target == source, is_torn) {
        (true, true) => Verdict::Copy,
        (true, false) => Verdict::Done,
        // A newer write of this epoch. If it is torn, the stream sends it again.
        (false, _) if newer => Verdict::Done,
        // Positions of older epochs: the source always wins, also over a higher one (holes 12c).
        (false, _) => Verdict::Copy,
    }
}

impl<P: Clone> Initiator<P> {
    /// Keeps `resync_extents_max` extents in work; asks for digests when it runs out of extents.
    pub(super) fn copy_step(&mut self, now: Time, n: usize, effects: &mut Effects<P>) {
        loop {
            let Some(source) = self.source_of(now, n) else {
                return;
            };
            self.compare_ready(n, source, effects);
            let Some(resync) = &mut self.peers[n].resync else {
                return;
            };
            if resync.working.len() < self.options.resync_extents_max
                && let Some(extent) = resync.todo.pop_front()
            {
                resync.working.insert(extent, Work::default());
                let make = |id| Request::Compare { id, extent };
                self.ask(n, n, Task::TargetCompare(extent), effects, make);
                self.ask(n, source, Task::SourceCompare(extent), effects, make);
                continue;
            }
            if !resync.todo.is_empty() || !resync.working.is_empty() || !resync.tasks.is_empty() {
                return;
            }
            if resync.next >= resync.extents {
                resync.stage = Stage::Following;
                self.follow(n, effects);
                return;
            }
            let from = ExtentIndex(resync.next);
            let count = (resync.extents - resync.next).min(u64::from(DIGESTS)) as u32;
            resync.digests = [None, None];
            let make = |id| Request::Digests { id, from, count };
            self.ask(n, n, Task::TargetDigests, effects, make);
            self.ask(n, source, Task::SourceDigests, effects, make);
        }
    }

    pub(in crate::initiator) fn resync_digests(
        &mut self,
        at: usize,
        id: RequestId,
        list: Vec<(ExtentIndex, u64)>,
    ) {
        let Some((n, task)) = self.take(at, id) else {
            return;
        };
        let torn: Vec<_> = self.peers[n]
            .torn
            .iter()
            .map(|t| t.block.extent())
            .collect();
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        match task {
            Task::SourceDigests => resync.digests[0] = Some(list),
            Task::TargetDigests => resync.digests[1] = Some(list),
            _ => return,
        }
        let [Some(source), Some(target)] = &resync.digests else {
            return;
        };
        let source: BTreeMap<_, _> = source.iter().copied().collect();
        let target: BTreeMap<_, _> = target.iter().copied().collect();
        let differ = source.iter().filter(|(e, d)| target.get(e) != Some(d));
        let only_target = target.keys().filter(|e| !source.contains_key(e));
        let end = (resync.next + u64::from(DIGESTS)).min(resync.extents);
        let torn = torn
            .into_iter()
            .filter(|e| (resync.next..end).contains(&e.0));
        let mut todo: Vec<_> = differ
            .map(|(e, _)| *e)
            .chain(only_target.copied())
            .chain(torn)
            .collect();
        todo.sort();
        todo.dedup();
        resync.todo.extend(todo);
        resync.next = end;
        resync.digests = [None, None];
    }

    pub(in crate::initiator) fn resync_positions(
        &mut self,
        at: usize,
        id: RequestId,
        positions: Vec<BlockPosition>,
        last: Position,
    ) {
        let epoch = self.epoch.number;
        let Some((n, task)) = self.take(at, id) else {
            return;
        };
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        match task {
            Task::TargetCompare(extent) => {
                if let Some(work) = resync.working.get_mut(&extent) {
                    work.target = Some(positions);
                }
            }
            Task::SourceCompare(extent) => {
                let has_s0 = last.epoch == epoch && last.sequence >= resync.s0;
                if !has_s0 && !is_broken(Fault::LaggingSource) {
                    // Our knowledge says otherwise, so this answer is older than it.
                    self.source_failed(n, at);
                } else if let Some(work) = resync.working.get_mut(&extent) {
                    work.source = Some(positions);
                }
            }
            _ => {}
        }
    }

    /// Compares extents whose both sides have come.
    fn compare_ready(&mut self, n: usize, source: usize, effects: &mut Effects<P>) {
        while let Some(resync) = &mut self.peers[n].resync {
            let ready = |w: &Work| w.target.is_some() && w.source.is_some();
            let Some((extent, work)) = resync.working.iter_mut().find(|(_, w)| ready(w)) else {
                return;
            };
            let (extent, target, ours) = (*extent, work.target.take(), work.source.take());
            self.compare(
                n,
                source,
                extent,
                &target.unwrap_or_default(),
                &ours.unwrap_or_default(),
                effects,
            );
        }
    }

    /// Reads at the source what differs.
    fn compare(
        &mut self,
        n: usize,
        source: usize,
        extent: ExtentIndex,
        target: &[BlockPosition],
        ours: &[BlockPosition],
        effects: &mut Effects<P>,
    ) {
        let epoch = self.epoch.number;
        let torn = core::mem::take(&mut self.peers[n].torn);
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        let at = |list: &[BlockPosition], block: Block| {
            let found = list.binary_search_by_key(&block, |entry| entry.block);
            found.map(|at| list[at].position).unwrap_or_default()
        };
        let mut copies = Vec::new();
        let end = extent.first_block().0 + u64::from(EXTENT_BLOCKS);
        for block in (extent.first_block().0..end).map(Block) {
            let is_torn = torn.iter().any(|t| t.block == block);
            let verdict = judge(
                at(target, block),
                at(ours, block),
                is_torn,
                epoch,
                resync.s0,
            );
            match verdict {
                Verdict::Done => {}
                Verdict::Follows(sequence) => resync.top = resync.top.max(sequence),
                Verdict::Copy => copies.push(block),
            }
        }
        let ranges: Vec<_> = runs(copies.into_iter(), RUN_BLOCKS_MAX).collect();
        if ranges.is_empty() {
            resync.working.remove(&extent);
        } else if let Some(work) = resync.working.get_mut(&extent) {
            work.copies = ranges.len();
            work.again = false;
        }
        self.peers[n].torn = torn;
        for range in ranges {
            let expected = range.blocks().map(|b| at(target, b)).collect();
            let task = Task::Read {
                extent,
                range,
                expected,
            };
            let torn = TornBlocks::Refuse;
            self.ask(n, source, task, effects, |id| Request::Read {
                id,
                range,
                torn,
            });
        }
    }

    /// Hands the answer back when it is to none of the resyncs' reads.
    pub(in crate::initiator) fn resync_data(
        &mut self,
        at: usize,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) -> Option<Result<ReadData<P>, ReadError>> {
        let Some((n, task)) = self.take(at, id) else {
            return Some(result);
        };
        let Task::Read {
            extent,
            range,
            expected,
        } = task
        else {
            return None;
        };
        let Ok(data) = result else {
            // Another source may have a good copy; else a later pass tries again.
            self.source_failed(n, at);
            return None;
        };
        let epoch = self.epoch.number;
        let Some(resync) = &mut self.peers[n].resync else {
            return None;
        };
        let step = |(expected, position): (Position, &Position)| CopyStep {
            expected,
            position: *position,
        };
        let steps: Vec<_> = expected
            .into_iter()
            .zip(&data.positions)
            .map(step)
            .collect();
        // R4.
        let ours = data.positions.iter().filter(|p| p.epoch == epoch);
        let newest = ours.map(|p| p.sequence).max().unwrap_or_default();
        resync.top = resync.top.max(newest);
        let (pass, content) = (resync.pass, data.content);
        self.ask(n, n, Task::Copy(extent), effects, |id| Request::Copy {
            id,
            pass,
            range,
            steps,
            content,
        });
        None
    }

    pub(in crate::initiator) fn resync_copied(
        &mut self,
        at: usize,
        id: RequestId,
        changed: &[BlockPosition],
    ) {
        let Some((n, Task::Copy(extent))) = self.take(at, id) else {
            return;
        };
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        let Some(work) = resync.working.get_mut(&extent) else {
            return;
        };
        work.copies -= 1;
        work.again |= !changed.is_empty();
        if work.copies == 0 {
            let again = work.again;
            resync.working.remove(&extent);
            if again {
                // M6: a live write came between; compare again.
                resync.todo.push_back(extent);
            }
        }
    }
}
