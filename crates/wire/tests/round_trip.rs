//! Every frame survives the way there and back; nothing else gets through, and nothing panics.

use ashlar_engine::SharedBytes;
use ashlar_replication::configuration::*;
use ashlar_replication::message::*;
use ashlar_replication::values::*;
use ashlar_wire::proof::{Challenges, Subject, VolumeKey, verify_fence, verify_promise};
use ashlar_wire::*;
use proptest::prelude::*;
use zerocopy::little_endian::U32;

const KEY: VolumeKey = VolumeKey([7; 32]);
const CHALLENGES: Challenges = Challenges {
    client: [1; 16],
    server: [2; 16],
};

fn member(n: u8) -> Member {
    let role = if n == 3 { Role::Witness } else { Role::Data };
    Member {
        id: MemberId {
            device: DeviceId([n; 16]),
            nonce: u64::from(n) << 40,
        },
        role,
    }
}

fn configuration() -> Configuration {
    Configuration {
        epoch: EpochNumber(77),
        generation: Generation(5),
        ack: Ack::Majority,
        members: vec![member(1), member(2), member(3)],
        previous: vec![member(1), member(4)],
        in_sync: vec![member(1).id, member(2).id],
    }
}

fn position(epoch: u32, sequence: u64) -> Position {
    Position {
        epoch: EpochNumber(epoch),
        sequence: Sequence(sequence),
    }
}

fn subject() -> Subject {
    Subject {
        volume: VolumeId([9; 16]),
        member: member(1).id,
        epoch: Epoch {
            number: EpochNumber(78),
            nonce: 0xdead_beef,
        },
        handle: 12,
    }
}

fn promise() -> Promise {
    Promise {
        epoch: subject().epoch,
        state: MemberState {
            id: member(1).id,
            role: Role::Data,
            promised: subject().epoch,
            configuration: Some(configuration()),
            state: ReplicaState::Resyncing {
                epoch: EpochNumber(76),
                pass: Pass(3),
            },
            last_pass: (EpochNumber(76), Pass(3)),
            last: position(77, 1 << 39),
        },
        size_blocks: 1 << 30,
        torn: vec![BlockPosition {
            block: Block(5),
            position: position(76, 4),
        }],
    }
}

fn requests(count: u32, data: Content<Payload>) -> Vec<Request<Payload>> {
    let id = RequestId(u64::MAX - 1);
    let range = BlockRange {
        start: Block(512),
        count,
    };
    let step = CopyStep {
        expected: position(1, 2),
        position: position(3, 4),
    };
    let one = |content: &Content<Payload>| match content {
        Content::Data(payload) => Content::Data(payload.slice(0, 1)),
        Content::Zeros => Content::Zeros,
    };
    vec![
        Request::StoreConfig {
            id,
            configuration: configuration(),
            start: vec![member(1).id],
        },
        Request::Write {
            sequence: Sequence::MAX,
            range,
            content: data.clone(),
        },
        Request::BeginResync {
            id,
            pass: Pass(9),
            sequence: Sequence(10),
        },
        Request::Copy {
            id,
            pass: Pass(9),
            range,
            steps: vec![step; count as usize],
            content: data.clone(),
        },
        Request::MarkComplete { id, pass: Pass(9) },
        Request::Repair {
            id,
            block: Block(3),
            position: position(5, 6),
            content: one(&data),
        },
        Request::Equalise {
            id,
            range,
            positions: vec![position(8, 9); count as usize],
            content: data,
        },
        Request::SetLast {
            id,
            position: position(7, 8),
        },
        Request::Read {
            id,
            range,
            torn: TornBlocks::Serve,
        },
        Request::Read {
            id,
            range,
            torn: TornBlocks::Refuse,
        },
        Request::Compare {
            id,
            extent: ExtentIndex(4),
        },
        Request::Digests {
            id,
            from: ExtentIndex(4),
            count: 4096,
        },
        Request::ListAbove {
            id,
            floor: position(1, 1),
            from: Block(100),
        },
    ]
}

