//! W1, W2, C4: numbering writes, sending them, counting answers, keeping what may still be needed.

mod members;
mod space;

pub(super) use space::EVICTED_RETRY;

use std::collections::VecDeque;

use crate::configuration::Configuration;
use crate::faults::{Fault, is_broken};
use crate::initiator::{Effect, Effects, Initiator, IoError, Options, OverReason, Phase, Ticket};
use crate::message::{Content, Request};
use crate::values::{BLOCK_BYTES, BlockRange, MEMBERS_MAX, MemberId, Sequence, Time};

/// What a write of zeros counts towards limits in bytes: its descriptor.
const ZEROS_BYTES: u64 = 64;
/// An epoch ends this many sequences before they run out (B3), so that the window fits.
const SEQUENCE_RESERVE: u64 = 1 << 20;

#[derive(Debug)]
struct Entry<P> {
    /// None: nobody waits for it any more.
    ticket: Option<Ticket>,
    range: BlockRange,
    content: Content<P>,
    since: Time,
}

impl<P> Entry<P> {
    fn bytes(&self) -> u64 {
        match self.content {
            Content::Data(_) => u64::from(self.range.count) * BLOCK_BYTES as u64,
            Content::Zeros => ZEROS_BYTES,
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
    /// Writes that a client waits for.
    tickets: usize,
    /// The write that nobody has room for and whose sequence is to be taken back (B6).
    refused: Option<Sequence>,
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
            tickets: 0,
            refused: None,
        }
    }

    fn index(&self, sequence: Sequence) -> Option<usize> {
        usize::try_from(sequence.0.checked_sub(self.first.0)?).ok()
    }

    fn get(&self, sequence: Sequence) -> Option<&Entry<P>> {
        self.entries.get(self.index(sequence)?)
    }

    /// Index of the first entry that is not acknowledged.
    fn first_open(&self) -> usize {
        (self.acknowledged.0 + 1).saturating_sub(self.first.0) as usize
    }

    /// Issued and not acknowledged.
    fn open(&self) -> usize {
        (self.issued.0 - self.acknowledged.0) as usize
    }

    /// No client waits for a write.
    pub(super) fn is_idle(&self) -> bool {
        self.tickets == 0
    }

