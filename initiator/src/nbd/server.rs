//! The server: listeners, connections, requests under way, and what becomes of their answers.
//!
//! Memory is bounded: a connection holds its receive buffer and one piece of a write; all connections
//! together hold [`ANSWER_BYTES_MAX`] of answers, and each what one small read needs beyond that; the
//! volume bounds what is under way. A client that would go beyond is not received from meanwhile.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ashlar_engine::{Address, Event, SocketId};
use ashlar_replication::values::Time;

use crate::byte_io::Slab;
use crate::front_end::{Completed, Context, FrontEnd, IoError, Ticket, VolumeHandle, VolumeInfo};
use crate::nbd::counters::NbdCounters;
use crate::nbd::negotiation::{Exports, greeting};
use crate::nbd::reply::{Zeros, errno, send_done, send_error, send_read, send_status};
use crate::nbd::session::{Pending, Phase, Receiving, Session};

/// Requests under way on one connection; more wait in its socket.
pub(super) const REQUESTS_MAX: u32 = 256;
/// Connections at a time; more are closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// Bytes of reads under way and of answers that one client has not taken yet: the largest read.
pub(super) const SESSION_ANSWER_BYTES_MAX: u64 = 32 << 20;
/// The same of all clients together…
pub(super) const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// …beyond which a client may only begin a read of this size, when it has nothing else under way.
pub(super) const SMALL_READ_BYTES: u64 = 1 << 20;
/// How long a client may take to get to its first request, or to take its last answers.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Volumes(pub(super) BTreeMap<VolumeHandle, VolumeInfo>);

impl Exports for Volumes {
    fn find(&self, name: &str) -> Option<(VolumeHandle, &VolumeInfo)> {
        let only = name.is_empty() && self.0.len() == 1;
        let mut all = self.0.iter();
        all.find(|(_, info)| only || info.name == name)
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
    pub(super) counters: Arc<NbdCounters>,
    pub(super) volumes: Volumes,
    pub(super) sessions: HashMap<SocketId, Session>,
    pub(super) pending: Slab<Pending>,
    pub(super) out: Vec<u8>,
    zeros: Zeros,
    /// Connections that wait for room.
    pub(super) waiting: Vec<SocketId>,
    retried: Vec<SocketId>,
    /// Connections that leave and had answers in their queue when everything was answered…
    flushing: Vec<SocketId>,
    /// …and how many of them were there a turn ago.
    flushed: usize,
    /// Connections that must have got on by then; the same time for all, so that they are in order.
    pub(super) deadlines: VecDeque<(Time, SocketId)>,
    pub(super) answer_bytes: u64,
}

impl NbdServer {
    /// A server for these addresses; where they really are (port 0) is put into `actual` when it
    /// listens.
    pub fn new(addresses: Vec<Address>, actual: Arc<Mutex<Vec<Address>>>) -> NbdServer {
        NbdServer {
            addresses,
            actual,
            counters: Arc::default(),
            volumes: Volumes::default(),
            sessions: HashMap::new(),
            pending: Slab::default(),
            out: Vec::new(),
            zeros: Zeros::default(),
            waiting: Vec::new(),
            retried: Vec::new(),
            flushing: Vec::new(),
            flushed: 0,
            deadlines: VecDeque::new(),
            answer_bytes: 0,
        }
    }

    /// What it counts.
    pub fn counters(&self) -> Arc<NbdCounters> {
        Arc::clone(&self.counters)
    }

    fn accepted(&mut self, context: &mut Context<'_>, socket: SocketId) {
        if self.sessions.len() >= CONNECTIONS_MAX {
            self.counters.connections_refused.count();
            context.close(socket);
            return;
        }
        self.counters.connections_accepted.count();
        context.own(socket);
        self.out.clear();
        greeting(&mut self.out);
        context.engine().send(socket, &self.out);
        self.sessions.insert(socket, Session::new());
        self.deadlines.push_back((context.now() + PATIENCE, socket));
    }

