//! Random overlapping requests, finished in random order, against plain bytes.

use super::*;
use crate::front_end::Zero;
use ashlar_replication::values::Position;

struct Heap;

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

const BLOCKS: u64 = 520;
const SIZE: u64 = BLOCKS * BLOCK_BYTES as u64;

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

/// Overlapping writes that are under way at the same time may take effect in any order per byte; each
/// byte must end as one of the values that could be last, and bytes of different requests in one block
/// must not undo each other.
#[test]
fn no_update_is_lost_whatever_the_order_of_completion() {
    for seed in 1..400 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut io = ByteIo::new(SIZE);
        let blocks = vec![vec![0; BLOCK_BYTES]; BLOCKS as usize];
        let mut volume = Volume {
            blocks,
            writes: Vec::new(),
            reads: Vec::new(),
        };
        // Requests take effect in order here: they are submitted in that order and overlap in FIFO.
        let mut model = vec![0_u8; SIZE as usize];
        let mut expected_reads: Vec<(Ticket, u64, u32)> = Vec::new();
        let mut under_way = 0;
        for n in 0..200_u64 {
            // Requests crowd around a border of an extent and a few blocks.
            let base = [250 * 4096, 255 * 4096 + 4000, 100, 256 * 4096][random.below(4) as usize];
            let offset = base + random.below(3 * 4096);
            let len = match random.below(4) {
                0 => 1 + random.below(16),
                1 => 512,
                2 => 4096,
                _ => 1 + random.below(20_000),
            };
            let ticket = Ticket(n);
            let value = (n % 250) as u8 + 1;
            let kind = random.below(5);
            let range = offset as usize..(offset + len) as usize;
            let request = match kind {
                0 => ByteRequest::Read {
                    offset,
                    len: len as u32,
                },
                1 => ByteRequest::Zero {
                    offset,
                    len,
                    kind: Zero::Discard,
                },
                _ => ByteRequest::Write {
                    offset,
                    data: &vec![value; len as usize],
                },
            };
            match kind {
                0 => expected_reads.push((ticket, offset, len as u32)),
                1 => model[range].fill(0),
                _ => model[range].fill(value),
            }
            io.submit(ticket, request, &mut Heap).expect("is taken");
            under_way += 1;
            volume.take(&mut io);
            for _ in 0..random.below(6) {
                volume.finish_one(&mut io, &mut random);
                volume.take(&mut io);
            }
            while let Some((_, result)) = io.next_completion() {
                io.recycle(result.expect("no error"));
                under_way -= 1;
            }
        }
        while volume.finish_one(&mut io, &mut random) {
            volume.take(&mut io);
        }
        while let Some((ticket, result)) = io.next_completion() {
            if let Outcome::Read(pieces) = result.expect("no error") {
                let (_, _, len) = expected_reads
                    .iter()
                    .find(|r| r.0 == ticket)
                    .expect("a read");
                assert_eq!(pieces.iter().map(|p| p.len).sum::<u32>(), *len);
            }
            under_way -= 1;
        }
        assert_eq!(under_way, 0, "seed {seed}: a request was never answered");
        let held: Vec<u8> = volume.blocks.concat();
        let differs = held.iter().zip(&model).position(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}");
        assert!(io.busy.is_empty() && io.waiting.is_empty());
    }
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
