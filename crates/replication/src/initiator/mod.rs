//! One attached volume: the initiator's side of the protocol.
//!
//! ```text
//!            Attach           A2 decided            all equal          lease over
//!   Idle ────────────► Fencing ─────────► Equalising ─────────► WaitingLease ─────────► Starting
//!                       ▲  ▲                  │                      (A6)                  │
//!                       │  └── source lost ───┘                                           │ E1 committed
//!                       └───── refused by number: a higher one, after a pause              ▼
//!                                                                                         Open
//!   every phase ── fenced out of a quorum, refused key, Detach ──► Over
//! ```
//! [`Initiator::enter`] is the one place where the phase changes; it rejects every other step.

mod attach;
mod change;
mod equalise;
mod lease;
mod peer;
mod read;
mod resync;
mod status;
mod stream;
mod types;

use core::time::Duration;
use std::collections::VecDeque;

use crate::configuration::{Configuration, Member, Role};
use crate::message::{Refusal, Reply, Request, RequestId};
use crate::values::{Epoch, EpochNumber, MemberId, Position, Sequence, Time};

use attach::Attach;
use change::Proposal;
use peer::{Answer, Peer};
use read::Reads;
use stream::Stream;
pub use types::{
    Effect, Event, IoError, MemberCondition, MemberStatus, Options, OverReason, Phase, Status,
    Ticket,
};

/// Effects in the order in which they are to be carried out.
pub type Effects<P> = VecDeque<Effect<P>>;

/// The state machine of an attached volume.
///
/// Guarantees: nothing is allocated per write in steady state. Effects are complete: what is not
/// asked for is not to be done.
#[derive(Debug)]
pub struct Initiator<P> {
    options: Options,
    size_blocks: u64,
    phase: Phase,
    epoch: Epoch,
    /// The highest number seen anywhere (A1).
    highest: EpochNumber,
    random: u64,
    peers: Vec<Peer>,
    attach: Attach<P>,
    committed: Option<Configuration>,
    proposal: Option<Proposal>,
    /// Members that start in this epoch (A7).
    start: Vec<MemberId>,
    stream: Stream<P>,
    reads: Reads,
    next_id: u64,
    detaching: bool,
}

/// Extra pause of a retried attach: two attachers must not chase each other for ever.
const ATTACH_PAUSE: Duration = Duration::from_millis(50);

impl<P: Clone> Initiator<P> {
    /// A volume that is not attached yet. `members` are those that the shell can reach.
    pub fn new(size_blocks: u64, members: Vec<Member>, options: Options) -> Initiator<P> {
        let mut members = members;
        members.sort();
        members.dedup_by_key(|member| member.id);
        Initiator {
            stream: Stream::new(&options),
            options,
            size_blocks,
            phase: Phase::Idle,
            epoch: Epoch::default(),
            highest: EpochNumber(0),
            random: 0,
            peers: members.into_iter().map(Peer::new).collect(),
            attach: Attach::default(),
            committed: None,
            proposal: None,
            start: Vec::new(),
            reads: Reads::default(),
            next_id: 1,
            detaching: false,
        }
    }

    /// Handles an event; what is to be done is appended to `effects`.
    pub fn handle(&mut self, now: Time, event: Event<P>, effects: &mut Effects<P>) {
        match event {
            Event::Write {
                ticket,
                range,
                content,
            } => {
                self.client_write(now, ticket, range, content, effects);
                return;
            }
            Event::Read { ticket, range } => {
                self.client_read(now, ticket, range, effects);
                return;
            }
            Event::Reply {
                member,
                reply: Reply::Applied { sequence },
            } => {
                self.applied(now, member, sequence, effects);
                return;
            }
            Event::Attach { seed } => {
                self.random = seed;
                if self.phase == Phase::Idle {
                    self.begin_attach(now, effects);
                }
            }
            Event::Up { member } => self.up(now, member, effects),
            Event::Down { member } => self.down(now, member, effects),
            Event::Reply { member, reply } => self.reply(now, member, reply, effects),
            Event::Renewed { member, sent_at } => {
                if let Some(peer) = self.peers.iter_mut().find(|p| p.member.id == member)
                    && peer.attached
                    && !peer.fenced
                {
                    peer.renew(sent_at);
                }
            }
            Event::Fenced { member, promised } => self.fenced(now, member, promised, effects),
            Event::Timer => {}
            Event::Detach => self.detaching = true,
        }
        self.advance(now, effects);
    }