    pub(super) fn close(&mut self, context: &mut Context<'_>, socket: SocketId) {
        context.close(socket);
        self.forget(context, socket);
    }

    /// Requests of the connection that are under way finish unheard.
    fn forget(&mut self, context: &mut Context<'_>, socket: SocketId) {
        let Some(mut session) = self.sessions.remove(&socket) else {
            return;
        };
        self.counters.connections_closed.count();
        self.answer_bytes -= session.answer_bytes;
        if let Some(transmission) = session.transmission()
            && let Receiving::Payload(payload) = &mut transmission.receiving
        {
            if let Some(buf) = payload.buf.take() {
                context.engine().recycle(buf);
            }
            self.piece_done(context, payload.pending, Ok(Completed::Done));
        }
    }

    /// Brings the count of the bytes that a connection's answers hold up to date.
    pub(super) fn account(&mut self, context: &mut Context<'_>, socket: SocketId) -> u64 {
        let Some(session) = self.sessions.get_mut(&socket) else {
            return 0;
        };
        let queued = context.engine().queued_bytes(socket) as u64;
        let now = queued + session.reading_bytes;
        self.answer_bytes = self.answer_bytes + now - session.answer_bytes;
        session.answer_bytes = now;
        now
    }

    /// Receives no more; closes when everything is answered, or after a while.
    pub(super) fn leave(&mut self, context: &mut Context<'_>, socket: SocketId) {
        if let Some(session) = self.sessions.get_mut(&socket) {
            session.leaving = true;
            self.deadlines.push_back((context.now() + PATIENCE, socket));
        }
        self.close_if_answered(context, socket);
    }

    fn close_if_answered(&mut self, context: &mut Context<'_>, socket: SocketId) {
        let Some(session) = self.sessions.get_mut(&socket) else {
            return;
        };
        if !session.leaving || session.requests > 0 {
            return;
        }
        if context.engine().queued_bytes(socket) == 0 {
            self.close(context, socket);
        } else if !session.flushing {
            // What was queued in this turn may go out with the next poll without an event.
            session.flushing = true;
            self.flushing.push(socket);
        }
    }

    /// A piece of a request has ended, and with the last one the request.
    pub(super) fn piece_done(
        &mut self,
        context: &mut Context<'_>,
        index: u32,
        result: Result<Completed<'_>, IoError>,
    ) {
        let Some(pending) = self.pending.get_mut(index) else {
            debug_assert!(false, "a request that was not made");
            return;
        };
        pending.left -= 1;
        let completed = match result {
            Ok(completed) => completed,
            Err(error) => {
                pending.error.get_or_insert(error);
                Completed::Done
            }
        };
        if pending.left == 0
            && let Some(pending) = self.pending.remove(index)
        {
            self.answer(context, &pending, completed);
        }
    }

    fn answer(&mut self, context: &mut Context<'_>, pending: &Pending, completed: Completed<'_>) {
        let to = pending.to;
        let Some(session) = self.sessions.get_mut(&to.socket) else {
            return;
        };
        session.requests -= 1;
        session.reading_bytes -= pending.reading_bytes;
        let leaving = session.leaving;
        let engine = context.engine();
        match (&pending.error, completed) {
            (Some(error), _) => {
                self.counters.requests_failed.count();
                send_error(engine, to, errno(error), &error.to_string());
            }
            (None, Completed::Read(pieces)) => {
                let zeros = &mut self.zeros;
                send_read(engine, to, pending.offset, pending.single, pieces, zeros);
            }
            (None, Completed::Allocation(pieces)) => {
                send_status(engine, to, pending.single, pieces, &mut self.out);
            }
            (None, Completed::Done) => send_done(engine, to),
        }
        if pending.reading_bytes > 0 {
            self.account(context, to.socket);
        }
        if leaving {
            self.close_if_answered(context, to.socket);
        }
    }

