//! Sockets behave the same with both kinds of engine.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use ashlar_engine::{Address, EngineKind, Event, IoBuf, Options, SharedBytes};
use ashlar_replication::values::Time;
use common::{Rig, pattern};

for_both_kinds!(
    what_is_sent_comes_back_over_tcp,
    what_is_sent_comes_back_over_unix_sockets,
    bytes_sent_before_the_connection_stands_arrive,
    large_transfers_arrive_whole_through_partial_sends,
    a_peer_that_does_not_read_blocks_only_its_own_queue,
    draining_is_reported_only_after_output_was_held_over,
    draining_is_reported_also_when_a_poll_returned_before_it_sent_anything,
    many_pieces_go_out_without_another_event,
    nothing_is_reported_until_the_need_is_met,
    a_need_above_the_limit_closes_the_socket,
    a_full_buffer_stops_receiving_until_consumed,
    a_paused_socket_is_silent_until_resumed,
    closing_with_operations_in_flight_is_silent_and_safe,
    farewell_reaches_the_peer_before_the_end,
    last_message_is_readable_when_the_end_is_reported_with_it,
    a_reset_is_an_error_and_an_orderly_end_is_none,
    a_refused_connect_is_reported_as_closed,
    a_connect_without_answer_times_out,
    ids_of_the_past_never_match_a_new_socket,
    storms_of_connections_are_all_accepted,
    a_listener_without_descriptors_goes_on_later,
    an_abandoned_unix_socket_is_replaced_and_a_live_one_is_not,
    a_closed_listener_refuses,
    an_address_that_is_in_use_a_little_longer_is_waited_for,
    dropping_the_engine_with_everything_in_flight_is_safe,
);

fn what_is_sent_comes_back_over_tcp(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (client, server) = rig.pair();
    for round in 0..100 {
        let message = pattern(4096, round);
        rig.engine.send(client, &message);
        assert_eq!(rig.engine.queued_bytes(client), 4096);
        let seen = rig.take_exactly(server, 4096);
        assert_eq!(seen, message);
        rig.engine.send(server, &seen[..64]);
        assert_eq!(rig.take_exactly(client, 64), message[..64]);
    }
    assert_eq!(rig.engine.queued_bytes(client), 0);
}

fn what_is_sent_comes_back_over_unix_sockets(kind: EngineKind) {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::new(kind);
    let path = folder.path().join("data.sock");
    let (listener, address) = rig.engine.listen(&Address::Unix(path.clone())).unwrap();
    let client = rig.engine.connect(&address).unwrap();
    rig.connected(client);
    let server = rig.accepted(listener);
    rig.engine.send(client, b"over a file");
    assert_eq!(rig.take_exactly(server, 11), b"over a file");
    rig.engine.close_listener(listener);
    assert!(!path.exists(), "the file is removed with its listener");
}

fn bytes_sent_before_the_connection_stands_arrive(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (listener, address) = rig.listen();
    let client = rig.engine.connect(&address).unwrap();
    rig.engine.send(client, b"early");
    let server = rig.accepted(listener);
    assert_eq!(rig.take_exactly(server, 5), b"early");
}

fn large_transfers_arrive_whole_through_partial_sends(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (client, server) = rig.pair();
    let mut expected = Vec::new();
    for piece in 0..24 {
        let header = pattern(100, piece);
        let payload = pattern(1 << 20, 1000 + piece);
        rig.engine.send(client, &header);
        let mut buf = rig.engine.buffer(payload.len());
        buf.copy_from_slice(&payload);
        let payload_shared = rig.engine.share(buf);
        rig.engine
            .send_shared(client, payload_shared.slice(0..1000));
        rig.engine
            .send_shared(client, payload_shared.slice(1000..payload.len()));
        expected.extend(header);
        expected.extend(payload);
    }
    let seen = rig.take_exactly(server, expected.len());
    assert!(seen == expected);
    assert_eq!(rig.engine.queued_bytes(client), 0);
}

fn a_peer_that_does_not_read_blocks_only_its_own_queue(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (stuck, mut peer) = rig.half_pair();
    let (client, server) = rig.pair();
    let data = pattern(16 << 20, 1);
    rig.engine.send_shared(stuck, SharedBytes::copy_of(&data));
    rig.settle();
    assert!(rig.engine.queued_bytes(stuck) > 0);
    rig.engine.send(client, b"unaffected");
    assert_eq!(rig.take_exactly(server, 10), b"unaffected");
    let reader = std::thread::spawn(move || {
        let mut seen = vec![0; 16 << 20];
        peer.read_exact(&mut seen).unwrap();
        seen
    });
    rig.wait_for(|e| matches!(e, Event::Drained { socket } if *socket == stuck).then_some(()));
    assert_eq!(rig.engine.queued_bytes(stuck), 0);
    assert!(reader.join().unwrap() == data);
}

