//! A member over an in-memory durable model. Mutations wait in a queue and become durable one by one,
//! each in a single step; a crash forgets the queue and may leave blocks of its first write torn.

use std::collections::{BTreeMap, VecDeque};

use ashlar_replication::configuration::{MemberState, Role};
use ashlar_replication::digest::positions_digest;
use ashlar_replication::faults::{Fault, is_broken};
use ashlar_replication::member::{self, WriteDecision};
use ashlar_replication::message::{
    BlockPosition, Content, CopyStep, ReadData, ReadError, Refusal, Reply, Request, TornBlocks,
};
use ashlar_replication::values::{
    Block, BlockRange, EXTENT_BLOCKS, Epoch, EpochNumber, ExtentIndex, MemberId, Position, Sequence,
};

pub(crate) mod disk;
mod recovery;

use super::random::Random;
use disk::Disk;

/// One content id per block; 0 is zeros.
pub(super) type Payload = Vec<u64>;
/// Blocks of the volume: three extents.
pub(super) const SIZE_BLOCKS: u64 = 3 * EXTENT_BLOCKS as u64;
/// Entries of a ListAbove answer, small so that lists go on.
const LIST_MAX: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) position: Position,
    pub(super) content: u64,
    pub(super) torn: bool,
    pub(super) bad: bool,
}

/// A request that waits to become durable.
#[derive(Clone, Debug)]
pub(super) struct Queued {
    pub(super) connection: usize,
    pub(super) epoch: Epoch,
    pub(super) request: Request<Payload>,
}

pub(super) struct Node {
    pub(super) state: MemberState,
    pub(super) blocks: BTreeMap<Block, Stored>,
    pub(super) up: bool,
    /// Rises with every crash.
    pub(super) incarnation: u64,
    pub(super) queue: VecDeque<Queued>,
    /// A step is under way.
    pub(super) busy: bool,
    pub(super) slowness: u64,
    pub(super) full: bool,
    pub(super) closed: bool,
    pub(super) evicted: bool,
    /// The epoch that was asked to add it.
    pub(super) added_in: EpochNumber,
    /// It was deleted: it answers nothing any more.
    pub(super) gone: bool,
    /// The first configurations of epochs that were stored here, to be looked at by the checks.
    pub(super) started: Vec<(Epoch, Vec<MemberId>)>,
    /// The store that the model is compared with.
    pub(super) disk: Option<Box<Disk>>,
}

impl Node {
    pub(super) fn new(state: MemberState) -> Node {
        Node {
            state,
            blocks: BTreeMap::new(),
            up: true,
            incarnation: 0,
            queue: VecDeque::new(),
            busy: false,
            slowness: 1,
            full: false,
            closed: false,
            evicted: false,
            added_in: EpochNumber(0),
            gone: false,
            started: Vec::new(),
            disk: None,
        }
    }

    pub(super) fn position(&self, block: Block) -> Position {
        self.blocks
            .get(&block)
            .map_or(Position::ZERO, |s| s.position)
    }

    /// The power goes.
    pub(super) fn crash(&mut self, random: &mut Random, garbage: &mut u64) {
        self.up = false;
        self.busy = false;
        self.closed = false;
        self.incarnation += 1;
        let first = self.queue.pop_front();
        self.queue.clear();
        if is_broken(Fault::ForgetPromise) {
            let known = self.state.configuration.as_ref().map(|c| c.epoch);
            self.state.promised.number = known.unwrap_or_default();
        }
        if random.one_in(2)
            && let Some(queued) = first
        {
            self.tear(&queued, random, garbage);
        }
    }

    /// A large write in place was cut short: some of its blocks are half written.
    fn tear(&mut self, queued: &Queued, random: &mut Random, garbage: &mut u64) {
        let (range, positions) = match &queued.request {
            Request::Write {
                sequence,
                range,
                content: Content::Data(_),
            } if self.check_write(queued.epoch, *sequence) == Ok(WriteDecision::Apply) => {
                let position = Position {
                    epoch: queued.epoch.number,
                    sequence: *sequence,
                };
                (*range, vec![position; range.count as usize])
            }
            Request::Copy {
                pass,
                range,
                steps,
                content: Content::Data(_),
                ..
            } if member::check_copy(&self.state, queued.epoch, *pass).is_ok() => {
                let all = range.blocks().zip(steps);
                if all.into_iter().any(|(b, s)| self.position(b) != s.expected) {
                    return;
                }
                (*range, steps.iter().map(|s| s.position).collect())
            }
            _ => return,
        };
        for (block, position) in range.blocks().zip(positions) {
            if random.one_in(2) {
                *garbage += 1;
                let stored = Stored {
                    position,
                    content: *garbage,
                    torn: true,
                    bad: false,
                };
                self.blocks.insert(block, stored);
            }
        }
    }

    fn check_write(&self, epoch: Epoch, sequence: Sequence) -> Result<WriteDecision, Refusal> {
        member::check_write(&self.state, epoch, sequence)
    }

