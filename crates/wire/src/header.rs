//! The fixed header of every frame, and the kinds of frames.

use ashlar_replication::values::{BLOCK_BYTES, EXTENT_BLOCKS};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::body::{
    CONFIGURATION_BYTES_MAX, ENTRY_BYTES, FENCE_BYTES, MEMBER_LIST_BYTES_MAX, PROMISE_BYTES_MAX,
};
use crate::error::WireError;
use crate::frame::{GOODBYE_BYTES_MAX, POSITIONS_MAX};

/// The first four bytes of every frame, "ASHL".
pub const MAGIC: u32 = u32::from_le_bytes(*b"ASHL");
/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 64;
/// The most bytes of a body. The largest one is a promise with its torn blocks; see
/// [`crate::TORN_MAX`].
pub const BODY_BYTES_MAX: u32 = 256 * 1024;
/// The most bytes of block data in a frame: one extent.
pub const DATA_BYTES_MAX: u32 = EXTENT_BLOCKS * BLOCK_BYTES as u32;
/// The most bytes of a Hello or Welcome. Later versions may append fields to what this one writes;
/// a version skips what it does not know.
pub const GREETING_BYTES_MAX: u32 = 1024;
/// The most bytes of a whole frame, what a receive buffer has to hold at least.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX as usize + DATA_BYTES_MAX as usize;

const _: () = assert!(PROMISE_BYTES_MAX <= BODY_BYTES_MAX);
const _: () = assert!(FENCE_BYTES <= GREETING_BYTES_MAX);

/// The content of the frame is zeros: it carries neither data nor checksums.
pub const FLAG_ZEROS: u16 = 1;
/// Read: torn blocks are served, too.
pub const FLAG_TORN: u16 = 2;
/// Positions: there is more, `start` says where.
pub const FLAG_MORE: u16 = 4;

/// What a frame may hold. Checked on the header alone, before the rest of the frame is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a body.
    pub body_bytes_max: u32,
    /// The most bytes of block data.
    pub data_bytes_max: u32,
}

impl Limits {
    /// What the largest frame of any kind needs.
    pub const ALL: Limits = Limits {
        body_bytes_max: BODY_BYTES_MAX,
        data_bytes_max: DATA_BYTES_MAX,
    };
    /// For a peer that has not proved to know the key of any volume: Hello and Fence fit, so that
    /// strangers cannot make a storage node set memory aside.
    pub const UNPROVEN: Limits = Limits {
        body_bytes_max: GREETING_BYTES_MAX,
        data_bytes_max: 0,
    };

    const fn body(bytes: u32) -> Limits {
        Limits {
            body_bytes_max: bytes,
            data_bytes_max: 0,
        }
    }

    /// `bytes` of body per block of an extent, with the blocks.
    const fn extent(bytes: u32) -> Limits {
        Limits {
            body_bytes_max: bytes * EXTENT_BLOCKS,
            data_bytes_max: DATA_BYTES_MAX,
        }
    }
}

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

impl Kind {
    /// What a frame of the kind holds at most; beyond it framing is lost.
    pub const fn limits(self) -> Limits {
        match self {
            Kind::Hello | Kind::Welcome => Limits::body(GREETING_BYTES_MAX),
            Kind::Goodbye => Limits::body(GOODBYE_BYTES_MAX as u32),
            Kind::Fence => Limits::body(FENCE_BYTES),
            Kind::Promised => Limits::body(BODY_BYTES_MAX),
            Kind::StoreConfig => Limits::body(CONFIGURATION_BYTES_MAX + MEMBER_LIST_BYTES_MAX),
            // Per block: its checksum, and two, one or no positions before it.
            Kind::Copy => Limits::extent(20),
            Kind::Equalise | Kind::Data => Limits::extent(12),
            Kind::Write => Limits::extent(4),
            Kind::Repair => Limits {
                body_bytes_max: 4,
                data_bytes_max: BLOCK_BYTES as u32,
            },
            Kind::Copied | Kind::Positions | Kind::DigestList => {
                Limits::body(POSITIONS_MAX as u32 * ENTRY_BYTES)
            }
            Kind::FenceRefused
            | Kind::Release
            | Kind::Renew
            | Kind::Renewed
            | Kind::Fenced
            | Kind::BeginResync
            | Kind::MarkComplete
            | Kind::SetLast
            | Kind::Read
            | Kind::Compare
            | Kind::Digests
            | Kind::ListAbove
            | Kind::Refused
            | Kind::WriteRefused
            | Kind::Done
            | Kind::Applied
            | Kind::ReadFailed => Limits::body(0),
        }
    }

    /// The flags that mean something on the kind.
    pub(crate) const fn flags(self) -> u16 {
        match self {
            Kind::Write | Kind::Copy | Kind::Equalise | Kind::Repair | Kind::Data => FLAG_ZEROS,
            Kind::Read => FLAG_TORN,
            Kind::Positions => FLAG_MORE,
            _ => 0,
        }
    }
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
    ///
    /// # Errors
    /// Every one of them loses framing.
    pub fn parse(input: &[u8], limits: &Limits) -> Result<Option<(Header, Kind)>, WireError> {
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
        let kind = header.kind.get();
        let kind = Kind::from_number(kind).ok_or(WireError::Kind(kind))?;
        let of_kind = kind.limits();
        let body_bytes_max = of_kind.body_bytes_max.min(limits.body_bytes_max);
        if header.body_bytes.get() > body_bytes_max {
            return Err(WireError::Limit {
                what: "bytes of a body",
            });
        }
        let data = header.data_bytes.get();
        let data_bytes_max = of_kind.data_bytes_max.min(limits.data_bytes_max);
        if data > data_bytes_max || !data.is_multiple_of(BLOCK_BYTES as u32) {
            return Err(WireError::Limit {
                what: "bytes of block data",
            });
        }
        Ok(Some((header, kind)))
    }

    /// The kind that the input claims to be, unchecked.
    pub fn peek_kind(input: &[u8]) -> Option<Kind> {
        let kind = input.get(4..6)?.try_into().ok()?;
        Kind::from_number(u16::from_le_bytes(kind))
    }

    /// Bytes of the whole frame.
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.body_bytes.get() as usize + self.data_bytes.get() as usize
    }
}
