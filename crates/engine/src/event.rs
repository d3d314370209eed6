//! What a turn of the engine reports, and the names of the things it reports about.

use std::fmt;
use std::io;

use crate::buffer::IoBuf;
use crate::slab::Key;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub(crate) Key);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({}.{})"), self.0.index, self.0.generation)
            }
        }
    };
}

id! {
    /// A listening socket of an engine.
    ListenerId
}
id! {
    /// A socket of an engine. Never equal to the id of a socket that existed before, and harmless
    /// after its end: calls with it do nothing.
    SocketId
}
id! {
    /// A file or device of an engine.
    FileId
}

/// Something that happened, reported by [`crate::Engine::poll`].
#[derive(Debug)]
pub enum Event {
    /// A peer connected to a listener.
    Accepted {
        /// The listener.
        listener: ListenerId,
        /// The new socket; it receives at once.
        socket: SocketId,
    },
    /// A listener could not accept (for example too many open files). It tries again by itself
    /// after [`crate::Options::accept_retry`].
    AcceptFailed {
        /// The listener.
        listener: ListenerId,
        /// Why.
        error: io::Error,
    },
    /// A socket made by [`crate::Engine::connect`] is connected.
    Connected {
        /// The socket.
        socket: SocketId,
    },
    /// More bytes are in [`crate::Engine::input`], and as many as [`crate::Engine::need`] asked for.
    Received {
        /// The socket.
        socket: SocketId,
    },
    /// The output queue is empty, after [`crate::Engine::poll`] had returned with bytes in it.
    Drained {
        /// The socket.
        socket: SocketId,
    },
    /// The socket ended, by the peer or by an error, and its id with it; never follows
    /// [`crate::Engine::close`]. What was received stays readable until the next poll.
    Closed {
        /// The socket.
        socket: SocketId,
        /// None: the peer closed in an orderly way.
        error: Option<io::Error>,
    },
    /// A file operation is done.
    File {
        /// What the caller gave to the operation.
        token: u64,
        /// Bytes moved: always all that were asked for. A read past the end of the file is an
        /// error ([`io::ErrorKind::UnexpectedEof`]). For a sync 0.
        result: io::Result<usize>,
        /// The buffer of the operation, also after an error; None for a sync.
        buf: Option<IoBuf>,
    },
    /// [`crate::Waker::wake`] was called, once or more often.
    Woken,
}
