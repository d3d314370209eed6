//! What peers must not do: garbage, lies about lengths, frames out of place, and taking no answers.
//! Each has a defined end and a counter, and none of it stops the shard from serving others.

mod support;

use std::time::{Duration, Instant};

use ashlar_engine::EngineKind;
use ashlar_replication::message::{
    Content, ReadError, Refusal, Reply, Request, RequestId, TornBlocks,
};
use ashlar_replication::values::{Pass, Sequence};
use ashlar_storage_node::metrics::ShardCounters;
use ashlar_storage_node::shard::{Admission, ShardSettings};
use ashlar_wire::{GoodbyeCode, HEADER_BYTES, Hello, encode};
use proptest::prelude::*;
use support::client::{Client, Received, range, request_bytes, write_bytes};
use support::{BOTH, KEY, MIB, Shard, block, epoch, folder, volume};

/// What the client gets before the connection is closed.
fn goodbye(client: &mut Client) -> (GoodbyeCode, String) {
    let received = client.receive();
    let Received::Goodbye(code, text) = received else {
        panic!("no goodbye: {received:?}");
    };
    assert_eq!(client.receive(), Received::Closed);
    (code, text)
}

/// Seals a header again after a field was changed.
fn reseal(frame: &mut [u8]) {
    let crc = crc32c::crc32c(&frame[..60]);
    frame[60..64].copy_from_slice(&crc.to_le_bytes());
}

/// Offsets in a header (docs/wire-format.md).
const FIELD_COUNT: (usize, usize) = (12, 4);
const FIELD_REQUEST: (usize, usize) = (16, 8);
const FIELD_START: (usize, usize) = (24, 8);
const FIELD_ARGUMENT: (usize, usize) = (32, 8);

/// Changes a field and seals the header again.
fn put(frame: &mut [u8], (offset, bytes): (usize, usize), value: u64) {
    frame[offset..offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    reseal(frame);
}

fn hello_bytes() -> Vec<u8> {
    let mut out = Vec::new();
    encode::hello(&mut out, &Client::hello());
    out
}

#[test]
fn bytes_that_lose_framing_end_the_connection_with_a_reason_and_are_counted() {
    type Counter = fn(&ShardCounters) -> u64;
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, Change, Counter); 5] = [
        ("wrong magic", |f| f[0] ^= 1, |c| c.wrong_magic),
        (
            "checksum of a frame header",
            |f| f[20] ^= 1,
            |c| c.frame_checksum_errors,
        ),
        (
            "checksum of a frame body",
            |f| f[HEADER_BYTES + 3] ^= 1,
            |c| c.frame_checksum_errors,
        ),
        (
            "unknown kind",
            |f| {
                f[4] = 200;
                reseal(f);
            },
            |c| c.unknown_kinds,
        ),
        (
            "exceeds the limit",
            |f| {
                f[40..44].copy_from_slice(&u32::MAX.to_le_bytes());
                reseal(f);
            },
            |c| c.oversized_frames,
        ),
    ];
    for kind in BOTH {
        let shard = Shard::start(kind);
        for (reason, change, counter) in cases {
            let before = counter(&shard.metrics().counters);
            let mut client = Client::connect(&shard.address);
            let mut frame = hello_bytes();
            change(&mut frame);
            client.send(&frame);
            let (code, text) = goodbye(&mut client);
            assert_eq!(code, GoodbyeCode::Protocol);
            assert!(text.contains(reason), "{text:?} is not about {reason}");
            assert_eq!(counter(&shard.metrics().counters), before + 1, "{reason}");
        }
        assert_eq!(shard.gauge("connections_open"), 0.0);
    }
}

#[test]
fn frames_out_of_place_end_the_connection() {
    let shard = Shard::start(EngineKind::IoUring);
    let renew = |out: &mut Vec<u8>| encode::renew(out, 1);
    let welcome = |out: &mut Vec<u8>| encode::renewed(out, 1);
    // Before Hello.
    let mut client = Client::connect(&shard.address);
    client.send_frame(renew);
    assert_eq!(goodbye(&mut client).0, GoodbyeCode::Protocol);
    // An answer, sent to a node.
    let mut client = shard.client();
    client.send_frame(welcome);
    assert_eq!(goodbye(&mut client).0, GoodbyeCode::Protocol);
    // A second Hello.
    let mut client = shard.client();
    client.send(&hello_bytes());
    assert_eq!(goodbye(&mut client).0, GoodbyeCode::Protocol);
    assert_eq!(shard.metrics().counters.misplaced_frames, 3);
}

