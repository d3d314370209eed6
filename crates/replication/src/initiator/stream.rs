//! W1, W2: numbering writes, sending them, counting answers, keeping what a member may still need.

use std::collections::VecDeque;

use crate::configuration::Configuration;
use crate::initiator::peer::{Answer, Peer};
use crate::initiator::{Effect, Effects, Initiator, IoError, Options, OverReason, Phase, Ticket};
use crate::message::{Content, Refusal, Request, RequestId, TornBlocks};
use crate::values::{BLOCK_BYTES, Block, BlockRange, MEMBERS_MAX, MemberId, Sequence, Time};
use core::time::Duration;

/// How long a member that had no room is left alone.
const FULL_RETRY: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Entry<P> {
    /// None: nobody waits any more, or it is a write of our own (B2).
    ticket: Option<Ticket>,
    range: BlockRange,
    content: Content<P>,
    since: Time,
}

impl<P> Entry<P> {
    fn bytes(&self) -> u64 {
        match self.content {
            Content::Data(_) => u64::from(self.range.count) * BLOCK_BYTES as u64,
            Content::Zeros => 64,
        }
    }
}

/// The writes of the epoch that may still be needed.
#[derive(Debug)]
pub(super) struct Stream<P> {
    /// Sequence of the first entry.
    first: Sequence,
    entries: VecDeque<Entry<P>>,
    /// Bytes of all entries.
    bytes: u64,
    /// Bytes of entries that are not acknowledged.
    open_bytes: u64,
    pub(super) issued: Sequence,
    pub(super) acknowledged: Sequence,
    /// Not issued yet, for want of room or members.
    waiting: VecDeque<Entry<P>>,
    /// Reads of torn blocks that are to be written again (B2).
    rewrites: Vec<(RequestId, Block)>,
}

impl<P> Stream<P> {
    pub(super) fn new(options: &Options) -> Stream<P> {
        Stream {
            first: Sequence(1),
            entries: VecDeque::with_capacity(options.window_writes_max.min(1024)),
            bytes: 0,
            open_bytes: 0,
            issued: Sequence(0),
            acknowledged: Sequence(0),
            waiting: VecDeque::new(),
            rewrites: Vec::new(),
        }
    }

    fn get(&self, sequence: Sequence) -> Option<&Entry<P>> {
        self.entries
            .get(usize::try_from(sequence.0.checked_sub(self.first.0)?).ok()?)
    }

    /// Issued and not acknowledged.
    fn open(&self) -> usize {
        (self.issued.0 - self.acknowledged.0) as usize
    }

    /// Nothing is under way that a client waits for.
    pub(super) fn is_idle(&self) -> bool {
        self.issued == self.acknowledged && self.waiting.is_empty()
    }

    /// W3: whether a write that is not acknowledged, or a torn block, overlaps the range.
    pub(super) fn overlaps(&self, range: BlockRange) -> bool {
        let skip = (self.acknowledged.0 + 1).saturating_sub(self.first.0) as usize;
        let mut open = self.entries.iter().skip(skip);
        open.any(|entry| entry.range.overlaps(range))
            || self.rewrites.iter().any(|(_, block)| {
                range.overlaps(BlockRange {
                    start: *block,
                    count: 1,
                })
            })
    }

    pub(super) fn fail_all(&mut self, error: &IoError, effects: &mut Effects<P>) {
        let all = self.entries.iter_mut().chain(&mut self.waiting);
        for ticket in all.filter_map(|entry| entry.ticket.take()) {
            effects.push_back(Effect::WriteDone {
                ticket,
                result: Err(error.clone()),
            });
        }
        self.waiting.clear();
        self.entries.clear();
        self.bytes = 0;
    }
}

impl<P: Clone> Initiator<P> {
    /// Whether another write would be issued at once. More are taken, and wait.
    pub fn can_accept(&self) -> bool {
        self.phase == Phase::Open && self.stream.waiting.is_empty() && self.may_issue(0)
    }

