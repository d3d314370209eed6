//! What can be wrong with bytes from a peer.

/// Why input is not a frame. Every variant but [`WireError::Body`] loses framing: the connection has
/// to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first four bytes are not the protocol's.
    #[error("not an Ashlar data connection (wrong magic)")]
    Magic,
    /// The header's checksum does not match.
    #[error("the checksum of a frame header does not match")]
    HeaderChecksum,
    /// A length or count above its limit.
    #[error("a frame exceeds the limit of {what}")]
    Limit {
        /// Of what.
        what: &'static str,
    },
    /// The body's checksum does not match.
    #[error("the checksum of a frame body does not match")]
    BodyChecksum,
    /// A kind of frame that this version does not know.
    #[error("unknown kind of frame {0}")]
    Kind(u16),
    /// The frame is whole, but its content is not what its kind asks for. Framing is kept: the
    /// request can be refused and the connection goes on.
    #[error("malformed {kind} frame: {what}")]
    Body {
        /// The kind.
        kind: &'static str,
        /// What is wrong.
        what: &'static str,
    },
}

impl WireError {
    /// Whether the start of the next frame is no longer known.
    pub fn loses_framing(self) -> bool {
        !matches!(self, WireError::Body { .. })
    }
}
