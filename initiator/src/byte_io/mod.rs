//! Byte requests as block requests: split at the borders of extents, partial blocks by
//! read-modify-write that is atomic against other writes. A pure state machine.
//!
//! ```text
//!                 nothing in the way                       written
//! whole blocks ──────────────────────▶ issued ─────────────────────────────▶ done
//!      │                                 ▲
//!      └─▶ waiting ──────────────────────┘ what is in the way has ended
//!             ▲            │
//! part of  ───┤            ▼           read          written
//! a block     └──▶ busy: reading ──▶ writing ──────────────────▶ done
//!                                        ▲ more parts waited │
//!                                        └───────────────────┘ (no second read)
//! ```
//! A block is *busy* while it is read, merged and written. A write that overlaps a busy block, or a
//! write that waits, waits behind it, in the order of arrival; all others go straight through. Reads
//! never wait here: the replication orders them against writes in flight, so a read-modify-write that
//! begins after a write was issued sees it.
//!
//! Allocation is answered conservatively: everything counts as data. A hole may only be reported
//! where zeros are sure to be read, and positions of blocks do not tell a written block from a
//! discarded one. Reads find the holes: they come back as [`Content::Zeros`] without a buffer.

mod locks;
mod modify;
mod read;
mod slab;
mod split;

use std::collections::VecDeque;

use ashlar_engine::{Engine, IoBuf, SharedBytes};
use ashlar_replication::initiator::Ticket as BlockTicket;
use ashlar_replication::message::Content;
use ashlar_replication::values::{BLOCK_BYTES, Block, BlockRange, EXTENT_BYTES};
use ashlar_wire::Payload;

use crate::front_end::{
    Allocation, AllocationPiece, ByteRequest, IoError, REQUEST_BYTES_MAX, ReadPiece, Ticket, Zero,
};
use locks::{Locks, Patch, Waiting};
pub(crate) use slab::Slab;
use split::{Part, split};

const BYTES: u64 = BLOCK_BYTES as u64;
/// Parts of a zero request that are under way at a time: it may cover the whole volume, and its
/// memory must not grow with that.
const ZERO_PARTS_MAX: usize = 64;

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
    kind: Kind,
    error: Option<IoError>,
}

#[derive(Debug)]
enum Kind {
    Read(Vec<ReadPiece>),
    Write,
    /// Bytes `at..end` are not begun.
    Zero {
        at: u64,
        end: u64,
        zero: Zero,
    },
}

/// A block request under way.
#[derive(Debug)]
enum InFlight {
    Write {
        request: u32,
    },
    /// `len` bytes after `head` are wanted of the blocks.
    Read {
        request: u32,
        piece: u32,
        range: BlockRange,
        head: u32,
        len: u32,
    },
    ModifyRead {
        block: Block,
    },
    ModifyWrite {
        block: Block,
    },
}

/// The byte requests of a volume.
#[derive(Debug, Default)]
pub(crate) struct ByteIo {
    size_bytes: u64,
    requests: Slab<Request>,
    in_flight: Slab<InFlight>,
    locks: Locks,
    /// An extent of zeros, while requests that need one are under way.
    zeros: Option<Payload>,
    zeros_users: u32,
    out: VecDeque<BlockRequest>,
    done: VecDeque<(Ticket, Result<Outcome, IoError>)>,
    spare_pieces: Vec<Vec<ReadPiece>>,
}

impl ByteIo {
    /// A volume of so many bytes. Volumes are whole blocks, which attach checks; bytes after the
    /// last whole block do not exist.
    pub(crate) fn new(size_bytes: u64) -> ByteIo {
        ByteIo {
            size_bytes: size_bytes / BYTES * BYTES,
            ..ByteIo::default()
        }
    }

