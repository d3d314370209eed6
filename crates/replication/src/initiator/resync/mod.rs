//! R1–R5: bringing a member up to date while the stream goes on.
//!
//! ```text
//!  R1 ──BeginResync──► Beginning ──► Copying ──all blocks done──► Following ──R4──► Completing ──► Complete
//!                         ▲             │ source lost: another one, from the start                   │ R5
//!                         └─ new pass ──┴── gap, refusal, connection lost (any stage)                ▼
//!                                                                                    proposed as in sync (C2)
//! ```
//! Every pass compares everything again; what an earlier one copied is equal by then and is skipped.

mod copy;

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use crate::configuration::Role;
use crate::faults::{Fault, is_broken};
use crate::initiator::stream::EVICTED_RETRY;
use crate::initiator::{Effects, Initiator};
use crate::message::{Refusal, Request, RequestId};
use crate::values::{EXTENT_BLOCKS, ExtentIndex, Pass, Sequence, Time};

use copy::{Task, Work};

/// Pause after a pass that failed for a reason that will not pass by itself soon.
const RETRY: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// BeginResync was sent.
    Beginning,
    /// Comparing and copying.
    Copying,
    /// Waiting for the stream to reach `top` (R4).
    Following,
    /// MarkComplete was sent.
    Completing,
    /// Waiting for the configuration that takes it back.
    Complete,
}

/// A resync of one member.
#[derive(Debug)]
pub(super) struct Resync {
    pass: Pass,
    s0: Sequence,
    stage: Stage,
    source: Option<usize>,
    /// Bit per peer that could not read what this pass needs.
    avoid: u32,
    tasks: BTreeMap<RequestId, Task>,
    /// Digests of the source and the target.
    digests: [Option<Vec<(ExtentIndex, u64)>>; 2],
    /// The first extent whose digest has not been compared.
    next: u64,
    extents: u64,
    todo: VecDeque<ExtentIndex>,
    working: BTreeMap<ExtentIndex, Work>,
    /// The highest sequence of this epoch that the target's blocks depend on (R4).
    top: Sequence,
}

impl Resync {
    fn new(pass: Pass, s0: Sequence, size_blocks: u64) -> Resync {
        Resync {
            pass,
            s0,
            stage: Stage::Beginning,
            source: None,
            avoid: 0,
            tasks: BTreeMap::new(),
            digests: [None, None],
            next: 0,
            extents: size_blocks.div_ceil(u64::from(EXTENT_BLOCKS)),
            todo: VecDeque::new(),
            working: BTreeMap::new(),
            top: Sequence(0),
        }
    }

    /// (extents done, extents in all).
    pub(super) fn progress(&self) -> (u64, u64) {
        let under_way = self.todo.len() as u64 + self.working.len() as u64;
        (self.next.saturating_sub(under_way), self.extents)
    }

    /// Copies that were sent may still be applied; M6 makes them harmless.
    fn begin_again(&mut self) {
        self.source = None;
        self.tasks.clear();
        self.digests = [None, None];
        self.todo.clear();
        self.working.clear();
        self.next = 0;
    }
}

impl<P: Clone> Initiator<P> {
    /// Starts resyncs and moves those that are under way.
    pub(super) fn advance_resync(&mut self, now: Time, effects: &mut Effects<P>) {
        for n in 0..self.peers.len() {
            match self.peers[n].resync.as_ref().map(|r| r.stage) {
                None if self.may_resync(now, n) => self.begin_resync(n, effects),
                Some(Stage::Copying) => self.copy_step(now, n, effects),
                Some(Stage::Following) => self.follow(n, effects),
                _ => {}
            }
        }
    }

    /// R1: a committed configuration leaves the member out, it has stored that, and no proposal names it. A
    /// newcomer is named by none, and stores the first one that names it.
    fn may_resync(&self, now: Time, n: usize) -> bool {
        let peer = &self.peers[n];
        let Some(c) = &self.committed else {
            return false;
        };
        let id = peer.member.id;
        let is_left_out = if self.newcomer() == Some(id) {
            peer.member.role == Role::Data
        } else {
            c.role_of(id) == Some(Role::Data) && peer.stored >= c.order()
        };
        peer.usable()
            && !peer.ready
            && peer.resync.is_none()
            && peer.retry_at <= now
            && is_left_out
            && !self.is_counted(id)
    }

    /// R2: from here on the member receives the stream.
    fn begin_resync(&mut self, n: usize, effects: &mut Effects<P>) {
        let id = self.id();
        let s0 = self.stream.issued;
        let size_blocks = self.size_blocks;
        let peer = &mut self.peers[n];
        peer.last_pass = Pass(peer.last_pass.0 + 1);
        let pass = peer.last_pass;
        let mut resync = Resync::new(pass, s0, size_blocks);
        resync.tasks.insert(id, Task::Begin);
        peer.resync = Some(resync);
        peer.in_stream = true;
        peer.leaving = false;
        peer.full_at = Sequence(0);
        peer.sent = s0;
        peer.answered = s0;
        let request = Request::BeginResync {
            id,
            pass,
            sequence: s0,
        };
        self.send(n, request, effects);
    }

