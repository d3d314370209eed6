//! The library against real storage nodes that are killed, stopped and restarted.

mod support;

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use ashlar_engine::EngineKind;
use ashlar_initiator::front_end::IoError;
use ashlar_initiator::handle::AttachError;
use ashlar_initiator::status::AttachmentState;
use ashlar_wire::proof::VolumeKey;
use rustix::process::Signal;
use support::client::{Client, Job};
use support::{Cluster, MIB};

#[test]
#[ignore = "not a test: the storage node that the tests start"]
fn storage_node_process() {
    support::storage_node_process();
}

fn block(n: u64) -> Vec<u8> {
    (0..4096u64)
        .map(|i| (n.wrapping_mul(31).wrapping_add(i / 7)) as u8)
        .collect()
}

fn written_data_comes_back(engine: EngineKind) {
    let cluster = Cluster::start(3, Some(engine));
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let mut client = Client::start(Some(engine));
    let status = client.attach(&spec);
    assert_eq!(
        (status.state, status.reason.as_str()),
        (AttachmentState::Open, "")
    );
    // Small ones, one across the border of an extent, and one of several extents.
    for n in 0..64 {
        client.write(&spec, n * 8192, &block(n));
    }
    let large: Vec<u8> = (0..5 * MIB).map(|i| (i / 4096) as u8).collect();
    client.write(&spec, 10 * MIB - 8192, &large);
    client.run(&spec, Job::Zero(11 * MIB, 2 * MIB)).unwrap();
    client.run(&spec, Job::Flush).unwrap();
    for n in 0..64 {
        assert_eq!(client.read(&spec, n * 8192, 4096), block(n));
        assert_eq!(client.read(&spec, n * 8192 + 4096, 4096), vec![0; 4096]);
    }
    let mut expected = large;
    let zeros = (MIB + 8192) as usize..(3 * MIB + 8192) as usize;
    expected[zeros].fill(0);
    assert!(client.read(&spec, 10 * MIB - 8192, 5 << 20) == expected);
    let beyond = client.run(&spec, Job::Read(64 * MIB - 4096, 8192));
    assert_eq!(beyond, Err(IoError::OutOfRange));
    cluster.assert_replicas_equal(&spec);
    // What was acknowledged is there for whoever attaches next.
    client.stop();
    let mut next = Client::start(Some(engine));
    next.attach(&spec);
    assert_eq!(next.read(&spec, 0, 4096), block(0));
    assert_eq!(next.status(&spec).epoch.map(|epoch| epoch.0), Some(2));
}

#[test]
fn written_data_comes_back_through_io_uring() {
    written_data_comes_back(EngineKind::IoUring);
}

#[test]
fn written_data_comes_back_through_the_portable_engine() {
    written_data_comes_back(EngineKind::Portable);
}

#[test]
fn a_killed_node_stalls_nobody_and_is_brought_up_to_date_when_it_returns() {
    let mut cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let mut client = Client::start(None);
    client.attach(&spec);
    let mut longest = Duration::ZERO;
    for n in 0..3000 {
        if n == 500 {
            cluster.nodes[1].kill();
        }
        let begin = Instant::now();
        client.write(&spec, n * 4096, &block(n));
        longest = longest.max(begin.elapsed());
    }
    println!("longest write with a node killed: {longest:?}");
    assert!(longest < Duration::from_millis(200), "{longest:?}");
    let down = &client.status(&spec).members[1];
    assert!(down.trouble.is_some(), "{down:?}");
    cluster.nodes[1].restart();
    client.wait_in_sync(&spec, 3);
    cluster.assert_replicas_equal(&spec);
    // The one that was away serves alone with one other.
    cluster.nodes[0].kill();
    for n in 0..3000 {
        assert_eq!(client.read(&spec, n * 4096, 4096), block(n));
    }
}

#[test]
fn with_two_of_three_gone_writes_wait_and_go_on_within_a_second_of_a_return() {
    let mut cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let mut client = Client::start(None);
    client.attach(&spec);
    client.write(&spec, 0, &block(1));
    cluster.nodes[0].kill();
    cluster.nodes[2].kill();
    let waiting = client.begin(&spec, Job::Write(4096, block(2)));
    let early = waiting.recv_timeout(Duration::from_secs(2));
    assert_eq!(early, Err(RecvTimeoutError::Timeout));
    let status = client.status(&spec);
    assert_eq!(status.state, AttachmentState::Waiting, "{status:?}");
    assert!(
        status.reason.contains(&spec.members[0].address.to_string()),
        "{status:?}"
    );
    cluster.nodes[2].restart();
    let back = Instant::now();
    waiting
        .recv_timeout(Duration::from_secs(20))
        .unwrap()
        .unwrap();
    println!(
        "first write {:?} after the second node's return",
        back.elapsed()
    );
    assert!(
        back.elapsed() < Duration::from_secs(1),
        "{:?}",
        back.elapsed()
    );
    assert_eq!(client.read(&spec, 0, 4096), block(1));
    cluster.nodes[0].restart();
    client.wait_in_sync(&spec, 3);
    cluster.assert_replicas_equal(&spec);
}

