//! R1–R5: bringing a member up to date while the stream goes on.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use crate::configuration::Role;
use crate::initiator::equalise::runs;
use crate::initiator::{Effects, Initiator};
use crate::message::{
    BlockPosition, CopyStep, ReadData, ReadError, Refusal, Request, RequestId, TornBlocks,
};
use crate::values::{
    Block, BlockRange, EXTENT_BLOCKS, ExtentIndex, Pass, Position, Sequence, Time,
};

/// Extents compared by digest at a time.
const DIGESTS: u32 = 4096;
/// Blocks copied by one request.
const RUN_BLOCKS_MAX: u32 = 64;
/// Pause after a pass that failed for a reason that will not pass by itself soon.
const RETRY: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// BeginResync was sent.
    Beginning,
    /// Comparing and copying.
    Copying,
    /// Waiting for the stream to reach `top` (R4).
    Following,
    /// MarkComplete was sent.
    Completing,
    /// Waiting for the configuration that takes it back.
    Complete,
}

#[derive(Debug)]
enum Task {
    Begin,
    Digests {
        of_target: bool,
    },
    Compare {
        extent: ExtentIndex,
        of_target: bool,
    },
    /// At the source; what the target's blocks have now.
    Read {
        extent: ExtentIndex,
        range: BlockRange,
        expected: Vec<Position>,
    },
    Copy {
        extent: ExtentIndex,
    },
    Mark,
}

/// An extent that is being compared or copied.
#[derive(Debug, Default)]
struct Work {
    target: Option<Vec<BlockPosition>>,
    source: Option<Vec<BlockPosition>>,
    /// Reads and copies under way.
    copies: usize,
    /// A block changed under a copy: compare again.
    again: bool,
}

/// A resync of one member.
#[derive(Debug)]
pub(super) struct Resync {
    pass: Pass,
    s0: Sequence,
    stage: Stage,
    source: Option<usize>,
    tasks: BTreeMap<RequestId, Task>,
    digests: [Option<Vec<(ExtentIndex, u64)>>; 2],
    /// The first extent whose digest has not been compared.
    next: u64,
    extents: u64,
    todo: VecDeque<ExtentIndex>,
    working: BTreeMap<ExtentIndex, Work>,
    /// The highest sequence of this epoch among the copied positions (R4).
    top: Sequence,
    done: u64,
}

impl Resync {
    fn new(pass: Pass, s0: Sequence, size_blocks: u64) -> Resync {
        Resync {
            pass,
            s0,
            stage: Stage::Beginning,
            source: None,
            tasks: BTreeMap::new(),
            digests: [None, None],
            next: 0,
            extents: size_blocks.div_ceil(u64::from(EXTENT_BLOCKS)),
            todo: VecDeque::new(),
            working: BTreeMap::new(),
            top: Sequence(0),
            done: 0,
        }
    }

    /// (extents done, extents in all).
    pub(super) fn progress(&self) -> (u64, u64) {
        let ahead = self.todo.len() as u64 + self.working.len() as u64;
        (
            self.next.saturating_sub(ahead).min(self.extents),
            self.extents,
        )
    }
}

impl<P: Clone> Initiator<P> {
    /// Starts resyncs and moves those that are under way.
    pub(super) fn advance_resync(&mut self, now: Time, effects: &mut Effects<P>) {
        self.compare_ready(effects);
        for n in 0..self.peers.len() {
            if self.peers[n].resync.is_some() {
                self.step(n, effects);
            } else if self.may_resync(now, n) {
                self.begin_resync(n, effects);
            }
        }
    }

    /// R1.
    fn may_resync(&self, now: Time, n: usize) -> bool {
        let peer = &self.peers[n];
        let Some(c) = &self.committed else {
            return false;
        };
        let id = peer.member.id;
        peer.attached
            && !peer.fenced
            && !peer.ready
            && peer.retry_at <= now
            && peer.member.role == Role::Data
            && c.role_of(id) == Some(Role::Data)
            && !c.in_sync.contains(&id)
            && peer.stored >= c.order()
            && self
                .proposal
                .as_ref()
                .is_none_or(|p| !p.configuration.in_sync.contains(&id))
    }