fn refusals() -> Vec<Refusal> {
    vec![
        Refusal::Fenced {
            promised: EpochNumber(99),
        },
        Refusal::UnknownReplica,
        Refusal::NotStarted,
        Refusal::Gap {
            last: position(2, 3),
        },
        Refusal::StalePass,
        Refusal::NotComplete,
        Refusal::AlreadyStarted,
        Refusal::NotMember,
        Refusal::OlderConfiguration,
        Refusal::Witness,
        Refusal::Evicted,
        Refusal::DeviceFull,
        Refusal::DeviceClosed,
        Refusal::BadRequest,
        Refusal::Unauthenticated,
    ]
}

fn replies() -> Vec<Reply<Payload>> {
    let id = RequestId(41);
    let list = vec![
        BlockPosition {
            block: Block(1),
            position: position(2, 3)
        };
        3
    ];
    let mut replies = vec![
        Reply::Done { id },
        Reply::Applied {
            sequence: Sequence(5),
        },
        Reply::Copied {
            id,
            changed: list.clone(),
        },
        Reply::Positions {
            id,
            positions: list.clone(),
            next: Some(Block(0)),
            last: position(6, 7),
        },
        Reply::Positions {
            id,
            positions: vec![],
            next: None,
            last: position(6, 7),
        },
        Reply::Digests {
            id,
            digests: vec![(ExtentIndex(3), u64::MAX), (ExtentIndex(4), 1)],
        },
    ];
    let errors = [
        ReadError::Checksum {
            block: Block(6),
            position: position(1, 2),
        },
        ReadError::Torn {
            block: Block(6),
            position: position(1, 2),
        },
        ReadError::Device,
    ];
    let refused = refusals().into_iter().map(ReadError::Refused);
    let errors = errors.into_iter().chain(refused);
    replies.extend(errors.map(|error| Reply::Data {
        id,
        result: Err(error),
    }));
    for refusal in refusals() {
        replies.push(Reply::Refused { id, refusal });
        replies.push(Reply::WriteRefused {
            sequence: Sequence(8),
            refusal,
        });
    }
    replies
}

fn payload(count: u32) -> Payload {
    let bytes: Vec<u8> = (0..count as usize * BLOCK_BYTES)
        .map(|n| (n * 31 / 7) as u8)
        .collect();
    Payload::new(SharedBytes::copy_of(&bytes))
}

fn content_of<P>(request: &Request<P>) -> Option<&P> {
    match request {
        Request::Write {
            content: Content::Data(p),
            ..
        }
        | Request::Copy {
            content: Content::Data(p),
            ..
        }
        | Request::Equalise {
            content: Content::Data(p),
            ..
        }
        | Request::Repair {
            content: Content::Data(p),
            ..
        } => Some(p),
        _ => None,
    }
}

/// Every kind of frame once, as bytes.
fn all_frames() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut add = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&mut out);
        frames.push(out);
    };
    let hello = Hello {
        version_min: 1,
        version_max: 2,
        features: 3,
        nonce: [4; 16],
        initiator: [5; 16],
    };
    add(&|out| encode::hello(out, &hello));
    let welcome = Welcome {
        version: 1,
        features: 0,
        nonce: [6; 16],
        node: [7; 16],
        device: DeviceId([8; 16]),
        operations_max: 9,
        bytes_max: 10,
        lease_ms: 11,
    };
    add(&|out| encode::welcome(out, &welcome));
    add(&|out| encode::goodbye(out, GoodbyeCode::Protocol, "lost framing"));
    let proof = ashlar_wire::proof::fence_proof(&KEY, &CHALLENGES, &subject());
    add(&|out| {
        encode::fence(
            out,
            &Fence {
                subject: subject(),
                proof,
            },
        )
    });
    add(&|out| encode::promised(out, &KEY, &CHALLENGES, &subject(), &promise()));
    add(&|out| encode::fence_refused(out, 1, Refusal::Unauthenticated));
    add(&|out| encode::release(out, 1));
    add(&|out| encode::renew(out, 2));
    add(&|out| encode::renewed(out, 2));
    add(&|out| encode::fenced(out, 1, EpochNumber(3)));
    for request in requests(3, Content::Data(payload(3))) {
        add(&|out| {
            encode::request(out, 5, &request);
            out.extend_from_slice(content_of(&request).map_or(&[], |p| &p.data()[..]));
        });
    }
    for reply in replies() {
        add(&|out| encode::reply(out, 5, &reply));
    }
    let data = payload(2);
    add(&|out| {
        encode::data(
            out,
            5,
            RequestId(1),
            &[position(1, 2); 2],
            Some(data.crcs()),
        );
        out.extend_from_slice(data.data());
    });
    add(&|out| encode::data(out, 5, RequestId(1), &[position(1, 2); 2], None));
    frames
}

