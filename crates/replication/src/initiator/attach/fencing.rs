//! A1–A4: fencing, the newest configuration, the source, and S.

use core::cmp::Reverse;
use core::time::Duration;

use crate::configuration::Configuration;
use crate::faults::{Fault, is_broken};
use crate::initiator::peer::{Answer, Peer};
use crate::initiator::{Effects, Initiator, OverReason, Phase};
use crate::message::Request;
use crate::values::{Epoch, EpochNumber, MemberId, Time};

use super::Attach;

impl<P: Clone> Initiator<P> {
    /// A1: a number above every number seen, a fresh nonce, and Fence to everybody.
    pub(in crate::initiator) fn begin_attach(&mut self, now: Time, effects: &mut Effects<P>) {
        self.restart_attach(now, Duration::ZERO, effects);
    }

    pub(in crate::initiator) fn restart_attach(
        &mut self,
        now: Time,
        pause: Duration,
        effects: &mut Effects<P>,
    ) {
        if self.highest >= EpochNumber::MAX {
            // 2²⁴ attachments: only a member that names a number it never promised gets here.
            self.over(OverReason::Fenced { by: self.highest }, effects);
            return;
        }
        self.enter(Phase::Fencing);
        self.highest = EpochNumber(self.highest.0 + 1);
        self.epoch = Epoch {
            number: self.highest,
            nonce: self.random(),
        };
        self.attach = Attach {
            begin_at: now + pause,
            timer: now + pause,
            ..Attach::default()
        };
        self.proposal = None;
        self.start.clear();
        self.peers.iter_mut().for_each(Peer::begin_epoch);
        if pause.is_zero() {
            self.fence_all(now, effects);
        }
    }

    fn fence_all(&mut self, now: Time, effects: &mut Effects<P>) {
        self.attach.begin_at = Time(0);
        self.attach.timer = Time::NEVER;
        for n in 0..self.peers.len() {
            if self.peers[n].up {
                self.send_fence(now, n, effects);
            }
        }
    }

    pub(in crate::initiator) fn send_fence(
        &mut self,
        now: Time,
        n: usize,
        effects: &mut Effects<P>,
    ) {
        self.peers[n].fence_again_at = Time::NEVER;
        if self.attach.begin_at > now {
            return;
        }
        self.peers[n].fence_sent = now;
        self.send(n, Request::Fence { epoch: self.epoch }, effects);
    }

    /// M1 was answered.
    pub(in crate::initiator) fn promised(
        &mut self,
        now: Time,
        n: usize,
        answer: Answer,
        effects: &mut Effects<P>,
    ) {
        if let Some(configuration) = &answer.state.configuration {
            self.highest = self.highest.max(configuration.epoch);
        }
        let peer = &mut self.peers[n];
        peer.attached = true;
        peer.unauthenticated = false;
        peer.down_since = None;
        peer.config_sent = None;
        // L1.
        let from_answer = is_broken(Fault::LeaseFromAnswer);
        peer.renew(if from_answer { now } else { peer.fence_sent });
        let stored = answer.state.configuration.as_ref();
        peer.stored = stored.map(Configuration::order).unwrap_or_default();
        peer.torn.clone_from(&answer.torn);
        match self.phase {
            Phase::Fencing => {
                let found = answer.state.configuration.clone();
                peer.answer = Some(answer);
                if let Some(found) = found {
                    self.learn_members(&found, effects);
                }
            }
            // A3: whoever answers later is fenced, but stands outside S.
            Phase::Equalising | Phase::WaitingLease => {}
            _ => self.rejoin(now, n, &answer, effects),
        }
    }

    pub(super) fn advance_fencing(&mut self, now: Time, effects: &mut Effects<P>) {
        if self.attach.begin_at > now {
            return;
        }
        if self.attach.begin_at > Time(0) {
            self.fence_all(now, effects);
        }
        self.attach.timer = Time::NEVER;
        if self.decide(now) {
            self.enter(Phase::Equalising);
            self.attach.timer = now + self.options.equalise_wait;
            self.begin_equalise(effects);
            self.advance_equalise(now, effects);
        }
    }

    /// A2, A3: whether to go on, and with which configuration, source and S.
    fn decide(&mut self, now: Time) -> bool {
        let Some(best) = self.newest_found().cloned() else {
            return false;
        };
        let answered = |id: MemberId| {
            self.peers
                .iter()
                .any(|p| p.member.id == id && p.answer.is_some())
        };
        let is_quorum = best.is_quorum(answered)
            || is_broken(Fault::AttachSingle) && best.is_majority(answered);
        if !is_quorum {
            self.attach.quorum_at = None;
            self.attach.ready_at = None;
            return false;
        }
        let complete = |n: &usize| {
            let peer = &self.peers[*n];
            let answer = peer.answer.as_ref();
            best.in_sync.contains(&peer.member.id)
                && answer.is_some_and(|a| a.state.state.is_complete())
        };
        let mut set: Vec<usize> = (0..self.peers.len()).filter(complete).collect();
        // A6: only a member that did not answer can still be read by an older initiator.
        let silent = best.in_sync.iter().any(|id| !answered(*id));
        // Of this configuration: a newer one that changes the members has another quorum.
        let since = self.attach.quorum_at.filter(|(c, _)| *c == best.order());
        let (_, quorum_at) = *self
            .attach
            .quorum_at
            .insert(since.unwrap_or((best.order(), now)));
        if set.len() < best.recovery_quorum() {
            self.attach.ready_at = None;
            return false;
        }
        let ready_at = *self.attach.ready_at.get_or_insert(now);
        // A2: each one that is missing now leaves the in-sync set, so wait a little for it.
        if set.len() < best.in_sync.len() && now < ready_at + self.options.attach_wait {
            self.attach.timer = ready_at + self.options.attach_wait;
            return false;
        }
        // A3. Of several with the same `last` one that has nothing torn saves work.
        set.sort_by_key(|n| {
            let answer = self.peers[*n].answer.as_ref();
            (
                Reverse(answer.map(|a| a.state.last)),
                answer.map_or(0, |a| a.torn.len()),
            )
        });
        let lease = self.options.lease;
        // B: the rates of two clocks differ by a bounded amount (L1).
        let drift = lease * self.options.clock_drift_ppm / 1_000_000;
        self.attach.lease_wait_until = if silent && !is_broken(Fault::NoLeaseWait) {
            quorum_at + lease + drift
        } else {
            now
        };
        self.attach.set = set;
        self.attach.best = Some(best);
        true
    }

    /// A2: ordered by (epoch, generation).
    fn newest_found(&self) -> Option<&Configuration> {
        let answers = self.peers.iter().filter_map(|p| p.answer.as_ref());
        let configurations = answers.filter_map(|a| a.state.configuration.as_ref());
        if is_broken(Fault::GenerationOnly) {
            return configurations.max_by_key(|c| c.generation);
        }
        configurations.max_by_key(|c| c.order())
    }
}
