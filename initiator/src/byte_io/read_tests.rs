//! Reads of blocks whose good copies lie on different replicas.

use ashlar_replication::message::ReadData;
use ashlar_replication::values::Position;

use super::tests::{Heap, SIZE};
use super::*;

/// Reads `offset..offset + len` from a volume whose replicas have good copies of single blocks only, and
/// of `lost` none.
fn read_block_by_block(
    offset: u64,
    len: u32,
    lost: Option<Block>,
) -> Result<Vec<ReadPiece>, IoError> {
    let mut io = ByteIo::new(SIZE);
    io.submit(Ticket(1), ByteRequest::Read { offset, len }, &mut Heap)
        .unwrap();
    while let Some(request) = io.next_block_request() {
        let BlockRequest::Read { ticket, range } = request else {
            panic!("a write")
        };
        let result = if range.count > 1 || lost == Some(range.start) {
            Err(IoError::Media {
                offset: range.start.0 * BYTES,
            })
        } else {
            let block = [(range.start.0 % 250) as u8 + 1; BLOCK_BYTES];
            Ok(ReadData {
                positions: vec![Position::ZERO],
                content: Content::Data(Payload::new(SharedBytes::copy_of(&block))),
            })
        };
        io.read_done(ticket, result, &mut Heap);
    }
    match io.next_completion() {
        Some((Ticket(1), Ok(Outcome::Read(pieces)))) => Ok(pieces),
        Some((Ticket(1), Err(error))) => Err(error),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_read_over_blocks_whose_good_copies_lie_on_different_replicas_finds_them_all() {
    for (offset, len) in [(0, 8192), (5, 3 * 4096), (253 * BYTES + 100, 7 * 4096)] {
        let pieces = read_block_by_block(offset, len, None).expect("every block has a good copy");
        let read: Vec<u8> = pieces
            .iter()
            .flat_map(|piece| match &piece.content {
                Content::Data(bytes) => bytes.to_vec(),
                Content::Zeros => panic!("no block is zeros"),
            })
            .collect();
        let byte = |at: u64| (at / BYTES % 250) as u8 + 1;
        let wanted: Vec<u8> = (offset..offset + u64::from(len)).map(byte).collect();
        assert!(read == wanted, "{offset} {len}");
    }
}

#[test]
fn a_read_over_a_block_without_any_good_copy_is_an_error_that_names_it() {
    let error = read_block_by_block(BYTES, 4 * 4096, Some(Block(3))).expect_err("a block is lost");
    assert_eq!(error, IoError::Media { offset: 3 * BYTES });
}
