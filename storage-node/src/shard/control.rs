//! Commands of the control plane, and the work that no client asked for.

use std::time::Duration;

use ashlar_replication::values::{Position, Time, VolumeId};
use ashlar_store::{Device as _, Part, ReplicaSlot, ReplicaSpec};
use ashlar_wire::GoodbyeCode;

use crate::metrics::ShardMetrics;
use crate::scheduler::{ClassDump, Cost};
use crate::shard::Shard;
use crate::shard::commands::{self, Command, CommandError, DeviceInfo, ReplicaInfo, Waiting};
use crate::shard::core::Core;
use crate::shard::pending::{Owed, Pending};
use crate::shard::queued::Work;

/// How long a shard that stops writes home what is only in the journal. It is durable there: whatever
/// is left makes the next start a little longer, nothing else.
const STOP_MAX: Duration = Duration::from_secs(5);

impl Shard {
    /// Takes everything out of the mailbox.
    pub(super) fn commands(&mut self) {
        while let Ok(command) = self.mailbox.try_recv() {
            let now = self.engine.now();
            match command {
                Command::Device(answer) => {
                    let mut info = self.core.device_info();
                    info.engine = self.engine.kind().to_string();
                    let _ = answer.send(Ok(info));
                }
                Command::Stop => self.stop(),
                other => self.core.command(now, other),
            }
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.stop_by = self.engine.now() + STOP_MAX;
        for listener in std::mem::take(&mut self.listeners) {
            self.engine.close_listener(listener);
        }
        let sockets: Vec<_> = self.core.connections.keys().copied().collect();
        for socket in sockets {
            self.core
                .goodbye(socket, GoodbyeCode::ShuttingDown, "the storage node stops");
        }
    }
}

impl Core {
    fn find(&self, volume: VolumeId) -> Result<ReplicaSlot, CommandError> {
        self.store.lookup(volume).ok_or(CommandError::NotFound)
    }

    fn command(&mut self, now: Time, command: Command) {
        match command {
            Command::Create(spec, answer) => self.create(*spec, answer),
            Command::List(volume, answer) => {
                let slots = self
                    .store
                    .replicas()
                    .map(|(slot, replica)| (slot, replica.volume));
                let wanted = slots.filter(|(_, v)| volume.is_none_or(|wanted| wanted == *v));
                let slots: Vec<_> = wanted.map(|(slot, _)| slot).collect();
                let info = |slot| {
                    let mut info = self.info(slot)?;
                    info.attached = self.is_leased(now, slot);
                    Ok(info)
                };
                let _ = answer.send(slots.into_iter().map(info).collect());
            }
            Command::Delete(volume, nonce, answer) => self.delete(volume, nonce, answer),
            Command::Grow(volume, size_blocks, answer) => match self.find(volume) {
                Err(error) => drop(answer.send(Err(error))),
                Ok(slot) => {
                    let waiting = Box::new(Waiting::Grow(slot, answer));
                    let token = self.begin_control(slot, Cost(0), Owed::Control(waiting));
                    let (store, device) = (&mut self.store, &mut self.device);
                    if let Err(error) = store.grow_replica(device, token, slot, size_blocks) {
                        self.fail_control(token, error.into());
                    }
                }
            },
            Command::SetEvicted(volume, evicted, answer) => match self.find(volume) {
                Err(error) => drop(answer.send(Err(error))),
                Ok(slot) => {
                    let waiting = Box::new(Waiting::SetEvicted(answer));
                    let token = self.begin_control(slot, Cost(0), Owed::Control(waiting));
                    let (store, device) = (&mut self.store, &mut self.device);
                    if let Err(error) = store.set_evicted(device, token, slot, evicted) {
                        self.fail_control(token, error.into());
                    }
                }
            },
            Command::Extents(volume, from, count, answer) => match self.find(volume) {
                Err(error) => drop(answer.send(Err(error))),
                Ok(slot) => {
                    let waiting = Box::new(Waiting::Extents(answer));
                    let token = self.begin_control(slot, Cost(0), Owed::Control(waiting));
                    let (store, device) = (&mut self.store, &mut self.device);
                    if let Err(error) = store.digests(device, token, slot, from, count) {
                        self.fail_control(token, error.into());
                    }
                }
            },
            Command::Describe(volume, extent, answer) => {
                self.describe(now, volume, extent, answer);
            }
            Command::Queue(answer) => drop(answer.send(Ok(self.queue(now)))),
            Command::Metrics(answer) => drop(answer.send(Ok(self.snapshot()))),
            // These need the engine, or the loop.
            Command::Device(_) | Command::Stop => {}
        }
    }

