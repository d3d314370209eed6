//! C1–C5: one proposal at a time, sent in the order that keeps a volume recoverable, committed on a
//! quorum.

use core::time::Duration;

use crate::configuration::{Configuration, Generation, Role};
use crate::faults::{Fault, is_broken};
use crate::initiator::peer::{ConfigSent, Peer};
use crate::initiator::{Effect, Effects, Initiator, MemberCondition, Phase};
use crate::message::{Request, RequestId};
use crate::values::{EpochNumber, MemberId, Time};

/// Pause before a configuration is sent again to a member that refused it (a closed device).
const CONFIG_RETRY: Duration = Duration::from_millis(500);

/// A configuration on its way. Never withdrawn within the epoch (C1).
#[derive(Debug)]
pub(super) struct Proposal {
    pub(super) configuration: Configuration,
    order: (EpochNumber, Generation),
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

    /// C2, C6: makes the next configuration if one is wanted and C3 allows it.
    pub(super) fn propose(&mut self) {
        if self.proposal.is_some() {
            return;
        }
        let Some(c) = &self.committed else { return };
        let Some(next) = self.next_configuration(c) else {
            return;
        };
        // C3: every acknowledged write is on a write quorum of what remains, before anyone hears of it.
        let acknowledged = self.stream.acknowledged;
        let holds = |id: &&MemberId| self.peer(**id).is_some_and(|p| p.answered >= acknowledged);
        let holders = next.in_sync.iter().filter(holds).count();
        if holders < next.write_quorum() && !is_broken(Fault::ProposeUnguarded) {
            return;
        }
        if next.members != c.members {
            self.change
                .iter_mut()
                .for_each(|change| change.is_proposed = true);
        }
        self.reads.recheck(&self.peers, &next);
        self.proposal = Some(Proposal::new(next));
    }

    /// Who leaves comes first: a dead member must not hold up what follows.
    fn next_configuration(&self, c: &Configuration) -> Option<Configuration> {
        let next = |in_sync| Configuration {
            generation: Generation(c.generation.0 + 1),
            in_sync,
            ..c.clone()
        };
        if let Some(in_sync) = self.without_leaving(c) {
            return Some(next(in_sync));
        }
        if !c.previous.is_empty() {
            // C6: the follow-up, also of a change that an attach found.
            return Some(Configuration {
                previous: Vec::new(),
                ..next(c.in_sync.clone())
            });
        }
        if let Some(changed) = self.with_members_changed(c) {
            return Some(changed);
        }
        self.with_ready(c).map(next)
    }

    fn peer(&self, id: MemberId) -> Option<&Peer> {
        self.peers.iter().find(|p| p.member.id == id)
    }

    /// The in-sync set without those that leave. None: nobody does.
    fn without_leaving(&self, c: &Configuration) -> Option<Vec<MemberId>> {
        let leaves = |id: &&MemberId| self.peer(**id).is_some_and(|p| p.leaving);
        if !c.in_sync.iter().any(|id| leaves(&id)) {
            return None;
        }
        let mut in_sync: Vec<_> = c.in_sync.iter().filter(|id| !leaves(id)).copied().collect();
        if in_sync.is_empty() {
            // All refuse writes. C2: never empty; the one that holds most stays.
            let holds = |id: &&MemberId| self.peer(**id).map(|p| p.answered);
            in_sync.extend(c.in_sync.iter().max_by_key(holds));
        }
        (in_sync.len() < c.in_sync.len()).then_some(in_sync)
    }

    /// The in-sync set with one more that fulfils R5.
    fn with_ready(&self, c: &Configuration) -> Option<Vec<MemberId>> {
        let joins = |m: &MemberId| {
            c.role_of(*m) == Some(Role::Data)
                && !c.in_sync.contains(m)
                && self.peer(*m).is_some_and(Peer::is_ready)
        };
        let new = c.members.iter().map(|m| m.id).find(joins)?;
        let mut in_sync = c.in_sync.clone();
        in_sync.push(new);
        in_sync.sort();
        Some(in_sync)
    }

    /// The newest configuration of this epoch.
    pub(super) fn newest(&self) -> Option<&Configuration> {
        self.proposal
            .as_ref()
            .map(|p| &p.configuration)
            .or(self.committed.as_ref())
    }

    /// Sends the newest configuration to everybody who lacks it, in C5's order.
    pub(super) fn send_configuration(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(newest) = self.newest() else { return };
        let order = newest.order();
        let lacks = |p: &Peer| {
            p.usable()
                && p.stored < order
                && p.config_again_at <= now
                && p.config_sent.is_none_or(|sent| sent.order < order)
                && newest.names(p.member.id)
        };
        if !self.peers.iter().any(lacks) {
            return;
        }
        let outside_may_have_it = self.may_send_outside(newest);
        let goes_to =
            |p: &Peer| lacks(p) && (outside_may_have_it || newest.in_sync.contains(&p.member.id));
        let newest = newest.clone();
        let targets: Vec<usize> = (0..self.peers.len())
            .filter(|n| goes_to(&self.peers[*n]))
            .collect();
        for n in targets {
            let id = self.id();
            self.peers[n].config_sent = Some(ConfigSent { id, order, at: now });
            let request = Request::StoreConfig {
                id,
                configuration: newest.clone(),
                start: self.start.clone(),
            };
            self.send(n, request, effects);
        }
    }