    pub(super) fn client_write(
        &mut self,
        now: Time,
        ticket: Ticket,
        range: BlockRange,
        content: Content<P>,
        effects: &mut Effects<P>,
    ) {
        if self.phase == Phase::Over || self.detaching {
            let result = Err(IoError::NotAttached);
            effects.push_back(Effect::WriteDone { ticket, result });
            return;
        }
        let entry = Entry {
            ticket: Some(ticket),
            range,
            content,
            since: now,
        };
        let straight = self.phase == Phase::Open && self.stream.waiting.is_empty();
        if straight && self.may_issue(entry.bytes()) {
            self.issue(entry, effects);
        } else {
            self.stream.waiting.push_back(entry);
        }
    }

    /// W1, and the bounds of the window.
    fn may_issue(&self, bytes: u64) -> bool {
        let stream = &self.stream;
        let enough = self
            .committed
            .as_ref()
            .is_some_and(|c| c.in_sync.len() >= self.min_in_sync());
        let room = stream.open() < self.options.window_writes_max
            && (stream.open_bytes + bytes <= self.options.window_bytes_max || stream.open() == 0);
        // A laggard that cannot be dropped holds what it needs: it is waited for.
        let retained = (stream.entries.len() as u64) < self.options.lag_writes_max * 2
            && stream.bytes <= self.options.lag_bytes_max * 2 + self.options.window_bytes_max;
        enough && room && retained
    }

    fn issue(&mut self, entry: Entry<P>, effects: &mut Effects<P>) {
        let sequence = self.stream.issued.next();
        self.stream.issued = sequence;
        let bytes = entry.bytes();
        self.stream.bytes += bytes;
        self.stream.open_bytes += bytes;
        for peer in &mut self.peers {
            if peer.in_stream && peer.attached && !peer.fenced && peer.sent.next() == sequence {
                peer.sent = sequence;
                effects.push_back(Effect::Send {
                    member: peer.member.id,
                    request: Request::Write {
                        sequence,
                        range: entry.range,
                        content: entry.content.clone(),
                    },
                });
            }
        }
        self.stream.entries.push_back(entry);
    }

    /// Sends a member what it lacks, from `sent` on.
    fn catch_up(&mut self, now: Time, n: usize, effects: &mut Effects<P>) {
        let peer = &self.peers[n];
        if !peer.in_stream || !peer.attached || peer.fenced || peer.retry_at > now {
            return;
        }
        // Before EpochStart is sent there is nothing that it would accept (M4).
        let started = peer.resync.is_some() || peer.config_sent.is_some() || self.has_started(n);
        if !started {
            return;
        }
        while self.peers[n].sent < self.stream.issued {
            let sequence = self.peers[n].sent.next();
            let Some(entry) = self.stream.get(sequence) else {
                // What it needs is gone: a gap. It comes back by resync.
                self.leave_stream(n);
                return;
            };
            let request = Request::Write {
                sequence,
                range: entry.range,
                content: entry.content.clone(),
            };
            self.peers[n].sent = sequence;
            self.send(n, request, effects);
        }
    }

    fn has_started(&self, n: usize) -> bool {
        self.peers[n].stored.0 == self.epoch.number
    }

    /// A member promised this epoch again on a new connection.
    pub(super) fn rejoin(
        &mut self,
        now: Time,
        n: usize,
        answer: &Answer,
        effects: &mut Effects<P>,
    ) {
        let last = answer.state.last;
        let in_epoch = last.epoch == self.epoch.number;
        let peer = &mut self.peers[n];
        if peer.in_stream {
            let id = peer.member.id;
            let in_sync = self.start.contains(&id) || in_epoch;
            let complete = answer.state.state.is_complete();
            if in_sync && complete {
                let held = if in_epoch { last.sequence } else { Sequence(0) };
                peer.answered = peer.answered.max(held);
                peer.sent = held;
            } else {
                self.leave_stream(n);
            }
        }
        self.condition_changed(n, effects);
        self.send_configuration(now, effects);
        self.catch_up(now, n, effects);
        self.acknowledge(now, effects);
    }