    /// When [`Event::Timer`] is due.
    pub fn next_timer(&self) -> Time {
        match self.phase {
            // Answers drive these.
            Phase::Idle | Phase::Over | Phase::Equalising | Phase::Starting => Time::NEVER,
            Phase::Fencing | Phase::WaitingLease => self.attach.timer,
            Phase::Open => self.open_timer(),
        }
    }

    /// The one place where the phase changes.
    ///
    /// # Panics
    /// On a step that the diagram does not have.
    fn enter(&mut self, next: Phase) {
        use Phase::{Equalising, Fencing, Idle, Open, Over, Starting, WaitingLease};
        let allowed = matches!(
            (self.phase, next),
            (
                Idle | Fencing | Equalising | WaitingLease | Starting,
                Fencing
            ) | (Fencing, Equalising)
                | (Equalising, WaitingLease)
                | (WaitingLease, Starting)
                | (Starting, Open)
        ) || (next == Over && self.phase != Over);
        assert!(allowed, "no step from {:?} to {next:?}", self.phase);
        self.phase = next;
    }

    /// Everything that may follow from any event. Each part does nothing where it is not its turn.
    fn advance(&mut self, now: Time, effects: &mut Effects<P>) {
        match self.phase {
            Phase::Idle | Phase::Over => {}
            Phase::Fencing | Phase::Equalising | Phase::WaitingLease => {
                self.advance_attach(now, effects);
            }
            Phase::Starting => {
                self.send_configuration(now, effects);
                self.try_commit(now, effects);
            }
            Phase::Open => self.advance_open(now, effects),
        }
        if self.detaching && self.phase != Phase::Over && self.is_drained() {
            self.over(OverReason::Detached, effects);
        }
    }

    fn advance_open(&mut self, now: Time, effects: &mut Effects<P>) {
        self.drop_laggards(now);
        self.propose(now, effects);
        self.send_configuration(now, effects);
        self.try_commit(now, effects);
        self.advance_stream(now, effects);
        self.advance_resync(now, effects);
        self.advance_reads(now, effects);
    }

    fn is_drained(&self) -> bool {
        self.phase != Phase::Open || (self.stream.is_idle() && self.reads.is_idle())
    }

