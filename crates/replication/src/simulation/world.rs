//! Members, initiators, clients and the network between them, in one queue of happenings.

use core::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use crate::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use crate::faults::{Fault, is_broken};
use crate::initiator::{Effect, Effects, Event, Initiator, Options, Phase, Ticket};
use crate::message::{Content, Reply, Request};
use crate::values::{
    Block, BlockRange, DeviceId, Epoch, EpochNumber, MemberId, Pass, Position, Sequence, Time,
};

use super::chaos::Profile;
use super::ledger::{Attached, Ledger, Violation};
use super::node::{Node, Payload, Queued, SIZE_BLOCKS};
use super::random::Random;

pub(super) const MS: u64 = 1_000_000;

/// What kinds of members there are, and what a write needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) data: usize,
    pub(super) witnesses: usize,
    pub(super) ack: Ack,
}

#[derive(Clone, Debug)]
pub(super) enum ToMember {
    Request(Epoch, Request<Payload>),
    Renew(Time),
}

#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "few are in flight, and only in tests"
)]
pub(super) enum ToHost {
    Reply(Epoch, Reply<Payload>),
    Renewed(Time),
    Fenced(EpochNumber),
}

#[derive(Debug)]
pub(super) enum Happening {
    /// `late`: the connection was cut behind it; it was under way (B5).
    ToMember {
        connection: usize,
        number: u64,
        message: ToMember,
        late: bool,
    },
    ToHost {
        connection: usize,
        message: ToHost,
    },
    Step {
        node: usize,
        incarnation: u64,
    },
    Look {
        node: usize,
        incarnation: u64,
        queued: Queued,
    },
    Timer {
        host: usize,
    },
    Renew {
        host: usize,
    },
    Client {
        host: usize,
    },
    Connect {
        host: usize,
        node: usize,
    },
    Down {
        connection: usize,
    },
    Chaos,
}

/// A connection between an initiator and a member; each way keeps its order.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) host: usize,
    pub(super) node: usize,
    pub(super) open: bool,
    /// Messages to the member from this number on are lost.
    pub(super) lost_from: u64,
    sent: u64,
    to_member_at: u64,
    to_host_at: u64,
    /// The epoch that was last fenced for on it.
    asked: Epoch,
    /// Added to the way to the host.
    pub(super) latency: u64,
    /// What the member is attached to by it.
    attached: Option<Epoch>,
}

/// A read or a write that a client waits for.
#[derive(Debug)]
enum Waiting {
    Write,
    Read(BlockRange, Vec<Position>),
}

/// A process with an initiator.
pub(super) struct Host {
    pub(super) initiator: Initiator<Payload>,
    pub(super) alive: bool,
    pub(super) over: bool,
    /// Its clients only read.
    pub(super) reads_only: bool,
    connections: Vec<Option<usize>>,
    /// Its clock is so much faster, in parts per million, and starts there.
    drift: i64,
    offset: u64,
    timer: u64,
    /// Timers in a row that were due at once.
    idle_timers: u32,
    waiting: BTreeMap<u64, Waiting>,
    acknowledged: (Epoch, Sequence),
    configuration: Option<Configuration>,
}

pub(super) struct World {
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) shape: Shape,
    pub(super) options: Options,
    pub(super) nodes: Vec<Node>,
    pub(super) hosts: Vec<Host>,
    pub(super) connections: Vec<Connection>,
    pub(super) ledger: Ledger,
    pub(super) happenings: u64,
    pub(super) network_ns: u64,
    pub(super) disk_ns: u64,
    /// Nothing goes wrong any more.
    pub(super) calm: bool,
    /// Clients ask for nothing any more.
    pub(super) quiet: bool,
    /// No chance trouble comes before that time.
    pub(super) plot_until: u64,
    /// A step in between failed.
    pub(super) broken: bool,
    pub(super) profile: Option<Profile>,
    /// (host, node) pairs that cannot connect before that time.
    pub(super) cut_until: BTreeMap<(usize, usize), u64>,
    /// Nobody has room: messages are then not repeated, since a repeated write is not one under way (B6).
    pub(super) may_be_full: bool,
    pub(super) trace: bool,
    pub(super) garbage: u64,
    pub(super) acks: u64,
    pub(super) reads: u64,
    contents: u64,
    tickets: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    waiting: BTreeMap<u64, Happening>,
}

