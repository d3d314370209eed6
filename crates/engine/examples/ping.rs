//! Round trips over loopback, 4 KiB out and 64 bytes back, for each kind of engine, with both ends
//! on one core and on two, sleeping and busy-polling.
//!
//! `cargo run --release -p ashlar-engine --example ping [ROUNDS [io_uring | portable]]`

use std::thread;
use std::time::Duration;

use ashlar_engine::{Address, Engine, EngineKind, Event, Options, SocketId};
use ashlar_replication::values::Time;
use rustix::thread::{CpuSet, sched_setaffinity};

const REQUEST_BYTES: usize = 4096;
const REPLY_BYTES: usize = 64;
const WARM_UP_ROUNDS: usize = 2000;

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("this core cannot be used");
}

fn clock() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Time(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

fn engine(kind: EngineKind, busy_poll: Duration) -> Engine {
    let options = Options {
        kind: Some(kind),
        busy_poll,
        ..Options::default()
    };
    Engine::new(options).expect("no engine")
}

/// Answers until the peer goes away.
fn serve(mut engine: Engine) {
    let mut events = Vec::new();
    loop {
        engine.poll(Time::NEVER, &mut events).expect("poll");
        for event in events.drain(..) {
            match event {
                Event::Received { socket } => {
                    if engine.input(socket).len() < REQUEST_BYTES {
                        engine.need(socket, REQUEST_BYTES);
                    } else {
                        engine.consume(socket, REQUEST_BYTES);
                        engine.send(socket, &[2; REPLY_BYTES]);
                    }
                }
                Event::Closed { .. } => return,
                _ => {}
            }
        }
    }
}

fn wait(engine: &mut Engine, events: &mut Vec<Event>, socket: SocketId, bytes: usize) {
    while engine.input(socket).len() < bytes {
        events.clear();
        engine.poll(Time::NEVER, events).expect("poll");
    }
    engine.consume(socket, bytes);
}

fn measure(kind: EngineKind, cpus: [usize; 2], busy_poll: Duration, rounds: usize) {
    let (sender, receiver) = std::sync::mpsc::channel::<Address>();
    let server = thread::spawn(move || {
        pin(cpus[1]);
        let mut engine = engine(kind, busy_poll);
        let any = "tcp:127.0.0.1:0".parse().expect("an address");
        let (_, address) = engine.listen(&any).expect("listen");
        sender.send(address).expect("the client waits");
        serve(engine);
    });
    pin(cpus[0]);
    let mut engine = engine(kind, busy_poll);
    let socket = engine
        .connect(&receiver.recv().expect("an address"))
        .expect("connect");
    let mut events = Vec::new();
    let mut taken = Vec::with_capacity(rounds);
    for round in 0..rounds + WARM_UP_ROUNDS {
        let started = clock();
        engine.send(socket, &[1; REQUEST_BYTES]);
        wait(&mut engine, &mut events, socket, REPLY_BYTES);
        if round >= WARM_UP_ROUNDS {
            taken.push(clock().since(started).as_nanos() as u64);
        }
    }
    engine.close(socket);
    drop(engine);
    server.join().expect("server");
    taken.sort_unstable();
    let at = |part: f64| taken[((taken.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    let cores = if cpus[0] == cpus[1] {
        "one core "
    } else {
        "two cores"
    };
    let mean = taken.iter().sum::<u64>() as f64 / taken.len() as f64 / 1000.0;
    println!(
        "{:<9} {cores}  busy poll {:>3} µs   p50 {:>6.1} µs   mean {mean:>6.1}   p99 {:>6.1}   \
         p99.9 {:>7.1}",
        kind.to_string(),
        busy_poll.as_micros(),
        at(0.5),
        at(0.99),
        at(0.999),
    );
}

fn main() {
    let rounds = std::env::args()
        .nth(1)
        .map_or(50_000, |text| text.parse().expect("rounds"));
    for kind in kinds() {
        for cpus in [[0, 0], [0, 1]] {
            for busy_poll in [0, 100] {
                measure(kind, cpus, Duration::from_micros(busy_poll), rounds);
            }
        }
    }
}

fn kinds() -> Vec<EngineKind> {
    match std::env::args().nth(2).as_deref() {
        Some("io_uring") => vec![EngineKind::IoUring],
        Some("portable") => vec![EngineKind::Portable],
        _ => vec![EngineKind::IoUring, EngineKind::Portable],
    }
}
