//! All connections of a thread.

use std::collections::{HashMap, VecDeque};

use ashlar_engine::{Engine, Event, SocketId};
use ashlar_replication::message::Request;
use ashlar_replication::values::Time;
use ashlar_wire::Payload;

use super::link::{LinkId, LinkSpec};
use super::one::{Connection, Peer, Surroundings};
use super::{
    ConnectionCounters, ConnectionOptions, LAGGING_QUEUE_BYTES_MAX, Notice, QUEUE_BYTES_MAX,
};

/// Place of a connection in its thread; valid while a link on it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionId(u32);

/// The connections of a thread. What happened on them is read with [`Connections::next_notice`].
pub(crate) struct Connections {
    slots: Vec<Option<Connection>>,
    by_peer: HashMap<Peer, ConnectionId>,
    by_socket: HashMap<SocketId, ConnectionId>,
    options: ConnectionOptions,
    notices: VecDeque<Notice>,
    overflowed: Vec<ConnectionId>,
    counters: ConnectionCounters,
    next_timer: Time,
    out: Vec<u8>,
    crcs: Vec<u32>,
}

/// Calls a method of a connection with its surroundings, then notes its socket and its timer.
macro_rules! with {
    ($self:ident, $engine:expr, $id:expr, |$connection:ident, $s:ident| $body:expr) => {{
        match $self.slots.get_mut($id.0 as usize).and_then(Option::as_mut) {
            None => None,
            Some($connection) => {
                let $s = &mut Surroundings {
                    engine: $engine,
                    notices: &mut $self.notices,
                    counters: &mut $self.counters,
                    options: &$self.options,
                    out: &mut $self.out,
                    crcs: &mut $self.crcs,
                };
                let before = $connection.socket();
                let result = $body;
                let after = $connection.socket();
                if before != after {
                    before.map(|socket| $self.by_socket.remove(&socket));
                    after.map(|socket| $self.by_socket.insert(socket, $id));
                }
                let timer = $connection.next_timer(&$self.options);
                $self.next_timer = $self.next_timer.min(timer);
                Some(result)
            }
        }
    }};
}

impl Connections {
    pub(crate) fn new(options: ConnectionOptions) -> Connections {
        Connections {
            slots: Vec::new(),
            by_peer: HashMap::new(),
            by_socket: HashMap::new(),
            options,
            notices: VecDeque::new(),
            overflowed: Vec::new(),
            counters: ConnectionCounters::default(),
            next_timer: Time::NEVER,
            out: Vec::with_capacity(4096),
            crcs: Vec::new(),
        }
    }

    pub(crate) fn counters(&self) -> ConnectionCounters {
        self.counters
    }

    /// Connections that are up, and all.
    pub(crate) fn count(&self) -> (usize, usize) {
        let all = self.slots.iter().flatten();
        (
            all.clone().filter(|connection| connection.is_up()).count(),
            all.count(),
        )
    }

    /// Adds a link; the connection is made if there is none to that peer. Also says whether it is up
    /// already, in which case no notice says so. None: too many volumes on the connection.
    pub(crate) fn insert(
        &mut self,
        peer: Peer,
        spec: LinkSpec,
    ) -> Option<(ConnectionId, LinkId, bool)> {
        let id = match self.by_peer.get(&peer) {
            Some(id) => *id,
            None => {
                let free = self.slots.iter().position(Option::is_none);
                let index = free.unwrap_or_else(|| {
                    self.slots.push(None);
                    self.slots.len() - 1
                });
                self.slots[index] = Some(Connection::new(peer.clone()));
                let id = ConnectionId(index as u32);
                self.by_peer.insert(peer, id);
                // The first attempt is due at once.
                self.next_timer = Time(0);
                id
            }
        };
        let connection = self.slots[id.0 as usize].as_mut()?;
        let link = connection.links.insert(spec)?;
        Some((id, link, connection.is_up()))
    }

    /// Ends a link, and the connection with its last one.
    pub(crate) fn remove(&mut self, engine: &mut Engine, id: ConnectionId, link: LinkId) {
        let empty = with!(self, engine, id, |connection, s| {
            connection.remove(s, link);
            connection.links.len() == 0
        });
        if empty == Some(true) {
            with!(self, engine, id, |connection, s| connection.close(s.engine));
            if let Some(connection) = self.slots[id.0 as usize].take() {
                self.by_peer.remove(&connection.peer);
            }
        }
    }

