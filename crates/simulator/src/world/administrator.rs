//! Whoever keeps book of a volume's members: replaces, adds and removes them, makes replicas and drops
//! those that are members no more (C6).

use ashlar_replication::configuration::{Member, MemberState, ReplicaState, Role};
use ashlar_replication::initiator::{ChangeRefusal, Event, Phase};
use ashlar_replication::values::{DeviceId, Epoch, EpochNumber, MemberId, Pass, Position};

use crate::ledger::Violation;
use crate::node::Node;
use crate::node::disk::Disk;

use super::{Happening, World};

/// Members that a volume grows to.
const MEMBERS_MAX: usize = 5;
/// Replicas that are there at a time; the checks look at every set of them.
const LIVING_MAX: usize = 7;
/// Replicas that are made in all; a device's id is one byte, again and again.
const NODES_MAX: usize = 200;

impl World {
    pub(crate) fn living_nodes(&self) -> Vec<usize> {
        (0..self.nodes.len())
            .filter(|n| !self.nodes[*n].gone)
            .collect()
    }

    /// A member that is there.
    pub(crate) fn some_node(&mut self) -> usize {
        let living = self.living_nodes();
        *self.random.pick(&living)
    }

    /// A replica that no configuration names.
    pub(crate) fn make_node(&mut self, role: Role) -> usize {
        let node = self.nodes.len();
        let id = MemberId {
            device: DeviceId([node as u8 + 1; 16]),
            nonce: node as u64 + 1,
        };
        let mut made = Node::new(MemberState {
            id,
            role,
            promised: Epoch::default(),
            configuration: None,
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        });
        if let Some(mixes) = &self.mixes {
            let disk = Disk::new(&mut self.random, &made.state, mixes);
            made.disk = Some(Box::new(disk));
        }
        self.nodes.push(made);
        for host in &mut self.hosts {
            host.connections.push(None);
        }
        node
    }

    /// Asks an initiator for a change of members, or to give one up.
    pub(crate) fn administer(&mut self, host: usize) -> Result<(), Violation> {
        self.drop_left_over();
        let initiator = &self.hosts[host].initiator;
        let Some(members) = initiator.configuration().map(|c| c.members.clone()) else {
            return Ok(());
        };
        if initiator.phase() != Phase::Open || self.nodes.len() >= NODES_MAX {
            return Ok(());
        }
        if self.hosts[host].newcomer.is_some() {
            if self.random.one_in(4) {
                return self.feed(host, Event::CancelChange);
            }
            return Ok(());
        }
        let kind = self.random.below(5);
        let removed = *self.random.pick(&members);
        let remove = (kind < 4).then_some(removed.id);
        let grows = kind == 4 && members.len() < MEMBERS_MAX;
        let makes = (kind < 3 || grows) && self.living_nodes().len() < LIVING_MAX;
        let role = match (self.random.below(8), removed.role) {
            (0, Role::Data) => Role::Witness,
            (0, Role::Witness) => Role::Data,
            (_, role) => role,
        };
        let newcomer = makes.then(|| self.make_node(role));
        if let Some(node) = newcomer {
            self.nodes[node].added_in = self.hosts[host].initiator.epoch().number;
        }
        self.hosts[host].newcomer = newcomer;
        let add = newcomer.map(|node| Member {
            id: self.nodes[node].state.id,
            role,
        });
        self.feed(host, Event::ChangeMembers { add, remove })
    }

    pub(super) fn connect_to(&mut self, host: usize, member: MemberId) {
        let node = member.nonce as usize - 1;
        let at = self.now + self.random.delay(self.network_ns);
        self.schedule(at, Happening::Connect { host, node });
    }

    pub(super) fn change_refused(&mut self, host: usize, reason: ChangeRefusal) {
        // One that was proposed may still take place; the next attachment tells.
        if reason != ChangeRefusal::Interrupted
            && let Some(node) = self.hosts[host].newcomer
        {
            self.drop_node(node);
        }
        self.hosts[host].newcomer = None;
    }

    pub(super) fn members_changed(&mut self, host: usize, removed: Option<MemberId>) {
        self.changes += 1;
        self.hosts[host].newcomer = None;
        if let Some(removed) = removed {
            self.drop_node(removed.nonce as usize - 1);
        }
        self.note_members(host);
    }

    /// The newest committed configuration that was reported says who the members are. Who was one and is
    /// none any more was removed by an attachment that could not tell.
    pub(super) fn note_members(&mut self, host: usize) {
        let Some(c) = self.hosts[host].initiator.configuration() else {
            return;
        };
        if !c.previous.is_empty() || c.order() <= self.known_order {
            return;
        }
        self.known_order = c.order();
        let before = core::mem::replace(&mut self.known, c.members.clone());
        for member in before {
            if self.known.iter().all(|m| m.id != member.id) {
                self.drop_node(member.id.nonce as usize - 1);
            }
        }
    }

    /// Replicas that were to be added in an epoch that is over, and that a newer one did not find, are
    /// deleted some time.
    fn drop_left_over(&mut self) {
        for node in self.living_nodes() {
            let Node {
                state, added_in, ..
            } = &self.nodes[node];
            let is_member = self.known.iter().any(|m| m.id == state.id);
            if !is_member && *added_in < self.known_order.0 {
                self.drop_node(node);
            }
        }
    }

    /// A replica is deleted.
    fn drop_node(&mut self, node: usize) {
        let state = &mut self.nodes[node];
        state.gone = true;
        state.up = false;
        state.incarnation += 1;
        state.queue.clear();
        state.disk = None;
        for connection in 0..self.connections.len() {
            if self.connections[connection].node == node {
                self.connections[connection].lost_from = 0;
                self.cut(connection);
                self.connections[connection].lost_from = 0;
            }
        }
    }
}
