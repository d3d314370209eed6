//! Nothing but whole, possible frames gets through, and nothing panics.

mod common;

use ashlar_wire::*;
use common::*;
use proptest::prelude::*;

/// A frame of that kind among [`all_frames`].
fn frame_of(kind: Kind) -> Vec<u8> {
    let of_kind = |frame: &Vec<u8>| frame[4..6] == (kind as u16).to_le_bytes();
    all_frames().into_iter().find(of_kind).expect("every kind")
}

/// That frame with some of its bytes replaced under correct checksums.
fn changed(kind: Kind, changes: &[(usize, &[u8])]) -> Vec<u8> {
    let mut frame = frame_of(kind);
    for (at, bytes) in changes {
        frame[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    reseal(&mut frame);
    frame
}

/// The frame is refused by its number, and framing is kept.
fn check_refused(frame: &[u8]) {
    match decode(frame) {
        Ok(Decoded::Frame {
            frame: Err(bad),
            bytes,
        }) => {
            assert_eq!(bytes, frame.len());
            assert_eq!((bad.kind as u16).to_le_bytes(), frame[4..6]);
            assert_eq!(bad.handle.to_le_bytes(), frame[8..12]);
            assert_eq!(bad.request.to_le_bytes(), frame[16..24]);
            assert!(!bad.error.loses_framing());
        }
        other => panic!("{other:?}"),
    }
    assert!(decode_data(frame).expect("framing is kept").is_none());
}

fn check_beyond_limit(frame: &[u8]) {
    let error = decode(frame).expect_err("a length above its limit");
    assert!(matches!(error, WireError::Limit { .. }) && error.loses_framing());
}

#[test]
fn every_prefix_of_a_frame_is_incomplete_and_asks_for_no_more_than_the_frame() {
    for frame in all_frames() {
        for end in 0..frame.len() {
            match decode(&frame[..end]) {
                Ok(Decoded::Incomplete { need }) => assert!(need > end && need <= frame.len()),
                other => panic!("{end} bytes: {other:?}"),
            }
            assert!(decode_data(&frame[..end]).expect("no error").is_none());
        }
    }
}

#[test]
fn every_flipped_bit_of_header_or_body_is_noticed() {
    for frame in all_frames() {
        for bit in 0..(HEADER_BYTES + body_bytes(&frame)) * 8 {
            let mut broken = frame.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            let error = decode(&broken).expect_err("a flipped bit got through");
            assert!(error.loses_framing());
            assert!(!matches!(decode_data(&broken), Ok(Some(_))));
        }
    }
}

#[test]
fn every_flipped_bit_of_data_is_noticed_by_the_checksums_of_its_block() {
    let frame = frame_of(Kind::Data);
    let data = HEADER_BYTES + body_bytes(&frame);
    for bit in (0..(frame.len() - data) * 8).step_by(41) {
        let mut broken = frame.clone();
        broken[data + bit / 8] ^= 1 << (bit % 8);
        let (reply, _) = decode_data(&broken).unwrap().expect("framing is whole");
        let bad = reply.blocks.expect("data").first_bad_block();
        assert_eq!(bad, Some(bit / 8 / 4096));
    }
}

#[test]
fn a_foreign_client_is_noticed_by_its_first_byte() {
    for hello in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x03\x01", b"N", b"ASH!"] {
        assert_eq!(decode(hello), Err(WireError::Magic));
    }
}

#[test]
fn lengths_above_the_limit_of_their_kind_are_refused_before_the_bytes_arrive() {
    for kind in Kind::ALL {
        let mut header = frame_of(*kind)[..HEADER_BYTES].to_vec();
        let mut check = |body: u32, data: u32| {
            header[40..44].copy_from_slice(&body.to_le_bytes());
            header[44..48].copy_from_slice(&data.to_le_bytes());
            let crc = crc32c::crc32c(&header[..60]);
            header[60..64].copy_from_slice(&crc.to_le_bytes());
            check_beyond_limit(&header);
        };
        let limits = kind.limits();
        check(limits.body_bytes_max + 1, 0);
        check(u32::MAX, 0);
        check(0, limits.data_bytes_max + 4096);
        check(0, 0xffff_f000);
        check(0, 5);
    }
}

#[test]
fn strangers_may_send_only_what_a_greeting_needs() {
    let within = |kind| decode_within(&frame_of(kind), &Limits::UNPROVEN).map(|_| ());
    for kind in [Kind::Hello, Kind::Fence, Kind::Release, Kind::Renew] {
        assert_eq!(within(kind), Ok(()));
    }
    for kind in [Kind::Write, Kind::Copy, Kind::Equalise, Kind::Repair] {
        assert!(matches!(within(kind), Err(WireError::Limit { .. })));
    }
}

#[test]
fn unknown_kinds_lose_framing() {
    let known = |number: &u16| Kind::from_number(*number).is_some();
    let mut frame = frame_of(Kind::Renew);
    for number in (0..=u16::MAX).filter(|number| !known(number)) {
        frame[4..6].copy_from_slice(&number.to_le_bytes());
        reseal(&mut frame);
        assert_eq!(decode(&frame), Err(WireError::Kind(number)));
    }
}

#[test]
fn flags_and_reserved_bytes_without_a_meaning_are_refused() {
    for kind in Kind::ALL {
        let flags = u16::from_le_bytes(frame_of(*kind)[6..8].try_into().unwrap());
        check_refused(&changed(*kind, &[(6, &(flags | 8).to_le_bytes())]));
        check_refused(&changed(*kind, &[(6, &(flags | 1 << 15).to_le_bytes())]));
        for at in 52..60 {
            check_refused(&changed(*kind, &[(at, &[1])]));
        }
    }
    check_refused(&changed(Kind::Write, &[(6, &[2])]));
    check_refused(&changed(Kind::Read, &[(6, &[1])]));
}

#[test]
fn ranges_outside_an_extent_or_any_volume_are_refused() {
    let with_data = [Kind::Write, Kind::Copy, Kind::Equalise, Kind::Repair];
    for kind in with_data.into_iter().chain([Kind::Read]) {
        let start = |block: u64| changed(kind, &[(24, &block.to_le_bytes())]);
        check_refused(&start(BLOCK_MAX.0 + 1));
        check_refused(&start(u64::MAX));
        for count in [0, 2, 4, 257, u32::MAX] {
            // The data is for another count, and the last block of an extent has no successor in it.
            let last = 255u64.to_le_bytes();
            check_refused(&changed(kind, &[(24, &last), (12, &count.to_le_bytes())]));
        }
    }
    let beyond = (BLOCK_MAX.extent().0 + 1).to_le_bytes();
    check_refused(&changed(Kind::Compare, &[(24, &beyond)]));
    check_refused(&changed(Kind::Digests, &[(24, &beyond)]));
    check_refused(&changed(Kind::Digests, &[(12, &4097u32.to_le_bytes())]));
    check_refused(&changed(Kind::ListAbove, &[(24, &[0xff; 8])]));
    check_refused(&changed(Kind::ReadFailed, &[(24, &[0xff; 8])]));
    // Positions, Copied and DigestList name blocks and extents in their entries.
    check_refused(&changed(Kind::Positions, &[(24, &[0xff; 8])]));
    for kind in [Kind::Positions, Kind::Copied, Kind::DigestList] {
        check_refused(&changed(kind, &[(HEADER_BYTES + 16, &[0xff; 8])]));
    }
}

#[test]
fn numbers_wider_than_their_fields_are_refused() {
    let wide = (1u64 << 40).to_le_bytes();
    for kind in [Kind::Write, Kind::Applied, Kind::WriteRefused] {
        check_refused(&changed(kind, &[(16, &wide)]));
    }
    check_refused(&changed(Kind::BeginResync, &[(24, &wide)]));
    for kind in [Kind::BeginResync, Kind::Copy, Kind::MarkComplete] {
        check_refused(&changed(kind, &[(32, &(1u64 << 32).to_le_bytes())]));
    }
    check_refused(&changed(Kind::Fenced, &[(32, &(1u64 << 24).to_le_bytes())]));
    // The epochs of Fence (behind volume and member), StoreConfig and Promised.
    let epoch = (1u32 << 24).to_le_bytes();
    check_refused(&changed(Kind::Fence, &[(HEADER_BYTES + 40, &epoch)]));
    check_refused(&changed(Kind::StoreConfig, &[(HEADER_BYTES, &epoch)]));
    check_refused(&changed(Kind::Promised, &[(HEADER_BYTES, &epoch)]));
}

#[test]
fn unknown_codes_are_refused() {
    for kind in [Kind::Refused, Kind::WriteRefused, Kind::FenceRefused] {
        for code in [0u32, 16, 256, u32::MAX] {
            check_refused(&changed(kind, &[(12, &code.to_le_bytes())]));
        }
        // Fenced by an epoch that there cannot be.
        check_refused(&changed(kind, &[(12, &[1]), (32, &[0xff; 8])]));
    }
    for code in [0u32, 4, 255, 256, 256 + 16, u32::MAX] {
        check_refused(&changed(Kind::ReadFailed, &[(12, &code.to_le_bytes())]));
    }
    for code in [0u64, 6, u64::MAX] {
        check_refused(&changed(Kind::Goodbye, &[(32, &code.to_le_bytes())]));
    }
    check_refused(&changed(Kind::Goodbye, &[(HEADER_BYTES, &[0xff])]));
}

#[test]
fn impossible_configurations_are_refused() {
    let members = HEADER_BYTES + 13;
    let change =
        |at: usize, bytes: &[u8]| check_refused(&changed(Kind::StoreConfig, &[(at, bytes)]));
    // How writes are acknowledged.
    change(HEADER_BYTES + 12, &[3]);
    // How many members there are.
    change(members, &[8]);
    change(members, &[0]);
    // The first member behind the second, and with another role.
    change(members + 1, &[0xff]);
    change(members + 1 + 24, &[2]);
    change(members + 1 + 24, &[0]);
}

#[test]
fn zeros_carry_no_data_and_data_is_as_long_as_its_range() {
    for kind in [
        Kind::Write,
        Kind::Copy,
        Kind::Equalise,
        Kind::Repair,
        Kind::Data,
    ] {
        check_refused(&changed(kind, &[(6, &[1])]));
    }
    // An empty write is one of zeros.
    check_refused(&changed(Kind::Write, &[(12, &[0; 4])]));
    // Data of 0 and of 257 blocks.
    check_refused(&changed(Kind::Data, &[(12, &[0; 4])]));
    check_refused(&changed(Kind::Data, &[(12, &257u32.to_le_bytes())]));
}

#[test]
fn bodies_that_are_too_short_or_too_long_are_refused() {
    for kind in Kind::ALL {
        let frame = frame_of(*kind);
        let (body, data) = (body_bytes(&frame), HEADER_BYTES + body_bytes(&frame));
        let resized = |bytes: usize| {
            let mut resized = frame[..data].to_vec();
            resized.resize(HEADER_BYTES + bytes, 0);
            resized.extend_from_slice(&frame[data..]);
            resized[40..44].copy_from_slice(&(bytes as u32).to_le_bytes());
            reseal(&mut resized);
            resized
        };
        // Text may end anywhere; lists after any entry; greetings may grow.
        let entries = [Kind::Copied, Kind::Positions, Kind::DigestList].contains(kind);
        let text = *kind == Kind::Goodbye;
        for bytes in (0..body).filter(|bytes| !(text || entries && bytes % 16 == 0)) {
            check_refused(&resized(bytes));
        }
        let grows = text || matches!(kind, Kind::Hello | Kind::Welcome);
        if !grows && body < kind.limits().body_bytes_max as usize {
            check_refused(&resized(body + 1));
        }
    }
}

/// Whether the next frame is found, whatever this one says.
fn keeps_framing(frame: &[u8]) -> bool {
    let decoded = decode(frame);
    matches!(decoded, Ok(Decoded::Frame { bytes, .. }) if bytes == frame.len())
        && decode_data(frame).is_ok()
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..300),
        magic in any::<bool>(),
    ) {
        if magic && bytes.len() >= 4 {
            bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        }
        let _ = (decode(&bytes), decode_data(&bytes));
    }

    /// Headers with correct checksums and arbitrary fields over arbitrary bodies.
    #[test]
    fn well_checked_nonsense_never_panics(
        kind in 0..Kind::ALL.len(),
        flags in prop_oneof![Just(0u16), 0u16..8, any::<u16>()],
        count in prop_oneof![0u32..4, any::<u32>()],
        fields in any::<[u64; 3]>(),
        mask in prop_oneof![Just(0u64), Just(0xfff), any::<u64>()],
        body in proptest::collection::vec(any::<u8>(), 0..1000),
        blocks in 0u32..3,
    ) {
        let kind = Kind::ALL[kind];
        let limits = kind.limits();
        let body = &body[..body.len().min(limits.body_bytes_max as usize)];
        let data = (blocks * 4096).min(limits.data_bytes_max);
        let mut frame = vec![0; HEADER_BYTES];
        frame[..4].copy_from_slice(&MAGIC.to_le_bytes());
        frame[4..6].copy_from_slice(&(kind as u16).to_le_bytes());
        frame[6..8].copy_from_slice(&flags.to_le_bytes());
        frame[12..16].copy_from_slice(&count.to_le_bytes());
        for (n, field) in fields.into_iter().enumerate() {
            frame[16 + 8 * n..24 + 8 * n].copy_from_slice(&(field & mask).to_le_bytes());
        }
        frame[40..44].copy_from_slice(&(body.len() as u32).to_le_bytes());
        frame[44..48].copy_from_slice(&data.to_le_bytes());
        frame.extend_from_slice(body);
        reseal(&mut frame);
        frame.resize(frame.len() + data as usize, 0);
        prop_assert!(keeps_framing(&frame));
    }

    /// Valid frames with a few bytes changed under correct checksums. What is accepted none the less
    /// is a frame like any other.
    #[test]
    fn mutated_frames_never_panic(
        index in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        in_body in any::<bool>(),
    ) {
        let frames = all_frames();
        let mut frame = index.get(&frames).clone();
        let body = body_bytes(&frame);
        for (at, byte) in changes {
            // Not the magic, the kind, the lengths and the checksums.
            let at = if in_body && body > 0 { HEADER_BYTES + at.index(body) } else { 6 + at.index(34) };
            frame[at] = byte;
        }
        reseal(&mut frame);
        prop_assert!(keeps_framing(&frame));
    }
}
