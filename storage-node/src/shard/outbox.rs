//! Frames of a turn on their way to sockets. They are collected here because requests are read in
//! place from the engine's buffers, and are handed over when the turn ends.

use ashlar_engine::{Engine, IoBuf, SocketId};

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
        for entry in self.entries.drain(..) {
            engine.send(entry.socket, &self.bytes[start..entry.end]);
            start = entry.end;
            if let Some(data) = entry.data {
                let shared = engine.share(data);
                engine.send_shared(entry.socket, shared);
            }
            if entry.close {
                engine.close(entry.socket);
            }
        }
        self.bytes.clear();
    }
}
