//! The member's side of the protocol: pure decisions over its durable state (M1–M10).
//!
//! Each function looks at the newest submitted state and returns the state to persist, or a decision,
//! or why the request is refused. The shell makes the new state durable before it answers.

use crate::configuration::{Configuration, MemberState, ReplicaState, Role};
use crate::faults::{Fault, is_broken};
use crate::message::Refusal;
use crate::values::{Epoch, MemberId, Pass, Position, Sequence};

/// What to do with a write (M4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteDecision {
    /// Store the blocks and move `last` to it in one durable step.
    Apply,
    /// It is in the blocks already: answer again, once that is durable.
    AlreadyApplied,
}

/// M2: every message but Fence is of the promised epoch, number and nonce.
fn check_epoch(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    if state.promised != epoch && !is_broken(Fault::OldEpochs) {
        return Err(Refusal::Fenced {
            promised: state.promised.number,
        });
    }
    Ok(())
}

/// M10: a stored configuration that does not name the member makes it refuse everything but Fence.
fn check_named(state: &MemberState) -> Result<(), Refusal> {
    match &state.configuration {
        Some(configuration) if !configuration.names(state.id) => Err(Refusal::NotMember),
        _ => Ok(()),
    }
}

fn check(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    check_epoch(state, epoch)?;
    check_named(state)
}

fn check_data(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    check(state, epoch)?;
    if state.role == Role::Witness {
        Err(Refusal::Witness)
    } else {
        Ok(())
    }
}

/// Whether the stored configuration was written in `epoch`: the epoch has started here.
fn has_started(state: &MemberState, epoch: Epoch) -> bool {
    state
        .configuration
        .as_ref()
        .is_some_and(|c| c.epoch == epoch.number)
}

/// Whether the member's line is that of a resync of this epoch, complete or not. A newcomer has no
/// configuration of the epoch when it is marked complete, and must go on with the stream (R5).
fn was_resynced_in(state: &MemberState, epoch: Epoch) -> bool {
    let (number, pass) = state.last_pass;
    // Pass 0 is the mark of an equalisation (M8).
    number == epoch.number && pass > Pass(0)
}

/// M1. The first promise to a number wins; the same epoch is promised again.
///
/// # Errors
/// [`Refusal::Fenced`] with the promised number.
pub fn fence(state: &MemberState, epoch: Epoch) -> Result<MemberState, Refusal> {
    let newer = state.promised.number < epoch.number;
    let again = state.promised == epoch
        || (is_broken(Fault::EqualEpoch) && state.promised.number == epoch.number);
    if !newer && !again {
        return Err(Refusal::Fenced {
            promised: state.promised.number,
        });
    }
    Ok(MemberState {
        promised: epoch,
        ..state.clone()
    })
}

/// M3. Storing the configuration and starting the epoch are one durable step.
///
/// # Errors
/// By M2; [`Refusal::OlderConfiguration`]; [`Refusal::BadRequest`] for one of another epoch or
/// one that is no configuration.
pub fn store_config(
    state: &MemberState,
    epoch: Epoch,
    configuration: &Configuration,
    start: &[MemberId],
) -> Result<MemberState, Refusal> {
    check_epoch(state, epoch)?;
    // M10 does not stand in the way of a configuration that names the member again.
    if configuration.check().is_err() || configuration.epoch != epoch.number {
        return Err(Refusal::BadRequest);
    }
    let mut next = state.clone();
    if let Some(stored) = &state.configuration {
        if configuration.order() < stored.order() {
            return Err(Refusal::OlderConfiguration);
        }
        if configuration.order() == stored.order() {
            // Within an epoch a generation is one configuration (C1).
            return if configuration == stored {
                Ok(next)
            } else {
                Err(Refusal::BadRequest)
            };
        }
    }
    next.configuration = Some(configuration.clone());
    if start.contains(&state.id) && state.last.epoch != epoch.number && state.role == Role::Data {
        next.last = Position::start_of(epoch.number);
    }
    Ok(next)
}

/// M4.
///
/// # Errors
/// By M2, M10; [`Refusal::NotStarted`]; [`Refusal::Gap`] with the member's `last`.
pub fn check_write(
    state: &MemberState,
    epoch: Epoch,
    sequence: Sequence,
) -> Result<WriteDecision, Refusal> {
    check_data(state, epoch)?;
    if !has_started(state, epoch) && !was_resynced_in(state, epoch) {
        return Err(Refusal::NotStarted);
    }
    if state.last.epoch != epoch.number {
        return Err(Refusal::Gap { last: state.last });
    }
    if sequence <= state.last.sequence {
        return Ok(WriteDecision::AlreadyApplied);
    }
    if sequence != state.last.sequence.next() && !is_broken(Fault::AcceptGap) {
        return Err(Refusal::Gap { last: state.last });
    }
    Ok(WriteDecision::Apply)
}

