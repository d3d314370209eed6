//! State of one socket that both kinds of engine share.

use std::os::fd::OwnedFd;

use ashlar_replication::values::Time;

use crate::output::OutputQueue;
use crate::receive::ReceiveBuffer;

/// Where a socket is in its life. Only ever goes down this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits for the peer, until the given time.
    Connecting(Time),
    Open,
    /// `Closed` was reported; input stays readable until the next poll.
    Ended,
    /// The id is invalid; waits for the kernel to let go of the buffers.
    Closed,
}

/// What the kernel holds of a socket (io_uring). The socket is kept while anything is set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pending {
    pub(crate) receive: bool,
    pub(crate) send: bool,
    pub(crate) connect: bool,
}

impl Pending {
    pub(crate) fn any(self) -> bool {
        self.receive || self.send || self.connect
    }
}

pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    pub(crate) phase: Phase,
    pub(crate) receive: ReceiveBuffer,
    pub(crate) output: OutputQueue,
    pub(crate) paused: bool,
    /// In the list of sockets that the next flush looks at.
    pub(crate) dirty: bool,
    /// The kernel did not take all of the last send at once.
    pub(crate) blocked: bool,
    /// A poll returned with output queued: report when it is gone.
    pub(crate) held_over: bool,
    /// The kernel said after the last receive that there is more (io_uring).
    pub(crate) more_input: bool,
    pub(crate) pending: Pending,
    /// Bytes of the message with the kernel, and the turn that gave it (io_uring).
    pub(crate) message_bytes: usize,
    pub(crate) message_turn: u64,
    /// Events that epoll watches for; None: not registered (portable).
    pub(crate) interest: Option<u32>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd, phase: Phase, receive_bytes: usize) -> Socket {
        Socket {
            fd,
            phase,
            receive: ReceiveBuffer::new(receive_bytes),
            output: OutputQueue::new(),
            paused: false,
            dirty: false,
            blocked: false,
            held_over: false,
            more_input: true,
            pending: Pending::default(),
            message_bytes: 0,
            message_turn: 0,
            interest: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }
}