fn draining_is_reported_only_after_output_was_held_over(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (client, server) = rig.pair();
    for _ in 0..10 {
        rig.engine.send(client, &[7; 4096]);
        rig.take_exactly(server, 4096);
    }
    rig.settle();
    assert!(
        !rig.events
            .iter()
            .any(|event| matches!(event, Event::Drained { .. }))
    );
}

fn draining_is_reported_also_when_a_poll_returned_before_it_sent_anything(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (client, server) = rig.pair();
    // Its peer is outside, so that nothing else happens in this engine when it takes the output.
    let (socket, mut peer) = rig.half_pair();
    rig.engine.send(client, b"x");
    rig.received(server);
    // Reported once more, by a poll that needs no system call for it.
    rig.engine.pause(server);
    rig.engine.resume(server);
    rig.engine.send(socket, &[7; 4096]);
    rig.turn(Duration::ZERO);
    assert_eq!(rig.engine.queued_bytes(socket), 4096);
    rig.wait_for(|e| matches!(e, Event::Drained { socket: s } if *s == socket).then_some(()));
    let mut seen = [0; 4096];
    peer.read_exact(&mut seen).unwrap();
    assert_eq!(seen, [7; 4096]);
}

fn many_pieces_go_out_without_another_event(kind: EngineKind) {
    let options = Options {
        kind: Some(kind),
        send_copy_max: 0,
        ..Options::default()
    };
    let mut rig = Rig::with(options);
    let (socket, mut peer) = rig.half_pair();
    let piece = SharedBytes::copy_of(&[5; 100]);
    for _ in 0..1000 {
        rig.engine.send_shared(socket, piece.clone());
    }
    // One turn only: nothing will happen that could wake the engine for the rest.
    rig.turn(Duration::from_millis(1));
    assert_eq!(rig.engine.queued_bytes(socket), 0);
    let mut seen = vec![0; 100_000];
    peer.read_exact(&mut seen).unwrap();
    assert!(seen.iter().all(|byte| *byte == 5));
}

fn nothing_is_reported_until_the_need_is_met(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (socket, mut peer) = rig.half_pair();
    let data = pattern(1 << 20, 3);
    peer.write_all(&data[..100]).unwrap();
    rig.received(socket);
    rig.engine.need(socket, data.len());
    peer.write_all(&data[100..50_000]).unwrap();
    rig.settle();
    assert!(!rig.has_received(socket));
    let writer = {
        let data = data.clone();
        std::thread::spawn(move || peer.write_all(&data[50_000..]).map(|()| peer))
    };
    rig.received(socket);
    assert!(rig.engine.input(socket) == data);
    rig.engine.consume(socket, data.len());
    // The need held for one report: the next bytes are reported whatever their number.
    let mut peer = writer.join().unwrap().unwrap();
    peer.write_all(b"x").unwrap();
    rig.received(socket);
    assert_eq!(rig.take(socket), b"x");
}

fn a_need_above_the_limit_closes_the_socket(kind: EngineKind) {
    let options = Options {
        kind: Some(kind),
        receive_bytes_max: 1 << 20,
        ..Options::default()
    };
    let mut rig = Rig::with(options);
    let (socket, mut peer) = rig.half_pair();
    peer.write_all(b"header").unwrap();
    rig.received(socket);
    rig.engine.need(socket, (1 << 20) + 1);
    assert_eq!(rig.closed(socket), Some(ErrorKind::InvalidData));
    rig.turn(Duration::ZERO);
    assert!(
        matches!(peer.read(&mut [0; 1]), Ok(0) | Err(_)),
        "the peer sees the end"
    );
}

fn a_full_buffer_stops_receiving_until_consumed(kind: EngineKind) {
    let options = Options {
        kind: Some(kind),
        receive_bytes: 8192,
        ..Options::default()
    };
    let mut rig = Rig::with(options);
    let (socket, mut peer) = rig.half_pair();
    let data = pattern(100_000, 4);
    peer.write_all(&data).unwrap();
    rig.until(|rig| rig.engine.input(socket).len() == 8192);
    rig.settle();
    assert_eq!(rig.engine.input(socket).len(), 8192);
    rig.events.clear();
    assert!(rig.take_exactly(socket, data.len()) == data);
}