    /// W3: the newest write that overlaps the range and is not acknowledged.
    pub(super) fn newest_overlap(&self, range: BlockRange) -> Option<Sequence> {
        if self.issued == self.acknowledged {
            return None;
        }
        let from = self.first_open();
        let mut open = self.entries.range(from..);
        let at = open.rposition(|entry| entry.range.overlaps(range))?;
        Some(Sequence(self.first.0 + (from + at) as u64))
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
        (self.bytes, self.open_bytes, self.tickets) = (0, 0, 0);
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
        self.stream.tickets += 1;
        let entry = Entry {
            ticket: Some(ticket),
            range,
            content,
            since: now,
        };
        let straight = self.phase == Phase::Open && self.stream.waiting.is_empty();
        if straight && self.may_issue(entry.bytes()) {
            self.issue(now, entry, effects);
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
        // A laggard that may not be dropped holds what it needs: it is waited for.
        let retained = (stream.entries.len() as u64)
            < self.options.lag_writes_max.saturating_mul(2)
            && stream.bytes
                <= self
                    .options
                    .lag_bytes_max
                    .saturating_mul(2)
                    .saturating_add(self.options.window_bytes_max);
        enough && room && retained
    }

    fn issue(&mut self, now: Time, entry: Entry<P>, effects: &mut Effects<P>) {
        let sequence = self.stream.issued.next();
        self.stream.issued = sequence;
        let bytes = entry.bytes();
        self.stream.bytes += bytes;
        self.stream.open_bytes += bytes;
        for n in 0..self.peers.len() {
            if self.peers[n].sent.next() == sequence && self.takes_writes(now, n) {
                let peer = &mut self.peers[n];
                peer.sending(sequence);
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

    /// A member's cumulative answer.
    pub(super) fn applied(
        &mut self,
        now: Time,
        member: MemberId,
        sequence: Sequence,
        effects: &mut Effects<P>,
    ) {
        let Some(n) = self.index(member) else { return };
        let peer = &mut self.peers[n];
        // What was never issued cannot have been applied; what comes after the end says nothing new.
        if self.phase != Phase::Open || sequence > self.stream.issued || sequence <= peer.answered {
            return;
        }
        peer.answered = sequence;
        peer.took = peer.took.max(sequence);
        self.acknowledge(now, effects);
        self.release();
        self.issue_waiting(now, effects);
        // What else an answer may set off is rare; it is looked for only where something waits.
        let waits = |p: &super::Peer| {
            let coming_or_going = p.leaving || p.ready || p.resync.is_some();
            coming_or_going || p.full_at > Sequence(0) || self.is_far_behind(p)
        };
        if self.peers.iter().any(waits) {
            self.advance(now, effects);
        } else if self.detaching || self.reads.is_waiting() {
            self.advance_reads(now, effects);
            self.end_if_drained(effects);
        }
    }

    /// W2: the newest sequence that a write quorum of `c` holds.
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
        let quorum = if is_broken(Fault::AcknowledgeOnOne) {
            1
        } else {
            c.write_quorum()
        };
        Sequence(answered[c.in_sync.len() - quorum])
    }

    /// Acknowledges what the quorums hold (W2, C4).
    pub(super) fn acknowledge(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(c) = &self.committed else { return };
        let mut upto = self.quorum_sequence(c);
        if let Some(p) = &self.proposal {
            let new = self.quorum_sequence(&p.configuration);
            upto = if is_broken(Fault::OldQuorumOnly) {
                upto
            } else if is_broken(Fault::NewQuorumOnly) {
                new
            } else {
                upto.min(new)
            };
        }
        if upto <= self.stream.acknowledged {
            return;
        }
        while self.stream.acknowledged < upto {
            let sequence = self.stream.acknowledged.next();
            let Some(index) = self.stream.index(sequence) else {
                break;
            };
            let Some(entry) = self.stream.entries.get_mut(index) else {
                break;
            };
            self.stream.acknowledged = sequence;
            let ticket = entry.ticket.take();
            self.stream.open_bytes -= entry.bytes();
            if let Some(ticket) = ticket {
                self.stream.tickets -= 1;
                effects.push_back(Effect::WriteDone {
                    ticket,
                    result: Ok(()),
                });
            }
        }
        if self.reads.is_waiting() {
            self.advance_reads(now, effects);
        }
    }

    /// Forgets what is acknowledged and has been answered by every member of the stream.
    pub(super) fn release(&mut self) {
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

    fn issue_waiting(&mut self, now: Time, effects: &mut Effects<P>) {
        while let Some(entry) = self.stream.waiting.front()
            && self.may_issue(entry.bytes())
            && let Some(entry) = self.stream.waiting.pop_front()
        {
            self.issue(now, entry, effects);
        }
    }

    pub(super) fn advance_stream(&mut self, now: Time, effects: &mut Effects<P>) {
        for n in 0..self.peers.len() {
            self.catch_up(now, n, effects);
        }
        self.acknowledge(now, effects);
        self.release();
        self.issue_waiting(now, effects);
        self.time_out(now, effects);
        if self.stream.issued.0 + SEQUENCE_RESERVE > Sequence::MAX.0 {
            self.over(OverReason::SequenceExhausted, effects);
        }
    }

    /// A write that failed is undecided: it stays in the stream (W3). One that was not issued is not.
    pub(super) fn time_out(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(limit) = self.options.io_timeout else {
            return;
        };
        let stream = &mut self.stream;
        let from = stream.first_open().min(stream.entries.len());
        let entries = stream.entries.range_mut(from..).chain(&mut stream.waiting);
        for entry in entries {
            if let Some(ticket) = entry.ticket.take_if(|_| now >= entry.since + limit) {
                stream.tickets -= 1;
                effects.push_back(Effect::WriteDone {
                    ticket,
                    result: Err(IoError::Timeout),
                });
            }
        }
        stream.waiting.retain(|entry| entry.ticket.is_some());
    }

    /// When the stream has something to do of its own accord.
    pub(super) fn stream_timer(&self) -> Time {
        let timeout = self.options.io_timeout.and_then(|limit| {
            let from = self.stream.first_open().min(self.stream.entries.len());
            let mut open = self
                .stream
                .entries
                .range(from..)
                .chain(&self.stream.waiting);
            let oldest = open.find(|entry| entry.ticket.is_some())?;
            Some(oldest.since + limit)
        });
        let members = (self.phase == Phase::Open).then(|| self.members_timer());
        timeout
            .into_iter()
            .chain(members)
            .min()
            .unwrap_or(Time::NEVER)
    }
}
