//! The engine without io_uring: epoll for sockets, file operations on the calling thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ashlar_replication::values::Time;
use rustix::event::{Timespec, epoll};

use crate::core::{Core, monotonic_now};
use crate::event::Event;
use crate::file::{Action, Durability, Operation, finish};
use crate::net;
use crate::slab::Key;
use crate::socket::{Phase, Socket};
use crate::spin::Spin;
use crate::tag::{self, Kind};

/// Events taken from the kernel at once; more come with the next turn.
const EVENTS_PER_WAIT: usize = 256;

pub(crate) struct Portable {
    epoll: OwnedFd,
    found: Vec<epoll::Event>,
    /// File operations that may wait for a disk: carried out after this turn's output is on its way.
    deferred: Vec<(Key, Operation)>,
    spin: Spin,
    /// The last poll made no system call because events were ready.
    skipped: bool,
}

impl Portable {
    pub(crate) fn new(core: &Core) -> io::Result<Portable> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            core.waker.fd(),
            data(Kind::Waker, tag::NO_KEY),
            epoll::EventFlags::IN,
        )?;
        Ok(Portable {
            epoll,
            found: Vec::with_capacity(EVENTS_PER_WAIT),
            deferred: Vec::new(),
            spin: Spin::new(core.options.busy_poll),
            skipped: false,
        })
    }

    pub(crate) fn watch_listener(&mut self, core: &mut Core, key: Key) -> io::Result<()> {
        let Some(listener) = core.listeners.get_mut(key).filter(|l| !l.watched) else {
            return Ok(());
        };
        let data = data(Kind::Listener, key);
        epoll::add(&self.epoll, &listener.fd, data, epoll::EventFlags::IN)?;
        listener.watched = true;
        Ok(())
    }

    fn unwatch_listener(&mut self, core: &mut Core, key: Key) {
        if let Some(listener) = core.listeners.get_mut(key).filter(|l| l.watched) {
            listener.watched = false;
            let _ = epoll::delete(&self.epoll, &listener.fd);
        }
    }

    pub(crate) fn close_listener(&mut self, core: &mut Core, key: Key) {
        self.unwatch_listener(core, key);
        core.listeners.remove(key);
    }

    pub(crate) fn prepare_socket(&mut self, core: &mut Core, key: Key) {
        let Some(socket) = core.socket_mut(key) else {
            return;
        };
        if let Err(error) = net::set_blocking(socket.fd.as_fd(), false) {
            core.end(key, Some(error));
        }
    }

    pub(crate) fn close_socket(&mut self, core: &mut Core, key: Key) {
        if let Some(socket) = core.socket_mut(key).filter(|s| s.interest.is_some()) {
            socket.interest = None;
            // By hand, because the descriptor may have been duplicated elsewhere.
            let _ = epoll::delete(&self.epoll, &socket.fd);
        }
        core.close_socket(key);
    }

    pub(crate) fn start(&mut self, core: &mut Core, file: Key, mut operation: Operation) {
        let Some(entry) = core.files.get(file) else {
            return;
        };
        if entry.durability == Durability::Inline {
            let result = operation.run(entry.fd.as_fd());
            finish(core, file, operation, result);
        } else {
            self.deferred.push((file, operation));
        }
    }

    pub(crate) fn poll(
        &mut self,
        core: &mut Core,
        deadline: Time,
        events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let wake = core.run_timers(|core, key| {
            if self.watch_listener(core, key).is_err() {
                core.starve(key);
            }
        });
        let deadline = deadline.min(wake);
        // Events that are here already are worth a turn of their own, but not for ever.
        if !core.ready.is_empty() && !self.skipped && self.deferred.is_empty() {
            self.skipped = true;
            core.take_ready(events);
            core.hold_over();
            return Ok(());
        }
        self.skipped = false;
        self.flush(core);
        self.run_deferred(core);
        self.wait(core, deadline)?;
        core.now = monotonic_now();
        self.dispatch(core, events);
        core.take_ready(events);
        core.hold_over();
        Ok(())
    }

    /// Offers queued output to the kernel once more and closes everything.
    pub(crate) fn shut_down(&mut self, core: &mut Core) {
        self.run_deferred(core);
        let sockets: Vec<Key> = core.sockets.keys().collect();
        for key in sockets {
            self.close_socket(core, key);
        }
    }

    /// Sends what is queued and tells epoll what to watch.
    fn flush(&mut self, core: &mut Core) {
        for _ in 0..core.dirty.len() {
            let Some(key) = core.dirty.pop_front() else {
                break;
            };
            let Some(socket) = core.sockets.get_mut(key) else {
                continue;
            };
            socket.dirty = false;
            if socket.is_open() && !socket.blocked {
                send(core, key);
            }
            let Some(socket) = core.socket_mut(key) else {
                continue;
            };
            let wanted = interest(socket);
            if socket.interest == Some(wanted) {
                continue;
            }
            let flags = epoll::EventFlags::from_bits_retain(wanted);
            let data = data(Kind::Socket, key);
            let result = match socket.interest {
                None => epoll::add(&self.epoll, &socket.fd, data, flags),
                Some(_) => epoll::modify(&self.epoll, &socket.fd, data, flags),
            };
            match result {
                Ok(()) => socket.interest = Some(wanted),
                Err(error) => core.end(key, Some(error.into())),
            }
        }
    }

    fn run_deferred(&mut self, core: &mut Core) {
        for index in 0..self.deferred.len() {
            let (file, operation) = &mut self.deferred[index];
            let file = *file;
            let result = match core.files.get(file) {
                Some(entry) => operation.run(entry.fd.as_fd()),
                None => Err(io::Error::from(rustix::io::Errno::BADF)),
            };
            let empty = Operation {
                token: 0,
                action: Action::Sync,
                offset: 0,
                buf: None,
                len: 0,
                done: 0,
            };
            let operation = std::mem::replace(operation, empty);
            finish(core, file, operation, result);
        }
        self.deferred.clear();
    }

    fn wait(&mut self, core: &Core, deadline: Time) -> io::Result<()> {
        self.found.clear();
        if !core.ready.is_empty() || deadline == Time(0) {
            return self.wait_for(Some(Time(0)), Time(0));
        }
        let started = monotonic_now();
        let until = self.spin.until(started).min(deadline);
        let mut now = started;
        while now < until {
            self.wait_for(Some(Time(0)), now)?;
            if !self.found.is_empty() {
                self.spin.hit();
                return Ok(());
            }
            now = monotonic_now();
        }
        self.wait_for((deadline != Time::NEVER).then_some(deadline), now)?;
        if !self.found.is_empty() {
            self.spin
                .slept(until > started, || monotonic_now().since(started));
        }
        Ok(())
    }

    /// One epoll_wait, until `deadline`.
    fn wait_for(&mut self, deadline: Option<Time>, now: Time) -> io::Result<()> {
        let timeout = deadline.map(|deadline| {
            let left = deadline.since(now);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos() as _,
            }
        });
        let room = rustix::buffer::spare_capacity(&mut self.found);
        match epoll::wait(&self.epoll, room, timeout.as_ref()) {
            Ok(_) => Ok(()),
            // A signal: the caller looks at its deadline and comes back.
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn dispatch(&mut self, core: &mut Core, events: &mut Vec<Event>) {
        for index in 0..self.found.len() {
            let found = self.found[index];
            match tag::unpack(found.data.u64()) {
                (Kind::Socket, key) => socket_ready(core, key, found.flags, events),
                (Kind::Listener, key) => {
                    core.accept_ready(key, |_, _| ());
                    // Level-triggered: one that cannot accept would be reported again and again.
                    if core
                        .listeners
                        .get(key)
                        .is_some_and(|l| l.retry_at.is_some())
                    {
                        self.unwatch_listener(core, key);
                    }
                }
                _ => {
                    if core.waker.take() {
                        core.ready.push_back(Event::Woken);
                    }
                }
            }
        }
    }
}

