//! What a shard answers to the requests of resync, equalising and repair, frame by frame.

mod support;

use ashlar_engine::EngineKind;
use ashlar_replication::message::{
    BlockPosition, Content, CopyStep, ReadError, Refusal, Reply, Request,
};
use ashlar_replication::values::{Block, EpochNumber, ExtentIndex, Pass, Sequence};
use support::client::{Client, Received, range};
use support::requests::{done, position, refused};
use support::{KEY, Shard, block, epoch, volume};

#[test]
fn a_resync_copies_what_has_the_expected_position() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 512);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 7, &block(1));
    let begin = Request::BeginResync {
        id: client.id(),
        pass: Pass(1),
        sequence: Sequence(10),
    };
    done(&mut client, 0, &begin);
    assert_eq!(
        client.read(0, 7, 1),
        Err(ReadError::Refused(Refusal::NotComplete))
    );
    // The live stream goes on after s0.
    client.write(0, 11, 8, &block(11));
    let id = client.id();
    let data = [block(7), block(8)].concat();
    let expected = position(1, 1);
    let copy = Request::Copy {
        id,
        pass: Pass(1),
        range: range(7, 2),
        steps: vec![
            CopyStep {
                expected,
                position: position(1, 9),
            },
            CopyStep {
                expected,
                position: position(1, 9),
            },
        ],
        content: Content::Data(&data[..]),
    };
    client.send_request(0, &copy);
    let changed = vec![BlockPosition {
        block: Block(8),
        position: position(1, 11),
    }];
    assert_eq!(
        client.receive(),
        Received::Reply(0, Reply::Copied { id, changed })
    );
    let dead = Request::Copy {
        id: client.id(),
        pass: Pass(0),
        range: range(7, 1),
        steps: vec![CopyStep {
            expected: position(1, 9),
            position: position(1, 10),
        }],
        content: Content::Zeros,
    };
    assert_eq!(refused(&mut client, 0, &dead), Refusal::StalePass);
    let complete = Request::MarkComplete {
        id: client.id(),
        pass: Pass(1),
    };
    done(&mut client, 0, &complete);
    assert_eq!(
        client.read(0, 7, 2).unwrap(),
        [block(7), block(11)].concat()
    );
}

#[test]
fn equalising_and_set_last_work_before_the_epoch_starts_and_never_after() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 512);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 0, &block(1));
    // On the same connection, with another handle: the older attachment hears of it first.
    client.send_fence(Client::subject(volume(1), member, epoch(2), 1), KEY);
    assert_eq!(client.receive(), Received::Fenced(0, EpochNumber(2)));
    assert!(matches!(client.receive(), Received::Promised(_, true)));
    let data = block(50);
    let equalise = |id| Request::Equalise {
        id,
        range: range(0, 1),
        positions: vec![position(1, 5)],
        content: Content::Data(&data[..]),
    };
    let request = equalise(client.id());
    done(&mut client, 1, &request);
    let set_last = Request::SetLast {
        id: client.id(),
        position: position(1, 5),
    };
    done(&mut client, 1, &set_last);
    assert_eq!(client.read(1, 0, 1).unwrap(), block(50));
    client.attach(volume(1), member, epoch(2), 1);
    let late = equalise(client.id());
    assert_eq!(refused(&mut client, 1, &late), Refusal::AlreadyStarted);
    assert_eq!(refused(&mut client, 1, &set_last), Refusal::AlreadyStarted);
}

#[test]
fn positions_and_digests_tell_what_the_blocks_hold() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 1024);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 3, &block(1));
    client.write(0, 2, 600, &block(2));
    let at = |block, sequence| BlockPosition {
        block: Block(block),
        position: position(1, sequence),
    };
    let id = client.id();
    let list = Request::ListAbove {
        id,
        floor: position(1, 0),
        from: Block(0),
    };
    client.send_request(0, &list);
    let all = Reply::Positions {
        id,
        positions: vec![at(3, 1), at(600, 2)],
        next: None,
        last: position(1, 2),
    };
    assert_eq!(client.receive(), Received::Reply(0, all));
    let id = client.id();
    let compare = Request::Compare {
        id,
        extent: ExtentIndex(2),
    };
    client.send_request(0, &compare);
    let one = Reply::Positions {
        id,
        positions: vec![at(600, 2)],
        next: None,
        last: position(1, 2),
    };
    assert_eq!(client.receive(), Received::Reply(0, one));
    let id = client.id();
    let digests = Request::Digests {
        id,
        from: ExtentIndex(0),
        count: 4096,
    };
    client.send_request(0, &digests);
    match client.receive() {
        Received::Reply(0, Reply::Digests { id: of, digests }) => {
            assert_eq!(of, id);
            let extents: Vec<_> = digests.iter().map(|(extent, _)| extent.0).collect();
            assert_eq!(extents, [0, 2]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_repair_rewrites_exactly_the_position_that_is_there() {
    let shard = Shard::start(EngineKind::IoUring);
    let member = shard.create(volume(1), 512);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    client.write(0, 1, 4, &block(1));
    let data = block(1);
    let repair = |id, sequence| Request::Repair {
        id,
        block: Block(4),
        position: position(1, sequence),
        content: Content::Data(&data[..]),
    };
    let right = repair(client.id(), 1);
    done(&mut client, 0, &right);
    let wrong = repair(client.id(), 2);
    assert_eq!(refused(&mut client, 0, &wrong), Refusal::BadRequest);
    assert_eq!(shard.metrics().counters.repaired_blocks, 1);
}
