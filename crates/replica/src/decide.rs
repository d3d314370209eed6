//! The member's rules over the newest state that was submitted to the store.

use ashlar_replication::configuration::MemberState;
use ashlar_replication::member;
use ashlar_replication::message::{Refusal, Request};
use ashlar_replication::values::{Epoch, Position, Sequence};
use ashlar_store::Replica;

use crate::{Answer, Promised};

/// What the rules make of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Something for the store to do, and what is answered when that is durable.
    Step(Step, Answer),
    /// A write that was applied before: it is answered again once it is durable.
    Applied,
}

/// Something for the store to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A new state is to be made durable.
    State(Box<MemberState>),
    /// The request's blocks are to be written or read.
    Blocks,
}

/// Decides on a request of `epoch`.
///
/// # Errors
/// Why it is refused.
pub fn decide<P>(
    replica: &Replica,
    epoch: Epoch,
    request: &Request<P>,
) -> Result<Decision, Refusal> {
    let changes_blocks = matches!(
        request,
        Request::Write { .. } | Request::BeginResync { .. } | Request::Copy { .. }
    );
    if replica.evicted && changes_blocks {
        return Err(Refusal::Evicted);
    }
    let state = &replica.state;
    let changed = |next, answer| Ok(Decision::Step(Step::State(Box::new(next)), answer));
    let blocks = |answer| Ok(Decision::Step(Step::Blocks, answer));
    match request {
        Request::Write { sequence, .. } => match member::check_write(state, epoch, *sequence)? {
            member::WriteDecision::Apply => {
                let position = position(epoch, *sequence);
                blocks(Answer::Write(position))
            }
            member::WriteDecision::AlreadyApplied => Ok(Decision::Applied),
        },
        Request::StoreConfig {
            id,
            configuration,
            start,
        } => {
            let next = member::store_config(state, epoch, configuration, start)?;
            changed(next, Answer::Done(*id))
        }
        Request::BeginResync { id, pass, sequence } => {
            let next = member::begin_resync(state, epoch, *pass, *sequence)?;
            changed(next, Answer::Resync(*id, position(epoch, *sequence)))
        }
        Request::MarkComplete { id, pass } => {
            let next = member::mark_complete(state, epoch, *pass)?;
            changed(next, Answer::Done(*id))
        }
        Request::SetLast { id, position } => {
            let next = member::set_last(state, epoch, *position)?;
            changed(next, Answer::Done(*id))
        }
        Request::Fence { epoch } => {
            let next = member::fence(state, *epoch)?;
            let promised = Promised {
                state: next.clone(),
                torn: replica.torn.clone(),
            };
            let answer = Answer::Fence(Box::new(promised));
            changed(next, answer)
        }
        Request::Copy { id, pass, .. } => {
            member::check_copy(state, epoch, *pass)?;
            blocks(Answer::Copy(*id))
        }
        Request::Equalise { id, .. } => {
            member::check_equalise(state, epoch)?;
            blocks(Answer::Equalise(*id))
        }
        Request::Repair { id, .. } => {
            member::check_repair(state, epoch)?;
            blocks(Answer::Repair(*id))
        }
        Request::Read { id, .. } => {
            member::check_read(state, epoch)?;
            blocks(Answer::Read(*id))
        }
        Request::Compare { id, .. } | Request::ListAbove { id, .. } => {
            member::check_compare(state, epoch)?;
            blocks(Answer::Positions(*id))
        }
        Request::Digests { id, .. } => {
            member::check_compare(state, epoch)?;
            blocks(Answer::Digests(*id))
        }
    }
}

pub(crate) fn position(epoch: Epoch, sequence: Sequence) -> Position {
    Position {
        epoch: epoch.number,
        sequence,
    }
}