    /// The volume has grown.
    pub(crate) fn grow(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes / BYTES * BYTES;
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
        let Some((offset, len, limit)) = extent_of(&request) else {
            // Every acknowledged write is durable on its quorum already.
            self.done.push_back((ticket, Ok(Outcome::Done)));
            return Ok(());
        };
        let end = offset
            .checked_add(len)
            .filter(|end| len > 0 && *end <= self.size_bytes)
            .ok_or(IoError::OutOfRange)?;
        if len > limit {
            return Err(IoError::TooLong);
        }
        match request {
            ByteRequest::Read { .. } => self.read(ticket, offset, end),
            ByteRequest::Write { data, .. } => {
                self.write(ticket, offset, end, &Source::Bytes(data), buffers);
            }
            ByteRequest::WriteShared { data, .. } => {
                self.write(ticket, offset, end, &Source::Shared(data), buffers);
            }
            ByteRequest::Zero { kind, .. } => self.zero(ticket, offset, end, kind, buffers),
            ByteRequest::Allocation { .. } | ByteRequest::Flush => {
                let allocation = Allocation::Data;
                let pieces = vec![AllocationPiece { len, allocation }];
                self.done
                    .push_back((ticket, Ok(Outcome::Allocation(pieces))));
            }
        }
        Ok(())
    }

    /// Keeps a request, with one part more than it has until [`ByteIo::begun`].
    fn begin(&mut self, ticket: Ticket, kind: Kind) -> u32 {
        self.requests.insert(Request {
            ticket,
            left: 1,
            kind,
            error: None,
        })
    }

    fn begun(&mut self, request: u32) {
        self.part_done(request, Ok(()));
    }

    fn write(
        &mut self,
        ticket: Ticket,
        offset: u64,
        end: u64,
        source: &Source<'_>,
        buffers: &mut impl Buffers,
    ) {
        let request = self.begin(ticket, Kind::Write);
        for part in split(offset, end) {
            self.add_part(request);
            let write = match part {
                Part::Whole(range) => {
                    let from = (range.start.0 * BYTES - offset) as usize;
                    let data = source.blocks(from, range, buffers);
                    Waiting::Whole {
                        request,
                        range,
                        content: Content::Data(Payload::new(data)),
                    }
                }
                Part::Partial { block, from, to } => {
                    let start = (block.0 * BYTES + u64::from(from) - offset) as usize;
                    let bytes = &source.bytes()[start..start + (to - from) as usize];
                    let mut buf = buffers.buffer(BLOCK_BYTES);
                    buf[from as usize..to as usize].copy_from_slice(bytes);
                    let bytes = Some(buf);
                    Waiting::Partial {
                        block,
                        patch: Patch {
                            request,
                            from,
                            to,
                            bytes,
                        },
                    }
                }
            };
            self.order(write);
        }
        self.begun(request);
    }

    fn zero(
        &mut self,
        ticket: Ticket,
        offset: u64,
        end: u64,
        zero: Zero,
        buffers: &mut impl Buffers,
    ) {
        let (mut at, mut end) = (offset, end);
        if zero == Zero::Discard {
            // Edges may keep their content: not worth a read-modify-write.
            (at, end) = (at.next_multiple_of(BYTES), end / BYTES * BYTES);
        }
        if zero == Zero::Provision {
            self.zeros_users += 1;
            self.zeros.get_or_insert_with(|| {
                let mut buf = buffers.buffer(EXTENT_BYTES as usize);
                buf.fill(0);
                Payload::new(buffers.share(buf))
            });
        }
        let request = self.begin(ticket, Kind::Zero { at, end, zero });
        self.zero_more(request);
        self.begun(request);
    }

    /// Issues the next parts of a zero request. False: there are none.
    fn zero_more(&mut self, request: u32) -> bool {
        let Some(Request {
            left,
            kind: Kind::Zero { at, end, zero },
            error: None,
            ..
        }) = self.requests.get_mut(request)
        else {
            return false;
        };
        let (from, until, zero) = (*at, *end, *zero);
        let mut parts = 0;
        for part in split(from, until).take(ZERO_PARTS_MAX) {
            parts += 1;
            *at = part.end_bytes();
        }
        *left += parts;
        for part in split(from, until).take(ZERO_PARTS_MAX) {
            let write = match part {
                Part::Whole(range) => {
                    let content = match &self.zeros {
                        Some(zeros) if zero == Zero::Provision => {
                            Content::Data(zeros.slice(0, range.count as usize))
                        }
                        _ => Content::Zeros,
                    };
                    Waiting::Whole {
                        request,
                        range,
                        content,
                    }
                }
                Part::Partial { block, from, to } => {
                    let bytes = None;
                    Waiting::Partial {
                        block,
                        patch: Patch {
                            request,
                            from,
                            to,
                            bytes,
                        },
                    }
                }
            };
            self.order(write);
        }
        parts > 0
    }