    /// R2: from here on the member receives the stream.
    fn begin_resync(&mut self, n: usize, effects: &mut Effects<P>) {
        let id = self.id();
        let s0 = self.stream.issued;
        let size_blocks = self.size_blocks;
        let peer = &mut self.peers[n];
        peer.last_pass = Pass(peer.last_pass.0 + 1);
        let pass = peer.last_pass;
        let mut resync = Resync::new(pass, s0, size_blocks);
        resync.tasks.insert(id, Task::Begin);
        peer.resync = Some(resync);
        peer.in_stream = true;
        peer.leaving = false;
        peer.sent = s0;
        peer.answered = s0;
        self.send(
            n,
            Request::BeginResync {
                id,
                pass,
                sequence: s0,
            },
            effects,
        );
    }

    /// R3: an in-sync member whose applied sequence is at or above s0.
    fn resync_source(&self, n: usize, s0: Sequence) -> Option<usize> {
        let c = self.committed.as_ref()?;
        (0..self.peers.len()).find(|m| {
            let peer = &self.peers[*m];
            *m != n
                && peer.attached
                && !peer.fenced
                && !peer.leaving
                && c.in_sync.contains(&peer.member.id)
                && peer.answered >= s0
        })
    }

    fn ask(
        &mut self,
        n: usize,
        to: usize,
        task: Task,
        effects: &mut Effects<P>,
        make: impl FnOnce(RequestId) -> Request<P>,
    ) {
        let id = self.id();
        if let Some(resync) = &mut self.peers[n].resync {
            resync.tasks.insert(id, task);
        }
        self.send(to, make(id), effects);
    }

    fn step(&mut self, n: usize, effects: &mut Effects<P>) {
        let Some(resync) = &self.peers[n].resync else {
            return;
        };
        match resync.stage {
            Stage::Beginning | Stage::Completing | Stage::Complete => {}
            Stage::Copying => self.copy_step(n, effects),
            Stage::Following => self.follow(n, effects),
        }
    }

