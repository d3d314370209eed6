//! What both kinds of engine have in common: the tables, and what a result of the kernel means.
//!
//! The kinds differ in how they learn that something is ready and how bytes move; they then call
//! the functions here, which turn results into events.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;

use ashlar_replication::values::Time;

use crate::buffer::Pool;
use crate::event::{Event, ListenerId, SocketId};
use crate::file::File;
use crate::net;
use crate::options::Options;
use crate::slab::{Key, Slab};
use crate::socket::{Phase, Socket};
use crate::waker::Waker;

/// Connections taken from one listener per turn, so that a storm does not starve the others.
const ACCEPTS_PER_TURN: usize = 64;

pub(crate) struct Listener {
    pub(crate) fd: OwnedFd,
    /// The file of a unix socket, to be removed at the end.
    pub(crate) path: Option<PathBuf>,
    /// When to try again after accept failed for want of resources.
    pub(crate) retry_at: Option<Time>,
    /// The kernel watches it (io_uring), or epoll does.
    pub(crate) watched: bool,
    pub(crate) closed: bool,
}

impl Listener {
    /// Removes the file of a unix socket, once: later it may belong to another listener.
    pub(crate) fn remove_path(&mut self) {
        if let Some(path) = self.path.take() {
            // Gone already is fine; anything else cannot be helped here.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove_path();
    }
}

pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) now: Time,
    pub(crate) turn: u64,
    pub(crate) sockets: Slab<Box<Socket>>,
    pub(crate) listeners: Slab<Listener>,
    pub(crate) files: Slab<File>,
    /// Events that need no system call; the next poll reports them without sleeping.
    pub(crate) ready: VecDeque<Event>,
    /// Sockets that the next flush looks at.
    pub(crate) dirty: VecDeque<Key>,
    /// Sockets whose end was reported in this turn.
    ended: Vec<Key>,
    pub(crate) connecting: Vec<Key>,
    /// Listeners that wait for resources.
    pub(crate) starved: Vec<Key>,
    pub(crate) pool: Rc<RefCell<Pool>>,
    pub(crate) waker: Waker,
}

pub(crate) fn monotonic_now() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

