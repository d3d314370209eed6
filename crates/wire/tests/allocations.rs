//! The frames of reads and writes are written and read without an allocation, and no input makes the
//! decoder set aside more than a small multiple of the bytes that are there.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ashlar_replication::message::*;
use ashlar_replication::values::*;
use ashlar_wire::*;
use common::*;
use proptest::prelude::*;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator. The default `realloc` comes through
// `alloc`, so growth is counted too.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as u64));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations and their bytes on this thread while `f` runs.
fn measured<T>(f: impl FnOnce() -> T) -> (u64, u64) {
    let (count, bytes) = (COUNT.get(), BYTES.get());
    let value = f();
    let measured = (COUNT.get() - count, BYTES.get() - bytes);
    drop(value);
    measured
}

const FRAMES: usize = 100;

#[test]
fn frames_of_reads_and_writes_are_written_without_an_allocation() {
    let mut out = Vec::with_capacity(64 * 1024);
    let content = Content::Data(payload(1));
    let large = Content::Data(payload(256));
    let start = Block(512);
    let range = |count| BlockRange { start, count };
    let write = |content: &Content<Payload>, count| Request::Write {
        sequence: Sequence(7),
        range: range(count),
        content: content.clone(),
    };
    let (id, torn) = (RequestId(8), TornBlocks::Refuse);
    let read: Request<Payload> = Request::Read {
        id,
        range: range(1),
        torn,
    };
    let read_payload = payload(1);
    let counted = measured(|| {
        for _ in 0..FRAMES {
            out.clear();
            encode::request(&mut out, 1, &write(&content, 1));
            encode::request(&mut out, 1, &write(&large, 256));
            encode::request(&mut out, 1, &read);
            let sequence = Sequence(7);
            encode::reply(&mut out, 1, &Reply::<Payload>::Applied { sequence });
            encode::data(
                &mut out,
                1,
                id,
                &[Position::ZERO],
                Some(read_payload.crcs()),
            );
            encode::data(&mut out, 1, id, &[Position::ZERO], None);
            encode::renew(&mut out, 2);
            encode::renewed(&mut out, 2);
        }
    });
    assert_eq!(counted, (0, 0));
}

#[test]
fn frames_of_reads_and_writes_are_read_without_an_allocation() {
    let hot = [
        Kind::Write,
        Kind::Read,
        Kind::Applied,
        Kind::WriteRefused,
        Kind::Renew,
        Kind::Renewed,
    ];
    let number = |frame: &[u8]| u16::from_le_bytes([frame[4], frame[5]]);
    let (mut frames, mut answers) = (all_frames(), all_frames());
    frames.retain(|frame| hot.iter().any(|kind| *kind as u16 == number(frame)));
    answers.retain(|frame| number(frame) == Kind::Data as u16);
    assert!(frames.len() >= hot.len() && answers.len() == 2);
    let counted = measured(|| {
        for _ in 0..FRAMES {
            for frame in &frames {
                assert!(matches!(
                    decode(frame),
                    Ok(Decoded::Frame { frame: Ok(_), .. })
                ));
            }
            for frame in &answers {
                let (reply, _) = decode_data(frame).unwrap().expect("an answer with data");
                assert_eq!(reply.positions.iter().len(), 2);
                assert_eq!(reply.blocks.and_then(|b| b.first_bad_block()), None);
            }
        }
    });
    assert_eq!(counted, (0, 0));
}

#[test]
fn small_payloads_are_made_cloned_and_cut_without_an_allocation() {
    let original = payload(8);
    let data = original.data();
    let counted = measured(|| {
        for _ in 0..FRAMES {
            let payload = Payload::new(data.clone());
            assert_eq!(payload, original.clone());
            assert_eq!(payload.slice(2, 3).first_bad_block(), None);
        }
    });
    assert_eq!(counted, (0, 0));
}

/// Values are wider than their encoding, twice at most; lists of members grow as they are read.
fn check_bounded(frame: &[u8]) {
    let (_, bytes) = measured(|| decode(frame));
    assert!(bytes <= 2 * frame.len() as u64 + 4096, "{bytes} bytes");
}

#[test]
fn valid_frames_are_decoded_into_bounded_memory() {
    all_frames().iter().for_each(|frame| check_bounded(frame));
    let entry = BlockPosition {
        block: Block(1),
        position: Position::ZERO,
    };
    let torn = vec![entry; TORN_MAX];
    let largest = Promise { torn, ..promise() };
    let mut out = Vec::new();
    encode::promised(&mut out, &KEY, &CHALLENGES, &subject(), &largest);
    check_bounded(&out);
    for request in requests(256, Content::Data(payload(256))) {
        check_bounded(&encode_request(&request));
    }
}

#[test]
fn a_header_that_promises_much_costs_nothing() {
    let mut header = all_frames()[0][..HEADER_BYTES].to_vec();
    header[4..6].copy_from_slice(&(Kind::Promised as u16).to_le_bytes());
    header[40..44].copy_from_slice(&BODY_BYTES_MAX.to_le_bytes());
    let crc = crc32c::crc32c(&header[..60]);
    header[60..64].copy_from_slice(&crc.to_le_bytes());
    let counted = measured(|| {
        let need = HEADER_BYTES + BODY_BYTES_MAX as usize;
        assert_eq!(decode(&header), Ok(Decoded::Incomplete { need }));
    });
    assert_eq!(counted, (0, 0));
}

proptest! {
    /// Counts and lengths within bodies are what an attacker would lie about.
    #[test]
    fn mutated_frames_are_decoded_into_bounded_memory(
        index in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        in_body in any::<bool>(),
    ) {
        let frames = all_frames();
        let mut frame = index.get(&frames).clone();
        let body = body_bytes(&frame);
        for (at, byte) in changes {
            let at = if in_body && body > 0 { HEADER_BYTES + at.index(body) } else { 4 + at.index(36) };
            frame[at] = byte;
        }
        reseal(&mut frame);
        check_bounded(&frame);
    }
}
