//! Every frame comes back as it was sent.

mod common;

use ashlar_engine::SharedBytes;
use ashlar_replication::message::*;
use ashlar_replication::values::*;
use ashlar_wire::proof::{Subject, verify_promise};
use ashlar_wire::*;
use common::*;
use proptest::prelude::*;

fn lift(content: Content<BlockData<'_>>) -> Content<Payload> {
    match content {
        Content::Zeros => Content::Zeros,
        Content::Data(blocks) => {
            assert_eq!(blocks.first_bad_block(), None);
            let crcs = blocks.crcs.iter().map(|crc| crc.get());
            Content::Data(Payload::with_crcs(SharedBytes::copy_of(blocks.data), crcs))
        }
    }
}

#[rustfmt::skip]
fn lift_request(request: Request<BlockData<'_>>) -> Request<Payload> {
    use Request::*;
    match request {
        Fence { epoch } => Fence { epoch },
        StoreConfig { id, configuration, start } => StoreConfig { id, configuration, start },
        Write { sequence, range, content } => Write { sequence, range, content: lift(content) },
        BeginResync { id, pass, sequence } => BeginResync { id, pass, sequence },
        Copy { id, pass, range, steps, content } => Copy { id, pass, range, steps, content: lift(content) },
        MarkComplete { id, pass } => MarkComplete { id, pass },
        Equalise { id, range, positions, content } => Equalise { id, range, positions, content: lift(content) },
        SetLast { id, position } => SetLast { id, position },
        Read { id, range, torn } => Read { id, range, torn },
        Compare { id, extent } => Compare { id, extent },
        Digests { id, from, count } => Digests { id, from, count },
        ListAbove { id, floor, from } => ListAbove { id, floor, from },
        Repair { id, block, position, content } => Repair { id, block, position, content: lift(content) },
    }
}

#[rustfmt::skip]
fn lift_reply(reply: Reply<BlockData<'_>>) -> Reply<Payload> {
    use Reply::*;
    match reply {
        Promised { epoch, state, size_blocks, torn } => Promised { epoch, state, size_blocks, torn },
        Refused { id, refusal } => Refused { id, refusal },
        WriteRefused { sequence, refusal } => WriteRefused { sequence, refusal },
        Done { id } => Done { id },
        Applied { sequence } => Applied { sequence },
        Copied { id, changed } => Copied { id, changed },
        Data { id, result } => Data {
            id,
            result: result.map(|read| ReadData { positions: read.positions, content: lift(read.content) }),
        },
        Positions { id, positions, next, last } => Positions { id, positions, next, last },
        Digests { id, digests } => Digests { id, digests },
    }
}

fn check_request(request: &Request<Payload>) {
    let out = encode_request(request);
    match whole(&out) {
        Frame::Request {
            handle: 5,
            request: back,
        } => assert_eq!(&lift_request(back), request),
        other => panic!("{other:?}"),
    }
}

fn check_reply(reply: &Reply<Payload>) {
    let out = encode_reply(reply);
    match whole(&out) {
        Frame::Reply {
            handle: 5,
            reply: back,
        } => assert_eq!(&lift_reply(back), reply),
        other => panic!("{other:?}"),
    }
    let in_place = decode_data(&out).expect("framing is whole");
    let Reply::Data {
        id,
        result: Ok(read),
    } = reply
    else {
        assert!(in_place.is_none());
        return;
    };
    let (view, bytes) = in_place.expect("an answer with data");
    assert_eq!((view.handle, view.id, bytes), (5, *id, out.len()));
    assert!(view.positions.iter().eq(read.positions.iter().copied()));
    let content = view.blocks.map_or(Content::Zeros, Content::Data);
    assert_eq!(lift(content), read.content);
}

#[test]
fn every_request_comes_back_as_it_was_sent() {
    for count in [1, 3, 256] {
        for content in [Content::Data(payload(count)), Content::Zeros] {
            requests(count, content).iter().for_each(check_request);
        }
    }
}

#[test]
fn every_reply_comes_back_as_it_was_sent() {
    replies().iter().for_each(check_reply);
}

