//! Random overlapping requests, finished in random order, against plain bytes.

use super::*;
use crate::front_end::Zero;
use ashlar_replication::message::ReadData;
use ashlar_replication::values::Position;

pub(super) struct Heap;

impl Buffers for Heap {
    fn buffer(&mut self, len: usize) -> IoBuf {
        let mut buf = IoBuf::new(len);
        // What a reused buffer may hold.
        buf.fill(0xee);
        buf
    }
    fn share(&mut self, buf: IoBuf) -> SharedBytes {
        SharedBytes::new(buf)
    }
    fn recycle(&mut self, _: IoBuf) {}
}

const BLOCKS: u64 = 266;
pub(super) const SIZE: u64 = BLOCKS * BLOCK_BYTES as u64;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A replicated volume as byte_io sees it: writes are issued in order; a read waits for writes in
/// flight that it overlaps, and sees the blocks as they are when it is answered.
struct Volume {
    blocks: Vec<Vec<u8>>,
    writes: Vec<(BlockTicket, BlockRange, Content<Payload>)>,
    reads: Vec<(BlockTicket, BlockRange)>,
}

impl Volume {
    fn take(&mut self, io: &mut ByteIo) {
        while let Some(request) = io.next_block_request() {
            match request {
                BlockRequest::Write {
                    ticket,
                    range,
                    content,
                } => {
                    assert!(range.is_within_one_extent() && range.end().0 <= BLOCKS);
                    self.writes.push((ticket, range, content));
                }
                BlockRequest::Read { ticket, range } => {
                    assert!(range.is_within_one_extent() && range.end().0 <= BLOCKS);
                    self.reads.push((ticket, range));
                }
            }
        }
    }

    /// Writes finish in the order of the stream, reads in any.
    fn finish_one(&mut self, io: &mut ByteIo, random: &mut Random) -> bool {
        let free = |r: &BlockRange| !self.writes.iter().any(|(_, w, _)| w.overlaps(*r));
        let ready: Vec<_> = (0..self.reads.len())
            .filter(|n| free(&self.reads[*n].1))
            .collect();
        if !ready.is_empty() && (self.writes.is_empty() || random.below(2) == 0) {
            let chosen = ready[random.below(ready.len() as u64) as usize];
            let (ticket, range) = self.reads.swap_remove(chosen);
            let bytes: Vec<u8> = range
                .blocks()
                .flat_map(|b| self.blocks[b.0 as usize].clone())
                .collect();
            let zeros = bytes.iter().all(|b| *b == 0);
            let data = Payload::new(SharedBytes::copy_of(&bytes));
            let content = if zeros {
                Content::Zeros
            } else {
                Content::Data(data)
            };
            let positions = vec![Position::ZERO; range.count as usize];
            io.read_done(ticket, Ok(ReadData { positions, content }), &mut Heap);
            return true;
        }
        if self.writes.is_empty() {
            return false;
        }
        let (ticket, range, content) = self.writes.remove(0);
        for (n, block) in range.blocks().enumerate() {
            let to = &mut self.blocks[block.0 as usize];
            match &content {
                Content::Zeros => to.fill(0),
                Content::Data(p) => to.copy_from_slice(&p.data()[n * BLOCK_BYTES..][..BLOCK_BYTES]),
            }
        }
        io.write_done(ticket, Ok(()), &mut Heap);
        true
    }
}

/// Every value that a byte had, in order: which request wrote it, and whether that was acknowledged.
struct History {
    writes: Vec<Vec<u16>>,
    acknowledged: Vec<bool>,
}

/// A read under way: for each byte the index of the oldest write that it may still see.
struct Reading {
    ticket: Ticket,
    offset: usize,
    oldest: Vec<usize>,
}

impl History {
    fn value(request: u16, zeros: &[bool]) -> u8 {
        if zeros[usize::from(request)] {
            0
        } else {
            (request % 250) as u8 + 1
        }
    }

    fn begin_read(&self, ticket: Ticket, range: core::ops::Range<usize>) -> Reading {
        let newest = |byte: &Vec<u16>| {
            let done = byte
                .iter()
                .rposition(|w| self.acknowledged[usize::from(*w)]);
            done.map_or(0, |at| at + 1)
        };
        Reading {
            ticket,
            offset: range.start,
            oldest: self.writes[range].iter().map(newest).collect(),
        }
    }

