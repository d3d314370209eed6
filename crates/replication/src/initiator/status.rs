//! The attachment as others see it.

use crate::configuration::Configuration;
use crate::initiator::{Initiator, MemberStatus, Phase, Status};
use crate::values::{Epoch, Position, Time};

impl<P: Clone> Initiator<P> {
    /// Where the attachment stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Its epoch; while fencing, the one that is asked for.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Blocks of the volume: the fewest that a member named.
    pub fn size_blocks(&self) -> u64 {
        self.size_blocks
    }

    /// Sets the size after every replica has grown.
    pub fn grow(&mut self, size_blocks: u64) {
        self.size_blocks = self.size_blocks.max(size_blocks);
    }

    /// The committed configuration.
    pub fn configuration(&self) -> Option<&Configuration> {
        self.committed.as_ref()
    }

    /// The configuration on its way to be committed.
    pub fn proposed(&self) -> Option<&Configuration> {
        self.proposal.as_ref().map(|p| &p.configuration)
    }

    /// The newest acknowledged write.
    pub fn acknowledged(&self) -> Position {
        self.position(self.stream.acknowledged)
    }

    /// Whether reads may be served now (L2).
    pub fn has_lease(&self, now: Time) -> bool {
        self.phase == Phase::Open && self.lease_until().is_some_and(|until| now < until)
    }

    /// Everything for a status page.
    pub fn status(&self) -> Status {
        let c = self.committed.as_ref();
        let in_sync = c.map_or(0, |c| {
            let usable = |p: &&super::Peer| p.usable() && c.in_sync.contains(&p.member.id);
            self.peers.iter().filter(usable).count()
        });
        let enough =
            c.is_some_and(|c| in_sync >= c.write_quorum() && c.in_sync.len() >= self.min_in_sync());
        let member = |n: usize| {
            let peer = &self.peers[n];
            let lag = self.stream.issued.0.saturating_sub(peer.answered.0);
            let (resync_done, resync_total) = peer.resync.as_ref().map_or((0, 0), |r| r.progress());
            MemberStatus {
                id: peer.member.id,
                role: peer.member.role,
                condition: self.condition(n),
                connected: peer.usable(),
                lag_writes: if peer.in_stream { lag } else { 0 },
                resync_done,
                resync_total,
            }
        };
        Status {
            phase: self.phase,
            epoch: self.epoch,
            configuration: c.cloned(),
            waiting: self.phase == Phase::Open && !enough,
            acknowledged: self.acknowledged(),
            members: (0..self.peers.len())
                .filter(|n| !self.peers[*n].retired)
                .map(member)
                .collect(),
        }
    }
}
