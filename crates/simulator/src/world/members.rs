//! Members: what they get, what becomes durable when, and what a crash leaves.

use ashlar_replication::faults::{Fault, is_broken};
use ashlar_replication::message::{Reply, Request};
use ashlar_replication::values::{Epoch, Time};

use crate::ledger::Violation;
use crate::node::Queued;

use super::{Connection, Happening, ToHost, ToMember, World};

impl World {
    pub(super) fn at_member(
        &mut self,
        connection: usize,
        number: u64,
        message: ToMember,
        late: bool,
    ) -> Result<(), Violation> {
        let Connection {
            node,
            open,
            lost_from,
            ..
        } = self.connections[connection];
        if !self.nodes[node].up || number >= lost_from {
            return Ok(());
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
            return Ok(());
        }
        match message {
            ToMember::Renew(sent_at) => {
                self.renewed(connection, sent_at);
                Ok(())
            }
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
                )
            }
        }
    }

    /// L3.
    pub(super) fn renewed(&mut self, connection: usize, sent_at: Time) {
        self.send_to_host(connection, ToHost::Renewed(sent_at));
    }

    pub(super) fn receive(&mut self, node: usize, queued: Queued) -> Result<(), Violation> {
        if self.nodes[node].disk.is_some() {
            return self.disk_receive(node, queued);
        }
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
            return Ok(());
        }
        self.nodes[node].queue.push_back(queued);
        if !self.nodes[node].busy {
            self.nodes[node].busy = true;
            self.schedule(self.now + delay, Happening::Step { node, incarnation });
        }
        Ok(())
    }

    /// A journal write is durable: some requests of the queue are done.
    pub(super) fn step(&mut self, node: usize, incarnation: u64) -> Result<(), Violation> {
        if self.nodes[node].incarnation != incarnation || !self.nodes[node].up {
            return Ok(());
        }
        for _ in 0..self.random.between(1, 4) {
            let Some(queued) = self.nodes[node].queue.pop_front() else {
                break;
            };
            let promised = self.nodes[node].state.promised;
            let reply = self.nodes[node].apply(&queued);
            if let Reply::Promised { epoch, .. } = &reply {
                self.supersede(node, queued.connection, promised, *epoch);
            }
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
    pub(super) fn supersede(
        &mut self,
        node: usize,
        connection: usize,
        before: Epoch,
        epoch: Epoch,
    ) {
        if self.connections[connection].open {
            self.connections[connection].attached = Some(epoch);
        }
        if before == epoch || is_broken(Fault::RenewAnybody) {
            return;
        }
        for connection in 0..self.connections.len() {
            let state = &self.connections[connection];
            let older = state.attached.is_some_and(|e| e != epoch);
            if state.node == node && state.open && older {
                self.connections[connection].attached = None;
                self.send_to_host(connection, ToHost::Fenced(epoch.number));
            }
        }
    }

    pub(crate) fn crash(&mut self, node: usize) -> Result<(), Violation> {
        if self.nodes[node].disk.is_some() {
            self.disk_crash(node)?;
        } else {
            let World {
                nodes,
                random,
                garbage,
                ..
            } = self;
            nodes[node].crash(random, garbage);
        }
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

    pub(crate) fn restart(&mut self, node: usize) {
        self.nodes[node].up = !self.nodes[node].gone;
    }
}
