//! A6, A7, E1: waiting for a lease to run out, sending the first configuration, opening.

use crate::configuration::{Configuration, Generation};
use crate::faults::{Fault, is_broken};
use crate::initiator::change::Proposal;
use crate::initiator::{Effect, Effects, Initiator, Phase};
use crate::values::{MemberId, Time};

impl<P: Clone> Initiator<P> {
    /// A6 ends before A7 sends anything (holes 9).
    pub(super) fn wait_lease(&mut self, now: Time, effects: &mut Effects<P>) {
        self.attach.timer = self.attach.lease_wait_until;
        if now < self.attach.lease_wait_until {
            return;
        }
        let Some(best) = self.attach.best.take() else {
            return;
        };
        self.enter(Phase::Starting);
        self.attach.timer = Time::NEVER;
        let set = self.attach.set.iter();
        let mut start: Vec<MemberId> = set.map(|n| self.peers[*n].member.id).collect();
        start.sort();
        let mut in_sync = start.clone();
        if is_broken(Fault::KeepAbsent) {
            let silent = |id: &&MemberId| {
                !start.contains(id)
                    && !self
                        .peers
                        .iter()
                        .any(|p| p.member.id == **id && p.answer.is_some())
            };
            in_sync.extend(best.in_sync.iter().filter(silent));
            in_sync.sort();
        }
        self.start = start;
        let previous = if is_broken(Fault::AttachSingle) {
            Vec::new()
        } else {
            best.previous
        };
        let configuration = Configuration {
            epoch: self.epoch.number,
            generation: Generation(best.generation.0 + 1),
            in_sync,
            previous,
            ..best
        };
        self.learn_roles(&configuration);
        self.proposal = Some(Proposal::new(configuration));
        for peer in &mut self.peers {
            peer.in_stream = self.start.contains(&peer.member.id);
        }
        self.send_configuration(now, effects);
        self.try_commit(now, effects);
    }

    /// Roles come from the configuration, not from what the shell thought.
    fn learn_roles(&mut self, configuration: &Configuration) {
        for peer in &mut self.peers {
            let mut named = configuration.members.iter().chain(&configuration.previous);
            if let Some(member) = named.find(|m| m.id == peer.member.id) {
                peer.member.role = member.role;
            }
        }
    }

    /// E1.
    pub(in crate::initiator) fn opened(&mut self, now: Time, effects: &mut Effects<P>) {
        self.enter(Phase::Open);
        self.attempts = 0;
        for peer in &mut self.peers {
            peer.answer = None;
        }
        effects.push_back(Effect::Opened { epoch: self.epoch });
        for n in 0..self.peers.len() {
            self.condition_changed(n, effects);
        }
        self.advance_open(now, effects);
    }
}
