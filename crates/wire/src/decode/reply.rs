//! Answers to requests.

use ashlar_replication::message::{BlockPosition, Content, ReadData, Reply, RequestId};
use ashlar_replication::values::{EXTENT_BLOCKS, ExtentIndex, Position};
use zerocopy::FromBytes as _;
use zerocopy::little_endian::U64;

use super::{Decoder, Opened, open};
use crate::error::WireError;
use crate::frame::{BlockData, POSITIONS_MAX};
use crate::header::{FLAG_MORE, Header, Kind, Limits};
use crate::refusal::read_error_from;

/// Positions where they were received.
#[derive(Clone, Copy, Debug)]
pub struct PackedPositions<'a>(&'a [U64]);

impl<'a> PackedPositions<'a> {
    /// How many.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// One of them; None beyond the last.
    pub fn get(self, index: usize) -> Option<Position> {
        self.0.get(index).map(|word| Position::unpack(word.get()))
    }

    /// All of them in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = Position> + 'a {
        self.0.iter().map(|word| Position::unpack(word.get()))
    }
}

/// [`Kind::Data`] where it was received, not yet checked against its checksums.
#[derive(Clone, Copy, Debug)]
pub struct DataReply<'a> {
    /// The attachment.
    pub handle: u32,
    /// Of the request.
    pub id: RequestId,
    /// One per block.
    pub positions: PackedPositions<'a>,
    /// None: zeros.
    pub blocks: Option<BlockData<'a>>,
}

/// Reads one frame if it is a whole, well-formed [`Kind::Data`], without an allocation. Returns it with
/// the bytes to consume; None: [`super::decode`] says what is there instead.
///
/// # Errors
/// When framing is lost: the connection has to be closed.
pub fn decode_data(input: &[u8]) -> Result<Option<(DataReply<'_>, usize)>, WireError> {
    // A glance at the kind keeps other frames from being checked twice.
    let kind = Header::peek_kind(input);
    if kind != Some(Kind::Data) {
        return Ok(None);
    }
    let Opened::Whole { mut decoder, bytes } = open(input, &Limits::ALL)? else {
        return Ok(None);
    };
    let reply = decoder.check_header().and_then(|()| decoder.data());
    let whole = reply.and_then(|reply| decoder.end().map(|()| (reply, bytes)));
    Ok(whole.ok())
}

impl<'a> Decoder<'a> {
    /// The kinds from 64 on.
    pub(super) fn reply(&mut self) -> Result<Reply<BlockData<'a>>, WireError> {
        let id = self.id();
        Ok(match self.kind {
            Kind::Applied => Reply::Applied {
                sequence: self.sequence(id.0)?,
            },
            Kind::Data => {
                let reply = self.data()?;
                let content = reply.blocks.map_or(Content::Zeros, Content::Data);
                let positions = reply.positions.iter().collect();
                Reply::Data {
                    id,
                    result: Ok(ReadData { positions, content }),
                }
            }
            Kind::Done => Reply::Done { id },
            Kind::Refused => Reply::Refused {
                id,
                refusal: self.refusal()?,
            },
            Kind::WriteRefused => Reply::WriteRefused {
                sequence: self.sequence(id.0)?,
                refusal: self.refusal()?,
            },
            Kind::Copied => Reply::Copied {
                id,
                changed: self.position_list()?,
            },
            Kind::ReadFailed => {
                let block = self.body.block(self.header.start.get())?;
                let (code, argument) = (self.header.count.get(), self.header.argument.get());
                let error = read_error_from(code, block, argument);
                let error = error.ok_or(self.body.malformed("an unknown read error"))?;
                Reply::Data {
                    id,
                    result: Err(error),
                }
            }
            Kind::Positions => {
                let next = match self.header.flags.get() & FLAG_MORE {
                    0 => None,
                    _ => Some(self.body.block(self.header.start.get())?),
                };
                Reply::Positions {
                    id,
                    positions: self.position_list()?,
                    next,
                    last: Position::unpack(self.header.argument.get()),
                }
            }
            Kind::DigestList => Reply::Digests {
                id,
                digests: self.digests()?,
            },
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    fn data(&mut self) -> Result<DataReply<'a>, WireError> {
        let count = self.header.count.get();
        if count == 0 || count > EXTENT_BLOCKS {
            let what = "the count of blocks is outside its limits";
            return Err(self.body.malformed(what));
        }
        let positions = self.packed(count)?;
        let blocks = match self.content(count)? {
            Content::Data(blocks) => Some(blocks),
            Content::Zeros => None,
        };
        Ok(DataReply {
            handle: self.header.handle.get(),
            id: self.id(),
            positions,
            blocks,
        })
    }

    /// `count` packed positions. The caller has bounded `count`.
    pub(super) fn packed(&mut self, count: u32) -> Result<PackedPositions<'a>, WireError> {
        let words = <[U64]>::ref_from_bytes(self.body.bytes(count as usize * 8)?);
        let words = words.map_err(|_| self.body.malformed("the positions do not fit"))?;
        Ok(PackedPositions(words))
    }

    fn entries(&self) -> Result<usize, WireError> {
        let count = self.body.entries_left(16)?;
        if count > POSITIONS_MAX {
            return Err(self.body.malformed("the list is too long"));
        }
        Ok(count)
    }

    fn position_list(&mut self) -> Result<Vec<BlockPosition>, WireError> {
        let count = self.entries()?;
        self.body.positions(count)
    }

    fn digests(&mut self) -> Result<Vec<(ExtentIndex, u64)>, WireError> {
        let count = self.entries()?;
        let mut digests = Vec::with_capacity(count);
        for _ in 0..count {
            let index = self.body.u64()?;
            digests.push((self.body.extent(index)?, self.body.u64()?));
        }
        Ok(digests)
    }
}
