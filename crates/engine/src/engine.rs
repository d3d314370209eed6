//! The engine: one thread's sockets, files and time.

use std::io;
use std::os::fd::OwnedFd;

use ashlar_replication::values::Time;

use crate::address::Address;
use crate::buffer::IoBuf;
use crate::core::{Core, Listener};
use crate::event::{Event, FileId, ListenerId, SocketId};
use crate::file::{Action, File, FileOptions, Operation, Persist};
use crate::net::{self, Connect};
use crate::options::{EngineError, EngineKind, Options};
use crate::portable::Portable;
use crate::shared::SharedBytes;
use crate::socket::Phase;
use crate::uring::Uring;
use crate::waker::Waker;

enum Backend {
    IoUring(Box<Uring>),
    Portable(Portable),
}

/// One thread's sockets, files and time. See the crate's documentation.
pub struct Engine {
    core: Core,
    backend: Backend,
    notice: Option<String>,
}

/// The kernel moves less than 2 GiB at once.
const OPERATION_BYTES_MAX: usize = 1 << 30;

/// Calls the same method of whichever backend there is.
macro_rules! backend {
    ($self:ident . $method:ident ( $($argument:expr),* )) => {
        match &mut $self.backend {
            Backend::IoUring(backend) => backend.$method(&mut $self.core, $($argument),*),
            Backend::Portable(backend) => backend.$method(&mut $self.core, $($argument),*),
        }
    };
}

impl Engine {
    /// Makes the engine of the calling thread.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] when io_uring was asked for by name and is refused;
    /// [`EngineError::Setup`] when the kernel refuses what both kinds need.
    pub fn new(options: Options) -> Result<Engine, EngineError> {
        let core = Core::new(options).map_err(EngineError::Setup)?;
        let mut notice = None;
        let ring = match core.options.kind {
            Some(EngineKind::Portable) => None,
            Some(EngineKind::IoUring) => Some(Uring::new(&core)?),
            None => match Uring::new(&core) {
                Ok(ring) => Some(ring),
                Err(error) => {
                    notice = Some(fallback_notice(&error));
                    None
                }
            },
        };
        let backend = match ring {
            Some(ring) => Backend::IoUring(Box::new(ring)),
            None => Backend::Portable(Portable::new(&core).map_err(EngineError::Setup)?),
        };
        Ok(Engine {
            core,
            backend,
            notice,
        })
    }

    /// The kind that is in use.
    pub fn kind(&self) -> EngineKind {
        match &self.backend {
            Backend::IoUring(_) => EngineKind::IoUring,
            Backend::Portable(_) => EngineKind::Portable,
        }
    }

    /// One line for the log if the engine is not of the preferred kind.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// CLOCK_MONOTONIC, read once per turn.
    pub fn now(&self) -> Time {
        self.core.now
    }

    /// The settings in use.
    pub fn options(&self) -> &Options {
        &self.core.options
    }

    /// A handle that makes [`Engine::poll`] return, for other threads.
    pub fn waker(&self) -> Waker {
        self.core.waker.clone()
    }

    /// A page-aligned buffer of `len` bytes from the pool, with arbitrary content.
    pub fn buffer(&mut self, len: usize) -> IoBuf {
        self.core.pool.borrow_mut().take(len)
    }

    /// Gives a buffer back to the pool.
    pub fn recycle(&mut self, buf: IoBuf) {
        self.core.pool.borrow_mut().put(buf);
    }

    /// Shares a buffer. It goes back to the pool with its last owner.
    pub fn share(&mut self, buf: IoBuf) -> SharedBytes {
        SharedBytes::pooled(buf, &self.core.pool)
    }