#[test]
fn a_second_initiator_fences_the_first_which_says_so() {
    let cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let mut first = Client::start(None);
    first.attach(&spec);
    first.write(&spec, 0, &block(1));
    let mut second = Client::start(None);
    let by = second.attach(&spec).epoch.unwrap();
    second.write(&spec, 0, &block(2));
    let refused = first.run(&spec, Job::Write(0, block(3)));
    assert_eq!(refused, Err(IoError::Fenced { by }));
    let status = first.status(&spec);
    assert_eq!(status.state, AttachmentState::Over);
    assert!(
        status.reason.contains(&format!("epoch {}", by.0)),
        "{status:?}"
    );
    assert_eq!(
        first.run(&spec, Job::Read(0, 4096)),
        Err(IoError::Fenced { by })
    );
    assert_eq!(second.read(&spec, 0, 4096), block(2));
    // Asking again makes the first one the rightful one.
    assert!(first.attach(&spec).epoch.unwrap() > by);
    assert_eq!(first.read(&spec, 0, 4096), block(2));
    first.write(&spec, 0, &block(4));
    assert!(matches!(
        second.run(&spec, Job::Read(0, 4096)),
        Err(IoError::Fenced { .. })
    ));
}

#[test]
fn a_stopped_node_stalls_nobody_and_catches_up() {
    let cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let mut client = Client::start(None);
    client.attach(&spec);
    client.write(&spec, 0, &block(1));
    cluster.nodes[2].signal(Signal::STOP);
    let data: Vec<u8> = (0..16).flat_map(block).collect();
    let mut longest = Duration::ZERO;
    for n in 0..2000 {
        let begin = Instant::now();
        client.write(&spec, n * 65536 % (64 * MIB), &data);
        longest = longest.max(begin.elapsed());
    }
    println!("longest write past a stopped node: {longest:?}");
    assert!(longest < Duration::from_millis(500), "{longest:?}");
    let cut_off = client.handle().metrics().unwrap().connections.cut_off;
    assert_eq!(cut_off, 1, "what the stopped node never reads is dropped");
    cluster.nodes[2].signal(Signal::CONT);
    client.wait_in_sync(&spec, 3);
    cluster.assert_replicas_equal(&spec);
}

#[test]
fn an_attach_without_a_quorum_names_who_is_missing_and_leaves_nothing_behind() {
    let mut cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    cluster.nodes[0].kill();
    cluster.nodes[1].kill();
    let client = Client::start(None);
    match client
        .handle()
        .attach(spec.clone(), Duration::from_millis(500))
    {
        Err(AttachError::TimedOut { missing }) => {
            for n in [0, 1] {
                assert!(
                    missing.contains(&spec.members[n].address.to_string()),
                    "{missing}"
                );
            }
        }
        other => panic!("{other:?}"),
    }
    assert!(client.handle().list().unwrap().is_empty());
    assert_eq!(client.handle().metrics().unwrap().connections_wanted, 0);
}