    /// R3: an in-sync member whose applied sequence is at or above s0.
    fn resync_source(&self, n: usize, s0: Sequence, avoid: u32) -> Option<usize> {
        let c = self.committed.as_ref()?;
        (0..self.peers.len()).find(|m| {
            let peer = &self.peers[*m];
            *m != n
                && avoid & (1 << *m) == 0
                && peer.usable()
                && !peer.leaving
                && c.in_sync.contains(&peer.member.id)
                && (peer.answered >= s0 || is_broken(Fault::LaggingSource))
        })
    }

    /// The source, chosen anew where there is none. None: wait for one, or for a new pass.
    fn source_of(&mut self, now: Time, n: usize) -> Option<usize> {
        let resync = self.peers[n].resync.as_ref()?;
        if resync.source.is_some() {
            return resync.source;
        }
        let (s0, avoid) = (resync.s0, resync.avoid);
        let source = self.resync_source(n, s0, avoid);
        if source.is_none() && avoid != 0 {
            // Whoever could be read cannot read everything. It may be repaired by then.
            self.end_pass(n, now + RETRY);
            return None;
        }
        self.peers[n].resync.as_mut()?.source = source;
        source
    }

    /// The pass is over without success; another one begins at `at`.
    fn end_pass(&mut self, n: usize, at: Time) {
        let peer = &mut self.peers[n];
        peer.resync = None;
        peer.in_stream = false;
        peer.ready = false;
        peer.retry_at = at;
    }

    /// R4. MarkComplete follows the writes on the same connection, so the member would have taken them by
    /// then anyway; the rule does not lean on that.
    fn follow(&mut self, n: usize, effects: &mut Effects<P>) {
        let answered = self.peers[n].answered;
        let Some(resync) = &mut self.peers[n].resync else {
            return;
        };
        if resync.stage != Stage::Following || answered < resync.top {
            return;
        }
        resync.stage = Stage::Completing;
        let pass = resync.pass;
        self.ask(n, n, Task::Mark, effects, |id| Request::MarkComplete {
            id,
            pass,
        });
    }

    fn ask(
        &mut self,
        n: usize,
        to: usize,
        task: Task,
        effects: &mut Effects<P>,
        make: impl FnOnce(RequestId) -> Request<P>,
    ) {
        let id = self.id();
        if let Some(resync) = &mut self.peers[n].resync {
            resync.tasks.insert(id, task);
        }
        self.send(to, make(id), effects);
    }

    /// Whose resync the request `id` to member `at` is part of, and what it was. Ids are unique over all
    /// members.
    fn take(&mut self, at: usize, id: RequestId) -> Option<(usize, Task)> {
        for n in 0..self.peers.len() {
            if let Some(resync) = &mut self.peers[n].resync
                && let Some(task) = resync.tasks.get(&id)
            {
                let asked = if task.is_of_source() {
                    resync.source
                } else {
                    Some(n)
                };
                if asked != Some(at) {
                    return None;
                }
                return resync.tasks.remove(&id).map(|task| (n, task));
            }
        }
        None
    }

    /// Whether `id` was BeginResync or MarkComplete.
    pub(super) fn resync_done(&mut self, n: usize, id: RequestId) -> bool {
        let Some((n, task)) = self.take(n, id) else {
            return false;
        };
        let peer = &mut self.peers[n];
        if let Some(resync) = &mut peer.resync {
            match task {
                Task::Begin => resync.stage = Stage::Copying,
                Task::Mark => {
                    resync.stage = Stage::Complete;
                    // R5.
                    peer.ready = true;
                }
                _ => {}
            }
        }
        true
    }

    pub(super) fn resync_refused(&mut self, now: Time, at: usize, id: RequestId, refusal: Refusal) {
        let Some((n, _)) = self.take(at, id) else {
            return;
        };
        if at != n {
            self.source_failed(n, at);
            return;
        }
        let pause = match refusal {
            // It only needs a higher number.
            Refusal::StalePass => Duration::ZERO,
            Refusal::Evicted => EVICTED_RETRY,
            _ => RETRY,
        };
        self.end_pass(n, now + pause);
    }

    /// Resyncs that copy from this member look for another source and compare again.
    pub(super) fn resync_source_lost(&mut self, source: usize) {
        for peer in &mut self.peers {
            if let Some(resync) = &mut peer.resync
                && resync.source == Some(source)
                && resync.stage == Stage::Copying
            {
                resync.begin_again();
            }
        }
    }

    /// The source cannot tell or read what the pass needs.
    fn source_failed(&mut self, n: usize, source: usize) {
        if let Some(resync) = &mut self.peers[n].resync {
            resync.avoid |= 1 << source;
            resync.begin_again();
        }
    }

    /// When a pause ends.
    pub(super) fn resync_timer(&self) -> Time {
        let paused = (0..self.peers.len()).filter(|n| self.may_resync(Time::NEVER, *n));
        let times = paused.map(|n| self.peers[n].retry_at);
        times
            .filter(|at| *at > self.seen)
            .min()
            .unwrap_or(Time::NEVER)
    }
}