    fn create(&mut self, spec: ReplicaSpec, answer: commands::Answer<ReplicaInfo>) {
        if let Some(slot) = self.store.lookup(spec.volume)
            && let Some(replica) = self.store.replica(slot)
        {
            let same = replica.state.id == spec.state.id
                && replica.state.role == spec.state.role
                && replica.size_blocks == spec.size_blocks
                && replica.key == spec.key;
            if !same {
                let other = format!(
                    "nonce {:016x}, {} blocks",
                    replica.state.id.nonce, replica.size_blocks
                );
                let _ = answer.send(Err(CommandError::Exists(other)));
                return;
            }
            // The first request may still be on its way to the device: answered behind it.
            let state = replica.state.clone();
            let waiting = Box::new(Waiting::Create(slot, answer));
            let token = self.begin_control(slot, Cost(0), Owed::Control(waiting));
            let (store, device) = (&mut self.store, &mut self.device);
            if let Err(error) = store.set_state(device, token, slot, state) {
                self.fail_control(token, error.into());
            }
            return;
        }
        // The token is needed before the slot is known; the slot is put in afterwards.
        let placeholder = ReplicaSlot(u32::MAX);
        let waiting = Box::new(Waiting::Create(placeholder, answer));
        let token = self.begin_control(placeholder, Cost(0), Owed::Control(waiting));
        match self.store.create_replica(&mut self.device, token, spec) {
            Ok(slot) => {
                self.pending.set_created_slot(token, slot);
                self.add_slot(slot, Position::ZERO);
            }
            Err(error) => self.fail_control(token, error.into()),
        }
    }

    fn delete(&mut self, volume: VolumeId, nonce: u64, answer: commands::Answer<()>) {
        let Ok(slot) = self.find(volume) else {
            // Deleted already.
            let _ = answer.send(Ok(()));
            return;
        };
        if self
            .store
            .replica(slot)
            .is_some_and(|replica| replica.state.id.nonce != nonce)
        {
            // The replica that was meant is gone; the one that is there is another member.
            let _ = answer.send(Ok(()));
            return;
        }
        let waiting = Owed::Control(Box::new(Waiting::Delete(answer)));
        let token = self.begin_control(slot, Cost(0), waiting);
        match self.store.delete_replica(&mut self.device, token, slot) {
            Ok(()) => self.remove_slot(slot),
            Err(error) => self.fail_control(token, error.into()),
        }
    }

    pub(super) fn info(&self, slot: ReplicaSlot) -> Result<ReplicaInfo, CommandError> {
        let replica = self.store.replica(slot).ok_or(CommandError::NotFound)?;
        Ok(ReplicaInfo {
            volume: replica.volume,
            state: replica.state.clone(),
            size_blocks: replica.size_blocks,
            allocated_extents: replica.allocated_extents,
            evicted: replica.evicted,
            attached: false,
        })
    }

    fn device_info(&self) -> DeviceInfo {
        DeviceInfo {
            device: self.device_id,
            size_bytes: self
                .device
                .geometry(Part::Blocks)
                .map_or(0, |g| g.size_bytes),
            usage: self.store.usage(),
            counters: self.store.counters(),
            closed: self.store.is_closed(),
            engine: String::new(),
            connections: self.connections.len() as u64,
            replicas: self.store.replicas().count() as u64,
            device_bytes_written: self.device.bytes_written,
            client_bytes_written: self.metrics.counters.write_bytes,
        }
    }