#[test]
fn a_wrong_key_is_refused_and_a_wrong_attachment_too() {
    let cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let client = Client::start(None);
    let mut wrong = spec.clone();
    wrong.key = VolumeKey([99; 32]);
    match client
        .handle()
        .attach(wrong.clone(), Duration::from_secs(10))
    {
        Err(AttachError::Over(reason)) => assert!(reason.contains("key"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert!(client.handle().list().unwrap().is_empty());
    client.attach(&spec);
    client.attach(&spec);
    let different = client.handle().attach(wrong, Duration::from_secs(10));
    assert_eq!(different.unwrap_err(), AttachError::Different);
    let mut other = cluster.create_volume("other", 64 * MIB, 0);
    other.name = "data".into();
    let taken = client.handle().attach(other, Duration::from_secs(10));
    assert_eq!(taken.unwrap_err(), AttachError::NameTaken("data".into()));
}

#[test]
fn a_detach_finishes_writes_under_way_and_fails_what_cannot_finish() {
    let mut cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let mut client = Client::start(None);
    client.attach(&spec);
    let answers: Vec<_> = (0..100)
        .map(|n| client.begin(&spec, Job::Write(n * 4096, block(n))))
        .collect();
    // The last request is known to have been made when it is answered or others are.
    answers[0]
        .recv_timeout(Duration::from_secs(10))
        .unwrap()
        .unwrap();
    assert_eq!(
        client.handle().detach(spec.id, Duration::from_secs(10)),
        Ok(true)
    );
    assert_eq!(
        client.handle().detach(spec.id, Duration::from_secs(10)),
        Ok(false)
    );
    for answer in &answers[1..] {
        let answer = answer.recv_timeout(Duration::from_secs(1)).unwrap();
        assert!(
            matches!(answer, Ok(_) | Err(IoError::NotAttached)),
            "{answer:?}"
        );
    }
    client.attach(&spec);
    assert_eq!(client.read(&spec, 0, 4096), block(0));
    cluster.nodes[0].kill();
    cluster.nodes[1].kill();
    let stuck = client.begin(&spec, Job::Write(0, block(9)));
    let begin = Instant::now();
    while client.status(&spec).counters.in_flight == 0 {
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
    assert_eq!(
        client.handle().detach(spec.id, Duration::from_millis(200)),
        Ok(true)
    );
    let answer = stuck.recv_timeout(Duration::from_secs(1)).unwrap();
    assert_eq!(answer, Err(IoError::NotAttached));
}

#[test]
fn a_volume_grows_while_it_is_attached() {
    let cluster = Cluster::start(3, None);
    let mut spec = cluster.create_volume("data", 16 * MIB, 0);
    let mut client = Client::start(None);
    client.attach(&spec);
    client.write(&spec, 0, &block(1));
    cluster.grow_volume(&spec, 32 * MIB);
    spec.size_bytes = 32 * MIB;
    assert_eq!(client.attach(&spec).size_bytes, 32 * MIB);
    client.write(&spec, 31 * MIB, &block(2));
    assert_eq!(client.read(&spec, 31 * MIB, 4096), block(2));
    assert_eq!(client.read(&spec, 0, 4096), block(1));
    spec.size_bytes = 16 * MIB;
    let shrunk = client.handle().attach(spec.clone(), Duration::from_secs(1));
    assert_eq!(
        shrunk.unwrap_err(),
        AttachError::Shrinks { attached: 32 * MIB }
    );
}

#[test]
fn a_node_that_has_moved_is_found_at_the_address_of_a_repeated_attach() {
    let mut cluster = Cluster::start(3, None);
    let mut spec = cluster.create_volume("data", 16 * MIB, 0);
    let mut client = Client::start(None);
    client.attach(&spec);
    client.write(&spec, 0, &block(1));
    cluster.nodes[0].kill();
    client.write(&spec, 4096, &block(2));
    cluster.nodes[0].move_to("elsewhere");
    spec.members[0].address = cluster.nodes[0].data().parse().unwrap();
    let epoch = client.attach(&spec).epoch;
    assert_eq!(epoch, client.status(&spec).epoch);
    client.wait_in_sync(&spec, 3);
    cluster.assert_replicas_equal(&spec);
}

#[test]
fn replicas_smaller_than_the_volume_are_not_attached() {
    let cluster = Cluster::start(3, None);
    let mut spec = cluster.create_volume("data", 16 * MIB, 0);
    spec.size_bytes = 32 * MIB;
    let client = Client::start(None);
    match client.handle().attach(spec, Duration::from_secs(10)) {
        Err(AttachError::Over(reason)) => assert!(reason.contains("16777216"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_replicas_and_a_witness_survive_the_loss_of_one() {
    let mut cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 1);
    let mut client = Client::start(None);
    client.attach(&spec);
    client.write(&spec, 0, &block(1));
    // An attach waits for a quorum, not for everybody.
    client.wait_in_sync(&spec, 3);
    cluster.nodes[0].kill();
    client.write(&spec, 4096, &block(2));
    assert_eq!(client.read(&spec, 0, 8192), [block(1), block(2)].concat());
    cluster.nodes[0].restart();
    client.wait_in_sync(&spec, 3);
}

#[test]
fn an_io_timeout_fails_what_waits_too_long() {
    let mut cluster = Cluster::start(3, None);
    let mut spec = cluster.create_volume("data", 64 * MIB, 0);
    spec.options.io_timeout = Some(Duration::from_millis(700));
    let mut client = Client::start(None);
    client.attach(&spec);
    cluster.nodes[0].kill();
    cluster.nodes[1].kill();
    let begin = Instant::now();
    assert_eq!(
        client.run(&spec, Job::Write(0, block(1))),
        Err(IoError::TimedOut)
    );
    assert!(
        begin.elapsed() >= Duration::from_millis(650),
        "{:?}",
        begin.elapsed()
    );
}
