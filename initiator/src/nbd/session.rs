//! What is known of a connection, and of a request under way.

use ashlar_engine::{IoBuf, SocketId};

use crate::front_end::{IoError, VolumeHandle};
use crate::nbd::negotiation::Negotiation;
use crate::nbd::reply::To;
use crate::nbd::request::{Negotiated, Refusal};

/// A connection.
///
/// ```text
/// accepted ─▶ Negotiation ── GO, EXPORT_NAME ─▶ Transmission ── DISC, detach ─▶ leaving ─▶ closed
///                  │                                 │                            answered
///                  └── ABORT, framing, patience ─────┴── framing lost, peer closed ─▶ closed
/// ```
pub(super) struct Session {
    pub(super) phase: Phase,
    /// Requests under way.
    pub(super) requests: u32,
    /// Bytes of the reads under way.
    pub(super) reading_bytes: u64,
    /// What was last counted into the server's total: bytes of reads under way and of answers that
    /// the client has not taken.
    pub(super) answer_bytes: u64,
    /// The engine does not receive from it.
    pub(super) paused: bool,
    /// It is in the list of those to be tried again.
    pub(super) waiting: bool,
    /// Nothing more is received; closed when everything is answered.
    pub(super) leaving: bool,
    /// Everything is answered, the last answers are on their way.
    pub(super) flushing: bool,
}

pub(super) enum Phase {
    Negotiation(Negotiation),
    Transmission(Transmission),
}

pub(super) struct Transmission {
    pub(super) volume: VolumeHandle,
    pub(super) negotiated: Negotiated,
    pub(super) receiving: Receiving,
}

/// What the next bytes are.
pub(super) enum Receiving {
    Header,
    /// Bytes of a write.
    Payload(Payload),
    /// Bytes of a write that is refused.
    Skipped {
        left: u32,
        cookie: u64,
        refusal: Refusal,
    },
}

/// The rest of a write. It goes to the volume in pieces as they come, cut at the borders of extents,
/// so that no connection needs room for more than one piece.
pub(super) struct Payload {
    /// The request's place in the table.
    pub(super) pending: u32,
    /// Number of the next piece.
    pub(super) piece: u32,
    /// Where the piece begins.
    pub(super) at: u64,
    /// Bytes from there on.
    pub(super) left: u32,
    /// The piece, of which `filled` bytes have come.
    pub(super) buf: Option<IoBuf>,
    pub(super) filled: usize,
    /// A piece was refused: the others are only read past.
    pub(super) skip: bool,
}

/// A request under way.
pub(super) struct Pending {
    pub(super) to: To,
    pub(super) offset: u64,
    /// One chunk of content (DF), or one extent (REQ_ONE).
    pub(super) single: bool,
    /// Bytes of a read.
    pub(super) reading_bytes: u64,
    /// Pieces that are not done, and one more while the payload is received.
    pub(super) left: u32,
    pub(super) error: Option<IoError>,
}

impl Session {
    pub(super) fn new() -> Session {
        Session {
            phase: Phase::Negotiation(Negotiation::default()),
            requests: 0,
            reading_bytes: 0,
            answer_bytes: 0,
            paused: false,
            waiting: false,
            leaving: false,
            flushing: false,
        }
    }

    pub(super) fn transmission(&mut self) -> Option<&mut Transmission> {
        match &mut self.phase {
            Phase::Transmission(transmission) => Some(transmission),
            Phase::Negotiation(_) => None,
        }
    }

    /// Where the answer to a request of this connection goes.
    pub(super) fn to(&self, socket: SocketId, cookie: u64) -> To {
        let structured = match &self.phase {
            Phase::Transmission(transmission) => transmission.negotiated.structured,
            Phase::Negotiation(_) => false,
        };
        To {
            socket,
            cookie,
            structured,
        }
    }
}