    /// The member gets no more writes; if it is in sync it is to leave the set.
    pub(super) fn leave_stream(&mut self, n: usize) {
        let id = self.peers[n].member.id;
        let in_sync = self
            .committed
            .as_ref()
            .is_some_and(|c| c.in_sync.contains(&id))
            || self
                .proposal
                .as_ref()
                .is_some_and(|p| p.configuration.in_sync.contains(&id));
        let peer = &mut self.peers[n];
        peer.in_stream = false;
        peer.ready = false;
        peer.resync = None;
        peer.leaving = in_sync;
    }

    /// Members that lag too far, or have been down too long, leave (unless too few would stay).
    pub(super) fn drop_laggards(&mut self, now: Time) {
        for n in 0..self.peers.len() {
            let peer = &self.peers[n];
            if !peer.in_stream {
                continue;
            }
            let gone = peer
                .down_since
                .is_some_and(|at| now >= at + self.options.down_grace);
            let lag = self.stream.issued.0 - peer.answered.0.min(self.stream.issued.0);
            let stale = lag > 0 && self.stream.get(peer.answered.next()).is_none();
            let far = lag > self.options.lag_writes_max
                || (lag > 0 && self.lag_bytes(peer) > self.options.lag_bytes_max);
            if !(gone || far || stale) {
                continue;
            }
            let id = peer.member.id;
            let in_sync = self
                .committed
                .as_ref()
                .is_some_and(|c| c.in_sync.contains(&id));
            if !in_sync || self.may_leave(id) {
                self.leave_stream(n);
            }
        }
    }

    fn lag_bytes(&self, peer: &Peer) -> u64 {
        // Entries are in order: what the member lacks is the end of the queue. Everything before it is
        // retained for somebody who is further behind.
        if self.stream.bytes <= self.options.lag_bytes_max {
            return 0;
        }
        let skip = (peer.answered.0 + 1).saturating_sub(self.stream.first.0) as usize;
        self.stream
            .entries
            .iter()
            .skip(skip)
            .map(Entry::bytes)
            .sum()
    }

    pub(super) fn applied(
        &mut self,
        now: Time,
        member: MemberId,
        sequence: Sequence,
        effects: &mut Effects<P>,
    ) {
        let Some(n) = self.index(member) else { return };
        let peer = &mut self.peers[n];
        // What was never sent cannot have been applied.
        if sequence > self.stream.issued || sequence <= peer.answered {
            return;
        }
        peer.answered = sequence;
        self.acknowledge(now, effects);
        self.release();
        if self.phase == Phase::Open {
            self.issue_waiting(effects);
            if self.proposal.is_none() && self.peers.iter().any(|p| p.leaving || p.ready) {
                self.propose(now, effects);
                self.send_configuration(now, effects);
            }
            self.resync_answered(n, effects);
        }
    }

    /// W2, C4: the newest sequence that a write quorum of `c` holds.
    fn quorum_sequence(&self, c: &Configuration) -> Sequence {
        let mut answered = [0; MEMBERS_MAX];
        let mut count = 0;
        for peer in &self.peers {
            if c.in_sync.contains(&peer.member.id) {
                answered[count] = peer.answered.0;
                count += 1;
            }
        }
        // In-sync members that the shell does not know count as having answered nothing.
        let answered = &mut answered[..c.in_sync.len()];
        answered.sort_unstable();
        Sequence(answered[c.in_sync.len() - c.write_quorum()])
    }

    /// Acknowledges what the quorums hold.
    pub(super) fn acknowledge(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(c) = &self.committed else { return };
        let mut upto = self.quorum_sequence(c);
        if let Some(p) = &self.proposal {
            upto = upto.min(self.quorum_sequence(&p.configuration));
        }
        if upto <= self.stream.acknowledged {
            return;
        }
        while self.stream.acknowledged < upto {
            let sequence = self.stream.acknowledged.next();
            self.stream.acknowledged = sequence;
            let index = (sequence.0 - self.stream.first.0) as usize;
            let entry = &mut self.stream.entries[index];
            let ticket = entry.ticket.take();
            self.stream.open_bytes -= entry.bytes();
            if let Some(ticket) = ticket {
                effects.push_back(Effect::WriteDone {
                    ticket,
                    result: Ok(()),
                });
            }
        }
        self.advance_reads(now, effects);
    }

