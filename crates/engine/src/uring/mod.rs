//! The engine on io_uring.
//!
//! A turn is one system call: it hands over the sends and receives of the turn and waits. Sends
//! are executed within that call. They are told not to wait and to keep quiet about success, so
//! they neither end the wait nor need a look: whoever has not failed when the call returns is
//! done. One that the socket's buffer could not take is sent again in the waiting way.

mod files;
mod ring;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use ashlar_replication::values::Time;
use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use crate::core::{Core, monotonic_now};
use crate::event::Event;
use crate::net;
use crate::options::EngineError;
use crate::slab::{Key, Slab};
use crate::socket::Phase;
use crate::spin::Spin;
use crate::tag::{self, Kind};
use files::Started;
use ring::{Completion, Ring};

/// Receive only after waiting for input: saves an attempt that would find nothing.
const POLL_FIRST: u16 = 1;
/// How long the end of an engine waits for the kernel to let go of its buffers.
const SHUT_DOWN_MAX: Duration = Duration::from_secs(5);

pub(crate) struct Uring {
    ring: Ring,
    operations: Slab<Started>,
    /// Sends of this turn that succeed in silence.
    quiet_sends: Vec<Key>,
    waker_watched: bool,
    spin: Spin,
    /// The last poll made no system call because events were ready.
    skipped: bool,
}

impl Uring {
    pub(crate) fn new(core: &Core) -> Result<Uring, EngineError> {
        Ok(Uring {
            ring: Ring::new(core.options.ring_entries)?,
            operations: Slab::new(),
            quiet_sends: Vec::new(),
            waker_watched: false,
            spin: Spin::new(core.options.busy_poll),
            skipped: false,
        })
    }

