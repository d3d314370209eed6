//! One initiator and its members, messages delivered by hand: what a reader wants to see first.

use ashlar_replication::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::initiator::{
    Effect, Effects, Event, Initiator, IoError, Options, OverReason, Phase, Ticket,
};
use ashlar_replication::message::{Content, Request};
use ashlar_replication::values::{
    Block, BlockRange, DeviceId, Epoch, EpochNumber, MemberId, Pass, Position, Sequence, Time,
};

use super::node::{Node, Payload, Queued, SIZE_BLOCKS};

mod members;

const ONE: BlockRange = BlockRange {
    start: Block(0),
    count: 1,
};

fn id(n: usize) -> MemberId {
    MemberId {
        device: DeviceId([n as u8 + 1; 16]),
        nonce: n as u64 + 1,
    }
}

/// Members and one initiator at a time; messages arrive at once, or not at all.
struct Bench {
    nodes: Vec<Node>,
    /// The members that a new process is told of.
    known: Vec<Member>,
    options: Options,
    reached: Vec<usize>,
    initiator: Initiator<Payload>,
    effects: Effects<Payload>,
    now: Time,
    epoch: Epoch,
    seed: u64,
    /// What came out that was not for a member.
    out: Vec<Effect<Payload>>,
}

impl Bench {
    /// `data` data members, then witnesses.
    fn new(data: usize, witnesses: usize) -> Bench {
        let role = |n| if n < data { Role::Data } else { Role::Witness };
        let members: Vec<_> = (0..data + witnesses)
            .map(|n| Member {
                id: id(n),
                role: role(n),
            })
            .collect();
        let configuration = Configuration {
            epoch: EpochNumber(0),
            generation: Generation(1),
            ack: Ack::Majority,
            members: members.clone(),
            previous: Vec::new(),
            in_sync: (0..data).map(id).collect(),
        };
        let state = |m: &Member| MemberState {
            id: m.id,
            role: m.role,
            promised: Epoch::default(),
            configuration: Some(configuration.clone()),
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        };
        let nodes: Vec<_> = members.iter().map(|m| Node::new(state(m))).collect();
        let initiator = Initiator::new(SIZE_BLOCKS, members.clone(), Options::default());
        Bench {
            nodes,
            known: members,
            options: Options::default(),
            reached: Vec::new(),
            initiator,
            effects: Effects::new(),
            now: Time(0),
            epoch: Epoch::default(),
            seed: 0,
            out: Vec::new(),
        }
    }

    /// A new process reaches these members and attaches; whatever was under way is lost.
    fn attach(&mut self, reached: &[usize]) {
        self.initiator = Initiator::new(SIZE_BLOCKS, self.known.clone(), self.options.clone());
        self.effects.clear();
        self.out.clear();
        self.seed += 1;
        self.reached = reached.to_vec();
        self.feed(Event::Attach { seed: self.seed });
        for n in reached {
            self.feed(Event::Up { member: id(*n) });
        }
    }

    /// A replica that no configuration names, and that is reached.
    fn fresh(&mut self, role: Role) -> usize {
        let n = self.nodes.len();
        let state = MemberState {
            id: id(n),
            role,
            configuration: None,
            promised: Epoch::default(),
            last: Position::ZERO,
            ..self.nodes[0].state.clone()
        };
        self.nodes.push(Node::new(MemberState {
            last_pass: (EpochNumber(0), Pass(0)),
            ..state
        }));
        self.reached.push(n);
        n
    }

    fn lose(&mut self, n: usize) {
        self.reached.retain(|r| *r != n);
        self.feed(Event::Down { member: id(n) });
    }

    fn reach(&mut self, n: usize) {
        self.reached.push(n);
        self.feed(Event::Up { member: id(n) });
    }

    fn feed(&mut self, event: Event<Payload>) {
        self.initiator.handle(self.now, event, &mut self.effects);
    }

