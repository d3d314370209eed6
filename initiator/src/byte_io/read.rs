//! Reads: their parts, their answers, and what is read again in smaller pieces.

use ashlar_replication::initiator::Ticket as BlockTicket;
use ashlar_replication::message::{Content, ReadData};
use ashlar_replication::values::{BLOCK_BYTES, BlockRange};
use ashlar_wire::Payload;

use super::{BlockRequest, Buffers, ByteIo, InFlight, Kind, Request, split};
use crate::front_end::{IoError, ReadPiece, Ticket};

impl ByteIo {
    pub(super) fn read(&mut self, ticket: Ticket, offset: u64, end: u64) {
        let mut pieces = self.spare_pieces.pop().unwrap_or_default();
        pieces.extend(split::reads(offset, end).map(|(_, _, len)| ReadPiece {
            len,
            content: Content::Zeros,
        }));
        let request = self.begin(ticket, Kind::Read(pieces));
        for (piece, (range, head, len)) in split::reads(offset, end).enumerate() {
            self.add_part(request);
            let ticket = self.issue(InFlight::Read {
                request,
                piece: piece as u32,
                range,
                head,
                len,
            });
            self.out.push_back(BlockRequest::Read { ticket, range });
        }
        self.begun(request);
    }

    /// The replication has finished a read.
    pub(crate) fn read_done(
        &mut self,
        ticket: BlockTicket,
        result: Result<ReadData<Payload>, IoError>,
        buffers: &mut impl Buffers,
    ) {
        match self.take_in_flight(ticket) {
            Some(InFlight::Read {
                request,
                piece,
                range,
                head,
                len,
            }) => {
                if range.count > 1 && matches!(result, Err(IoError::Media { .. } | IoError::Device))
                {
                    return self.read_halves(request, piece, range, head, len);
                }
                let result = result.and_then(|data| checked(data.content, range.count));
                let result = result.map(|content| {
                    if let Content::Data(payload) = content
                        && let Some(Request {
                            kind: Kind::Read(pieces),
                            ..
                        }) = self.requests.get_mut(request)
                    {
                        let range = head as usize..(head + len) as usize;
                        pieces[piece as usize].content = Content::Data(payload.data().slice(range));
                    }
                });
                self.part_done(request, result);
            }
            Some(InFlight::ModifyRead { block }) => {
                let result = result.and_then(|data| checked(data.content, 1));
                self.modify_read(block, result, buffers);
            }
            Some(_) | None => debug_assert!(false, "a read that was not asked for"),
        }
    }

    /// No replica has good copies of all the blocks, but each block may have one somewhere: the halves are
    /// read on their own, and theirs, down to the blocks that are lost.
    fn read_halves(&mut self, request: u32, piece: u32, range: BlockRange, head: u32, len: u32) {
        let count = range.count / 2;
        let front_len = count * BLOCK_BYTES as u32 - head;
        if let Some(Request {
            kind: Kind::Read(pieces),
            ..
        }) = self.requests.get_mut(request)
        {
            let half = |len| ReadPiece {
                len,
                content: Content::Zeros,
            };
            pieces[piece as usize] = half(front_len);
            pieces.insert(piece as usize + 1, half(len - front_len));
        }
        for other in self.in_flight.iter_mut() {
            if let InFlight::Read {
                request: of,
                piece: at,
                ..
            } = other
                && *of == request
                && *at > piece
            {
                *at += 1;
            }
        }
        // The other half takes the place of the part that ended.
        self.add_part(request);
        let front = BlockRange { count, ..range };
        let back = BlockRange {
            start: front.end(),
            count: range.count - count,
        };
        let halves = [
            (piece, front, head, front_len),
            (piece + 1, back, 0, len - front_len),
        ];
        for (piece, range, head, len) in halves {
            let ticket = self.issue(InFlight::Read {
                request,
                piece,
                range,
                head,
                len,
            });
            self.out.push_back(BlockRequest::Read { ticket, range });
        }
    }
}

/// An answer with another number of blocks than asked for is one of a device that failed.
fn checked(content: Content<Payload>, count: u32) -> Result<Content<Payload>, IoError> {
    match &content {
        Content::Data(payload) if payload.blocks() != count as usize => Err(IoError::Device),
        _ => Ok(content),
    }
}
