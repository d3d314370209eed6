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
mod lease;
mod membership;
mod peer;
mod read;
mod replies;
mod resync;
mod status;
mod stream;
mod types;

use core::time::Duration;
use std::collections::VecDeque;

use crate::configuration::{Configuration, Member};
use crate::message::{Reply, Request, RequestId};
use crate::values::{Epoch, EpochNumber, MEMBERS_MAX, MemberId, Position, Sequence, Time};

use crate::faults::{Fault, is_broken};
use attach::Attach;
use change::Proposal;
use membership::Change;
use peer::Peer;
use read::Reads;
use stream::Stream;
pub use types::{
    ChangeRefusal, Effect, Event, IoError, MemberCondition, MemberStatus, Options, OverReason,
    Phase, Status, Ticket,
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
    attach: Attach,
    committed: Option<Configuration>,
    proposal: Option<Proposal>,
    change: Option<Change>,
    /// Members that start in this epoch (A7).
    start: Vec<MemberId>,
    stream: Stream<P>,
    reads: Reads<P>,
    next_id: u64,
    detaching: bool,
    /// Attempts to attach that were refused by number, for the length of the next pause (A1).
    attempts: u32,
    /// The time of the last event.
    seen: Time,
}

/// The most members that are known at a time: those of a configuration with its previous ones, and as
/// many that the shell or older configurations name. Sets of them are bits of a `u32`.
const PEERS_MAX: usize = 4 * MEMBERS_MAX;
/// How long a member that cannot take part (no replica, device closed) is left alone.
const FENCE_RETRY: Duration = Duration::from_secs(1);

impl<P: Clone> Initiator<P> {
    /// A volume that is not attached yet. `members` are those that the shell can reach.
    ///
    /// # Panics
    /// If there are more than two configurations with their previous members can name.
    pub fn new(size_blocks: u64, members: Vec<Member>, options: Options) -> Initiator<P> {
        let mut members = members;
        members.sort();
        members.dedup_by_key(|member| member.id);
        assert!(members.len() <= PEERS_MAX, "too many members");
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
            change: None,
            start: Vec::new(),
            reads: Reads::default(),
            next_id: 0,
            detaching: false,
            attempts: 0,
            seen: Time(0),
        }
    }

    /// Handles an event; what is to be done is appended to `effects`.
    pub fn handle(&mut self, now: Time, event: Event<P>, effects: &mut Effects<P>) {
        self.seen = now;
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
            Event::Reply {
                member,
                reply: Reply::Data { id, result },
            } => {
                // Nothing else follows from a client's read, unless it was the last before the end.
                if self.data(now, member, id, result, effects) && !self.detaching {
                    return;
                }
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
                    && peer.usable()
                {
                    // L1.
                    let from_answer = is_broken(Fault::LeaseFromAnswer);
                    peer.renew(if from_answer { now } else { sent_at });
                }
            }
            Event::Fenced { member, promised } => self.fenced(now, member, promised, effects),
            Event::ChangeMembers { add, remove } => self.change_members(add, remove, effects),
            Event::CancelChange => self.end_change(ChangeRefusal::Cancelled, effects),
            Event::Timer => {}
            Event::Detach => self.detaching = true,
        }
        self.advance(now, effects);
    }

    /// When [`Event::Timer`] is due.
    pub fn next_timer(&self) -> Time {
        let phase = match self.phase {
            Phase::Idle | Phase::Over => return Time::NEVER,
            Phase::Fencing | Phase::Equalising | Phase::WaitingLease => self.attach.timer,
            // Answers drive it.
            Phase::Starting => Time::NEVER,
            Phase::Open => self.resync_timer(),
        };
        phase
            .min(self.stream_timer())
            .min(self.reads_timer())
            .min(self.fence_timer())
            .min(self.config_timer())
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
        self.fence_again(now, effects);
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
        if !matches!(self.phase, Phase::Open | Phase::Over) {
            self.time_out(now, effects);
            self.advance_reads(now, effects);
        }
        self.end_if_drained(effects);
    }

    fn advance_open(&mut self, now: Time, effects: &mut Effects<P>) {
        self.drop_laggards(now);
        self.propose();
        self.send_configuration(now, effects);
        self.try_commit(now, effects);
        self.advance_stream(now, effects);
        self.advance_resync(now, effects);
        self.advance_reads(now, effects);
    }

    fn end_if_drained(&mut self, effects: &mut Effects<P>) {
        let drained = self.phase != Phase::Open || (self.stream.is_idle() && self.reads.is_idle());
        if self.detaching && self.phase != Phase::Over && drained {
            self.over(OverReason::Detached, effects);
        }
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

    fn over(&mut self, reason: OverReason, effects: &mut Effects<P>) {
        self.enter(Phase::Over);
        let error = match &reason {
            OverReason::Fenced { by } => IoError::Fenced { by: *by },
            _ => IoError::NotAttached,
        };
        if self.change.take().is_some() {
            let reason = ChangeRefusal::Interrupted;
            effects.push_back(Effect::MembersChangeRefused { reason });
        }
        self.stream.fail_all(&error, effects);
        self.reads.fail_all(&error, effects);
        effects.push_back(Effect::Over { reason });
    }

    /// W1: writes are issued while at least so many members are in sync.
    fn min_in_sync(&self) -> usize {
        self.committed
            .as_ref()
            .map_or(1, |c| self.min_in_sync_of(c))
    }

    fn min_in_sync_of(&self, c: &Configuration) -> usize {
        let data = c.data_members();
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