    fn id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    /// splitmix64.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn index(&self, member: MemberId) -> Option<usize> {
        self.peers.iter().position(|peer| peer.member.id == member)
    }

    fn send(&self, peer: usize, request: Request<P>, effects: &mut Effects<P>) {
        effects.push_back(Effect::Send {
            member: self.peers[peer].member.id,
            request,
        });
    }

    fn up(&mut self, now: Time, member: MemberId, effects: &mut Effects<P>) {
        let Some(n) = self.index(member) else { return };
        self.peers[n].up = true;
        if !matches!(self.phase, Phase::Idle | Phase::Over) && !self.peers[n].fenced {
            self.send_fence(now, n, effects);
        }
    }

    fn down(&mut self, now: Time, member: MemberId, effects: &mut Effects<P>) {
        let Some(n) = self.index(member) else { return };
        if !self.peers[n].up && self.peers[n].down_since.is_some() {
            return;
        }
        self.peers[n].disconnect(now);
        self.attach_lost(n);
        self.resync_source_lost(n);
        self.reads.lost(member);
        self.condition_changed(n, effects);
    }

    fn reply(&mut self, now: Time, member: MemberId, reply: Reply<P>, effects: &mut Effects<P>) {
        let Some(n) = self.index(member) else { return };
        match reply {
            Reply::Promised {
                epoch,
                state,
                size_blocks,
                torn,
            } => {
                if epoch == self.epoch && self.phase != Phase::Over {
                    self.size_blocks = self.size_blocks.min(size_blocks);
                    self.promised(now, n, Answer { state, torn }, effects);
                }
            }
            Reply::Applied { sequence } => self.applied(now, member, sequence, effects),
            Reply::Refused { id, refusal } => self.refused(now, n, id, refusal, effects),
            Reply::WriteRefused { sequence, refusal } => {
                self.write_refused(now, n, sequence, refusal, effects);
            }
            Reply::Done { id } => self.done(now, n, id, effects),
            Reply::Copied { id, changed } => self.resync_copied(n, id, changed),
            Reply::Data { id, result } => self.data(now, n, id, result, effects),
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

    fn done(&mut self, now: Time, n: usize, id: RequestId, effects: &mut Effects<P>) {
        if self.config_done(n, id) || self.resync_done(n, id) {
            return;
        }
        if self.phase == Phase::Equalising {
            self.equalise_done(now, n, id, effects);
        }
    }

    fn data(
        &mut self,
        now: Time,
        n: usize,
        id: RequestId,
        result: Result<crate::message::ReadData<P>, crate::message::ReadError>,
        effects: &mut Effects<P>,
    ) {
        let Some(result) = self.read_data(now, n, id, result, effects) else {
            return;
        };
        let Some(result) = self.resync_data(n, id, result, effects) else {
            return;
        };
        self.equalise_data(now, n, id, result, effects);
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
            Refusal::Unauthenticated if id == RequestId(0) => {
                self.peers[n].fenced = true;
                self.peers[n].attached = false;
                let refused = |peer: &Peer| peer.fenced;
                if self.peers.iter().filter(|p| refused(p)).count() * 2 > self.peers.len() {
                    self.over(OverReason::Unauthenticated, effects);
                }
            }
            _ if id == RequestId(0) => {
                // It cannot take part (replica gone, device closed): as good as down.
                self.peers[n].attached = false;
                self.attach_lost(n);
            }
            _ => {
                self.resync_refused(now, n, id, refusal);
                self.reads.refused(id, self.peers[n].member.id);
                if self.phase == Phase::Equalising {
                    self.attach_lost(n);
                }
            }
        }
    }

    /// C7: a member that has promised a newer epoch counts as down.
    fn fenced(
        &mut self,
        now: Time,
        member: MemberId,
        promised: EpochNumber,
        effects: &mut Effects<P>,
    ) {
        let Some(n) = self.index(member) else { return };
        if promised < self.epoch.number || self.phase == Phase::Over {
            return;
        }
        self.highest = self.highest.max(promised);
        match self.phase {
            Phase::Open => {
                self.peers[n].fenced = true;
                self.peers[n].attached = false;
                self.peers[n].resync = None;
                self.reads.lost(member);
                self.resync_source_lost(n);
                self.condition_changed(n, effects);
                let reachable = |id| self.peers.iter().any(|p| p.member.id == id && !p.fenced);
                let lost = self
                    .committed
                    .as_ref()
                    .is_some_and(|c| !c.is_quorum(reachable))
                    || self
                        .proposal
                        .as_ref()
                        .is_some_and(|p| !p.configuration.is_quorum(reachable));
                if lost {
                    self.over(OverReason::Fenced { by: self.highest }, effects);
                }
            }
            // A1: start again with a higher number, after a random pause.
            Phase::Idle | Phase::Over => {}
            _ => {
                let pause = ATTACH_PAUSE + Duration::from_micros(self.random() % 100_000);
                self.restart_attach(now, pause, effects);
            }
        }
    }

    fn over(&mut self, reason: OverReason, effects: &mut Effects<P>) {
        self.enter(Phase::Over);
        let error = match &reason {
            OverReason::Fenced { by } => IoError::Fenced { by: *by },
            _ => IoError::NotAttached,
        };
        self.stream.fail_all(&error, effects);
        self.reads.fail_all(&error, effects);
        effects.push_back(Effect::Over { reason });
    }

    /// The configuration that counts, or the one of the attach.
    fn min_in_sync(&self) -> usize {
        let configuration = self.committed.as_ref();
        let data = configuration.map_or(0, |c| {
            c.members.iter().filter(|m| m.role == Role::Data).count()
        });
        let default = if data >= 3 { 2 } else { 1 };
        self.options.min_in_sync.unwrap_or(default).min(data.max(1))
    }

    fn position(&self, sequence: Sequence) -> Position {
        Position {
            epoch: self.epoch.number,
            sequence,
        }
    }
}
