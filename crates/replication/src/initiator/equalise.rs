//! A5: making the members of S equal to the source, block by block where positions differ, and then
//! `last` in one step. Torn blocks (B2) are repaired here or noted to be written again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::initiator::{Effects, Initiator, Phase};
use crate::message::{BlockPosition, ReadData, ReadError, Request, RequestId, TornBlocks};
use crate::values::{Block, BlockRange, Position, Time};

/// Blocks that a member may differ in before it is left to resync. Keeps the attach short and
/// the memory bounded: 256 MiB of data at most move before I/O opens.
const BLOCKS_MAX: usize = 1 << 16;
/// Blocks copied by one request.
const RUN_BLOCKS_MAX: u32 = 64;
/// Copies under way at a time.
const COPIES_MAX: usize = 8;

#[derive(Debug)]
enum Task {
    /// ListAbove from a member.
    List(usize),
    /// Read at the source for a member.
    Read(usize, BlockRange),
    /// Equalise at a member.
    Write(usize),
    /// SetLast at a member.
    Last(usize),
    /// Read at another member for a torn block of the source; members still to ask.
    TornRead(BlockPosition, Vec<usize>),
    /// Repair at the source.
    TornRepair,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Listing,
    Torn,
    Copying,
    Last,
}

/// State of the equalisation.
#[derive(Debug)]
pub(super) struct Equalise<P> {
    stage: Stage,
    tasks: BTreeMap<RequestId, Task>,
    lists: BTreeMap<usize, BTreeMap<Block, Position>>,
    work: VecDeque<(usize, BlockRange)>,
    content: core::marker::PhantomData<P>,
}

impl<P> Default for Equalise<P> {
    fn default() -> Equalise<P> {
        Equalise {
            stage: Stage::default(),
            tasks: BTreeMap::new(),
            lists: BTreeMap::new(),
            work: VecDeque::new(),
            content: core::marker::PhantomData,
        }
    }
}

impl<P> Equalise<P> {
    /// A member left S.
    pub(super) fn forget(&mut self, n: usize) {
        self.lists.remove(&n);
        self.work.retain(|(member, _)| *member != n);
        self.tasks.retain(|_, task| match task {
            Task::List(m) | Task::Read(m, _) | Task::Write(m) | Task::Last(m) => *m != n,
            Task::TornRead(..) | Task::TornRepair => true,
        });
    }
}

impl<P: Clone> Initiator<P> {
    fn task(
        &mut self,
        n: usize,
        task: Task,
        effects: &mut Effects<P>,
        make: impl FnOnce(RequestId) -> Request<P>,
    ) {
        let id = self.id();
        self.attach.equalise.tasks.insert(id, task);
        self.send(n, make(id), effects);
    }

    fn last_of(&self, n: usize) -> Position {
        self.peers[n]
            .answer
            .as_ref()
            .map(|a| a.state.last)
            .unwrap_or_default()
    }

    fn torn_of(&self, n: usize) -> &[BlockPosition] {
        self.peers[n]
            .answer
            .as_ref()
            .map(|a| a.torn.as_slice())
            .unwrap_or_default()
    }

    fn floor(&self) -> Position {
        let last = self.attach.set.iter().map(|n| self.last_of(*n));
        last.min().unwrap_or_default()
    }

    /// Asks every member of S for the blocks above the lowest `last`; also where all are equal, since
    /// an interrupted equalisation leaves blocks beyond `last` (holes 8).
    pub(super) fn begin_equalise(&mut self, effects: &mut Effects<P>) {
        self.attach.equalise = Default::default();
        let floor = self.floor();
        for n in self.attach.set.clone() {
            self.attach.equalise.lists.insert(n, BTreeMap::new());
            self.task(n, Task::List(n), effects, |id| Request::ListAbove {
                id,
                floor,
                from: Block(0),
            });
        }
    }

    pub(super) fn equalise_positions(
        &mut self,
        n: usize,
        id: RequestId,
        positions: Vec<BlockPosition>,
        next: Option<Block>,
        effects: &mut Effects<P>,
    ) {
        let Some(Task::List(_)) = self.attach.equalise.tasks.remove(&id) else {
            return;
        };
        let Some(list) = self.attach.equalise.lists.get_mut(&n) else {
            return;
        };
        list.extend(
            positions
                .into_iter()
                .map(|entry| (entry.block, entry.position)),
        );
        if list.len() > BLOCKS_MAX && self.attach.set.len() > 1 {
            // The one that is furthest behind makes the lists long: it is left to resync.
            let behind = self.attach.set.len() - 1;
            self.attach.set.truncate(behind);
            self.begin_equalise(effects);
            return;
        }
        if let Some(from) = next {
            let floor = self.floor();
            self.task(n, Task::List(n), effects, |id| Request::ListAbove {
                id,
                floor,
                from,
            });
        }
    }

    pub(super) fn advance_equalise(&mut self, now: Time, effects: &mut Effects<P>) {
        while self.phase == Phase::Equalising {
            if self.attach.equalise.stage == Stage::Copying {
                self.start_copies(effects);
            }
            if !self.attach.equalise.tasks.is_empty() {
                return;
            }
            match self.attach.equalise.stage {
                Stage::Listing => {
                    self.attach.equalise.stage = Stage::Torn;
                    self.repair_torn(effects);
                }
                Stage::Torn => {
                    self.attach.equalise.stage = Stage::Copying;
                    self.plan_copies();
                }
                Stage::Copying => {
                    self.attach.equalise.stage = Stage::Last;
                    self.set_last(effects);
                }
                Stage::Last => {
                    self.enter(Phase::WaitingLease);
                    self.wait_lease(now, effects);
                }
            }
        }
    }

