//! From what the store has finished to the answer.

use ashlar_replication::message::{ReadError, Refusal, Reply, RequestId};
use ashlar_replication::values::Position;
use ashlar_store::{Outcome, ReadOutcome, ReplicaSlot, Store, StoreError};

use crate::{Answer, Promised};

/// What a finished operation means to whoever asked.
#[derive(Debug)]
pub enum Finished {
    /// Writes up to this position are durable: a cumulative answer is owed.
    Applied(Position),
    /// As it is.
    Reply(Reply<()>),
    /// BeginResync is durable: what was durable before belongs to another pass; then Done.
    Resync(RequestId, Position),
    /// The promise is durable, or why it is not; see [`crate::promise`].
    Fence(Box<Promised>, Result<(), Refusal>),
    /// The data, whose buffer goes back by `Store::recycle`.
    Data(RequestId, ReadOutcome),
    /// The read failed.
    ReadFailed(RequestId, ReadError),
    /// The write or request is refused.
    Refused(Reply<()>, Refusal),
}

/// What a refused store call is called on the wire.
pub fn refusal_of(error: StoreError) -> Refusal {
    match error {
        StoreError::DeviceFull | StoreError::ReplicasFull => Refusal::DeviceFull,
        StoreError::UnknownReplica => Refusal::UnknownReplica,
        StoreError::Witness => Refusal::Witness,
        StoreError::BadRange | StoreError::Checksum | StoreError::PositionChanged => {
            Refusal::BadRequest
        }
        StoreError::Closed
        | StoreError::HeaderDamaged
        | StoreError::IndexWrong
        | StoreError::AlreadyExists => Refusal::DeviceClosed,
    }
}

impl Answer {
    /// What to answer, given how the operation ended.
    ///
    /// # Panics
    /// When the outcome is not one of the operation that was begun for this answer.
    pub fn finish(self, store: &Store, slot: ReplicaSlot, outcome: Outcome) -> Finished {
        let refused = |id, error| {
            let refusal = refusal_of(error);
            Finished::Refused(Reply::Refused { id, refusal }, refusal)
        };
        match (self, outcome) {
            (Answer::Write(position), Outcome::Done(Ok(()))) => Finished::Applied(position),
            (Answer::Write(position), Outcome::Done(Err(error))) => {
                let (sequence, refusal) = (position.sequence, refusal_of(error));
                Finished::Refused(Reply::WriteRefused { sequence, refusal }, refusal)
            }
            (Answer::Resync(id, last), Outcome::Done(Ok(()))) => Finished::Resync(id, last),
            (Answer::Fence(promised), Outcome::Done(result)) => {
                Finished::Fence(promised, result.map_err(refusal_of))
            }
            (
                Answer::Done(id) | Answer::Equalise(id) | Answer::Repair(id),
                Outcome::Done(Ok(())),
            ) => Finished::Reply(Reply::Done { id }),
            (Answer::Read(id), Outcome::Read(Ok(read))) => Finished::Data(id, read),
            (Answer::Read(id), Outcome::Read(Err(error))) => Finished::ReadFailed(id, error),
            (Answer::Copy(id), Outcome::Copied(Ok(changed))) => {
                Finished::Reply(Reply::Copied { id, changed })
            }
            (Answer::Positions(id), Outcome::Positions(Ok(list))) => {
                let last = store.replica(slot).map(|r| r.state.last);
                Finished::Reply(Reply::Positions {
                    id,
                    positions: list.positions,
                    next: list.next,
                    last: last.unwrap_or_default(),
                })
            }
            (Answer::Digests(id), Outcome::Digests(Ok(digests))) => {
                Finished::Reply(Reply::Digests { id, digests })
            }
            (
                Answer::Done(id)
                | Answer::Resync(id, _)
                | Answer::Equalise(id)
                | Answer::Repair(id),
                Outcome::Done(Err(error)),
            )
            | (Answer::Copy(id), Outcome::Copied(Err(error)))
            | (Answer::Positions(id), Outcome::Positions(Err(error)))
            | (Answer::Digests(id), Outcome::Digests(Err(error))) => refused(id, error),
            (answer, outcome) => unreachable!("{answer:?} got {outcome:?}"),
        }
    }
}
