//! In steady state the initiator allocates nothing, neither for a write nor for a read.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;

use ashlar_replication::configuration::*;
use ashlar_replication::initiator::*;
use ashlar_replication::message::*;
use ashlar_replication::values::*;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator. The default `realloc` comes through
// `alloc`, so growth is counted too.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MEMBERS: u64 = 3;
/// Writes and reads under way at a time.
const DEPTH: u64 = 32;

fn id(n: u64) -> MemberId {
    MemberId {
        device: DeviceId([n as u8; 16]),
        nonce: n,
    }
}

struct Volume {
    initiator: Initiator<u64>,
    effects: VecDeque<Effect<u64>>,
    /// Requests that no member has answered; its memory is reused.
    requests: VecDeque<(MemberId, Request<u64>)>,
    now: Time,
    done: u64,
    /// Allocations inside of the state machine.
    allocations: u64,
}

impl Volume {
    fn handle(&mut self, event: Event<u64>) {
        self.now = self.now + core::time::Duration::from_micros(1);
        let before = COUNT.get();
        self.initiator.handle(self.now, event, &mut self.effects);
        let timer = self.initiator.next_timer();
        self.allocations += COUNT.get() - before;
        assert!(timer > Time(0));
        while let Some(effect) = self.effects.pop_front() {
            match effect {
                Effect::Send { member, request } => self.requests.push_back((member, request)),
                Effect::WriteDone { result, .. } => {
                    result.expect("every member answers");
                    self.done += 1;
                }
                Effect::ReadDone { result, .. } => {
                    result.expect("every member answers");
                    self.done += 1;
                }
                _ => {}
            }
        }
    }

    fn answer_all(&mut self) {
        while let Some((member, request)) = self.requests.pop_front() {
            let reply = answer(member, request);
            self.handle(Event::Reply { member, reply });
        }
    }

    /// A batch of writes, then one of reads that overlap some of them.
    fn turn(&mut self, n: u64) {
        for i in 0..DEPTH {
            let ticket = Ticket(n * DEPTH + i);
            let range = BlockRange {
                start: Block((n * 7 + i) % 200),
                count: 1,
            };
            let content = Content::Data(i);
            self.handle(Event::Write {
                ticket,
                range,
                content,
            });
            let ticket = Ticket(u64::MAX - ticket.0);
            self.handle(Event::Read { ticket, range });
        }
        self.answer_all();
    }
}

fn configuration() -> Configuration {
    let role = Role::Data;
    Configuration {
        epoch: EpochNumber(0),
        generation: Generation(1),
        ack: Ack::Majority,
        members: (1..=MEMBERS).map(|n| Member { id: id(n), role }).collect(),
        previous: Vec::new(),
        in_sync: (1..=MEMBERS).map(id).collect(),
    }
}

/// Members that do everything at once and hold nothing.
fn answer(member: MemberId, request: Request<u64>) -> Reply<u64> {
    match request {
        Request::Fence { epoch } => Reply::Promised {
            epoch,
            state: MemberState {
                id: member,
                role: Role::Data,
                promised: epoch,
                configuration: Some(configuration()),
                state: ReplicaState::Complete,
                last_pass: (EpochNumber(0), Pass(0)),
                last: Position::ZERO,
            },
            size_blocks: 256,
            torn: Vec::new(),
        },
        Request::ListAbove { id, .. } => Reply::Positions {
            id,
            positions: Vec::new(),
            next: None,
            last: Position::ZERO,
        },
        Request::StoreConfig { id, .. } => Reply::Done { id },
        Request::Write { sequence, .. } => Reply::Applied { sequence },
        Request::Read { id, range, .. } => Reply::Data {
            id,
            result: Ok(ReadData {
                positions: vec![Position::ZERO; range.count as usize],
                content: Content::Zeros,
            }),
        },
        other => panic!("nobody is to ask for {other:?}"),
    }
}

fn attached() -> Volume {
    let members = configuration().members;
    let mut volume = Volume {
        initiator: Initiator::new(256, members, Options::default()),
        effects: VecDeque::new(),
        requests: VecDeque::new(),
        now: Time(1),
        done: 0,
        allocations: 0,
    };
    volume.handle(Event::Attach { seed: 1 });
    for n in 1..=MEMBERS {
        volume.handle(Event::Up { member: id(n) });
    }
    volume.answer_all();
    assert_eq!(volume.initiator.phase(), Phase::Open);
    volume
}

#[test]
fn writes_and_reads_allocate_nothing_once_the_queues_have_grown() {
    let mut volume = attached();
    let turns = 200;
    for n in 0..turns {
        volume.turn(n);
    }
    assert_eq!(volume.done, 2 * DEPTH * turns);
    volume.allocations = 0;
    for n in turns..2 * turns {
        volume.turn(n);
    }
    assert_eq!(volume.done, 4 * DEPTH * turns);
    assert_eq!(volume.allocations, 0);
}