    /// Tries again those that wait for room.
    fn retry(&mut self, context: &mut Context<'_>) {
        let mut retried = std::mem::take(&mut self.retried);
        std::mem::swap(&mut retried, &mut self.waiting);
        for socket in retried.drain(..) {
            if let Some(session) = self.sessions.get_mut(&socket) {
                session.waiting = false;
                self.receive(context, socket);
            }
            if let Some(session) = self.sessions.get_mut(&socket)
                && session.paused
                && !session.waiting
            {
                session.paused = false;
                context.engine().resume(socket);
            }
        }
        self.retried = retried;
    }

    /// Closes those whose last answers have gone out; [`Event::Drained`] tells of the others.
    fn close_flushed(&mut self, context: &mut Context<'_>) {
        for _ in 0..std::mem::take(&mut self.flushed) {
            let socket = self.flushing.remove(0);
            self.close_if_answered(context, socket);
        }
        self.flushed = self.flushing.len();
    }

    /// Closes those that took too long. Returns when to look again.
    fn enforce_patience(&mut self, context: &mut Context<'_>) -> Time {
        while let Some((at, socket)) = self.deadlines.front().copied() {
            let session = self.sessions.get(&socket);
            let concerned =
                session.is_some_and(|s| s.leaving || matches!(s.phase, Phase::Negotiation(_)));
            if concerned && at > context.now() {
                return at;
            }
            self.deadlines.pop_front();
            if concerned {
                self.counters.patience_lost.count();
                self.close(context, socket);
            }
        }
        Time::NEVER
    }
}

impl FrontEnd for NbdServer {
    fn start(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        for address in &self.addresses {
            let (listener, actual) = context.engine().listen(address)?;
            context.own(listener);
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
            Event::Drained { socket } => {
                self.account(context, *socket);
                self.close_if_answered(context, *socket);
            }
            Event::Closed { socket, .. } => self.forget(context, *socket),
            Event::AcceptFailed { error, .. } => {
                tracing::warn!(%error, "an NBD connection could not be accepted; trying again");
            }
            Event::Connected { .. } | Event::File { .. } | Event::Woken => {}
        }
    }

    fn completed(
        &mut self,
        context: &mut Context<'_>,
        _: VolumeHandle,
        ticket: Ticket,
        result: Result<Completed<'_>, IoError>,
    ) {
        let (index, _) = split_ticket(ticket);
        self.piece_done(context, index, result);
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Time {
        if !self.waiting.is_empty() {
            self.retry(context);
        }
        let patience = self.enforce_patience(context);
        self.close_flushed(context);
        if self.flushed > 0 { Time(0) } else { patience }
    }

    fn volume_attached(&mut self, _: &mut Context<'_>, volume: VolumeHandle, info: &VolumeInfo) {
        self.volumes.0.insert(volume, info.clone());
    }

    fn volume_resized(&mut self, _: &mut Context<'_>, volume: VolumeHandle, info: &VolumeInfo) {
        self.volumes.0.insert(volume, info.clone());
    }

    fn volume_detached(&mut self, context: &mut Context<'_>, volume: VolumeHandle) {
        self.volumes.0.remove(&volume);
        let mut sockets = Vec::new();
        for (socket, session) in &mut self.sessions {
            if session.transmission().is_some_and(|t| t.volume == volume) {
                sockets.push(*socket);
            }
        }
        for socket in sockets {
            self.give_up_payload(context, socket);
            self.leave(context, socket);
        }
    }
}

/// Tickets name a request by its place in the table, and a piece of it.
pub(super) fn ticket(index: u32, piece: u32) -> Ticket {
    Ticket(u64::from(piece) << 32 | u64::from(index))
}

fn split_ticket(ticket: Ticket) -> (u32, u32) {
    (ticket.0 as u32, (ticket.0 >> 32) as u32)
}