    /// Forgets what is acknowledged and has been answered by every member of the stream.
    fn release(&mut self) {
        let acknowledged = self.stream.acknowledged;
        let stream = self.peers.iter().filter(|p| p.in_stream);
        let needed = stream
            .map(|p| p.answered)
            .min()
            .unwrap_or(acknowledged)
            .min(acknowledged);
        while self.stream.first <= needed {
            let Some(entry) = self.stream.entries.pop_front() else {
                break;
            };
            self.stream.bytes -= entry.bytes();
            self.stream.first = self.stream.first.next();
        }
    }

    fn issue_waiting(&mut self, effects: &mut Effects<P>) {
        while let Some(entry) = self.stream.waiting.front()
            && self.may_issue(entry.bytes())
            && let Some(entry) = self.stream.waiting.pop_front()
        {
            self.issue(entry, effects);
        }
    }

    pub(super) fn advance_stream(&mut self, now: Time, effects: &mut Effects<P>) {
        for n in 0..self.peers.len() {
            self.catch_up(now, n, effects);
        }
        self.acknowledge(now, effects);
        self.release();
        self.issue_waiting(effects);
        self.time_out(now, effects);
        if self.stream.issued.0 + (1 << 20) > Sequence::MAX.0 {
            self.over(OverReason::SequenceExhausted, effects);
        }
    }

    /// A write that failed is undecided: it stays in the stream (W3).
    fn time_out(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(limit) = self.options.io_timeout else {
            return;
        };
        let mut fail = |entry: &mut Entry<P>| {
            if let Some(ticket) = entry.ticket.take_if(|_| now >= entry.since + limit) {
                effects.push_back(Effect::WriteDone {
                    ticket,
                    result: Err(IoError::Timeout),
                });
            }
        };
        let skip = (self.stream.acknowledged.0 + 1).saturating_sub(self.stream.first.0) as usize;
        self.stream
            .entries
            .iter_mut()
            .skip(skip)
            .for_each(&mut fail);
        self.stream.waiting.iter_mut().for_each(&mut fail);
        self.stream.waiting.retain(|entry| entry.ticket.is_some());
    }

    /// When the oldest write that somebody waits for times out.
    pub(super) fn stream_timer(&self) -> Time {
        let retry = self
            .peers
            .iter()
            .filter(|p| p.in_stream && p.attached && p.sent < self.stream.issued);
        let retry = retry.map(|p| p.retry_at).min().unwrap_or(Time::NEVER);
        let laggards = self
            .peers
            .iter()
            .filter(|p| p.in_stream && self.may_leave(p.member.id));
        let gone = laggards
            .filter_map(|p| Some(p.down_since? + self.options.down_grace))
            .min();
        let skip = (self.stream.acknowledged.0 + 1).saturating_sub(self.stream.first.0) as usize;
        let mut open = self
            .stream
            .entries
            .iter()
            .skip(skip)
            .chain(&self.stream.waiting);
        let oldest = open
            .find(|entry| entry.ticket.is_some())
            .map(|entry| entry.since);
        let timeout = self
            .options
            .io_timeout
            .and_then(|limit| Some(oldest? + limit));
        retry
            .min(gone.unwrap_or(Time::NEVER))
            .min(timeout.unwrap_or(Time::NEVER))
    }

