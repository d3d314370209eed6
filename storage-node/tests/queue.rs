//! The scheduler at work: a device that takes one request at a time, or that is short of journal.

mod support;

use ashlar_engine::EngineKind;
use ashlar_replication::message::{Content, Reply};
use ashlar_replication::values::{ExtentIndex, Sequence};
use ashlar_storage_node::scheduler::Cost;
use ashlar_storage_node::shard::ShardSettings;
use ashlar_storage_node::shard::commands::Command;
use ashlar_wire::encode;
use support::client::{Client, Received, write_bytes};
use support::{BOTH, KEY, Shard, block, epoch, folder, volume};

/// A shard with one request at a time on its device.
fn narrow(kind: EngineKind) -> Shard {
    let settings = ShardSettings {
        in_flight_max: Cost(1),
        ..ShardSettings::default()
    };
    Shard::start_with(kind, settings, folder())
}

#[test]
fn what_waits_is_served_in_order_with_its_own_data() {
    for kind in BOTH {
        let shard = narrow(kind);
        let members: Vec<_> = (1..=4).map(|n| shard.create(volume(n), 512)).collect();
        let mut client = shard.client();
        for (n, member) in members.iter().enumerate() {
            client.attach(volume(n as u8 + 1), *member, epoch(1), n as u32);
        }
        let mut bytes = Vec::new();
        for sequence in 1..=50 {
            for handle in 0..4 {
                let data = block(u64::from(handle) * 1000 + sequence);
                bytes.extend(write_bytes(handle, sequence, sequence, &data));
            }
        }
        client.send(&bytes);
        let mut applied = [0; 4];
        while applied != [50; 4] {
            match client.receive() {
                Received::Reply(handle, Reply::Applied { sequence }) => {
                    assert!(sequence.0 > applied[handle as usize]);
                    applied[handle as usize] = sequence.0;
                }
                other => panic!("{other:?}"),
            }
        }
        // Reads wait, too; zeros have no data to be copied.
        let mut wanted = Vec::new();
        for sequence in 1..=51 {
            for handle in 0..4 {
                wanted.push((handle, sequence, client.send_read(handle, sequence, 1)));
            }
        }
        for _ in 0..wanted.len() {
            let Received::Reply(handle, Reply::Data { id, result }) = client.receive() else {
                panic!("no data");
            };
            let found = wanted.iter().find(|(h, _, i)| (*h, *i) == (handle, id));
            let (_, sequence, _) = found.expect("an answer to a question");
            let expected = if *sequence == 51 {
                Content::Zeros
            } else {
                Content::Data(block(u64::from(handle) * 1000 + sequence))
            };
            assert!(result.unwrap().content == expected);
        }
        assert!(shard.metrics().queue.count() > 50, "nothing waited");
    }
}

#[test]
fn a_small_request_overtakes_the_queue_of_another_volume() {
    for kind in BOTH {
        let shard = narrow(kind);
        let members = [shard.create(volume(1), 8192), shard.create(volume(2), 512)];
        let mut heavy = shard.client();
        heavy.attach(volume(1), members[0], epoch(1), 0);
        let mut light = shard.client();
        light.attach(volume(2), members[1], epoch(1), 0);
        // Whether there is a queue when the single one comes depends on when the threads run: it only has
        // to be seen once, but a queue in order of arrival never shows it.
        const HEAVY: u64 = 1500;
        let overtook = (0..50u64).any(|round| {
            let first = round * HEAVY + 1;
            let bytes: Vec<u8> = (first..first + HEAVY)
                .flat_map(|n| write_bytes(0, n, n % 8192, &block(n)))
                .collect();
            heavy.send(&bytes);
            light.write(0, round + 1, 0, &block(round));
            let before = shard.metrics().counters.writes;
            heavy.wait_applied(0, first + HEAVY - 1);
            before < (round + 1) * (HEAVY + 1)
        });
        assert!(overtook);
    }
}

