//! What the initiator knows of a member.

use crate::configuration::{Generation, Member, MemberState};
use crate::faults::{Fault, is_broken};
use crate::initiator::resync::Resync;
use crate::message::{BlockPosition, RequestId};
use crate::values::{EpochNumber, Pass, Sequence, Time};

/// What a member answered to Fence before A2 was decided.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) state: MemberState,
    pub(super) torn: Vec<BlockPosition>,
}

/// A StoreConfig on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConfigSent {
    pub(super) id: RequestId,
    pub(super) order: (EpochNumber, Generation),
    pub(super) at: Time,
}

/// A member.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) member: Member,
    /// The connection is up.
    pub(super) up: bool,
    /// It has promised the epoch on this connection: requests may be sent.
    pub(super) attached: bool,
    /// It has promised a newer epoch (C7).
    pub(super) fenced: bool,
    /// It refuses the volume's key.
    pub(super) unauthenticated: bool,
    /// When the Fence was sent that it has not answered; for the lease (L1).
    pub(super) fence_sent: Time,
    /// When Fence is sent again after a refusal that may pass.
    pub(super) fence_again_at: Time,
    pub(super) answer: Option<Answer>,
    /// Blocks that it called torn when it last promised (B2); for its resync.
    pub(super) torn: Vec<BlockPosition>,
    /// The newest configuration that it has stored, by its answers.
    pub(super) stored: (EpochNumber, Generation),
    /// The newest configuration that was sent on this connection.
    pub(super) config_sent: Option<ConfigSent>,
    /// It refused a configuration; none is sent before that time.
    pub(super) config_again_at: Time,
    /// It gets the writes.
    pub(super) in_stream: bool,
    /// The newest write that it has or that was sent to it on this connection.
    pub(super) sent: Sequence,
    /// The newest write that it holds, by its answers. A fact, also after it was fenced (W2). A
    /// resync sets it to s0.
    pub(super) answered: Sequence,
    /// The newest write that it took from the stream in this epoch; no resync changes it.
    pub(super) took: Sequence,
    /// The newest write sent on this connection that it has not refused.
    pub(super) in_flight: Sequence,
    /// The newest write sent on a connection that was lost before it was answered.
    pub(super) lost: Sequence,
    /// Gaps that it will report because a write before them was refused.
    pub(super) stale_gaps: u64,
    /// The newest write that it will refuse so.
    pub(super) stale_upto: Sequence,
    /// The write that it refused for want of space and that was not sent again; else zero.
    pub(super) full_at: Sequence,
    /// No writes or resync are sent before this time.
    pub(super) retry_at: Time,
    /// When it is tried again as a member of the stream although it is to leave.
    pub(super) enter_again_at: Time,
    /// When it went down.
    pub(super) down_since: Option<Time>,
    /// It is to leave the in-sync set.
    pub(super) leaving: bool,
    /// MarkComplete was answered and it has followed the stream since (R5).
    pub(super) ready: bool,
    pub(super) last_pass: Pass,
    pub(super) resync: Option<Resync>,
    /// No configuration names it any more; its place is free.
    pub(super) retired: bool,
    /// Sending time of the newest request that counts for the lease and was answered (L1).
    pub(super) renewed: Option<Time>,
}

impl Peer {
    pub(super) fn new(member: Member) -> Peer {
        Peer {
            member,
            up: false,
            attached: false,
            fenced: false,
            unauthenticated: false,
            fence_sent: Time(0),
            fence_again_at: Time::NEVER,
            answer: None,
            torn: Vec::new(),
            stored: Default::default(),
            config_sent: None,
            config_again_at: Time(0),
            in_stream: false,
            sent: Sequence(0),
            answered: Sequence(0),
            took: Sequence(0),
            in_flight: Sequence(0),
            lost: Sequence(0),
            stale_gaps: 0,
            stale_upto: Sequence(0),
            full_at: Sequence(0),
            retry_at: Time(0),
            enter_again_at: Time::NEVER,
            down_since: None,
            leaving: false,
            ready: false,
            last_pass: Pass(0),
            resync: None,
            retired: false,
            renewed: None,
        }
    }

    /// Requests may be sent to it.
    pub(super) fn usable(&self) -> bool {
        self.attached && !self.fenced
    }

    /// R5: it may be proposed as in sync.
    pub(super) fn is_ready(&self) -> bool {
        let early = is_broken(Fault::ProposeEarly) && self.resync.is_some();
        (self.ready || early) && self.in_stream && self.usable()
    }

    /// A new epoch is asked for: nothing of the older one counts any more.
    pub(super) fn begin_epoch(&mut self) {
        let (up, member, down_since) = (self.up, self.member, self.down_since);
        *self = Peer {
            up,
            down_since,
            ..Peer::new(member)
        };
    }

    /// Counts a request that was sent then and is answered now.
    pub(super) fn renew(&mut self, sent_at: Time) {
        self.renewed = Some(self.renewed.map_or(sent_at, |before| before.max(sent_at)));
    }

    /// A write goes out to it.
    pub(super) fn sending(&mut self, sequence: Sequence) {
        self.sent = sequence;
        self.in_flight = sequence;
        self.full_at = Sequence(0);
    }

    /// The connection is gone, and all that was under way on it may still arrive or not (B5).
    pub(super) fn disconnect(&mut self, now: Time) {
        self.up = false;
        self.attached = false;
        self.config_sent = None;
        self.config_again_at = Time(0);
        self.resync = None;
        self.ready = false;
        if self.in_flight > self.took {
            self.lost = self.lost.max(self.in_flight);
        }
        if self.stale_gaps > 0 {
            self.lost = self.lost.max(self.stale_upto);
        }
        self.in_flight = Sequence(0);
        self.stale_gaps = 0;
        self.full_at = Sequence(0);
        if self.down_since.is_none() {
            self.down_since = Some(now);
        }
    }
}
