//! From the bytes that a client sends to requests of its volume.

use ashlar_engine::SocketId;
use ashlar_replication::values::EXTENT_BYTES;

use crate::front_end::{ByteRequest, Completed, Context, IoError, VolumeHandle};
use crate::nbd::negotiation::Step;
use crate::nbd::protocol::{REQUEST_BYTES, Request, command, error};
use crate::nbd::reply::send_error;
use crate::nbd::request::{Command, Negotiated, Refusal, check};
use crate::nbd::server::{
    ANSWER_BYTES_MAX, NbdServer, REQUESTS_MAX, SESSION_ANSWER_BYTES_MAX, SMALL_READ_BYTES, ticket,
};
use crate::nbd::session::{Payload, Pending, Phase, Receiving, Transmission};

/// Whether the rest of the input can be looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Onwards,
    /// More bytes or more room are needed, or the connection is over.
    Stop,
}

impl NbdServer {
    /// Handles as much of the input as can be.
    pub(super) fn receive(&mut self, context: &mut Context<'_>, socket: SocketId) {
        loop {
            let Some(session) = self.sessions.get_mut(&socket) else {
                return;
            };
            if session.leaving || session.waiting {
                return;
            }
            // One that only sends, and never takes an answer, must not make the queue grow.
            if context.engine().queued_bytes(socket) as u64 > SESSION_ANSWER_BYTES_MAX {
                self.wait(context, socket);
                return;
            }
            let progress = match &session.phase {
                Phase::Negotiation(_) => self.negotiate(context, socket),
                Phase::Transmission(transmission) => match &transmission.receiving {
                    Receiving::Header => self.header(context, socket),
                    Receiving::Payload(_) => self.payload(context, socket),
                    Receiving::Skipped { .. } => self.skip(context, socket),
                },
            };
            if progress == Progress::Stop {
                return;
            }
        }
    }

    /// Stops receiving until there is room. It is tried again every turn.
    fn wait(&mut self, context: &mut Context<'_>, socket: SocketId) {
        let Some(session) = self.sessions.get_mut(&socket) else {
            return;
        };
        session.waiting = true;
        self.waiting.push(socket);
        if !session.paused {
            session.paused = true;
            self.counters.pauses.count();
            context.engine().pause(socket);
        }
    }

    fn negotiate(&mut self, context: &mut Context<'_>, socket: SocketId) -> Progress {
        let Some(session) = self.sessions.get_mut(&socket) else {
            return Progress::Stop;
        };
        let Phase::Negotiation(negotiation) = &mut session.phase else {
            return Progress::Stop;
        };
        self.out.clear();
        let input = context.engine().input(socket);
        let step = negotiation.step(input, &self.volumes, &mut self.out);
        if negotiation.take_refused() {
            self.counters.options_refused.count();
        }
        context.engine().send(socket, &self.out);
        match step {
            Step::Need(bytes) => {
                context.engine().need(socket, bytes);
                return Progress::Stop;
            }
            Step::Used(bytes) => context.engine().consume(socket, bytes),
            Step::Transmission(bytes, volume) => {
                context.engine().consume(socket, bytes);
                session.phase = Phase::Transmission(Transmission {
                    volume,
                    negotiated: Negotiated {
                        structured: negotiation.structured,
                        block_status: negotiation.block_status,
                    },
                    receiving: Receiving::Header,
                });
            }
            Step::FramingLost => {
                self.counters.framing_lost.count();
                self.close(context, socket);
                return Progress::Stop;
            }
            Step::Close => {
                self.close(context, socket);
                return Progress::Stop;
            }
        }
        Progress::Onwards
    }

