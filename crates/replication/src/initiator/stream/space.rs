//! Writes that a member refuses. One that no member has room for fails with "no space", and B6 takes
//! its sequence back, so that the stream, and with it a discard that frees space, can go on.

use core::time::Duration;

use crate::faults::{Fault, is_broken};
use crate::initiator::peer::Peer;
use crate::initiator::{Effect, Effects, Initiator, IoError, Phase};
use crate::message::Refusal;
use crate::values::{Sequence, Time};

/// How long a member that had no room is left alone.
const FULL_RETRY: Duration = Duration::from_millis(500);
/// How long a member that an administrator evicted is left alone.
pub(in crate::initiator) const EVICTED_RETRY: Duration = Duration::from_secs(5);

impl<P: Clone> Initiator<P> {
    pub(in crate::initiator) fn write_refused(
        &mut self,
        now: Time,
        n: usize,
        sequence: Sequence,
        refusal: Refusal,
        effects: &mut Effects<P>,
    ) {
        if self.phase != Phase::Open {
            return;
        }
        let peer = &mut self.peers[n];
        // It was sent behind a write that was refused; the connection keeps the order, so these
        // refusals come before any answer to what is sent again.
        let is_stale = peer.stale_gaps > 0;
        if is_stale {
            peer.stale_gaps -= 1;
            self.take_back(now);
        }
        let peer = &mut self.peers[n];
        match refusal {
            Refusal::Fenced { promised } => {
                let member = peer.member.id;
                self.fenced(now, member, promised, effects);
            }
            Refusal::Gap { .. } if is_stale => {}
            Refusal::DeviceFull => self.no_room(now, n, sequence, effects),
            // It lost its place: begin again, which tells where it is.
            Refusal::Gap { .. } | Refusal::NotStarted => self.reconnect(now, n, effects),
            _ => {
                let pause = if refusal == Refusal::Evicted {
                    EVICTED_RETRY
                } else {
                    FULL_RETRY
                };
                if peer.in_stream {
                    self.leave_stream(n);
                    self.peers[n].enter_again_at = now + pause;
                    self.peers[n].retry_at = now + pause;
                }
            }
        }
    }

    /// A member has no room for a write.
    fn no_room(&mut self, now: Time, n: usize, sequence: Sequence, effects: &mut Effects<P>) {
        let counted = self.is_counted(self.peers[n].member.id);
        let peer = &mut self.peers[n];
        if sequence <= peer.answered || sequence > peer.in_flight {
            return;
        }
        peer.stale_gaps += peer.in_flight.0 - sequence.0;
        peer.stale_upto = peer.in_flight;
        peer.in_flight = Sequence(sequence.0 - 1);
        peer.sent = peer.in_flight;
        peer.full_at = sequence;
        peer.retry_at = now + FULL_RETRY;
        if !counted {
            self.leave_stream(n);
            return;
        }
        if sequence <= self.stream.acknowledged || self.can_still_hold(sequence) {
            return;
        }
        let entry = self.stream.index(sequence);
        if let Some(entry) = entry.and_then(|index| self.stream.entries.get_mut(index))
            && let Some(ticket) = entry.ticket.take()
        {
            self.stream.tickets -= 1;
            effects.push_back(Effect::WriteDone {
                ticket,
                result: Err(IoError::NoSpace),
            });
        }
        self.stream.refused = Some(sequence);
        self.take_back(now);
    }

    /// Whether a write quorum may still take the write: enough have not refused it.
    fn can_still_hold(&self, sequence: Sequence) -> bool {
        let Some(c) = &self.committed else {
            return true;
        };
        let full = |p: &&Peer| {
            c.in_sync.contains(&p.member.id) && p.full_at == sequence && p.answered < sequence
        };
        c.in_sync.len() - self.peers.iter().filter(full).count() >= c.write_quorum()
    }

    /// B6: gives the sequence of a write that nobody has room for to the next one, if nobody holds it or
    /// one behind it and nobody can get one any more: they were refused wherever they were sent, and never
    /// sent on a connection that was lost. Otherwise it stays undecided in the stream (W3) until there is room.
    fn take_back(&mut self, now: Time) {
        let Some(sequence) = self.stream.refused else {
            return;
        };
        if sequence <= self.stream.acknowledged || self.can_still_hold(sequence) {
            self.stream.refused = None;
            return;
        }
        let nowhere = |p: &Peer| {
            p.took < sequence && p.in_flight < sequence && p.lost < sequence && p.stale_gaps == 0
        };
        if !self.peers.iter().all(nowhere) && !is_broken(Fault::TakeBackAlways) {
            return;
        }
        let index = self.stream.index(sequence);
        let Some(entry) = index.and_then(|index| self.stream.entries.remove(index)) else {
            return;
        };
        self.stream.refused = None;
        self.stream.bytes -= entry.bytes();
        self.stream.open_bytes -= entry.bytes();
        self.stream.issued = Sequence(self.stream.issued.0 - 1);
        for n in 0..self.peers.len() {
            let peer = &mut self.peers[n];
            if peer.in_stream && peer.answered >= sequence {
                // A resync that began behind it: its `last` names a sequence that is used anew.
                self.leave_stream(n);
                continue;
            }
            if peer.full_at == sequence {
                peer.full_at = Sequence(0);
                peer.retry_at = now;
            }
            peer.sent = peer.sent.min(Sequence(sequence.0 - 1));
        }
        self.reads.taken_back(self.stream.issued);
    }
}