#[test]
fn no_common_version_is_said_so() {
    let shard = Shard::start(EngineKind::IoUring);
    for (version_min, version_max) in [(2, 9), (0, 0), (9, 2)] {
        let mut client = Client::connect(&shard.address);
        let hello = Hello {
            version_min,
            version_max,
            ..Client::hello()
        };
        client.send_frame(|out| encode::hello(out, &hello));
        let (code, text) = goodbye(&mut client);
        assert_eq!(code, GoodbyeCode::Version);
        assert!(text.contains("speaks version 1"), "{text}");
    }
    assert_eq!(shard.metrics().counters.version_mismatches, 3);
}

#[test]
fn a_stranger_cannot_make_the_node_wait_for_a_large_frame() {
    let shard = Shard::start(EngineKind::IoUring);
    let mut client = shard.client();
    // Only its header: the node must not set memory aside for the rest.
    client.send(&write_bytes(0, 1, 0, &vec![0; 1 << 20])[..HEADER_BYTES]);
    let (_, text) = goodbye(&mut client);
    assert!(text.contains("limit"), "{text}");
    assert_eq!(shard.metrics().counters.oversized_frames, 1);
}

#[test]
fn malformed_requests_are_refused_by_their_number_and_the_connection_goes_on() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 512);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    let id = client.id();
    let resync = Request::BeginResync {
        id,
        pass: Pass(1),
        sequence: Sequence(1),
    };
    // (frame, the field that gets a wrong value)
    let write = write_bytes(0, 1, 255, &block(1));
    let beyond_extent = [
        (write.clone(), FIELD_COUNT, 2u64),
        (write, FIELD_START, 1 << 60),
    ];
    for (mut frame, field, value) in beyond_extent {
        put(&mut frame, field, value);
        client.send(&frame);
        let refused = Reply::WriteRefused {
            sequence: Sequence(1),
            refusal: Refusal::BadRequest,
        };
        assert_eq!(client.receive(), Received::Reply(0, refused));
    }
    // What is no sequence is given back as an id: no frame could carry it as one.
    let mut frame = write_bytes(0, 1, 0, &block(1));
    put(&mut frame, FIELD_REQUEST, 1 << 40);
    client.send(&frame);
    let (id_of_write, refusal) = (RequestId(1 << 40), Refusal::BadRequest);
    let refused = Reply::Refused {
        id: id_of_write,
        refusal,
    };
    assert_eq!(client.receive(), Received::Reply(0, refused));
    let mut frame = request_bytes(0, &resync);
    put(&mut frame, FIELD_ARGUMENT, u64::MAX);
    client.send(&frame);
    assert_eq!(
        client.receive(),
        Received::Reply(0, Reply::Refused { id, refusal })
    );
    let id = client.send_read(0, 511, 1);
    assert!(matches!(client.receive(), Received::Reply(0, Reply::Data { id: of, .. }) if of == id));
    let mut frame = request_bytes(
        0,
        &Request::Read {
            id,
            range: range(511, 1),
            torn: TornBlocks::Refuse,
        },
    );
    put(&mut frame, FIELD_COUNT, 0);
    client.send(&frame);
    let result = Err(ReadError::Refused(refusal));
    assert_eq!(
        client.receive(),
        Received::Reply(0, Reply::Data { id, result })
    );
    assert_eq!(shard.metrics().counters.malformed_frames, 5);
    client.write(0, 1, 0, &block(1));
    // The same in a frame that is no request ends the connection.
    let mut frame = Vec::new();
    encode::renew(&mut frame, 1);
    frame[6] = 0xff;
    reseal(&mut frame);
    client.send(&frame);
    assert_eq!(goodbye(&mut client).0, GoodbyeCode::Protocol);
}