impl Core {
    pub(crate) fn new(options: Options) -> io::Result<Core> {
        let pool = Rc::new(RefCell::new(Pool::new(options.pool_bytes_max)));
        Ok(Core {
            options,
            now: monotonic_now(),
            turn: 0,
            sockets: Slab::new(),
            listeners: Slab::new(),
            files: Slab::new(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            ended: Vec::new(),
            connecting: Vec::new(),
            starved: Vec::new(),
            pool,
            waker: Waker::new()?,
        })
    }

    /// The socket, unless its id is of the past.
    pub(crate) fn socket(&self, key: Key) -> Option<&Socket> {
        self.sockets
            .get(key)
            .map(|s| &**s)
            .filter(|s| s.phase != Phase::Closed)
    }

    pub(crate) fn socket_mut(&mut self, key: Key) -> Option<&mut Socket> {
        self.sockets
            .get_mut(key)
            .map(|s| &mut **s)
            .filter(|s| s.phase != Phase::Closed)
    }

    /// Makes the next flush look at the socket.
    pub(crate) fn mark_dirty(&mut self, key: Key) {
        if let Some(socket) = self.sockets.get_mut(key)
            && !socket.dirty
        {
            socket.dirty = true;
            self.dirty.push_back(key);
        }
    }

    pub(crate) fn insert_socket(&mut self, fd: OwnedFd, phase: Phase) -> Key {
        if phase == Phase::Open {
            net::set_no_delay(fd.as_fd());
        }
        let receive_bytes = self.options.receive_bytes;
        let key = self
            .sockets
            .insert(Box::new(Socket::new(fd, phase, receive_bytes)));
        if matches!(phase, Phase::Connecting(_)) {
            self.connecting.push(key);
        }
        self.mark_dirty(key);
        key
    }

    pub(crate) fn need(&mut self, key: Key, bytes: usize) {
        let bytes_max = self.options.receive_bytes_max;
        let Some(socket) = self.socket_mut(key) else {
            return;
        };
        if bytes > bytes_max {
            let message = format!("the peer's message of {bytes} bytes is above {bytes_max}");
            self.end(
                key,
                Some(io::Error::new(io::ErrorKind::InvalidData, message)),
            );
            return;
        }
        socket.receive.set_need(bytes);
        self.mark_dirty(key);
    }

    pub(crate) fn resume(&mut self, key: Key) {
        let Some(socket) = self.socket_mut(key) else {
            return;
        };
        if !socket.paused {
            return;
        }
        socket.paused = false;
        if socket.is_open() && socket.receive.report() {
            self.ready.push_back(Event::Received {
                socket: SocketId(key),
            });
        }
        self.mark_dirty(key);
    }

    /// The kernel answered a receive.
    pub(crate) fn received(&mut self, key: Key, result: io::Result<usize>) -> Option<Event> {
        let socket = self.socket_mut(key)?;
        if !socket.is_open() {
            return None;
        }
        match result {
            Ok(0) => self.end(key, None),
            Ok(bytes) => {
                socket.receive.received(bytes);
                let report = !socket.paused && socket.receive.report();
                self.mark_dirty(key);
                return report.then_some(Event::Received {
                    socket: SocketId(key),
                });
            }
            Err(error) if is_transient(&error) => self.mark_dirty(key),
            Err(error) => self.end(key, Some(error)),
        }
        None
    }

    /// The kernel took `bytes` of a message of `of` bytes, at once or after a while.
    pub(crate) fn sent(&mut self, key: Key, result: io::Result<usize>, of: usize) {
        let Some(socket) = self.socket_mut(key) else {
            return;
        };
        match result {
            Ok(bytes) => {
                socket.output.sent(bytes);
                socket.blocked = bytes < of;
            }
            Err(error) if is_transient(&error) => socket.blocked = true,
            Err(error) => {
                if socket.is_open() {
                    self.end(key, Some(error));
                }
                return;
            }
        }
        socket.held_over |= socket.blocked;
        if !socket.output.is_empty() {
            self.mark_dirty(key);
        } else if socket.held_over {
            socket.held_over = false;
            if socket.is_open() {
                self.ready.push_back(Event::Drained {
                    socket: SocketId(key),
                });
            }
        }
    }

    /// A poll returns: output that is still queued is reported when it is gone.
    pub(crate) fn hold_over(&mut self) {
        for key in &self.dirty {
            if let Some(socket) = self.sockets.get_mut(*key) {
                socket.held_over |= !socket.output.is_empty();
            }
        }
    }

    /// A connecting socket became writable.
    pub(crate) fn connect_ready(&mut self, key: Key) {
        let Some(socket) = self.socket_mut(key) else {
            return;
        };
        if !matches!(socket.phase, Phase::Connecting(_)) {
            return;
        }
        match net::connect_result(socket.fd.as_fd()) {
            Ok(()) => {
                socket.phase = Phase::Open;
                net::set_no_delay(socket.fd.as_fd());
                self.connecting.retain(|other| *other != key);
                self.ready.push_back(Event::Connected {
                    socket: SocketId(key),
                });
                self.mark_dirty(key);
            }
            Err(error) => self.end(key, Some(error)),
        }
    }

    /// A listener has connections. Returns those that were made.
    pub(crate) fn accept_ready(&mut self, key: Key, mut made: impl FnMut(&mut Core, Key)) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = self.listeners.get_mut(key).filter(|l| !l.closed) else {
                return;
            };
            match net::accept(listener.fd.as_fd()) {
                Ok(Some(fd)) => {
                    let socket = self.insert_socket(fd, Phase::Open);
                    made(self, socket);
                    let (listener, socket) = (ListenerId(key), SocketId(socket));
                    self.ready.push_back(Event::Accepted { listener, socket });
                }
                Ok(None) => return,
                Err(error) => {
                    self.starve(key);
                    let listener = ListenerId(key);
                    self.ready
                        .push_back(Event::AcceptFailed { listener, error });
                    return;
                }
            }
        }
    }

    /// Leaves a listener alone for a while, because something it needs is used up.
    pub(crate) fn starve(&mut self, key: Key) {
        let retry_at = self.now + self.options.accept_retry;
        if let Some(listener) = self.listeners.get_mut(key) {
            listener.retry_at = Some(retry_at);
            self.starved.push(key);
        }
    }

    /// The socket ended by itself: reports it and keeps its input for this turn.
    pub(crate) fn end(&mut self, key: Key, error: Option<io::Error>) {
        let Some(socket) = self.socket_mut(key) else {
            return;
        };
        if socket.phase == Phase::Ended {
            return;
        }
        let was_connecting = matches!(socket.phase, Phase::Connecting(_));
        socket.phase = Phase::Ended;
        if was_connecting {
            self.connecting.retain(|other| *other != key);
        }
        self.ended.push(key);
        self.ready.push_back(Event::Closed {
            socket: SocketId(key),
            error,
        });
    }

    /// The next socket whose end was reported in an earlier turn.
    pub(crate) fn next_ended(&mut self) -> Option<Key> {
        // One whose report is still in `ready` was ended between two polls: it comes next time.
        let reported = |key: &Key| {
            !self
                .ready
                .iter()
                .any(|event| matches!(event, Event::Closed { socket, .. } if socket.0 == *key))
        };
        let place = self.ended.iter().position(reported)?;
        Some(self.ended.swap_remove(place))
    }

    /// Forgets a socket that the caller closed. Sends the rest of its output if that is possible
    /// at once. The kinds call this after they stopped watching it; it goes on existing while the
    /// kernel holds its buffers.
    pub(crate) fn close_socket(&mut self, key: Key) {
        let Some(socket) = self.socket_mut(key) else {
            return;
        };
        if socket.is_open() && !socket.pending.send && !socket.output.is_empty() {
            while let Some((message, bytes)) = socket.output.message() {
                // SAFETY: the queue keeps its message valid until `sent`.
                match unsafe { net::send(socket.fd.as_fd(), message) } {
                    Ok(sent) if sent == bytes => socket.output.sent(sent),
                    _ => break,
                }
            }
            // A receive that is with the kernel would compete for the input.
            if !socket.pending.receive {
                net::discard_input(socket.fd.as_fd());
            }
        }
        net::shut_down(socket.fd.as_fd());
        if matches!(socket.phase, Phase::Connecting(_)) {
            self.connecting.retain(|other| *other != key);
        }
        self.ended.retain(|other| *other != key);
        let Some(socket) = self.sockets.get_mut(key) else {
            return;
        };
        socket.phase = Phase::Closed;
        self.reap_socket(key);
    }

    /// Frees a closed socket when the kernel has let go of it.
    pub(crate) fn reap_socket(&mut self, key: Key) {
        let Some(socket) = self.sockets.get(key) else {
            return;
        };
        if socket.phase == Phase::Closed
            && !socket.pending.any()
            && let Some(mut socket) = self.sockets.remove(key)
        {
            socket.receive.release(&self.pool);
        }
    }

    /// Fails connects whose time is over, and wakes starved listeners. Returns when to look again.
    pub(crate) fn run_timers(&mut self, mut retry: impl FnMut(&mut Core, Key)) -> Time {
        if self.connecting.is_empty() && self.starved.is_empty() {
            return Time::NEVER;
        }
        let mut next = Time::NEVER;
        let now = self.now;
        let mut index = 0;
        while let Some(key) = self.connecting.get(index).copied() {
            match self.socket(key).map(|socket| socket.phase) {
                Some(Phase::Connecting(deadline)) if deadline > now => {
                    next = next.min(deadline);
                    index += 1;
                }
                // `end` takes it off the list.
                Some(Phase::Connecting(_)) => {
                    self.end(key, Some(io::ErrorKind::TimedOut.into()));
                }
                _ => {
                    self.connecting.swap_remove(index);
                }
            }
        }
        let mut index = 0;
        while let Some(key) = self.starved.get(index).copied() {
            let retry_at = self
                .listeners
                .get_mut(key)
                .and_then(|listener| listener.retry_at);
            if let Some(at) = retry_at.filter(|at| *at > now) {
                next = next.min(at);
                index += 1;
                continue;
            }
            self.starved.swap_remove(index);
            if let Some(listener) = self.listeners.get_mut(key) {
                listener.retry_at = None;
                retry(self, key);
            }
        }
        next
    }

    /// Moves what is ready to the caller, except about sockets that were closed meanwhile.
    pub(crate) fn take_ready(&mut self, events: &mut Vec<Event>) {
        while let Some(event) = self.ready.pop_front() {
            let socket = match &event {
                Event::Accepted { socket, .. }
                | Event::Connected { socket }
                | Event::Received { socket }
                | Event::Drained { socket }
                | Event::Closed { socket, .. } => Some(*socket),
                _ => None,
            };
            if socket.is_none_or(|socket| self.socket(socket.0).is_some()) {
                events.push(event);
            }
        }
    }
}

/// Not an end: the operation is simply tried again.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_that_still_finds_nothing_waits_for_the_next_time() {
        let mut core = Core::new(Options::default()).unwrap();
        let (fd, _) = net::listen(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = Listener {
            fd,
            path: None,
            retry_at: None,
            watched: false,
            closed: false,
        };
        let key = core.listeners.insert(listener);
        core.starve(key);
        core.now = core.now + core.options.accept_retry;
        let mut retries = 0;
        let next = core.run_timers(|core, key| {
            retries += 1;
            core.starve(key);
        });
        assert_eq!(retries, 1);
        assert_eq!(next, core.now + core.options.accept_retry);
    }
}
