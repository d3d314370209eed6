//! W3, L2: reads from a member that holds what is acknowledged, and from another one when the first
//! is slow or has no good copy.
//!
//! ```text
//!   waiting ──lease, overlapping writes acknowledged, a member──► asked ──data──► done
//!      ▲                                                           │  └─ newer than acknowledged ─► held ──► done
//!      └────────── bad copy, member lost, lease lost ──────────────┘
//! ```

mod repair;

use crate::configuration::Configuration;
use crate::faults::{Fault, is_broken};
use crate::initiator::peer::Peer;
use crate::initiator::{Effect, Effects, Initiator, IoError, PEERS_MAX, Phase, Ticket};
use crate::message::{ReadData, ReadError, Refusal, Request, RequestId, TornBlocks};
use crate::values::{BlockRange, MemberId, Sequence, Time};

use repair::{Bad, Repair};

/// Every so many reads the measured latencies are not looked at, so that a member that was slow
/// once is measured again.
const PROBE_READS: u64 = 128;

#[derive(Debug)]
struct Read<P> {
    ticket: Ticket,
    range: BlockRange,
    since: Time,
    id: RequestId,
    /// The newest overlapping write that was under way when the read came (W3).
    barrier: Sequence,
    /// Bit per peer that was asked and may still answer.
    asked: u32,
    asked_at: Time,
    /// Bit per peer that has no good copy.
    failed: u32,
    /// When another member is asked.
    deadline: Time,
    /// Data that is newer than what is acknowledged, and the write that it waits for.
    held: Option<(ReadData<P>, Sequence)>,
    error: Option<ReadError>,
    bad: Vec<Bad>,
}

/// Reads and repairs under way.
#[derive(Debug)]
pub(super) struct Reads<P> {
    reads: Vec<Read<P>>,
    repairs: Vec<Repair>,
    /// Some read may have something else to wait for than an answer.
    waiting: bool,
    /// Per peer: reads that it was asked.
    load: [u32; PEERS_MAX],
    /// Per peer: smoothed time to an answer in nanoseconds; zero while unknown.
    latency: [u64; PEERS_MAX],
    count: u64,
}

impl<P> Default for Reads<P> {
    fn default() -> Reads<P> {
        Reads {
            reads: Vec::new(),
            repairs: Vec::new(),
            waiting: false,
            load: [0; PEERS_MAX],
            latency: [0; PEERS_MAX],
            count: 0,
        }
    }
}

impl<P> Reads<P> {
    pub(super) fn is_idle(&self) -> bool {
        self.reads.is_empty()
    }

    /// Whether some read waits for a write, a lease or a member.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// What was asked of this member will not be answered, or does not count any more.
    pub(super) fn lost(&mut self, n: usize) {
        for read in &mut self.reads {
            if read.asked & bit(n) != 0 {
                read.asked &= !bit(n);
                self.waiting = true;
            }
        }
        self.load[n] = 0;
        self.repairs.retain(|repair| repair.source != n);
    }

    /// The peer's place goes to another member.
    pub(super) fn forget(&mut self, n: usize) {
        self.lost(n);
        self.latency[n] = 0;
        self.repairs.retain(|repair| !repair.is_at(n));
        for read in &mut self.reads {
            read.failed &= !bit(n);
            read.bad.retain(|bad| !bad.is_at(n));
        }
    }

    /// C4: from the first send of a proposal reads go only to members of both configurations; an answer
    /// that is under way from another member does not count.
    pub(super) fn recheck(&mut self, peers: &[Peer], proposal: &Configuration) {
        if is_broken(Fault::ReadLeaving) {
            return;
        }
        for (n, peer) in peers.iter().enumerate() {
            if !proposal.in_sync.contains(&peer.member.id) {
                self.lost(n);
            }
        }
    }

    /// Sequences above `issued` were taken back (B6): nobody waits for them.
    pub(super) fn taken_back(&mut self, issued: Sequence) {
        for read in &mut self.reads {
            read.barrier = read.barrier.min(issued);
        }
    }

    pub(super) fn fail_all(&mut self, error: &IoError, effects: &mut Effects<P>) {
        for read in self.reads.drain(..) {
            effects.push_back(Effect::ReadDone {
                ticket: read.ticket,
                result: Err(error.clone()),
            });
        }
        self.repairs.clear();
    }

