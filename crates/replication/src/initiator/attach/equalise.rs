//! A5: making the members of S equal to the source, block by block where positions differ, and then
//! `last` in one step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::faults::{Fault, is_broken};
use crate::initiator::peer::Answer;
use crate::initiator::{Effects, Initiator, Phase};
use crate::message::{BlockPosition, ReadData, ReadError, Request, RequestId, TornBlocks};
use crate::values::{Block, BlockRange, Position, Time};

/// Blocks that a member may differ in before it is left to resync. Keeps the attach short and the
/// memory bounded: 256 MiB of data at most move per member before I/O opens.
const BLOCKS_MAX: usize = 1 << 16;
/// Blocks copied by one request.
const RUN_BLOCKS_MAX: u32 = 64;
/// Copies under way at a time.
const COPIES_MAX: usize = 8;

#[derive(Debug)]
pub(super) enum Task {
    /// ListAbove from a member.
    List(usize),
    /// Read at the source for a member.
    Read(usize, BlockRange),
    /// Equalise or Repair at a member.
    Write(usize),
    /// SetLast at a member: its mark before the first copy, or its new `last` after the last one.
    Last(usize),
    /// Read at another member for a torn block of the source; members still to ask.
    TornRead {
        n: usize,
        torn: BlockPosition,
        others: Vec<usize>,
    },
    /// Read of a torn block at the source.
    TornContent { torn: BlockPosition },
}

