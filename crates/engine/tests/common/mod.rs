//! An engine with a queue of its events, for tests that wait for one after the other.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_engine::{
    Address, Engine, EngineError, EngineKind, Event, ListenerId, Options, SocketId,
};
use ashlar_replication::values::Time;

/// Beyond this a test is stuck.
pub const STUCK: Duration = Duration::from_secs(20);

pub struct Rig {
    pub engine: Engine,
    pub events: VecDeque<Event>,
    batch: Vec<Event>,
}

/// Makes a module with one test per kind of engine for every function named.
#[macro_export]
macro_rules! for_both_kinds {
    ($($test:ident),* $(,)?) => {
        mod io_uring {
            $(#[test] fn $test() { super::$test(ashlar_engine::EngineKind::IoUring) })*
        }
        mod portable {
            $(#[test] fn $test() { super::$test(ashlar_engine::EngineKind::Portable) })*
        }
    };
}

impl Rig {
    pub fn new(kind: EngineKind) -> Rig {
        Rig::with(Options {
            kind: Some(kind),
            ..Options::default()
        })
    }

    pub fn with(options: Options) -> Rig {
        let engine = match Engine::new(options.clone()) {
            Err(error @ EngineError::Unavailable { .. }) => {
                // The whole suite also runs where io_uring is forbidden.
                eprintln!("not testing io_uring: {error}");
                Engine::new(Options {
                    kind: Some(EngineKind::Portable),
                    ..options
                })
                .unwrap()
            }
            other => other.unwrap(),
        };
        Rig {
            engine,
            events: VecDeque::new(),
            batch: Vec::new(),
        }
    }

    /// One turn that waits for at most `wait`.
    pub fn turn(&mut self, wait: Duration) {
        let deadline = self.clock() + wait;
        self.engine.poll(deadline, &mut self.batch).unwrap();
        self.events.extend(self.batch.drain(..));
    }

    pub fn clock(&self) -> Time {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Time(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    /// The first event, in order, that `pick` takes; all others stay.
    pub fn wait_for<T>(&mut self, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        let deadline = self.clock() + STUCK;
        loop {
            let now = self.clock();
            assert!(now < deadline, "the event does not come");
            for index in 0..self.events.len() {
                if let Some(found) = pick(&self.events[index]) {
                    self.events.remove(index);
                    return found;
                }
            }
            // In one sleep: a poll that needs another event to notice this one must be found.
            self.turn(deadline.since(now));
        }
    }

    /// Turns without waiting, so that everything that can happen by itself does.
    pub fn settle(&mut self) {
        for _ in 0..20 {
            self.turn(Duration::from_millis(1));
        }
    }

    pub fn until(&mut self, mut condition: impl FnMut(&mut Rig) -> bool) {
        let deadline = self.clock() + STUCK;
        while !condition(self) {
            assert!(self.clock() < deadline, "the condition does not come");
            self.turn(Duration::from_millis(10));
        }
    }

    pub fn listen(&mut self) -> (ListenerId, Address) {
        self.engine
            .listen(&"tcp:127.0.0.1:0".parse().unwrap())
            .unwrap()
    }

    pub fn accepted(&mut self, by: ListenerId) -> SocketId {
        self.wait_for(|event| match event {
            Event::Accepted { listener, socket } if *listener == by => Some(*socket),
            _ => None,
        })
    }

    pub fn connected(&mut self, id: SocketId) {
        self.wait_for(|event| match event {
            Event::Connected { socket } if *socket == id => Some(()),
            Event::Closed { socket, error } if *socket == id => panic!("closed: {error:?}"),
            _ => None,
        })
    }

    pub fn closed(&mut self, id: SocketId) -> Option<std::io::ErrorKind> {
        self.wait_for(|event| match event {
            Event::Closed { socket, error } if *socket == id => {
                Some(error.as_ref().map(std::io::Error::kind))
            }
            _ => None,
        })
    }

    pub fn received(&mut self, id: SocketId) {
        self.wait_for(|event| match event {
            Event::Received { socket } if *socket == id => Some(()),
            Event::Closed { socket, error } if *socket == id => panic!("closed: {error:?}"),
            _ => None,
        })
    }

    pub fn has_received(&self, id: SocketId) -> bool {
        self.events
            .iter()
            .any(|e| matches!(e, Event::Received { socket } if *socket == id))
    }

    /// Both ends of a TCP connection, in this engine.
    pub fn pair(&mut self) -> (SocketId, SocketId) {
        let (listener, address) = self.listen();
        let client = self.engine.connect(&address).unwrap();
        self.connected(client);
        let server = self.accepted(listener);
        self.engine.close_listener(listener);
        (client, server)
    }

    /// A socket of the engine and its other end, by hand.
    pub fn half_pair(&mut self) -> (SocketId, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_read_timeout(Some(STUCK)).unwrap();
        peer.set_write_timeout(Some(STUCK)).unwrap();
        let ours = listener.accept().unwrap().0;
        (self.engine.adopt(ours.into()), peer)
    }

    /// Takes everything out of the input.
    pub fn take(&mut self, id: SocketId) -> Vec<u8> {
        let bytes = self.engine.input(id).to_vec();
        self.engine.consume(id, bytes.len());
        bytes
    }

    /// Receives until there are `len` bytes.
    pub fn take_exactly(&mut self, id: SocketId, len: usize) -> Vec<u8> {
        let mut bytes = self.take(id);
        while bytes.len() < len {
            self.received(id);
            bytes.extend(self.take(id));
        }
        assert_eq!(bytes.len(), len);
        bytes
    }
}

/// Bytes that differ at every place, so that a lost or moved piece is seen.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}
