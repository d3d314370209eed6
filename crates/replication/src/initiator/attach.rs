//! A1–A4, A6, A7: fencing, adopting a configuration, choosing the source, starting the epoch.

use core::time::Duration;

use crate::configuration::{Configuration, Generation};
use crate::initiator::change::Proposal;
use crate::initiator::equalise::Equalise;
use crate::initiator::peer::Answer;
use crate::initiator::{Effect, Effects, Initiator, Phase};
use crate::message::Request;
use crate::values::{Block, Epoch, EpochNumber, Time};

/// State of an attach under way.
#[derive(Debug)]
pub(super) struct Attach<P> {
    /// When to look again.
    pub(super) timer: Time,
    /// No Fence is sent before this time (the pause of A1).
    begin_at: Time,
    /// Since when a quorum of the best configuration has answered (A6 counts from here).
    quorum_at: Option<Time>,
    /// Since when A2 could have been decided.
    ready_at: Option<Time>,
    best: Option<Configuration>,
    /// Indices of S; the source comes first (A3, A4).
    pub(super) set: Vec<usize>,
    pub(super) equalise: Equalise<P>,
    /// Torn blocks that no member has whole: written again before reads open (B2).
    pub(super) rewrite: Vec<Block>,
    /// The source or too much of S was lost: begin again.
    failed: bool,
}

impl<P> Default for Attach<P> {
    fn default() -> Attach<P> {
        Attach {
            timer: Time::NEVER,
            begin_at: Time(0),
            quorum_at: None,
            ready_at: None,
            best: None,
            set: Vec::new(),
            equalise: Equalise::default(),
            rewrite: Vec::new(),
            failed: false,
        }
    }
}

impl<P: Clone> Initiator<P> {
    /// A1: a number above every number seen, a fresh nonce, and Fence to everybody.
    pub(super) fn begin_attach(&mut self, now: Time, effects: &mut Effects<P>) {
        self.restart_attach(now, Duration::ZERO, effects);
    }

