//! Settings and errors of an engine.

use std::io;
use std::time::Duration;

/// How an engine talks to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// One io_uring: sockets and files asynchronous, usually one system call per turn.
    IoUring,
    /// epoll for sockets; file operations block the thread (`preadv2`, `pwritev2`).
    Portable,
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            EngineKind::IoUring => "io_uring",
            EngineKind::Portable => "portable",
        })
    }
}

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// None: io_uring, or portable with a notice where the kernel refuses io_uring.
    pub kind: Option<EngineKind>,
    /// The longest time that a poll spins before it sleeps; zero: never spins. How long it really
    /// spins adapts to whether spinning has paid.
    pub busy_poll: Duration,
    /// Bytes of receive buffer that a socket starts with.
    pub receive_bytes: usize,
    /// The most bytes of receive buffer that [`crate::Engine::need`] may ask for; a socket that
    /// needs more is closed with an error.
    pub receive_bytes_max: usize,
    /// Shared payloads shorter than this are copied into the output queue, because a copy costs
    /// less than another piece of a gathering send.
    pub send_copy_max: usize,
    /// Time after which a connect that got no answer fails.
    pub connect_timeout: Duration,
    /// Pause after an accept failed for want of resources.
    pub accept_retry: Duration,
    /// Bytes of recycled buffers kept for reuse.
    pub pool_bytes_max: usize,
    /// Entries of the submission ring (io_uring). Beyond it more system calls are made, nothing
    /// fails.
    pub ring_entries: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            kind: None,
            busy_poll: Duration::ZERO,
            receive_bytes: 64 << 10,
            receive_bytes_max: 40 << 20,
            send_copy_max: 16 << 10,
            connect_timeout: Duration::from_secs(3),
            accept_retry: Duration::from_millis(100),
            pool_bytes_max: 16 << 20,
            ring_entries: 256,
        }
    }
}

/// An engine cannot be made or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel refuses io_uring, which was asked for by name.
    #[error("io_uring is not available: {reason}")]
    Unavailable {
        /// What is missing.
        reason: &'static str,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
    /// The kernel refuses something that both kinds of engine need.
    #[error("cannot set up the engine")]
    Setup(#[source] io::Error),
    /// Waiting for events failed in a way that will not pass. The engine is of no more use.
    #[error("waiting for events failed")]
    Poll(#[source] io::Error),
}