    /// Sends a request of a link; see [`super::NoticeKind::Up`] for when that makes sense.
    pub(crate) fn send(
        &mut self,
        engine: &mut Engine,
        id: ConnectionId,
        link: LinkId,
        request: &Request<Payload>,
    ) {
        let Some(Some(connection)) = self.slots.get_mut(id.0 as usize) else {
            return;
        };
        let s = &mut Surroundings {
            engine,
            notices: &mut self.notices,
            counters: &mut self.counters,
            options: &self.options,
            out: &mut self.out,
            crcs: &mut self.crcs,
        };
        if !connection.send(s, link, request) {
            self.overflowed.push(id);
        }
    }

    /// The event, if it is about a connection; true then.
    pub(crate) fn socket_event(&mut self, engine: &mut Engine, event: &Event) -> bool {
        let socket = match event {
            Event::Received { socket }
            | Event::Closed { socket, .. }
            | Event::Connected { socket }
            | Event::Drained { socket } => socket,
            _ => return false,
        };
        let Some(id) = self.by_socket.get(socket).copied() else {
            return false;
        };
        match event {
            Event::Received { .. } => {
                with!(self, engine, id, |connection, s| connection.received(s));
            }
            Event::Closed { error, .. } => {
                with!(self, engine, id, |connection, s| connection
                    .closed(s, error.as_ref()));
            }
            _ => {}
        }
        true
    }

    /// When [`Connections::timers`] has something to do.
    pub(crate) fn next_timer(&self) -> Time {
        if self.overflowed.is_empty() {
            self.next_timer
        } else {
            Time(0)
        }
    }

    /// Connects, renews, gives up, where it is due.
    pub(crate) fn timers(&mut self, engine: &mut Engine) {
        while let Some(id) = self.overflowed.pop() {
            // Unless that was another connection, in the same slot.
            let connection = self.slots.get(id.0 as usize).and_then(Option::as_ref);
            if connection.is_some_and(|c| c.queued_bytes(engine) > QUEUE_BYTES_MAX) {
                self.cut_off(engine, id);
            }
        }
        if engine.now() < self.next_timer {
            return;
        }
        self.next_timer = Time::NEVER;
        for index in 0..self.slots.len() {
            let id = ConnectionId(index as u32);
            with!(self, engine, id, |connection, s| connection.timer(s));
        }
    }

    /// A member of the connection has left its volume's stream. If that is because its peer does not
    /// read, what waits for it is of no use any more: it is dropped, with the connection.
    pub(crate) fn member_left(&mut self, engine: &mut Engine, id: ConnectionId) {
        let Some(Some(connection)) = self.slots.get(id.0 as usize) else {
            return;
        };
        if connection.queued_bytes(engine) > LAGGING_QUEUE_BYTES_MAX {
            self.cut_off(engine, id);
        }
    }

    /// Starts anew with one member: what was under way for it is lost. If its peer does not read, what
    /// waits there is dropped, with the connection and for all volumes on it; else the others do
    /// not notice.
    pub(crate) fn reconnect(&mut self, engine: &mut Engine, id: ConnectionId, link: LinkId) {
        let Some(Some(connection)) = self.slots.get(id.0 as usize) else {
            return;
        };
        if connection.queued_bytes(engine) > LAGGING_QUEUE_BYTES_MAX {
            self.cut_off(engine, id);
        } else {
            with!(self, engine, id, |connection, s| connection
                .renew_link(s, link));
        }
    }

    fn cut_off(&mut self, engine: &mut Engine, id: ConnectionId) {
        self.counters.cut_off += 1;
        let error = "the node does not read what it is sent";
        with!(self, engine, id, |connection, s| connection
            .fail(s, error.into()));
    }

    /// What happened, in order.
    pub(crate) fn next_notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }

    /// Why the connection is down, for people; None while it is up.
    pub(crate) fn trouble(&self, id: ConnectionId) -> Option<&str> {
        self.slots.get(id.0 as usize)?.as_ref()?.trouble()
    }
}
