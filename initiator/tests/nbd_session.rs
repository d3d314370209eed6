//! Sessions over real sockets, with both engines: what clients ask, rightly and wrongly.

mod nbd_support;

use std::io::Write as _;

use ashlar_engine::EngineKind;
use ashlar_initiator::front_end::VolumeAccess;
use nbd_support::{Answer, Client, KIB, MIB, Order, Server, Setup, assemble, folder, unix};
use proptest::prelude::*;

const KINDS: [EngineKind; 2] = [EngineKind::IoUring, EngineKind::Portable];

/// Runs a test with each engine, over a unix and over a TCP socket, structured and not.
fn everywhere(change: impl Fn(&mut Setup), test: impl Fn(&Server, bool)) {
    for engine in KINDS {
        for structured in [true, false] {
            let folder = folder();
            let address = if structured {
                unix(&folder)
            } else {
                "tcp:127.0.0.1:0".parse().unwrap()
            };
            let mut setup = Setup::new(engine, address);
            change(&mut setup);
            test(&Server::start(setup), structured);
        }
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn plain(cookie: u64, error: u32) -> Answer {
    Answer {
        cookie,
        error,
        ..Answer::default()
    }
}

#[test]
fn what_is_written_is_read_at_any_alignment() {
    everywhere(
        |_| {},
        |server, structured| {
            let mut client = Client::connect(server);
            let flags = client.go(structured);
            assert_eq!(
                flags & 128 != 0,
                structured,
                "DF goes with structured replies"
            );
            let mut expected = vec![0; 8 << 20];
            for (n, (offset, len)) in [(0, 1), (4095, 2), (12_345, 67_890), (MIB - 3, 4096)]
                .into_iter()
                .enumerate()
            {
                let data = pattern(len, n as u64);
                client.write(n as u64, offset, &data);
                assert_eq!(client.answer(0), plain(n as u64, 0));
                expected[offset as usize..][..len].copy_from_slice(&data);
            }
            assert!(client.read(0, 8 << 20) == expected);
            assert!(client.read(4095, 3) == expected[4095..4098]);
            // A flush, a trim, zeros; with FUA.
            client.request(1, 3, 9, 0, 0);
            assert_eq!(client.answer(0), plain(9, 0));
            client.request(1, 6, 10, 12_345, 60_000);
            assert_eq!(client.answer(0), plain(10, 0));
            expected[12_345..72_345].fill(0);
            client.request(0, 4, 11, 4 * MIB, MIB as u32);
            assert_eq!(client.answer(0), plain(11, 0));
            assert!(client.read(0, 8 << 20) == expected);
        },
    );
}

#[test]
fn holes_are_told_apart_and_df_keeps_a_read_in_one_chunk() {
    for engine in KINDS {
        let folder = folder();
        let server = Server::start(Setup::new(engine, unix(&folder)));
        let mut client = Client::connect(&server);
        client.go(true);
        client.write(1, 128 * KIB, &[7; 4096]);
        client.answer(0);
        client.request(0, 0, 2, 0, 1 << 20);
        let answer = client.answer(0);
        let holes = [(0, 128 << 10), (192 * KIB, 832 << 10)];
        assert_eq!(
            (answer.holes.as_slice(), answer.data.len()),
            (&holes[..], 1)
        );
        client.request(4, 0, 3, 1, 1 << 20);
        let answer = client.answer(0);
        assert_eq!((answer.holes.len(), answer.data.len()), (0, 1));
        assert_eq!(
            assemble(&answer, 1, 1 << 20)[(128 << 10) - 1..][..4096],
            [7; 4096]
        );
        // Status: all, and only one extent.
        client.request(0, 7, 4, 0, 1 << 20);
        let expected = [(128 << 10, 3), (64 << 10, 0), (832 << 10, 3)];
        assert_eq!(client.answer(0).status, expected);
        client.request(8, 7, 5, 64 * KIB, 1 << 20);
        assert_eq!(client.answer(0).status, [(64 << 10, 3)]);
        // Zeros that need space are no hole.
        client.request(2, 6, 6, 0, 64 << 10);
        client.answer(0);
        client.request(8, 7, 7, 0, 1 << 20);
        assert_eq!(client.answer(0).status, [(64 << 10, 0)]);
    }
}

#[test]
fn violations_are_answered_and_the_connection_goes_on() {
    everywhere(
        |_| {},
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            let size = 256 * MIB;
            let refused = |client: &mut Client, cookie, error| {
                let answer = client.answer(0);
                assert_eq!((answer.cookie, answer.error), (cookie, error), "{answer:?}");
                assert_eq!(answer.text.is_empty(), !structured);
            };
            client.write(1, size - 1, &[1, 2]);
            refused(&mut client, 1, 28);
            client.request(0, 0, 2, size, 1);
            refused(&mut client, 2, 22);
            client.request(0, 99, 3, 0, 1);
            refused(&mut client, 3, 22);
            // More than the largest payload: read past.
            client.write(4, 0, &vec![9; 33 << 20]);
            refused(&mut client, 4, 22);
            client.request(0x8000, 0, 5, 0, 1);
            refused(&mut client, 5, 22);
            client.request(18, 6, 6, 0, 4096);
            refused(&mut client, 6, 95);
            client.request(0, 0, 7, u64::MAX, u32::MAX);
            refused(&mut client, 7, 22);
            assert_eq!(client.read(0, 4096), vec![0; 4096]);
            assert_eq!(server.counter("requests_refused"), 7);
        },
    );
}

#[test]
fn a_failed_read_is_answered_by_an_error() {
    everywhere(
        |setup| setup.bad_from = MIB,
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            client.request(0, 0, 1, 2 * MIB, 4096);
            let answer = client.answer(0);
            assert_eq!((answer.cookie, answer.error), (1, 5));
            assert_eq!(answer.text.contains("2097152"), structured, "{answer:?}");
            assert_eq!(client.read(0, 1), [0]);
        },
    );
}