    fn add_part(&mut self, request: u32) {
        if let Some(entry) = self.requests.get_mut(request) {
            entry.left += 1;
        }
    }

    fn issue(&mut self, entry: InFlight) -> BlockTicket {
        BlockTicket(self.in_flight.insert(entry).into())
    }

    /// Starts a write, or lets it wait behind what it overlaps.
    fn order(&mut self, write: Waiting) {
        if let Some(write) = self.locks.admit(write) {
            self.start(write);
        }
    }

    fn start(&mut self, write: Waiting) {
        match write {
            Waiting::Whole {
                request,
                range,
                content,
            } => {
                let ticket = self.issue(InFlight::Write { request });
                self.out.push_back(BlockRequest::Write {
                    ticket,
                    range,
                    content,
                });
            }
            Waiting::Partial { block, patch } => self.start_modify(block, patch),
        }
    }

    /// The replication has finished a write.
    pub(crate) fn write_done(
        &mut self,
        ticket: BlockTicket,
        result: Result<(), IoError>,
        buffers: &mut impl Buffers,
    ) {
        match self.take_in_flight(ticket) {
            Some(InFlight::Write { request }) => self.part_done(request, result),
            Some(InFlight::ModifyWrite { block }) => self.modify_written(block, &result, buffers),
            Some(_) | None => debug_assert!(false, "a write that was not asked for"),
        }
    }

    fn take_in_flight(&mut self, ticket: BlockTicket) -> Option<InFlight> {
        self.in_flight.remove(u32::try_from(ticket.0).ok()?)
    }

    fn part_done(&mut self, request: u32, result: Result<(), IoError>) {
        let Some(entry) = self.requests.get_mut(request) else {
            return;
        };
        if let Err(error) = result {
            entry.error.get_or_insert(error);
        }
        entry.left -= 1;
        if entry.left > 0 || self.zero_more(request) {
            return;
        }
        let Some(entry) = self.requests.remove(request) else {
            return;
        };
        let outcome = match (entry.kind, entry.error) {
            (Kind::Read(pieces), None) => Ok(Outcome::Read(pieces)),
            (Kind::Read(pieces), Some(error)) => {
                self.recycle(Outcome::Read(pieces));
                Err(error)
            }
            (kind, error) => {
                if let Kind::Zero {
                    zero: Zero::Provision,
                    ..
                } = kind
                {
                    self.zeros_users -= 1;
                    if self.zeros_users == 0 {
                        self.zeros = None;
                    }
                }
                error.map_or(Ok(Outcome::Done), Err)
            }
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

/// Offset, length and the largest length; None for a flush, which has none.
fn extent_of(request: &ByteRequest<'_>) -> Option<(u64, u64, u64)> {
    let limit = u64::from(REQUEST_BYTES_MAX);
    match request {
        ByteRequest::Read { offset, len } => Some((*offset, u64::from(*len), limit)),
        ByteRequest::Write { offset, data } => Some((*offset, data.len() as u64, limit)),
        ByteRequest::WriteShared { offset, data } => Some((*offset, data.len() as u64, limit)),
        ByteRequest::Zero { offset, len, .. } | ByteRequest::Allocation { offset, len } => {
            Some((*offset, *len, u64::MAX))
        }
        ByteRequest::Flush => None,
    }
}

/// Where the bytes of a write are.
enum Source<'a> {
    Bytes(&'a [u8]),
    Shared(&'a SharedBytes),
}

impl Source<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::Bytes(bytes) => bytes,
            Source::Shared(bytes) => bytes,
        }
    }

    /// The blocks of `range`, which begin `from` bytes behind the start.
    fn blocks(&self, from: usize, range: BlockRange, buffers: &mut impl Buffers) -> SharedBytes {
        let bytes = from..from + range.count as usize * BLOCK_BYTES;
        match self {
            Source::Shared(shared) => shared.slice(bytes),
            Source::Bytes(data) => {
                let mut buf = buffers.buffer(bytes.len());
                buf.copy_from_slice(&data[bytes]);
                buffers.share(buf)
            }
        }
    }
}

#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod tests;
