//! The server: listeners, connections, requests under way.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex};

use ashlar_engine::{Address, Event, ListenerId, SharedBytes, SocketId};
use ashlar_replication::message::Content;
use ashlar_replication::values::Time;

use crate::front_end::{
    Allocation, AllocationPiece, ByteRequest, Completed, Context, FrontEnd, IoError,
    REQUEST_BYTES_MAX, ReadPiece, Ticket, VolumeAccess, VolumeHandle, VolumeInfo, Zero,
};
use crate::nbd::negotiation::{Exports, Negotiation, Step, greeting};
use crate::nbd::protocol::{
    BASE_ALLOCATION_ID, REQUEST_BYTES, Request, STATE_HOLE_ZERO, chunk, chunk_header, command,
    command_flag, error, simple_reply,
};

/// Requests under way on one connection; more wait in its socket.
const REQUESTS_MAX: u32 = 256;
/// Connections at a time; more are closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// Bytes of answers that wait for a client that does not read them, before it is sent no more.
const OUTPUT_BYTES_MAX: usize = 64 << 20;

#[derive(Debug)]
enum Phase {
    Negotiation(Negotiation),
    Transmission {
        volume: VolumeHandle,
        structured: bool,
        block_status: bool,
    },
}

#[derive(Debug)]
struct Session {
    phase: Phase,
    requests: u32,
    /// Receiving is stopped until there is room.
    paused: bool,
    /// DISC came: closed when everything is answered.
    disconnecting: bool,
}

/// A request under way.
#[derive(Debug)]
struct Pending {
    socket: SocketId,
    cookie: u64,
    offset: u64,
    structured: bool,
    /// One chunk of data (DF), or one extent (REQ_ONE).
    single: bool,
}

#[derive(Default)]
struct Volumes(BTreeMap<VolumeHandle, VolumeInfo>);

impl Exports for Volumes {
    fn find(&self, name: &str) -> Option<(VolumeHandle, &VolumeInfo)> {
        if name.is_empty() && self.0.len() == 1 {
            return self.0.iter().next().map(|(handle, info)| (*handle, info));
        }
        self.0
            .iter()
            .find(|(_, info)| info.name == name)
            .map(|(handle, info)| (*handle, info))
    }

    fn names(&self) -> Vec<String> {
        self.0.values().map(|info| info.name.clone()).collect()
    }
}

/// The NBD front end of one thread.
pub struct NbdServer {
    addresses: Vec<Address>,
    actual: Arc<Mutex<Vec<Address>>>,
    listeners: Vec<ListenerId>,
    volumes: Volumes,
    sessions: HashMap<SocketId, Session>,
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
    /// Payloads are copied out of the receive buffer here, because submitting needs the engine.
    scratch: Vec<u8>,
    out: Vec<u8>,
    paused: Vec<SocketId>,
}

impl NbdServer {
    /// A server for these addresses; where they really are (port 0) is put into `actual` when it
    /// listens.
    pub fn new(addresses: Vec<Address>, actual: Arc<Mutex<Vec<Address>>>) -> NbdServer {
        NbdServer {
            addresses,
            actual,
            listeners: Vec::new(),
            volumes: Volumes::default(),
            sessions: HashMap::new(),
            pending: Vec::new(),
            free: Vec::new(),
            scratch: Vec::new(),
            out: Vec::new(),
            paused: Vec::new(),
        }
    }

    fn accepted(&mut self, context: &mut Context<'_>, socket: SocketId) {
        if self.sessions.len() >= CONNECTIONS_MAX {
            context.close(socket);
            return;
        }
        context.own(socket);
        self.out.clear();
        greeting(&mut self.out);
        context.engine().send(socket, &self.out);
        let phase = Phase::Negotiation(Negotiation::default());
        let session = Session {
            phase,
            requests: 0,
            paused: false,
            disconnecting: false,
        };
        self.sessions.insert(socket, session);
    }

    fn close(&mut self, context: &mut Context<'_>, socket: SocketId) {
        context.close(socket);
        self.forget(socket);
    }

