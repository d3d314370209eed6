//! The thread that owns a device: its engine, its loop, its mailbox.

pub mod commands;
mod completions;
mod connection;
mod control;
mod core;
mod outbox;
mod pending;
mod queued;
mod requests;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ashlar_engine::{Address, Engine, EngineError, Event, ListenerId, SocketId, Waker};
use ashlar_replication::values::Time;
use ashlar_store::Store;
use ashlar_wire::{Decoded, GoodbyeCode, decode};

use crate::device::EngineDevice;
use commands::Command;
pub use connection::Admission;
use connection::Connection;
use core::Core;
pub use core::ShardSettings;

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
        while !(self.stopping && self.core.is_quiet()) {
            let deadline = self.end_turn();
            self.engine.poll(deadline, &mut events)?;
            for event in events.drain(..) {
                self.event(event);
            }
        }
        Ok(())
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
            Event::Connected { .. } | Event::Drained { .. } => {}
        }
    }

    fn accepted(&mut self, socket: SocketId) {
        self.core.metrics.counters.connections += 1;
        let full = self.core.connections.len() >= self.core.settings.connections_max;
        self.core.connections.insert(socket, Connection::new());
        if full {
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
            let Some(connection) = self.core.connections.get_mut(&socket) else {
                return;
            };
            if !connection.admits(&self.core.settings.admission) {
                if !connection.paused {
                    connection.paused = true;
                    self.core.metrics.counters.admission_pauses += 1;
                    self.engine.pause(socket);
                }
                return;
            }
            let input = self.engine.input(socket);
            if input.is_empty() {
                return;
            }
            let consumed = match decode(input) {
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
                    self.core.metrics.counters.protocol_errors += 1;
                    self.core
                        .goodbye(socket, GoodbyeCode::Protocol, &error.to_string());
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
        core.start_queued(now);
        core.start_home_writes(now);
        core.store.submit(&mut core.device);
        core.complete(now);
        // Answers may have made room for what waited.
        core.start_queued(now);
        core.store.submit(&mut core.device);
        core.send_applied();
        core.device.flush(&mut self.engine);
        core.outbox.flush(&mut self.engine);
        for socket in std::mem::take(&mut core.resumed) {
            self.engine.resume(socket);
        }
        if self.stopping {
            // Looks again soon whether everything has settled.
            return now + Duration::from_millis(10);
        }
        self.core.scheduler.next_time()
    }
}
