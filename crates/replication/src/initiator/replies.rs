//! Connections that come and go, and what members answer, handed to the part that asked.

use core::time::Duration;

use crate::configuration::Role;
use crate::initiator::peer::Answer;
use crate::initiator::{ChangeRefusal, Effect, Effects, FENCE_RETRY, Initiator, OverReason, Phase};
use crate::message::{ReadData, ReadError, Refusal, Reply, RequestId};
use crate::values::{EpochNumber, MemberId, Time};

/// The shortest pause of an attach that was refused by number; it doubles with every refusal.
const ATTACH_PAUSE: Duration = Duration::from_millis(50);
/// It doubles so many times at most.
const ATTACH_DOUBLINGS_MAX: u32 = 7;

impl<P: Clone> Initiator<P> {
    pub(super) fn up(&mut self, now: Time, member: MemberId, effects: &mut Effects<P>) {
        let Some(n) = self.index(member) else { return };
        if self.peers[n].up {
            self.down(now, member, effects);
        }
        self.peers[n].up = true;
        // It may have refused by a promise that was not durable yet, and have lost that in a crash.
        self.peers[n].fenced = false;
        if !matches!(self.phase, Phase::Idle | Phase::Over) {
            self.send_fence(now, n, effects);
        }
    }

    pub(super) fn down(&mut self, now: Time, member: MemberId, effects: &mut Effects<P>) {
        let Some(n) = self.index(member) else { return };
        if !self.peers[n].up && self.peers[n].down_since.is_some() {
            return;
        }
        self.peers[n].disconnect(now);
        self.attach_lost(n);
        self.resync_source_lost(n);
        self.reads.lost(n);
        self.condition_changed(n, effects);
    }

    /// The member lost its place in what was sent: a new connection tells where it stands.
    pub(super) fn reconnect(&mut self, now: Time, n: usize, effects: &mut Effects<P>) {
        let member = self.peers[n].member.id;
        self.down(now, member, effects);
        effects.push_back(Effect::Reconnect { member });
    }

    pub(super) fn reply(
        &mut self,
        now: Time,
        member: MemberId,
        reply: Reply<P>,
        effects: &mut Effects<P>,
    ) {
        let Some(n) = self.index(member) else { return };
        match reply {
            Reply::Promised {
                epoch,
                state,
                size_blocks,
                torn,
            } => {
                // M1: of this attempt, not of an older one.
                if epoch == self.epoch && !matches!(self.phase, Phase::Idle | Phase::Over) {
                    let is_newcomer = self.newcomer() == Some(member);
                    if is_newcomer && size_blocks < self.size_blocks && state.role == Role::Data {
                        self.end_change(ChangeRefusal::TooSmall, effects);
                        return;
                    }
                    if state.role == Role::Data {
                        self.size_blocks = self.size_blocks.min(size_blocks);
                    }
                    self.promised(now, n, Answer { state, torn }, effects);
                }
            }
            Reply::Applied { sequence } => self.applied(now, member, sequence, effects),
            Reply::Refused { id, refusal } => self.refused(now, n, id, refusal, effects),
            Reply::WriteRefused { sequence, refusal } => {
                self.write_refused(now, n, sequence, refusal, effects);
            }
            Reply::Done { id } => {
                if !self.config_done(n, id) && !self.resync_done(n, id) {
                    self.equalise_done(id);
                }
            }
            Reply::Copied { id, changed } => self.resync_copied(n, id, &changed),
            Reply::Data { id, result } => {
                self.data(now, member, id, result, effects);
            }
            Reply::Positions {
                id,
                positions,
                next,
                last,
            } => {
                if self.phase == Phase::Equalising {
                    self.equalise_positions(n, id, positions, next, effects);
                } else {
                    self.resync_positions(n, id, positions, last);
                }
            }
            Reply::Digests { id, digests } => self.resync_digests(n, id, digests),
        }
    }

    /// Whether it was for a client's read or a repair.
    pub(super) fn data(
        &mut self,
        now: Time,
        member: MemberId,
        id: RequestId,
        result: Result<ReadData<P>, ReadError>,
        effects: &mut Effects<P>,
    ) -> bool {
        let Some(n) = self.index(member) else {
            return false;
        };
        if let Err(ReadError::Refused(Refusal::Fenced { promised })) = result {
            self.fenced(now, member, promised, effects);
            return false;
        }
        let Some(result) = self.read_data(now, n, id, result, effects) else {
            return true;
        };
        if let Some(result) = self.resync_data(n, id, result, effects) {
            self.equalise_data(id, result, effects);
        }
        false
    }