#[test]
fn block_data_that_does_not_match_its_checksum_never_reaches_the_store() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 512);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        client.write(0, 1, 0, &block(1));
        let mut frame = write_bytes(0, 2, 0, &block(2));
        let last = frame.len() - 1;
        frame[last] ^= 0x40;
        client.send(&frame);
        let (code, text) = goodbye(&mut client);
        assert_eq!(code, GoodbyeCode::Protocol);
        assert!(text.contains("checksum"), "{text}");
        let mut client = shard.client();
        let promise = client.fence(volume(1), member, epoch(2), 0);
        assert_eq!(promise.state.last.sequence, Sequence(1));
        assert_eq!(client.read(0, 0, 1).unwrap(), block(1));
        assert_eq!(shard.metrics().counters.data_checksum_errors, 1);
    }
}

#[test]
fn a_frame_cut_short_by_its_sender_is_dropped() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 512);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        let frame = write_bytes(0, 1, 0, &block(1));
        client.send(&frame[..frame.len() - 1]);
        client.finish_sending();
        assert_eq!(client.receive(), Received::Closed);
        let promise = shard.client().fence(volume(1), member, epoch(2), 0);
        assert_eq!(promise.state.last.sequence, Sequence(0));
    }
}

#[test]
fn frames_in_pieces_of_any_size_are_put_together() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 512);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        let mut bytes = Vec::new();
        for n in 1..=3u64 {
            bytes.extend(write_bytes(0, n, n, &block(n)));
        }
        for piece in bytes.chunks(37) {
            client.send(piece);
        }
        client.wait_applied(0, 3);
    }
}

fn small_admission() -> ShardSettings {
    ShardSettings {
        admission: Admission {
            operations_max: 4,
            bytes_max: 256 << 10,
            backlog_bytes_max: 128 << 10,
            total_bytes_max: 384 << 10,
        },
        connections_max: 8,
        ..ShardSettings::default()
    }
}

#[test]
fn what_is_above_the_admission_waits_in_the_socket_and_is_served() {
    for kind in BOTH {
        let shard = Shard::start_with(kind, small_admission(), folder());
        let members = [1, 2, 3].map(|n| shard.create(volume(n), 4096));
        let mut clients: Vec<_> = (0..3).map(|_| shard.client()).collect();
        for (n, client) in clients.iter_mut().enumerate() {
            client.attach(volume(n as u8 + 1), members[n], epoch(1), 0);
        }
        let large = vec![5; 128 << 10];
        std::thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| {
                    for n in 1..=60 {
                        client.send_write(0, n, (n * 32) % 2048, &large);
                    }
                    client.wait_applied(0, 60);
                });
            }
        });
        let counters = shard.metrics().counters;
        assert_eq!(counters.writes, 180);
        assert!(counters.admission_pauses > 0);
        // Nothing of the admission leaked.
        for client in &mut clients {
            client.write(0, 61, 0, &large);
        }
    }
}

#[test]
fn a_peer_that_takes_no_answers_is_read_from_no_more_and_served_again_when_it_does() {
    for kind in BOTH {
        let shard = Shard::start_with(kind, small_admission(), folder());
        let member = shard.create(volume(1), 4096);
        let mut slow = shard.client();
        slow.attach(volume(1), member, epoch(1), 0);
        let data: Vec<u8> = (0..32).flat_map(block).collect();
        slow.write(0, 1, 0, &data);
        // Asks and asks, and takes nothing, until the node takes nothing either.
        slow.set_nonblocking_sends();
        let request = |id| {
            let id = RequestId(1000 + id);
            let torn = TornBlocks::Refuse;
            request_bytes(
                0,
                &Request::Read {
                    id,
                    range: range(0, 32),
                    torn,
                },
            )
        };
        let mut asked = 0u64;
        let mut pending = Vec::new();
        loop {
            let bytes = request(asked);
            match slow.send_some(&bytes) {
                sent if sent == bytes.len() => asked += 1,
                sent => {
                    pending.extend_from_slice(&bytes[sent..]);
                    asked += 1;
                    break;
                }
            }
            assert!(asked < 1_000_000, "the node takes everything");
        }
        assert!(shard.metrics().counters.backlog_pauses > 0);
        // Others are served.
        let mut other = shard.client();
        assert_eq!(
            other.read(0, 0, 1),
            Err(ReadError::Refused(Refusal::UnknownReplica))
        );
        // It takes its answers: all of them come, in order, and it can go on.
        for n in 0..asked {
            if n == asked - 1 {
                slow.send(&pending);
            }
            match slow.receive() {
                Received::Reply(0, Reply::Data { id, result }) => {
                    assert_eq!(id.0, 1000 + n);
                    assert!(result.unwrap().content == Content::Data(data.clone()));
                }
                other => panic!("{kind} {n} of {asked}: {other:?} {:?}", shard.metrics()),
            }
        }
        slow.write(0, 2, 0, &block(2));
    }
}

