//! Answers to requests, put into a socket's output queue. Payloads go by reference.

use ashlar_engine::{Engine, SharedBytes, SocketId};
use ashlar_replication::message::Content;

use crate::front_end::{Allocation, AllocationPiece, IoError, ReadPiece};
use crate::nbd::protocol::{
    BASE_ALLOCATION_ID, CHUNK_BYTES, STATE_HOLE_ZERO, chunk, chunk_header, error, simple_reply,
};

/// Bytes of zeros that answers share.
const ZEROS_BYTES: usize = 256 << 10;
/// The longest text with an error, in bytes; the protocol allows 4096.
const TEXT_BYTES_MAX: usize = 256;

/// Where an answer goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    pub(super) socket: SocketId,
    pub(super) cookie: u64,
    pub(super) structured: bool,
}

/// Zeros for answers that must carry them, made when they are first needed.
#[derive(Default)]
pub(super) struct Zeros(Option<SharedBytes>);

impl Zeros {
    fn send(&mut self, engine: &mut Engine, socket: SocketId, len: u32) {
        let zeros = self.0.get_or_insert_with(|| {
            let mut buf = engine.buffer(ZEROS_BYTES);
            buf.fill(0);
            engine.share(buf)
        });
        let mut left = len as usize;
        while left > 0 {
            let now = left.min(ZEROS_BYTES);
            engine.send_shared(socket, zeros.slice(0..now));
            left -= now;
        }
    }
}

pub(super) fn send_done(engine: &mut Engine, to: To) {
    if to.structured {
        let header = chunk_header(chunk::DONE, chunk::NONE, to.cookie, 0);
        engine.send(to.socket, &header);
    } else {
        engine.send(to.socket, &simple_reply(0, to.cookie));
    }
}

/// `text` goes to clients that can show it.
pub(super) fn send_error(engine: &mut Engine, to: To, number: u32, text: &str) {
    if !to.structured {
        engine.send(to.socket, &simple_reply(number, to.cookie));
        return;
    }
    let text = &text.as_bytes()[..text.floor_char_boundary(TEXT_BYTES_MAX)];
    let mut out = [0; CHUNK_BYTES + 6 + TEXT_BYTES_MAX];
    let len = 6 + text.len();
    out[..CHUNK_BYTES].copy_from_slice(&chunk_header(
        chunk::DONE,
        chunk::ERROR,
        to.cookie,
        len as u32,
    ));
    out[CHUNK_BYTES..][..4].copy_from_slice(&number.to_be_bytes());
    out[CHUNK_BYTES + 4..][..2].copy_from_slice(&(text.len() as u16).to_be_bytes());
    out[CHUNK_BYTES + 6..][..text.len()].copy_from_slice(text);
    engine.send(to.socket, &out[..CHUNK_BYTES + len]);
}

/// Sends what was read from `offset` on; in one chunk of content if it has to be `single`.
pub(super) fn send_read(
    engine: &mut Engine,
    to: To,
    offset: u64,
    single: bool,
    pieces: &[ReadPiece],
    zeros: &mut Zeros,
) {
    let To { socket, cookie, .. } = to;
    let len: u32 = pieces.iter().map(|piece| piece.len).sum();
    if !to.structured || single {
        if to.structured {
            let head = content_header(chunk::DONE, chunk::OFFSET_DATA, cookie, len + 8, offset);
            engine.send(socket, &head);
        } else {
            engine.send(socket, &simple_reply(0, cookie));
        }
        for piece in pieces {
            match &piece.content {
                Content::Data(bytes) => engine.send_shared(socket, bytes.clone()),
                Content::Zeros => zeros.send(engine, socket, piece.len),
            }
        }
        return;
    }
    let (mut at, mut index) = (offset, 0);
    while index < pieces.len() {
        let piece = &pieces[index];
        let mut len = piece.len;
        index += 1;
        if piece.content == Content::Zeros {
            while let Some(next) = pieces.get(index)
                && next.content == Content::Zeros
            {
                len += next.len;
                index += 1;
            }
        }
        let flags = if index == pieces.len() {
            chunk::DONE
        } else {
            0
        };
        match &piece.content {
            Content::Data(bytes) => {
                let head = content_header(flags, chunk::OFFSET_DATA, cookie, len + 8, at);
                engine.send(socket, &head);
                engine.send_shared(socket, bytes.clone());
            }
            Content::Zeros => {
                let mut out = [0; CHUNK_BYTES + 12];
                let head = content_header(flags, chunk::OFFSET_HOLE, cookie, 12, at);
                out[..CHUNK_BYTES + 8].copy_from_slice(&head);
                out[CHUNK_BYTES + 8..].copy_from_slice(&len.to_be_bytes());
                engine.send(socket, &out);
            }
        }
        at += u64::from(len);
    }
}

fn content_header(
    flags: u16,
    kind: u16,
    cookie: u64,
    len: u32,
    offset: u64,
) -> [u8; CHUNK_BYTES + 8] {
    let mut out = [0; CHUNK_BYTES + 8];
    out[..CHUNK_BYTES].copy_from_slice(&chunk_header(flags, kind, cookie, len));
    out[CHUNK_BYTES..].copy_from_slice(&offset.to_be_bytes());
    out
}

/// `scratch` is overwritten.
pub(super) fn send_status(
    engine: &mut Engine,
    to: To,
    single: bool,
    pieces: &[AllocationPiece],
    scratch: &mut Vec<u8>,
) {
    let count = if single { 1 } else { pieces.len() };
    scratch.clear();
    scratch.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
    for piece in pieces.iter().take(count) {
        let state = match piece.allocation {
            Allocation::Data => 0,
            Allocation::Zeros => STATE_HOLE_ZERO,
        };
        // A piece is no longer than its request, whose length has 32 bits.
        let len = u32::try_from(piece.len).unwrap_or(u32::MAX);
        scratch.extend_from_slice(&len.to_be_bytes());
        scratch.extend_from_slice(&u32::to_be_bytes(state));
    }
    let len = scratch.len() as u32;
    let header = chunk_header(chunk::DONE, chunk::BLOCK_STATUS, to.cookie, len);
    engine.send(to.socket, &header);
    engine.send(to.socket, scratch);
}

/// The number of the protocol for an error.
pub(super) fn errno(error: &IoError) -> u32 {
    match error {
        IoError::OutOfRange | IoError::TooLong => error::INVAL,
        IoError::ReadOnly => error::PERM,
        IoError::NoSpace => error::NOSPC,
        // No later request can succeed on this connection.
        IoError::NotAttached | IoError::Fenced { .. } | IoError::Over(_) => error::SHUTDOWN,
        IoError::Busy | IoError::TimedOut | IoError::Media { .. } | IoError::Device => error::IO,
    }
}