    /// Requests of the connection that are under way finish unheard.
    fn forget(&mut self, socket: SocketId) {
        self.sessions.remove(&socket);
        self.paused.retain(|paused| *paused != socket);
    }

    fn receive(&mut self, context: &mut Context<'_>, socket: SocketId) {
        while let Some(session) = self.sessions.get_mut(&socket) {
            if session.disconnecting {
                return;
            }
            let more = match &mut session.phase {
                Phase::Negotiation(_) => self.negotiate(context, socket),
                Phase::Transmission { volume, .. } => {
                    let volume = *volume;
                    self.transmit(context, socket, volume)
                }
            };
            if !more {
                return;
            }
        }
    }

    /// One step of the negotiation; false when more input is needed.
    fn negotiate(&mut self, context: &mut Context<'_>, socket: SocketId) -> bool {
        let Some(session) = self.sessions.get_mut(&socket) else {
            return false;
        };
        let Phase::Negotiation(negotiation) = &mut session.phase else {
            return false;
        };
        self.out.clear();
        let step = negotiation.step(context.engine().input(socket), &self.volumes, &mut self.out);
        context.engine().send(socket, &self.out);
        match step {
            Step::Need(bytes) => {
                context.engine().need(socket, bytes);
                return false;
            }
            Step::Used(bytes) => context.engine().consume(socket, bytes),
            Step::Transmission(bytes, volume) => {
                context.engine().consume(socket, bytes);
                let (structured, block_status) = (negotiation.structured, negotiation.block_status);
                session.phase = Phase::Transmission {
                    volume,
                    structured,
                    block_status,
                };
            }
            Step::Close => {
                self.close(context, socket);
                return false;
            }
        }
        true
    }

    /// One request; false when it has to wait for input or room.
    fn transmit(
        &mut self,
        context: &mut Context<'_>,
        socket: SocketId,
        volume: VolumeHandle,
    ) -> bool {
        let input = context.engine().input(socket);
        if input.len() < REQUEST_BYTES {
            context.engine().need(socket, REQUEST_BYTES);
            return false;
        }
        let Some(request) = Request::parse(input) else {
            // Framing is lost.
            self.close(context, socket);
            return false;
        };
        let payload = if request.command == command::WRITE {
            request.len as usize
        } else {
            0
        };
        if payload > REQUEST_BYTES_MAX as usize {
            self.refuse(context, socket, &request, error::OVERFLOW);
            self.close(context, socket);
            return false;
        }
        if input.len() < REQUEST_BYTES + payload {
            context.engine().need(socket, REQUEST_BYTES + payload);
            return false;
        }
        let full = self
            .sessions
            .get(&socket)
            .is_some_and(|s| s.requests >= REQUESTS_MAX);
        let attached = self.volumes.0.contains_key(&volume);
        let flooded = context.engine().queued_bytes(socket) > OUTPUT_BYTES_MAX;
        if full || flooded || (attached && !context.can_accept(volume)) {
            if let Some(session) = self.sessions.get_mut(&socket)
                && !session.paused
            {
                session.paused = true;
                self.paused.push(socket);
                context.engine().pause(socket);
            }
            return false;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        let input = context.engine().input(socket);
        scratch.extend_from_slice(&input[REQUEST_BYTES..REQUEST_BYTES + payload]);
        context.engine().consume(socket, REQUEST_BYTES + payload);
        self.request(context, socket, volume, request, &scratch);
        /// What a client's requests commonly need.
        const SCRATCH_KEPT_BYTES: usize = 1 << 20;
        if scratch.capacity() > SCRATCH_KEPT_BYTES {
            scratch = Vec::new();
        }
        self.scratch = scratch;
        self.sessions.contains_key(&socket)
    }

    fn request(
        &mut self,
        context: &mut Context<'_>,
        socket: SocketId,
        volume: VolumeHandle,
        request: Request,
        payload: &[u8],
    ) {
        if request.command == command::DISCONNECT {
            let Some(session) = self.sessions.get_mut(&socket) else {
                return;
            };
            session.disconnecting = true;
            if session.requests == 0 {
                self.close(context, socket);
            }
            return;
        }
        let Some(info) = self.volumes.0.get(&volume) else {
            return self.refuse(context, socket, &request, error::SHUTDOWN);
        };
        let (structured, block_status) = match self.sessions.get(&socket).map(|s| &s.phase) {
            Some(Phase::Transmission {
                structured,
                block_status,
                ..
            }) => (*structured, *block_status),
            _ => return,
        };
        let byte_request = match to_byte_request(&request, info, payload, structured, block_status)
        {
            Ok(byte_request) => byte_request,
            Err(error) => return self.refuse(context, socket, &request, error),
        };
        let single = request.flags & (command_flag::DF | command_flag::REQ_ONE) != 0;
        let pending = Pending {
            socket,
            cookie: request.cookie,
            offset: request.offset,
            structured,
            single,
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() as u32 - 1
        });
        self.pending[index as usize] = Some(pending);
        match context.submit(volume, Ticket(index.into()), byte_request) {
            Ok(()) => {
                if let Some(session) = self.sessions.get_mut(&socket) {
                    session.requests += 1;
                }
            }
            Err(error) => {
                self.pending[index as usize] = None;
                self.free.push(index);
                self.refuse(context, socket, &request, errno(&error));
            }
        }
    }

