//! Byte requests as block requests: split at the borders of extents, partial blocks by
//! read-modify-write that is atomic against other writes. A pure state machine.
//!
//! A partial block is read, merged and written while its block is *busy*. A write that overlaps a busy
//! block, or a write that waits, waits behind it, in the order of arrival; all others go straight
//! through. Reads never wait here: the replication orders them against writes in flight, so a
//! read-modify-write that begins after a write was issued sees it.

mod split;

use std::collections::VecDeque;

use ashlar_engine::{Engine, IoBuf, SharedBytes};
use ashlar_replication::initiator::Ticket as BlockTicket;
use ashlar_replication::message::{Content, ReadData};
use ashlar_replication::values::{BLOCK_BYTES, Block, BlockRange};
use ashlar_wire::Payload;

use crate::front_end::{
    Allocation, AllocationPiece, ByteRequest, IoError, REQUEST_BYTES_MAX, ReadPiece, Ticket,
};
use split::{Part, split};

/// What the replication is to do.
#[derive(Debug)]
pub(crate) enum BlockRequest {
    /// Within one extent.
    Write {
        ticket: BlockTicket,
        range: BlockRange,
        content: Content<Payload>,
    },
    /// Within one extent.
    Read {
        ticket: BlockTicket,
        range: BlockRange,
    },
}

/// What a byte request came to.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The bytes, in order.
    Read(Vec<ReadPiece>),
    /// A write, a zero request, a flush.
    Done,
    /// What is allocated.
    Allocation(Vec<AllocationPiece>),
}

/// Where buffers come from; the engine, except in tests.
pub(crate) trait Buffers {
    fn buffer(&mut self, len: usize) -> IoBuf;
    fn share(&mut self, buf: IoBuf) -> SharedBytes;
    fn recycle(&mut self, buf: IoBuf);
}

impl Buffers for Engine {
    fn buffer(&mut self, len: usize) -> IoBuf {
        Engine::buffer(self, len)
    }
    fn share(&mut self, buf: IoBuf) -> SharedBytes {
        Engine::share(self, buf)
    }
    fn recycle(&mut self, buf: IoBuf) {
        Engine::recycle(self, buf);
    }
}

/// A byte request under way.
#[derive(Debug)]
struct Request {
    ticket: Ticket,
    /// Parts that are not done.
    left: u32,
    pieces: Vec<ReadPiece>,
    is_read: bool,
    error: Option<IoError>,
}

/// A block request under way.
#[derive(Debug)]
enum InFlight {
    Write {
        request: u32,
    },
    Read {
        request: u32,
        piece: u32,
        head: u32,
        len: u32,
    },
    ModifyRead {
        request: u32,
        patch: Patch,
    },
    ModifyWrite {
        request: u32,
        block: Block,
    },
}

/// New bytes of a part of a block.
#[derive(Debug)]
struct Patch {
    block: Block,
    from: u32,
    to: u32,
    /// None: zeros.
    bytes: Option<IoBuf>,
}

/// A write that waits for a busy block.
#[derive(Debug)]
enum Waiting {
    Whole {
        request: u32,
        range: BlockRange,
        content: Content<Payload>,
    },
    Partial {
        request: u32,
        patch: Patch,
    },
}

impl Waiting {
    fn range(&self) -> BlockRange {
        match self {
            Waiting::Whole { range, .. } => *range,
            Waiting::Partial { patch, .. } => BlockRange {
                start: patch.block,
                count: 1,
            },
        }
    }
}

/// A table of reused places.
#[derive(Debug)]
struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab {
            entries: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    fn insert(&mut self, entry: T) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[index as usize] = Some(entry);
        index
    }

    fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    fn remove(&mut self, index: u32) -> Option<T> {
        let entry = self.entries.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(entry)
    }
}