    fn queue(&self, now: Time) -> Vec<(String, ClassDump)> {
        let name = |dump: &ClassDump| {
            let volume = self.slots.iter().enumerate().find_map(|(n, state)| {
                let matches = state
                    .as_ref()
                    .is_some_and(|state| state.class == dump.class);
                let replica = self
                    .store
                    .replica(ReplicaSlot(n as u32))
                    .filter(|_| matches)?;
                Some(format!("volume {}", replica.volume))
            });
            match dump.class {
                class if class == self.resync_class => "resync".to_owned(),
                class if class == self.home_class => "home writes".to_owned(),
                class if class == self.scrub_class => "scrub".to_owned(),
                _ => volume.unwrap_or_else(|| "a deleted volume".to_owned()),
            }
        };
        self.scheduler
            .dump(now)
            .into_iter()
            .map(|dump| (name(&dump), dump))
            .collect()
    }

    fn snapshot(&self) -> ShardMetrics {
        let usage = self.store.usage();
        let mut metrics = self.metrics.clone();
        let mut gauge = |name, help, value: u64| metrics.gauges.push((name, help, value as f64));
        gauge("extents", "Extents on the device.", usage.extents);
        gauge(
            "extents_free",
            "Extents that can be allocated.",
            usage.extents_free,
        );
        gauge(
            "journal_bytes",
            "Bytes of the journal.",
            usage.journal_bytes,
        );
        gauge(
            "journal_used_bytes",
            "Bytes of the journal in use.",
            usage.journal_used_bytes,
        );
        gauge(
            "dirty_bytes",
            "Bytes in memory that wait to be written home.",
            usage.dirty_bytes,
        );
        gauge(
            "connections_open",
            "Connections now.",
            self.connections.len() as u64,
        );
        gauge(
            "closed",
            "1 when the device is closed after an error.",
            self.store.is_closed().into(),
        );
        gauge(
            "replicas",
            "Replicas on the device.",
            self.store.replicas().count() as u64,
        );
        metrics
    }

    /// Has dirty data written home once the scheduler finds time for it; the store forces it when
    /// journal or memory run full.
    pub(super) fn schedule_home_write(&mut self, now: Time) {
        if self.home_write_queued {
            return;
        }
        let Some(bytes) = self.store.home_write_cost() else {
            return;
        };
        let cost = Cost::of_bytes(bytes);
        if self.scheduler.admit(now, self.home_class, cost) {
            self.home_write(cost);
        } else {
            self.home_write_queued = true;
            self.scheduler
                .enqueue(self.home_class, cost, Work::HomeWrite);
        }
    }

    /// The scheduler let a home write go.
    pub(super) fn home_write(&mut self, cost: Cost) {
        self.home_write_queued = false;
        // Its bytes count for the shares, not for what is on the device: the store has at most one under
        // way.
        self.scheduler.finished(cost);
        self.store.start_home_write(&mut self.device);
    }

    /// Whether nothing is under way that has to be waited for at the end.
    pub(super) fn is_quiet(&self) -> bool {
        self.connections.is_empty() && self.pending.is_empty()
    }

    /// Keeps a command that waits for the store.
    pub(super) fn begin_control(&mut self, slot: ReplicaSlot, cost: Cost, owed: Owed) -> u64 {
        self.pending.insert(Pending {
            asker: None,
            slot,
            cost,
            bytes: 0,
            started: Time(0),
            owed,
        })
    }

    /// The store refused to begin a command.
    pub(super) fn fail_control(&mut self, token: u64, error: CommandError) {
        let Some(pending) = self.pending.remove(token) else {
            return;
        };
        self.scheduler.finished(pending.cost);
        let Owed::Control(waiting) = pending.owed else {
            return;
        };
        match *waiting {
            Waiting::Create(_, answer) | Waiting::Grow(_, answer) => drop(answer.send(Err(error))),
            Waiting::Delete(answer) | Waiting::SetEvicted(answer) => drop(answer.send(Err(error))),
            Waiting::Extents(answer) => drop(answer.send(Err(error))),
            Waiting::Describe(describe) => drop(describe.answer.send(Err(error))),
        }
    }
}
