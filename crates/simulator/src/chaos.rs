//! What goes wrong in a schedule, when, and the end of it.

use ashlar_replication::configuration::Role;
use ashlar_replication::initiator::Phase;

use super::ledger::Violation;
use super::node::Node;
use super::profile::Profile;
use super::random::Random;
use super::world::{Happening, MS, World};

/// How a schedule went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Messages, durable steps, timers, clients' requests.
    pub happenings: u64,
    /// Acknowledged writes.
    pub acks: u64,
    /// Answered reads.
    pub reads: u64,
    /// Initiators that were started.
    pub hosts: u64,
    /// Changes of members that were done.
    pub changes: u64,
    /// Blocks that went bad.
    pub spoiled: u64,
}

impl Summary {
    /// Adds another schedule's.
    pub fn add(&mut self, other: &Summary) {
        self.happenings += other.happenings;
        self.acks += other.acks;
        self.reads += other.reads;
        self.hosts += other.hosts;
        self.changes += other.changes;
        self.spoiled += other.spoiled;
    }
}

/// What members keep their blocks in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media {
    /// A map whose steps are durable one by one: the protocol alone, fast.
    Model,
    /// The real store on a device in memory, compared with that map.
    Store,
}

/// Runs the schedule of a seed.
///
/// # Errors
/// The first invariant that did not hold.
pub fn run(seed: u64, media: Media) -> Result<Summary, Violation> {
    let mut random = Random::new(seed ^ 0x5eed);
    let mut profile = Profile::of(&mut random);
    if media == Media::Store {
        profile.without_switches();
    }
    let mut world = World::new(seed, profile.shape, profile.options.clone());
    world.may_be_full = profile.may_be_full;
    if world.trace {
        eprintln!("seed {seed}: {profile:?}");
    }
    world.profile = Some(profile.clone());
    if media == Media::Store {
        world.use_stores();
    }
    world.start_host()?;
    world.schedule(profile.pause, Happening::Chaos);
    world.run_until(profile.length)?;
    world.settle()?;
    Ok(Summary {
        happenings: world.happenings,
        acks: world.acks,
        reads: world.reads,
        hosts: world.hosts.len() as u64,
        changes: world.changes,
        spoiled: world.spoiled,
    })
}

impl World {
    /// Something goes wrong, or is mended.
    pub(super) fn chaos(&mut self) -> Result<(), Violation> {
        if self.calm {
            return Ok(());
        }
        let Some(profile) = self.profile.clone() else {
            return Ok(());
        };
        let next = self.now + self.random.between(1, 2 * profile.pause);
        self.schedule(next, Happening::Chaos);
        if self.now < self.plot_until {
            return Ok(());
        }
        self.mend()?;
        let total: u64 = profile.weights.iter().sum();
        let mut at = self.random.below(total);
        let mut kind = 0;
        while at >= profile.weights[kind] {
            at -= profile.weights[kind];
            kind += 1;
        }
        self.trouble(kind)
    }

    /// Nodes come back after a while.
    fn mend(&mut self) -> Result<(), Violation> {
        for node in self.living_nodes() {
            if self.nodes[node].up && self.random.one_in(3) {
                self.restart_closed(node)?;
            }
            if !self.nodes[node].up && self.random.one_in(3) {
                self.restart(node);
            }
            if self.random.one_in(6) {
                self.nodes[node].slowness = 1;
            }
            if self.random.one_in(8) {
                self.nodes[node].full = false;
            }
            if self.random.one_in(6) {
                self.nodes[node].evicted = false;
            }
        }
        let lonely = !self.hosts.iter().any(|h| h.alive && !h.over);
        if lonely && self.random.one_in(2) && self.start_host().is_err() {
            self.broken = true;
        }
        Ok(())
    }

    fn trouble(&mut self, kind: usize) -> Result<(), Violation> {
        let node = self.some_node();
        let living: Vec<usize> = (0..self.hosts.len())
            .filter(|h| self.hosts[*h].alive && !self.hosts[*h].over)
            .collect();
        match kind {
            0 | 1 => self.crash(node)?,
            2 => {
                if let Some(connection) = self.open_connection() {
                    self.cut(connection);
                }
            }
            3 => {
                // One initiator and one member do not reach each other for a while.
                if !living.is_empty() {
                    let host = *self.random.pick(&living);
                    let until = self.now + self.random.between(5, 300) * MS;
                    self.cut_until.insert((host, node), until);
                    self.cut_between(host, node);
                }
            }
            4 => {
                let takes_over = self.profile.as_ref().is_some_and(|p| p.takeovers);
                if takes_over && !living.is_empty() {
                    let host = *self.random.pick(&living);
                    self.take_over(host, node)?;
                } else if living.len() < 3 {
                    self.start_host()?;
                }
            }
            5 => {
                if !living.is_empty() {
                    let host = *self.random.pick(&living);
                    self.kill_host(host);
                }
            }
            6 => self.nodes[node].slowness = self.random.between(5, 100),
            7 => self.network_ns = self.random.between(20_000, 3_000_000),
            8 => self.nodes[node].full = true,
            9 => self.nodes[node].evicted = true,
            10 => match &mut self.nodes[node].disk {
                Some(disk) => disk.fail_at(self.random.below(30)),
                None => self.nodes[node].closed = self.random.one_in(2),
            },
            11 => return self.spoil(),
            _ => {
                if !living.is_empty() {
                    let host = *self.random.pick(&living);
                    self.administer(host)?;
                }
            }
        }
        Ok(())
    }