    fn refuses(&self, request: &Request<Payload>) -> Result<(), Refusal> {
        if self.closed {
            return Err(Refusal::DeviceClosed);
        }
        let takes_blocks = matches!(
            request,
            Request::Write { .. } | Request::BeginResync { .. } | Request::Copy { .. }
        );
        if self.evicted && takes_blocks {
            return Err(Refusal::Evicted);
        }
        Ok(())
    }

    /// Whether there is no room for the content.
    fn lacks_room(&self, range: BlockRange, content: &Content<Payload>) -> bool {
        let has_room = |b: Block| self.blocks.get(&b).is_some_and(|s| s.content != 0);
        self.full && matches!(content, Content::Data(_)) && !range.blocks().all(has_room)
    }

    /// The next request of the queue becomes durable, or is refused.
    pub(super) fn apply(&mut self, queued: &Queued) -> Reply<Payload> {
        match self.refuses(&queued.request) {
            Ok(()) => self.carry_out(queued),
            Err(refusal) => match &queued.request {
                Request::Write { sequence, .. } => Reply::WriteRefused {
                    sequence: *sequence,
                    refusal,
                },
                request => Reply::Refused {
                    id: request.id(),
                    refusal,
                },
            },
        }
    }

    /// A request becomes durable, or is refused by the protocol.
    pub(super) fn carry_out(&mut self, queued: &Queued) -> Reply<Payload> {
        let Queued { epoch, request, .. } = queued;
        match self.try_apply(*epoch, request) {
            Ok(reply) => reply,
            Err(refusal) => match request {
                Request::Write { sequence, .. } => Reply::WriteRefused {
                    sequence: *sequence,
                    refusal,
                },
                _ => Reply::Refused {
                    id: request.id(),
                    refusal,
                },
            },
        }
    }

    fn try_apply(
        &mut self,
        epoch: Epoch,
        request: &Request<Payload>,
    ) -> Result<Reply<Payload>, Refusal> {
        match request {
            Request::Fence { epoch } => {
                self.state = member::fence(&self.state, *epoch)?;
                return Ok(self.promise(*epoch));
            }
            Request::StoreConfig {
                configuration,
                start,
                ..
            } => {
                let next = member::store_config(&self.state, epoch, configuration, start)?;
                let before = self.state.configuration.as_ref().map(|c| c.epoch);
                if before != Some(epoch.number) && start.contains(&self.state.id) {
                    self.started.push((epoch, start.clone()));
                }
                self.state = next;
            }
            Request::Write {
                sequence,
                range,
                content,
            } => return self.write(epoch, *sequence, *range, content),
            Request::BeginResync { pass, sequence, .. } => {
                self.state = member::begin_resync(&self.state, epoch, *pass, *sequence)?;
            }
            Request::Copy {
                id,
                pass,
                range,
                steps,
                content,
            } => {
                member::check_copy(&self.state, epoch, *pass)?;
                if self.lacks_room(*range, content) {
                    return Err(Refusal::DeviceFull);
                }
                let changed = self.copy(*range, steps, content);
                return Ok(Reply::Copied { id: *id, changed });
            }
            Request::MarkComplete { pass, .. } => {
                self.state = member::mark_complete(&self.state, epoch, *pass)?;
            }
            Request::Equalise {
                range,
                positions,
                content,
                ..
            } => {
                member::check_equalise(&self.state, epoch)?;
                for (index, block) in range.blocks().enumerate() {
                    self.store(block, positions[index], content, index);
                }
            }
            Request::SetLast { position, .. } => {
                self.state = member::set_last(&self.state, epoch, *position)?;
            }
            Request::Repair {
                block,
                position,
                content,
                ..
            } => {
                member::check_repair(&self.state, epoch)?;
                if self.position(*block) == *position {
                    self.store(*block, *position, content, 0);
                }
            }
            Request::Read { .. }
            | Request::Compare { .. }
            | Request::Digests { .. }
            | Request::ListAbove { .. } => return Err(Refusal::BadRequest),
        }
        Ok(Reply::Done { id: request.id() })
    }

    fn promise(&self, epoch: Epoch) -> Reply<Payload> {
        let torn = self.blocks.iter().filter(|(_, s)| s.torn);
        Reply::Promised {
            epoch,
            state: self.state.clone(),
            size_blocks: SIZE_BLOCKS,
            torn: torn.map(|(b, s)| entry(*b, s.position)).collect(),
        }
    }

    fn write(
        &mut self,
        epoch: Epoch,
        sequence: Sequence,
        range: BlockRange,
        content: &Content<Payload>,
    ) -> Result<Reply<Payload>, Refusal> {
        if self.check_write(epoch, sequence)? == WriteDecision::Apply {
            if self.lacks_room(range, content) {
                return Err(Refusal::DeviceFull);
            }
            let position = Position {
                epoch: epoch.number,
                sequence,
            };
            for (index, block) in range.blocks().enumerate() {
                let newer = |s: &Stored| s.position >= position && !s.torn;
                if !self.blocks.get(&block).is_some_and(newer) {
                    self.store(block, position, content, index);
                }
            }
            self.state.last = position;
        }
        Ok(Reply::Applied {
            sequence: self.state.last.sequence,
        })
    }

