//! Numbers and frames of the NBD protocol (NetworkBlockDevice/nbd, doc/proto.md). Big-endian.

/// "NBDMAGIC".
pub(super) const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT".
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Fixed newstyle, no zeroes: the server's handshake flags and the client's.
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub(super) const FLAG_NO_ZEROES: u16 = 2;

/// Bytes of an option's data; longer ones are read past and refused.
pub(super) const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Bytes of an option's header.
pub(super) const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of the header of a chunk of a structured reply.
pub(super) const CHUNK_BYTES: usize = 20;
/// Bytes of a request's header.
pub(super) const REQUEST_BYTES: usize = 28;

pub(super) mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

pub(super) mod option_reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub const UNSUPPORTED: u32 = ERROR + 1;
    pub const POLICY: u32 = ERROR + 2;
    pub const INVALID: u32 = ERROR + 3;
    pub const UNKNOWN: u32 = ERROR + 6;
    pub const TOO_BIG: u32 = ERROR + 9;
}

pub(super) mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

pub(super) mod transmission {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 2;
    pub const SEND_FLUSH: u16 = 4;
    pub const SEND_FUA: u16 = 8;
    pub const SEND_TRIM: u16 = 32;
    pub const SEND_WRITE_ZEROES: u16 = 64;
    pub const SEND_DF: u16 = 128;
    pub const CAN_MULTI_CONN: u16 = 256;
    pub const SEND_FAST_ZERO: u16 = 2048;
}

pub(super) mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

pub(super) mod command_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 2;
    pub const DF: u16 = 4;
    pub const REQ_ONE: u16 = 8;
    pub const FAST_ZERO: u16 = 16;
}

pub(super) mod chunk {
    pub const DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
}

pub(super) mod error {
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
}

/// The one metadata context: holes and zeros.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
/// The id that BLOCK_STATUS chunks name it by.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;
/// base:allocation: a hole that reads as zeros.
pub(super) const STATE_HOLE_ZERO: u32 = 3;

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// # Panics
/// When `bytes` is too short: callers check lengths first.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

impl Request {
    /// Reads a header; None when its magic is wrong.
    pub(super) fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Request> {
        (u32_at(bytes, 0) == REQUEST_MAGIC).then(|| Request {
            flags: u16_at(bytes, 4),
            command: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            len: u32_at(bytes, 24),
        })
    }
}

/// A simple reply's header.
pub(super) fn simple_reply(error: u32, cookie: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// A structured reply chunk's header.
pub(super) fn chunk_header(flags: u16, kind: u16, cookie: u64, len: u32) -> [u8; CHUNK_BYTES] {
    let mut out = [0; CHUNK_BYTES];
    out[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..].copy_from_slice(&len.to_be_bytes());
    out
}

/// Appends an option reply.
pub(super) fn option_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_another_magic_is_none() {
        let mut bytes = [0; REQUEST_BYTES];
        assert_eq!(Request::parse(&bytes), None);
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[7] = 1;
        bytes[27] = 9;
        let request = Request::parse(&bytes).expect("a request");
        assert_eq!((request.command, request.len), (command::WRITE, 9));
    }
}