    /// A byte is what the newest write that was acknowledged before the read made it, or newer.
    fn check_read(&self, read: &Reading, bytes: &[u8], zeros: &[bool], seed: u64) {
        assert_eq!(bytes.len(), read.oldest.len(), "seed {seed}");
        for (n, (byte, oldest)) in bytes.iter().zip(&read.oldest).enumerate() {
            let all = &self.writes[read.offset + n];
            let from = oldest.saturating_sub(1);
            let plausible = all[from..]
                .iter()
                .any(|w| History::value(*w, zeros) == *byte)
                || (*oldest == 0 && *byte == 0);
            assert!(
                plausible,
                "seed {seed}: byte {} reads as {byte}",
                read.offset + n
            );
        }
    }
}

fn bytes_of(pieces: &[ReadPiece]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        match &piece.content {
            Content::Data(data) => bytes.extend_from_slice(data),
            Content::Zeros => bytes.resize(bytes.len() + piece.len as usize, 0),
        }
        if let Content::Data(data) = &piece.content {
            assert_eq!(data.len(), piece.len as usize);
        }
    }
    bytes
}

/// A random request: its bytes, and what kind it is.
fn random_request(random: &mut Random) -> (u64, u64, u64) {
    // Requests crowd around a border of an extent and a few blocks.
    let base = [250 * 4096, 255 * 4096 + 4000, 100, 256 * 4096][random.below(4) as usize];
    let offset = base + random.below(3 * 4096);
    let len = match random.below(4) {
        0 => 1 + random.below(16),
        1 => 512,
        2 => 4096,
        _ => 1 + random.below(20_000),
    };
    (offset, len, random.below(8))
}

struct Run {
    seed: u64,
    io: ByteIo,
    volume: Volume,
    history: History,
    zeros: Vec<bool>,
    reading: Vec<Reading>,
    under_way: usize,
}

impl Run {
    fn new(seed: u64) -> Run {
        Run {
            seed,
            io: ByteIo::new(SIZE),
            volume: Volume {
                blocks: vec![vec![0; BLOCK_BYTES]; BLOCKS as usize],
                writes: Vec::new(),
                reads: Vec::new(),
            },
            history: History {
                writes: vec![Vec::new(); SIZE as usize],
                acknowledged: Vec::new(),
            },
            zeros: Vec::new(),
            reading: Vec::new(),
            under_way: 0,
        }
    }

    fn submit(&mut self, n: u16, random: &mut Random) {
        let (offset, len, kind) = random_request(random);
        let ticket = Ticket(n.into());
        let data = vec![(n % 250) as u8 + 1; len as usize];
        let shared = SharedBytes::copy_of(&data);
        let mut range = offset as usize..(offset + len) as usize;
        let request = match kind {
            0 | 1 => {
                self.reading.push(self.history.begin_read(ticket, range));
                range = 0..0;
                let len = len as u32;
                ByteRequest::Read { offset, len }
            }
            2 => {
                range = range.start.next_multiple_of(4096)..range.end / 4096 * 4096;
                let kind = Zero::Discard;
                ByteRequest::Zero { offset, len, kind }
            }
            3 | 4 => {
                let kind = [Zero::WriteZeroes, Zero::Provision][(kind - 3) as usize];
                ByteRequest::Zero { offset, len, kind }
            }
            5 => ByteRequest::WriteShared {
                offset,
                data: &shared,
            },
            _ => ByteRequest::Write {
                offset,
                data: &data,
            },
        };
        self.zeros.push((2..5).contains(&kind));
        self.history.acknowledged.push(false);
        if range.start < range.end {
            self.history.writes[range]
                .iter_mut()
                .for_each(|byte| byte.push(n));
        }
        self.io
            .submit(ticket, request, &mut Heap)
            .expect("is taken");
        self.under_way += 1;
        self.volume.take(&mut self.io);
    }

    fn finish_one(&mut self, random: &mut Random) -> bool {
        let more = self.volume.finish_one(&mut self.io, random);
        self.volume.take(&mut self.io);
        while let Some((ticket, result)) = self.io.next_completion() {
            let outcome = result.expect("no error");
            self.under_way -= 1;
            self.history.acknowledged[ticket.0 as usize] = true;
            if let Outcome::Read(pieces) = &outcome {
                let at = self.reading.iter().position(|r| r.ticket == ticket);
                let read = self.reading.swap_remove(at.expect("a read"));
                self.history
                    .check_read(&read, &bytes_of(pieces), &self.zeros, self.seed);
            }
            self.io.recycle(outcome);
        }
        more
    }
}