    fn copy(
        &mut self,
        range: BlockRange,
        steps: &[CopyStep],
        content: &Content<Payload>,
    ) -> Vec<BlockPosition> {
        let mut changed = Vec::new();
        for (index, block) in range.blocks().enumerate() {
            let now = self.position(block);
            if now == steps[index].expected || is_broken(Fault::AnyExpected) {
                self.store(block, steps[index].position, content, index);
            } else {
                changed.push(entry(block, now));
            }
        }
        changed
    }

    fn store(
        &mut self,
        block: Block,
        position: Position,
        content: &Content<Payload>,
        index: usize,
    ) {
        let content = match content {
            Content::Data(data) => data[index],
            Content::Zeros => 0,
        };
        if position == Position::ZERO {
            self.blocks.remove(&block);
            return;
        }
        let stored = Stored {
            position,
            content,
            torn: false,
            bad: false,
        };
        self.blocks.insert(block, stored);
    }

    /// Answers a request that changes nothing.
    pub(super) fn look(&self, epoch: Epoch, request: &Request<Payload>) -> Reply<Payload> {
        let check = match request {
            Request::Read { .. } => member::check_read(&self.state, epoch),
            _ => member::check_compare(&self.state, epoch),
        };
        match (request, check) {
            (Request::Read { id, .. }, Err(refusal)) => Reply::Data {
                id: *id,
                result: Err(refusal.into()),
            },
            (_, Err(refusal)) => Reply::Refused {
                id: request.id(),
                refusal,
            },
            (Request::Read { id, range, torn }, Ok(())) => Reply::Data {
                id: *id,
                result: self.read(*range, *torn),
            },
            (Request::Compare { id, extent }, Ok(())) => {
                let first = extent.first_block();
                let end = Block(first.0 + u64::from(EXTENT_BLOCKS));
                let inside = self.blocks.range(first..end);
                Reply::Positions {
                    id: *id,
                    positions: inside.map(|(b, s)| entry(*b, s.position)).collect(),
                    next: None,
                    last: self.state.last,
                }
            }
            (Request::ListAbove { id, floor, from }, Ok(())) => {
                let above = self
                    .blocks
                    .range(*from..)
                    .filter(|(_, s)| s.position > *floor);
                let mut all = above.map(|(b, s)| entry(*b, s.position));
                let positions: Vec<_> = all.by_ref().take(LIST_MAX).collect();
                Reply::Positions {
                    id: *id,
                    positions,
                    next: all.next().map(|e| e.block),
                    last: self.state.last,
                }
            }
            (Request::Digests { id, from, count }, Ok(())) => Reply::Digests {
                id: *id,
                digests: self.digests(*from, *count),
            },
            _ => Reply::Refused {
                id: request.id(),
                refusal: Refusal::BadRequest,
            },
        }
    }

    fn digests(&self, from: ExtentIndex, count: u32) -> Vec<(ExtentIndex, u64)> {
        let extents = (from.0..from.0 + u64::from(count)).map(ExtentIndex);
        let digest = |extent: ExtentIndex| {
            let first = extent.first_block().0;
            let positions =
                (first..first + u64::from(EXTENT_BLOCKS)).map(|b| self.position(Block(b)));
            positions_digest(positions)
        };
        let mut used: Vec<_> = self.blocks.keys().map(|b| b.extent()).collect();
        used.dedup();
        let has_any = |e: &ExtentIndex| used.contains(e);
        extents.filter(has_any).map(|e| (e, digest(e))).collect()
    }

    fn read(&self, range: BlockRange, torn: TornBlocks) -> Result<ReadData<Payload>, ReadError> {
        let mut positions = Vec::new();
        let mut content = Vec::new();
        for block in range.blocks() {
            let stored = self.blocks.get(&block);
            let position = self.position(block);
            if stored.is_some_and(|s| s.bad) {
                return Err(ReadError::Checksum { block, position });
            }
            if torn == TornBlocks::Refuse && stored.is_some_and(|s| s.torn) {
                return Err(ReadError::Torn { block, position });
            }
            positions.push(position);
            content.push(stored.map_or(0, |s| s.content));
        }
        let zeros = content.iter().all(|id| *id == 0);
        Ok(ReadData {
            positions,
            content: if zeros {
                Content::Zeros
            } else {
                Content::Data(content)
            },
        })
    }

    pub(super) fn is_data(&self) -> bool {
        self.state.role == Role::Data
    }
}

fn entry(block: Block, position: Position) -> BlockPosition {
    BlockPosition { block, position }
}