#[test]
fn too_many_connections_are_told_so_and_places_become_free_again() {
    let shard = Shard::start_with(EngineKind::IoUring, small_admission(), folder());
    let mut clients: Vec<_> = (0..8).map(|_| shard.client()).collect();
    let mut ninth = Client::connect(&shard.address);
    assert_eq!(goodbye(&mut ninth).0, GoodbyeCode::Busy);
    assert_eq!(shard.metrics().counters.connections_refused, 1);
    clients.pop();
    let deadline = Instant::now() + Duration::from_secs(10);
    while shard.gauge("connections_open") > 7.0 {
        assert!(Instant::now() < deadline, "the place stays taken");
    }
    shard.client();
}

#[test]
fn a_goodbye_of_the_peer_frees_its_place_though_it_keeps_the_socket() {
    let shard = Shard::start_with(EngineKind::IoUring, small_admission(), folder());
    let mut leaving = Vec::new();
    for _ in 0..30 {
        let mut client = shard.client();
        client.send_frame(|out| encode::goodbye(out, GoodbyeCode::ShuttingDown, "bye"));
        assert_eq!(client.receive(), Received::Closed);
        leaving.push(client);
    }
    assert_eq!(shard.gauge("connections_open"), 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_of_a_stranger_stop_the_shard(chunks in prop::collection::vec(
        prop::collection::vec(any::<u8>(), 0..300), 1..5), greet in any::<bool>())
    {
        let shard = Shard::shared();
        let mut client = if greet { shard.client() } else { Client::connect(&shard.address) };
        for chunk in &chunks {
            let _ = client.try_send(chunk);
        }
        client.finish_sending();
        while !matches!(client.receive(), Received::Closed) {}
        shard.client();
    }

    #[test]
    fn no_changed_frame_of_an_attached_peer_stops_the_shard(
        changes in prop::collection::vec((0usize..400, any::<u8>(), any::<bool>()), 1..6),
        which in 0usize..6,
    ) {
        let shard = Shard::shared();
        let member = shard.member(volume(1));
        let mut client = shard.client();
        client.send_fence(Client::subject(volume(1), member, epoch(1), 0), KEY);
        let promised = matches!(client.receive(), Received::Promised(_, true));
        prop_assert!(promised);
        let id = client.id();
        let data = block(1);
        let content = Content::Data(&data[..]);
        let frames = [
            write_bytes(0, 1, 0, &data),
            request_bytes(0, &Request::BeginResync { id, pass: Pass(9), sequence: Sequence(1) }),
            request_bytes(0, &Request::Equalise { id, range: range(0, 1), positions: vec![Default::default()], content }),
            request_bytes(0, &Request::StoreConfig { id, configuration: support::configuration(member, 1, 2), start: vec![member] }),
            request_bytes(0, &Request::Digests { id, from: Default::default(), count: 7 }),
            hello_bytes(),
        ];
        let mut frame = frames[which].clone();
        for (place, value, right_crc) in changes {
            let place = place % frame.len();
            frame[place] = value;
            if right_crc {
                let body = u32::from_le_bytes(frame[40..44].try_into().unwrap()) as usize;
                if let Some(body) = frame.get(HEADER_BYTES..HEADER_BYTES.saturating_add(body)) {
                    let crc = crc32c::crc32c(body);
                    frame[48..52].copy_from_slice(&crc.to_le_bytes());
                }
                reseal(&mut frame);
            }
        }
        let _ = client.try_send(&frame);
        client.finish_sending();
        while !matches!(client.receive(), Received::Closed) {}
        shard.client();
    }
}

#[test]
fn limits_of_the_default_settings_fit_the_memory_that_a_node_may_take() {
    let settings = ShardSettings::default();
    assert!(settings.admission.total_bytes_max <= 64 * MIB);
    assert!(settings.admission.bytes_max <= settings.admission.total_bytes_max);
}
