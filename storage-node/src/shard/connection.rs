//! What the shard knows of a connection, and what it admits on it.

use ashlar_engine::SocketId;
use ashlar_replica::Attachment;
use ashlar_replication::values::Time;
use ashlar_wire::Limits;
use ashlar_wire::proof::Challenges;

/// Handles that an initiator may use on one connection: [0, this).
pub const HANDLES_MAX: u32 = 1 << 16;

/// How far the handshake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Only Hello may come.
    Greeting,
    /// Welcome was sent.
    Open(Challenges),
    /// Goodbye was sent; whatever still comes is not looked at.
    Closing,
}

/// Who asked for something. The handle may have got another meaning by the time it is answered, so
/// the attachment is kept with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// On which connection.
    pub socket: SocketId,
    /// With which handle.
    pub handle: u32,
    /// What the handle stood for.
    pub attachment: Attachment,
}

/// How much may be under way; the rest waits in the sockets.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    /// Requests of one connection.
    pub operations_max: u32,
    /// Bytes of block data, read or written, of one connection; answers that its peer has not taken
    /// count, too.
    pub bytes_max: u64,
    /// Bytes of answers that the peer of a connection has not taken. Above it nothing more is read
    /// from it until it has taken all.
    pub backlog_bytes_max: usize,
    /// Bytes of block data of all connections.
    pub total_bytes_max: u64,
}

/// The same for a peer that has not proved to know any key: its answers are small.
const UNPROVEN_BACKLOG_BYTES_MAX: usize = 16 << 10;

/// A connection.
pub struct Connection {
    /// How far the handshake is.
    pub phase: Phase,
    /// Whether a Fence on it has proved to know a volume's key.
    pub proven: bool,
    /// By handle.
    attachments: Vec<Option<Attachment>>,
    operations: u32,
    bytes: u64,
    /// Bytes of answers that the peer had not taken when that was last looked at.
    pub backlog_bytes: usize,
    /// Whether the engine was told to stop receiving.
    pub paused: bool,
    /// Whether it waits for what other connections have under way.
    pub held: bool,
    /// When the last Renew came.
    pub renewed_at: Option<Time>,
    /// When anything came.
    pub active_at: Time,
}

impl Connection {
    /// A connection that has just been accepted.
    pub fn new(now: Time) -> Connection {
        Connection {
            phase: Phase::Greeting,
            proven: false,
            attachments: Vec::new(),
            operations: 0,
            bytes: 0,
            backlog_bytes: 0,
            paused: false,
            held: false,
            renewed_at: None,
            active_at: now,
        }
    }

    /// How large its frames may be.
    pub fn limits(&self) -> &'static Limits {
        if self.proven {
            &Limits::ALL
        } else {
            &Limits::UNPROVEN
        }
    }

    /// Counts a request in.
    pub fn begin(&mut self, bytes: u64) {
        self.operations += 1;
        self.bytes += bytes;
    }

    /// Counts a request out.
    pub fn end(&mut self, bytes: u64) {
        self.operations -= 1;
        self.bytes -= bytes;
    }

    /// Whether another request may be looked at.
    pub fn admits(&self, admission: &Admission) -> bool {
        self.operations < admission.operations_max
            && self.bytes + (self.backlog_bytes as u64) < admission.bytes_max
            && !self.is_backlogged(admission)
    }

    /// Whether its peer takes no answers.
    pub fn is_backlogged(&self, admission: &Admission) -> bool {
        let proven = admission.backlog_bytes_max;
        let max = if self.proven {
            proven
        } else {
            UNPROVEN_BACKLOG_BYTES_MAX
        };
        self.backlog_bytes > max
    }

    /// The attachment with that handle.
    pub fn attachment(&self, handle: u32) -> Option<&Attachment> {
        self.attachments.get(handle as usize)?.as_ref()
    }

    /// Sets or clears an attachment. The handle must be below [`HANDLES_MAX`].
    pub fn set_attachment(&mut self, handle: u32, attachment: Option<Attachment>) {
        let index = handle as usize;
        if index >= self.attachments.len() {
            self.attachments.resize(index + 1, None);
        }
        self.attachments[index] = attachment;
    }
}
