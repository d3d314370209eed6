//! Refusals and read errors as (code, argument).

use ashlar_replication::message::{ReadError, Refusal};
use ashlar_replication::values::{Block, EpochNumber, Position};

/// Codes of read errors above this one are refusals.
const READ_REFUSED: u32 = 0x100;

pub(crate) fn refusal_code(refusal: Refusal) -> (u32, u64) {
    match refusal {
        Refusal::Fenced { promised } => (1, u64::from(promised.0)),
        Refusal::UnknownReplica => (2, 0),
        Refusal::NotStarted => (3, 0),
        Refusal::Gap { last } => (4, last.pack()),
        Refusal::StalePass => (5, 0),
        Refusal::NotComplete => (6, 0),
        Refusal::AlreadyStarted => (7, 0),
        Refusal::NotMember => (8, 0),
        Refusal::OlderConfiguration => (9, 0),
        Refusal::Witness => (10, 0),
        Refusal::Evicted => (11, 0),
        Refusal::DeviceFull => (12, 0),
        Refusal::DeviceClosed => (13, 0),
        Refusal::BadRequest => (14, 0),
        Refusal::Unauthenticated => (15, 0),
    }
}

pub(crate) fn refusal_from(code: u32, argument: u64) -> Option<Refusal> {
    Some(match code {
        1 => {
            let number = EpochNumber(u32::try_from(argument).ok()?);
            if number > EpochNumber::MAX {
                return None;
            }
            Refusal::Fenced { promised: number }
        }
        2 => Refusal::UnknownReplica,
        3 => Refusal::NotStarted,
        4 => Refusal::Gap {
            last: Position::unpack(argument),
        },
        5 => Refusal::StalePass,
        6 => Refusal::NotComplete,
        7 => Refusal::AlreadyStarted,
        8 => Refusal::NotMember,
        9 => Refusal::OlderConfiguration,
        10 => Refusal::Witness,
        11 => Refusal::Evicted,
        12 => Refusal::DeviceFull,
        13 => Refusal::DeviceClosed,
        14 => Refusal::BadRequest,
        15 => Refusal::Unauthenticated,
        _ => return None,
    })
}

/// (code, block, argument).
pub(crate) fn read_error_code(error: ReadError) -> (u32, u64, u64) {
    match error {
        ReadError::Checksum { block, position } => (1, block.0, position.pack()),
        ReadError::Torn { block, position } => (2, block.0, position.pack()),
        ReadError::Device => (3, 0, 0),
        ReadError::Refused(refusal) => {
            let (code, argument) = refusal_code(refusal);
            (READ_REFUSED + code, 0, argument)
        }
    }
}

pub(crate) fn read_error_from(code: u32, block: Block, argument: u64) -> Option<ReadError> {
    let position = Position::unpack(argument);
    Some(match code {
        1 => ReadError::Checksum { block, position },
        2 => ReadError::Torn { block, position },
        3 => ReadError::Device,
        _ => ReadError::Refused(refusal_from(code.checked_sub(READ_REFUSED)?, argument)?),
    })
}