    /// Listens for connections. Also returns the address with the port that was chosen. A unix
    /// socket that nobody listens on any more is replaced; its file is removed at the end.
    ///
    /// # Errors
    /// Those of the system, for example an address in use.
    pub fn listen(&mut self, address: &Address) -> io::Result<(ListenerId, Address)> {
        let (fd, actual) = net::listen(address)?;
        let path = match &actual {
            Address::Unix(path) => Some(path.clone()),
            Address::Tcp(_) => None,
        };
        let key = self.core.listeners.insert(Listener {
            fd,
            path,
            retry_at: None,
            watched: false,
            closed: false,
        });
        backend!(self.watch_listener(key))?;
        Ok((ListenerId(key), actual))
    }

    /// Stops listening. Sockets that were accepted stay.
    pub fn close_listener(&mut self, listener: ListenerId) {
        backend!(self.close_listener(listener.0));
    }

    /// Starts to connect. Completes with [`Event::Connected`] or [`Event::Closed`]; what is sent
    /// before goes out then.
    ///
    /// # Errors
    /// Only those of making a socket (such as too many open files) or of an impossible address. A
    /// peer that refuses or does not answer is reported by [`Event::Closed`].
    pub fn connect(&mut self, address: &Address) -> io::Result<SocketId> {
        let deadline = crate::core::monotonic_now() + self.core.options.connect_timeout;
        let connecting = Phase::Connecting(deadline);
        let key = match net::connect(address)? {
            Connect::Done(fd) => {
                let key = self.core.insert_socket(fd, Phase::Open);
                self.core.ready.push_back(Event::Connected {
                    socket: SocketId(key),
                });
                key
            }
            Connect::Waits(fd) => self.core.insert_socket(fd, connecting),
            Connect::Failed(fd, error) => {
                let key = self.core.insert_socket(fd, connecting);
                self.core.end(key, Some(error));
                key
            }
        };
        backend!(self.prepare_socket(key));
        Ok(SocketId(key))
    }

    /// Takes over a stream socket that is already connected.
    pub fn adopt(&mut self, fd: OwnedFd) -> SocketId {
        let key = self.core.insert_socket(fd, Phase::Open);
        backend!(self.prepare_socket(key));
        SocketId(key)
    }

    /// What was received and not consumed; empty for an id of the past.
    pub fn input(&self, socket: SocketId) -> &[u8] {
        self.core
            .socket(socket.0)
            .map_or(&[], |socket| socket.receive.input())
    }

    /// Removes bytes from the front of the input.
    ///
    /// # Panics
    /// When there are fewer bytes in the input.
    pub fn consume(&mut self, socket: SocketId, bytes: usize) {
        if let Some(state) = self.core.socket_mut(socket.0) {
            state.receive.consume(bytes);
            self.core.mark_dirty(socket.0);
        }
    }

    /// Says that nothing can be done until the input holds `bytes` bytes in all: the buffer grows
    /// to hold them, and [`Event::Received`] comes when they are there. Above
    /// [`Options::receive_bytes_max`] the socket is closed with an error. Holds for one report.
    pub fn need(&mut self, socket: SocketId, bytes: usize) {
        self.core.need(socket.0, bytes);
    }

    /// Stops receiving (but for what is already on its way into the buffer) and reporting.
    pub fn pause(&mut self, socket: SocketId) {
        if let Some(state) = self.core.socket_mut(socket.0) {
            state.paused = true;
            self.core.mark_dirty(socket.0);
        }
    }

    /// Receives again. Input that is there is reported once more.
    pub fn resume(&mut self, socket: SocketId) {
        self.core.resume(socket.0);
    }

    /// Queues bytes, copied, to go out when this turn ends.
    pub fn send(&mut self, socket: SocketId, bytes: &[u8]) {
        if let Some(state) = self.core.socket_mut(socket.0) {
            state.output.push(bytes);
            self.core.mark_dirty(socket.0);
        }
    }

    /// Queues a payload to go out when this turn ends; by reference, unless it is so small that a
    /// copy costs less ([`Options::send_copy_max`]).
    pub fn send_shared(&mut self, socket: SocketId, payload: SharedBytes) {
        let copy_max = self.core.options.send_copy_max;
        if let Some(state) = self.core.socket_mut(socket.0) {
            if payload.len() < copy_max {
                state.output.push(&payload);
            } else {
                state.output.push_shared(payload);
            }
            self.core.mark_dirty(socket.0);
        }
    }