#[test]
fn a_read_only_volume_refuses_writes() {
    everywhere(
        |setup| setup.access = VolumeAccess::ReadOnly,
        |server, structured| {
            let mut client = Client::connect(server);
            let flags = client.go(structured);
            assert_eq!(flags & 2, 2);
            client.write(1, 0, &[1; 5000]);
            assert_eq!(client.answer(0).error, 1);
            client.request(0, 6, 2, 0, 5000);
            assert_eq!(client.answer(0).error, 1);
            assert_eq!(client.read(0, 5000), vec![0; 5000]);
        },
    );
}

/// A volume that takes two requests at a time, and a client that sends much more than that at once.
#[test]
fn a_client_that_sends_more_than_there_is_room_for_is_held_back_and_loses_nothing() {
    everywhere(
        |setup| setup.in_flight_max = 2,
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            let count = 300_u64;
            let len = |n: u64| 1 + (n * 7919 % 20_000) as usize;
            let mut all = Vec::new();
            for n in 0..count {
                let mut frame = 0x2560_9513_u32.to_be_bytes().to_vec();
                frame.extend_from_slice(&[0, 0, 0, 1]);
                frame.extend_from_slice(&n.to_be_bytes());
                frame.extend_from_slice(&(n * 30_001).to_be_bytes());
                frame.extend_from_slice(&(len(n) as u32).to_be_bytes());
                frame.extend_from_slice(&pattern(len(n), n));
                all.extend_from_slice(&frame);
            }
            client.stream.write_all(&all).unwrap();
            let mut cookies: Vec<_> = (0..count).map(|_| client.answer(0).cookie).collect();
            cookies.sort_unstable();
            assert_eq!(cookies, (0..count).collect::<Vec<_>>());
            for n in 0..count {
                assert!(
                    client.read(n * 30_001, len(n) as u32) == pattern(len(n), n),
                    "{n}"
                );
            }
            assert!(server.counter("pauses") > 0);
        },
    );
}

#[test]
fn the_largest_requests_pass_and_a_slow_reader_is_not_sent_more_than_its_share() {
    everywhere(
        |_| {},
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            let data = pattern(32 << 20, 5);
            client.write(1, 4097, &data);
            assert_eq!(client.answer(0), plain(1, 0));
            // Asked for 8 times before any of it is read.
            for n in 0..8 {
                client.request(0, 0, n, 4097, 32 << 20);
            }
            let mut other = Client::connect(server);
            other.go(structured);
            assert!(other.read(4097, 4096) == data[..4096]);
            for _ in 0..8 {
                let answer = client.answer(32 << 20);
                assert!(assemble(&answer, 4097, 32 << 20) == data);
            }
            assert!(server.counter("pauses") > 0);
        },
    );
}

#[test]
fn disconnect_is_obeyed_after_the_requests_before_it() {
    everywhere(
        |setup| setup.in_flight_max = 1,
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            for n in 0..10 {
                client.request(0, 0, n, n * MIB, 70_000);
            }
            client.request(0, 2, 0, 0, 0);
            for _ in 0..10 {
                client.answer(70_000);
            }
            assert!(client.is_closed());
        },
    );
}

