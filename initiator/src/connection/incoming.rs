//! Frames of a peer, lifted out of the receive buffer.

use std::ops::Range;

use ashlar_engine::{Engine, SocketId};
use ashlar_replication::message::{Content, ReadData, ReadError, Reply, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, EpochNumber, Position};
use ashlar_wire::proof::Proof;
use ashlar_wire::{BlockData, Decoded, Frame, GoodbyeCode, Payload, Promise, Welcome};

/// A frame that a storage node may send, independent of the receive buffer.
#[derive(Debug)]
pub(super) enum Incoming {
    Welcome(Welcome),
    Goodbye(GoodbyeCode, String),
    /// A Promise with a copy of the bytes that its proof covers.
    Promised {
        handle: u32,
        promise: Promise,
        answer: Vec<u8>,
        proof: Proof,
    },
    Renewed {
        echo: u64,
    },
    Fenced {
        handle: u32,
        promised: EpochNumber,
    },
    Reply {
        handle: u32,
        reply: Reply<Payload>,
    },
    /// Data that is to be copied out of the receive buffer.
    Data {
        handle: u32,
        id: RequestId,
        positions: Vec<Position>,
        span: Range<usize>,
    },
}

/// What [`next`] found.
#[allow(
    clippy::large_enum_variant,
    reason = "short-lived on the stack; a box would be an allocation per frame"
)]
#[derive(Debug)]
pub(super) enum Next {
    /// A frame of so many bytes.
    Frame(Incoming, usize),
    /// So many bytes are needed to go on.
    Need(usize),
    /// The connection cannot go on; why.
    Bad(String),
}

/// Reads the next frame at the front of `input`. `crcs` receives the checksums of data, if it has any.
pub(super) fn next(input: &[u8], crcs: &mut Vec<u32>) -> Next {
    let (frame, bytes) = match ashlar_wire::decode(input) {
        Ok(Decoded::Incomplete { need }) => return Next::Need(need),
        Ok(Decoded::Frame {
            frame: Ok(frame),
            bytes,
        }) => (frame, bytes),
        Ok(Decoded::Frame {
            frame: Err(bad), ..
        }) => return Next::Bad(bad.error.to_string()),
        Err(error) => return Next::Bad(error.to_string()),
    };
    let incoming = match frame {
        Frame::Reply { handle, reply } => lift_reply(handle, reply, bytes, crcs),
        Frame::Renewed { echo } => Incoming::Renewed { echo },
        Frame::Fenced { handle, promised } => Incoming::Fenced { handle, promised },
        Frame::Promised {
            handle,
            promise,
            answer,
            proof,
        } => Incoming::Promised {
            handle,
            promise,
            answer: answer.to_vec(),
            proof,
        },
        Frame::FenceRefused { handle, refusal } => Incoming::Reply {
            handle,
            reply: Reply::Refused {
                id: RequestId(0),
                refusal,
            },
        },
        Frame::Welcome(welcome) => Incoming::Welcome(welcome),
        Frame::Goodbye { code, text } => Incoming::Goodbye(code, text.to_owned()),
        Frame::Hello(_)
        | Frame::Fence(_)
        | Frame::Release { .. }
        | Frame::Renew { .. }
        | Frame::Request { .. } => return Next::Bad("the peer sent an initiator's frame".into()),
    };
    Next::Frame(incoming, bytes)
}

/// `bytes`: of the whole frame, whose tail is the data.
fn lift_reply(
    handle: u32,
    reply: Reply<BlockData<'_>>,
    bytes: usize,
    crcs: &mut Vec<u32>,
) -> Incoming {
    let reply = match reply {
        Reply::Data {
            id,
            result:
                Ok(ReadData {
                    positions,
                    content: Content::Data(blocks),
                }),
        } => {
            crcs.clear();
            crcs.extend(blocks.crcs.iter().map(|crc| crc.get()));
            let span = bytes - blocks.data.len()..bytes;
            return Incoming::Data {
                handle,
                id,
                positions,
                span,
            };
        }
        other => other.map_content(|content| match content {
            Content::Zeros => Content::Zeros,
            Content::Data(_) => unreachable!("data was lifted above"),
        }),
    };
    Incoming::Reply { handle, reply }
}

/// Copies data out of the receive buffer and checks it. False: it does not match its checksums; then
/// the answer is a read error, so that another member is asked.
pub(super) fn take_data(
    engine: &mut Engine,
    socket: SocketId,
    span: Range<usize>,
    crcs: &[u32],
    id: RequestId,
    positions: Vec<Position>,
) -> (Reply<Payload>, bool) {
    debug_assert_eq!(span.len(), crcs.len() * BLOCK_BYTES);
    let mut buf = engine.buffer(span.len());
    buf.copy_from_slice(&engine.input(socket)[span]);
    let data = engine.share(buf);
    let payload = Payload::with_crcs(data, crcs.iter().copied());
    if payload.first_bad_block().is_some() {
        // The member checks what it reads, so this happened on the way: its copy needs no repair.
        return (
            Reply::Data {
                id,
                result: Err(ReadError::Device),
            },
            false,
        );
    }
    let content = Content::Data(payload);
    (
        Reply::Data {
            id,
            result: Ok(ReadData { positions, content }),
        },
        true,
    )
}