    fn header(&mut self, context: &mut Context<'_>, socket: SocketId) -> Progress {
        let Some(head) = context
            .engine()
            .input(socket)
            .first_chunk::<REQUEST_BYTES>()
        else {
            context.engine().need(socket, REQUEST_BYTES);
            return Progress::Stop;
        };
        let Some(request) = Request::parse(head) else {
            self.counters.framing_lost.count();
            self.close(context, socket);
            return Progress::Stop;
        };
        if request.command == command::DISCONNECT {
            context.engine().consume(socket, REQUEST_BYTES);
            self.leave(context, socket);
            return Progress::Stop;
        }
        let Some(transmission) = self
            .sessions
            .get_mut(&socket)
            .and_then(|s| s.transmission())
        else {
            return Progress::Stop;
        };
        let (volume, negotiated) = (transmission.volume, transmission.negotiated);
        let checked = match self.volumes.0.get(&volume) {
            Some(info) => check(&request, info, negotiated),
            None => Err(Refusal(error::SHUTDOWN, "the volume is not attached")),
        };
        match checked {
            Ok(command) => self.begin(context, socket, volume, &request, command),
            Err(refusal) if request.command == command::WRITE => {
                transmission.receiving = Receiving::Skipped {
                    left: request.len,
                    cookie: request.cookie,
                    refusal,
                };
                context.engine().consume(socket, REQUEST_BYTES);
                Progress::Onwards
            }
            Err(refusal) => {
                context.engine().consume(socket, REQUEST_BYTES);
                self.refuse(context, socket, request.cookie, refusal);
                Progress::Onwards
            }
        }
    }

    /// Whether there is room for a request now.
    fn may_begin(
        &mut self,
        context: &mut Context<'_>,
        socket: SocketId,
        volume: VolumeHandle,
        reading: u64,
    ) -> bool {
        let mine = if reading > 0 {
            self.account(context, socket)
        } else {
            0
        };
        let requests = self.sessions.get(&socket).map_or(0, |s| s.requests);
        let mine_fits = mine + reading <= SESSION_ANSWER_BYTES_MAX || mine == 0;
        let all_fit = self.answer_bytes + reading <= ANSWER_BYTES_MAX;
        let fits =
            reading == 0 || (mine_fits && (all_fit || (mine == 0 && reading <= SMALL_READ_BYTES)));
        requests < REQUESTS_MAX && fits && context.can_accept(volume)
    }

    fn begin(
        &mut self,
        context: &mut Context<'_>,
        socket: SocketId,
        volume: VolumeHandle,
        request: &Request,
        command: Command,
    ) -> Progress {
        let Request { offset, len, .. } = *request;
        let reading_bytes = match command {
            Command::Read { .. } => u64::from(len),
            _ => 0,
        };
        if !self.may_begin(context, socket, volume, reading_bytes) {
            self.wait(context, socket);
            return Progress::Stop;
        }
        context.engine().consume(socket, REQUEST_BYTES);
        self.counters.requests.count();
        let Some(session) = self.sessions.get_mut(&socket) else {
            return Progress::Stop;
        };
        session.requests += 1;
        session.reading_bytes += reading_bytes;
        let to = session.to(socket, request.cookie);
        let pending = self.pending.insert(Pending {
            to,
            offset,
            single: matches!(
                command,
                Command::Read { single: true } | Command::Status { single: true }
            ),
            reading_bytes,
            left: 1,
            error: None,
        });
        let (len, wide) = (len, u64::from(len));
        let byte_request = match command {
            Command::Write => {
                if let Some(transmission) = session.transmission() {
                    transmission.receiving = Receiving::Payload(Payload {
                        pending,
                        piece: 1,
                        at: offset,
                        left: len,
                        buf: None,
                        filled: 0,
                        skip: false,
                    });
                }
                return Progress::Onwards;
            }
            Command::Read { .. } => ByteRequest::Read { offset, len },
            Command::Zero(kind) => ByteRequest::Zero {
                offset,
                len: wide,
                kind,
            },
            Command::Flush => ByteRequest::Flush,
            Command::Status { .. } => ByteRequest::Allocation { offset, len: wide },
        };
        if let Err(error) = context.submit(volume, ticket(pending, 0), byte_request) {
            self.piece_done(context, pending, Err(error));
        }
        Progress::Onwards
    }