    fn copy_step(&mut self, n: usize, effects: &mut Effects<P>) {
        let Some(resync) = &self.peers[n].resync else {
            return;
        };
        let source = match resync.source {
            Some(source) => source,
            None => {
                let Some(source) = self.resync_source(n, resync.s0) else {
                    return;
                };
                if let Some(resync) = &mut self.peers[n].resync {
                    resync.source = Some(source);
                }
                source
            }
        };
        let limit = self.options.resync_extents_max;
        loop {
            let Some(resync) = &mut self.peers[n].resync else {
                return;
            };
            if resync.working.len() < limit
                && let Some(extent) = resync.todo.pop_front()
            {
                resync.working.insert(extent, Work::default());
                for (to, of_target) in [(n, true), (source, false)] {
                    let task = Task::Compare { extent, of_target };
                    self.ask(n, to, task, effects, |id| Request::Compare { id, extent });
                }
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
            for (to, of_target) in [(n, true), (source, false)] {
                let task = Task::Digests { of_target };
                self.ask(n, to, task, effects, |id| Request::Digests {
                    id,
                    from,
                    count,
                });
            }
            return;
        }
    }

    /// R4.
    fn follow(&mut self, n: usize, effects: &mut Effects<P>) {
        let answered = self.peers[n].answered;
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        if resync.stage != Stage::Following || answered < resync.top {
            return;
        }
        resync.stage = Stage::Completing;
        let pass = resync.pass;
        self.ask(n, n, Task::Mark, effects, |id| Request::MarkComplete {
            id,
            pass,
        });
    }

    /// The member has answered writes: R4 may hold now.
    pub(super) fn resync_answered(&mut self, n: usize, effects: &mut Effects<P>) {
        self.follow(n, effects);
    }

    fn take(&mut self, at: usize, id: RequestId) -> Option<(usize, Task)> {
        for n in 0..self.peers.len() {
            let Some(resync) = &mut self.peers[n].resync else {
                continue;
            };
            let of_target = at == n;
            let right = match resync.tasks.get(&id) {
                None => continue,
                Some(Task::Digests { of_target: t } | Task::Compare { of_target: t, .. }) => {
                    *t == of_target
                }
                Some(Task::Read { .. }) => resync.source == Some(at),
                Some(_) => of_target,
            };
            if right {
                return resync.tasks.remove(&id).map(|task| (n, task));
            }
        }
        None
    }

    /// Whether `id` was BeginResync or MarkComplete.
    pub(super) fn resync_done(&mut self, n: usize, id: RequestId) -> bool {
        let Some((n, task)) = self.take(n, id) else {
            return false;
        };
        let peer = &mut self.peers[n];
        let Some(resync) = &mut peer.resync else {
            return true;
        };
        match task {
            Task::Begin => resync.stage = Stage::Copying,
            Task::Mark => {
                resync.stage = Stage::Complete;
                // R5.
                peer.ready = true;
            }
            _ => {}
        }
        true
    }

    pub(super) fn resync_digests(
        &mut self,
        n: usize,
        id: RequestId,
        list: Vec<(ExtentIndex, u64)>,
    ) {
        let Some((n, Task::Digests { of_target })) = self.take(n, id) else {
            return;
        };
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        resync.digests[usize::from(of_target)] = Some(list);
        let [Some(source), Some(target)] = &resync.digests else {
            return;
        };
        let source: BTreeMap<_, _> = source.iter().copied().collect();
        let target: BTreeMap<_, _> = target.iter().copied().collect();
        let differ = source
            .iter()
            .filter(|(e, d)| target.get(e) != Some(d))
            .map(|(e, _)| *e);
        let only_target = target.keys().filter(|e| !source.contains_key(e)).copied();
        let mut todo: Vec<_> = differ.chain(only_target).collect();
        todo.sort();
        resync.todo.extend(todo);
        resync.next = (resync.next + u64::from(DIGESTS)).min(resync.extents);
    }

    pub(super) fn resync_positions(
        &mut self,
        at: usize,
        id: RequestId,
        positions: Vec<BlockPosition>,
        last: Position,
    ) {
        let Some((n, Task::Compare { extent, of_target })) = self.take(at, id) else {
            return;
        };
        let epoch = self.epoch.number;
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        let behind = last.epoch != epoch || last.sequence < resync.s0;
        let Some(work) = resync.working.get_mut(&extent) else {
            return;
        };
        if of_target {
            work.target = Some(positions);
        } else if behind {
            // R3 does not hold for this source.
            self.resync_source_lost(at);
            return;
        } else {
            work.source = Some(positions);
        }
    }

    /// Reads what differs, once both sides of an extent are known.
    fn compare(&mut self, n: usize, extent: ExtentIndex, effects: &mut Effects<P>) {
        let epoch = self.epoch.number;
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        let (Some(source), Some(work)) = (resync.source, resync.working.get_mut(&extent)) else {
            return;
        };
        let (Some(theirs), Some(ours)) = (work.target.take(), work.source.take()) else {
            return;
        };
        let theirs: BTreeMap<_, _> = theirs.iter().map(|e| (e.block, e.position)).collect();
        let ours: BTreeMap<_, _> = ours.iter().map(|e| (e.block, e.position)).collect();
        let at =
            |map: &BTreeMap<Block, Position>, b: Block| map.get(&b).copied().unwrap_or_default();
        let copy = |b: &Block| {
            let (target, source) = (at(&theirs, *b), at(&ours, *b));
            // R3: equal, or newer in this epoch: done. Positions of older epochs: the source wins.
            target != source && !(target.epoch == epoch && target >= source)
        };
        let end = extent.first_block().0 + u64::from(EXTENT_BLOCKS);
        let blocks = (extent.first_block().0..end).map(Block).filter(copy);
        let ranges: Vec<_> = runs(blocks, RUN_BLOCKS_MAX).collect();
        work.copies = ranges.len();
        work.again = false;
        if ranges.is_empty() {
            resync.working.remove(&extent);
            resync.done += 1;
        }
        for range in ranges {
            let expected = range.blocks().map(|b| at(&theirs, b)).collect();
            let task = Task::Read {
                extent,
                range,
                expected,
            };
            self.ask(n, source, task, effects, |id| Request::Read {
                id,
                range,
                torn: TornBlocks::Refuse,
            });
        }
    }

    /// Hands the answer back when it is to none of the resyncs' reads.
    pub(super) fn resync_data(
        &mut self,
        at: usize,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) -> Option<Result<ReadData<P>, ReadError>> {
        let Some((
            n,
            Task::Read {
                extent,
                range,
                expected,
            },
        )) = self.take(at, id)
        else {
            return Some(result);
        };
        let epoch = self.epoch.number;
        let Ok(data) = result else {
            // Another source may have a good copy of it; else a later pass tries again.
            self.resync_source_lost(at);
            return None;
        };
        let Some(resync) = &mut self.peers[n].resync else {
            return None;
        };
        let step = |(expected, position): (Position, Position)| CopyStep { expected, position };
        let steps: Vec<_> = expected
            .into_iter()
            .zip(data.positions.iter().copied())
            .map(step)
            .collect();
        let ours = data.positions.iter().filter(|p| p.epoch == epoch);
        resync.top = ours
            .map(|p| p.sequence)
            .max()
            .unwrap_or_default()
            .max(resync.top);
        let (pass, content) = (resync.pass, data.content);
        self.ask(n, n, Task::Copy { extent }, effects, |id| Request::Copy {
            id,
            pass,
            range,
            steps,
            content,
        });
        None
    }

    pub(super) fn resync_copied(&mut self, at: usize, id: RequestId, changed: Vec<BlockPosition>) {
        let Some((n, Task::Copy { extent })) = self.take(at, id) else {
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
            } else {
                resync.done += 1;
            }
        }
    }

