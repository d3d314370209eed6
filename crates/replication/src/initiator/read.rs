//! W3, L2, R6: reads from a member that holds what is acknowledged, with fallback and repair.

use crate::configuration::Configuration;
use crate::initiator::peer::Peer;
use crate::initiator::{Effect, Effects, Initiator, IoError, Phase, Ticket};
use crate::message::{ReadData, ReadError, Request, RequestId, TornBlocks};
use crate::values::{Block, BlockRange, MemberId, Position, Time};

#[derive(Debug)]
enum State {
    /// Waits for an overlapping write, a lease or a member.
    Held,
    Sent {
        member: MemberId,
        id: RequestId,
        deadline: Time,
    },
}

#[derive(Debug)]
struct Read {
    ticket: Ticket,
    range: BlockRange,
    since: Time,
    state: State,
    /// Bit per peer that has no good copy.
    failed: u32,
    /// Bit per peer that did not answer in time.
    slow: u32,
    error: Option<ReadError>,
}

/// A bad copy, and how far its repair is.
#[derive(Debug)]
struct Repair {
    bad: usize,
    block: Block,
    position: Position,
    /// The read at a member with a good copy.
    id: RequestId,
    source: MemberId,
}

/// Bad copies that are repaired at a time; more are found again by the next read or a scrub.
const REPAIRS_MAX: usize = 64;

/// Reads and repairs under way.
#[derive(Debug, Default)]
pub(super) struct Reads {
    reads: Vec<Read>,
    repairs: Vec<Repair>,
    /// Some read waits for something.
    held: bool,
}

impl Reads {
    pub(super) fn is_idle(&self) -> bool {
        self.reads.is_empty()
    }

    /// What was asked of this member will not be answered.
    pub(super) fn lost(&mut self, member: MemberId) {
        for read in &mut self.reads {
            if matches!(read.state, State::Sent { member: m, .. } if m == member) {
                read.state = State::Held;
                self.held = true;
            }
        }
        self.repairs.retain(|repair| repair.source != member);
    }

    /// The member refused the request.
    pub(super) fn refused(&mut self, id: RequestId, member: MemberId) {
        let sent = |read: &&mut Read| matches!(read.state, State::Sent { id: i, member: m, .. } if i == id && m == member);
        if let Some(read) = self.reads.iter_mut().find(sent) {
            read.state = State::Held;
            self.held = true;
        }
    }

    /// C4: from the first send of a proposal reads go only to members of both configurations; an answer
    /// that is under way from another member does not count.
    pub(super) fn recheck(&mut self, peers: &[Peer], proposal: Option<&Configuration>) {
        let Some(p) = proposal else { return };
        for peer in peers {
            if !p.in_sync.contains(&peer.member.id) {
                self.lost(peer.member.id);
            }
        }
    }

    pub(super) fn fail_all(&mut self, error: &IoError, effects: &mut Effects<impl Clone>) {
        for read in self.reads.drain(..) {
            effects.push_back(Effect::ReadDone {
                ticket: read.ticket,
                result: Err(error.clone()),
            });
        }
        self.repairs.clear();
    }
}

impl<P: Clone> Initiator<P> {
    pub(super) fn client_read(
        &mut self,
        now: Time,
        ticket: Ticket,
        range: BlockRange,
        effects: &mut Effects<P>,
    ) {
        if self.phase == Phase::Over || self.detaching {
            let result = Err(IoError::NotAttached);
            effects.push_back(Effect::ReadDone { ticket, result });
            return;
        }
        let state = State::Held;
        let read = Read {
            ticket,
            range,
            since: now,
            state,
            failed: 0,
            slow: 0,
            error: None,
        };
        self.reads.reads.push(read);
        let index = self.reads.reads.len() - 1;
        self.dispatch(now, index, effects);
    }