/// Writes that overlap take effect in the order they came in, each byte of them; a read sees what was
/// acknowledged before it, or newer.
#[test]
fn no_update_is_lost_whatever_the_order_of_completion() {
    for seed in 1..80 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut run = Run::new(seed);
        // From one at a time to nearly all at once.
        let finishing = 1 + random.below(8);
        for n in 0..150 {
            run.submit(n, &mut random);
            for _ in 0..random.below(finishing) {
                run.finish_one(&mut random);
            }
        }
        while run.finish_one(&mut random) {}
        assert_eq!(
            run.under_way, 0,
            "seed {seed}: a request was never answered"
        );
        let held = run.volume.blocks.concat();
        let newest = |byte: &Vec<u16>| byte.last().map_or(0, |w| History::value(*w, &run.zeros));
        let model = run.history.writes.iter().map(newest);
        let differs = held.iter().zip(model).position(|(a, b)| *a != b);
        assert_eq!(differs, None, "seed {seed}");
        assert!(run.io.locks.are_free() && run.io.zeros.is_none());
    }
}

fn write(io: &mut ByteIo, ticket: u64, offset: u64, data: &[u8]) {
    let request = ByteRequest::Write { offset, data };
    io.submit(Ticket(ticket), request, &mut Heap)
        .expect("is taken");
}

fn zeros_read() -> Result<ReadData<Payload>, IoError> {
    Ok(ReadData {
        positions: vec![Position::ZERO],
        content: Content::Zeros,
    })
}

fn take_read(io: &mut ByteIo) -> BlockTicket {
    match io.next_block_request() {
        Some(BlockRequest::Read { ticket, .. }) => ticket,
        other => panic!("{other:?} is no read"),
    }
}

fn take_write(io: &mut ByteIo) -> (BlockTicket, Content<Payload>) {
    match io.next_block_request() {
        Some(BlockRequest::Write {
            ticket, content, ..
        }) => (ticket, content),
        other => panic!("{other:?} is no write"),
    }
}

fn completed(io: &mut ByteIo) -> Vec<u64> {
    std::iter::from_fn(|| io.next_completion())
        .map(|(t, _)| t.0)
        .collect()
}

#[test]
fn parts_of_a_block_that_wait_share_one_read_and_one_write() {
    let mut io = ByteIo::new(SIZE);
    for n in 0..8 {
        write(&mut io, n, n * 512, &[n as u8 + 1; 512]);
    }
    let read = take_read(&mut io);
    assert!(io.next_block_request().is_none(), "the others wait");
    io.read_done(read, zeros_read(), &mut Heap);
    let (ticket, content) = take_write(&mut io);
    let Content::Data(payload) = content else {
        panic!("data")
    };
    let expected: Vec<u8> = (0..4096_usize).map(|i| (i / 512) as u8 + 1).collect();
    assert_eq!(payload.data()[..], expected[..]);
    // While it is written more arrives: it needs no second read.
    write(&mut io, 8, 1, &[99]);
    assert!(io.next_block_request().is_none());
    io.write_done(ticket, Ok(()), &mut Heap);
    assert_eq!(completed(&mut io), [0, 1, 2, 3, 4, 5, 6, 7]);
    let (ticket, content) = take_write(&mut io);
    let Content::Data(payload) = content else {
        panic!("data")
    };
    assert_eq!(payload.data()[..4], [1, 99, 1, 1]);
    io.write_done(ticket, Ok(()), &mut Heap);
    assert_eq!(completed(&mut io), [8]);
    assert!(io.locks.are_free());
}

#[test]
fn after_a_failed_write_the_block_is_read_again() {
    let mut io = ByteIo::new(SIZE);
    write(&mut io, 0, 0, &[1]);
    let read = take_read(&mut io);
    io.read_done(read, zeros_read(), &mut Heap);
    let (ticket, _) = take_write(&mut io);
    write(&mut io, 1, 1, &[2]);
    io.write_done(ticket, Err(IoError::TimedOut), &mut Heap);
    assert!(matches!(
        io.next_completion(),
        Some((Ticket(0), Err(IoError::TimedOut)))
    ));
    let read = take_read(&mut io);
    io.read_done(read, zeros_read(), &mut Heap);
    let (ticket, _) = take_write(&mut io);
    io.write_done(ticket, Ok(()), &mut Heap);
    assert_eq!(completed(&mut io), [1]);
}

#[test]
fn writes_of_other_blocks_are_not_delayed() {
    let mut io = ByteIo::new(SIZE);
    write(&mut io, 0, 1, &[1]);
    take_read(&mut io);
    write(&mut io, 1, 4096, &[2; 4096]);
    take_write(&mut io);
    // A write of both blocks waits, and what comes after it in the second block waits for it.
    write(&mut io, 2, 0, &[3; 8192]);
    write(&mut io, 3, 4096, &[4; 4096]);
    assert!(io.next_block_request().is_none());
    write(&mut io, 4, 8192, &[5; 4096]);
    take_write(&mut io);
}