    fn refused(
        &mut self,
        now: Time,
        n: usize,
        id: RequestId,
        refusal: Refusal,
        effects: &mut Effects<P>,
    ) {
        match refusal {
            Refusal::Fenced { promised } => {
                let member = self.peers[n].member.id;
                self.fenced(now, member, promised, effects);
            }
            _ if id == RequestId(0) => self.fence_refused(now, n, refusal, effects),
            _ => {
                self.config_refused(now, n, id);
                self.resync_refused(now, n, id, refusal);
                self.read_refused(now, n, id, refusal, effects);
                if self.phase == Phase::Equalising && self.equalise_done(id) {
                    self.attach_lost(n);
                }
            }
        }
    }

    /// It cannot take part now (replica gone, device closed, wrong key): as good as down.
    fn fence_refused(&mut self, now: Time, n: usize, refusal: Refusal, effects: &mut Effects<P>) {
        let peer = &mut self.peers[n];
        peer.attached = false;
        peer.fence_again_at = now + FENCE_RETRY;
        peer.unauthenticated = refusal == Refusal::Unauthenticated;
        self.attach_lost(n);
        let refusing = self.peers.iter().filter(|p| p.unauthenticated).count();
        if refusing * 2 > self.peers.len() && matches!(self.phase, Phase::Fencing) {
            self.over(OverReason::Unauthenticated, effects);
        }
    }

    /// Asks again those that could not take part.
    pub(super) fn fence_again(&mut self, now: Time, effects: &mut Effects<P>) {
        if matches!(self.phase, Phase::Idle | Phase::Over) {
            return;
        }
        for n in 0..self.peers.len() {
            let peer = &mut self.peers[n];
            if peer.up && !peer.attached && !peer.fenced && peer.fence_again_at <= now {
                self.send_fence(now, n, effects);
            }
        }
    }

    pub(super) fn fence_timer(&self) -> Time {
        let asked = self
            .peers
            .iter()
            .filter(|p| p.up && !p.attached && !p.fenced);
        asked.map(|p| p.fence_again_at).min().unwrap_or(Time::NEVER)
    }

    /// C7: a member that has promised a newer epoch counts as down.
    pub(super) fn fenced(
        &mut self,
        now: Time,
        member: MemberId,
        promised: EpochNumber,
        effects: &mut Effects<P>,
    ) {
        let Some(n) = self.index(member) else { return };
        if promised < self.epoch.number {
            return;
        }
        match self.phase {
            Phase::Idle | Phase::Over => {}
            Phase::Open => {
                self.highest = self.highest.max(promised);
                self.lost_to_newer(now, n, effects);
            }
            // A1: start again with a higher number.
            _ => {
                self.highest = self.highest.max(promised);
                let pause = self.attach_pause();
                self.restart_attach(now, pause, effects);
            }
        }
    }

    /// The first refusal only tells a new process which number comes next. After that a random pause,
    /// longer every time: two attachers must not chase each other for ever.
    fn attach_pause(&mut self) -> Duration {
        let attempts = self.attempts;
        self.attempts += 1;
        if attempts == 0 {
            return Duration::ZERO;
        }
        let pause = ATTACH_PAUSE * (1 << (attempts - 1).min(ATTACH_DOUBLINGS_MAX));
        pause + Duration::from_nanos(self.random() % pause.as_nanos() as u64)
    }

    fn lost_to_newer(&mut self, now: Time, n: usize, effects: &mut Effects<P>) {
        let peer = &mut self.peers[n];
        peer.fenced = true;
        peer.resync = None;
        peer.ready = false;
        peer.down_since.get_or_insert(now);
        self.reads.lost(n);
        self.resync_source_lost(n);
        self.condition_changed(n, effects);
        if self.newcomer() == Some(self.peers[n].member.id) {
            let by = self.highest;
            self.end_change(ChangeRefusal::Fenced { by }, effects);
            return;
        }
        let reachable = |id| self.peers.iter().any(|p| p.member.id == id && !p.fenced);
        let proposed = self.proposal.as_ref().map(|p| &p.configuration);
        let mut both = self.committed.iter().chain(proposed);
        if both.any(|c| !c.is_quorum(reachable)) {
            self.over(OverReason::Fenced { by: self.highest }, effects);
        }
    }
}