fn a_paused_socket_is_silent_until_resumed(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (socket, mut peer) = rig.half_pair();
    rig.settle();
    rig.engine.pause(socket);
    peer.write_all(b"one").unwrap();
    rig.settle();
    peer.write_all(b"two").unwrap();
    rig.settle();
    assert!(!rig.has_received(socket));
    rig.engine.resume(socket);
    assert_eq!(rig.take_exactly(socket, 6), b"onetwo");
    // Input that was left is reported again, without new bytes.
    peer.write_all(b"left").unwrap();
    rig.received(socket);
    rig.engine.pause(socket);
    rig.settle();
    rig.engine.resume(socket);
    rig.received(socket);
    assert_eq!(rig.take(socket), b"left");
}

fn closing_with_operations_in_flight_is_silent_and_safe(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    for _ in 0..50 {
        let (receiving, mut peer) = rig.half_pair();
        let (sending, _sending_peer) = rig.half_pair();
        rig.engine
            .send_shared(sending, SharedBytes::new(IoBuf::new(8 << 20)));
        rig.turn(Duration::ZERO);
        let _ = peer.write_all(b"on its way");
        rig.engine.close(receiving);
        rig.engine.close(sending);
        rig.engine.close(sending);
        assert_eq!(rig.engine.input(receiving), b"");
        assert_eq!(rig.engine.queued_bytes(sending), 0);
        rig.turn(Duration::ZERO);
    }
    rig.settle();
    assert!(rig.events.is_empty(), "{:?}", rig.events);
}

fn farewell_reaches_the_peer_before_the_end(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    for _ in 0..20 {
        let (socket, mut peer) = rig.half_pair();
        // The end arrives with input unread, which would make the kernel send a reset.
        peer.write_all(&[1; 10_000]).unwrap();
        rig.received(socket);
        rig.engine.send(socket, b"goodbye");
        rig.engine.close(socket);
        rig.turn(Duration::ZERO);
        let mut seen = Vec::new();
        let _ = peer.read_to_end(&mut seen);
        assert_eq!(seen, b"goodbye");
    }
}

fn last_message_is_readable_when_the_end_is_reported_with_it(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (socket, mut peer) = rig.half_pair();
    peer.write_all(b"last words").unwrap();
    drop(peer);
    rig.received(socket);
    let error = rig.closed(socket);
    assert_eq!(error, None);
    assert_eq!(rig.engine.input(socket), b"last words");
    rig.turn(Duration::ZERO);
    assert_eq!(rig.engine.input(socket), b"");
}

fn a_reset_is_an_error_and_an_orderly_end_is_none(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (socket, peer) = rig.half_pair();
    rustix::net::sockopt::set_socket_linger(peer.as_fd(), Some(Duration::ZERO)).unwrap();
    drop(peer);
    assert_eq!(rig.closed(socket), Some(ErrorKind::ConnectionReset));
    let (socket, peer) = rig.half_pair();
    drop(peer);
    assert_eq!(rig.closed(socket), None);
    // Sending into a connection that is gone ends it too.
    let (socket, peer) = rig.half_pair();
    rig.engine.pause(socket);
    rustix::net::sockopt::set_socket_linger(peer.as_fd(), Some(Duration::ZERO)).unwrap();
    drop(peer);
    rig.engine.send(socket, b"anybody?");
    assert!(rig.closed(socket).is_some());
}

fn a_refused_connect_is_reported_as_closed(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (listener, address) = rig.listen();
    rig.engine.close_listener(listener);
    rig.settle();
    let socket = rig.engine.connect(&address).unwrap();
    assert_eq!(rig.closed(socket), Some(ErrorKind::ConnectionRefused));
    let socket = rig
        .engine
        .connect(&"unix:/nonexistent/socket".parse().unwrap())
        .unwrap();
    assert_eq!(rig.closed(socket), Some(ErrorKind::NotFound));
}

fn a_connect_without_answer_times_out(kind: EngineKind) {
    let connect_timeout = Duration::from_millis(50);
    let mut rig = Rig::with(Options {
        kind: Some(kind),
        connect_timeout,
        ..Options::default()
    });
    // A listener whose queue is full drops further attempts, so they get no answer.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let sockets: Vec<_> = (0..4)
        .map(|_| rig.engine.connect(&address).unwrap())
        .collect();
    assert_eq!(rig.closed(sockets[3]), Some(ErrorKind::TimedOut));
}

fn ids_of_the_past_never_match_a_new_socket(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (old, _peer) = rig.half_pair();
    rig.settle();
    rig.engine.close(old);
    rig.settle();
    let (new, mut peer) = rig.half_pair();
    assert_ne!(old, new);
    rig.engine.send(old, b"to nobody");
    rig.engine.need(old, 1 << 30);
    rig.engine.pause(old);
    rig.engine.close(old);
    assert_eq!(rig.engine.queued_bytes(old), 0);
    rig.engine.send(new, b"alive");
    rig.settle();
    let mut seen = [0; 5];
    peer.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"alive");
    peer.write_all(b"back").unwrap();
    assert_eq!(rig.take_exactly(new, 4), b"back");
    assert_eq!(rig.engine.input(old), b"");
}

