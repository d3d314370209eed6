//! The fixed header of every frame, and the kinds of frames.

use ashlar_replication::values::{BLOCK_BYTES, EXTENT_BLOCKS};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::WireError;

/// The first four bytes of every frame, "ASHL".
pub const MAGIC: u32 = u32::from_le_bytes(*b"ASHL");
/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 64;
/// The most bytes of a body. The largest one is a promise with its torn blocks; see
/// [`crate::TORN_MAX`].
pub const BODY_BYTES_MAX: u32 = 256 * 1024;
/// The most bytes of block data in a frame: one extent.
pub const DATA_BYTES_MAX: u32 = EXTENT_BLOCKS * BLOCK_BYTES as u32;
/// The most bytes of a whole frame, what a receive buffer has to hold at least.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX as usize + DATA_BYTES_MAX as usize;

/// The content of the frame is zeros: it carries neither data nor checksums.
pub const FLAG_ZEROS: u16 = 1;
/// Read: torn blocks are served, too.
pub const FLAG_TORN: u16 = 2;
/// Positions: there is more, `start` says where.
pub const FLAG_MORE: u16 = 4;

/// The header of a frame; docs/wire-format.md has the meaning of the fields for each kind.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: U32,
    /// One of [`Kind`].
    pub kind: U16,
    /// FLAG_*.
    pub flags: U16,
    /// The attachment on this connection.
    pub handle: U32,
    /// Blocks, extents or entries.
    pub count: U32,
    /// Request id or sequence.
    pub request: U64,
    /// First block or extent.
    pub start: U64,
    /// Pass, position or code.
    pub argument: U64,
    /// Bytes of the body.
    pub body_bytes: U32,
    /// Bytes of block data behind the body.
    pub data_bytes: U32,
    /// CRC-32C of the body.
    pub body_crc: U32,
    /// Zero.
    pub reserved: [u8; 8],
    /// CRC-32C of the 60 bytes before.
    pub header_crc: U32,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// What a frame is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Kind { $($(#[$doc])* $name = $value,)* }

        impl Kind {
            /// Every kind, for tests and counters.
            pub const ALL: &'static [Kind] = &[$(Kind::$name,)*];

            /// The kind with that number.
            pub fn from_number(number: u16) -> Option<Kind> {
                match number { $($value => Some(Kind::$name),)* _ => None }
            }

            /// For messages.
            pub fn name(self) -> &'static str {
                match self { $(Kind::$name => stringify!($name),)* }
            }
        }
    };
}

kinds! {
    /// Initiator: the first frame of a connection.
    Hello = 1,
    /// Member: the answer to it.
    Welcome = 2,
    /// Either: the reason why the connection is closed now.
    Goodbye = 3,
    /// Initiator: M1 with the proof of the volume's key.
    Fence = 4,
    /// Member: the answer, with its own proof.
    Promised = 5,
    /// Member: a Fence that was refused.
    FenceRefused = 6,
    /// Initiator: the attachment is over.
    Release = 7,
    /// Initiator: renews the lease of all volumes of the connection.
    Renew = 8,
    /// Member: the answer to it.
    Renewed = 9,
    /// Member: an attachment of this connection was superseded (L3).
    Fenced = 10,
    /// M3.
    StoreConfig = 32,
    /// M4.
    Write = 33,
    /// M5.
    BeginResync = 34,
    /// M6.
    Copy = 35,
    /// M7.
    MarkComplete = 36,
    /// M8.
    Equalise = 37,
    /// M8.
    SetLast = 38,
    /// M9.
    Read = 39,
    /// M9.
    Compare = 40,
    /// R3.
    Digests = 41,
    /// A5.
    ListAbove = 42,
    /// R6.
    Repair = 43,
    /// A request was not done.
    Refused = 64,
    /// A write was not done.
    WriteRefused = 65,
    /// A change is durable.
    Done = 66,
    /// Writes up to a sequence are durable.
    Applied = 67,
    /// Copies are durable, but for those listed.
    Copied = 68,
    /// Answer to Read.
    Data = 69,
    /// Answer to Read: no data.
    ReadFailed = 70,
    /// Answer to Compare and ListAbove.
    Positions = 71,
    /// Answer to Digests.
    DigestList = 72,
}

impl Header {
    /// A header of that kind with everything else zero.
    pub fn new(kind: Kind) -> Header {
        let mut header = Header::new_zeroed_bytes();
        header.magic = MAGIC.into();
        header.kind = (kind as u16).into();
        header
    }

    fn new_zeroed_bytes() -> Header {
        zerocopy::FromZeros::new_zeroed()
    }

    /// Sets lengths and checksums for this body and that many bytes of block data.
    pub fn seal(&mut self, body: &[u8], data_bytes: usize) {
        self.body_bytes = (body.len() as u32).into();
        self.data_bytes = (data_bytes as u32).into();
        self.body_crc = crc32c::crc32c(body).into();
        self.header_crc = crc32c::crc32c(&self.as_bytes()[..HEADER_BYTES - 4]).into();
    }

    /// Reads and checks a header; `None` when there are not 64 bytes yet.
    pub fn parse(input: &[u8]) -> Result<Option<(Header, Kind)>, WireError> {
        // The magic is checked as early as possible: a foreign client must not be waited for.
        let known = input.len().min(4);
        if input[..known] != MAGIC.to_le_bytes()[..known] {
            return Err(WireError::Magic);
        }
        let Ok((header, _)) = Header::read_from_prefix(input) else {
            return Ok(None);
        };
        if crc32c::crc32c(&header.as_bytes()[..HEADER_BYTES - 4]) != header.header_crc.get() {
            return Err(WireError::HeaderChecksum);
        }
        if header.body_bytes.get() > BODY_BYTES_MAX {
            return Err(WireError::Limit {
                what: "bytes of a body",
            });
        }
        let data = header.data_bytes.get();
        if data > DATA_BYTES_MAX || data % BLOCK_BYTES as u32 != 0 {
            return Err(WireError::Limit {
                what: "bytes of block data",
            });
        }
        let kind = header.kind.get();
        let kind = Kind::from_number(kind).ok_or(WireError::Kind(kind))?;
        Ok(Some((header, kind)))
    }

    /// Bytes of the whole frame.
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.body_bytes.get() as usize + self.data_bytes.get() as usize
    }
}
