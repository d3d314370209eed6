//! Connections against a node that the test plays itself, over real sockets.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use ashlar_engine::{Address, Engine, EngineKind, SharedBytes};
use ashlar_replication::configuration::{MemberState, ReplicaState, Role};
use ashlar_replication::message::{Content, ReadData, ReadError, Refusal, Reply, Request};
use ashlar_replication::message::{RequestId, TornBlocks};
use ashlar_replication::values::{
    BLOCK_BYTES, Block, BlockRange, DeviceId, Epoch, EpochNumber, MemberId, Pass, Position,
    Sequence, Time, VolumeId,
};
use ashlar_wire::proof::{Challenges, Subject, VolumeKey, verify_fence};
use ashlar_wire::{Decoded, Frame, Hello, Payload, Promise, VERSION, Welcome, encode};

use super::{ConnectionId, ConnectionOptions, Connections, LinkId, LinkSpec, NoticeKind, Peer};
use crate::front_end::VolumeHandle;

const KEY: VolumeKey = VolumeKey([5; 32]);
const MEMBER: MemberId = MemberId {
    device: DeviceId([3; 16]),
    nonce: 9,
};
const LEASE: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(10);

fn epoch(number: u32) -> Epoch {
    Epoch {
        number: EpochNumber(number),
        nonce: 77,
    }
}

/// The initiator's side.
struct Side {
    engine: Engine,
    connections: Connections,
    seen: Vec<NoticeKind>,
    id: ConnectionId,
    link: LinkId,
}

impl Side {
    fn turn(&mut self) {
        let mut events = Vec::new();
        let deadline =
            (self.engine.now() + Duration::from_millis(20)).min(self.connections.next_timer());
        self.engine.poll(deadline, &mut events).unwrap();
        for event in &events {
            self.connections.socket_event(&mut self.engine, event);
        }
        self.connections.timers(&mut self.engine);
        while let Some(notice) = self.connections.next_notice() {
            assert_eq!((notice.volume, notice.member), (VolumeHandle(1), MEMBER));
            self.seen.push(notice.kind);
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Side) -> bool) {
        let begin = std::time::Instant::now();
        while !done(self) {
            assert!(
                begin.elapsed() < PATIENCE,
                "{what} did not happen; saw {:?}",
                self.seen
            );
            self.turn();
        }
    }

    fn next_notice(&mut self) -> NoticeKind {
        self.until("a notice", |side| !side.seen.is_empty());
        self.seen.remove(0)
    }

    fn send(&mut self, request: &Request<Payload>) {
        self.connections
            .send(&mut self.engine, self.id, self.link, request);
    }
}

/// The node's side of one connection.
struct Node {
    stream: UnixStream,
    input: Vec<u8>,
    challenges: Challenges,
}

impl Node {
    fn accept(listener: &UnixListener, side: &mut Side) -> Node {
        listener.set_nonblocking(true).unwrap();
        let mut accepted = None;
        side.until("a connection", |_| {
            accepted = accepted.take().or_else(|| listener.accept().ok());
            accepted.is_some()
        });
        let (stream, _) = accepted.unwrap();
        stream.set_nonblocking(true).unwrap();
        let challenges = Challenges {
            client: [0; 16],
            server: [8; 16],
        };
        Node {
            stream,
            input: Vec::new(),
            challenges,
        }
    }

    /// Accepts and greets.
    fn greet(listener: &UnixListener, side: &mut Side, device: DeviceId) -> Node {
        let mut node = Node::accept(listener, side);
        let Hello { nonce, .. } = node.receive(side, |frame| match frame {
            Frame::Hello(hello) => *hello,
            other => panic!("{other:?}"),
        });
        node.challenges.client = nonce;
        let welcome = Welcome {
            version: VERSION,
            features: 0,
            nonce: node.challenges.server,
            node: [1; 16],
            device,
            operations_max: 100,
            bytes_max: 1 << 20,
            lease_ms: LEASE.as_millis() as u32,
        };
        node.send(|out| encode::welcome(out, &welcome));
        node
    }