fn data(kind: Kind, key: Key) -> epoll::EventData {
    epoll::EventData::new_u64(tag::pack(kind, key))
}

/// What epoll should watch for on behalf of the socket.
fn interest(socket: &Socket) -> u32 {
    let mut flags = epoll::EventFlags::empty();
    match socket.phase {
        Phase::Connecting(_) => flags |= epoll::EventFlags::OUT,
        Phase::Open => {
            if !socket.paused && !socket.receive.is_full() {
                flags |= epoll::EventFlags::IN;
            }
            if socket.blocked {
                flags |= epoll::EventFlags::OUT;
            }
        }
        Phase::Ended | Phase::Closed => {}
    }
    flags.bits()
}

fn send(core: &mut Core, key: Key) {
    while let Some(socket) = core.socket_mut(key).filter(|s| s.is_open()) {
        let Some((message, bytes)) = socket.output.message() else {
            return;
        };
        // SAFETY: the queue keeps its message valid until `sent`.
        let result = unsafe { net::send(socket.fd.as_fd(), message) };
        core.sent(key, result, bytes);
        if core.socket(key).is_none_or(|socket| socket.blocked) {
            return;
        }
    }
}

fn socket_ready(core: &mut Core, key: Key, flags: epoll::EventFlags, events: &mut Vec<Event>) {
    let gone = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
    let Some(socket) = core.socket_mut(key) else {
        return;
    };
    if matches!(socket.phase, Phase::Connecting(_)) {
        core.connect_ready(key);
        return;
    }
    if flags.intersects(epoll::EventFlags::OUT | gone) && socket.blocked {
        socket.blocked = false;
        send(core, key);
        core.mark_dirty(key);
    }
    let Some(socket) = core.sockets.get_mut(key).filter(|s| s.is_open()) else {
        return;
    };
    let reads = !socket.paused && !socket.receive.is_full();
    if reads && flags.intersects(epoll::EventFlags::IN | gone) {
        let (memory, room) = socket.receive.room(&core.pool);
        // SAFETY: `room` says how many bytes may be written at `memory`.
        let result = unsafe { net::receive(socket.fd.as_fd(), memory, room) };
        if let Some(event) = core.received(key, result) {
            events.push(event);
        }
    } else if flags.intersects(gone) {
        // Nothing will be sent any more, and it would be reported again and again.
        let error = net::connect_result(socket.fd.as_fd()).err();
        core.end(key, error);
    }
}
