//! A shard over real sockets, spoken to frame by frame.

mod support;

use ashlar_engine::{Address, EngineKind};
use ashlar_replication::message::{Content, ReadError, Refusal, Reply, Request, TornBlocks};
use ashlar_replication::values::{DeviceId, Epoch, EpochNumber, MemberId, Position, Sequence};
use ashlar_storage_node::shard::commands::Command;
use ashlar_wire::{GoodbyeCode, encode};
use support::client::{Client, Received, range};
use support::requests::{position, refused, write};
use support::{BOTH, KEY, Shard, block, configuration, epoch, volume};

#[test]
fn what_is_written_is_read_on_both_engines() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 2048);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        client.write(0, 1, 5, &block(1));
        let large: Vec<u8> = (0..256).flat_map(block).collect();
        client.write(0, 2, 256, &large);
        let zeros = Request::Write {
            sequence: Sequence(3),
            range: range(300, 2),
            content: Content::Zeros,
        };
        client.send_request(0, &zeros);
        client.wait_applied(0, 3);
        assert_eq!(client.read(0, 5, 1).unwrap(), block(1));
        assert_eq!(client.read(0, 6, 1).unwrap(), vec![0; 4096]);
        let mut expected = large;
        expected[44 * 4096..46 * 4096].fill(0);
        assert!(client.read(0, 256, 256).unwrap() == expected);
        assert_eq!(shard.metrics().counters.writes, 3);
    }
}

#[test]
fn acknowledged_writes_are_there_after_a_restart_and_last_goes_on() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 2048);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        (1..=20).for_each(|n| client.write(0, n, n * 7, &block(n)));
        let shard = shard.restart(kind);
        let mut client = shard.client();
        let promise = client.fence(volume(1), member, epoch(2), 0);
        assert_eq!(promise.state.last, position(1, 20));
        assert_eq!(promise.size_blocks, 2048);
        (1..=20).for_each(|n| assert_eq!(client.read(0, n * 7, 1).unwrap(), block(n)));
    }
}

#[test]
fn a_stopping_shard_says_goodbye_and_leaves_nothing_to_recover() {
    let mut shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 2048);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 0, &block(1));
    shard.stop();
    let goodbye = client.receive();
    assert!(
        matches!(
            &goodbye,
            Received::Goodbye(GoodbyeCode::ShuttingDown, text) if text.contains("stops")
        ),
        "{goodbye:?}"
    );
    assert_eq!(client.receive(), Received::Closed);
}

#[test]
fn the_handshake_tells_device_and_limits_and_its_challenge_is_fresh() {
    let shard = Shard::start(EngineKind::IoUring);
    let first = Client::connect(&shard.address).greet();
    let second = Client::connect(&shard.address).greet();
    assert_eq!(first.device, shard.device);
    assert_eq!((first.lease_ms, first.features), (3000, 0));
    assert!(first.operations_max > 0 && first.bytes_max > 1 << 20);
    assert_ne!(first.nonce, second.nonce);
}

#[test]
fn a_fence_without_the_key_is_refused_and_changes_nothing() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 256);
    let mut client = shard.client();
    let subject = Client::subject(volume(1), member, epoch(9), 0);
    client.send_fence(subject, [8; 32]);
    assert_eq!(
        client.receive(),
        Received::FenceRefused(0, Refusal::Unauthenticated)
    );
    // A proof that was right on another connection is not on this one.
    let other = shard.client();
    let mut stolen = Vec::new();
    let proof = {
        let challenges = ashlar_wire::proof::Challenges {
            client: [3; 16],
            server: other.server_nonce(),
        };
        ashlar_wire::proof::fence_proof(&ashlar_wire::proof::VolumeKey(KEY), &challenges, &subject)
    };
    encode::fence(&mut stolen, &ashlar_wire::Fence { subject, proof });
    client.send(&stolen);
    assert_eq!(
        client.receive(),
        Received::FenceRefused(0, Refusal::Unauthenticated)
    );
    assert_eq!(shard.metrics().counters.unauthenticated_fences, 2);
    let read = client.read(0, 0, 1);
    assert_eq!(read, Err(ReadError::Refused(Refusal::UnknownReplica)));
    let promise = client.fence(volume(1), member, epoch(1), 0);
    assert_eq!(promise.state.promised, epoch(1));
}