impl Task {
    /// The member that holds it up; None where that is the source.
    fn holder(&self) -> Option<usize> {
        match self {
            Task::List(n) | Task::Write(n) | Task::Last(n) | Task::TornRead { n, .. } => Some(*n),
            Task::Read(..) | Task::TornContent { .. } => None,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Listing,
    Torn,
    Marking,
    Copying,
    Last,
}

/// State of the equalisation.
#[derive(Debug, Default)]
pub(super) struct Equalise {
    stage: Stage,
    tasks: BTreeMap<RequestId, Task>,
    lists: BTreeMap<usize, BTreeMap<Block, Position>>,
    work: VecDeque<(usize, BlockRange)>,
    /// Torn blocks that all of S have the same of already (B2).
    made_equal: BTreeSet<Block>,
}

impl Equalise {
    /// A member left S. Reads of others that it was asked for are asked elsewhere by the caller.
    pub(super) fn forget(&mut self, n: usize) {
        self.lists.remove(&n);
        self.work.retain(|(member, _)| *member != n);
        self.tasks.retain(|_, task| match task {
            Task::List(m) | Task::Read(m, _) | Task::Write(m) | Task::Last(m) => *m != n,
            Task::TornRead { .. } | Task::TornContent { .. } => true,
        });
    }

    pub(super) fn made_equal(&mut self, block: Block) {
        self.made_equal.insert(block);
    }

    fn take_torn_read(&mut self, gone: impl Fn(usize) -> bool) -> Option<Task> {
        let lost = |task: &Task| matches!(task, Task::TornRead { n, .. } if gone(*n));
        let id = *self.tasks.iter().find(|(_, task)| lost(task))?.0;
        self.tasks.remove(&id)
    }
}

impl<P: Clone> Initiator<P> {
    pub(super) fn task(
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
        let answer = self.peers[n].answer.as_ref();
        answer.map(|a| a.state.last).unwrap_or_default()
    }

    /// The position up to which all of S hold the same blocks.
    ///
    /// That is the lowest `last` while no member of S was copied to in an epoch newer than the best
    /// configuration's: each is then the base of that configuration and a prefix of its epoch's writes, and
    /// what an older equalisation left beyond `last` lies above it (holes 8). Copies of a newer epoch, one
    /// that started nowhere we can see, may come from a line that leaves ours below the lowest `last`; if
    /// it was interrupted, they may even have put older positions back. All of S still agree on the base of
    /// the oldest epoch that one of them has stored: whoever was made equal since then had answered the
    /// attach with that configuration, so the line that it was made equal to goes through that base too.
    fn floor(&self) -> Position {
        let last = self.attach.set.iter().map(|n| self.last_of(*n));
        let lowest = last.min().unwrap_or_default();
        let best = self.attach.best.as_ref().map(|c| c.epoch);
        let answers = self.attach.set.iter();
        let answers = answers.filter_map(|n| self.peers[*n].answer.as_ref());
        let has_strayed = |a: &Answer| Some(a.state.last_pass.0) > best;
        if !answers.clone().any(has_strayed) || is_broken(Fault::ListAboveLast) {
            return lowest;
        }
        let stored = answers.map(|a| a.state.configuration.as_ref().map(|c| c.epoch));
        let oldest = stored.min().flatten().unwrap_or_default();
        lowest.min(Position::start_of(oldest))
    }

    /// Asks every member of S for the blocks above the lowest `last`; also where all are equal, since
    /// an interrupted equalisation leaves blocks beyond `last` (holes 8).
    pub(super) fn begin_equalise(&mut self, effects: &mut Effects<P>) {
        self.attach.equalise = Equalise::default();
        if self.attach.set.len() == 1 {
            return;
        }
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

    pub(in crate::initiator) fn equalise_positions(
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
        list.extend(positions.iter().map(|entry| (entry.block, entry.position)));
        if list.len() > BLOCKS_MAX && self.attach.set.len() > 1 {
            // The one that is furthest behind makes the lists long: it is left to resync.
            self.attach.set.pop();
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
        self.drop_slow(now);
        while self.phase == Phase::Equalising && !self.attach.failed {
            let set = self.attach.set.clone();
            while let Some(Task::TornRead { torn, others, .. }) =
                self.attach.equalise.take_torn_read(|n| !set.contains(&n))
            {
                let others = others.into_iter().filter(|n| set.contains(n)).collect();
                self.ask_for_torn(torn, others, effects);
            }
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
                    self.attach.equalise.stage = Stage::Marking;
                    self.plan_copies();
                    self.mark(effects);
                }
                Stage::Marking => {
                    self.attach.equalise.stage = Stage::Copying;
                    if is_broken(Fault::LastFirst) {
                        self.set_last(effects);
                    }
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
        if self.attach.failed {
            self.attach.timer = now;
        }
    }

    /// A4: "as many as can be equalised in time". If it is the source that is slow, the attach begins again.
    fn drop_slow(&mut self, now: Time) {
        if now < self.attach.timer {
            return;
        }
        self.attach.timer = now + self.options.equalise_wait;
        let source = self.attach.set[0];
        let tasks = self.attach.equalise.tasks.values();
        let slow: BTreeSet<usize> = tasks
            .filter_map(Task::holder)
            .filter(|n| *n != source)
            .collect();
        if slow.is_empty() {
            self.attach.failed = true;
        }
        for n in slow {
            self.leave_set(n);
        }
    }

    /// A5: every block whose position differs, in either direction (holes 7, 8).
    fn plan_copies(&mut self) {
        let source = self.attach.set[0];
        let empty = BTreeMap::new();
        let mut work = VecDeque::new();
        for n in &self.attach.set[1..] {
            if is_broken(Fault::EqualiseByLast) && self.last_of(*n) == self.last_of(source) {
                continue;
            }
            let equalise = &self.attach.equalise;
            let theirs = equalise.lists.get(n).unwrap_or(&empty);
            let ours = equalise.lists.get(&source).unwrap_or(&empty);
            let differs = ours.iter().filter(|(b, p)| theirs.get(b) != Some(p));
            let mut blocks: BTreeSet<Block> = differs.map(|(b, _)| *b).collect();
            if !is_broken(Fault::KeepTail) {
                blocks.extend(theirs.keys().filter(|b| !ours.contains_key(b)));
            }
            blocks.extend(self.torn_of(*n).iter().map(|torn| torn.block));
            blocks.retain(|b| !equalise.made_equal.contains(b));
            work.extend(runs(blocks.into_iter(), RUN_BLOCKS_MAX).map(|range| (*n, range)));
        }
        self.attach.equalise.work = work;
    }

    /// M8: SetLast to the `last` that a member has marks durably that it is copied to in this epoch.
    /// [`Initiator::floor`] needs to know when the copies end half way.
    fn mark(&mut self, effects: &mut Effects<P>) {
        let work = self.attach.equalise.work.iter();
        let targets: BTreeSet<usize> = work.map(|(n, _)| *n).collect();
        for n in targets {
            let position = self.last_of(n);
            self.task(n, Task::Last(n), effects, |id| Request::SetLast {
                id,
                position,
            });
        }
    }

    fn start_copies(&mut self, effects: &mut Effects<P>) {
        let source = self.attach.set[0];
        while self.attach.equalise.tasks.len() < COPIES_MAX {
            let Some((n, range)) = self.attach.equalise.work.pop_front() else {
                return;
            };
            let torn = TornBlocks::Refuse;
            self.task(source, Task::Read(n, range), effects, |id| Request::Read {
                id,
                range,
                torn,
            });
        }
    }

    /// Only when all blocks are equal and durable: one step per member (holes 7).
    fn set_last(&mut self, effects: &mut Effects<P>) {
        let position = self.last_of(self.attach.set[0]);
        for at in 1..self.attach.set.len() {
            let n = self.attach.set[at];
            if self.last_of(n) != position {
                self.task(n, Task::Last(n), effects, |id| Request::SetLast {
                    id,
                    position,
                });
            }
        }
    }

    pub(in crate::initiator) fn equalise_data(
        &mut self,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) {
        match (self.attach.equalise.tasks.remove(&id), result) {
            (Some(Task::Read(n, range)), Ok(data)) => {
                let ReadData { positions, content } = data;
                self.task(n, Task::Write(n), effects, |id| Request::Equalise {
                    id,
                    range,
                    positions,
                    content,
                });
            }
            // The source cannot read what the member lacks. It comes back by resync, which has other
            // sources then.
            (Some(Task::Read(n, _)), Err(_)) => self.leave_set(n),
            (Some(Task::TornRead { torn, others, .. }), result) => {
                self.torn_read(torn, others, result.ok(), effects);
            }
            (Some(Task::TornContent { torn }), result) => {
                self.torn_content(torn, result.ok(), effects);
            }
            _ => {}
        }
    }

    /// Whether the request was one of the equalisation; it is done or refused.
    pub(in crate::initiator) fn equalise_done(&mut self, id: RequestId) -> bool {
        self.attach.equalise.tasks.remove(&id).is_some()
    }
}

/// Groups ascending blocks into runs within an extent, of at most `max` blocks.
pub(in crate::initiator) fn runs(
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
