//! A1–A8: from the first Fence to the configuration that opens the epoch.
//!
//! Nothing but equalising (A5) changes a member before [`start`] sends the configuration; a failed
//! attach leaves promises and copies behind, which are never counted as held (A8).

mod equalise;
mod fencing;
mod start;
mod torn;

use crate::configuration::{Configuration, Generation};
use crate::initiator::{Effects, Initiator, Phase};
use crate::values::{EpochNumber, Time};
pub(super) use equalise::runs;

use core::time::Duration;
use equalise::Equalise;

/// Pause before an attach begins again that lost its source.
const LOST_SOURCE_PAUSE: Duration = Duration::from_millis(10);

/// State of an attach under way.
#[derive(Debug)]
pub(super) struct Attach {
    /// When to look again.
    pub(super) timer: Time,
    /// No Fence is sent before this time (the pause of A1).
    begin_at: Time,
    /// The best configuration, and since when a quorum of it has answered (A6 counts from here).
    quorum_at: Option<((EpochNumber, Generation), Time)>,
    /// Since when A2 could have been decided.
    ready_at: Option<Time>,
    /// Until when A6 waits.
    lease_wait_until: Time,
    best: Option<Configuration>,
    /// Indices of S; the source comes first (A3, A4).
    set: Vec<usize>,
    equalise: Equalise,
    /// The source was lost: begin again.
    failed: bool,
}

impl Default for Attach {
    fn default() -> Attach {
        Attach {
            timer: Time::NEVER,
            begin_at: Time(0),
            quorum_at: None,
            ready_at: None,
            lease_wait_until: Time(0),
            best: None,
            set: Vec::new(),
            equalise: Equalise::default(),
            failed: false,
        }
    }
}

impl<P: Clone> Initiator<P> {
    /// A member is lost during an attach.
    pub(super) fn attach_lost(&mut self, n: usize) {
        match self.phase {
            // Still fenced, but what it holds cannot be read; A6 waits as if it had not answered.
            Phase::Fencing => self.peers[n].answer = None,
            Phase::Equalising => match self.attach.set.iter().position(|m| *m == n) {
                Some(0) => self.attach.failed = true,
                // A4: as many as can be equalised. The rest comes back by resync.
                Some(_) => self.leave_set(n),
                None => {}
            },
            // All of S are equal from here on: whoever comes back follows the stream.
            _ => {}
        }
    }

    fn leave_set(&mut self, n: usize) {
        self.attach.set.retain(|m| *m != n);
        self.attach.equalise.forget(n);
    }

    pub(super) fn advance_attach(&mut self, now: Time, effects: &mut Effects<P>) {
        if self.attach.failed {
            let pause = LOST_SOURCE_PAUSE * (1 << self.attempts.min(8));
            self.attempts += 1;
            self.restart_attach(now, pause, effects);
            return;
        }
        match self.phase {
            Phase::Fencing => self.advance_fencing(now, effects),
            Phase::Equalising => self.advance_equalise(now, effects),
            Phase::WaitingLease => self.wait_lease(now, effects),
            _ => {}
        }
    }
}