#[test]
fn fences_of_strangers_are_refused_by_name() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 256);
    let mut client = shard.client();
    let unknown = [
        Client::subject(volume(2), member, epoch(1), 0),
        // Another life of the replica, and another device.
        Client::subject(
            volume(1),
            MemberId {
                nonce: 77,
                ..member
            },
            epoch(1),
            0,
        ),
        Client::subject(
            volume(1),
            MemberId {
                device: DeviceId([1; 16]),
                ..member
            },
            epoch(1),
            0,
        ),
    ];
    for subject in unknown {
        client.send_fence(subject, KEY);
        assert_eq!(
            client.receive(),
            Received::FenceRefused(0, Refusal::UnknownReplica)
        );
    }
    client.send_fence(Client::subject(volume(1), member, epoch(1), 1 << 16), KEY);
    assert_eq!(
        client.receive(),
        Received::FenceRefused(1 << 16, Refusal::BadRequest)
    );
}

#[test]
fn a_number_is_promised_to_the_first_nonce_only_and_again_to_the_same() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 256);
    let mut client = shard.client();
    client.fence(volume(1), member, epoch(5), 0);
    client.fence(volume(1), member, epoch(5), 0);
    for late in [
        Epoch {
            number: EpochNumber(5),
            nonce: 1,
        },
        epoch(4),
    ] {
        client.send_fence(Client::subject(volume(1), member, late, 1), KEY);
        let promised = EpochNumber(5);
        assert_eq!(
            client.receive(),
            Received::FenceRefused(1, Refusal::Fenced { promised })
        );
    }
    assert_eq!(shard.metrics().counters.fenced_requests, 2);
}

#[test]
fn requests_of_a_superseded_epoch_are_refused() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 256);
    let mut old = shard.client();
    old.attach(volume(1), member, epoch(1), 3);
    old.write(3, 1, 0, &block(1));
    let mut new = shard.client();
    new.fence(volume(1), member, epoch(2), 0);
    let promised = EpochNumber(2);
    assert_eq!(old.receive(), Received::Fenced(3, promised));
    let fenced = Refusal::Fenced { promised };
    assert_eq!(refused(&mut old, 3, &write(2, 0, &block(2))), fenced);
    assert_eq!(old.read(3, 0, 1), Err(ReadError::Refused(fenced)));
    let store = Request::StoreConfig {
        id: old.id(),
        configuration: configuration(member, 1, 9),
        start: vec![member],
    };
    assert_eq!(refused(&mut old, 3, &store), fenced);
    assert_eq!(new.read(0, 0, 1).unwrap(), block(1));
}

#[test]
fn the_notice_of_a_newer_epoch_comes_before_any_later_renewal() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let members = [shard.create(volume(1), 256), shard.create(volume(2), 256)];
        let mut old = shard.client();
        old.attach(volume(1), members[0], epoch(1), 0);
        old.attach(volume(2), members[1], epoch(1), 1);
        old.send_frame(|out| encode::renew(out, 41));
        assert_eq!(old.receive(), Received::Renewed(41));
        let mut new = shard.client();
        new.fence(volume(2), members[1], epoch(2), 0);
        old.send_frame(|out| encode::renew(out, 42));
        assert_eq!(old.receive(), Received::Fenced(1, EpochNumber(2)));
        assert_eq!(old.receive(), Received::Renewed(42));
        // The other volume of the connection goes on.
        old.write(0, 1, 0, &block(1));
    }
}

