//! Members, initiators, clients and the network between them, in one queue of happenings.

mod administrator;
mod disks;
mod hosts;
mod members;
mod network;

use core::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use ashlar_replication::configuration::{
    Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::initiator::{Event, Initiator, Options};
use ashlar_replication::message::{Reply, Request};
use ashlar_replication::values::{
    BlockRange, DeviceId, Epoch, EpochNumber, MemberId, Pass, Position, Sequence, Time,
};

use super::ledger::{Ledger, Violation};
use super::node::disk::Mixes;
use super::node::{Node, Payload, Queued};
use super::profile::Profile;
pub(super) use super::profile::{MS, Shape};
use super::random::Random;

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
    /// An operation of a member's device completes.
    Device {
        node: usize,
        incarnation: u64,
    },
    /// A write to a member's index becomes durable.
    Index {
        node: usize,
        incarnation: u64,
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
    /// Of a plot: the next initiator, which reaches none of these.
    Successor {
        hosts: [usize; 2],
        apart: Vec<usize>,
    },
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
    /// The configuration whose members it was told of.
    pub(super) told: (EpochNumber, Generation),
    /// The replica that was made to be added.
    pub(super) newcomer: Option<usize>,
}

pub(super) struct World {
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) options: Options,
    /// Every replica that was ever made.
    pub(super) nodes: Vec<Node>,
    /// The members by the newest committed configuration that was reported.
    pub(super) known: Vec<Member>,
    pub(super) known_order: (EpochNumber, Generation),
    /// Of the stores, where there are any.
    mixes: Option<Mixes>,
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
    pub(super) spoiled: u64,
    /// Changes of members that were done.
    pub(super) changes: u64,
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
            options,
            nodes: members.iter().map(node).collect(),
            known: members,
            known_order: (EpochNumber(0), Generation(0)),
            mixes: None,
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
            spoiled: 0,
            changes: 0,
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
            } => return self.at_member(connection, number, message, late),
            Happening::ToHost {
                connection,
                message,
            } => return self.at_host(connection, message),
            Happening::Step { node, incarnation } => return self.step(node, incarnation),
            Happening::Index { node, incarnation } => return self.index(node, incarnation),
            Happening::Device { node, incarnation } => return self.device(node, incarnation),
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
            Happening::Successor { hosts, apart } => return self.succeed(hosts, &apart),
        }
        Ok(())
    }
}