    /// A bad moment to be taken over: an equalisation or a proposal is under way.
    pub(super) fn take_over_at(&mut self, host: usize) -> Result<(), Violation> {
        let Some((takeovers, deaths)) = self
            .profile
            .as_ref()
            .map(|p| (p.takeovers, p.attach_deaths))
        else {
            return Ok(());
        };
        if self.calm || !self.hosts[host].alive || self.hosts[host].over {
            return Ok(());
        }
        let initiator = &self.hosts[host].initiator;
        let phase = initiator.phase();
        let attaching = matches!(
            phase,
            Phase::Equalising | Phase::WaitingLease | Phase::Starting
        );
        let proposed = initiator.proposed();
        let is_joint = proposed.is_some_and(|p| !p.previous.is_empty()) && phase == Phase::Open;
        let leaving = match (initiator.configuration(), initiator.proposed()) {
            (Some(c), Some(p)) => c.in_sync.iter().find(|id| !p.in_sync.contains(id)).copied(),
            _ => None,
        };
        if attaching && self.random.one_in(deaths) {
            // Holes 3, 7, 8: copies and configurations are left behind on some, and the next one sees
            // other members.
            self.kill_host(host);
            let newer = self.start_host()?;
            let node = self.some_node();
            let long = self.now + self.random.between(20, 200) * MS;
            self.cut_until.insert((newer, node), long);
        } else if is_joint && self.random.one_in(20) {
            return self.leave_change_behind(host);
        } else if let Some(leaving) = leaving
            && takeovers
            && self.random.one_in(12)
        {
            return self.take_over(host, leaving.nonce as usize - 1);
        }
        Ok(())
    }

    /// Holes 5: a change of members reaches one member and the newcomer only; the next initiator does not
    /// see these two, and the one after sees nobody else.
    fn leave_change_behind(&mut self, host: usize) -> Result<(), Violation> {
        let Some(newcomer) = self.hosts[host].newcomer else {
            return Ok(());
        };
        let holder = self.random.pick(&self.known).id.nonce as usize - 1;
        let apart = self.living_nodes();
        let apart = apart.into_iter().filter(|n| *n != holder && *n != newcomer);
        let apart: Vec<usize> = apart.collect();
        let end = self.now + self.random.between(20, 200) * MS;
        for node in &apart {
            self.cut_until.insert((host, *node), end);
            self.cut_between(host, *node);
        }
        let newer = self.start_host()?;
        self.cut_until.insert((newer, holder), end);
        self.cut_until.insert((newer, newcomer), end);
        let hosts = [host, newer];
        self.schedule(end, Happening::Successor { hosts, apart });
        self.plot_until = end + 100 * MS;
        Ok(())
    }

    /// The third initiator of that plot.
    pub(super) fn succeed(&mut self, hosts: [usize; 2], apart: &[usize]) -> Result<(), Violation> {
        if self.calm {
            return Ok(());
        }
        for host in hosts {
            self.kill_host(host);
        }
        let third = self.start_host()?;
        for node in apart {
            self.cut_until.insert((third, *node), self.plot_until);
        }
        Ok(())
    }

    /// Another initiator attaches without reaching one member, which the older one goes on reading.
    fn take_over(&mut self, host: usize, node: usize) -> Result<(), Violation> {
        if self.hosts.iter().filter(|h| h.alive && !h.over).count() >= 3 {
            return Ok(());
        }
        self.hosts[host].reads_only = true;
        let long = self.now + self.random.between(100, 400) * MS;
        let kind = self.random.below(3);
        for other in (0..self.nodes.len()).filter(|n| *n != node) {
            match kind {
                // It hears nothing of the others any more,
                0 => {
                    self.cut_until.insert((host, other), long);
                    self.cut_between(host, other);
                }
                // or hears it late,
                1 => self.slow_between(host, other),
                // or in time.
                _ => {}
            }
        }
        let newer = self.start_host()?;
        self.cut_until.insert((newer, node), long);
        self.cut_between(newer, node);
        if self.random.one_in(2) {
            // Undisturbed, so that leases run out and the like.
            self.plot_until = long;
        }
        Ok(())
    }

    fn open_connection(&mut self) -> Option<usize> {
        let open: Vec<usize> = (0..self.connections.len())
            .filter(|c| self.connections[*c].open)
            .collect();
        (!open.is_empty()).then(|| *self.random.pick(&open))
    }

    fn cut_between(&mut self, host: usize, node: usize) {
        for connection in 0..self.connections.len() {
            let state = &self.connections[connection];
            if state.host == host && state.node == node && state.open {
                self.cut(connection);
            }
        }
    }

