//! Initiators, what comes out of them, and their clients.

use std::collections::{BTreeMap, VecDeque};

use ashlar_replication::initiator::{Effect, Effects, Event, Initiator, Phase, Ticket};
use ashlar_replication::message::{Content, Request};
use ashlar_replication::values::{Block, BlockRange, Epoch, Sequence, Time};

use crate::ledger::{Attached, Violation};
use crate::node::{Payload, SIZE_BLOCKS};

use super::{Happening, Host, MS, ToMember, Waiting, World};

impl World {
    pub(crate) fn start_host(&mut self) -> Result<usize, Violation> {
        let members = self.known.clone();
        let initiator = Initiator::new(SIZE_BLOCKS, members.clone(), self.options.clone());
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
            told: self.known_order,
            newcomer: None,
        });
        let seed = self.random.next();
        self.feed(host, Event::Attach { seed })?;
        for member in members {
            self.connect_to(host, member.id);
        }
        self.schedule(self.now, Happening::Client { host });
        self.schedule(self.now, Happening::Renew { host });
        Ok(host)
    }

    pub(crate) fn kill_host(&mut self, host: usize) {
        self.hosts[host].alive = false;
        for connection in self.hosts[host].connections.clone().into_iter().flatten() {
            self.cut(connection);
        }
    }

    pub(crate) fn local(&self, host: usize) -> Time {
        let Host { drift, offset, .. } = self.hosts[host];
        let drift = self.now as i64 / 1_000 * drift / 1_000;
        Time(offset + (self.now as i64 + drift) as u64)
    }

    pub(super) fn feed(&mut self, host: usize, event: Event<Payload>) -> Result<(), Violation> {
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

    pub(super) fn note_sent(&mut self, host: usize, effect: &Effect<Payload>) {
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

    pub(super) fn note_acknowledged(&mut self, host: usize) -> Result<(), Violation> {
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

    pub(super) fn note_configuration(&mut self, host: usize) -> Result<(), Violation> {
        let committed = self.hosts[host].initiator.configuration();
        if committed == self.hosts[host].configuration.as_ref() {
            return Ok(());
        }
        self.hosts[host].configuration = committed.cloned();
        self.check_in_sync(None)
    }

    pub(super) fn check_in_sync(&self, only: Option<usize>) -> Result<(), Violation> {
        for host in self.hosts.iter().filter(|h| h.alive && !h.over) {
            let Some(committed) = host.initiator.configuration() else {
                continue;
            };
            let attached = Attached {
                epoch: host.initiator.epoch(),
                committed,
            };
            let nodes = self.nodes.iter().enumerate().filter(|(_, n)| !n.gone);
            for (_, node) in nodes.filter(|(n, _)| only.is_none_or(|o| o == *n)) {
                self.ledger.check_in_sync(node, &attached)?;
            }
        }
        Ok(())
    }

    pub(super) fn arm(&mut self, host: usize) -> Result<(), Violation> {
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

    pub(super) fn carry_out(
        &mut self,
        host: usize,
        effect: Effect<Payload>,
    ) -> Result<(), Violation> {
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
            Effect::Opened { epoch } => {
                self.ledger.opened(epoch)?;
                self.note_members(host);
            }
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
            Effect::Connect { member } => self.connect_to(host, member),
            Effect::MembersChanged { removed } => self.members_changed(host, removed),
            Effect::MembersChangeRefused { reason } => self.change_refused(host, reason),
        }
        Ok(())
    }

    pub(super) fn renew(&mut self, host: usize) {
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
    pub(super) fn client(&mut self, host: usize) -> Result<(), Violation> {
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

    pub(super) fn ask(&mut self, host: usize) -> Result<(), Violation> {
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

    pub(crate) fn is_idle(&self, host: usize) -> bool {
        self.hosts[host].waiting.is_empty()
    }
}
