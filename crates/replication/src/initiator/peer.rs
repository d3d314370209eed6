//! What the initiator knows of a member.

use crate::configuration::{Generation, Member, MemberState};
use crate::initiator::resync::Resync;
use crate::message::BlockPosition;
use crate::values::{EpochNumber, Pass, Sequence, Time};

/// What a member answered to Fence before A2 was decided.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) state: MemberState,
    pub(super) torn: Vec<BlockPosition>,
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
    /// When the Fence was sent that it has not answered; for the lease (L1).
    pub(super) fence_sent: Time,
    pub(super) answer: Option<Answer>,
    /// The newest configuration that it has stored, by its answers.
    pub(super) stored: (EpochNumber, Generation),
    /// The newest configuration that was sent on this connection, and when.
    pub(super) config_sent: Option<((EpochNumber, Generation), Time)>,
    /// It gets the writes.
    pub(super) in_stream: bool,
    /// The newest write sent to it on this connection.
    pub(super) sent: Sequence,
    /// The newest write that it has answered. A fact, also after it was fenced (W2).
    pub(super) answered: Sequence,
    /// The newest write that it refused for want of space.
    pub(super) full_at: Sequence,
    /// No writes or resync are sent before this time.
    pub(super) retry_at: Time,
    /// When it went down.
    pub(super) down_since: Option<Time>,
    /// It is to leave the in-sync set.
    pub(super) leaving: bool,
    /// MarkComplete was answered and it has followed the stream since (R5).
    pub(super) ready: bool,
    pub(super) last_pass: Pass,
    pub(super) resync: Option<Resync>,
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
            fence_sent: Time(0),
            answer: None,
            stored: Default::default(),
            config_sent: None,
            in_stream: false,
            sent: Sequence(0),
            answered: Sequence(0),
            full_at: Sequence(0),
            retry_at: Time(0),
            down_since: None,
            leaving: false,
            ready: false,
            last_pass: Pass(0),
            resync: None,
            renewed: None,
        }
    }

    /// Counts a request that was sent then and is answered now.
    pub(super) fn renew(&mut self, sent_at: Time) {
        self.renewed = Some(self.renewed.map_or(sent_at, |before| before.max(sent_at)));
    }

    /// The connection is gone, and all that was under way on it.
    pub(super) fn disconnect(&mut self, now: Time) {
        self.up = false;
        self.attached = false;
        self.config_sent = None;
        self.resync = None;
        self.ready = false;
        if self.down_since.is_none() {
            self.down_since = Some(now);
        }
    }
}