/// The byte requests of a volume.
#[derive(Debug, Default)]
pub(crate) struct ByteIo {
    size_bytes: u64,
    requests: Slab<Request>,
    in_flight: Slab<InFlight>,
    busy: Vec<Block>,
    waiting: VecDeque<Waiting>,
    out: VecDeque<BlockRequest>,
    done: VecDeque<(Ticket, Result<Outcome, IoError>)>,
    spare_pieces: Vec<Vec<ReadPiece>>,
}

impl ByteIo {
    /// A volume of so many bytes, a multiple of the block size.
    pub(crate) fn new(size_bytes: u64) -> ByteIo {
        ByteIo {
            size_bytes,
            ..ByteIo::default()
        }
    }

    /// The volume has grown.
    pub(crate) fn grow(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
    }

    /// Takes a request.
    ///
    /// # Errors
    /// When it lies outside the volume or is too long; nothing has begun then.
    pub(crate) fn submit(
        &mut self,
        ticket: Ticket,
        request: ByteRequest<'_>,
        buffers: &mut impl Buffers,
    ) -> Result<(), IoError> {
        let (offset, len) = match request {
            ByteRequest::Read { offset, len } => (offset, u64::from(len)),
            ByteRequest::Write { offset, data } => (offset, data.len() as u64),
            ByteRequest::Zero { offset, len, .. } => (offset, len),
            ByteRequest::Allocation { offset, len } => (offset, len),
            ByteRequest::Flush => {
                // Every acknowledged write is durable on its quorum already.
                self.done.push_back((ticket, Ok(Outcome::Done)));
                return Ok(());
            }
        };
        let end = offset
            .checked_add(len)
            .filter(|end| len > 0 && *end <= self.size_bytes);
        let end = end.ok_or(IoError::OutOfRange)?;
        let moves_data = matches!(
            request,
            ByteRequest::Read { .. } | ByteRequest::Write { .. }
        );
        if moves_data && len > u64::from(REQUEST_BYTES_MAX) {
            return Err(IoError::TooLong);
        }
        if let ByteRequest::Allocation { .. } = request {
            // A hole may only be reported where zeros are sure to be read. The members' positions do not
            // tell holes from data, so everything counts as data.
            let piece = AllocationPiece {
                len,
                allocation: Allocation::Data,
            };
            self.done
                .push_back((ticket, Ok(Outcome::Allocation(vec![piece]))));
            return Ok(());
        }
        let is_read = matches!(request, ByteRequest::Read { .. });
        let pieces = if is_read {
            self.spare_pieces.pop().unwrap_or_default()
        } else {
            Vec::new()
        };
        let entry = Request {
            ticket,
            left: 1,
            pieces,
            is_read,
            error: None,
        };
        let index = self.requests.insert(entry);
        match request {
            ByteRequest::Read { .. } => self.read(index, offset, end),
            ByteRequest::Write { data, .. } => self.write(index, offset, end, Some(data), buffers),
            _ => self.write(index, offset, end, None, buffers),
        }
        // The one that keeps the request from being finished while its parts are made.
        self.part_done(index, Ok(()));
        Ok(())
    }

    fn add_part(&mut self, request: u32) {
        if let Some(entry) = self.requests.get_mut(request) {
            entry.left += 1;
        }
    }

    fn read(&mut self, request: u32, offset: u64, end: u64) {
        for (piece, (range, head, len)) in split::reads(offset, end).enumerate() {
            self.add_part(request);
            if let Some(entry) = self.requests.get_mut(request) {
                entry.pieces.push(ReadPiece {
                    len,
                    content: Content::Zeros,
                });
            }
            let read = InFlight::Read {
                request,
                piece: piece as u32,
                head,
                len,
            };
            let ticket = BlockTicket(self.in_flight.insert(read).into());
            self.out.push_back(BlockRequest::Read { ticket, range });
        }
    }