impl World {
    pub(super) fn new(seed: u64, shape: Shape, options: Options) -> World {
        let mut random = Random::new(seed);
        let member = |n: usize| Member {
            id: MemberId {
                device: DeviceId([n as u8 + 1; 16]),
                nonce: n as u64 + 1,
            },
            role: if n < shape.data {
                Role::Data
            } else {
                Role::Witness
            },
        };
        let members: Vec<Member> = (0..shape.data + shape.witnesses).map(member).collect();
        let data = members.iter().filter(|m| m.role == Role::Data);
        let configuration = Configuration {
            epoch: EpochNumber(0),
            generation: Generation(1),
            ack: shape.ack,
            members: members.clone(),
            previous: Vec::new(),
            in_sync: data.map(|m| m.id).collect(),
        };
        let node = |m: &Member| {
            Node::new(MemberState {
                id: m.id,
                role: m.role,
                promised: Epoch::default(),
                configuration: Some(configuration.clone()),
                state: ReplicaState::Complete,
                last_pass: (EpochNumber(0), Pass(0)),
                last: Position::ZERO,
            })
        };
        let (network_ns, disk_ns) = (
            random.between(20_000, 400_000),
            random.between(20_000, 300_000),
        );
        World {
            now: 0,
            random,
            shape,
            options,
            nodes: members.iter().map(node).collect(),
            hosts: Vec::new(),
            connections: Vec::new(),
            ledger: Ledger::default(),
            happenings: 0,
            network_ns,
            disk_ns,
            calm: false,
            quiet: false,
            plot_until: 0,
            broken: false,
            profile: None,
            cut_until: BTreeMap::new(),
            may_be_full: false,
            trace: std::env::var("ASHLAR_TRACE").is_ok(),
            garbage: 1 << 40,
            acks: 0,
            reads: 0,
            contents: 0,
            tickets: 0,
            order: 0,
            queue: BinaryHeap::new(),
            waiting: BTreeMap::new(),
        }
    }

    pub(super) fn schedule(&mut self, at: u64, happening: Happening) {
        self.order += 1;
        self.queue.push(Reverse((at.max(self.now), self.order)));
        self.waiting.insert(self.order, happening);
    }

    /// Lets happenings pass until then.
    pub(super) fn run_until(&mut self, until: u64) -> Result<(), Violation> {
        while let Some(Reverse((at, order))) = self.queue.peek().copied() {
            if at > until {
                break;
            }
            self.queue.pop();
            self.now = at;
            if let Some(happening) = self.waiting.remove(&order) {
                if self.trace
                    && !matches!(
                        happening,
                        Happening::Timer { .. } | Happening::Client { .. }
                    )
                {
                    eprintln!("{:>9.3} {happening:?}", self.now as f64 / MS as f64);
                }
                self.happenings += 1;
                self.happen(happening)?;
            }
        }
        self.now = until;
        Ok(())
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        match happening {
            Happening::ToMember {
                connection,
                number,
                message,
                late,
            } => self.at_member(connection, number, message, late),
            Happening::ToHost {
                connection,
                message,
            } => return self.at_host(connection, message),
            Happening::Step { node, incarnation } => return self.step(node, incarnation),
            Happening::Look {
                node,
                incarnation,
                queued,
            } => {
                if self.nodes[node].incarnation == incarnation && self.nodes[node].up {
                    let reply = self.nodes[node].look(queued.epoch, &queued.request);
                    self.send_to_host(queued.connection, ToHost::Reply(queued.epoch, reply));
                }
            }
            Happening::Timer { host } => {
                self.hosts[host].timer = u64::MAX;
                if self.hosts[host].alive {
                    return self.feed(host, Event::Timer);
                }
            }
            Happening::Renew { host } => self.renew(host),
            Happening::Client { host } => return self.client(host),
            Happening::Connect { host, node } => return self.connect(host, node),
            Happening::Down { connection } => {
                let Connection { host, node, .. } = self.connections[connection];
                if self.hosts[host].connections[node] == Some(connection) {
                    self.hosts[host].connections[node] = None;
                    let retry = self.now + self.random.between(MS, 10 * MS);
                    self.schedule(retry, Happening::Connect { host, node });
                    let member = self.nodes[node].state.id;
                    return self.feed(host, Event::Down { member });
                }
            }
            Happening::Chaos => return self.chaos(),
        }
        Ok(())
    }

    // Hosts.

