//! Bytes to frames. Nothing panics on any input, and nothing allocates before its length is checked;
//! writes and their answers do not allocate at all.

use ashlar_replication::message::{
    BlockPosition, Content, CopyStep, ReadData, Reply, Request, RequestId, TornBlocks,
};
use ashlar_replication::values::{
    BLOCK_BYTES, Block, BlockRange, DeviceId, EXTENT_BLOCKS, EpochNumber, ExtentIndex, Pass,
    Position, Sequence, VolumeId,
};
use zerocopy::FromBytes as _;
use zerocopy::little_endian::U32;

use crate::body::Reader;
use crate::error::WireError;
use crate::frame::{
    BlockData, Fence, Frame, GOODBYE_BYTES_MAX, GoodbyeCode, Hello, POSITIONS_MAX, Promise,
    TORN_MAX, Welcome,
};
use crate::header::{FLAG_MORE, FLAG_TORN, FLAG_ZEROS, HEADER_BYTES, Header, Kind};
use crate::proof::Subject;
use crate::refusal::{read_error_from, refusal_from};

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

/// Reads one frame.
///
/// # Errors
/// When framing is lost: the connection has to be closed.
pub fn decode(input: &[u8]) -> Result<Decoded<'_>, WireError> {
    let Some((header, kind)) = Header::parse(input)? else {
        return Ok(Decoded::Incomplete { need: HEADER_BYTES });
    };
    let bytes = header.frame_bytes();
    let Some(frame) = input.get(HEADER_BYTES..bytes) else {
        return Ok(Decoded::Incomplete { need: bytes });
    };
    let (body, data) = frame.split_at(header.body_bytes.get() as usize);
    if crc32c::crc32c(body) != header.body_crc.get() {
        return Err(WireError::BodyChecksum);
    }
    let decoder = Decoder {
        header,
        kind,
        data,
        body: Reader::new(kind.name(), body),
    };
    let frame = decoder.frame().map_err(|error| BadFrame {
        kind,
        handle: header.handle.get(),
        request: header.request.get(),
        error,
    });
    Ok(Decoded::Frame { frame, bytes })
}

struct Decoder<'a> {
    header: Header,
    kind: Kind,
    body: Reader<'a>,
    data: &'a [u8],
}

