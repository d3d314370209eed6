//! L1, L2: the lease under which reads are served.

use crate::initiator::Initiator;
use crate::values::{MEMBERS_MAX, MemberId, Time};

impl<P: Clone> Initiator<P> {
    /// Until when reads may be served: L from the sending of the newest requests that a quorum of the
    /// committed configuration has answered in this epoch.
    pub(super) fn lease_until(&self) -> Option<Time> {
        let c = self.committed.as_ref()?;
        // A configuration names no more than that, the previous members included.
        let mut times = [Time(0); MEMBERS_MAX * 2];
        let mut count = 0;
        for peer in &self.peers {
            if let Some(renewed) = peer.renewed
                && c.names(peer.member.id)
            {
                times[count] = renewed;
                count += 1;
            }
        }
        // The latest time at which a quorum had renewed.
        let times = &mut times[..count];
        times.sort_unstable_by(|a, b| b.cmp(a));
        let since = |id: MemberId, at: Time| {
            self.peers
                .iter()
                .any(|p| p.member.id == id && p.renewed.is_some_and(|r| r >= at))
        };
        let quorum = times.iter().find(|at| c.is_quorum(|id| since(id, **at)))?;
        Some(*quorum + self.options.lease)
    }
}