    fn send(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut out = Vec::new();
        encode(&mut out);
        self.stream.write_all(&out).unwrap();
    }

    /// The next frame, as `take` sees it.
    fn receive<T>(&mut self, side: &mut Side, take: impl FnOnce(&Frame<'_>) -> T) -> T {
        side.until("a frame", |_| {
            let mut chunk = [0; 65536];
            if let Ok(count @ 1..) = self.stream.read(&mut chunk) {
                self.input.extend_from_slice(&chunk[..count]);
            }
            matches!(ashlar_wire::decode(&self.input), Ok(Decoded::Frame { .. }))
        });
        let Ok(Decoded::Frame { frame, bytes }) = ashlar_wire::decode(&self.input) else {
            panic!()
        };
        let taken = take(&frame.unwrap());
        self.input.drain(..bytes);
        taken
    }

    fn receive_fence(&mut self, side: &mut Side) -> Subject {
        let challenges = self.challenges;
        self.receive(side, |frame| match frame {
            Frame::Fence(fence) => {
                assert!(verify_fence(
                    &KEY,
                    &challenges,
                    &fence.subject,
                    &fence.proof
                ));
                fence.subject
            }
            other => panic!("{other:?}"),
        })
    }

    fn promise(&mut self, subject: &Subject, key: &VolumeKey) {
        let state = MemberState {
            id: MEMBER,
            role: Role::Data,
            promised: subject.epoch,
            configuration: None,
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        };
        let promise = Promise {
            epoch: subject.epoch,
            state,
            size_blocks: 7,
            torn: Vec::new(),
        };
        let challenges = self.challenges;
        self.send(|out| encode::promised(out, key, &challenges, subject, &promise));
    }
}

struct Setup {
    side: Side,
    listener: UnixListener,
    _folder: tempfile::TempDir,
}

fn setup() -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let listener = UnixListener::bind(&path).unwrap();
    let options = ashlar_engine::Options {
        kind: Some(EngineKind::Portable),
        ..Default::default()
    };
    let engine = Engine::new(options).unwrap();
    let mut connections = Connections::new(ConnectionOptions {
        initiator: [2; 16],
        lease: LEASE,
    });
    let peer = Peer {
        device: MEMBER.device,
        address: Address::Unix(path),
    };
    let volume_id = VolumeId([4; 16]);
    let spec = LinkSpec {
        volume: VolumeHandle(1),
        volume_id,
        member: MEMBER,
        key: KEY,
    };
    let (id, link, up) = connections.insert(peer, spec).unwrap();
    assert!(!up);
    let side = Side {
        engine,
        connections,
        seen: Vec::new(),
        id,
        link,
    };
    Setup {
        side,
        listener,
        _folder: folder,
    }
}

/// Greeted and promised.
fn promised() -> (Setup, Node, Subject) {
    let mut setup = setup();
    let side = &mut setup.side;
    let mut node = Node::greet(&setup.listener, side, MEMBER.device);
    assert!(matches!(side.next_notice(), NoticeKind::Up));
    side.send(&Request::Fence { epoch: epoch(1) });
    let subject = node.receive_fence(side);
    node.promise(&subject, &KEY);
    match side.next_notice() {
        NoticeKind::Reply(Reply::Promised {
            epoch: promised,
            size_blocks: 7,
            ..
        }) => {
            assert_eq!(promised, epoch(1));
        }
        other => panic!("{other:?}"),
    }
    (setup, node, subject)
}

fn read(id: u64) -> Request<Payload> {
    let range = BlockRange {
        start: Block(0),
        count: 1,
    };
    Request::Read {
        id: RequestId(id),
        range,
        torn: TornBlocks::Refuse,
    }
}

fn send_data(node: &mut Node, handle: u32, id: u64, block: &[u8], crc: u32) {
    node.send(|out| {
        encode::data(out, handle, RequestId(id), &[Position::ZERO], Some(&[crc]));
        out.extend_from_slice(block);
    });
}