    pub(super) fn start_host(&mut self) -> Result<usize, Violation> {
        let members = self.nodes.iter().map(|n| Member {
            id: n.state.id,
            role: n.state.role,
        });
        let initiator = Initiator::new(SIZE_BLOCKS, members.collect(), self.options.clone());
        let ppm = i64::from(self.options.clock_drift_ppm);
        let host = self.hosts.len();
        self.hosts.push(Host {
            initiator,
            alive: true,
            over: false,
            reads_only: false,
            connections: vec![None; self.nodes.len()],
            drift: self.random.between(0, ppm as u64) as i64 - ppm / 2,
            offset: self.random.below(1 << 40),
            timer: u64::MAX,
            idle_timers: 0,
            waiting: BTreeMap::new(),
            acknowledged: (Epoch::default(), Sequence(0)),
            configuration: None,
        });
        let seed = self.random.next();
        self.feed(host, Event::Attach { seed })?;
        for node in 0..self.nodes.len() {
            let at = self.now + self.random.delay(self.network_ns);
            self.schedule(at, Happening::Connect { host, node });
        }
        self.schedule(self.now, Happening::Client { host });
        self.schedule(self.now, Happening::Renew { host });
        Ok(host)
    }

    pub(super) fn kill_host(&mut self, host: usize) {
        self.hosts[host].alive = false;
        for connection in self.hosts[host].connections.clone().into_iter().flatten() {
            self.cut(connection);
        }
    }

    pub(super) fn local(&self, host: usize) -> Time {
        let Host { drift, offset, .. } = self.hosts[host];
        let drift = self.now as i64 / 1_000 * drift / 1_000;
        Time(offset + (self.now as i64 + drift) as u64)
    }

    fn feed(&mut self, host: usize, event: Event<Payload>) -> Result<(), Violation> {
        if !self.hosts[host].alive || self.hosts[host].over {
            return Ok(());
        }
        let now = self.local(host);
        let mut effects: Effects<Payload> = VecDeque::new();
        self.hosts[host].initiator.handle(now, event, &mut effects);
        // What is acknowledged is so from here on, whatever the order of the effects.
        for effect in &effects {
            self.note_sent(host, effect);
        }
        self.note_acknowledged(host)?;
        for effect in effects {
            self.carry_out(host, effect)?;
        }
        self.note_configuration(host)?;
        self.arm(host)?;
        self.take_over_at(host)
    }

    fn note_sent(&mut self, host: usize, effect: &Effect<Payload>) {
        if let Effect::Send {
            request:
                Request::Write {
                    sequence,
                    range,
                    content,
                },
            ..
        } = effect
        {
            let epoch = self.hosts[host].initiator.epoch();
            self.ledger.sent(epoch, *sequence, *range, content);
        }
    }

    fn note_acknowledged(&mut self, host: usize) -> Result<(), Violation> {
        let initiator = &self.hosts[host].initiator;
        let epoch = initiator.epoch();
        let upto = initiator.acknowledged().sequence;
        let before = self.hosts[host].acknowledged;
        let from = if before.0 == epoch {
            before.1
        } else {
            Sequence(0)
        };
        self.hosts[host].acknowledged = (epoch, upto);
        if from == upto {
            return Ok(());
        }
        for sequence in from.0 + 1..=upto.0 {
            self.acks += 1;
            self.ledger.acknowledge(epoch, Sequence(sequence))?;
        }
        self.ledger.check_recoverable(&self.nodes)
    }

    fn note_configuration(&mut self, host: usize) -> Result<(), Violation> {
        let committed = self.hosts[host].initiator.configuration();
        if committed == self.hosts[host].configuration.as_ref() {
            return Ok(());
        }
        self.hosts[host].configuration = committed.cloned();
        self.check_in_sync(None)
    }

    fn check_in_sync(&self, only: Option<usize>) -> Result<(), Violation> {
        for host in self.hosts.iter().filter(|h| h.alive && !h.over) {
            let Some(committed) = host.initiator.configuration() else {
                continue;
            };
            let attached = Attached {
                epoch: host.initiator.epoch(),
                committed,
            };
            let nodes = self.nodes.iter().enumerate();
            for (_, node) in nodes.filter(|(n, _)| only.is_none_or(|o| o == *n)) {
                self.ledger.check_in_sync(node, &attached)?;
            }
        }
        Ok(())
    }

