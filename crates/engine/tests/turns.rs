//! Waiting, waking, and what a turn costs.

mod common;

use std::io::Write;
use std::time::Duration;

use ashlar_engine::{EngineKind, Event, Options};
use ashlar_replication::values::Time;
use common::Rig;

for_both_kinds!(
    a_deadline_ends_the_wait,
    a_deadline_of_the_past_does_not_wait,
    a_waker_ends_the_wait_from_another_thread,
    an_early_wake_is_not_lost,
    spinning_finds_events_and_keeps_deadlines,
    an_idle_engine_uses_no_processor_time,
    time_advances_from_turn_to_turn,
);

fn a_deadline_ends_the_wait(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let started = rig.clock();
    let mut events = Vec::new();
    while rig.engine.now() < started + Duration::from_millis(20) {
        rig.engine
            .poll(started + Duration::from_millis(20), &mut events)
            .unwrap();
    }
    let took = rig.clock().since(started);
    assert!(
        took >= Duration::from_millis(20) && took < Duration::from_secs(2),
        "{took:?}"
    );
    assert!(events.is_empty());
}

fn a_deadline_of_the_past_does_not_wait(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let started = rig.clock();
    let mut events = Vec::new();
    for _ in 0..100 {
        rig.engine.poll(Time(0), &mut events).unwrap();
    }
    assert!(rig.clock().since(started) < Duration::from_secs(1));
}

fn a_waker_ends_the_wait_from_another_thread(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    for _ in 0..10 {
        let waker = rig.engine.waker();
        let thread = std::thread::spawn(move || {
            waker.wake();
            waker.wake();
        });
        let mut events = Vec::new();
        while events.is_empty() {
            rig.engine.poll(Time::NEVER, &mut events).unwrap();
        }
        assert!(matches!(events[0], Event::Woken));
        thread.join().unwrap();
        rig.settle();
        rig.events.clear();
    }
}

fn an_early_wake_is_not_lost(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    rig.engine.waker().wake();
    rig.wait_for(|event| matches!(event, Event::Woken).then_some(()));
}

fn spinning_finds_events_and_keeps_deadlines(kind: EngineKind) {
    let busy_poll = Duration::from_millis(5);
    let mut rig = Rig::with(Options {
        kind: Some(kind),
        busy_poll,
        ..Options::default()
    });
    let (socket, mut peer) = rig.half_pair();
    for _ in 0..200 {
        peer.write_all(b"ping").unwrap();
        assert_eq!(rig.take_exactly(socket, 4), b"ping");
    }
    let started = rig.clock();
    rig.turn(Duration::from_millis(1));
    let took = rig.clock().since(started);
    assert!(took >= Duration::from_millis(1), "{took:?}");
    let thread = std::thread::spawn(move || {
        for _ in 0..100 {
            peer.write_all(b"pong").unwrap();
        }
        peer
    });
    rig.take_exactly(socket, 400);
    thread.join().unwrap();
}

fn an_idle_engine_uses_no_processor_time(kind: EngineKind) {
    let busy_poll = Duration::from_micros(100);
    let mut rig = Rig::with(Options {
        kind: Some(kind),
        busy_poll,
        ..Options::default()
    });
    let (_client, _server) = rig.pair();
    rig.settle();
    let thread_time = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let before = thread_time();
    let deadline = rig.clock() + Duration::from_millis(300);
    let mut events = Vec::new();
    let mut turns = 0;
    while rig.engine.now() < deadline {
        rig.engine.poll(deadline, &mut events).unwrap();
        turns += 1;
    }
    assert!(turns < 5, "{turns} turns without an event");
    assert!(thread_time() - before < Duration::from_millis(5));
}

fn time_advances_from_turn_to_turn(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    let first = rig.engine.now();
    assert_eq!(rig.engine.now(), first);
    rig.turn(Duration::from_millis(2));
    assert!(rig.engine.now() >= first + Duration::from_millis(1));
}
