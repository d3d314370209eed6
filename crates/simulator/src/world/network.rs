//! Connections that come, break, and deliver late.

use ashlar_replication::initiator::Event;
use ashlar_replication::values::Epoch;

use crate::ledger::Violation;

use super::{Connection, Happening, Host, MS, ToHost, ToMember, World};

impl World {
    pub(super) fn connect(&mut self, host: usize, node: usize) -> Result<(), Violation> {
        let Host {
            alive,
            over,
            connections,
            ..
        } = &self.hosts[host];
        if !alive || *over || connections[node].is_some() || self.nodes[node].gone {
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
    pub(crate) fn cut(&mut self, connection: usize) {
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
    pub(crate) fn slow_between(&mut self, host: usize, node: usize) {
        let lease = self.options.lease.as_nanos() as u64;
        let latency = self.random.between(lease, 4 * lease);
        for state in &mut self.connections {
            if state.host == host && state.node == node {
                state.latency = latency;
            }
        }
    }

    pub(super) fn send_to_member(&mut self, connection: usize, message: ToMember) {
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

    pub(super) fn send_to_host(&mut self, connection: usize, message: ToHost) {
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

    pub(super) fn at_host(&mut self, connection: usize, message: ToHost) -> Result<(), Violation> {
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
}
