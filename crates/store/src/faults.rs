//! Duties of the store that tests leave undone on purpose, to show that the simulator finds it.
//!
//! Without the feature `faults` nothing is ever left undone and the questions cost nothing.

/// A duty that can be left undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A journal record counts as durable when it is written, not when it is synced.
    AcknowledgeBeforeSync,
    /// The CRC of an extent's header is not looked at.
    SkipHeaderChecksum,
    /// The journal's tail moves before home writes are synced.
    MoveTailEarly,
    /// The index is believed after a crash, whatever the headers say.
    TrustIndex,
    /// Zeros lose their position with the data.
    LoseDiscardPosition,
    /// A torn block is taken for what was to be written there.
    ReuseTornPosition,
    /// M4: a torn block counts as one that holds the position.
    SkipTorn,
}

#[cfg(feature = "faults")]
mod switch {
    use super::Fault;
    use std::cell::Cell;

    thread_local! {
        static BROKEN: Cell<Option<Fault>> = const { Cell::new(None) };
    }

    /// Leaves a duty undone on this thread from here on, or none.
    pub fn leave_undone(fault: Option<Fault>) {
        BROKEN.set(fault);
    }

    /// Whether the duty is left undone on this thread.
    pub fn is_broken(fault: Fault) -> bool {
        BROKEN.get() == Some(fault)
    }
}

#[cfg(feature = "faults")]
pub use switch::{is_broken, leave_undone};

/// Whether the duty is left undone: never, without the feature `faults`.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub const fn is_broken(_: Fault) -> bool {
    false
}