#[test]
fn a_client_that_vanishes_leaves_nothing_behind() {
    everywhere(
        |_| {},
        |server, structured| {
            for cut in [1, 20, 27, 28, 29, 5000, 2 << 20] {
                let mut client = Client::connect(server);
                client.go(structured);
                client.write(1, 0, &[1; 100]);
                let mut frame = 0x2560_9513_u32.to_be_bytes().to_vec();
                frame.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
                frame.extend_from_slice(&[0; 8]);
                frame.extend_from_slice(&(3_u32 << 20).to_be_bytes());
                frame.resize(28 + (3 << 20), 7);
                client.stream.write_all(&frame[..cut]).unwrap();
            }
            let mut client = Client::connect(server);
            client.go(structured);
            client.read(0, 4096);
        },
    );
}

#[test]
fn a_detached_volume_ends_its_connections_and_is_no_longer_listed() {
    everywhere(
        |_| {},
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            // A write whose payload has not come yet.
            client.request(0, 1, 1, 0, 4096);
            server.order(Order::Detach);
            assert!(client.is_closed());
            let mut late = Client::connect(server);
            late.greet();
            late.option(3, &[]);
            assert_eq!(late.option_reply().0, 1, "nothing is listed");
            late.option(6, &[0, 0, 0, 4, b'd', b'a', b't', b'a', 0, 0]);
            assert_eq!(late.option_reply().0, (1 << 31) + 6);
        },
    );
}

#[test]
fn a_volume_that_has_grown_serves_its_new_end() {
    let folder = folder();
    let server = Server::start(Setup::new(EngineKind::IoUring, unix(&folder)));
    let mut client = Client::connect(&server);
    client.go(true);
    client.request(0, 0, 1, 256 * MIB, 4096);
    assert_eq!(client.answer(0).error, 22);
    server.order(Order::Resize(512 * MIB));
    let begin = std::time::Instant::now();
    while begin.elapsed().as_secs() < 10 {
        client.request(0, 0, 2, 256 * MIB, 4096);
        if client.answer(0).error == 0 {
            return;
        }
    }
    panic!("the new end is not served");
}

#[test]
fn old_clients_that_only_know_export_name_are_served() {
    everywhere(
        |_| {},
        |server, _| {
            for zeroes in [true, false] {
                let mut client = Client::connect(server);
                client.take(18);
                let flags: u32 = if zeroes { 0 } else { 3 };
                client.stream.write_all(&flags.to_be_bytes()).unwrap();
                client.option(1, b"data");
                let size = client.take(8);
                assert_eq!(nbd_support::be64(&size, 0), 256 * MIB);
                client.take(2 + if zeroes { 124 } else { 0 });
                assert_eq!(client.read(5, 10), vec![0; 10]);
            }
        },
    );
}

#[test]
fn what_is_not_the_protocol_closes_the_connection_and_counts() {
    everywhere(
        |_| {},
        |server, structured| {
            let mut client = Client::connect(server);
            client.go(structured);
            client.stream.write_all(&[0xff; 28]).unwrap();
            assert!(client.is_closed());
            let mut client = Client::connect(server);
            client.stream.write_all(&u32::MAX.to_be_bytes()).unwrap();
            assert!(client.is_closed());
            assert_eq!(server.counter("framing_lost"), 2);
        },
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_bytes_harm_the_server(
        negotiate in any::<bool>(),
        parts in proptest::collection::vec(
            (any::<bool>(), 0_u16..10, any::<u16>(), any::<u64>(), 0_u32..100_000,
                proptest::collection::vec(any::<u8>(), 0..100)), 1..20),
    ) {
        let folder = folder();
        for engine in KINDS {
            let server = Server::start(Setup::new(engine, unix(&folder)));
            let mut client = Client::connect(&server);
            if negotiate {
                client.go(true);
            }
            for (good, command, flags, offset, len, bytes) in &parts {
                let mut frame = bytes.clone();
                if *good {
                    frame = 0x2560_9513_u32.to_be_bytes().to_vec();
                    frame.extend_from_slice(&(flags % 32).to_be_bytes());
                    frame.extend_from_slice(&command.to_be_bytes());
                    frame.extend_from_slice(&[0; 8]);
                    frame.extend_from_slice(&(offset % (300 * MIB)).to_be_bytes());
                    frame.extend_from_slice(&len.to_be_bytes());
                }
                if client.stream.write_all(&frame).is_err() {
                    break;
                }
            }
            drop(client);
            let mut client = Client::connect(&server);
            client.go(true);
            client.read(0, 4096);
        }
    }
}