    /// Answers an error to a request that did not begin.
    fn refuse(
        &mut self,
        context: &mut Context<'_>,
        socket: SocketId,
        cookie: u64,
        refusal: Refusal,
    ) {
        self.counters.requests.count();
        self.counters.requests_refused.count();
        if let Some(session) = self.sessions.get(&socket) {
            let to = session.to(socket, cookie);
            send_error(context.engine(), to, refusal.0, refusal.1);
        }
    }

    /// Takes bytes of a write; hands a piece to the volume when it is complete.
    fn payload(&mut self, context: &mut Context<'_>, socket: SocketId) -> Progress {
        let Some(transmission) = self
            .sessions
            .get_mut(&socket)
            .and_then(|s| s.transmission())
        else {
            return Progress::Stop;
        };
        let volume = transmission.volume;
        let Receiving::Payload(payload) = &mut transmission.receiving else {
            return Progress::Stop;
        };
        if payload.left == 0 {
            let pending = payload.pending;
            transmission.receiving = Receiving::Header;
            self.piece_done(context, pending, Ok(Completed::Done));
            return Progress::Onwards;
        }
        let to_border = EXTENT_BYTES - payload.at % EXTENT_BYTES;
        let len = to_border.min(u64::from(payload.left)) as usize;
        let engine = context.engine();
        let mut buf = payload.buf.take().unwrap_or_else(|| engine.buffer(len));
        let input = engine.input(socket);
        let now = input.len().min(len - payload.filled);
        buf[payload.filled..payload.filled + now].copy_from_slice(&input[..now]);
        engine.consume(socket, now);
        payload.filled += now;
        if payload.filled < len {
            payload.buf = Some(buf);
            return Progress::Stop;
        }
        if !payload.skip && !context.can_accept(volume) {
            payload.buf = Some(buf);
            self.wait(context, socket);
            return Progress::Stop;
        }
        let (pending, piece, offset) = (payload.pending, payload.piece, payload.at);
        payload.filled = 0;
        payload.piece += 1;
        payload.at += len as u64;
        payload.left -= len as u32;
        if payload.skip {
            context.engine().recycle(buf);
            return Progress::Onwards;
        }
        let data = context.engine().share(buf);
        let write = ByteRequest::WriteShared {
            offset,
            data: &data,
        };
        if let Some(entry) = self.pending.get_mut(pending) {
            entry.left += 1;
        }
        if let Err(error) = context.submit(volume, ticket(pending, piece), write) {
            payload.skip = true;
            self.piece_done(context, pending, Err(error));
        }
        Progress::Onwards
    }

    /// Reads past the bytes of a write that is refused, then answers it.
    fn skip(&mut self, context: &mut Context<'_>, socket: SocketId) -> Progress {
        let Some(transmission) = self
            .sessions
            .get_mut(&socket)
            .and_then(|s| s.transmission())
        else {
            return Progress::Stop;
        };
        let Receiving::Skipped {
            left,
            cookie,
            refusal,
        } = &mut transmission.receiving
        else {
            return Progress::Stop;
        };
        let now = context.engine().input(socket).len().min(*left as usize);
        context.engine().consume(socket, now);
        *left -= now as u32;
        if *left > 0 {
            return Progress::Stop;
        }
        let (cookie, refusal) = (*cookie, *refusal);
        transmission.receiving = Receiving::Header;
        self.refuse(context, socket, cookie, refusal);
        Progress::Onwards
    }

    /// The rest of a write will not be received any more.
    pub(super) fn give_up_payload(&mut self, context: &mut Context<'_>, socket: SocketId) {
        let Some(transmission) = self
            .sessions
            .get_mut(&socket)
            .and_then(|s| s.transmission())
        else {
            return;
        };
        let receiving = std::mem::replace(&mut transmission.receiving, Receiving::Header);
        if let Receiving::Payload(payload) = receiving {
            if let Some(buf) = payload.buf {
                context.engine().recycle(buf);
            }
            let error = Err(IoError::NotAttached);
            self.piece_done(context, payload.pending, error);
        }
    }
}
