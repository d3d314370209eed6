//! Payloads keep blocks and checksums together.

mod common;

use ashlar_engine::SharedBytes;
use ashlar_wire::*;
use common::payload;
use zerocopy::little_endian::U32;

#[test]
fn a_bad_block_is_found_by_its_receiver() {
    let payload = payload(4);
    let mut data = payload.data().to_vec();
    data[2 * 4096 + 5] ^= 1;
    let crcs: Vec<U32> = payload.crcs().iter().map(|crc| (*crc).into()).collect();
    assert_eq!(
        BlockData {
            crcs: &crcs,
            data: &data
        }
        .first_bad_block(),
        Some(2)
    );
    assert_eq!(payload.first_bad_block(), None);
}

#[test]
fn a_payload_with_foreign_checksums_names_its_first_bad_block() {
    for blocks in [1, 8, 9, 256] {
        let good = payload(blocks);
        let last = blocks as usize - 1;
        let crcs = good.crcs().iter().enumerate();
        let crcs = crcs.map(|(n, crc)| if n == last { crc ^ 1 } else { *crc });
        let bad = Payload::with_crcs(good.data().clone(), crcs);
        assert_eq!(good.first_bad_block(), None);
        assert_eq!(bad.first_bad_block(), Some(last));
        assert_ne!(good, bad);
    }
}

#[test]
fn a_part_of_a_payload_has_the_bytes_and_checksums_of_its_blocks() {
    let whole = payload(20);
    for (first, count) in [(0, 20), (0, 1), (19, 1), (3, 9), (5, 0)] {
        let part = whole.slice(first, count);
        assert_eq!(part.blocks(), count);
        assert_eq!(part.crcs(), &whole.crcs()[first..first + count]);
        let bytes = &whole.data()[first * 4096..(first + count) * 4096];
        assert_eq!(part, Payload::new(SharedBytes::copy_of(bytes)));
    }
}
