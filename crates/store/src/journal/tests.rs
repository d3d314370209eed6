use ashlar_engine::IoBuf;
use ashlar_replication::values::DeviceId;
use proptest::prelude::*;
use zerocopy::little_endian::U32;

use super::descriptor::{self, Announcement, Descriptor, Positions, Source, WriteOut};
use super::record::{self, Builder, RECORD_BYTES_MAX};
use super::ring::Ring;
use crate::format::checkpoint_page::Tail;

const DEVICE: DeviceId = DeviceId([9; 16]);

fn blocks(seed: u8, count: usize) -> (Vec<u8>, Vec<U32>) {
    let data: Vec<u8> = (0..count * 4096).map(|i| (i / 7) as u8 ^ seed).collect();
    let crcs = data
        .chunks(4096)
        .map(|b| U32::new(crc32c::crc32c(b)))
        .collect();
    (data, crcs)
}

/// A record with `writes` of that many blocks each.
fn record(lsn: u64, previous: u32, writes: &[usize]) -> (IoBuf, usize, u32) {
    let mut builder = Builder::new(lsn, IoBuf::new(RECORD_BYTES_MAX), Vec::new());
    for (n, count) in writes.iter().enumerate() {
        let (data, crcs) = blocks(n as u8, *count);
        let positions: Vec<u64> = (0..*count as u64).map(|i| lsn * 1000 + i).collect();
        let out = WriteOut {
            replica: 1,
            extent: n as u64,
            slot: 4,
            allocates: (n % 2 == 0).then_some(17),
            first: 0,
            count: *count as u16,
            positions: Positions::Each(&positions),
            crcs: &crcs,
            source: Source::Journal,
            sets_last: None,
        };
        out.encode(&mut builder.descriptors);
        builder.push_data(&data);
    }
    let (buf, bytes, crc, _) = builder.seal(DEVICE, previous);
    (buf, bytes, crc)
}

#[test]
fn a_record_comes_back_with_its_blocks_also_when_descriptors_overflow() {
    for writes in [vec![1], vec![3, 0, 2], vec![1; 120], vec![256]] {
        let (buf, bytes, crc) = record(7, 99, &writes);
        let header = record::decode_header(&buf[..4096], DEVICE).expect("a header");
        assert_eq!(
            (header.lsn, header.previous_crc, header.bytes),
            (7, 99, bytes)
        );
        assert_eq!(header.crc, crc);
        let found = record::decode(&header, &buf).expect("a record");
        assert_eq!(found.descriptors.len(), writes.len());
        for ((descriptor, first, _), count) in found.descriptors.iter().zip(&writes) {
            let Descriptor::Write(write) = descriptor else {
                panic!("a write")
            };
            assert_eq!(write.positions.len(), *count);
            let data = &found.data[first * 4096..(first + count) * 4096];
            let crcs: Vec<u32> = data.chunks(4096).map(crc32c::crc32c).collect();
            assert_eq!(write.crcs, crcs);
        }
        assert!(record::decode_header(&buf[..4096], DeviceId([1; 16])).is_none());
    }
}

proptest! {
    #[test]
    fn a_flipped_bit_in_what_a_record_holds_is_noticed(
        writes in prop::collection::vec(1..5_usize, 1..6),
        flip in any::<prop::sample::Index>(),
    ) {
        let (mut buf, bytes, _) = record(3, 1, &writes);
        let original = buf.to_vec();
        let place = flip.index(bytes * 8);
        buf[place / 8] ^= 1 << (place % 8);
        let found = record::decode_header(&buf[..4096], DEVICE)
            .and_then(|header| record::decode(&header, &buf).map(|r| (header, r.descriptors)));
        if let Some((header, descriptors)) = found {
            // Only padding is not covered; what it means is unchanged.
            let good = record::decode_header(&original[..4096], DEVICE).expect("a header");
            prop_assert_eq!(header, good);
            let good = record::decode(&good, &original).expect("a record");
            prop_assert_eq!(descriptors, good.descriptors);
            let data = &buf[4096..][..good.data.len()];
            prop_assert_eq!(data, good.data);
        }
    }

    #[test]
    fn no_bytes_make_the_record_parsers_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 8192),
        kind in 0..6_u16,
        length in 0..400_u32,
    ) {
        let _ = descriptor::decode(&bytes);
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        let _ = descriptor::decode(&bytes);
        let _ = record::decode_header(&bytes[..4096], DEVICE);
        let _ = record::decode_header(&bytes[..5], DEVICE);
    }
}

#[test]
fn notes_and_deletes_come_back() {
    let mut bytes = Vec::new();
    let announced = Announcement { lsn: 44, at: 120 };
    descriptor::encode_in_place(&mut bytes, 2, 9, 10, 20, announced);
    let first = bytes.len();
    descriptor::encode_delete(&mut bytes, 5);
    let (note, length) = descriptor::decode(&bytes).expect("a note");
    assert_eq!(length, first);
    let want = Descriptor::InPlace {
        replica: 2,
        extent: 9,
        first: 10,
        count: 20,
        announced,
    };
    assert_eq!(note, want);
    let (delete, _) = descriptor::decode(&bytes[first..]).expect("a delete");
    assert_eq!(delete, Descriptor::Delete { replica: 5 });
}

#[test]
fn records_wrap_and_never_touch_what_counts() {
    let bytes = 40 * 4096;
    let mut ring = Ring::new(
        bytes,
        Tail {
            lsn: 1,
            offset: 0,
            previous_crc: 0,
        },
    );
    let mut places: Vec<(u64, u64, u64)> = Vec::new();
    for lsn in 1..500 {
        let size = (1 + lsn % 7) * 4096;
        while !ring.has_room(size) {
            places.remove(0);
            let tail = places.first().map_or(lsn, |p| p.0);
            let place = ring.tail(tail);
            assert_eq!(place.lsn, tail);
            ring.advance(tail);
        }
        let offset = ring.push(lsn, size, lsn as u32);
        assert!(offset + size <= bytes);
        for (_, at, length) in &places {
            assert!(
                offset + size <= *at || at + length <= offset,
                "record {lsn} overwrites"
            );
        }
        places.push((lsn, offset, size));
        assert!(ring.used() < bytes);
    }
}
