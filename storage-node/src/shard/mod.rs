//! The thread that owns a device: its engine, its loop, its mailbox.

pub mod commands;
mod completions;
mod connection;
mod control;
mod core;
mod describe;
mod handshake;
mod outbox;
mod pending;
mod queued;
mod requests;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ashlar_engine::{Address, Engine, EngineError, Event, ListenerId, SocketId, Waker};
use ashlar_replication::values::Time;
use ashlar_store::Store;
use ashlar_wire::{Decoded, GoodbyeCode, decode_within};

use crate::device::EngineDevice;
use commands::Command;
pub use connection::Admission;
use connection::Connection;
use core::Core;
pub use core::ShardSettings;

/// Time after which a shard whose store is short of journal or memory looks whether that is over.
const CONGESTED_MAX: Duration = Duration::from_millis(10);
/// How often a turn starts and answers what waits before it looks at the sockets again.
const ROUNDS_MAX: usize = 16;

/// The other end of a shard's mailbox.
#[derive(Clone)]
pub struct ShardHandle {
    sender: Sender<Command>,
    waker: Waker,
}

impl ShardHandle {
    /// Puts a command into the mailbox. It is dropped, and its answer with it, when the shard has
    /// stopped.
    pub fn send(&self, command: Command) {
        if self.sender.send(command).is_ok() {
            self.waker.wake();
        }
    }
}

/// A shard, to be run on the thread that made it.
pub struct Shard {
    engine: Engine,
    listeners: Vec<ListenerId>,
    core: Core,
    mailbox: Receiver<Command>,
    stopping: bool,
    /// When a shard that stops no longer waits for home writes.
    stop_by: Time,
}

impl Shard {
    /// Puts a shard together; `engine` is the one that `device` was opened on.
    pub fn new(
        engine: Engine,
        store: Store,
        device: EngineDevice,
        settings: ShardSettings,
    ) -> (Shard, ShardHandle) {
        let (sender, mailbox) = channel();
        let handle = ShardHandle {
            sender,
            waker: engine.waker(),
        };
        let core = Core::new(settings, store, device);
        (
            Shard {
                engine,
                listeners: Vec::new(),
                core,
                mailbox,
                stopping: false,
                stop_by: Time::NEVER,
            },
            handle,
        )
    }