/// M5. Copies of older passes are dead from here on.
///
/// # Errors
/// By M2, M10; [`Refusal::StalePass`].
pub fn begin_resync(
    state: &MemberState,
    epoch: Epoch,
    pass: Pass,
    sequence: Sequence,
) -> Result<MemberState, Refusal> {
    check_data(state, epoch)?;
    if (epoch.number, pass) <= state.last_pass {
        return Err(Refusal::StalePass);
    }
    Ok(MemberState {
        last_pass: (epoch.number, pass),
        state: ReplicaState::Resyncing {
            epoch: epoch.number,
            pass,
        },
        last: Position {
            epoch: epoch.number,
            sequence,
        },
        ..state.clone()
    })
}

/// M6; the store compares the expected positions.
///
/// # Errors
/// By M2, M10; [`Refusal::StalePass`].
pub fn check_copy(state: &MemberState, epoch: Epoch, pass: Pass) -> Result<(), Refusal> {
    check_data(state, epoch)?;
    let current = ReplicaState::Resyncing {
        epoch: epoch.number,
        pass,
    };
    if state.state == current {
        Ok(())
    } else {
        Err(Refusal::StalePass)
    }
}

/// M7.
///
/// # Errors
/// By M2, M10; [`Refusal::StalePass`].
pub fn mark_complete(
    state: &MemberState,
    epoch: Epoch,
    pass: Pass,
) -> Result<MemberState, Refusal> {
    check_data(state, epoch)?;
    if state.state.is_complete() && state.last_pass == (epoch.number, pass) {
        // A repeated message of the pass that is complete already.
        return Ok(state.clone());
    }
    check_copy(state, epoch, pass)?;
    Ok(MemberState {
        state: ReplicaState::Complete,
        ..state.clone()
    })
}

/// M8: only while complete and before the epoch has started here.
///
/// # Errors
/// By M2, M10; [`Refusal::NotComplete`]; [`Refusal::AlreadyStarted`].
pub fn check_equalise(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    check_data(state, epoch)?;
    if !state.state.is_complete() {
        return Err(Refusal::NotComplete);
    }
    let before = state
        .configuration
        .as_ref()
        .is_none_or(|c| c.epoch < epoch.number);
    if before {
        Ok(())
    } else {
        Err(Refusal::AlreadyStarted)
    }
}

/// M8. It also notes that blocks are, or are about to be, made equal in this epoch: as a pass below every
/// resync of the epoch, so that an attach which finds this member after an interrupted one knows (A5).
///
/// # Errors
/// Those of [`check_equalise`]; [`Refusal::BadRequest`] for a position of this epoch.
pub fn set_last(
    state: &MemberState,
    epoch: Epoch,
    position: Position,
) -> Result<MemberState, Refusal> {
    check_equalise(state, epoch)?;
    if position.epoch >= epoch.number {
        return Err(Refusal::BadRequest);
    }
    Ok(MemberState {
        last: position,
        last_pass: state.last_pass.max((epoch.number, Pass(0))),
        ..state.clone()
    })
}

/// M9.
///
/// # Errors
/// By M2, M10; [`Refusal::NotComplete`].
pub fn check_read(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    check_data(state, epoch)?;
    if state.state.is_complete() {
        Ok(())
    } else {
        Err(Refusal::NotComplete)
    }
}

/// M9: positions are told in any state.
///
/// # Errors
/// By M2, M10.
pub fn check_compare(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    check_data(state, epoch)
}

/// R6; the store compares the position.
///
/// # Errors
/// By M2, M10; [`Refusal::NotComplete`].
pub fn check_repair(state: &MemberState, epoch: Epoch) -> Result<(), Refusal> {
    check_read(state, epoch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::{DeviceId, EpochNumber};

    #[test]
    fn a_newcomer_goes_on_with_the_stream_between_complete_and_its_first_configuration() {
        let epoch = Epoch {
            number: EpochNumber(5),
            nonce: 1,
        };
        let fresh = MemberState {
            id: MemberId {
                device: DeviceId([1; 16]),
                nonce: 1,
            },
            role: Role::Data,
            promised: epoch,
            configuration: None,
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        };
        let next = Sequence(8);
        assert_eq!(check_write(&fresh, epoch, next), Err(Refusal::NotStarted));
        let begun = begin_resync(&fresh, epoch, Pass(1), Sequence(7)).expect("it is a newcomer");
        let complete = mark_complete(&begun, epoch, Pass(1)).expect("of that pass");
        assert_eq!(
            check_write(&complete, epoch, next),
            Ok(WriteDecision::Apply)
        );
        // What was made equal by an attach has not started (holes 23).
        let equalised = set_last(&fresh, epoch, Position::ZERO).expect("it has not started");
        let refused = check_write(&equalised, epoch, Sequence(1));
        assert_eq!(refused, Err(Refusal::NotStarted));
    }
}