    /// Looks again at everything that waits.
    pub(super) fn advance_reads(&mut self, now: Time, effects: &mut Effects<P>) {
        if self.phase != Phase::Open {
            return;
        }
        let mut index = 0;
        while index < self.reads.reads.len() {
            let read = &mut self.reads.reads[index];
            if let State::Sent {
                member, deadline, ..
            } = read.state
                && now >= deadline
            {
                // Queueing is no fault: the member stays, another one is asked.
                let slow = self
                    .peers
                    .iter()
                    .position(|p| p.member.id == member)
                    .unwrap_or(31);
                read.slow |= 1 << slow.min(31);
                read.state = State::Held;
            }
            let expired = self
                .options
                .io_timeout
                .is_some_and(|limit| now >= read.since + limit);
            if matches!(read.state, State::Held) {
                if expired {
                    let ticket = read.ticket;
                    self.reads.reads.swap_remove(index);
                    effects.push_back(Effect::ReadDone {
                        ticket,
                        result: Err(IoError::Timeout),
                    });
                    continue;
                }
                let before = self.reads.reads.len();
                self.dispatch(now, index, effects);
                if self.reads.reads.len() < before {
                    continue;
                }
            }
            index += 1;
        }
        self.reads.held = self
            .reads
            .reads
            .iter()
            .any(|r| matches!(r.state, State::Held));
    }

    /// A member that may serve a read of everything acknowledged, the first one that has not failed.
    fn reader(&self, avoid: u32) -> Option<usize> {
        let c = self.committed.as_ref()?;
        let both = |id: MemberId| {
            let p = self.proposal.as_ref().map(|p| &p.configuration);
            c.in_sync.contains(&id) && p.is_none_or(|p| p.in_sync.contains(&id))
        };
        (0..self.peers.len()).find(|n| {
            let peer = &self.peers[*n];
            avoid & (1 << (*n).min(31)) == 0
                && peer.attached
                && !peer.fenced
                && both(peer.member.id)
                && peer.answered >= self.stream.acknowledged
        })
    }

    /// Sends a held read if it may go; drops it with an error when no good copy is left.
    fn dispatch(&mut self, now: Time, index: usize, effects: &mut Effects<P>) {
        self.reads.held = true;
        if self.phase != Phase::Open {
            return;
        }
        let (range, failed, slow) = {
            let read = &self.reads.reads[index];
            (read.range, read.failed, read.slow)
        };
        // L2, W3.
        let lease = self.lease_until().is_some_and(|until| now < until);
        if !lease || self.stream.overlaps(range) {
            return;
        }
        let chosen = self.reader(failed | slow).or_else(|| self.reader(failed));
        let Some(n) = chosen else {
            if failed != 0 && self.all_in_sync_failed(failed) {
                let read = self.reads.reads.swap_remove(index);
                let error = read.error.unwrap_or(ReadError::Device);
                let result = Err(IoError::Read(error));
                effects.push_back(Effect::ReadDone {
                    ticket: read.ticket,
                    result,
                });
            }
            return;
        };
        let id = self.id();
        let member = self.peers[n].member.id;
        let deadline = now + self.options.read_timeout;
        self.reads.reads[index].state = State::Sent {
            member,
            id,
            deadline,
        };
        self.send(
            n,
            Request::Read {
                id,
                range,
                torn: TornBlocks::Refuse,
            },
            effects,
        );
    }

    /// Whether no in-sync member that can be reached is left to ask.
    fn all_in_sync_failed(&self, failed: u32) -> bool {
        let Some(c) = &self.committed else {
            return false;
        };
        (0..self.peers.len()).all(|n| {
            let peer = &self.peers[n];
            failed & (1 << n.min(31)) != 0 || !c.in_sync.contains(&peer.member.id) || !peer.attached
        })
    }