#[test]
fn a_discard_leaves_the_edges_alone() {
    let mut io = ByteIo::new(SIZE);
    let kind = Zero::Discard;
    let request = |offset, len| ByteRequest::Zero { offset, len, kind };
    io.submit(Ticket(1), request(1, 4096), &mut Heap).unwrap();
    assert_eq!(completed(&mut io), [1]);
    io.submit(Ticket(2), request(1, 3 * 4096), &mut Heap)
        .unwrap();
    let Some(BlockRequest::Write { range, content, .. }) = io.next_block_request() else {
        panic!()
    };
    assert_eq!(
        (range.start, range.count, content),
        (Block(1), 2, Content::Zeros)
    );
    assert!(io.next_block_request().is_none());
}

#[test]
fn a_zero_request_of_a_whole_volume_is_issued_in_steps() {
    let extents = 1000;
    let mut io = ByteIo::new(extents * EXTENT_BYTES);
    let request = ByteRequest::Zero {
        offset: 0,
        len: extents * EXTENT_BYTES,
        kind: Zero::WriteZeroes,
    };
    io.submit(Ticket(1), request, &mut Heap).unwrap();
    let mut total = 0;
    loop {
        let step: Vec<_> = std::iter::from_fn(|| io.next_block_request()).collect();
        if step.is_empty() {
            break;
        }
        assert!(step.len() <= ZERO_PARTS_MAX);
        total += step.len() as u64;
        for request in step {
            let BlockRequest::Write { ticket, .. } = request else {
                panic!()
            };
            assert!(io.next_completion().is_none());
            io.write_done(ticket, Ok(()), &mut Heap);
        }
    }
    assert_eq!(total, extents);
    assert_eq!(completed(&mut io), [1]);
}

#[test]
fn zeros_that_need_space_are_written_as_data() {
    let mut io = ByteIo::new(SIZE);
    let request = ByteRequest::Zero {
        offset: 4096,
        len: 8192,
        kind: Zero::Provision,
    };
    io.submit(Ticket(1), request, &mut Heap).unwrap();
    let (ticket, content) = take_write(&mut io);
    let Content::Data(payload) = content else {
        panic!("no data")
    };
    assert!(payload.data().iter().all(|byte| *byte == 0));
    assert_eq!((payload.blocks(), payload.first_bad_block()), (2, None));
    io.write_done(ticket, Ok(()), &mut Heap);
    assert_eq!(completed(&mut io), [1]);
    assert!(io.zeros.is_none(), "the extent of zeros is given back");
}

#[test]
fn an_answer_of_the_wrong_length_is_an_error() {
    let mut io = ByteIo::new(SIZE);
    let request = ByteRequest::Read {
        offset: 0,
        len: 8192,
    };
    io.submit(Ticket(1), request, &mut Heap).unwrap();
    let read = take_read(&mut io);
    let data = ReadData {
        positions: vec![Position::ZERO],
        content: Content::Data(Payload::new(SharedBytes::copy_of(&[1; 4096]))),
    };
    io.read_done(read, Ok(data), &mut Heap);
    assert!(matches!(
        io.next_completion(),
        Some((Ticket(1), Err(IoError::Device)))
    ));
}

#[test]
fn what_lies_outside_is_refused_and_flush_needs_nothing() {
    let mut io = ByteIo::new(SIZE);
    for (offset, len) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 2), (0, 0)] {
        let request = ByteRequest::Zero {
            offset,
            len,
            kind: Zero::Discard,
        };
        assert_eq!(
            io.submit(Ticket(1), request, &mut Heap),
            Err(IoError::OutOfRange)
        );
    }
    io.submit(Ticket(2), ByteRequest::Flush, &mut Heap)
        .expect("is taken");
    assert!(matches!(
        io.next_completion(),
        Some((Ticket(2), Ok(Outcome::Done)))
    ));
    assert!(io.next_block_request().is_none());
}

#[test]
fn an_error_of_one_part_fails_the_request_and_frees_its_block() {
    let mut io = ByteIo::new(SIZE);
    io.submit(
        Ticket(1),
        ByteRequest::Write {
            offset: 1,
            data: &[7; 10],
        },
        &mut Heap,
    )
    .unwrap();
    io.submit(
        Ticket(2),
        ByteRequest::Write {
            offset: 0,
            data: &[8; 4096],
        },
        &mut Heap,
    )
    .unwrap();
    let Some(BlockRequest::Read { ticket, .. }) = io.next_block_request() else {
        panic!()
    };
    assert!(
        io.next_block_request().is_none(),
        "the second one overlaps and waits"
    );
    io.read_done(ticket, Err(IoError::Media { offset: 0 }), &mut Heap);
    assert!(matches!(
        io.next_completion(),
        Some((Ticket(1), Err(IoError::Media { .. })))
    ));
    assert!(matches!(
        io.next_block_request(),
        Some(BlockRequest::Write { .. })
    ));
}