    /// Carries everything out until nothing moves, or `stop` says so after a member's step.
    fn run_until(&mut self, mut stop: impl FnMut(usize, &Request<Payload>) -> bool) {
        let end = Time(self.now.0 + 60_000_000_000);
        loop {
            while let Some(effect) = self.effects.pop_front() {
                let Effect::Send { member, request } = effect else {
                    if let Effect::Connect { member } = effect
                        && self.reached.contains(&(member.nonce as usize - 1))
                    {
                        self.feed(Event::Up { member });
                    }
                    self.out.push(effect);
                    continue;
                };
                let n = member.nonce as usize - 1;
                if !self.reached.contains(&n) {
                    continue;
                }
                if let Request::Fence { epoch } = &request {
                    self.epoch = *epoch;
                }
                let queued = Queued {
                    connection: 0,
                    epoch: self.epoch,
                    request,
                };
                let looks = matches!(
                    queued.request,
                    Request::Read { .. }
                        | Request::Compare { .. }
                        | Request::Digests { .. }
                        | Request::ListAbove { .. }
                );
                let reply = if looks {
                    self.nodes[n].look(queued.epoch, &queued.request)
                } else {
                    self.nodes[n].apply(&queued)
                };
                if stop(n, &queued.request) {
                    return;
                }
                // The answer comes with a fresh lease.
                let (member, sent_at) = (id(n), self.now);
                self.feed(Event::Reply { member, reply });
                self.feed(Event::Renewed { member, sent_at });
            }
            let timer = self.initiator.next_timer();
            if timer > end {
                return;
            }
            self.now = self.now.max(timer);
            self.feed(Event::Timer);
        }
    }

    fn run(&mut self) {
        self.run_until(|_, _| false);
    }

    fn write(&mut self, ticket: u64, content: u64) {
        self.feed(Event::Write {
            ticket: Ticket(ticket),
            range: ONE,
            content: Content::Data(vec![content]),
        });
    }

    fn read(&mut self) -> Option<u64> {
        for reached in self.reached.clone() {
            let (member, sent_at) = (id(reached), self.now);
            self.feed(Event::Renewed { member, sent_at });
        }
        let ticket = Ticket(u64::MAX);
        self.feed(Event::Read { ticket, range: ONE });
        self.run();
        self.out.iter().rev().find_map(|effect| match effect {
            Effect::ReadDone {
                result: Ok(data), ..
            } => match &data.content {
                Content::Data(data) => Some(data[0]),
                Content::Zeros => Some(0),
            },
            _ => None,
        })
    }

    fn result(&self, ticket: u64) -> Option<Result<(), IoError>> {
        self.out.iter().find_map(|effect| match effect {
            Effect::WriteDone { ticket: t, result } if t.0 == ticket => Some(result.clone()),
            _ => None,
        })
    }

    fn in_sync(&self) -> Vec<MemberId> {
        let committed = self.initiator.configuration();
        committed.map(|c| c.in_sync.clone()).unwrap_or_default()
    }

    fn block_of(&self, n: usize) -> Option<(Position, u64)> {
        let stored = self.nodes[n].blocks.get(&Block(0))?;
        Some((stored.position, stored.content))
    }
}

fn at(epoch: u32, sequence: u64) -> Position {
    Position {
        epoch: EpochNumber(epoch),
        sequence: Sequence(sequence),
    }
}

#[test]
fn a_volume_is_attached_written_read_and_detached() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    assert_eq!(bench.initiator.phase(), Phase::Open);
    bench.write(1, 7);
    bench.run();
    assert_eq!(bench.result(1), Some(Ok(())));
    assert_eq!(bench.read(), Some(7));
    for n in 0..3 {
        assert_eq!(bench.block_of(n), Some((at(1, 1), 7)));
    }
    bench.feed(Event::Detach);
    bench.run();
    let over = |e: &Effect<Payload>| matches!(e, Effect::Over { reason } if *reason == OverReason::Detached);
    assert!(bench.out.iter().any(over));
}