    /// Watches a descriptor once for readiness.
    fn watch(&mut self, fd: i32, flags: libc::c_short, kind: Kind, key: Key) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(fd), flags as u32).build();
        // SAFETY: the entry refers to no memory, and the descriptor stays open until it is done.
        unsafe { self.ring.push(&[entry.user_data(tag::pack(kind, key))]) }
    }

    fn cancel(&mut self, kind: Kind, key: Key) {
        let entry = opcode::AsyncCancel::new(tag::pack(kind, key)).build();
        // A failure leaves the operation to end by itself: the descriptor is shut down as well.
        // SAFETY: the entry refers to no memory.
        let _ = unsafe {
            self.ring
                .push(&[entry.user_data(tag::pack(Kind::Ignored, tag::NO_KEY))])
        };
    }

    pub(crate) fn watch_listener(&mut self, core: &mut Core, key: Key) -> io::Result<()> {
        let Some(listener) = core.listeners.get_mut(key) else {
            return Ok(());
        };
        if listener.watched || listener.closed || listener.retry_at.is_some() {
            return Ok(());
        }
        self.watch(listener.fd.as_raw_fd(), libc::POLLIN, Kind::Listener, key)?;
        listener.watched = true;
        Ok(())
    }

    pub(crate) fn close_listener(&mut self, core: &mut Core, key: Key) {
        let Some(listener) = core.listeners.get_mut(key).filter(|l| !l.closed) else {
            return;
        };
        if !listener.watched {
            core.listeners.remove(key);
            return;
        }
        // The descriptor is closed when the kernel has let go of it; connections end now.
        listener.closed = true;
        listener.remove_path();
        net::shut_down(listener.fd.as_fd());
        self.cancel(Kind::Listener, key);
    }

    pub(crate) fn prepare_socket(&mut self, core: &mut Core, key: Key) {
        let Some(socket) = core.socket_mut(key) else {
            return;
        };
        let blocking = socket.is_open();
        if let Err(error) = net::set_blocking(socket.fd.as_fd(), blocking) {
            core.end(key, Some(error));
        }
    }

    pub(crate) fn close_socket(&mut self, core: &mut Core, key: Key) {
        let Some(socket) = core.socket_mut(key) else {
            return;
        };
        let pending = socket.pending;
        if pending.receive {
            self.cancel(Kind::Receive, key);
        }
        if pending.send {
            self.cancel(Kind::Send, key);
        }
        if pending.connect {
            self.cancel(Kind::Connect, key);
        }
        core.close_socket(key);
    }

    pub(crate) fn poll(
        &mut self,
        core: &mut Core,
        deadline: Time,
        events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let before = events.len();
        loop {
            let timer = self.run_timers(core);
            // Events that are here already are worth a turn of their own, but not for ever.
            if !core.ready.is_empty() && !self.skipped {
                self.skipped = true;
                core.take_ready(events);
                if events.len() > before {
                    core.hold_over();
                    return Ok(());
                }
            }
            self.skipped = false;
            self.flush(core)?;
            let idle = core.ready.is_empty() && core.dirty.is_empty();
            let until = deadline.min(timer);
            let mut woken = true;
            if idle && !self.ring.has_completions() && until > core.now {
                woken = self.ring.wait(until, &mut self.spin)?;
            } else {
                self.ring.submit()?;
            }
            core.now = monotonic_now();
            self.dispatch(core, events);
            core.take_ready(events);
            if events.len() > before || core.now >= deadline || !woken {
                core.hold_over();
                return Ok(());
            }
        }
    }

    fn run_timers(&mut self, core: &mut Core) -> Time {
        core.run_timers(|core, key| {
            if self.watch_listener(core, key).is_err() {
                core.starve(key);
            }
        })
    }

    /// Queues the sends and receives of all sockets that changed.
    fn flush(&mut self, core: &mut Core) -> io::Result<()> {
        if !self.waker_watched {
            let fd = core.waker.fd().as_raw_fd();
            self.watch(fd, libc::POLLIN, Kind::Waker, tag::NO_KEY)?;
            self.waker_watched = true;
        }
        for _ in 0..core.dirty.len() {
            let Some(key) = core.dirty.pop_front() else {
                break;
            };
            let Some(socket) = core.sockets.get_mut(key) else {
                continue;
            };
            socket.dirty = false;
            match socket.phase {
                Phase::Open => {
                    self.push_send(core, key)?;
                    self.push_receive(core, key)?;
                }
                Phase::Connecting(_) if !socket.pending.connect => {
                    let fd = socket.fd.as_raw_fd();
                    self.watch(fd, libc::POLLOUT, Kind::Connect, key)?;
                    socket.pending.connect = true;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn push_send(&mut self, core: &mut Core, key: Key) -> io::Result<()> {
        let turn = core.turn;
        let Some(socket) = core.sockets.get_mut(key).filter(|s| !s.pending.send) else {
            return Ok(());
        };
        let Some((message, bytes)) = socket.output.message() else {
            return Ok(());
        };
        // A silent success does not end a wait, and someone may wait for the end of this output.
        let quiet = self.ring.modern && !socket.blocked && !socket.held_over;
        let mut flags = libc::MSG_NOSIGNAL;
        let mut entry_flags = squeue::Flags::empty();
        if quiet {
            // With MSG_WAITALL a part counts as a failure, which is not silent.
            flags |= libc::MSG_DONTWAIT | libc::MSG_WAITALL;
            entry_flags |= squeue::Flags::SKIP_SUCCESS;
        }
        let entry = opcode::SendMsg::new(Fd(socket.fd.as_raw_fd()), message).flags(flags as u32);
        let entry = entry
            .build()
            .flags(entry_flags)
            .user_data(tag::pack(Kind::Send, key));
        // SAFETY: the queue keeps the message valid until `sent`, and the socket is kept, where it
        // is, while `pending.send` is set.
        unsafe { self.ring.push(&[entry]) }?;
        socket.pending.send = true;
        socket.message_bytes = bytes;
        socket.message_turn = turn;
        if quiet {
            self.quiet_sends.push(key);
            if bytes < socket.output.len() {
                // The rest must follow without waiting for an event.
                core.mark_dirty(key);
            }
        }
        Ok(())
    }

    fn push_receive(&mut self, core: &mut Core, key: Key) -> io::Result<()> {
        let Some(socket) = core.sockets.get_mut(key) else {
            return Ok(());
        };
        if socket.paused || socket.pending.receive || socket.receive.is_full() {
            return Ok(());
        }
        let (memory, room) = socket.receive.room(&core.pool);
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let mut entry = opcode::Recv::new(Fd(socket.fd.as_raw_fd()), memory, room);
        if self.ring.modern && !socket.more_input {
            entry = entry.ioprio(POLL_FIRST);
        }
        let entry = entry.build().user_data(tag::pack(Kind::Receive, key));
        // SAFETY: the buffer does not move and is not freed while `pending.receive` is set.
        unsafe { self.ring.push(&[entry]) }?;
        socket.pending.receive = true;
        Ok(())
    }

    fn dispatch(&mut self, core: &mut Core, events: &mut Vec<Event>) {
        // Failures first: the silent rest succeeded. Later completions may make new sends, which
        // are not part of that conclusion.
        let mut quiet_sends = std::mem::take(&mut self.quiet_sends);
        while let Some(done) = self.ring.next_completion() {
            let (kind, key) = tag::unpack(done.data);
            match kind {
                Kind::Receive => {
                    if let Some(event) = receive_done(core, key, &done) {
                        events.push(event);
                    }
                }
                Kind::Send => send_done(core, key, done.result()),
                Kind::Connect => self.connect_done(core, key),
                Kind::Listener => self.listener_done(core, key),
                Kind::Waker => {
                    self.waker_watched = false;
                    if core.waker.take() {
                        core.ready.push_back(Event::Woken);
                    }
                }
                Kind::File => self.file_done(core, key, &done),
                Kind::LinkedWrite => self.linked_write_done(core, key, &done),
                Kind::Ignored | Kind::Socket => {}
            }
        }
        for key in quiet_sends.drain(..) {
            let sent = core
                .sockets
                .get(key)
                .filter(|s| s.pending.send)
                .map(|s| s.message_bytes);
            if let Some(bytes) = sent {
                send_done(core, key, Ok(bytes));
            }
        }
        self.quiet_sends = quiet_sends;
    }

    fn connect_done(&mut self, core: &mut Core, key: Key) {
        let Some(socket) = core.sockets.get_mut(key) else {
            return;
        };
        socket.pending.connect = false;
        if socket.phase == Phase::Closed {
            core.reap_socket(key);
            return;
        }
        core.connect_ready(key);
        self.prepare_socket(core, key);
    }

    fn listener_done(&mut self, core: &mut Core, key: Key) {
        let Some(listener) = core.listeners.get_mut(key) else {
            return;
        };
        listener.watched = false;
        if listener.closed {
            core.listeners.remove(key);
            return;
        }
        core.accept_ready(key, |core, socket| self.prepare_socket(core, socket));
        if self.watch_listener(core, key).is_err() {
            core.starve(key);
        }
    }

    /// Ends everything and waits until the kernel holds nothing of ours any more.
    pub(crate) fn shut_down(&mut self, core: &mut Core) {
        let sockets: Vec<Key> = core.sockets.keys().collect();
        for key in sockets {
            self.close_socket(core, key);
        }
        let listeners: Vec<Key> = core.listeners.keys().collect();
        for key in listeners {
            self.close_listener(core, key);
        }
        if self.waker_watched {
            self.cancel(Kind::Waker, tag::NO_KEY);
        }
        let deadline = monotonic_now() + SHUT_DOWN_MAX;
        let mut spin = Spin::new(Duration::ZERO);
        let mut scrap = Vec::new();
        let mut failed = false;
        while self.holds_anything(core) && !failed && monotonic_now() < deadline {
            failed = self.ring.wait(deadline, &mut spin).is_err();
            self.dispatch(core, &mut scrap);
            scrap.clear();
        }
        if self.holds_anything(core) {
            // The kernel may still write into this memory: it must never be used again.
            std::mem::forget(std::mem::replace(&mut core.sockets, Slab::new()));
            std::mem::forget(std::mem::replace(&mut self.operations, Slab::new()));
        }
    }

    fn holds_anything(&self, core: &Core) -> bool {
        core.sockets.keys().next().is_some() || self.operations.keys().next().is_some()
    }
}

fn receive_done(core: &mut Core, key: Key, done: &Completion) -> Option<Event> {
    let socket = core.sockets.get_mut(key)?;
    socket.pending.receive = false;
    socket.more_input = done.more_input();
    if socket.phase == Phase::Closed {
        core.reap_socket(key);
        return None;
    }
    core.received(key, done.result())
}

fn send_done(core: &mut Core, key: Key, result: io::Result<usize>) {
    let Some(socket) = core.sockets.get_mut(key) else {
        return;
    };
    socket.pending.send = false;
    // One that took until a later turn was with the caller meanwhile.
    socket.held_over |= socket.message_turn != core.turn;
    if socket.phase == Phase::Closed {
        core.reap_socket(key);
        return;
    }
    let bytes = socket.message_bytes;
    core.sent(key, result, bytes);
}