#[test]
fn writes_are_applied_in_order_and_gaps_are_refused() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 256);
    let mut client = shard.client();
    client.fence(volume(1), member, epoch(1), 0);
    let early = refused(&mut client, 0, &write(1, 0, &block(1)));
    assert_eq!(early, Refusal::NotStarted);
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 0, &block(1));
    let gap = refused(&mut client, 0, &write(3, 0, &block(3)));
    assert_eq!(
        gap,
        Refusal::Gap {
            last: position(1, 1)
        }
    );
    // Repeated, also with other content: answered again, not applied again.
    client.write(0, 1, 0, &block(99));
    assert_eq!(client.read(0, 0, 1).unwrap(), block(1));
    let outside = refused(&mut client, 0, &write(2, 256, &block(2)));
    assert_eq!(outside, Refusal::BadRequest);
    client.write(0, 2, 255, &block(2));
    // A pipeline is answered cumulatively.
    for n in 3..200 {
        client.send_write(0, n, n % 256, &block(n));
    }
    client.wait_applied(0, 199);
}

#[test]
fn a_promise_tells_only_writes_that_are_durable() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 256);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    // Fence of the same epoch right behind writes, as after a reconnect.
    let mut bytes = Vec::new();
    (1..=50).for_each(|n| bytes.extend(support::client::write_bytes(0, n, n, &block(n))));
    client.send(&bytes);
    client.send_fence(Client::subject(volume(1), member, epoch(1), 0), KEY);
    let mut applied = 0;
    loop {
        match client.receive() {
            Received::Reply(0, Reply::Applied { sequence }) => applied = sequence.0,
            Received::Promised(promise, true) => {
                // It was submitted behind them: they are durable before it.
                assert_eq!(promise.state.last, position(1, 50));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    if applied < 50 {
        client.wait_applied(0, 50);
    }
}

#[test]
fn a_handle_means_one_volume_until_it_is_released() {
    let shard = Shard::start(EngineKind::IoUring);
    let members = [shard.create(volume(1), 256), shard.create(volume(2), 256)];
    let mut client = shard.client();
    client.attach(volume(1), members[0], epoch(1), 0);
    client.send_fence(Client::subject(volume(2), members[1], epoch(1), 0), KEY);
    assert_eq!(
        client.receive(),
        Received::FenceRefused(0, Refusal::BadRequest)
    );
    client.write(0, 1, 0, &block(1));
    client.send_frame(|out| encode::release(out, 0));
    let unknown = refused(&mut client, 0, &write(2, 0, &block(2)));
    assert_eq!(unknown, Refusal::UnknownReplica);
    assert_eq!(shard.metrics().counters.unknown_handles, 1);
    client.attach(volume(2), members[1], epoch(1), 0);
    assert_eq!(client.read(0, 0, 1).unwrap(), vec![0; 4096]);
}

#[test]
fn no_answer_of_a_released_attachment_reaches_its_handles_next_volume() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let members = [shard.create(volume(1), 2048), shard.create(volume(2), 2048)];
        let mut client = shard.client();
        client.attach(volume(1), members[0], epoch(1), 0);
        // Sent at once: the writes are under way when their handle changes its meaning.
        let mut bytes = Vec::new();
        (1..=20).for_each(|n| bytes.extend(support::client::write_bytes(0, n, n, &block(n))));
        encode::release(&mut bytes, 0);
        client.send(&bytes);
        client.send_fence(Client::subject(volume(2), members[1], epoch(1), 0), KEY);
        loop {
            match client.receive() {
                Received::Promised(promise, true) => {
                    assert_eq!(promise.state.id, members[1]);
                    break;
                }
                // Before the release.
                Received::Reply(0, Reply::Applied { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        client.set_patience(std::time::Duration::from_millis(100));
        assert_eq!(client.receive(), Received::Silence);
    }
}

#[test]
fn many_volumes_share_a_connection() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let members: Vec<_> = (0..60).map(|n| shard.create(volume(n), 512)).collect();
        let mut client = shard.client();
        for (n, member) in members.iter().enumerate() {
            client.attach(volume(n as u8), *member, epoch(1), n as u32);
        }
        for sequence in 1..=3 {
            for n in 0..60 {
                client.send_write(n, sequence, 3, &block(u64::from(n) + sequence));
            }
        }
        let mut applied = [0; 60];
        while applied.iter().any(|sequence| *sequence < 3) {
            match client.receive() {
                Received::Reply(handle, Reply::Applied { sequence }) => {
                    assert!(sequence.0 > applied[handle as usize], "never backwards");
                    applied[handle as usize] = sequence.0;
                }
                other => panic!("{other:?}"),
            }
        }
        for n in 0..60 {
            assert_eq!(client.read(n, 3, 1).unwrap(), block(u64::from(n) + 3));
        }
    }
}

#[test]
fn an_evicted_replica_takes_no_writes_until_it_is_readmitted() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 512);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 4, &block(1));
    shard
        .ask(|answer| Command::SetEvicted(volume(1), true, answer))
        .unwrap();
    let evicted = refused(&mut client, 0, &write(2, 4, &block(2)));
    assert_eq!(evicted, Refusal::Evicted);
    assert_eq!(client.read(0, 4, 1).unwrap(), block(1));
    shard
        .ask(|answer| Command::SetEvicted(volume(1), false, answer))
        .unwrap();
    client.write(0, 2, 4, &block(2));
}

