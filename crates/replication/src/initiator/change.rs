//! C1–C5: one proposal at a time, sent in the order that keeps a volume recoverable, committed on a
//! quorum.

use crate::configuration::{Configuration, Generation, Role};
use crate::initiator::{Effect, Effects, Initiator, MemberCondition, Phase};
use crate::message::{Request, RequestId};
use crate::values::{EpochNumber, MemberId, Time};

/// A configuration on its way. Never withdrawn within the epoch (C1).
#[derive(Debug)]
pub(super) struct Proposal {
    pub(super) configuration: Configuration,
    /// Requests that carry it or the committed one.
    pub(super) order: (EpochNumber, Generation),
}

impl Proposal {
    pub(super) fn new(configuration: Configuration) -> Proposal {
        Proposal {
            order: configuration.order(),
            configuration,
        }
    }
}

impl<P: Clone> Initiator<P> {
    /// Whether the member may leave the in-sync set without it falling below `min_in_sync`.
    pub(super) fn may_leave(&self, member: MemberId) -> bool {
        let Some(c) = &self.committed else {
            return false;
        };
        let leaving = |id: &&MemberId| self.peers.iter().any(|p| p.member.id == **id && p.leaving);
        let stay = c.in_sync.len() - c.in_sync.iter().filter(leaving).count();
        c.in_sync.contains(&member) && stay > self.min_in_sync() && stay > 1
    }

    /// C2: makes the next configuration if one is wanted and C3 allows it.
    pub(super) fn propose(&mut self, _: Time, effects: &mut Effects<P>) {
        if self.proposal.is_some() {
            return;
        }
        let Some(c) = &self.committed else { return };
        let peer = |id: MemberId| self.peers.iter().find(|p| p.member.id == id);
        let leaves = |id: &MemberId| peer(*id).is_some_and(|p| p.leaving);
        let mut in_sync: Vec<_> = c.in_sync.iter().filter(|id| !leaves(id)).copied().collect();
        if in_sync.len() == c.in_sync.len() {
            let joins = |m: MemberId| {
                c.role_of(m) == Some(Role::Data)
                    && !c.in_sync.contains(&m)
                    && peer(m).is_some_and(|p| p.ready && p.in_stream && p.attached && !p.fenced)
            };
            let Some(new) = c.members.iter().map(|m| m.id).find(|m| joins(*m)) else {
                return;
            };
            in_sync.push(new);
            in_sync.sort();
        }
        if in_sync.is_empty() {
            return;
        }
        let generation = Generation(c.generation.0 + 1);
        let next = Configuration {
            generation,
            in_sync,
            ..c.clone()
        };
        // C3: every acknowledged write is on a write quorum of what remains, before anyone hears of it.
        let acknowledged = self.stream.acknowledged;
        let holds = |id: &&MemberId| peer(**id).is_some_and(|p| p.answered >= acknowledged);
        if next.in_sync.iter().filter(holds).count() < next.write_quorum() {
            return;
        }
        self.proposal = Some(Proposal::new(next));
        self.reads.recheck(
            &self.peers,
            self.proposal.as_ref().map(|p| &p.configuration),
        );
        let _ = effects;
    }

    /// The newest configuration of this epoch.
    fn newest(&self) -> Option<&Configuration> {
        self.proposal
            .as_ref()
            .map(|p| &p.configuration)
            .or(self.committed.as_ref())
    }

    /// Sends the newest configuration to everybody who lacks it, in C5's order.
    pub(super) fn send_configuration(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(newest) = self.newest() else { return };
        let order = newest.order();
        let lacks = |p: &super::Peer| {
            p.attached
                && !p.fenced
                && p.stored < order
                && p.config_sent.is_none_or(|(o, _)| o < order)
        };
        if !self.peers.iter().any(lacks) {
            return;
        }
        let newest = newest.clone();
        let (members, in_sync) = (newest.members.len(), newest.in_sync.len());
        // A majority could miss the new in-sync set: it must store the configuration first (C5).
        let quorum = members / 2 + 1;
        let could_miss = quorum + in_sync < members + newest.recovery_quorum();
        let all_stored = newest.in_sync.iter().all(|id| {
            self.peers
                .iter()
                .any(|p| p.member.id == *id && p.stored >= order)
        });
        for n in 0..self.peers.len() {
            let id = self.peers[n].member.id;
            if !lacks(&self.peers[n]) || !newest.names(id) {
                continue;
            }
            if could_miss && !all_stored && !newest.in_sync.contains(&id) {
                continue;
            }
            let request = Request::StoreConfig {
                id: config_request(order),
                configuration: newest.clone(),
                start: self.start.clone(),
            };
            self.peers[n].config_sent = Some((order, now));
            self.send(n, request, effects);
        }
    }

    /// Whether `id` was a StoreConfig, which is noted then.
    pub(super) fn config_done(&mut self, n: usize, id: RequestId) -> bool {
        let Some((order, sent_at)) = self.peers[n].config_sent else {
            return false;
        };
        if id != config_request(order) {
            return false;
        }
        let peer = &mut self.peers[n];
        peer.stored = peer.stored.max(order);
        peer.renew(sent_at);
        true
    }

    /// C5, E1: committed when a quorum has stored it.
    pub(super) fn try_commit(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(proposal) = &self.proposal else {
            return;
        };
        let order = proposal.order;
        let stored = |id| {
            self.peers
                .iter()
                .any(|p| p.member.id == id && p.stored >= order)
        };
        if !proposal.configuration.is_quorum(stored) {
            return;
        }
        let before = self.committed.take();
        self.committed = self.proposal.take().map(|p| p.configuration);
        let Some(committed) = &self.committed else {
            return;
        };
        let in_sync = committed.in_sync.clone();
        for n in 0..self.peers.len() {
            let peer = &mut self.peers[n];
            let is_in = in_sync.contains(&peer.member.id);
            let was_in = before
                .as_ref()
                .is_some_and(|c| c.in_sync.contains(&peer.member.id));
            if is_in {
                peer.ready = false;
                peer.resync = None;
            } else {
                peer.leaving = false;
            }
            if is_in != was_in && before.is_some() {
                self.condition_changed(n, effects);
            }
        }
        if self.phase == Phase::Starting {
            self.opened(now, effects);
        } else {
            // A smaller set may be all that waited; a next proposal may be due.
            self.acknowledge(now, effects);
            self.propose(now, effects);
            self.send_configuration(now, effects);
        }
    }

    /// Tells the shell how a member stands.
    pub(super) fn condition_changed(&self, n: usize, effects: &mut Effects<P>) {
        let member = self.peers[n].member.id;
        effects.push_back(Effect::MemberChanged {
            member,
            condition: self.condition(n),
        });
    }

    pub(super) fn condition(&self, n: usize) -> MemberCondition {
        let peer = &self.peers[n];
        let in_sync = self
            .committed
            .as_ref()
            .is_some_and(|c| c.in_sync.contains(&peer.member.id));
        match (peer.attached && !peer.fenced, in_sync) {
            (false, _) => MemberCondition::Down,
            (true, true) => MemberCondition::InSync,
            (true, false) if peer.member.role == Role::Witness => MemberCondition::InSync,
            (true, false) => MemberCondition::Resyncing,
        }
    }
}

/// Requests of configurations have ids of their own: above all others, one per configuration.
fn config_request(order: (EpochNumber, Generation)) -> RequestId {
    RequestId((1 << 63) | order.1.0)
}
