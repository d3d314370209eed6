//! Bytes to frames. Nothing panics on any input, and nothing allocates before its length is checked;
//! writes and their answers do not allocate at all, and [`decode_data`] reads answers with data so.

mod connection;
mod reply;
mod request;

pub use reply::{DataReply, PackedPositions, decode_data};

use ashlar_replication::message::{Content, Refusal, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, BlockRange, Sequence};
use zerocopy::FromBytes as _;
use zerocopy::little_endian::U32;

use crate::body::Reader;
use crate::error::WireError;
use crate::frame::{BlockData, Frame};
use crate::header::{FLAG_ZEROS, HEADER_BYTES, Header, Kind, Limits};
use crate::refusal::refusal_from;

/// What the start of the input holds.
#[allow(
    clippy::large_enum_variant,
    reason = "short-lived on the stack; a box would be an allocation per frame"
)]
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// Not a whole frame yet.
    Incomplete {
        /// Bytes of input that the next step needs.
        need: usize,
    },
    /// A frame, or one whose content is wrong while the next frame's start is known.
    Frame {
        /// What was sent. An error here does not lose framing.
        frame: Result<Frame<'a>, BadFrame>,
        /// Bytes to consume.
        bytes: usize,
    },
}

/// A frame whose content is not what its kind asks for: it can be refused by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadFrame {
    /// What it claims to be.
    pub kind: Kind,
    /// The attachment that it names.
    pub handle: u32,
    /// Its request id or sequence.
    pub request: u64,
    /// What is wrong.
    pub error: WireError,
}

/// Reads one frame of a peer that has proved to know a volume's key.
///
/// # Errors
/// When framing is lost: the connection has to be closed.
pub fn decode(input: &[u8]) -> Result<Decoded<'_>, WireError> {
    decode_within(input, &Limits::ALL)
}

/// Reads one frame; one that exceeds `limits` is an error as soon as its header is there. A storage
/// node reads with [`Limits::UNPROVEN`] until a Fence on the connection was proved.
///
/// # Errors
/// When framing is lost: the connection has to be closed.
pub fn decode_within<'a>(input: &'a [u8], limits: &Limits) -> Result<Decoded<'a>, WireError> {
    let (decoder, bytes) = match open(input, limits)? {
        Opened::Incomplete { need } => return Ok(Decoded::Incomplete { need }),
        Opened::Whole { decoder, bytes } => (decoder, bytes),
    };
    let (header, kind) = (decoder.header, decoder.kind);
    let frame = decoder.frame().map_err(|error| BadFrame {
        kind,
        handle: header.handle.get(),
        request: header.request.get(),
        error,
    });
    Ok(Decoded::Frame { frame, bytes })
}

enum Opened<'a> {
    Incomplete { need: usize },
    Whole { decoder: Decoder<'a>, bytes: usize },
}

/// Checks everything that framing depends on.
fn open<'a>(input: &'a [u8], limits: &Limits) -> Result<Opened<'a>, WireError> {
    let Some((header, kind)) = Header::parse(input, limits)? else {
        return Ok(Opened::Incomplete { need: HEADER_BYTES });
    };
    let bytes = header.frame_bytes();
    let Some(frame) = input.get(HEADER_BYTES..bytes) else {
        return Ok(Opened::Incomplete { need: bytes });
    };
    let (body, data) = frame.split_at(header.body_bytes.get() as usize);
    if crc32c::crc32c(body) != header.body_crc.get() {
        return Err(WireError::BodyChecksum);
    }
    let body = Reader::new(kind.name(), body);
    let decoder = Decoder {
        header,
        kind,
        body,
        data,
    };
    Ok(Opened::Whole { decoder, bytes })
}

/// A frame whose lengths and checksums are right, while its content is read.
struct Decoder<'a> {
    header: Header,
    kind: Kind,
    body: Reader<'a>,
    data: &'a [u8],
}

impl<'a> Decoder<'a> {
    fn frame(mut self) -> Result<Frame<'a>, WireError> {
        self.check_header()?;
        let handle = self.header.handle.get();
        let frame = match self.kind {
            Kind::Hello
            | Kind::Welcome
            | Kind::Goodbye
            | Kind::Fence
            | Kind::Promised
            | Kind::FenceRefused
            | Kind::Release
            | Kind::Renew
            | Kind::Renewed
            | Kind::Fenced => self.connection_frame(handle)?,
            Kind::Write
            | Kind::StoreConfig
            | Kind::BeginResync
            | Kind::Copy
            | Kind::MarkComplete
            | Kind::Equalise
            | Kind::SetLast
            | Kind::Read
            | Kind::Compare
            | Kind::Digests
            | Kind::ListAbove
            | Kind::Repair => Frame::Request {
                handle,
                request: self.request()?,
            },
            Kind::Refused
            | Kind::WriteRefused
            | Kind::Done
            | Kind::Applied
            | Kind::Copied
            | Kind::Data
            | Kind::ReadFailed
            | Kind::Positions
            | Kind::DigestList => Frame::Reply {
                handle,
                reply: self.reply()?,
            },
        };
        self.end()?;
        Ok(frame)
    }

    /// What this version gives no meaning to must not be set: a peer uses it only once both have
    /// agreed on a feature.
    fn check_header(&self) -> Result<(), WireError> {
        if self.header.flags.get() & !self.kind.flags() != 0 {
            return Err(self.body.malformed("a flag that its kind does not have"));
        }
        if self.header.reserved != [0; 8] {
            return Err(self.body.malformed("reserved bytes that are not zero"));
        }
        Ok(())
    }

    /// Everything has been read.
    fn end(&self) -> Result<(), WireError> {
        self.body.end()?;
        if !self.data.is_empty() {
            let what = "block data that its kind has no place for";
            return Err(self.body.malformed(what));
        }
        Ok(())
    }

    fn id(&self) -> RequestId {
        RequestId(self.header.request.get())
    }

    fn sequence(&self, value: u64) -> Result<Sequence, WireError> {
        let sequence = Sequence(value);
        if sequence > Sequence::MAX {
            return Err(self.body.malformed("a sequence above 40 bits"));
        }
        Ok(sequence)
    }

    fn range(&self) -> Result<BlockRange, WireError> {
        let range = BlockRange {
            start: self.body.block(self.header.start.get())?,
            count: self.header.count.get(),
        };
        if !range.is_within_one_extent() {
            let what = "the range does not lie within one extent";
            return Err(self.body.malformed(what));
        }
        Ok(range)
    }

    fn zeros(&self) -> bool {
        self.header.flags.get() & FLAG_ZEROS != 0
    }

    fn content(&mut self, count: u32) -> Result<Content<BlockData<'a>>, WireError> {
        if self.zeros() {
            return Ok(Content::Zeros);
        }
        let data = core::mem::take(&mut self.data);
        if data.len() != count as usize * BLOCK_BYTES {
            return Err(self.body.malformed("the data is not as long as the range"));
        }
        let crcs = <[U32]>::ref_from_bytes(self.body.bytes(count as usize * 4)?);
        let crcs = crcs.map_err(|_| self.body.malformed("the checksums do not fit"))?;
        Ok(Content::Data(BlockData { crcs, data }))
    }

    fn refusal(&self) -> Result<Refusal, WireError> {
        let refusal = refusal_from(self.header.count.get(), self.header.argument.get());
        refusal.ok_or(self.body.malformed("an unknown refusal"))
    }
}