    fn arm(&mut self, host: usize) -> Result<(), Violation> {
        let next = self.hosts[host].initiator.next_timer();
        if next == Time::NEVER || self.hosts[host].over {
            return Ok(());
        }
        if next <= self.local(host) {
            self.hosts[host].idle_timers += 1;
            if self.hosts[host].idle_timers > 100 {
                let status = self.hosts[host].initiator.status();
                return Err(format!("the timer is always due: {status:?}"));
            }
        } else {
            self.hosts[host].idle_timers = 0;
        }
        let left = next.since(self.local(host)).as_nanos() as u64;
        // A slow clock needs a little longer.
        let at = self.now + left + left / 1_000 + 1_000;
        if at < self.hosts[host].timer {
            self.hosts[host].timer = at;
            self.schedule(at, Happening::Timer { host });
        }
        Ok(())
    }

    fn carry_out(&mut self, host: usize, effect: Effect<Payload>) -> Result<(), Violation> {
        if self.trace && !matches!(effect, Effect::Send { .. }) {
            eprintln!(
                "{:>9.3}   host {host}: {effect:?}",
                self.now as f64 / MS as f64
            );
        }
        match effect {
            Effect::Send { member, request } => {
                let node = member.nonce as usize - 1;
                if let Some(connection) = self.hosts[host].connections[node] {
                    if let Request::Fence { epoch } = &request {
                        self.connections[connection].asked = *epoch;
                    }
                    let asked = self.connections[connection].asked;
                    self.send_to_member(connection, ToMember::Request(asked, request));
                }
            }
            Effect::WriteDone { ticket, .. } => {
                let waiting = self.hosts[host].waiting.remove(&ticket.0);
                if !matches!(waiting, Some(Waiting::Write)) {
                    return Err(format!(
                        "{ticket:?} is done and nobody waits for that write"
                    ));
                }
            }
            Effect::ReadDone { ticket, result } => {
                let Some(Waiting::Read(range, at_least)) =
                    self.hosts[host].waiting.remove(&ticket.0)
                else {
                    return Err(format!("{ticket:?} is done and nobody waits for that read"));
                };
                if let Ok(data) = result {
                    self.reads += 1;
                    self.ledger.read(range, &at_least, &data)?;
                }
            }
            Effect::Opened { epoch } => self.ledger.opened(epoch)?,
            Effect::Over { .. } => {
                self.hosts[host].over = true;
                if !self.hosts[host].waiting.is_empty() {
                    return Err(format!("over, and {:?} is left", self.hosts[host].waiting));
                }
                self.kill_host(host);
            }
            Effect::Reconnect { member } => {
                let node = member.nonce as usize - 1;
                if let Some(connection) = self.hosts[host].connections[node] {
                    self.cut(connection);
                }
            }
            Effect::MemberChanged { .. } => {}
        }
        Ok(())
    }

    fn renew(&mut self, host: usize) {
        if !self.hosts[host].alive || self.hosts[host].over {
            return;
        }
        let sent_at = self.local(host);
        for connection in self.hosts[host].connections.clone().into_iter().flatten() {
            self.send_to_member(connection, ToMember::Renew(sent_at));
        }
        let pause = self.options.lease.as_nanos() as u64 / 4;
        self.schedule(self.now + pause, Happening::Renew { host });
    }

    /// A client asks for something now and then.
    fn client(&mut self, host: usize) -> Result<(), Violation> {
        if !self.hosts[host].alive || self.hosts[host].over || self.quiet {
            return Ok(());
        }
        let pause = if self.calm { 20 * MS } else { 8 * MS };
        let next = self.now + self.random.between(1, pause);
        self.schedule(next, Happening::Client { host });
        let open = self.hosts[host].initiator.phase() == Phase::Open;
        if self.hosts[host].waiting.len() >= 12 || (!open && !self.random.one_in(20)) {
            return Ok(());
        }
        for _ in 0..self.random.between(1, 3) {
            self.ask(host)?;
        }
        Ok(())
    }

    fn ask(&mut self, host: usize) -> Result<(), Violation> {
        const HOT: [u64; 8] = [0, 1, 2, 254, 255, 256, 257, 512];
        let start = Block(*self.random.pick(&HOT));
        let space = 256 - u64::from(start.within_extent());
        let count = self.random.between(1, 3.min(space)) as u32;
        let range = BlockRange { start, count };
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        if self.hosts[host].reads_only || self.random.one_in(3) {
            let at_least = range.blocks().map(|b| self.ledger.acknowledged_at(b));
            let waiting = Waiting::Read(range, at_least.collect());
            self.hosts[host].waiting.insert(ticket.0, waiting);
            return self.feed(host, Event::Read { ticket, range });
        }
        self.hosts[host].waiting.insert(ticket.0, Waiting::Write);
        let content = if self.random.one_in(6) {
            Content::Zeros
        } else {
            let id = |i: u32| self.contents + u64::from(i) + 1;
            let data = (0..count).map(id).collect();
            self.contents += u64::from(count);
            Content::Data(data)
        };
        let event = Event::Write {
            ticket,
            range,
            content,
        };
        self.feed(host, event)
    }

