//! What the shard knows of a connection, and what it admits on it.

use ashlar_replication::values::{Epoch, Time, VolumeId};
use ashlar_store::ReplicaSlot;
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

/// A volume on a connection, from Fence to Release.
#[derive(Clone, Copy, Debug)]
pub struct Attachment {
    /// The replica.
    pub slot: ReplicaSlot,
    /// Of which volume; a slot may be used again by another.
    pub volume: VolumeId,
    /// The epoch of every request on this handle.
    pub epoch: Epoch,
}

/// How much may be under way on one connection; the rest waits in its socket.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    /// Requests.
    pub operations_max: u32,
    /// Bytes of block data, read or written.
    pub bytes_max: u64,
}

/// A connection.
pub struct Connection {
    /// How far the handshake is.
    pub phase: Phase,
    /// By handle.
    attachments: Vec<Option<Attachment>>,
    operations: u32,
    bytes: u64,
    /// Whether the engine was told to stop receiving.
    pub paused: bool,
    /// When the last Renew came.
    pub renewed_at: Option<Time>,
}

impl Connection {
    /// A connection that has just been accepted.
    pub fn new() -> Connection {
        Connection {
            phase: Phase::Greeting,
            attachments: Vec::new(),
            operations: 0,
            bytes: 0,
            paused: false,
            renewed_at: None,
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
        self.operations < admission.operations_max && self.bytes < admission.bytes_max
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