    pub(super) fn write_refused(
        &mut self,
        now: Time,
        n: usize,
        sequence: Sequence,
        refusal: Refusal,
        effects: &mut Effects<P>,
    ) {
        match refusal {
            Refusal::Fenced { promised } => {
                let member = self.peers[n].member.id;
                self.fenced(now, member, promised, effects);
            }
            Refusal::DeviceFull => self.no_room(now, n, sequence, effects),
            // Writes behind one that was refused for want of space.
            Refusal::Gap { .. } if self.peers[n].retry_at > now => {}
            // It lost its place: begin again on a new connection, which tells where it is.
            Refusal::Gap { .. } | Refusal::NotStarted => self.reconnect(n, effects),
            _ => {
                self.leave_stream(n);
                self.peers[n].retry_at = now + FULL_RETRY;
            }
        }
        if self.phase == Phase::Open {
            self.advance_open(now, effects);
        }
    }

    /// A member has no room for a write. It is sent again after a while. Once nobody in the stream has
    /// taken it, the sequence is used for an empty write and the client is told.
    fn no_room(&mut self, now: Time, n: usize, sequence: Sequence, effects: &mut Effects<P>) {
        let peer = &mut self.peers[n];
        if sequence <= peer.answered {
            return;
        }
        peer.full_at = peer.full_at.max(sequence);
        peer.sent = Sequence(sequence.0 - 1);
        peer.retry_at = now + FULL_RETRY;
        let Some(c) = &self.committed else { return };
        let full = |id: &&MemberId| {
            let peer = self.peers.iter().find(|p| p.member.id == **id);
            peer.is_some_and(|p| p.full_at >= sequence && p.answered < sequence)
        };
        let refusing = c.in_sync.iter().filter(full).count();
        let reached = c.in_sync.len() - refusing >= c.write_quorum();
        if reached || sequence <= self.stream.acknowledged {
            return;
        }
        let untouched = self
            .peers
            .iter()
            .filter(|p| p.in_stream)
            .all(|p| p.answered < sequence && (p.full_at >= sequence || p.sent < sequence));
        let index = (sequence.0 - self.stream.first.0) as usize;
        let Some(entry) = self.stream.entries.get_mut(index) else {
            return;
        };
        if let Some(ticket) = entry.ticket.take() {
            effects.push_back(Effect::WriteDone {
                ticket,
                result: Err(IoError::NoSpace),
            });
        }
        if untouched {
            let before = entry.bytes();
            entry.content = Content::Zeros;
            entry.range = BlockRange {
                start: Block(0),
                count: 0,
            };
            let freed = before - entry.bytes();
            self.stream.bytes -= freed;
            self.stream.open_bytes -= freed;
            for peer in self.peers.iter_mut().filter(|p| p.in_stream) {
                peer.sent = peer.sent.min(Sequence(sequence.0 - 1));
                peer.retry_at = now;
            }
        }
    }

    /// B2: blocks that no member has whole are read as they are and written again in this epoch.
    pub(super) fn begin_rewrite(&mut self, effects: &mut Effects<P>) {
        let Some(source) = self.attach.set.first().copied() else {
            return;
        };
        for block in core::mem::take(&mut self.attach.rewrite) {
            let id = self.id();
            self.stream.rewrites.push((id, block));
            let range = BlockRange {
                start: block,
                count: 1,
            };
            self.send(
                source,
                Request::Read {
                    id,
                    range,
                    torn: TornBlocks::Serve,
                },
                effects,
            );
        }
    }

    /// The content of a torn block has come; None when `id` is none of these reads.
    pub(super) fn rewrite_data(
        &mut self,
        now: Time,
        id: RequestId,
        content: Option<Content<P>>,
        effects: &mut Effects<P>,
    ) -> Option<()> {
        let at = self
            .stream
            .rewrites
            .iter()
            .position(|(read, _)| *read == id)?;
        let (_, block) = self.stream.rewrites.swap_remove(at);
        let range = BlockRange {
            start: block,
            count: 1,
        };
        // What cannot be read at all was never acknowledged: zeros are as good as anything.
        let content = content.unwrap_or(Content::Zeros);
        self.issue(
            Entry {
                ticket: None,
                range,
                content,
                since: now,
            },
            effects,
        );
        Some(())
    }
}
