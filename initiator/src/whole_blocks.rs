//! Byte requests of whole blocks as block requests, split at the borders of extents.

use std::collections::VecDeque;

use ashlar_engine::{Engine, SharedBytes};
use ashlar_replication::initiator::Ticket as BlockTicket;
use ashlar_replication::message::{Content, ReadData};
use ashlar_replication::values::{BLOCK_BYTES, Block, BlockRange, EXTENT_BLOCKS};
use ashlar_wire::Payload;

use crate::front_end::{
    AllocationPiece, ByteRequest, IoError, REQUEST_BYTES_MAX, ReadPiece, Ticket,
};

pub(crate) enum BlockRequest {
    Write {
        ticket: BlockTicket,
        range: BlockRange,
        content: Content<Payload>,
    },
    Read {
        ticket: BlockTicket,
        range: BlockRange,
    },
}

pub(crate) enum Outcome {
    Read(Vec<ReadPiece>),
    Done,
    #[allow(dead_code)]
    Allocation(Vec<AllocationPiece>),
}

struct Request {
    ticket: Ticket,
    left: u32,
    pieces: Vec<ReadPiece>,
    read: bool,
    error: Option<IoError>,
}

#[derive(Default)]
pub(crate) struct ByteIo {
    size: u64,
    requests: Vec<Option<Request>>,
    free: Vec<u32>,
    out: VecDeque<BlockRequest>,
    done: VecDeque<(Ticket, Result<Outcome, IoError>)>,
    spare: Vec<Vec<ReadPiece>>,
}

impl ByteIo {
    pub(crate) fn new(size: u64) -> ByteIo {
        ByteIo {
            size,
            ..ByteIo::default()
        }
    }

    pub(crate) fn grow(&mut self, size: u64) {
        self.size = size;
    }

    pub(crate) fn submit(
        &mut self,
        ticket: Ticket,
        request: ByteRequest<'_>,
        engine: &mut Engine,
    ) -> Result<(), IoError> {
        let (offset, len) = match request {
            ByteRequest::Read { offset, len } => (offset, u64::from(len)),
            ByteRequest::Write { offset, data } => (offset, data.len() as u64),
            ByteRequest::Zero { offset, len, .. } => (offset, len),
            ByteRequest::Flush => {
                self.done.push_back((ticket, Ok(Outcome::Done)));
                return Ok(());
            }
            ByteRequest::Allocation { .. } => return Err(IoError::Over("not yet")),
        };
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= self.size && len > 0);
        let end = end.ok_or(IoError::OutOfRange)?;
        let block = BLOCK_BYTES as u64;
        if offset % block != 0 || len % block != 0 {
            return Err(IoError::Over("not whole blocks"));
        }
        let zero = matches!(request, ByteRequest::Zero { .. });
        if len > REQUEST_BYTES_MAX.into() && !zero {
            return Err(IoError::TooLong);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() as u32 - 1
        });
        let read = matches!(request, ByteRequest::Read { .. });
        let (mut start, mut left) = (offset / block, 0u32);
        while start < end / block {
            let within = Block(start).within_extent();
            let count = u64::from(EXTENT_BLOCKS - within).min(end / block - start) as u32;
            let range = BlockRange {
                start: Block(start),
                count,
            };
            let block_ticket = BlockTicket(u64::from(index) << 32 | u64::from(left));
            self.out.push_back(match request {
                ByteRequest::Write { data, .. } => {
                    let from = (start * block - offset) as usize;
                    let bytes = count as usize * BLOCK_BYTES;
                    let mut buf = engine.buffer(bytes);
                    buf.copy_from_slice(&data[from..from + bytes]);
                    let content = Content::Data(Payload::new(engine.share(buf)));
                    BlockRequest::Write {
                        ticket: block_ticket,
                        range,
                        content,
                    }
                }
                ByteRequest::Zero { .. } => BlockRequest::Write {
                    ticket: block_ticket,
                    range,
                    content: Content::Zeros,
                },
                _ => BlockRequest::Read {
                    ticket: block_ticket,
                    range,
                },
            });
            left += 1;
            start += u64::from(count);
        }
        let mut pieces = self.spare.pop().unwrap_or_default();
        if read {
            pieces.resize(
                left as usize,
                ReadPiece {
                    len: 0,
                    content: Content::Zeros,
                },
            );
        }
        self.requests[index as usize] = Some(Request {
            ticket,
            left,
            pieces,
            read,
            error: None,
        });
        Ok(())
    }

    pub(crate) fn write_done(
        &mut self,
        ticket: BlockTicket,
        result: Result<(), IoError>,
        _: &mut Engine,
    ) {
        self.part_done(ticket, result);
    }

    pub(crate) fn read_done(
        &mut self,
        ticket: BlockTicket,
        result: Result<ReadData<Payload>, IoError>,
        _: &mut Engine,
    ) {
        let Some(Some(request)) = self.requests.get_mut((ticket.0 >> 32) as usize) else {
            return;
        };
        let result = result.map(|data| {
            let len = (data.positions.len() * BLOCK_BYTES) as u32;
            let content = match data.content {
                Content::Data(payload) => Content::Data(SharedBytes::clone(payload.data())),
                Content::Zeros => Content::Zeros,
            };
            request.pieces[ticket.0 as u32 as usize] = ReadPiece { len, content };
        });
        self.part_done(ticket, result);
    }

    fn part_done(&mut self, ticket: BlockTicket, result: Result<(), IoError>) {
        let index = (ticket.0 >> 32) as usize;
        let Some(Some(request)) = self.requests.get_mut(index) else {
            return;
        };
        request.left -= 1;
        if let Err(error) = result {
            request.error.get_or_insert(error);
        }
        if request.left > 0 {
            return;
        }
        let Some(request) = self.requests[index].take() else {
            return;
        };
        self.free.push(index as u32);
        let outcome = match (request.error, request.read) {
            (Some(error), _) => Err(error),
            (None, true) => Ok(Outcome::Read(request.pieces)),
            (None, false) => Ok(Outcome::Done),
        };
        self.done.push_back((request.ticket, outcome));
    }

    pub(crate) fn next_block_request(&mut self) -> Option<BlockRequest> {
        self.out.pop_front()
    }

    pub(crate) fn next_completion(&mut self) -> Option<(Ticket, Result<Outcome, IoError>)> {
        self.done.pop_front()
    }

    pub(crate) fn recycle(&mut self, outcome: Outcome) {
        if let Outcome::Read(mut pieces) = outcome {
            pieces.clear();
            self.spare.push(pieces);
        }
    }
}
