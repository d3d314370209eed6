//! A replica as a member of its volume: from a request by the protocol's rules to the store, and from what the
//! store has finished to the answer. No sockets, scheduling or time, so that the storage node and the simulator
//! run the same code.
//!
//! The way of a request: [`decide`], then [`submit`] with a token of the caller's, then, when the store reports
//! that token, [`Answer::finish`].

mod attachment;
mod decide;
mod finish;
mod submit;

pub use attachment::{Attachment, promise};
pub use decide::{Decision, Step, decide};
pub use finish::{Finished, refusal_of};
pub use submit::{BlockSource, submit};

use ashlar_replication::configuration::MemberState;
use ashlar_replication::message::{BlockPosition, RequestId};
use ashlar_replication::values::Position;

/// What becomes durable with a promise. What is submitted later is not durable yet when the promise is, so it must
/// not be told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promised {
    /// The member's state.
    pub state: MemberState,
    /// Blocks that a crash left torn (B2).
    pub torn: Vec<BlockPosition>,
}

/// What is to be answered when the store has finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Applied, cumulative.
    Write(Position),
    /// Done.
    Done(RequestId),
    /// Done, for BeginResync: the stream goes on after this position.
    Resync(RequestId, Position),
    /// Promised, by [`promise`].
    Fence(Box<Promised>),
    /// Data.
    Read(RequestId),
    /// Copied.
    Copy(RequestId),
    /// Done.
    Equalise(RequestId),
    /// Done.
    Repair(RequestId),
    /// Positions.
    Positions(RequestId),
    /// Digests.
    Digests(RequestId),
}
