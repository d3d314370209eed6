//! Members of the stream: catching up after a reconnect, leaving when too far behind, coming back.

use crate::initiator::peer::{Answer, Peer};
use crate::initiator::{Effects, Initiator};
use crate::message::Request;
use crate::values::{MemberId, Sequence, Time};

use super::Entry;

impl<P: Clone> Initiator<P> {
    /// Whether a write may be sent to the member now.
    pub(super) fn takes_writes(&self, now: Time, n: usize) -> bool {
        let peer = &self.peers[n];
        // Before EpochStart or BeginResync is sent there is nothing that it would accept (M4).
        let started = peer.stored.0 == self.epoch.number
            || peer.config_sent.is_some()
            || peer.resync.is_some();
        peer.in_stream && peer.usable() && peer.retry_at <= now && started
    }

    /// Sends a member what it lacks, from `sent` on.
    pub(super) fn catch_up(&mut self, now: Time, n: usize, effects: &mut Effects<P>) {
        self.enter_again(now, n);
        if self.peers[n].sent >= self.stream.issued || !self.takes_writes(now, n) {
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
            self.peers[n].sending(sequence);
            self.send(n, request, effects);
        }
    }

    /// A member that refused writes and could not leave the in-sync set is tried again.
    fn enter_again(&mut self, now: Time, n: usize) {
        let peer = &self.peers[n];
        if !peer.leaving || !peer.usable() || peer.enter_again_at > now {
            return;
        }
        let id = peer.member.id;
        let excluded = self
            .proposal
            .as_ref()
            .is_some_and(|p| !p.configuration.in_sync.contains(&id));
        if !excluded && peer.answered.next() >= self.stream.first {
            self.resume(n, self.peers[n].answered);
        }
    }

    /// The stream goes on behind what the member holds.
    fn resume(&mut self, n: usize, held: Sequence) {
        let peer = &mut self.peers[n];
        peer.answered = peer.answered.max(held);
        peer.took = peer.took.max(held);
        peer.sent = held;
        peer.in_stream = true;
        peer.leaving = false;
        peer.enter_again_at = Time::NEVER;
    }

    /// A member promised this epoch again on a new connection (W1: resent from the member's `last`).
    pub(in crate::initiator) fn rejoin(
        &mut self,
        now: Time,
        n: usize,
        answer: &Answer,
        effects: &mut Effects<P>,
    ) {
        let id = self.peers[n].member.id;
        let last = answer.state.last;
        let held = if last.epoch == self.epoch.number {
            Some(last.sequence)
        } else {
            // It answered Fence, was made equal, and has not stored EpochStart yet.
            self.start.contains(&id).then_some(Sequence(0))
        };
        self.peers[n].resync = None;
        self.peers[n].ready = false;
        match held {
            Some(held)
                if self.is_counted(id)
                    && answer.state.state.is_complete()
                    && held <= self.stream.issued
                    && held.next() >= self.stream.first =>
            {
                self.resume(n, held);
            }
            _ => self.leave_stream(n),
        }
        self.condition_changed(n, effects);
        self.send_configuration(now, effects);
    }

    /// Whether the committed or the proposed configuration has the member in sync.
    pub(in crate::initiator) fn is_counted(&self, id: MemberId) -> bool {
        let proposed = self.proposal.as_ref().map(|p| &p.configuration);
        let mut both = self.committed.iter().chain(proposed);
        both.any(|c| c.in_sync.contains(&id))
    }

    /// The member gets no more writes; if it counts as in sync it is to leave the set.
    pub(in crate::initiator) fn leave_stream(&mut self, n: usize) {
        let counted = self.is_counted(self.peers[n].member.id);
        let peer = &mut self.peers[n];
        peer.in_stream = false;
        peer.ready = false;
        peer.resync = None;
        peer.leaving = counted;
        peer.enter_again_at = Time::NEVER;
    }

    /// Whether the member may leave the stream without too few staying in sync.
    pub(super) fn may_go(&self, id: MemberId) -> bool {
        let in_sync = self
            .committed
            .as_ref()
            .is_some_and(|c| c.in_sync.contains(&id));
        !in_sync || self.may_leave(id)
    }

    /// Members that lag too far, have no room, or have been down too long leave.
    pub(in crate::initiator) fn drop_laggards(&mut self, now: Time) {
        for n in 0..self.peers.len() {
            let peer = &self.peers[n];
            if !peer.in_stream {
                continue;
            }
            let gone = peer
                .down_since
                .is_some_and(|at| now >= at + self.options.down_grace);
            let lag = self.stream.issued.0.saturating_sub(peer.answered.0);
            let stale = lag > 0 && peer.answered.next() < self.stream.first;
            let far = lag > self.options.lag_writes_max
                || (lag > 0 && self.lag_bytes(peer) > self.options.lag_bytes_max);
            // Others had room for the write that it refused.
            let full = peer.full_at > Sequence(0) && peer.full_at <= self.stream.acknowledged;
            if (gone || stale || far || full) && self.may_go(peer.member.id) {
                self.leave_stream(n);
            }
        }
    }

    /// Bytes that are kept for the member at most: entries are in order, so what it lacks is their end.
    fn lag_bytes(&self, peer: &Peer) -> u64 {
        if self.stream.bytes <= self.options.lag_bytes_max {
            return 0;
        }
        let from = (peer.answered.0 + 1).saturating_sub(self.stream.first.0) as usize;
        let lacking = self.stream.entries.iter().skip(from);
        lacking.map(Entry::bytes).sum()
    }
}