#[test]
fn a_member_that_does_not_know_the_key_is_not_believed() {
    let mut setup = setup();
    let side = &mut setup.side;
    let mut node = Node::greet(&setup.listener, side, MEMBER.device);
    assert!(matches!(side.next_notice(), NoticeKind::Up));
    side.send(&Request::Fence { epoch: epoch(1) });
    let subject = node.receive_fence(side);
    // An answer before the promise is not listened to.
    node.send(|out| {
        encode::reply::<Payload>(out, subject.handle, &Reply::Done { id: RequestId(3) });
    });
    node.promise(&subject, &VolumeKey([6; 32]));
    match side.next_notice() {
        NoticeKind::Reply(Reply::Refused {
            refusal: Refusal::Unauthenticated,
            ..
        }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(side.connections.counters().bad_proofs, 1);
}

#[test]
fn data_that_does_not_match_its_checksum_is_a_read_error() {
    let (mut setup, mut node, subject) = promised();
    let side = &mut setup.side;
    let block = [9; BLOCK_BYTES];
    for (id, crc) in [(1, crc_of(&block)), (2, crc_of(&block) ^ 1)] {
        side.send(&read(id));
        node.receive(side, |frame| {
            assert!(matches!(frame, Frame::Request { .. }))
        });
        send_data(&mut node, subject.handle, id, &block, crc);
    }
    match side.next_notice() {
        NoticeKind::Reply(Reply::Data {
            id: RequestId(1),
            result:
                Ok(ReadData {
                    content: Content::Data(payload),
                    ..
                }),
        }) => assert_eq!(**payload.data(), block),
        other => panic!("{other:?}"),
    }
    match side.next_notice() {
        NoticeKind::Reply(Reply::Data {
            id: RequestId(2),
            result: Err(ReadError::Device),
        }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(side.connections.counters().checksum_mismatches, 1);
}

fn crc_of(block: &[u8]) -> u32 {
    Payload::new(SharedBytes::copy_of(block)).crcs()[0]
}

#[test]
fn an_answer_to_an_older_epoch_finds_nobody() {
    let (mut setup, mut node, old) = promised();
    let side = &mut setup.side;
    side.send(&Request::Fence { epoch: epoch(2) });
    let released = node.receive(side, |frame| match frame {
        Frame::Release { handle } => *handle,
        other => panic!("{other:?}"),
    });
    assert_eq!(released, old.handle);
    let new = node.receive_fence(side);
    assert_ne!(new.handle, old.handle);
    let late = Reply::<Payload>::Applied {
        sequence: Sequence(7),
    };
    node.send(|out| encode::reply(out, old.handle, &late));
    node.send(|out| encode::fenced(out, old.handle, EpochNumber(3)));
    node.promise(&new, &KEY);
    assert!(matches!(
        side.next_notice(),
        NoticeKind::Reply(Reply::Promised { .. })
    ));
    assert!(side.seen.is_empty());
}

#[test]
fn a_lost_connection_is_made_again_at_once_and_fenced_anew() {
    let (mut setup, node, first) = promised();
    drop(node);
    let side = &mut setup.side;
    assert!(matches!(side.next_notice(), NoticeKind::Down));
    assert_eq!(
        side.connections.trouble(side.id),
        Some("closed by the node")
    );
    let mut node = Node::greet(&setup.listener, side, MEMBER.device);
    assert!(matches!(side.next_notice(), NoticeKind::Up));
    assert_eq!(side.connections.trouble(side.id), None);
    side.send(&Request::Fence { epoch: epoch(1) });
    assert_eq!(node.receive_fence(side).epoch, first.epoch);
}

#[test]
fn another_device_at_the_address_is_not_used() {
    let mut setup = setup();
    let side = &mut setup.side;
    let _node = Node::greet(&setup.listener, side, DeviceId([66; 16]));
    side.until("trouble", |side| {
        side.connections
            .trouble(side.id)
            .is_some_and(|t| t.contains("another device"))
    });
    assert!(side.seen.is_empty());
}

#[test]
fn garbage_ends_the_connection() {
    let (mut setup, mut node, _) = promised();
    node.send(|out| out.extend_from_slice(&[0xee; 64]));
    let side = &mut setup.side;
    assert!(matches!(side.next_notice(), NoticeKind::Down));
    assert_eq!(side.connections.counters().malformed, 1);
}

#[test]
fn the_lease_is_renewed_from_the_time_of_the_request() {
    let (mut setup, mut node, _) = promised();
    let side = &mut setup.side;
    let before = side.engine.now();
    let echo = node.receive(side, |frame| match frame {
        Frame::Renew { echo } => *echo,
        other => panic!("{other:?}"),
    });
    // An answer to something that was never sent is worth nothing.
    node.send(|out| encode::renewed(out, echo + 1_000_000_000));
    node.send(|out| encode::renewed(out, echo));
    match side.next_notice() {
        NoticeKind::Renewed { sent_at } => {
            assert_eq!(sent_at, Time(echo));
            assert!(sent_at >= before && sent_at <= before + LEASE);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_supersession_is_reported_with_the_epoch_that_did_it_and_what_is_done_stays_done() {
    let (mut setup, mut node, subject) = promised();
    let side = &mut setup.side;
    node.send(|out| encode::fenced(out, subject.handle, EpochNumber(12)));
    let sequence = Sequence(3);
    node.send(|out| encode::reply::<Payload>(out, subject.handle, &Reply::Applied { sequence }));
    match side.next_notice() {
        NoticeKind::Fenced { promised } => assert_eq!(promised, EpochNumber(12)),
        other => panic!("{other:?}"),
    }
    match side.next_notice() {
        NoticeKind::Reply(Reply::Applied { sequence: applied }) => assert_eq!(applied, sequence),
        other => panic!("{other:?}"),
    }
    // The lease is not renewed any more.
    let echo = node.receive(side, |frame| match frame {
        Frame::Renew { echo } => *echo,
        other => panic!("{other:?}"),
    });
    node.send(|out| encode::renewed(out, echo));
    node.receive(side, |frame| assert!(matches!(frame, Frame::Renew { .. })));
    assert!(side.seen.is_empty(), "{:?}", side.seen);
}

#[test]
fn a_node_that_no_longer_reads_is_cut_off_with_what_waits_for_it() {
    let (mut setup, node, _) = promised();
    let side = &mut setup.side;
    let data = SharedBytes::copy_of(&vec![1; 256 * BLOCK_BYTES]);
    for sequence in 1..=8 {
        let range = BlockRange {
            start: Block(0),
            count: 256,
        };
        let content = Content::Data(Payload::new(data.clone()));
        side.send(&Request::Write {
            sequence: Sequence(sequence),
            range,
            content,
        });
        side.turn();
    }
    assert!(side.seen.is_empty(), "waiting alone is no reason");
    side.connections.member_left(&mut side.engine, side.id);
    assert!(matches!(side.next_notice(), NoticeKind::Down));
    assert_eq!(side.connections.counters().cut_off, 1);
    drop(node);
    let _again = Node::greet(&setup.listener, side, MEMBER.device);
    assert!(matches!(side.next_notice(), NoticeKind::Up));
}

#[test]
fn one_member_starts_anew_without_a_new_connection_where_the_node_reads() {
    let (mut setup, mut node, old) = promised();
    let side = &mut setup.side;
    side.connections
        .reconnect(&mut side.engine, side.id, side.link);
    assert!(matches!(side.next_notice(), NoticeKind::Down));
    assert!(matches!(side.next_notice(), NoticeKind::Up));
    side.send(&Request::Fence { epoch: epoch(1) });
    node.receive(side, |frame| {
        assert!(matches!(frame, Frame::Release { .. }))
    });
    assert_ne!(node.receive_fence(side).handle, old.handle);
    assert_eq!(side.connections.counters().lost, 0);
}

#[test]
fn the_last_volume_takes_the_connection_with_it() {
    let (mut setup, mut node, subject) = promised();
    let side = &mut setup.side;
    side.connections
        .remove(&mut side.engine, side.id, side.link);
    let released = node.receive(side, |frame| match frame {
        Frame::Release { handle } => *handle,
        other => panic!("{other:?}"),
    });
    assert_eq!(released, subject.handle);
    assert_eq!(side.connections.count(), (0, 0));
}