    /// C5: where a majority could miss the new in-sync set, that set must have stored it first (holes 14).
    fn may_send_outside(&self, p: &Configuration) -> bool {
        // The follow-up of a change of members asks no more of an attach than what is committed.
        let joint = self.committed.as_ref().filter(|c| !c.previous.is_empty());
        if p.previous.is_empty() && joint.is_some_and(|c| c.in_sync == p.in_sync) {
            return true;
        }
        let (members, in_sync) = (p.members.len(), p.in_sync.len());
        let quorum = members / 2 + 1;
        let could_miss = quorum + in_sync < members + p.recovery_quorum();
        let has_stored = |id: &MemberId| self.peer(*id).is_some_and(|m| m.stored >= p.order());
        !could_miss || p.in_sync.iter().all(has_stored) || is_broken(Fault::AnyOrder)
    }

    /// Whether `id` was a StoreConfig, which is noted then.
    pub(super) fn config_done(&mut self, n: usize, id: RequestId) -> bool {
        let peer = &mut self.peers[n];
        let Some(sent) = peer.config_sent.filter(|sent| sent.id == id) else {
            return false;
        };
        peer.stored = peer.stored.max(sent.order);
        // L1: from the sending, not from the commit.
        peer.renew(if is_broken(Fault::LeaseFromAnswer) {
            self.seen
        } else {
            sent.at
        });
        true
    }

    /// The member could not store a configuration; it is tried again.
    pub(super) fn config_refused(&mut self, now: Time, n: usize, id: RequestId) {
        let peer = &mut self.peers[n];
        if peer.config_sent.is_some_and(|sent| sent.id == id) {
            peer.config_sent = None;
            peer.config_again_at = now + CONFIG_RETRY;
        }
    }

    /// When a refused configuration is sent again.
    pub(super) fn config_timer(&self) -> Time {
        let paused = self.peers.iter().filter(|p| p.usable());
        let times = paused
            .map(|p| p.config_again_at)
            .filter(|at| *at > self.seen);
        times.min().unwrap_or(Time::NEVER)
    }

    /// C5, E1: committed when a quorum has stored it.
    pub(super) fn try_commit(&mut self, now: Time, effects: &mut Effects<P>) {
        let Some(proposal) = &self.proposal else {
            return;
        };
        let order = proposal.order;
        let stored = |id| self.peer(id).is_some_and(|p| p.stored >= order);
        let commits = proposal.configuration.is_quorum(stored)
            || is_broken(Fault::CommitSingle) && proposal.configuration.is_majority(stored);
        if !commits {
            return;
        }
        let before = self.committed.take();
        self.committed = self.proposal.take().map(|p| p.configuration);
        self.apply_commit(before.as_ref(), effects);
        if let Some(before) = &before {
            self.note_members(before, effects);
        }
        if self.phase == Phase::Starting {
            self.opened(now, effects);
        } else {
            // A smaller set may be all that waited; a next proposal may be due.
            self.acknowledge(now, effects);
            self.propose();
            self.send_configuration(now, effects);
        }
    }

    fn apply_commit(&mut self, before: Option<&Configuration>, effects: &mut Effects<P>) {
        let Some(committed) = self.committed.clone() else {
            return;
        };
        let newcomer = self.newcomer();
        let in_sync = &committed.in_sync;
        for n in 0..self.peers.len() {
            let peer = &mut self.peers[n];
            let is_in = in_sync.contains(&peer.member.id);
            let was_in = before.is_some_and(|c| c.in_sync.contains(&peer.member.id));
            if is_in {
                peer.ready = false;
                peer.resync = None;
            } else {
                peer.leaving = false;
                if committed.role_of(peer.member.id).is_none() && newcomer != Some(peer.member.id) {
                    // C6: a removed member only stores configurations from here on.
                    peer.resync = None;
                    peer.ready = false;
                }
                // Outside the set only a resync puts a member into the stream (R2).
                peer.in_stream &= peer.resync.is_some();
            }
            if is_in != was_in && before.is_some() {
                self.condition_changed(n, effects);
            }
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
        match (peer.usable(), in_sync) {
            (false, _) => MemberCondition::Down,
            (true, true) => MemberCondition::InSync,
            (true, false) if peer.member.role == Role::Witness => MemberCondition::InSync,
            (true, false) => MemberCondition::Resyncing,
        }
    }
}