    /// B2: a torn block of the source is taken from a member that has it whole at that position.
    fn repair_torn(&mut self, effects: &mut Effects<P>) {
        let source = self.attach.set[0];
        for torn in self.torn_of(source).to_vec() {
            let others = self.attach.set[1..].iter().copied();
            let whole = |n: &usize| !self.torn_of(*n).iter().any(|t| t.block == torn.block);
            let others: Vec<_> = others.filter(whole).collect();
            self.ask_for_torn(torn, others, effects);
        }
    }

    fn ask_for_torn(
        &mut self,
        torn: BlockPosition,
        mut others: Vec<usize>,
        effects: &mut Effects<P>,
    ) {
        let Some(n) = others.pop() else {
            self.attach.rewrite.push(torn.block);
            return;
        };
        let range = BlockRange {
            start: torn.block,
            count: 1,
        };
        self.task(n, Task::TornRead(torn, others), effects, |id| {
            Request::Read {
                id,
                range,
                torn: TornBlocks::Refuse,
            }
        });
    }

    /// A5: every block whose position differs, in either direction.
    fn plan_copies(&mut self) {
        let source = self.attach.set[0];
        let empty = BTreeMap::new();
        let mut work = VecDeque::new();
        for n in &self.attach.set[1..] {
            let equalise = &self.attach.equalise;
            let theirs = equalise.lists.get(n).unwrap_or(&empty);
            let ours = equalise.lists.get(&source).unwrap_or(&empty);
            let mut blocks: BTreeSet<Block> = ours
                .iter()
                .filter(|(b, p)| theirs.get(b) != Some(p))
                .map(|(b, _)| *b)
                .collect();
            blocks.extend(theirs.keys().filter(|b| !ours.contains_key(b)));
            blocks.extend(self.torn_of(*n).iter().map(|torn| torn.block));
            // What no member has whole is written again in the new epoch.
            blocks.retain(|b| !self.attach.rewrite.contains(b));
            work.extend(runs(blocks.into_iter(), RUN_BLOCKS_MAX).map(|range| (*n, range)));
        }
        self.attach.equalise.work = work;
    }

    fn start_copies(&mut self, effects: &mut Effects<P>) {
        let source = self.attach.set[0];
        while self.attach.equalise.tasks.len() < COPIES_MAX {
            let Some((n, range)) = self.attach.equalise.work.pop_front() else {
                return;
            };
            self.task(source, Task::Read(n, range), effects, |id| Request::Read {
                id,
                range,
                torn: TornBlocks::Refuse,
            });
        }
    }

    /// Only when all blocks are equal and durable: one step per member (holes 7).
    fn set_last(&mut self, effects: &mut Effects<P>) {
        let position = self.last_of(self.attach.set[0]);
        for n in self.attach.set[1..].to_vec() {
            if self.last_of(n) != position {
                self.task(n, Task::Last(n), effects, |id| Request::SetLast {
                    id,
                    position,
                });
            }
        }
    }

    pub(super) fn equalise_data(
        &mut self,
        now: Time,
        n: usize,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) {
        match (self.attach.equalise.tasks.remove(&id), result) {
            (Some(Task::Read(target, range)), Ok(data)) => {
                let ReadData { positions, content } = data;
                self.task(target, Task::Write(target), effects, |id| {
                    Request::Equalise {
                        id,
                        range,
                        positions,
                        content,
                    }
                });
            }
            (Some(Task::Read(target, _)), Err(_)) => {
                // The source cannot read what the member lacks. It comes back by resync, which has
                // other sources then.
                self.attach.set.retain(|m| *m != target);
                self.attach.equalise.forget(target);
            }
            (Some(Task::TornRead(torn, others)), result) => match result {
                Ok(data) if data.positions == [torn.position] => {
                    let source = self.attach.set[0];
                    self.task(source, Task::TornRepair, effects, |id| Request::Repair {
                        id,
                        block: torn.block,
                        position: torn.position,
                        content: data.content,
                    });
                }
                _ => self.ask_for_torn(torn, others, effects),
            },
            _ => {}
        }
        let _ = (now, n);
    }

    pub(super) fn equalise_done(&mut self, _: Time, _: usize, id: RequestId, _: &mut Effects<P>) {
        self.attach.equalise.tasks.remove(&id);
    }
}

/// Groups ascending blocks into runs within an extent, of at most `max` blocks.
pub(super) fn runs(
    blocks: impl Iterator<Item = Block>,
    max: u32,
) -> impl Iterator<Item = BlockRange> {
    let mut blocks = blocks.peekable();
    core::iter::from_fn(move || {
        let start = blocks.next()?;
        let mut count = 1;
        while count < max
            && let Some(next) = blocks.peek()
            && next.0 == start.0 + u64::from(count)
            && next.extent() == start.extent()
        {
            blocks.next();
            count += 1;
        }
        Some(BlockRange { start, count })
    })
}
