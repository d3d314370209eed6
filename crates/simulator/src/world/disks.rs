//! Members on the real store: their devices' operations are happenings of their own.

use ashlar_replication::message::{Refusal, Reply, Request};

use crate::ledger::Violation;
use crate::node::Queued;
use crate::node::disk::{Disk, Done, Mixes};

use super::{Happening, ToHost, World};

impl World {
    /// Gives every member a real store.
    pub(crate) fn use_stores(&mut self) {
        let mixes = Mixes::default();
        for node in &mut self.nodes {
            let disk = Disk::new(&mut self.random, &node.state, &mixes);
            node.disk = Some(Box::new(disk));
        }
        self.mixes = Some(mixes);
    }

    pub(super) fn disk_receive(&mut self, node: usize, queued: Queued) -> Result<(), Violation> {
        let Some(disk) = &mut self.nodes[node].disk else {
            return Ok(());
        };
        let before = disk.promised();
        let fence = match &queued.request {
            Request::Fence { epoch } => Some((queued.connection, *epoch)),
            _ => None,
        };
        disk.request(queued);
        if let Some((connection, epoch)) = fence
            && (before.number < epoch.number || before == epoch)
        {
            self.supersede(node, connection, before, epoch);
        }
        self.disk_turn(node)
    }

    /// A device operation completes.
    pub(super) fn device(&mut self, node: usize, incarnation: u64) -> Result<(), Violation> {
        let state = &mut self.nodes[node];
        if state.incarnation != incarnation || !state.up {
            return Ok(());
        }
        if let Some(disk) = &mut state.disk {
            disk.complete_one();
        }
        self.disk_turn(node)
    }

    /// A write to a member's index becomes durable.
    pub(super) fn index(&mut self, node: usize, incarnation: u64) -> Result<(), Violation> {
        let state = &mut self.nodes[node];
        if state.incarnation != incarnation || !state.up {
            return Ok(());
        }
        if let Some(disk) = &mut state.disk {
            disk.advance_index();
        }
        self.disk_turn(node)
    }

    pub(crate) fn disk_turn(&mut self, node: usize) -> Result<(), Violation> {
        let writes_home = self.random.one_in(40);
        let state = &mut self.nodes[node];
        let (incarnation, slowness) = (state.incarnation, state.slowness);
        let Some(disk) = &mut state.disk else {
            return Ok(());
        };
        let done = disk.turn(writes_home);
        for _ in 0..disk.new_operations() {
            let delay = self.random.delay(self.disk_ns) * slowness;
            self.schedule(self.now + delay, Happening::Device { node, incarnation });
        }
        if let Some(disk) = &mut self.nodes[node].disk
            && disk.begins_index_write()
        {
            let delay = self.random.delay(10 * self.disk_ns);
            self.schedule(self.now + delay, Happening::Index { node, incarnation });
        }
        for done in done {
            self.disk_done(node, done)?;
        }
        Ok(())
    }

    fn disk_done(&mut self, node: usize, done: Done) -> Result<(), Violation> {
        let Done {
            queued,
            reply,
            is_step,
        } = done;
        if !is_step {
            self.send_to_host(queued.connection, ToHost::Reply(queued.epoch, reply));
            return Ok(());
        }
        let expected = self.nodes[node].carry_out(&queued);
        let is_superseded = matches!(
            reply,
            Reply::Refused {
                refusal: Refusal::Fenced { .. },
                ..
            }
        );
        if reply != expected && !is_superseded {
            return Err(format!(
                "{:?}: the store answers {reply:?} to {queued:?}, not {expected:?}",
                self.nodes[node].state.id
            ));
        }
        self.send_to_host(queued.connection, ToHost::Reply(queued.epoch, reply));
        let World { nodes, ledger, .. } = self;
        ledger.member_changed(&mut nodes[node])?;
        self.check_in_sync(Some(node))?;
        self.ledger.check_recoverable(&self.nodes)
    }

    /// The store opens after a crash and must hold what it had answered.
    pub(super) fn disk_crash(&mut self, node: usize) -> Result<(), Violation> {
        let World {
            nodes,
            random,
            ledger,
            ..
        } = self;
        let state = &mut nodes[node];
        state.up = false;
        state.incarnation += 1;
        let Some(mut disk) = state.disk.take() else {
            return Ok(());
        };
        let cut_short = disk.crash(random)?;
        let (found, blocks) = (disk.state(), disk.blocks(&state.blocks)?);
        state.recovered(&cut_short, found, blocks, ledger)?;
        state.disk = Some(disk);
        Ok(())
    }

    /// Processes whose device was closed after an error are restarted.
    pub(crate) fn restart_closed(&mut self, node: usize) -> Result<(), Violation> {
        let is_closed = self.nodes[node]
            .disk
            .as_ref()
            .is_some_and(|d| d.is_closed());
        if is_closed {
            self.crash(node)?;
        }
        Ok(())
    }

    /// At the end each store holds what the model says.
    pub(crate) fn check_stores(&mut self) -> Result<(), Violation> {
        for index in 0..self.nodes.len() {
            let mut settled = false;
            while !settled {
                let Some(disk) = &mut self.nodes[index].disk else {
                    return Ok(());
                };
                disk.drive();
                let done = disk.turn(false);
                settled = done.is_empty();
                for done in done {
                    self.disk_done(index, done)?;
                }
            }
            let node = &mut self.nodes[index];
            let Some(disk) = &mut node.disk else { continue };
            let (state, blocks) = (disk.state(), disk.blocks(&node.blocks)?);
            if state != node.state || blocks != node.blocks {
                return Err(format!(
                    "in the end the store holds {state:?} {blocks:?}, not {:?} {:?}",
                    node.state, node.blocks
                ));
            }
        }
        Ok(())
    }
}