#[test]
fn a_request_that_waited_is_dropped_when_its_handle_means_another_volume() {
    for kind in BOTH {
        let shard = narrow(kind);
        let members = [shard.create(volume(1), 512), shard.create(volume(2), 512)];
        for round in 1..=20u32 {
            let mut client = shard.client();
            client.attach(volume(1), members[0], epoch(round), 0);
            let mut bytes = Vec::new();
            (1..=40).for_each(|n| bytes.extend(write_bytes(0, n, n, &block(n))));
            encode::release(&mut bytes, 0);
            client.send(&bytes);
            client.send_fence(Client::subject(volume(2), members[1], epoch(round), 0), KEY);
            let promise = loop {
                match client.receive() {
                    Received::Promised(promise, true) => break promise,
                    Received::Reply(0, Reply::Applied { .. }) => {}
                    other => panic!("{other:?}"),
                }
            };
            assert_eq!(promise.state.last.sequence, Sequence(0));
            // Nothing of the first volume was written to the second.
            assert_eq!(client.read(0, 7, 1).unwrap(), vec![0; 4096]);
        }
        // Nothing leaked: the device is idle again and takes the next request at once.
        let waited = shard.metrics().queue.count();
        let mut client = shard.client();
        client.attach(volume(2), members[1], epoch(99), 0);
        client.write(0, 1, 0, &block(1));
        assert_eq!(shard.metrics().queue.count(), waited);
    }
}

#[test]
fn a_closing_client_leaves_no_trace_in_the_queue() {
    for kind in BOTH {
        let shard = narrow(kind);
        let member = shard.create(volume(1), 512);
        for round in 1..=10 {
            let mut client = shard.client();
            client.attach(volume(1), member, epoch(round), 0);
            (1..=100).for_each(|n| client.send_write(0, n, n, &block(n)));
        }
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(99), 0);
        client.write(0, 1, 0, &block(1));
        let queue = shard.ask(Command::Queue).unwrap();
        assert!(queue.iter().all(|(_, class)| class.depth == 0));
    }
}

#[test]
fn comparing_goes_on_beside_a_queue() {
    let shard = narrow(EngineKind::IoUring);
    let member = shard.create(volume(1), 2048);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    let large = vec![7; 1 << 20];
    client.write(0, 1, 256, &large);
    let bytes: Vec<u8> = (2..=20)
        .flat_map(|n| write_bytes(0, n, 512, &large))
        .collect();
    client.send(&bytes);
    for _ in 0..20 {
        let found = shard
            .ask(|answer| Command::Describe(volume(1), ExtentIndex(1), answer))
            .unwrap();
        assert_eq!(found.crcs[0], crc32c::crc32c(&large[..4096]));
        assert!(found.bad_blocks.is_empty());
    }
    client.wait_applied(0, 20);
}

#[test]
fn writes_faster_than_home_writes_wait_and_all_are_served() {
    for kind in BOTH {
        let shard = Shard::start(kind);
        let member = shard.create(volume(1), 16 * 1024);
        let mut client = shard.client();
        client.attach(volume(1), member, epoch(1), 0);
        // Twice the journal, in a window that is larger than half of it.
        let place = |n: u64| n.wrapping_mul(7919) % (16 * 1024);
        let total = 4 * 1024u64;
        let mut sent = 0;
        let mut applied = 0;
        while applied < total {
            while sent < total && sent < applied + 2048 {
                sent += 1;
                let data = block(sent);
                client.send_write(0, sent, place(sent), &data);
            }
            match client.receive() {
                Received::Reply(0, Reply::Applied { sequence }) => applied = sequence.0,
                other => panic!("{other:?}"),
            }
        }
        for n in (1..=total).step_by(97) {
            assert_eq!(client.read(0, place(n), 1).unwrap(), block(n));
        }
        let info = shard.ask(Command::Device).unwrap();
        assert!(info.counters.home_bytes > 0 && info.counters.checkpoints > 0);
        let last = shard.restart(kind);
        let mut client = last.client();
        let promise = client.fence(volume(1), member, epoch(2), 0);
        assert_eq!(promise.state.last.sequence, Sequence(total));
    }
}