    /// Hands the answer back when it is to none of the client's reads.
    pub(super) fn read_data(
        &mut self,
        now: Time,
        n: usize,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) -> Option<Result<ReadData<P>, ReadError>> {
        let member = self.peers[n].member.id;
        if let Some(at) = self
            .reads
            .repairs
            .iter()
            .position(|r| r.id == id && r.source == member)
        {
            let repair = self.reads.repairs.swap_remove(at);
            self.repair(repair, result, effects);
            return None;
        }
        let sent = |read: &Read| matches!(read.state, State::Sent { id: i, member: m, .. } if i == id && m == member);
        let Some(index) = self.reads.reads.iter().position(sent) else {
            let content = result.as_ref().ok().map(|data| data.content.clone());
            if self.rewrite_data(now, id, content, effects).is_some() {
                return None;
            }
            return Some(result);
        };
        match result {
            // Served while the lease held when it was sent; it must still hold now (I2).
            Ok(data) if self.lease_until().is_some_and(|until| now < until) => {
                let read = self.reads.reads.swap_remove(index);
                effects.push_back(Effect::ReadDone {
                    ticket: read.ticket,
                    result: Ok(data),
                });
                self.begin_repairs(&read, n, effects);
            }
            Ok(_) => self.reads.reads[index].state = State::Held,
            Err(error) => {
                let read = &mut self.reads.reads[index];
                read.state = State::Held;
                read.error = Some(error);
                read.failed |= 1 << n.min(31);
                if let ReadError::Checksum { block, position }
                | ReadError::Torn { block, position } = error
                {
                    self.note_bad(n, block, position);
                }
                self.dispatch(now, index, effects);
            }
        }
        None
    }

    fn note_bad(&mut self, bad: usize, block: Block, position: Position) {
        let known = |r: &Repair| r.bad == bad && r.block == block;
        if self.reads.repairs.len() < REPAIRS_MAX && !self.reads.repairs.iter().any(known) {
            let (id, source) = (RequestId(0), MemberId::default());
            self.reads.repairs.push(Repair {
                bad,
                block,
                position,
                id,
                source,
            });
        }
    }

    /// Another member had good data: it is asked for the bad blocks one by one.
    fn begin_repairs(&mut self, read: &Read, good: usize, effects: &mut Effects<P>) {
        if read.failed == 0 {
            return;
        }
        for index in 0..self.reads.repairs.len() {
            let repair = &self.reads.repairs[index];
            let range = BlockRange {
                start: repair.block,
                count: 1,
            };
            if repair.id != RequestId(0) || repair.bad == good || !range.overlaps(read.range) {
                continue;
            }
            let id = self.id();
            let source = self.peers[good].member.id;
            let repair = &mut self.reads.repairs[index];
            (repair.id, repair.source) = (id, source);
            self.send(
                good,
                Request::Read {
                    id,
                    range,
                    torn: TornBlocks::Refuse,
                },
                effects,
            );
        }
    }

    /// R6: only with data of exactly the position that the bad block has.
    fn repair(
        &mut self,
        repair: Repair,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) {
        let Ok(data) = result else { return };
        let peer = &self.peers[repair.bad];
        if data.positions != [repair.position] || !peer.attached || peer.fenced {
            return;
        }
        let id = self.id();
        let (block, position, content) = (repair.block, repair.position, data.content);
        self.send(
            repair.bad,
            Request::Repair {
                id,
                block,
                position,
                content,
            },
            effects,
        );
    }

    /// When to look at the reads again.
    pub(super) fn reads_timer(&self) -> Time {
        let limit = self.options.io_timeout;
        let timer = |read: &Read| {
            let deadline = match read.state {
                State::Held => Time::NEVER,
                State::Sent { deadline, .. } => deadline,
            };
            limit.map_or(deadline, |limit| deadline.min(read.since + limit))
        };
        self.reads
            .reads
            .iter()
            .map(timer)
            .min()
            .unwrap_or(Time::NEVER)
    }

    /// When a timer of an open attachment is due.
    pub(super) fn open_timer(&self) -> Time {
        self.stream_timer()
            .min(self.reads_timer())
            .min(self.resync_timer())
    }
}