    /// Listens for initiators; returns the address that it really has.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn listen(&mut self, address: &Address) -> std::io::Result<Address> {
        let (listener, actual) = self.engine.listen(address)?;
        self.listeners.push(listener);
        Ok(actual)
    }

    /// Runs until [`Command::Stop`], then finishes what is under way.
    ///
    /// # Errors
    /// When the engine is of no more use.
    pub fn run(mut self) -> Result<(), EngineError> {
        let mut events = Vec::with_capacity(256);
        while !self.is_done() {
            let deadline = self.end_turn();
            self.engine.poll(deadline, &mut events)?;
            self.look_for_backlogs();
            for event in events.drain(..) {
                self.event(event);
            }
        }
        Ok(())
    }

    /// Whether nothing is left to do for a shard that stops.
    fn is_done(&self) -> bool {
        let store = &self.core.store;
        let at_home = store.is_closed() || !store.has_dirty();
        self.stopping && self.core.is_quiet() && (at_home || self.engine.now() >= self.stop_by)
    }

    /// Holds up connections whose peers do not take their answers, so that these cannot pile up here.
    fn look_for_backlogs(&mut self) {
        for socket in self.core.outbox.sent() {
            let backlog_bytes = self.engine.queued_bytes(*socket);
            let Some(connection) = self.core.connections.get_mut(socket) else {
                continue;
            };
            connection.backlog_bytes = backlog_bytes;
            if !connection.paused && connection.is_backlogged(&self.core.settings.admission) {
                connection.paused = true;
                self.core.metrics.counters.backlog_pauses += 1;
                self.engine.pause(*socket);
            }
        }
    }

    /// The peer has taken everything.
    fn drained(&mut self, socket: SocketId) {
        if let Some(connection) = self.core.connections.get_mut(&socket) {
            connection.backlog_bytes = 0;
            self.core.resume_if_admitted(socket);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Received { socket } => self.receive(socket),
            Event::File { token, result, buf } => {
                self.core
                    .store
                    .device_completed(&mut self.core.device, token, result, buf);
            }
            Event::Accepted { socket, .. } => self.accepted(socket),
            Event::AcceptFailed { error, .. } => {
                tracing::warn!(%error, "a connection could not be accepted; trying again");
            }
            Event::Closed { socket, .. } => self.core.forget(socket),
            Event::Woken => self.commands(),
            Event::Drained { socket } => self.drained(socket),
            Event::Connected { .. } => {}
        }
    }

    fn accepted(&mut self, socket: SocketId) {
        let now = self.engine.now();
        self.core.metrics.counters.connections += 1;
        let max = self.core.settings.connections_max;
        if self.core.connections.len() >= max {
            self.core.evict_silent_connection(now);
        }
        let full = self.core.connections.len() >= max;
        self.core.connections.insert(socket, Connection::new(now));
        if full {
            self.core.metrics.counters.connections_refused += 1;
            self.core.goodbye(
                socket,
                GoodbyeCode::Busy,
                "too many connections to this device",
            );
        } else if self.stopping {
            self.core
                .goodbye(socket, GoodbyeCode::ShuttingDown, "the storage node stops");
        }
    }

    /// Handles every whole frame in the receive buffer, as far as the connection's admission goes.
    fn receive(&mut self, socket: SocketId) {
        let now = self.engine.now();
        loop {
            let full = self.core.is_full();
            let Some(connection) = self.core.connections.get_mut(&socket) else {
                return;
            };
            connection.active_at = now;
            if full || !connection.admits(&self.core.settings.admission) {
                if !connection.paused {
                    connection.paused = true;
                    self.core.metrics.counters.admission_pauses += 1;
                    self.engine.pause(socket);
                    // Held, where only the others stand in its way.
                    self.core.resume_if_admitted(socket);
                }
                return;
            }
            let limits = connection.limits();
            let input = self.engine.input(socket);
            if input.is_empty() {
                return;
            }
            let consumed = match decode_within(input, limits) {
                Ok(Decoded::Incomplete { need }) => {
                    self.engine.need(socket, need);
                    return;
                }
                Ok(Decoded::Frame {
                    frame: Ok(frame),
                    bytes,
                }) => {
                    self.core.frame(now, socket, frame);
                    bytes
                }
                Ok(Decoded::Frame {
                    frame: Err(bad),
                    bytes,
                }) => {
                    self.core.bad_frame(socket, bad);
                    bytes
                }
                Err(error) => {
                    self.core.framing_lost(socket, error);
                    return;
                }
            };
            self.engine.consume(socket, consumed);
        }
    }

    /// Starts what the turn has brought together; returns when the next turn is due at the latest.
    fn end_turn(&mut self) -> Time {
        let now = self.engine.now();
        let core = &mut self.core;
        core.metrics.counters.turns += 1;
        core.schedule_home_write(now);
        if self.stopping && core.is_quiet() {
            core.store.start_home_write(&mut core.device);
        }
        // Answers make room for what waits, and what is in memory is finished as soon as it is started.
        let mut settled = false;
        for _ in 0..ROUNDS_MAX {
            core.start_queued(now);
            core.store.submit(&mut core.device);
            settled = !core.complete(now);
            if settled {
                break;
            }
        }
        core.send_applied();
        core.device.flush(&mut self.engine);
        core.outbox.flush(&mut self.engine);
        core.resume_held();
        for socket in core.resumed.drain(..) {
            self.engine.resume(socket);
        }
        for socket in core.ended.drain(..) {
            self.engine.close(socket);
        }
        if !settled {
            return now;
        }
        if self.stopping {
            // Looks again soon whether everything has settled.
            return now + Duration::from_millis(10);
        }
        if core.is_congested() && core.scheduler.has_waiting() {
            // The end of a home write or of a checkpoint is an event; this is for the case that none comes.
            return now + CONGESTED_MAX;
        }
        self.core.scheduler.next_time()
    }
}