impl<'a> Decoder<'a> {
    fn frame(mut self) -> Result<Frame<'a>, WireError> {
        let handle = self.header.handle.get();
        let frame = match self.kind {
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
            _ => self.connection_frame(handle)?,
        };
        self.body.end()?;
        if !self.data.is_empty() {
            return Err(self
                .body
                .malformed("block data that its kind has no place for"));
        }
        Ok(frame)
    }

    fn connection_frame(&mut self, handle: u32) -> Result<Frame<'a>, WireError> {
        Ok(match self.kind {
            Kind::Hello => Frame::Hello(Hello {
                version_min: self.body.u16()?,
                version_max: self.body.u16()?,
                features: self.body.u64()?,
                nonce: self.body.array()?,
                initiator: self.body.array()?,
            }),
            Kind::Welcome => Frame::Welcome(Welcome {
                version: self.body.u16()?,
                features: self.body.u64()?,
                nonce: self.body.array()?,
                node: self.body.array()?,
                device: DeviceId(self.body.array()?),
                operations_max: self.body.u32()?,
                bytes_max: self.body.u64()?,
                lease_ms: self.body.u32()?,
            }),
            Kind::Goodbye => self.goodbye()?,
            Kind::Fence => Frame::Fence(Fence {
                subject: Subject {
                    volume: VolumeId(self.body.array()?),
                    member: self.body.member_id()?,
                    epoch: self.body.epoch()?,
                    handle,
                },
                proof: self.body.array()?,
            }),
            Kind::Promised => self.promised(handle)?,
            Kind::FenceRefused => Frame::FenceRefused {
                handle,
                refusal: self.refusal()?,
            },
            Kind::Release => Frame::Release { handle },
            Kind::Renew => Frame::Renew {
                echo: self.header.request.get(),
            },
            Kind::Renewed => Frame::Renewed {
                echo: self.header.request.get(),
            },
            Kind::Fenced => {
                let promised = u32::try_from(self.header.argument.get())
                    .ok()
                    .map(EpochNumber);
                let promised = promised.filter(|number| *number <= EpochNumber::MAX);
                let promised = promised.ok_or(self.body.malformed("an epoch above 24 bits"))?;
                Frame::Fenced { handle, promised }
            }
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    fn goodbye(&mut self) -> Result<Frame<'a>, WireError> {
        let code = GoodbyeCode::from_number(self.header.argument.get());
        let code = code.ok_or(self.body.malformed("an unknown code"))?;
        let length = self.body.entries_left(1)?;
        if length > GOODBYE_BYTES_MAX {
            return Err(self.body.malformed("the text is too long"));
        }
        let text = core::str::from_utf8(self.body.bytes(length)?);
        let text = text.map_err(|_| self.body.malformed("the text is not UTF-8"))?;
        Ok(Frame::Goodbye { code, text })
    }

    fn promised(&mut self, handle: u32) -> Result<Frame<'a>, WireError> {
        let whole = self.body.entries_left(1)?;
        let answer_bytes = whole
            .checked_sub(32)
            .ok_or(self.body.malformed("no proof"))?;
        let answer = self.body.bytes(answer_bytes)?;
        let proof = self.body.array()?;
        let mut body = Reader::new(self.kind.name(), answer);
        let epoch = body.epoch()?;
        let state = body.member_state()?;
        let size_blocks = body.u64()?;
        let count = body.u32()? as usize;
        if count > TORN_MAX || count != body.entries_left(16)? {
            return Err(body.malformed("the list of torn blocks has another length"));
        }
        let torn = positions(&mut body, count)?;
        let promise = Promise {
            epoch,
            state,
            size_blocks,
            torn,
        };
        Ok(Frame::Promised {
            handle,
            promise,
            answer,
            proof,
        })
    }

    fn id(&self) -> RequestId {
        RequestId(self.header.request.get())
    }

    fn pass(&self) -> Result<Pass, WireError> {
        let pass = u32::try_from(self.header.argument.get());
        pass.map(Pass)
            .map_err(|_| self.body.malformed("a pass above 32 bits"))
    }

    fn sequence(&self, value: u64) -> Result<Sequence, WireError> {
        let sequence = Sequence(value);
        if sequence > Sequence::MAX {
            return Err(self.body.malformed("a sequence above 40 bits"));
        }
        Ok(sequence)
    }

    fn range(&self) -> Result<BlockRange, WireError> {
        let start = Block(self.header.start.get());
        let range = BlockRange {
            start,
            count: self.header.count.get(),
        };
        if range.count == 0 || !range.is_within_one_extent() || start.0 > u64::MAX / 8192 {
            return Err(self
                .body
                .malformed("the range does not lie within one extent"));
        }
        Ok(range)
    }

    /// The range of a write; an empty one consumes a sequence and changes nothing.
    fn write_range(&self) -> Result<BlockRange, WireError> {
        if self.header.count.get() == 0 && self.zeros() {
            return Ok(BlockRange {
                start: Block(0),
                count: 0,
            });
        }
        self.range()
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
        let crcs = self.body.bytes(count as usize * 4)?;
        let crcs = <[U32]>::ref_from_bytes(crcs);
        let crcs = crcs.map_err(|_| self.body.malformed("the checksums do not fit"))?;
        Ok(Content::Data(BlockData { crcs, data }))
    }

    fn packed(&mut self, count: u32) -> Result<Vec<Position>, WireError> {
        let bytes = self.body.bytes(count as usize * 8)?;
        let words = bytes
            .chunks_exact(8)
            .map(|w| u64::from_le_bytes(w.try_into().unwrap_or([0; 8])));
        Ok(words.map(Position::unpack).collect())
    }

    fn request(&mut self) -> Result<Request<BlockData<'a>>, WireError> {
        let id = self.id();
        Ok(match self.kind {
            Kind::Write => {
                let sequence = self.sequence(self.header.request.get())?;
                let range = self.write_range()?;
                Request::Write {
                    sequence,
                    range,
                    content: self.content(range.count)?,
                }
            }
            Kind::StoreConfig => Request::StoreConfig {
                id,
                configuration: self.body.configuration()?,
                start: self.body.member_ids()?,
            },
            Kind::BeginResync => Request::BeginResync {
                id,
                pass: self.pass()?,
                sequence: self.sequence(self.header.start.get())?,
            },
            Kind::Copy => {
                let (pass, range) = (self.pass()?, self.range()?);
                let steps = self.packed(range.count * 2)?;
                let step = |s: &[Position]| CopyStep {
                    expected: s[0],
                    position: s[1],
                };
                let steps = steps.chunks_exact(2).map(step).collect();
                Request::Copy {
                    id,
                    pass,
                    range,
                    steps,
                    content: self.content(range.count)?,
                }
            }
            Kind::MarkComplete => Request::MarkComplete {
                id,
                pass: self.pass()?,
            },
            Kind::Equalise => {
                let range = self.range()?;
                let positions = self.packed(range.count)?;
                Request::Equalise {
                    id,
                    range,
                    positions,
                    content: self.content(range.count)?,
                }
            }
            Kind::SetLast => Request::SetLast {
                id,
                position: Position::unpack(self.header.argument.get()),
            },
            Kind::Read => {
                let torn = self.header.flags.get() & FLAG_TORN != 0;
                let torn = if torn {
                    TornBlocks::Serve
                } else {
                    TornBlocks::Refuse
                };
                Request::Read {
                    id,
                    range: self.range()?,
                    torn,
                }
            }
            Kind::Compare => Request::Compare {
                id,
                extent: self.extent(),
            },
            Kind::Digests => {
                let count = self.header.count.get();
                if count as usize > POSITIONS_MAX {
                    return Err(self.body.malformed("too many extents at once"));
                }
                Request::Digests {
                    id,
                    from: self.extent(),
                    count,
                }
            }
            Kind::ListAbove => Request::ListAbove {
                id,
                floor: Position::unpack(self.header.argument.get()),
                from: Block(self.header.start.get()),
            },
            Kind::Repair => {
                let range = self.range()?;
                if range.count != 1 {
                    return Err(self.body.malformed("repairs go block by block"));
                }
                Request::Repair {
                    id,
                    block: range.start,
                    position: Position::unpack(self.header.argument.get()),
                    content: self.content(1)?,
                }
            }
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    fn extent(&self) -> ExtentIndex {
        // Keeps the first block of the extent within 64 bits.
        ExtentIndex(
            self.header
                .start
                .get()
                .min(u64::MAX / u64::from(EXTENT_BLOCKS) / 2),
        )
    }

    fn refusal(&self) -> Result<ashlar_replication::message::Refusal, WireError> {
        let refusal = refusal_from(self.header.count.get(), self.header.argument.get());
        refusal.ok_or(self.body.malformed("an unknown refusal"))
    }

    fn reply(&mut self) -> Result<Reply<BlockData<'a>>, WireError> {
        let id = self.id();
        Ok(match self.kind {
            Kind::Refused => Reply::Refused {
                id,
                refusal: self.refusal()?,
            },
            Kind::WriteRefused => Reply::WriteRefused {
                sequence: self.sequence(id.0)?,
                refusal: self.refusal()?,
            },
            Kind::Done => Reply::Done { id },
            Kind::Applied => Reply::Applied {
                sequence: self.sequence(id.0)?,
            },
            Kind::Copied => Reply::Copied {
                id,
                changed: self.position_list()?,
            },
            Kind::Data => {
                let count = self.header.count.get();
                if count == 0 || count > EXTENT_BLOCKS {
                    return Err(self
                        .body
                        .malformed("the count of blocks is outside its limits"));
                }
                let positions = self.packed(count)?;
                Reply::Data {
                    id,
                    result: Ok(ReadData {
                        positions,
                        content: self.content(count)?,
                    }),
                }
            }
            Kind::ReadFailed => {
                let header = &self.header;
                let (code, argument) = (header.count.get(), header.argument.get());
                let error = read_error_from(code, header.start.get(), argument);
                let error = error.ok_or(self.body.malformed("an unknown read error"))?;
                Reply::Data {
                    id,
                    result: Err(error),
                }
            }
            Kind::Positions => {
                let more = self.header.flags.get() & FLAG_MORE != 0;
                Reply::Positions {
                    id,
                    positions: self.position_list()?,
                    next: more.then(|| Block(self.header.start.get())),
                    last: Position::unpack(self.header.argument.get()),
                }
            }
            Kind::DigestList => {
                let pairs = self.position_list()?;
                let pair = |p: BlockPosition| (ExtentIndex(p.block.0), p.position.pack());
                Reply::Digests {
                    id,
                    digests: pairs.into_iter().map(pair).collect(),
                }
            }
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    fn position_list(&mut self) -> Result<Vec<BlockPosition>, WireError> {
        let count = self.body.entries_left(16)?;
        if count > POSITIONS_MAX {
            return Err(self.body.malformed("the list is too long"));
        }
        positions(&mut self.body, count)
    }
}

fn positions(body: &mut Reader<'_>, count: usize) -> Result<Vec<BlockPosition>, WireError> {
    (0..count)
        .map(|_| {
            Ok(BlockPosition {
                block: Block(body.u64()?),
                position: body.position()?,
            })
        })
        .collect()
}