    /// Answers an error to a request that did not begin.
    fn refuse(
        &mut self,
        context: &mut Context<'_>,
        socket: SocketId,
        request: &Request,
        error: u32,
    ) {
        let structured = matches!(
            self.sessions.get(&socket).map(|s| &s.phase),
            Some(Phase::Transmission {
                structured: true,
                ..
            })
        );
        send_error(context, socket, request.cookie, error, structured);
    }

    /// Connections that were stopped go on where there is room again.
    fn resume(&mut self, context: &mut Context<'_>) {
        let mut index = 0;
        while index < self.paused.len() {
            let socket = self.paused[index];
            let ready = match self.sessions.get(&socket) {
                Some(Session {
                    phase: Phase::Transmission { volume, .. },
                    requests,
                    ..
                }) => {
                    let room = *requests < REQUESTS_MAX
                        && context.engine().queued_bytes(socket) <= OUTPUT_BYTES_MAX;
                    room && (!self.volumes.0.contains_key(volume) || context.can_accept(*volume))
                }
                _ => true,
            };
            if !ready {
                index += 1;
                continue;
            }
            self.paused.swap_remove(index);
            if let Some(session) = self.sessions.get_mut(&socket) {
                session.paused = false;
                context.engine().resume(socket);
            }
        }
    }

    /// Closes what is still connected to a volume that is gone.
    fn close_sessions_of(&mut self, context: &mut Context<'_>, volume: VolumeHandle) {
        let of_volume = |session: &Session| matches!(session.phase, Phase::Transmission { volume: v, .. } if v == volume);
        let sockets: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, s)| of_volume(s))
            .map(|(s, _)| *s)
            .collect();
        for socket in sockets {
            self.close(context, socket);
        }
    }
}