    /// Removes a read; answers that still come for it are ignored.
    fn remove(&mut self, index: usize) -> Read<P> {
        let read = self.reads.swap_remove(index);
        let mut asked = read.asked;
        while asked != 0 {
            let n = asked.trailing_zeros() as usize;
            self.load[n] = self.load[n].saturating_sub(1);
            asked &= !bit(n);
        }
        read
    }

    fn unask(&mut self, index: usize, n: usize) {
        self.reads[index].asked &= !bit(n);
        self.load[n] = self.load[n].saturating_sub(1);
    }

    fn measure(&mut self, n: usize, nanoseconds: u64) {
        let before = self.latency[n];
        self.latency[n] = if before == 0 {
            nanoseconds.max(1)
        } else {
            (before - before / 8 + nanoseconds / 8).max(1)
        };
    }
}

fn bit(n: usize) -> u32 {
    1 << n
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
        let overlap = self.stream.newest_overlap(range);
        let id = self.id();
        self.reads.reads.push(Read {
            ticket,
            range,
            since: now,
            id,
            barrier: overlap.unwrap_or_default(),
            asked: 0,
            asked_at: now,
            failed: 0,
            deadline: Time::NEVER,
            held: None,
            error: None,
            bad: Vec::new(),
        });
        let index = self.reads.reads.len() - 1;
        self.dispatch(now, index, effects);
    }

    /// Looks again at everything that waits.
    pub(super) fn advance_reads(&mut self, now: Time, effects: &mut Effects<P>) {
        self.reads.waiting = false;
        let mut index = 0;
        while index < self.reads.reads.len() {
            let before = self.reads.reads.len();
            if !self.expire(now, index, effects) {
                self.dispatch(now, index, effects);
            }
            if self.reads.reads.len() == before {
                index += 1;
            }
        }
    }

    /// The limit for I/O without a quorum.
    fn expire(&mut self, now: Time, index: usize, effects: &mut Effects<P>) -> bool {
        let read = &self.reads.reads[index];
        let limit = self.options.io_timeout;
        if limit.is_none_or(|limit| now < read.since + limit) {
            return false;
        }
        let read = self.reads.remove(index);
        effects.push_back(Effect::ReadDone {
            ticket: read.ticket,
            result: Err(IoError::Timeout),
        });
        true
    }

    /// L2.
    fn may_read(&self, now: Time) -> bool {
        is_broken(Fault::NoLease) || self.lease_until().is_some_and(|until| now < until)
    }

    /// Does for a read what can be done now.
    fn dispatch(&mut self, now: Time, index: usize, effects: &mut Effects<P>) {
        if self.phase != Phase::Open {
            self.reads.waiting = true;
            return;
        }
        let read = &self.reads.reads[index];
        if let Some((_, until)) = &read.held {
            if *until <= self.stream.acknowledged && self.may_read(now) {
                self.finish(index, effects);
            } else {
                self.reads.waiting = true;
            }
            return;
        }
        if read.asked != 0 {
            if now >= read.deadline {
                self.ask_another(now, index, effects);
            }
            return;
        }
        let written =
            read.barrier <= self.stream.acknowledged || is_broken(Fault::ReadUnacknowledged);
        if !written || !self.may_read(now) {
            self.reads.waiting = true;
            return;
        }
        let failed = read.failed;
        match self.reader(failed) {
            Some(n) => self.ask_read(now, index, n, effects),
            None if self.have_all_failed(failed) => {
                let read = self.reads.remove(index);
                effects.push_back(Effect::ReadDone {
                    ticket: read.ticket,
                    result: Err(IoError::Read(read.error.unwrap_or(ReadError::Device))),
                });
            }
            None => self.reads.waiting = true,
        }
    }

    /// A member was slow: queueing is no fault, and its answer still counts if it is the first.
    fn ask_another(&mut self, now: Time, index: usize, effects: &mut Effects<P>) {
        let read = &mut self.reads.reads[index];
        read.deadline = now + self.options.read_timeout;
        let avoid = read.failed | read.asked;
        if self.may_read(now)
            && let Some(n) = self.reader(avoid)
        {
            self.ask_read(now, index, n, effects);
        }
    }

    fn ask_read(&mut self, now: Time, index: usize, n: usize, effects: &mut Effects<P>) {
        let read = &mut self.reads.reads[index];
        read.asked |= bit(n);
        read.asked_at = now;
        read.deadline = now + self.options.read_timeout;
        let (id, range) = (read.id, read.range);
        self.reads.load[n] += 1;
        self.reads.count += 1;
        let torn = TornBlocks::Refuse;
        self.send(n, Request::Read { id, range, torn }, effects);
    }

    /// W3, C4: the member that is likely to answer first, of those that hold everything acknowledged.
    fn reader(&self, avoid: u32) -> Option<usize> {
        let c = self.committed.as_ref()?;
        let p = self.proposal.as_ref().map(|p| &p.configuration);
        let both = |id: MemberId| {
            c.in_sync.contains(&id)
                && (p.is_none_or(|p| p.in_sync.contains(&id)) || is_broken(Fault::ReadLeaving))
        };
        let may_serve = |n: &usize| {
            let peer = &self.peers[*n];
            let has_all =
                peer.answered >= self.stream.acknowledged || is_broken(Fault::ReadLagging);
            avoid & bit(*n) == 0 && peer.usable() && both(peer.member.id) && has_all
        };
        let probe = self.reads.count.is_multiple_of(PROBE_READS);
        let cost = |n: &usize| {
            let load = u64::from(self.reads.load[*n]) + 1;
            let latency = if probe { 1 } else { self.reads.latency[*n] };
            load.saturating_mul(latency)
        };
        (0..self.peers.len()).filter(may_serve).min_by_key(cost)
    }

    /// Whether no in-sync member is left that could have a good copy. One that is down could.
    fn have_all_failed(&self, failed: u32) -> bool {
        let Some(c) = &self.committed else {
            return false;
        };
        let has_failed = |id: &MemberId| self.index(*id).is_some_and(|n| failed & bit(n) != 0);
        c.in_sync.iter().all(has_failed)
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
        let result = self.repair_data(n, id, result, effects)?;
        let asked = |read: &Read<P>| read.id == id && read.asked & bit(n) != 0;
        let Some(index) = self.reads.reads.iter().position(asked) else {
            return Some(result);
        };
        self.reads.unask(index, n);
        match result {
            Ok(data) => {
                let took = now.since(self.reads.reads[index].asked_at);
                self.reads.measure(n, took.as_nanos() as u64);
                // Served under a lease, it counts only if that has not run out meanwhile (I2).
                if self.may_read(now) {
                    let until = self.newest_of(&data, self.reads.reads[index].range);
                    self.reads.reads[index].held = Some((data, until));
                }
            }
            Err(error) => {
                let read = &mut self.reads.reads[index];
                read.failed |= bit(n);
                read.error = Some(error);
                read.bad.extend(Bad::of(n, error));
            }
        }
        self.dispatch(now, index, effects);
        None
    }

    /// W3: what was read cannot vanish, so it waits until the newest write in it is acknowledged.
    fn newest_of(&self, data: &ReadData<P>, range: BlockRange) -> Sequence {
        if is_broken(Fault::ReadUnacknowledged) {
            return Sequence(0);
        }
        if data.positions.len() != range.count as usize {
            return self.stream.newest_overlap(range).unwrap_or_default();
        }
        let ours = data
            .positions
            .iter()
            .filter(|p| p.epoch == self.epoch.number);
        ours.map(|p| p.sequence).max().unwrap_or_default()
    }

    fn finish(&mut self, index: usize, effects: &mut Effects<P>) {
        let mut read = self.reads.remove(index);
        let Some((data, _)) = read.held.take() else {
            return;
        };
        effects.push_back(Effect::ReadDone {
            ticket: read.ticket,
            result: Ok(data),
        });
        for bad in core::mem::take(&mut read.bad) {
            self.begin_repair(bad, read.failed, effects);
        }
    }

    /// A request was refused.
    pub(super) fn read_refused(
        &mut self,
        now: Time,
        n: usize,
        id: RequestId,
        refusal: Refusal,
        effects: &mut Effects<P>,
    ) {
        let error = Err(ReadError::Refused(refusal));
        let _ = self.read_data(now, n, id, error, effects);
    }

    /// When to look at the reads again.
    pub(super) fn reads_timer(&self) -> Time {
        let limit = self.options.io_timeout;
        let timer = |read: &Read<P>| {
            let deadline = if read.asked == 0 || read.held.is_some() {
                Time::NEVER
            } else {
                read.deadline
            };
            limit.map_or(deadline, |limit| deadline.min(read.since + limit))
        };
        let timers = self.reads.reads.iter().map(timer);
        timers.min().unwrap_or(Time::NEVER)
    }
}