#[test]
fn a_deleted_replica_refuses_everything_also_when_its_volume_is_made_anew() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 512);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 4, &block(1));
    shard
        .ask(|answer| Command::Delete(volume(1), member.nonce, answer))
        .unwrap();
    let gone = refused(&mut client, 0, &write(2, 4, &block(2)));
    assert_eq!(gone, Refusal::UnknownReplica);
    let member = shard.create(volume(1), 512);
    // Of the same volume but another life.
    let gone = refused(&mut client, 0, &write(2, 4, &block(2)));
    assert_eq!(gone, Refusal::UnknownReplica);
    let promise = client.fence(volume(1), member, epoch(1), 1);
    assert_eq!(promise.state.last, Position::ZERO);
    assert_eq!(client.read(1, 4, 1).unwrap(), vec![0; 4096]);
}

#[test]
fn torn_blocks_are_served_only_where_asked_for_and_reads_outside_are_refused() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 300);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    assert_eq!(
        client.read(0, 299, 2),
        Err(ReadError::Refused(Refusal::BadRequest))
    );
    let id = client.id();
    let serve = Request::Read {
        id,
        range: range(299, 1),
        torn: TornBlocks::Serve,
    };
    client.send_request(0, &serve);
    assert!(matches!(
        client.receive(),
        Received::Reply(0, Reply::Data { id: of, result: Ok(_) }) if of == id
    ));
}

#[test]
fn a_lost_connection_leaves_its_volume_to_the_next() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 512);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        (1..=100).for_each(|n| client.send_write(0, n, n, &block(n)));
        drop(client);
        let mut client = shard.client();
        let promise = client.fence(volume(1), member, epoch(1), 0);
        let last = promise.state.last.sequence.0;
        client.send_write(0, last + 1, 0, &block(0));
        client.wait_applied(0, last + 1);
        assert_eq!(shard.gauge("connections_open"), 1.0);
    }
}

#[test]
fn a_full_device_refuses_writes_and_goes_on_reading() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 1 << 20);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    let mut sequence = 1;
    let refusal = loop {
        client.send_write(0, sequence, (sequence - 1) * 256, &block(sequence));
        match client.receive() {
            Received::Reply(0, Reply::Applied { .. }) => sequence += 1,
            Received::Reply(0, Reply::WriteRefused { refusal, .. }) => break refusal,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal, Refusal::DeviceFull);
    assert!(sequence > 50, "{sequence}");
    assert_eq!(client.read(0, 0, 1).unwrap(), block(1));
    // Its sequence was not consumed, and space that is there already can be written.
    client.write(0, sequence, 1, &block(77));
    assert_eq!(client.read(0, 1, 1).unwrap(), block(77));
}

#[test]
fn tcp_serves_like_unix_sockets() {
    let folder = support::folder();
    let process = support::process::Process::start(folder.path(), &["--listen=127.0.0.1:0"]);
    let tcp = process.data.iter().find(|a| matches!(a, Address::Tcp(_)));
    let mut client = Client::connect(tcp.expect("a second address"));
    let welcome = client.greet();
    assert_eq!(welcome.device.to_string(), process.device_ids[0]);
}
