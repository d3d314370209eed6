//! One frame of each kind, and what the tests need to read and write them.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod strategies;

use ashlar_engine::SharedBytes;
use ashlar_replication::configuration::*;
use ashlar_replication::message::*;
use ashlar_replication::values::*;
use ashlar_wire::proof::{Challenges, Subject, VolumeKey};
use ashlar_wire::*;

pub const KEY: VolumeKey = VolumeKey([7; 32]);
pub const CHALLENGES: Challenges = Challenges {
    client: [1; 16],
    server: [2; 16],
};

pub fn member(n: u8) -> Member {
    let role = if n == 3 { Role::Witness } else { Role::Data };
    Member {
        id: MemberId {
            device: DeviceId([n; 16]),
            nonce: u64::from(n) << 40,
        },
        role,
    }
}

pub fn configuration() -> Configuration {
    Configuration {
        epoch: EpochNumber(77),
        generation: Generation(5),
        ack: Ack::Majority,
        members: vec![member(1), member(2), member(3)],
        previous: vec![member(1), member(4)],
        in_sync: vec![member(1).id, member(2).id],
    }
}

pub fn position(epoch: u32, sequence: u64) -> Position {
    Position {
        epoch: EpochNumber(epoch),
        sequence: Sequence(sequence),
    }
}

pub fn subject() -> Subject {
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

pub fn promise() -> Promise {
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

pub fn requests(count: u32, data: Content<Payload>) -> Vec<Request<Payload>> {
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

pub fn refusals() -> Vec<Refusal> {
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

pub fn replies() -> Vec<Reply<Payload>> {
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

pub fn payload(count: u32) -> Payload {
    let bytes: Vec<u8> = (0..count as usize * BLOCK_BYTES)
        .map(|n| (n * 31 / 7) as u8)
        .collect();
    Payload::new(SharedBytes::copy_of(&bytes))
}

pub fn content_of<P>(request: &Request<P>) -> Option<&P> {
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
pub fn all_frames() -> Vec<Vec<u8>> {
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

pub fn whole(input: &[u8]) -> Frame<'_> {
    match decode(input) {
        Ok(Decoded::Frame {
            frame: Ok(frame),
            bytes,
        }) if bytes == input.len() => frame,
        other => panic!("{other:?}"),
    }
}

/// Makes the checksums of a changed frame right again.
pub fn reseal(frame: &mut [u8]) {
    let body = body_bytes(frame);
    let crc = crc32c::crc32c(&frame[HEADER_BYTES..HEADER_BYTES + body]);
    frame[48..52].copy_from_slice(&crc.to_le_bytes());
    let crc = crc32c::crc32c(&frame[..60]);
    frame[60..64].copy_from_slice(&crc.to_le_bytes());
}

/// From the header.
pub fn body_bytes(frame: &[u8]) -> usize {
    u32::from_le_bytes(frame[40..44].try_into().unwrap()) as usize
}

/// A request with its data behind it.
pub fn encode_request(request: &Request<Payload>) -> Vec<u8> {
    let mut out = Vec::new();
    encode::request(&mut out, 5, request);
    out.extend_from_slice(content_of(request).map_or(&[], |p| &p.data()[..]));
    out
}

/// A reply of [`replies`] or with data.
pub fn encode_reply(reply: &Reply<Payload>) -> Vec<u8> {
    let mut out = Vec::new();
    match reply {
        Reply::Data {
            id,
            result: Ok(read),
        } => match &read.content {
            Content::Data(payload) => {
                encode::data(&mut out, 5, *id, &read.positions, Some(payload.crcs()));
                out.extend_from_slice(payload.data());
            }
            Content::Zeros => encode::data(&mut out, 5, *id, &read.positions, None),
        },
        reply => encode::reply(&mut out, 5, reply),
    }
    out
}
