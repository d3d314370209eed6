//! Members of the stream: catching up after a reconnect, leaving when too far behind, coming back.

use core::time::Duration;

use crate::initiator::peer::{Answer, Peer};
use crate::initiator::{Effects, Initiator};
use crate::message::Request;
use crate::values::{MemberId, Sequence, Time};

/// How long a member that is to leave the in-sync set, and could not, gets no writes.
const ENTER_AGAIN: Duration = Duration::from_millis(500);

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
        let again_at = self.seen + ENTER_AGAIN;
        let peer = &mut self.peers[n];
        peer.in_stream = false;
        peer.ready = false;
        peer.resync = None;
        peer.leaving = counted;
        // If C3 or C2 keeps it in the set, the stream may need it.
        peer.enter_again_at = again_at;
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
            let far = self.is_far_behind(peer);
            // Others had room for the write that it refused.
            let full = peer.full_at > Sequence(0) && peer.full_at <= self.stream.acknowledged;
            if (gone || stale || far || full) && self.may_go(peer.member.id) {
                self.leave_stream(n);
            }
        }
    }

    /// When a member is tried again, or has been down for too long.
    pub(super) fn members_timer(&self) -> Time {
        let lacks = |p: &&Peer| p.in_stream && p.sent < self.stream.issued;
        let retries = self.peers.iter().filter(|p| p.usable());
        let retry = retries.clone().filter(lacks).map(|p| p.retry_at);
        let again = retries.filter(|p| p.leaving).map(|p| p.enter_again_at);
        let in_stream = self.peers.iter().filter(|p| p.in_stream);
        let gone = in_stream
            .filter(|p| self.may_go(p.member.id))
            .filter_map(|p| Some(p.down_since? + self.options.down_grace));
        let times = retry.chain(again).chain(gone);
        // What was due and did nothing waits for something else than time.
        times
            .filter(|at| *at > self.seen)
            .min()
            .unwrap_or(Time::NEVER)
    }

    /// Whether so much is kept for the member that it has to leave. Looked at after every answer, so it
    /// takes no longer with more writes: whoever holds the front of the queue lacks all of it, and with
    /// its leave the next one holds the front.
    pub(super) fn is_far_behind(&self, peer: &Peer) -> bool {
        let lag = self.stream.issued.0.saturating_sub(peer.answered.0);
        let holds_front = lag > 0 && peer.answered.next() <= self.stream.first;
        peer.in_stream
            && (lag > self.options.lag_writes_max
                || (holds_front && self.stream.bytes > self.options.lag_bytes_max))
    }
}