/// What a request asks of the volume, or the error that the protocol names.
fn to_byte_request<'a>(
    request: &Request,
    volume: &VolumeInfo,
    payload: &'a [u8],
    structured: bool,
    block_status: bool,
) -> Result<ByteRequest<'a>, u32> {
    use command_flag as flag;
    let Request { offset, len, .. } = *request;
    let allowed = match request.command {
        command::READ => flag::DF,
        command::WRITE | command::TRIM => flag::FUA,
        command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
        command::BLOCK_STATUS => flag::REQ_ONE,
        command::FLUSH => flag::FUA,
        _ => return Err(error::INVAL),
    };
    if request.flags & !allowed != 0 || (request.flags & flag::DF != 0 && !structured) {
        return Err(error::INVAL);
    }
    if request.command == command::FLUSH {
        return if offset == 0 && len == 0 {
            Ok(ByteRequest::Flush)
        } else {
            Err(error::INVAL)
        };
    }
    let changes = matches!(
        request.command,
        command::WRITE | command::TRIM | command::WRITE_ZEROES
    );
    if changes && volume.access == VolumeAccess::ReadOnly {
        return Err(error::PERM);
    }
    let end = offset.checked_add(u64::from(len)).ok_or(error::INVAL)?;
    if end > volume.size_bytes {
        return Err(if changes { error::NOSPC } else { error::INVAL });
    }
    if len == 0 {
        return Err(error::INVAL);
    }
    match request.command {
        command::READ if len > REQUEST_BYTES_MAX => Err(error::OVERFLOW),
        command::READ => Ok(ByteRequest::Read { offset, len }),
        command::WRITE => Ok(ByteRequest::Write {
            offset,
            data: payload,
        }),
        command::TRIM => Ok(ByteRequest::Zero {
            offset,
            len: len.into(),
            kind: Zero::Discard,
        }),
        command::WRITE_ZEROES => {
            // Zeros are never slower to write than data here: FAST_ZERO needs no refusal. Space is
            // allocated on the first write, so there is nothing that NO_HOLE could keep.
            Ok(ByteRequest::Zero {
                offset,
                len: len.into(),
                kind: Zero::WriteZeroes,
            })
        }
        _ if !block_status => Err(error::INVAL),
        _ => Ok(ByteRequest::Allocation {
            offset,
            len: len.into(),
        }),
    }
}

/// The number of the protocol for an error.
fn errno(error: &IoError) -> u32 {
    match error {
        IoError::OutOfRange | IoError::TooLong => error::INVAL,
        IoError::ReadOnly => error::PERM,
        IoError::NoSpace => error::NOSPC,
        IoError::NotAttached => error::SHUTDOWN,
        _ => error::IO,
    }
}

fn send_error(
    context: &mut Context<'_>,
    socket: SocketId,
    cookie: u64,
    error: u32,
    structured: bool,
) {
    if !structured {
        context.engine().send(socket, &simple_reply(error, cookie));
        return;
    }
    let mut payload = [0; 6];
    payload[..4].copy_from_slice(&error.to_be_bytes());
    let header = chunk_header(chunk::DONE, chunk::ERROR, cookie, payload.len() as u32);
    context.engine().send(socket, &header);
    context.engine().send(socket, &payload);
}

/// Sends zeros, from a buffer that all connections share.
fn send_zeros(context: &mut Context<'_>, socket: SocketId, len: u32) {
    const ZEROS: [u8; 16 << 10] = [0; 16 << 10];
    let mut left = len as usize;
    while left > 0 {
        let now = left.min(ZEROS.len());
        context.engine().send(socket, &ZEROS[..now]);
        left -= now;
    }
}

fn send_content(context: &mut Context<'_>, socket: SocketId, piece: &ReadPiece) {
    match &piece.content {
        Content::Data(bytes) => {
            context
                .engine()
                .send_shared(socket, SharedBytes::clone(bytes));
        }
        Content::Zeros => send_zeros(context, socket, piece.len),
    }
}

fn send_data(context: &mut Context<'_>, pending: &Pending, pieces: &[ReadPiece]) {
    let socket = pending.socket;
    let len: u32 = pieces.iter().map(|piece| piece.len).sum();
    if !pending.structured {
        context
            .engine()
            .send(socket, &simple_reply(0, pending.cookie));
        pieces
            .iter()
            .for_each(|piece| send_content(context, socket, piece));
        return;
    }
    if pending.single {
        let header = chunk_header(chunk::DONE, chunk::OFFSET_DATA, pending.cookie, len + 8);
        context.engine().send(socket, &header);
        context.engine().send(socket, &pending.offset.to_be_bytes());
        pieces
            .iter()
            .for_each(|piece| send_content(context, socket, piece));
        return;
    }
    let mut offset = pending.offset;
    for (n, piece) in pieces.iter().enumerate() {
        let done = if n + 1 == pieces.len() {
            chunk::DONE
        } else {
            0
        };
        match &piece.content {
            Content::Data(_) => {
                let kind = chunk::OFFSET_DATA;
                let header = chunk_header(done, kind, pending.cookie, piece.len + 8);
                context.engine().send(socket, &header);
                context.engine().send(socket, &offset.to_be_bytes());
                send_content(context, socket, piece);
            }
            Content::Zeros => {
                let header = chunk_header(done, chunk::OFFSET_HOLE, pending.cookie, 12);
                context.engine().send(socket, &header);
                context.engine().send(socket, &offset.to_be_bytes());
                context.engine().send(socket, &piece.len.to_be_bytes());
            }
        }
        offset += u64::from(piece.len);
    }
}