#[test]
fn a_lost_member_leaves_comes_back_by_resync_and_is_equal() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    bench.lose(2);
    bench.run();
    assert_eq!(bench.in_sync(), [id(0), id(1)]);
    bench.write(1, 7);
    bench.run();
    assert_eq!(bench.result(1), Some(Ok(())));
    bench.reach(2);
    bench.run();
    assert_eq!(bench.in_sync(), [id(0), id(1), id(2)]);
    assert_eq!(bench.block_of(2), bench.block_of(0));
}

#[test]
fn two_data_members_and_a_witness_survive_the_loss_of_one() {
    let mut bench = Bench::new(2, 1);
    bench.attach(&[0, 1, 2]);
    bench.run();
    bench.write(1, 7);
    bench.run();
    bench.lose(0);
    bench.write(2, 8);
    bench.run();
    assert_eq!(bench.result(2), Some(Ok(())));
    bench.attach(&[1, 2]);
    bench.run();
    assert_eq!(bench.initiator.phase(), Phase::Open);
    assert_eq!(bench.read(), Some(8));
}

#[test]
fn a_write_that_nobody_has_room_for_fails_and_the_stream_goes_on() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    bench.nodes.iter_mut().for_each(|n| n.full = true);
    bench.write(1, 7);
    bench.feed(Event::Write {
        ticket: Ticket(2),
        range: ONE,
        content: Content::Zeros,
    });
    bench.run();
    assert_eq!(bench.result(1), Some(Err(IoError::NoSpace)));
    assert_eq!(bench.result(2), Some(Ok(())));
    for n in 0..3 {
        assert_eq!(bench.block_of(n), Some((at(1, 1), 0)));
    }
}

#[test]
fn an_evicted_member_leaves_and_comes_back_when_it_is_readmitted() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    bench.nodes[1].evicted = true;
    bench.write(1, 7);
    bench.run_until(|n, request| n == 1 && matches!(request, Request::BeginResync { .. }));
    assert_eq!(bench.result(1), Some(Ok(())));
    assert_eq!(bench.in_sync(), [id(0), id(2)]);
    bench.nodes[1].evicted = false;
    bench.lose(1);
    bench.reach(1);
    bench.run();
    assert_eq!(bench.in_sync(), [id(0), id(1), id(2)]);
    assert_eq!(bench.block_of(1), bench.block_of(0));
}

#[test]
fn a_torn_block_that_nobody_has_whole_is_the_same_everywhere_before_the_epoch_starts() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    bench.write(1, 7);
    bench.run();
    // Writes 2 and 3 reached member 0 alone, and the latter tore the block.
    bench.reached = vec![0];
    bench.write(2, 8);
    bench.run_until(|_, request| matches!(request, Request::Write { .. }));
    let stored = bench.nodes[0].blocks.get_mut(&Block(0)).expect("written");
    (stored.position, stored.content, stored.torn) = (at(1, 3), 99, true);
    // The next attach dies at its first configuration, the one after does not see member 0.
    bench.attach(&[0, 1, 2]);
    bench.run_until(|_, request| matches!(request, Request::StoreConfig { .. }));
    for n in 0..3 {
        assert_eq!(bench.block_of(n), Some((at(2, 0), 99)));
        assert!(!bench.nodes[n].blocks[&Block(0)].torn);
    }
    bench.attach(&[1, 2]);
    bench.run();
    assert_eq!(bench.read(), Some(99));
}

#[test]
fn a_torn_block_that_another_member_has_whole_is_taken_from_there() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    bench.write(1, 7);
    bench.run();
    let stored = bench.nodes[0].blocks.get_mut(&Block(0)).expect("written");
    (stored.content, stored.torn) = (99, true);
    bench.attach(&[0, 1, 2]);
    bench.run();
    assert_eq!(bench.block_of(0), Some((at(1, 1), 7)));
}

#[test]
fn a_new_process_takes_a_volume_over_without_a_pause() {
    let mut bench = Bench::new(3, 0);
    bench.attach(&[0, 1, 2]);
    bench.run();
    let before = bench.now;
    bench.attach(&[0, 1, 2]);
    bench.run();
    assert_eq!(bench.initiator.phase(), Phase::Open);
    assert_eq!(bench.now, before);
}