    /// A block of the first member goes bad.
    fn spoil(&mut self) -> Result<(), Violation> {
        let data = self.known.iter().filter(|m| m.role == Role::Data);
        let Some(first) = data.clone().next().filter(|_| data.count() > 1) else {
            return Ok(());
        };
        let node = first.id.nonce as usize - 1;
        if let Some(disk) = &mut self.nodes[node].disk {
            disk.settle();
            self.disk_turn(node)?;
        }
        let blocks: Vec<_> = self.nodes[node].blocks.keys().copied().collect();
        if blocks.is_empty() {
            return Ok(());
        }
        let block = *self.random.pick(&blocks);
        let Node { blocks, disk, .. } = &mut self.nodes[node];
        let Some(stored) = blocks.get_mut(&block).filter(|stored| !stored.torn) else {
            return Ok(());
        };
        stored.bad |= match disk {
            Some(disk) => disk.spoil(block, &mut self.random),
            None => true,
        };
        self.spoiled += u64::from(stored.bad);
        Ok(())
    }

    /// Nothing goes wrong any more: everything must come right.
    fn settle(&mut self) -> Result<(), Violation> {
        self.calm = true;
        self.network_ns = self.network_ns.min(400_000);
        self.cut_until.clear();
        self.hosts.iter_mut().for_each(|h| h.reads_only = false);
        self.connections.iter_mut().for_each(|c| c.latency = 0);
        for node in self.living_nodes() {
            let Node { blocks, disk, .. } = &mut self.nodes[node];
            if let Some(disk) = disk {
                disk.mend();
                disk.heal(|block| blocks.get(&block).is_some_and(|stored| stored.bad));
            }
            self.restart_closed(node)?;
            self.restart(node);
            let node = &mut self.nodes[node];
            (node.slowness, node.full, node.closed, node.evicted) = (1, false, false, false);
            node.blocks.values_mut().for_each(|s| s.bad = false);
        }
        let living = (0..self.hosts.len()).filter(|h| self.hosts[*h].alive && !self.hosts[*h].over);
        for host in living.skip(1).collect::<Vec<_>>() {
            self.kill_host(host);
        }
        let mut trouble = None;
        for _ in 0..600 {
            self.run_until(self.now + 100 * MS)?;
            let host = self.rightful_host()?;
            self.quiet |= self.has_converged(host);
            trouble = self.trouble_left(host);
            if self.quiet && trouble.is_none() {
                return self.check_stores();
            }
        }
        Err(format!("no end: {trouble:?}"))
    }

    /// The one initiator that is left, or a new one.
    fn rightful_host(&mut self) -> Result<usize, Violation> {
        match self.hosts.iter().position(|h| h.alive && !h.over) {
            // C7: a member that promised to a failed attach takes part again in a newer epoch only.
            Some(host) if self.has_lost_member(host) || self.is_outdated(host) => {
                self.kill_host(host);
                self.start_host()
            }
            Some(host) => Ok(host),
            None => self.start_host(),
        }
    }

    /// It looks for members that it was told of and that may all be gone.
    fn is_outdated(&self, host: usize) -> bool {
        let host = &self.hosts[host];
        host.initiator.phase() == Phase::Fencing && host.told < self.known_order
    }

    fn has_lost_member(&self, host: usize) -> bool {
        let initiator = &self.hosts[host].initiator;
        let epoch = initiator.epoch();
        let lost = |n: &Node| n.state.promised != epoch && n.state.promised.number >= epoch.number;
        let mut nodes = self.nodes.iter().filter(|n| !n.gone);
        initiator.phase() == Phase::Open && nodes.any(lost)
    }

    fn has_converged(&self, host: usize) -> bool {
        let initiator = &self.hosts[host].initiator;
        let all = initiator
            .configuration()
            .is_some_and(|c| c.in_sync.len() == c.data_members() && c.previous.is_empty());
        let changes = self.hosts[host].newcomer.is_some();
        initiator.phase() == Phase::Open && all && !changes
    }

    /// What is not right yet: clients that wait, members out of sync, copies that differ.
    fn trouble_left(&self, host: usize) -> Option<String> {
        let status = self.hosts[host].initiator.status();
        if !self.is_idle(host) {
            return Some(format!("requests are left: {status:?}"));
        }
        if !self.has_converged(host) {
            return Some(format!("not all are in sync: {status:?}"));
        }
        let is_member = |n: &&Node| self.known.iter().any(|m| m.id == n.state.id);
        let data = self.nodes.iter().filter(|n| n.is_data());
        let data: Vec<_> = data.filter(is_member).collect();
        let other = data.iter().find(|n| n.blocks != data[0].blocks)?;
        let (a, b) = (&data[0].blocks, &other.blocks);
        let (one, two) = (&data[0].state, &other.state);
        Some(format!(
            "{one:?} and {two:?} differ, {status:?}: {a:?} {b:?}"
        ))
    }
}