#[test]
fn the_largest_promise_and_lists_fit() {
    let entry = BlockPosition {
        block: BLOCK_MAX,
        position: Position::unpack(u64::MAX),
    };
    let mut out = Vec::new();
    let largest = Promise {
        torn: vec![entry; TORN_MAX],
        ..promise()
    };
    encode::promised(&mut out, &KEY, &CHALLENGES, &subject(), &largest);
    let Frame::Promised { promise: back, .. } = whole(&out) else {
        panic!()
    };
    assert_eq!(back, largest);
    let id = RequestId(1);
    let entries = vec![entry; POSITIONS_MAX];
    check_reply(&Reply::Copied {
        id,
        changed: entries.clone(),
    });
    check_reply(&Reply::Positions {
        id,
        positions: entries,
        next: Some(BLOCK_MAX),
        last: entry.position,
    });
    check_reply(&Reply::Digests {
        id,
        digests: vec![(BLOCK_MAX.extent(), 1); POSITIONS_MAX],
    });
}

#[test]
fn a_goodbye_is_cut_at_a_character() {
    let mut out = Vec::new();
    encode::goodbye(&mut out, GoodbyeCode::Busy, &"é".repeat(300));
    let expected = "é".repeat(256);
    assert_eq!(
        whole(&out),
        Frame::Goodbye {
            code: GoodbyeCode::Busy,
            text: &expected
        }
    );
}

#[test]
fn a_greeting_of_a_later_version_is_read_without_what_it_appended() {
    for frame in all_frames().into_iter().take(2) {
        let body = body_bytes(&frame);
        let mut longer = frame.clone();
        longer.extend_from_slice(&[7; 40]);
        longer[40..44].copy_from_slice(&(body as u32 + 40).to_le_bytes());
        reseal(&mut longer);
        assert_eq!(whole(&longer), whole(&frame));
    }
}

#[test]
fn frames_follow_each_other_without_a_gap() {
    let frames = all_frames();
    let stream = frames.concat();
    let mut at = 0;
    for frame in &frames {
        match decode(&stream[at..]) {
            Ok(Decoded::Frame {
                frame: Ok(_),
                bytes,
            }) => assert_eq!(bytes, frame.len()),
            other => panic!("{other:?}"),
        }
        at += frame.len();
    }
}

proptest! {
    #[test]
    fn any_request_comes_back_as_it_was_sent(request in strategies::request()) {
        check_request(&request);
    }

    #[test]
    fn any_reply_comes_back_as_it_was_sent(reply in strategies::reply()) {
        check_reply(&reply);
    }

    #[test]
    fn any_greeting_comes_back_as_it_was_sent(
        hello in strategies::hello(),
        welcome in strategies::welcome(),
        (code, text) in strategies::goodbye(),
    ) {
        let mut out = Vec::new();
        encode::hello(&mut out, &hello);
        prop_assert_eq!(whole(&out), Frame::Hello(hello));
        out.clear();
        encode::welcome(&mut out, &welcome);
        prop_assert_eq!(whole(&out), Frame::Welcome(welcome));
        out.clear();
        encode::goodbye(&mut out, code, &text);
        prop_assert_eq!(whole(&out), Frame::Goodbye { code, text: &text });
    }

    #[test]
    fn any_attachment_comes_back_as_it_was_sent(
        ids in any::<([u8; 16], u32, [u8; 32], u64)>(),
        member in strategies::member_id(),
        epoch in strategies::epoch(),
        promised in strategies::promise(),
        refusal in strategies::refusal(),
    ) {
        let (volume, handle, proof, echo) = ids;
        let subject = Subject { volume: VolumeId(volume), member, epoch, handle };
        let fence = Fence { subject, proof };
        let mut out = Vec::new();
        encode::fence(&mut out, &fence);
        prop_assert_eq!(whole(&out), Frame::Fence(fence));
        out.clear();
        encode::fence_refused(&mut out, handle, refusal);
        prop_assert_eq!(whole(&out), Frame::FenceRefused { handle, refusal });
        out.clear();
        encode::release(&mut out, handle);
        prop_assert_eq!(whole(&out), Frame::Release { handle });
        out.clear();
        encode::renew(&mut out, echo);
        prop_assert_eq!(whole(&out), Frame::Renew { echo });
        out.clear();
        encode::renewed(&mut out, echo);
        prop_assert_eq!(whole(&out), Frame::Renewed { echo });
        out.clear();
        encode::fenced(&mut out, handle, epoch.number);
        prop_assert_eq!(whole(&out), Frame::Fenced { handle, promised: epoch.number });
        out.clear();
        encode::promised(&mut out, &KEY, &CHALLENGES, &subject, &promised);
        let Frame::Promised { handle: back_handle, promise: back, answer, proof } = whole(&out) else {
            panic!()
        };
        prop_assert_eq!((back_handle, &back), (handle, &promised));
        prop_assert!(verify_promise(&KEY, &CHALLENGES, &subject, answer, &proof));
    }
}