    /// `data` of None writes zeros.
    fn write(
        &mut self,
        request: u32,
        offset: u64,
        end: u64,
        data: Option<&[u8]>,
        buffers: &mut impl Buffers,
    ) {
        for part in split(offset, end) {
            self.add_part(request);
            match part {
                Part::Whole(range) => {
                    let content = match data {
                        None => Content::Zeros,
                        Some(data) => {
                            let from = (range.start.0 * BLOCK_BYTES as u64 - offset) as usize;
                            let len = range.count as usize * BLOCK_BYTES;
                            let mut buf = buffers.buffer(len);
                            buf.copy_from_slice(&data[from..from + len]);
                            Content::Data(Payload::new(buffers.share(buf)))
                        }
                    };
                    self.order(Waiting::Whole {
                        request,
                        range,
                        content,
                    });
                }
                Part::Partial { block, from, to } => {
                    let bytes = data.map(|data| {
                        let start = block.0 * BLOCK_BYTES as u64 + u64::from(from) - offset;
                        let mut buf = buffers.buffer(BLOCK_BYTES);
                        let len = (to - from) as usize;
                        buf[from as usize..to as usize]
                            .copy_from_slice(&data[start as usize..start as usize + len]);
                        buf
                    });
                    let patch = Patch {
                        block,
                        from,
                        to,
                        bytes,
                    };
                    self.order(Waiting::Partial { request, patch });
                }
            }
        }
    }

    /// Starts a write, or lets it wait behind what it overlaps.
    fn order(&mut self, write: Waiting) {
        let range = write.range();
        let blocked = self.is_busy(range) || self.waiting.iter().any(|w| w.range().overlaps(range));
        if blocked {
            self.waiting.push_back(write);
        } else {
            self.start(write);
        }
    }

    fn is_busy(&self, range: BlockRange) -> bool {
        self.busy.iter().any(|block| {
            range.overlaps(BlockRange {
                start: *block,
                count: 1,
            })
        })
    }

    fn start(&mut self, write: Waiting) {
        match write {
            Waiting::Whole {
                request,
                range,
                content,
            } => {
                let ticket = self.in_flight.insert(InFlight::Write { request });
                let ticket = BlockTicket(ticket.into());
                self.out.push_back(BlockRequest::Write {
                    ticket,
                    range,
                    content,
                });
            }
            Waiting::Partial { request, patch } => {
                let block = patch.block;
                self.busy.push(block);
                let ticket = self
                    .in_flight
                    .insert(InFlight::ModifyRead { request, patch });
                let range = BlockRange {
                    start: block,
                    count: 1,
                };
                let ticket = BlockTicket(ticket.into());
                self.out.push_back(BlockRequest::Read { ticket, range });
            }
        }
    }

    /// A block is no longer busy: what waited for it goes on, in order.
    fn release(&mut self, block: Block) {
        if let Some(at) = self.busy.iter().position(|b| *b == block) {
            self.busy.swap_remove(at);
        }
        let mut index = 0;
        while index < self.waiting.len() {
            let range = self.waiting[index].range();
            let earlier = self
                .waiting
                .iter()
                .take(index)
                .any(|w| w.range().overlaps(range));
            if earlier || self.is_busy(range) {
                index += 1;
            } else if let Some(write) = self.waiting.remove(index) {
                self.start(write);
            }
        }
    }

    /// The replication has finished a write.
    pub(crate) fn write_done(
        &mut self,
        ticket: BlockTicket,
        result: Result<(), IoError>,
        _: &mut impl Buffers,
    ) {
        let Some(index) = index_of(ticket) else {
            return;
        };
        match self.in_flight.remove(index) {
            Some(InFlight::Write { request }) => self.part_done(request, result),
            Some(InFlight::ModifyWrite { request, block }) => {
                self.release(block);
                self.part_done(request, result);
            }
            Some(_) | None => debug_assert!(false, "a write that was not asked for"),
        }
    }

