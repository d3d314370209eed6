//! Rules that tests break on purpose, to show that the simulator finds it.
//!
//! Without the feature `faults` nothing is ever broken and the questions cost nothing.

/// A rule that can be broken, by its number in docs/protocol.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// W2: one durable answer is enough.
    AcknowledgeOnOne,
    /// C3 is not looked at.
    ProposeUnguarded,
    /// C4: only the committed configuration acknowledges.
    OldQuorumOnly,
    /// C4: only the proposed configuration acknowledges.
    NewQuorumOnly,
    /// C4: reads go on at a member that is leaving.
    ReadLeaving,
    /// A6: no lease is waited for.
    NoLeaseWait,
    /// A7: members that did not answer stay in sync.
    KeepAbsent,
    /// A5: only members whose `last` differs are equalised.
    EqualiseByLast,
    /// A5: only blocks above the lowest `last` are compared, whatever lines the members are on.
    ListAboveLast,
    /// A5: `last` moves before the blocks are equal.
    LastFirst,
    /// A5: what the source lacks stays where it is.
    KeepTail,
    /// A2, A3: configurations are ordered by generation alone.
    GenerationOnly,
    /// M1: another nonce of the same number is promised too.
    EqualEpoch,
    /// M1: the promise is forgotten in a crash.
    ForgetPromise,
    /// M2 is not looked at.
    OldEpochs,
    /// M4: a gap is jumped over.
    AcceptGap,
    /// M6: the expected position is not compared.
    AnyExpected,
    /// L1: the lease runs from the answer.
    LeaseFromAnswer,
    /// L2: no lease is needed.
    NoLease,
    /// L3: a member renews although it has promised another epoch.
    RenewAnybody,
    /// W3: a read does not wait for overlapping writes.
    ReadUnacknowledged,
    /// W3: a read goes to a member that lags.
    ReadLagging,
    /// R3: the source need not have applied s0.
    LaggingSource,
    /// R3: the source wins over newer writes of the epoch.
    SourceWins,
    /// R5: proposed before it is complete.
    ProposeEarly,
    /// C5: the order of the sending is not kept.
    AnyOrder,
    /// B2: a torn block is taken as it is, with its position.
    KeepTorn,
    /// B6: the sequence of a refused write is taken back although somebody may hold it.
    TakeBackAlways,
    /// A1: members that only a found configuration names are not fenced.
    ForgetFound,
    /// A2: the previous members of a configuration that is found are ignored.
    AttachSingle,
    /// C5: a majority of the new members alone commits.
    CommitSingle,
    /// C6: the configuration that changes the members does not carry the previous ones.
    ChangeAtOnce,
    /// C6: the removed member may drop its data before the follow-up has committed.
    DropEarly,
    /// R6: a bad block is repaired from a copy at any position.
    RepairAnyPosition,
}

#[cfg(feature = "faults")]
mod switch {
    use super::Fault;
    use core::cell::Cell;

    std::thread_local! {
        static BROKEN: Cell<Option<Fault>> = const { Cell::new(None) };
    }

    /// Breaks a rule on this thread from here on, or none.
    pub fn break_rule(fault: Option<Fault>) {
        BROKEN.set(fault);
    }

    /// Whether the rule is broken on this thread.
    pub fn is_broken(fault: Fault) -> bool {
        BROKEN.get() == Some(fault)
    }
}

#[cfg(feature = "faults")]
pub use switch::{break_rule, is_broken};

/// Whether the rule is broken: never, without the feature `faults`.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub const fn is_broken(_: Fault) -> bool {
    false
}