    /// Bytes queued that the kernel has not taken.
    pub fn queued_bytes(&self, socket: SocketId) -> usize {
        self.core
            .socket(socket.0)
            .map_or(0, |socket| socket.output.len())
    }

    /// Closes the socket; no event about it comes from later polls. Queued output is offered to
    /// the kernel once (a farewell goes out), the rest is dropped.
    pub fn close(&mut self, socket: SocketId) {
        backend!(self.close_socket(socket.0));
    }

    /// Takes over a file or device for asynchronous operations. See [`crate::open_direct`].
    pub fn open_file(&mut self, fd: OwnedFd, options: FileOptions) -> FileId {
        let FileOptions { durability } = options;
        FileId(self.core.files.insert(File {
            fd,
            durability,
            operations: 0,
            closed: false,
        }))
    }

    /// Reads `len` bytes at `offset` to the front of `buf`; answered by [`Event::File`].
    ///
    /// # Panics
    /// When `buf` is shorter than `len`, `len` is above 1 GiB, or the file is not open.
    pub fn read(&mut self, file: FileId, token: u64, offset: u64, buf: IoBuf, len: usize) {
        self.start(file, token, Action::Read, offset, Some(buf), len);
    }

    /// Writes the first `len` bytes of `buf` at `offset`; answered by [`Event::File`]. Nothing is
    /// said about the order of operations that are under way at the same time.
    ///
    /// # Panics
    /// When `buf` is shorter than `len`, `len` is above 1 GiB, or the file is not open.
    pub fn write(
        &mut self,
        file: FileId,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
        persist: Persist,
    ) {
        self.start(file, token, Action::Write(persist), offset, Some(buf), len);
    }

    /// Makes durable what was reported as written before (fdatasync); answered by [`Event::File`].
    ///
    /// # Panics
    /// When the file is not open.
    pub fn sync(&mut self, file: FileId, token: u64) {
        self.start(file, token, Action::Sync, 0, None, 0);
    }

    fn start(
        &mut self,
        file: FileId,
        token: u64,
        action: Action,
        offset: u64,
        buf: Option<IoBuf>,
        len: usize,
    ) {
        let room = buf.as_ref().map_or(0, |buf| buf.len());
        assert!(
            len <= room && len <= OPERATION_BYTES_MAX,
            "{len} bytes of a buffer of {room}"
        );
        let entry = self
            .core
            .files
            .get_mut(file.0)
            .filter(|entry| !entry.closed);
        entry
            .expect("operation on a file that is not open")
            .operations += 1;
        let operation = Operation {
            token,
            action,
            offset,
            buf,
            len,
            done: 0,
        };
        backend!(self.start(file.0, operation));
    }

    /// Closes a file. Operations under way are still carried out and answered.
    pub fn close_file(&mut self, file: FileId) {
        if let Some(entry) = self.core.files.get_mut(file.0) {
            entry.closed = true;
            if entry.operations == 0 {
                self.core.files.remove(file.0);
            }
        }
    }

    /// One turn: starts everything that was queued, waits until something happened or it is
    /// `deadline` ([`Time::NEVER`]: no limit; a time of the past: do not wait), appends events.
    /// May return without events, for example after a signal.
    ///
    /// # Errors
    /// [`EngineError::Poll`] when waiting itself fails; the engine is then of no more use.
    pub fn poll(&mut self, deadline: Time, events: &mut Vec<Event>) -> Result<(), EngineError> {
        self.core.turn += 1;
        while let Some(key) = self.core.next_ended() {
            backend!(self.close_socket(key));
        }
        backend!(self.poll(deadline, events)).map_err(EngineError::Poll)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        backend!(self.shut_down());
    }
}

fn fallback_notice(error: &EngineError) -> String {
    use std::error::Error;
    let cause = error
        .source()
        .map_or(String::new(), |source| format!(" ({source})"));
    format!("{error}{cause}; using the portable engine")
}