    /// The replication has finished a read.
    pub(crate) fn read_done(
        &mut self,
        ticket: BlockTicket,
        result: Result<ReadData<Payload>, IoError>,
        buffers: &mut impl Buffers,
    ) {
        let Some(index) = index_of(ticket) else {
            return;
        };
        match self.in_flight.remove(index) {
            Some(InFlight::Read {
                request,
                piece,
                head,
                len,
            }) => {
                let result = result.map(|data| {
                    let Some(entry) = self.requests.get_mut(request) else {
                        return;
                    };
                    if let Content::Data(payload) = data.content {
                        let range = head as usize..(head + len) as usize;
                        let content = Content::Data(payload.data().slice(range));
                        entry.pieces[piece as usize] = ReadPiece { len, content };
                    }
                });
                self.part_done(request, result);
            }
            Some(InFlight::ModifyRead { request, patch }) => match result {
                Ok(data) => self.modify(request, patch, data.content, buffers),
                Err(error) => {
                    self.release(patch.block);
                    if let Some(bytes) = patch.bytes {
                        buffers.recycle(bytes);
                    }
                    self.part_done(request, Err(error));
                }
            },
            Some(_) | None => debug_assert!(false, "a read that was not asked for"),
        }
    }

    /// Merges the new bytes into what the block held, and writes it.
    fn modify(
        &mut self,
        request: u32,
        patch: Patch,
        content: Content<Payload>,
        buffers: &mut impl Buffers,
    ) {
        let Patch {
            block,
            from,
            to,
            bytes,
        } = patch;
        let (from, to) = (from as usize, to as usize);
        let mut merged = bytes.unwrap_or_else(|| {
            let mut buf = buffers.buffer(BLOCK_BYTES);
            buf[from..to].fill(0);
            buf
        });
        match &content {
            Content::Data(payload) => {
                merged[..from].copy_from_slice(&payload.data()[..from]);
                merged[to..].copy_from_slice(&payload.data()[to..BLOCK_BYTES]);
            }
            Content::Zeros => {
                merged[..from].fill(0);
                merged[to..].fill(0);
            }
        }
        let ticket = self
            .in_flight
            .insert(InFlight::ModifyWrite { request, block });
        let content = Content::Data(Payload::new(buffers.share(merged)));
        let range = BlockRange {
            start: block,
            count: 1,
        };
        let ticket = BlockTicket(ticket.into());
        self.out.push_back(BlockRequest::Write {
            ticket,
            range,
            content,
        });
    }

    fn part_done(&mut self, request: u32, result: Result<(), IoError>) {
        let Some(entry) = self.requests.get_mut(request) else {
            return;
        };
        if let Err(error) = result {
            entry.error.get_or_insert(error);
        }
        entry.left -= 1;
        if entry.left > 0 {
            return;
        }
        let Some(entry) = self.requests.remove(request) else {
            return;
        };
        let outcome = match entry.error {
            Some(error) => {
                self.recycle(Outcome::Read(entry.pieces));
                Err(error)
            }
            None if entry.is_read => Ok(Outcome::Read(entry.pieces)),
            None => Ok(Outcome::Done),
        };
        self.done.push_back((entry.ticket, outcome));
    }

    /// What the replication is to do next.
    pub(crate) fn next_block_request(&mut self) -> Option<BlockRequest> {
        self.out.pop_front()
    }

    /// The next byte request that is done.
    pub(crate) fn next_completion(&mut self) -> Option<(Ticket, Result<Outcome, IoError>)> {
        self.done.pop_front()
    }

    /// Takes an outcome back, to use its memory again.
    pub(crate) fn recycle(&mut self, outcome: Outcome) {
        /// As many as requests are commonly under way.
        const SPARE_MAX: usize = 64;
        if let Outcome::Read(mut pieces) = outcome
            && self.spare_pieces.len() < SPARE_MAX
            && pieces.capacity() > 0
        {
            pieces.clear();
            self.spare_pieces.push(pieces);
        }
    }
}

fn index_of(ticket: BlockTicket) -> Option<u32> {
    u32::try_from(ticket.0).ok()
}

#[cfg(test)]
mod tests;
