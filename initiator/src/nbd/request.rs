//! Which requests are taken, and the error that the protocol names for the others.

use crate::front_end::{REQUEST_BYTES_MAX, VolumeAccess, VolumeInfo, Zero};
use crate::nbd::protocol::{Request, command, command_flag as flag, error};

/// A request within all limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read {
        /// One chunk of content (DF).
        single: bool,
    },
    Write,
    Zero(Zero),
    Flush,
    Status {
        /// One extent (REQ_ONE).
        single: bool,
    },
}

/// Why a request is not begun: the number of the protocol, and words for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub(super) u32, pub(super) &'static str);

/// What was negotiated, as far as requests depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Negotiated {
    pub(super) structured: bool,
    pub(super) block_status: bool,
}

/// Checks a request other than DISC.
pub(super) fn check(
    request: &Request,
    volume: &VolumeInfo,
    negotiated: Negotiated,
) -> Result<Command, Refusal> {
    let Request { offset, len, .. } = *request;
    // FUA means nothing for requests that write nothing; the protocol lets it pass.
    let allowed = flag::FUA
        | match request.command {
            command::READ if negotiated.structured => flag::DF,
            command::READ | command::WRITE | command::TRIM | command::FLUSH => 0,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS => flag::REQ_ONE,
            _ => return Err(Refusal(error::INVAL, "the command is not known")),
        };
    if request.flags & !allowed != 0 {
        let text = "a flag is not known, or not for this command";
        return Err(Refusal(error::INVAL, text));
    }
    let has = |flag: u16| request.flags & flag != 0;
    let writes = matches!(
        request.command,
        command::WRITE | command::TRIM | command::WRITE_ZEROES
    );
    if writes && volume.access == VolumeAccess::ReadOnly {
        return Err(Refusal(error::PERM, "the volume is attached read-only"));
    }
    if request.command == command::FLUSH {
        return if offset == 0 && len == 0 {
            Ok(Command::Flush)
        } else {
            Err(Refusal(error::INVAL, "a flush has no offset and no length"))
        };
    }
    if len == 0 {
        return Err(Refusal(error::INVAL, "the length is zero"));
    }
    if u64::from(len) > volume.size_bytes || offset > volume.size_bytes - u64::from(len) {
        let number = match request.command {
            command::WRITE | command::WRITE_ZEROES => error::NOSPC,
            _ => error::INVAL,
        };
        return Err(Refusal(number, "the range reaches beyond the end"));
    }
    let has_payload = matches!(request.command, command::READ | command::WRITE);
    if has_payload && len > REQUEST_BYTES_MAX {
        return Err(Refusal(error::INVAL, "more than the largest payload"));
    }
    match request.command {
        command::READ => Ok(Command::Read {
            single: has(flag::DF),
        }),
        command::WRITE => Ok(Command::Write),
        command::TRIM => Ok(Command::Zero(Zero::Discard)),
        command::WRITE_ZEROES if has(flag::NO_HOLE) => {
            // Space is only had by writing the zeros, which is as slow as any write.
            if has(flag::FAST_ZERO) {
                let text = "zeros with space behind them are not fast";
                return Err(Refusal(error::NOTSUP, text));
            }
            Ok(Command::Zero(Zero::Provision))
        }
        command::WRITE_ZEROES => Ok(Command::Zero(Zero::WriteZeroes)),
        _ if negotiated.block_status => Ok(Command::Status {
            single: has(flag::REQ_ONE),
        }),
        _ => Err(Refusal(error::INVAL, "no metadata context was chosen")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_replication::values::VolumeId;
    use proptest::prelude::*;

    const SIZE: u64 = 1 << 30;

    fn volume(access: VolumeAccess) -> VolumeInfo {
        VolumeInfo {
            id: VolumeId([1; 16]),
            name: "data".into(),
            size_bytes: SIZE,
            access,
        }
    }

    fn all() -> Negotiated {
        Negotiated {
            structured: true,
            block_status: true,
        }
    }

    fn number(command: u16, flags: u16, offset: u64, len: u32) -> u32 {
        let request = Request {
            flags,
            command,
            cookie: 7,
            offset,
            len,
        };
        let checked = check(&request, &volume(VolumeAccess::ReadWrite), all());
        checked.map_or_else(|refusal| refusal.0, |_| 0)
    }

    #[test]
    fn each_violation_gets_the_error_that_the_protocol_names() {
        use command as c;
        let cases = [
            (c::WRITE, 0, SIZE, 1, error::NOSPC),
            (c::WRITE_ZEROES, 0, SIZE - 1, 2, error::NOSPC),
            (c::READ, 0, SIZE, 1, error::INVAL),
            (c::READ, 0, u64::MAX, 1, error::INVAL),
            (c::TRIM, 0, SIZE - 1, 2, error::INVAL),
            (c::BLOCK_STATUS, 0, SIZE, 1, error::INVAL),
            (c::READ, 0, 0, 0, error::INVAL),
            (c::READ, 0, 0, REQUEST_BYTES_MAX + 1, error::INVAL),
            (c::WRITE, 0, 0, REQUEST_BYTES_MAX + 1, error::INVAL),
            (c::READ, flag::NO_HOLE, 0, 1, error::INVAL),
            (c::WRITE, flag::DF, 0, 1, error::INVAL),
            (c::FLUSH, 0, 1, 0, error::INVAL),
            (5, 0, 0, 1, error::INVAL),
            (99, 0, 0, 1, error::INVAL),
            (
                c::WRITE_ZEROES,
                flag::NO_HOLE | flag::FAST_ZERO,
                0,
                1,
                error::NOTSUP,
            ),
            (c::WRITE_ZEROES, flag::FAST_ZERO, 0, 1 << 30, 0),
            (c::READ, flag::DF | flag::FUA, SIZE - 1, 1, 0),
            (c::WRITE, flag::FUA, 0, REQUEST_BYTES_MAX, 0),
        ];
        for (command, flags, offset, len, expected) in cases {
            let found = number(command, flags, offset, len);
            assert_eq!(found, expected, "command {command} {flags} {offset} {len}");
        }
    }

    #[test]
    fn a_read_only_volume_refuses_what_writes_and_nothing_else() {
        for command in 0..8 {
            if command == command::DISCONNECT {
                continue;
            }
            let request = Request {
                flags: 0,
                command,
                cookie: 0,
                offset: 0,
                len: if command == command::FLUSH { 0 } else { 1 },
            };
            let checked = check(&request, &volume(VolumeAccess::ReadOnly), all());
            let writes = matches!(
                command,
                command::WRITE | command::TRIM | command::WRITE_ZEROES
            );
            let refused = matches!(checked, Err(Refusal(error::PERM, _)));
            assert_eq!(refused, writes, "command {command}: {checked:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_taken_lies_within_the_volume(bytes in any::<[u8; 28]>(), len in any::<u32>(),
            offset in any::<u64>(), command in 0_u16..9, flags in 0_u16..32) {
            let mut request = Request::parse(&bytes).unwrap_or(Request {
                flags, command, cookie: 1, offset, len,
            });
            request.offset %= 2 * SIZE;
            if check(&request, &volume(VolumeAccess::ReadWrite), all()).is_ok() {
                prop_assert!(request.offset + u64::from(request.len) <= SIZE);
            }
        }
    }
}