    pub(super) fn resync_refused(&mut self, now: Time, at: usize, id: RequestId, refusal: Refusal) {
        let Some((n, _)) = self.take(at, id) else {
            return;
        };
        if at != n {
            self.resync_source_lost(at);
            return;
        }
        let peer = &mut self.peers[n];
        peer.resync = None;
        peer.in_stream = false;
        peer.ready = false;
        // A stale pass only needs a higher number.
        let pause = if refusal == Refusal::StalePass {
            Duration::ZERO
        } else {
            RETRY
        };
        peer.retry_at = now + pause;
    }

    /// Resyncs that copy from this member look for another source and compare again; equal positions
    /// are skipped, so nothing is copied twice.
    pub(super) fn resync_source_lost(&mut self, source: usize) {
        for peer in &mut self.peers {
            let Some(resync) = &mut peer.resync else {
                continue;
            };
            if resync.source != Some(source) || resync.stage != Stage::Copying {
                continue;
            }
            resync.source = None;
            // Copies that were sent may still be applied; M6 makes them harmless.
            resync.tasks.clear();
            resync.digests = [None, None];
            resync.todo.clear();
            resync.working.clear();
            resync.next = 0;
        }
    }

    /// Compares extents whose both sides have come. Called once per event, behind the answers.
    fn compare_ready(&mut self, effects: &mut Effects<P>) {
        for n in 0..self.peers.len() {
            while let Some(resync) = &self.peers[n].resync
                && let Some(extent) = resync
                    .working
                    .iter()
                    .find(|(_, w)| w.target.is_some() && w.source.is_some())
                    .map(|(e, _)| *e)
            {
                self.compare(n, extent, effects);
            }
        }
    }

    /// When a pause ends.
    pub(super) fn resync_timer(&self) -> Time {
        let paused = |n: &usize| {
            let peer = &self.peers[*n];
            peer.resync.is_none() && self.may_resync(Time::NEVER, *n)
        };
        let paused = (0..self.peers.len()).filter(paused);
        paused
            .map(|n| self.peers[n].retry_at)
            .min()
            .unwrap_or(Time::NEVER)
    }
}