fn whole(input: &[u8]) -> Frame<'_> {
    match decode(input) {
        Ok(Decoded::Frame {
            frame: Ok(frame),
            bytes,
        }) if bytes == input.len() => frame,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_request_comes_back_as_it_was_sent() {
    for content in [Content::Data(payload(256)), Content::Zeros] {
        for request in requests(256, content) {
            let mut out = Vec::new();
            encode::request(&mut out, 5, &request);
            out.extend_from_slice(content_of(&request).map_or(&[], |p| &p.data()[..]));
            let Frame::Request {
                handle: 5,
                request: back,
            } = whole(&out)
            else {
                panic!()
            };
            if let Some(blocks) = content_of(&back) {
                assert_eq!(blocks.first_bad_block(), None);
                assert_eq!(blocks.data, &content_of(&request).unwrap().data()[..]);
            }
            let mut again = Vec::new();
            encode::request(&mut again, 5, &back);
            again.extend_from_slice(content_of(&back).map_or(&[], |b| b.data));
            assert_eq!(again, out);
        }
    }
}

#[test]
fn every_reply_comes_back_as_it_was_sent() {
    for reply in replies() {
        let mut out = Vec::new();
        encode::reply(&mut out, 6, &reply);
        let Frame::Reply {
            handle: 6,
            reply: back,
        } = whole(&out)
        else {
            panic!()
        };
        let mut again = Vec::new();
        encode::reply(&mut again, 6, &back);
        assert_eq!((format!("{reply:?}"), again), (format!("{back:?}"), out));
    }
}

#[test]
fn proofs_bind_key_connection_epoch_handle_and_answer() {
    let proof = ashlar_wire::proof::fence_proof(&KEY, &CHALLENGES, &subject());
    assert!(verify_fence(&KEY, &CHALLENGES, &subject(), &proof));
    assert!(!verify_fence(
        &VolumeKey([8; 32]),
        &CHALLENGES,
        &subject(),
        &proof
    ));
    let other = Challenges {
        server: [3; 16],
        ..CHALLENGES
    };
    assert!(!verify_fence(&KEY, &other, &subject(), &proof));
    for change in [
        Subject {
            handle: 13,
            ..subject()
        },
        Subject {
            volume: VolumeId([1; 16]),
            ..subject()
        },
        Subject {
            member: member(2).id,
            ..subject()
        },
        Subject {
            epoch: Epoch {
                nonce: 1,
                ..subject().epoch
            },
            ..subject()
        },
    ] {
        assert!(
            !verify_fence(&KEY, &CHALLENGES, &change, &proof),
            "{change:?}"
        );
    }
    let mut out = Vec::new();
    encode::promised(&mut out, &KEY, &CHALLENGES, &subject(), &promise());
    let Frame::Promised {
        handle: 12,
        promise: back,
        answer,
        proof,
    } = whole(&out)
    else {
        panic!()
    };
    assert_eq!(back, promise());
    assert!(verify_promise(
        &KEY,
        &CHALLENGES,
        &subject(),
        answer,
        &proof
    ));
    assert!(!verify_promise(
        &KEY,
        &CHALLENGES,
        &subject(),
        &answer[1..],
        &proof
    ));
    // A fence's proof is none of a promise: the labels differ.
    let fence = ashlar_wire::proof::fence_proof(&KEY, &CHALLENGES, &subject());
    assert!(!verify_promise(
        &KEY,
        &CHALLENGES,
        &subject(),
        answer,
        &fence
    ));
}

#[test]
fn every_prefix_of_a_frame_is_incomplete_and_asks_for_no_more_than_the_frame() {
    for frame in all_frames() {
        for end in 0..frame.len().min(600) {
            match decode(&frame[..end]) {
                Ok(Decoded::Incomplete { need }) => {
                    assert!(need > end && need <= frame.len().max(64))
                }
                other => panic!("{end} bytes: {other:?}"),
            }
        }
    }
}

#[test]
fn every_flipped_bit_of_header_or_body_is_noticed() {
    for frame in all_frames() {
        let header = &frame[..HEADER_BYTES];
        let body = u32::from_le_bytes(header[40..44].try_into().unwrap()) as usize;
        for bit in 0..(HEADER_BYTES + body) * 8 {
            let mut broken = frame.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            let error = decode(&broken).expect_err("a flipped bit got through");
            assert!(error.loses_framing());
        }
    }
}

#[test]
fn lengths_above_their_limits_are_refused_before_the_bytes_arrive() {
    let mut out = Vec::new();
    encode::renew(&mut out, 1);
    for (at, value) in [
        (40, BODY_BYTES_MAX + 1),
        (44, DATA_BYTES_MAX + 4096),
        (44, 5),
    ] {
        let mut frame = out.clone();
        frame[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let crc = crc32c::crc32c(&frame[..60]);
        frame[60..64].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(decode(&frame), Err(WireError::Limit { .. })));
    }
}

#[test]
fn a_bad_block_is_found_by_its_receiver() {
    let payload = payload(4);
    let mut data = payload.data().to_vec();
    data[2 * BLOCK_BYTES + 5] ^= 1;
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

/// What peers of other builds send must stay what it is: the bytes of a few frames, as a checksum.
#[test]
fn the_encoding_does_not_drift() {
    let mut all = Vec::new();
    all_frames()
        .iter()
        .for_each(|frame| all.extend_from_slice(frame));
    assert_eq!(
        (all.len(), crc32c::crc32c(&all)),
        (ENCODED_BYTES, ENCODED_CRC)
    );
}
const ENCODED_BYTES: usize = 55_240;
const ENCODED_CRC: u32 = 2_273_708_388;

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
    }

    /// Headers with correct checksums and arbitrary fields over arbitrary bodies.
    #[test]
    fn well_checked_nonsense_never_panics(
        kind in prop_oneof![0u16..80, any::<u16>()],
        fields in any::<[u8; 34]>(),
        small in any::<bool>(),
        body in proptest::collection::vec(any::<u8>(), 0..400),
        blocks in 0usize..3,
    ) {
        let mut frame = vec![0; HEADER_BYTES];
        frame[..4].copy_from_slice(&MAGIC.to_le_bytes());
        frame[4..6].copy_from_slice(&kind.to_le_bytes());
        frame[6..40].copy_from_slice(&fields);
        if small {
            frame[12..16].copy_from_slice(&u32::from(fields[0] % 4).to_le_bytes());
            frame[24..40].fill(0);
        }
        frame[40..44].copy_from_slice(&(body.len() as u32).to_le_bytes());
        frame[44..48].copy_from_slice(&((blocks * BLOCK_BYTES) as u32).to_le_bytes());
        frame[48..52].copy_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        let crc = crc32c::crc32c(&frame[..60]);
        frame[60..64].copy_from_slice(&crc.to_le_bytes());
        frame.extend_from_slice(&body);
        frame.resize(frame.len() + blocks * BLOCK_BYTES, 0);
        let _ = decode(&frame);
    }

    /// Valid frames with a few bytes of the body changed under a correct checksum.
    #[test]
    fn mutated_bodies_never_panic(
        index in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let frames = all_frames();
        let mut frame = index.get(&frames).clone();
        let body = u32::from_le_bytes(frame[40..44].try_into().unwrap()) as usize;
        if body > 0 {
            for (at, byte) in changes {
                frame[HEADER_BYTES + at.index(body)] = byte;
            }
            let crc = crc32c::crc32c(&frame[HEADER_BYTES..HEADER_BYTES + body]);
            frame[48..52].copy_from_slice(&crc.to_le_bytes());
            let crc = crc32c::crc32c(&frame[..60]);
            frame[60..64].copy_from_slice(&crc.to_le_bytes());
            let _ = decode(&frame);
        }
    }
}