    pub(super) fn restart_attach(&mut self, now: Time, pause: Duration, effects: &mut Effects<P>) {
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
        for peer in &mut self.peers {
            peer.attached = false;
            peer.fenced = false;
            peer.answer = None;
            peer.config_sent = None;
            peer.renewed = None;
        }
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

    pub(super) fn send_fence(&mut self, now: Time, n: usize, effects: &mut Effects<P>) {
        if self.attach.begin_at > now {
            return;
        }
        self.peers[n].fence_sent = now;
        self.send(n, Request::Fence { epoch: self.epoch }, effects);
    }

    /// M1 was answered.
    pub(super) fn promised(
        &mut self,
        now: Time,
        n: usize,
        answer: Answer,
        effects: &mut Effects<P>,
    ) {
        if let Some(configuration) = &answer.state.configuration {
            self.highest = self.highest.max(configuration.epoch);
        }
        let sent_at = self.peers[n].fence_sent;
        let peer = &mut self.peers[n];
        peer.attached = true;
        peer.down_since = None;
        peer.config_sent = None;
        peer.renew(sent_at);
        peer.stored = answer
            .state
            .configuration
            .as_ref()
            .map(Configuration::order)
            .unwrap_or_default();
        match self.phase {
            Phase::Fencing => peer.answer = Some(answer),
            // A3: whoever answers later is fenced, but stands outside S.
            Phase::Equalising | Phase::WaitingLease => {}
            _ => self.rejoin(now, n, &answer, effects),
        }
    }

    /// A member is lost during an attach.
    pub(super) fn attach_lost(&mut self, n: usize) {
        if self.phase == Phase::Fencing {
            self.peers[n].answer = None;
            return;
        }
        if !matches!(self.phase, Phase::Equalising | Phase::WaitingLease) {
            return;
        }
        match self.attach.set.iter().position(|m| *m == n) {
            Some(0) => self.attach.failed = true,
            // A4: as many as can be equalised. The rest comes back by resync.
            Some(_) if self.phase == Phase::Equalising => {
                self.attach.set.retain(|m| *m != n);
                self.attach.equalise.forget(n);
            }
            _ => {}
        }
    }

    pub(super) fn advance_attach(&mut self, now: Time, effects: &mut Effects<P>) {
        if self.attach.failed {
            let pause = Duration::from_millis(10);
            self.restart_attach(now, pause, effects);
            return;
        }
        match self.phase {
            Phase::Fencing if self.attach.begin_at > now => {}
            Phase::Fencing => {
                if self.attach.begin_at > Time(0) {
                    self.fence_all(now, effects);
                }
                self.attach.timer = Time::NEVER;
                if self.decide(now) {
                    self.enter(Phase::Equalising);
                    self.begin_equalise(effects);
                    self.advance_equalise(now, effects);
                }
            }
            Phase::Equalising => self.advance_equalise(now, effects),
            Phase::WaitingLease => self.wait_lease(now, effects),
            _ => {}
        }
    }

    /// A2, A3: whether to go on, and with which configuration, source and S.
    fn decide(&mut self, now: Time) -> bool {
        let answers = || {
            self.peers
                .iter()
                .filter_map(|p| Some((p, p.answer.as_ref()?)))
        };
        let configurations = answers().filter_map(|(_, a)| a.state.configuration.as_ref());
        let Some(best) = configurations.max_by_key(|c| c.order()).cloned() else {
            return false;
        };
        let answered = |id| answers().any(|(p, _)| p.member.id == id);
        if !best.is_quorum(answered) {
            self.attach.quorum_at = None;
            self.attach.ready_at = None;
            return false;
        }
        let quorum_at = *self.attach.quorum_at.get_or_insert(now);
        let complete = |n: &usize| {
            let peer = &self.peers[*n];
            let in_sync = best.in_sync.contains(&peer.member.id);
            in_sync
                && peer
                    .answer
                    .as_ref()
                    .is_some_and(|a| a.state.state.is_complete())
        };
        let mut set: Vec<usize> = (0..self.peers.len()).filter(complete).collect();
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
        let last = |n: &usize| self.peers[*n].answer.as_ref().map(|a| a.state.last);
        set.sort_by_key(|n| core::cmp::Reverse(last(n)));
        // A6: only a member that did not answer can still be read by an older initiator.
        let silent = best.in_sync.iter().any(|id| !answered(*id));
        let lease = self.options.lease;
        let drift = lease * self.options.clock_drift_ppm / 1_000_000;
        self.attach.timer = if silent {
            quorum_at + lease + drift
        } else {
            now
        };
        self.attach.set = set;
        self.attach.best = Some(best);
        true
    }

    /// A6 and A7.
    pub(super) fn wait_lease(&mut self, now: Time, effects: &mut Effects<P>) {
        if now < self.attach.timer {
            return;
        }
        let Some(best) = self.attach.best.clone() else {
            return;
        };
        self.enter(Phase::Starting);
        let mut in_sync: Vec<_> = self
            .attach
            .set
            .iter()
            .map(|n| self.peers[*n].member.id)
            .collect();
        in_sync.sort();
        self.start.clone_from(&in_sync);
        let configuration = Configuration {
            epoch: self.epoch.number,
            generation: Generation(best.generation.0 + 1),
            in_sync,
            ..best
        };
        self.learn_members(&configuration);
        self.proposal = Some(Proposal::new(configuration));
        for n in 0..self.peers.len() {
            let in_stream = self.start.contains(&self.peers[n].member.id);
            let peer = &mut self.peers[n];
            peer.in_stream = in_stream;
            peer.sent = Default::default();
            peer.answered = Default::default();
        }
        self.attach.timer = Time::NEVER;
        self.send_configuration(now, effects);
    }

    /// Roles come from the configuration, not from what the shell thought.
    fn learn_members(&mut self, configuration: &Configuration) {
        for peer in &mut self.peers {
            let named = configuration.members.iter().chain(&configuration.previous);
            if let Some(member) = named.into_iter().find(|m| m.id == peer.member.id) {
                peer.member.role = member.role;
            }
        }
    }

    /// E1.
    pub(super) fn opened(&mut self, now: Time, effects: &mut Effects<P>) {
        self.enter(Phase::Open);
        for peer in &mut self.peers {
            peer.answer = None;
        }
        self.begin_rewrite(effects);
        effects.push_back(Effect::Opened { epoch: self.epoch });
        for n in 0..self.peers.len() {
            self.condition_changed(n, effects);
        }
        self.advance_open(now, effects);
    }

    pub(super) fn reconnect(&self, n: usize, effects: &mut Effects<P>) {
        effects.push_back(Effect::Reconnect {
            member: self.peers[n].member.id,
        });
    }
}
