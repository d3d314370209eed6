//! Frames of a turn on their way to sockets. They are collected here because requests are read in
//! place from the engine's buffers, and are handed over when the turn ends.

use ashlar_engine::{Engine, IoBuf, SocketId};

/// Bytes of frames, block data not included, that are kept for the next turn.
const BYTES_KEPT: usize = 256 << 10;

struct Entry {
    socket: SocketId,
    end: usize,
    data: Option<IoBuf>,
    close: bool,
}

/// Collected output; its memory is reused from turn to turn.
#[derive(Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
    /// Sockets that the last turn sent to: whether their peers take it shows after the next poll.
    sent: Vec<SocketId>,
}

impl Outbox {
    /// Adds a frame that `write` appends to the buffer it is given.
    pub fn frame(&mut self, socket: SocketId, write: impl FnOnce(&mut Vec<u8>)) {
        self.add(socket, None, false, write);
    }

    /// Adds a frame with block data behind it.
    pub fn frame_with_data(
        &mut self,
        socket: SocketId,
        data: IoBuf,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        self.add(socket, Some(data), false, write);
    }

    /// Adds the last frame of a connection.
    pub fn last_frame(&mut self, socket: SocketId, write: impl FnOnce(&mut Vec<u8>)) {
        self.add(socket, None, true, write);
    }

    fn add(
        &mut self,
        socket: SocketId,
        data: Option<IoBuf>,
        close: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        write(&mut self.bytes);
        self.entries.push(Entry {
            socket,
            end: self.bytes.len(),
            data,
            close,
        });
    }

    /// Hands everything to the engine.
    pub fn flush(&mut self, engine: &mut Engine) {
        let mut start = 0;
        self.sent.clear();
        for entry in self.entries.drain(..) {
            engine.send(entry.socket, &self.bytes[start..entry.end]);
            start = entry.end;
            if let Some(data) = entry.data {
                let shared = engine.share(data);
                engine.send_shared(entry.socket, shared);
            }
            if entry.close {
                engine.close(entry.socket);
            } else if self.sent.last() != Some(&entry.socket) {
                self.sent.push(entry.socket);
            }
        }
        self.bytes.clear();
        // A turn with many large answers must not hold its memory for ever.
        self.bytes.shrink_to(BYTES_KEPT);
    }

    /// Sockets that the last turn sent to.
    pub fn sent(&self) -> &[SocketId] {
        &self.sent
    }
}