fn storms_of_connections_are_all_accepted(kind: EngineKind) {
    let mut rig = Rig::with(Options {
        kind: Some(kind),
        ring_entries: 8,
        ..Options::default()
    });
    let (listener, address) = rig.listen();
    let clients: Vec<_> = (0..300)
        .map(|_| rig.engine.connect(&address).unwrap())
        .collect();
    let servers: Vec<_> = (0..300).map(|_| rig.accepted(listener)).collect();
    for client in &clients {
        rig.engine.send(*client, b"hello");
    }
    // More sockets at once than the rings have entries.
    for server in &servers {
        assert_eq!(rig.take_exactly(*server, 5), b"hello");
    }
    for client in clients {
        rig.engine.close(client);
    }
    for server in servers {
        assert_eq!(rig.closed(server), None);
    }
}

/// In a child process, because the limit on descriptors is one of the process.
fn a_listener_without_descriptors_goes_on_later(kind: EngineKind) {
    if std::env::var_os("ENGINE_TEST_CHILD").is_none() {
        let name = match kind {
            EngineKind::IoUring => "io_uring::a_listener_without_descriptors_goes_on_later",
            EngineKind::Portable => "portable::a_listener_without_descriptors_goes_on_later",
        };
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env("ENGINE_TEST_CHILD", "1")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}",
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    }
    let mut rig = Rig::new(kind);
    let (listener, address) = rig.listen();
    let Address::Tcp(to) = address else {
        unreachable!()
    };
    let mut peer = std::net::TcpStream::connect(to).unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let none = rustix::process::Rlimit {
        current: Some(1),
        maximum: limit.maximum,
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
    let error = rig.wait_for(|event| match event {
        Event::AcceptFailed { error, .. } => Some(error.raw_os_error()),
        _ => None,
    });
    assert_eq!(error, Some(rustix::io::Errno::MFILE.raw_os_error()));
    // It does not spin meanwhile: one failure per retry period, not thousands.
    let started = rig.clock();
    let mut turns = 0;
    while rig.clock() < started + Duration::from_millis(50) {
        rig.turn(Duration::from_millis(10));
        turns += 1;
    }
    assert!(turns < 20, "{turns} turns in 50 ms");
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let socket = rig.accepted(listener);
    peer.write_all(b"finally").unwrap();
    assert_eq!(rig.take_exactly(socket, 7), b"finally");
}

fn an_abandoned_unix_socket_is_replaced_and_a_live_one_is_not(kind: EngineKind) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.sock");
    // Dropping a listener of std leaves its file behind, as a killed process does.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let mut rig = Rig::new(kind);
    let address = Address::Unix(path.clone());
    rig.engine.listen(&address).unwrap();
    let error = rig.engine.listen(&address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    std::fs::write(folder.path().join("file"), "precious").unwrap();
    assert!(
        rig.engine
            .listen(&Address::Unix(folder.path().join("file")))
            .is_err()
    );
    assert!(folder.path().join("file").exists());
    drop(rig);
    assert!(!path.exists());
}

fn a_closed_listener_refuses(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (listener, address) = rig.listen();
    rig.settle();
    rig.engine.close_listener(listener);
    let Address::Tcp(to) = address.clone() else {
        unreachable!()
    };
    assert!(std::net::TcpStream::connect(to).is_err());
    rig.settle();
    rig.engine.listen(&address).unwrap();
    std::net::TcpStream::connect(to).unwrap();
}

fn dropping_the_engine_with_everything_in_flight_is_safe(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let (receiving, mut peer) = rig.half_pair();
    let (sending, _sending_peer) = rig.half_pair();
    let (_, address) = rig.listen();
    rig.engine.connect(&address).unwrap();
    rig.engine.need(receiving, 1 << 20);
    rig.engine
        .send_shared(sending, SharedBytes::new(IoBuf::new(8 << 20)));
    rig.turn(Duration::ZERO);
    peer.write_all(&[1; 100_000]).unwrap();
    rig.engine.connect(&address).unwrap();
    let started = Time(rig.clock().0);
    let waker = rig.engine.waker();
    drop(rig);
    waker.wake();
    assert!(Rig::new(kind).clock().since(started) < Duration::from_secs(2));
}

fn an_address_that_is_in_use_a_little_longer_is_waited_for(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", holder.local_addr().unwrap());
    let address: Address = address.parse().unwrap();
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(holder);
    });
    let (_, actual) = rig.engine.listen(&address).unwrap();
    release.join().unwrap();
    assert_eq!(actual, address);
}