fn send_allocation(context: &mut Context<'_>, pending: &Pending, pieces: &[AllocationPiece]) {
    let count = if pending.single { 1 } else { pieces.len() };
    let mut payload = BASE_ALLOCATION_ID.to_be_bytes().to_vec();
    for piece in &pieces[..count.min(pieces.len())] {
        let state = match piece.allocation {
            Allocation::Data => 0,
            Allocation::Zeros => STATE_HOLE_ZERO,
        };
        // Requests are at most 2³² − 1 bytes long, and so are pieces of them.
        payload.extend_from_slice(&(piece.len as u32).to_be_bytes());
        payload.extend_from_slice(&u32::to_be_bytes(state));
    }
    let len = payload.len() as u32;
    let header = chunk_header(chunk::DONE, chunk::BLOCK_STATUS, pending.cookie, len);
    context.engine().send(pending.socket, &header);
    context.engine().send(pending.socket, &payload);
}

impl FrontEnd for NbdServer {
    fn start(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        for address in &self.addresses {
            let (listener, actual) = context.engine().listen(address)?;
            context.own(listener);
            self.listeners.push(listener);
            if let Ok(mut all) = self.actual.lock() {
                all.push(actual);
            }
        }
        Ok(())
    }

    fn socket_event(&mut self, context: &mut Context<'_>, event: &Event) {
        match event {
            Event::Accepted { socket, .. } => self.accepted(context, *socket),
            Event::Received { socket } => self.receive(context, *socket),
            Event::Closed { socket, .. } => self.forget(*socket),
            Event::AcceptFailed { error, .. } => {
                tracing::warn!(%error, "an NBD connection could not be accepted; trying again");
            }
            _ => {}
        }
    }

    fn completed(
        &mut self,
        context: &mut Context<'_>,
        _: VolumeHandle,
        ticket: Ticket,
        result: Result<Completed<'_>, IoError>,
    ) {
        let Some(pending) = self
            .pending
            .get_mut(ticket.0 as usize)
            .and_then(Option::take)
        else {
            return;
        };
        self.free.push(ticket.0 as u32);
        let socket = pending.socket;
        let Some(session) = self.sessions.get_mut(&socket) else {
            return;
        };
        session.requests -= 1;
        let last = session.disconnecting && session.requests == 0;
        match result {
            Ok(Completed::Read(pieces)) => send_data(context, &pending, pieces),
            Ok(Completed::Allocation(pieces)) => send_allocation(context, &pending, pieces),
            Ok(Completed::Done) if pending.structured => {
                let header = chunk_header(chunk::DONE, chunk::NONE, pending.cookie, 0);
                context.engine().send(socket, &header);
            }
            Ok(Completed::Done) => context
                .engine()
                .send(socket, &simple_reply(0, pending.cookie)),
            Err(error) => {
                send_error(
                    context,
                    socket,
                    pending.cookie,
                    errno(&error),
                    pending.structured,
                );
            }
        }
        if last {
            self.close(context, socket);
        }
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Time {
        if !self.paused.is_empty() {
            self.resume(context);
        }
        Time::NEVER
    }

    fn volume_attached(&mut self, _: &mut Context<'_>, volume: VolumeHandle, info: &VolumeInfo) {
        self.volumes.0.insert(volume, info.clone());
    }

    fn volume_resized(&mut self, _: &mut Context<'_>, volume: VolumeHandle, info: &VolumeInfo) {
        self.volumes.0.insert(volume, info.clone());
    }

    fn volume_detached(&mut self, context: &mut Context<'_>, volume: VolumeHandle) {
        self.volumes.0.remove(&volume);
        self.close_sessions_of(context, volume);
    }
}