    pub(super) fn is_idle(&self, host: usize) -> bool {
        self.hosts[host].waiting.is_empty()
    }

    // Connections.

    fn connect(&mut self, host: usize, node: usize) -> Result<(), Violation> {
        let Host {
            alive,
            over,
            connections,
            ..
        } = &self.hosts[host];
        if !alive || *over || connections[node].is_some() {
            return Ok(());
        }
        let cut = self.cut_until.get(&(host, node)).copied().unwrap_or(0);
        if !self.nodes[node].up || (cut > self.now && !self.calm) {
            let retry = self.now + self.random.between(2 * MS, 10 * MS);
            self.schedule(retry, Happening::Connect { host, node });
            return Ok(());
        }
        let connection = self.connections.len();
        self.connections.push(Connection {
            host,
            node,
            open: true,
            lost_from: u64::MAX,
            sent: 0,
            to_member_at: self.now,
            to_host_at: self.now,
            asked: Epoch::default(),
            latency: 0,
            attached: None,
        });
        self.hosts[host].connections[node] = Some(connection);
        let member = self.nodes[node].state.id;
        self.feed(host, Event::Up { member })
    }

    /// The connection breaks. Some of what is under way to the member still arrives, in order.
    pub(super) fn cut(&mut self, connection: usize) {
        if !self.connections[connection].open {
            return;
        }
        let sent = self.connections[connection].sent;
        let keep = self.random.below(4) * self.random.below(8);
        let state = &mut self.connections[connection];
        state.open = false;
        state.lost_from = sent.saturating_sub(8) + keep;
        state.attached = None;
        let at = self.now + self.random.between(0, 5 * MS);
        self.schedule(at, Happening::Down { connection });
    }

    /// What a member says to the host is under way for longer than a lease from now on.
    pub(super) fn slow_between(&mut self, host: usize, node: usize) {
        let lease = self.options.lease.as_nanos() as u64;
        let latency = self.random.between(lease, 4 * lease);
        for state in &mut self.connections {
            if state.host == host && state.node == node {
                state.latency = latency;
            }
        }
    }

    fn send_to_member(&mut self, connection: usize, message: ToMember) {
        let delay = self.random.delay(self.network_ns);
        let state = &mut self.connections[connection];
        if !state.open {
            return;
        }
        state.sent += 1;
        state.to_member_at = state.to_member_at.max(self.now + delay);
        let (at, number) = (state.to_member_at, state.sent);
        self.schedule(
            at,
            Happening::ToMember {
                connection,
                number,
                message,
                late: false,
            },
        );
    }

    fn send_to_host(&mut self, connection: usize, message: ToHost) {
        let delay = self.random.delay(self.network_ns);
        let state = &mut self.connections[connection];
        if !state.open {
            return;
        }
        state.to_host_at = state.to_host_at.max(self.now + delay + state.latency);
        let at = state.to_host_at;
        self.schedule(
            at,
            Happening::ToHost {
                connection,
                message,
            },
        );
    }

    fn at_host(&mut self, connection: usize, message: ToHost) -> Result<(), Violation> {
        let Connection {
            host,
            node,
            open,
            asked,
            ..
        } = self.connections[connection];
        if !open || self.hosts[host].connections[node] != Some(connection) {
            return Ok(());
        }
        let member = self.nodes[node].state.id;
        let event = match message {
            // On the wire an answer carries the handle of the Fence.
            ToHost::Reply(epoch, _) if epoch != asked => return Ok(()),
            ToHost::Reply(_, reply) => Event::Reply { member, reply },
            ToHost::Renewed(sent_at) => Event::Renewed { member, sent_at },
            ToHost::Fenced(promised) => Event::Fenced { member, promised },
        };
        self.feed(host, event)
    }

    // Members.

    fn at_member(&mut self, connection: usize, number: u64, message: ToMember, late: bool) {
        let Connection {
            node,
            open,
            lost_from,
            ..
        } = self.connections[connection];
        if !self.nodes[node].up || number >= lost_from {
            return;
        }
        if !open && !late {
            // It was under way when the connection broke: it comes, but late.
            let state = &mut self.connections[connection];
            state.to_member_at =
                state.to_member_at.max(self.now) + self.random.delay(4 * self.network_ns);
            let at = state.to_member_at;
            let happening = Happening::ToMember {
                connection,
                number,
                message,
                late: true,
            };
            self.schedule(at, happening);
            return;
        }
        match message {
            ToMember::Renew(sent_at) => self.renewed(connection, sent_at),
            ToMember::Request(epoch, request) => {
                if !self.may_be_full && self.random.one_in(50) {
                    // B5: repeated, some time later.
                    let at = self.now + self.random.delay(4 * self.network_ns);
                    let message = ToMember::Request(epoch, request.clone());
                    let repeated = Happening::ToMember {
                        connection,
                        number: 0,
                        message,
                        late: true,
                    };
                    self.schedule(at, repeated);
                }
                self.receive(
                    node,
                    Queued {
                        connection,
                        epoch,
                        request,
                    },
                );
            }
        }
    }

    /// L3.
    fn renewed(&mut self, connection: usize, sent_at: Time) {
        self.send_to_host(connection, ToHost::Renewed(sent_at));
    }

    fn receive(&mut self, node: usize, queued: Queued) {
        let delay = self.random.delay(self.disk_ns) * self.nodes[node].slowness;
        let incarnation = self.nodes[node].incarnation;
        let looks = matches!(
            queued.request,
            Request::Read { .. }
                | Request::Compare { .. }
                | Request::Digests { .. }
                | Request::ListAbove { .. }
        );
        if looks {
            let happening = Happening::Look {
                node,
                incarnation,
                queued,
            };
            self.schedule(self.now + delay, happening);
            return;
        }
        self.nodes[node].queue.push_back(queued);
        if !self.nodes[node].busy {
            self.nodes[node].busy = true;
            self.schedule(self.now + delay, Happening::Step { node, incarnation });
        }
    }

    /// A journal write is durable: some requests of the queue are done.
    fn step(&mut self, node: usize, incarnation: u64) -> Result<(), Violation> {
        if self.nodes[node].incarnation != incarnation || !self.nodes[node].up {
            return Ok(());
        }
        for _ in 0..self.random.between(1, 4) {
            let Some(queued) = self.nodes[node].queue.pop_front() else {
                break;
            };
            let promised = self.nodes[node].state.promised;
            let reply = self.nodes[node].apply(&queued);
            self.supersede(node, &queued, promised, &reply);
            self.send_to_host(queued.connection, ToHost::Reply(queued.epoch, reply));
            let World { nodes, ledger, .. } = self;
            ledger.member_changed(&mut nodes[node])?;
            self.check_in_sync(Some(node))?;
            self.ledger.check_recoverable(&self.nodes)?;
        }
        let busy = !self.nodes[node].queue.is_empty();
        self.nodes[node].busy = busy;
        if busy {
            let delay = self.random.delay(self.disk_ns) * self.nodes[node].slowness;
            self.schedule(self.now + delay, Happening::Step { node, incarnation });
        }
        Ok(())
    }

    /// L3: whoever was attached before hears of it before any later renewal is answered.
    fn supersede(&mut self, node: usize, queued: &Queued, before: Epoch, reply: &Reply<Payload>) {
        let Reply::Promised { epoch, .. } = reply else {
            return;
        };
        if self.connections[queued.connection].open {
            self.connections[queued.connection].attached = Some(*epoch);
        }
        if before == *epoch || is_broken(Fault::RenewAnybody) {
            return;
        }
        for connection in 0..self.connections.len() {
            let state = &self.connections[connection];
            let older = state.attached.is_some_and(|e| e != *epoch);
            if state.node == node && state.open && older {
                self.connections[connection].attached = None;
                self.send_to_host(connection, ToHost::Fenced(epoch.number));
            }
        }
    }

    pub(super) fn crash(&mut self, node: usize) -> Result<(), Violation> {
        let World {
            nodes,
            random,
            garbage,
            ..
        } = self;
        nodes[node].crash(random, garbage);
        for connection in 0..self.connections.len() {
            if self.connections[connection].node == node {
                self.connections[connection].lost_from = 0;
                self.cut(connection);
                self.connections[connection].lost_from = 0;
            }
        }
        let World { nodes, ledger, .. } = self;
        ledger.member_changed(&mut nodes[node])
    }

    pub(super) fn restart(&mut self, node: usize) {
        self.nodes[node].up = true;
    }
}
