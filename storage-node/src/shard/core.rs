//! What a shard consists of besides its engine: store, device, connections, scheduler.

use std::collections::HashMap;

use ashlar_engine::SocketId;
use ashlar_replication::values::{DeviceId, Epoch, EpochNumber, Position, Sequence, Time};
use ashlar_store::{ReplicaSlot, Store};
use ashlar_wire::{GoodbyeCode, encode};

use crate::device::EngineDevice;
use crate::metrics::ShardMetrics;
use crate::scheduler::{ClassId, Cost, Scheduler, Shares};
use crate::shard::connection::{Admission, Connection, Phase};
use crate::shard::outbox::Outbox;
use crate::shard::pending::PendingTable;
use crate::shard::queued::Queued;

/// Settings of a shard that its requests depend on.
#[derive(Clone, Debug)]
pub struct ShardSettings {
    /// Which node; shown to initiators.
    pub node: [u8; 16],
    /// What is admitted per connection.
    pub admission: Admission,
    /// Connections at a time.
    pub connections_max: usize,
    /// How long a lease lasts, in milliseconds.
    pub lease_ms: u32,
    /// How much may be on the device at a time, in cost.
    pub in_flight_max: Cost,
}

impl Default for ShardSettings {
    fn default() -> ShardSettings {
        ShardSettings {
            node: [0; 16],
            // Eight times the window of one volume; more waits in the socket.
            admission: Admission {
                operations_max: 8192,
                bytes_max: 64 << 20,
            },
            connections_max: 4096,
            lease_ms: 3000,
            in_flight_max: Cost(64 << 20),
        }
    }
}

/// Who is attached to a replica, and what it may be told.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotState {
    /// The newest attachment.
    pub(super) attached: Option<(SocketId, u32, Epoch)>,
    /// The newest write that is durable.
    pub(super) durable: Position,
    /// An answer to its writes is owed at the end of the turn.
    pub(super) owed: bool,
    /// Its class in the scheduler.
    pub(super) class: ClassId,
}

/// The shard without its engine.
pub(super) struct Core {
    pub(super) settings: ShardSettings,
    pub(super) device_id: DeviceId,
    pub(super) store: Store,
    pub(super) device: EngineDevice,
    pub(super) connections: HashMap<SocketId, Connection>,
    pub(super) slots: Vec<Option<SlotState>>,
    /// Slots with an answer owed.
    pub(super) owed: Vec<ReplicaSlot>,
    pub(super) pending: PendingTable,
    pub(super) scheduler: Scheduler<Queued>,
    pub(super) resync_class: ClassId,
    pub(super) home_class: ClassId,
    pub(super) scrub_class: ClassId,
    pub(super) outbox: Outbox,
    /// Connections whose admission has room again.
    pub(super) resumed: Vec<SocketId>,
    pub(super) metrics: ShardMetrics,
}

impl Core {
    pub(super) fn new(settings: ShardSettings, store: Store, device: EngineDevice) -> Core {
        let mut scheduler = Scheduler::new(settings.in_flight_max);
        // Background work gets a tenth of a busy device between clients of weight 1, all of an idle one.
        let background = Shares {
            weight: 0.1,
            ..Shares::default()
        };
        let resync_class = scheduler.add_class(Shares {
            weight: 0.5,
            ..background
        });
        let home_class = scheduler.add_class(Shares {
            weight: 0.5,
            ..background
        });
        let scrub_class = scheduler.add_class(background);
        let mut core = Core {
            settings,
            device_id: store.device_id(),
            connections: HashMap::new(),
            slots: Vec::new(),
            owed: Vec::with_capacity(64),
            pending: PendingTable::default(),
            scheduler,
            resync_class,
            home_class,
            scrub_class,
            outbox: Outbox::default(),
            resumed: Vec::new(),
            metrics: ShardMetrics::default(),
            store,
            device,
        };
        let existing: Vec<_> = core
            .store
            .replicas()
            .map(|(slot, replica)| (slot, replica.state.last))
            .collect();
        existing
            .into_iter()
            .for_each(|(slot, last)| core.add_slot(slot, last));
        core
    }

    /// Begins to keep track of a replica.
    pub(super) fn add_slot(&mut self, slot: ReplicaSlot, durable: Position) {
        let class = self.scheduler.add_class(Shares::default());
        let index = slot.0 as usize;
        if index >= self.slots.len() {
            self.slots.resize(index + 1, None);
        }
        self.slots[index] = Some(SlotState {
            attached: None,
            durable,
            owed: false,
            class,
        });
    }

    /// Forgets a replica that was deleted.
    pub(super) fn remove_slot(&mut self, slot: ReplicaSlot) {
        if let Some(state) = self.slots.get_mut(slot.0 as usize).and_then(Option::take) {
            self.scheduler.remove_class(state.class);
        }
    }

    pub(super) fn slot(&mut self, slot: ReplicaSlot) -> Option<&mut SlotState> {
        self.slots.get_mut(slot.0 as usize)?.as_mut()
    }

    /// Notes that whoever is attached is to be told how far its writes are durable.
    pub(super) fn owe_applied(&mut self, slot: ReplicaSlot) {
        if let Some(state) = self.slots.get_mut(slot.0 as usize).and_then(Option::as_mut)
            && !state.owed
        {
            state.owed = true;
            self.owed.push(slot);
        }
    }

    /// Sends one cumulative answer per replica that finished writes in this turn.
    pub(super) fn send_applied(&mut self) {
        while let Some(slot) = self.owed.pop() {
            let Some(state) = self.slots.get_mut(slot.0 as usize).and_then(Option::as_mut) else {
                continue;
            };
            state.owed = false;
            let Some((socket, handle, epoch)) = state.attached else {
                continue;
            };
            // `last` of another epoch says nothing about this one's writes.
            if state.durable.epoch != epoch.number || state.durable.sequence == Sequence(0) {
                continue;
            }
            let sequence = state.durable.sequence;
            let reply = ashlar_replication::message::Reply::<()>::Applied { sequence };
            self.outbox
                .frame(socket, |out| encode::reply(out, handle, &reply));
        }
    }

    /// A new epoch was asked for and accepted: the older attachment hears of it before any renewal.
    pub(super) fn supersede(&mut self, slot: ReplicaSlot, new: (SocketId, u32, Epoch)) {
        let Some(state) = self.slot(slot) else { return };
        let old = state.attached.replace(new);
        if let Some((socket, handle, epoch)) = old
            && epoch != new.2
        {
            let promised: EpochNumber = new.2.number;
            self.outbox
                .frame(socket, |out| encode::fenced(out, handle, promised));
        }
    }

    /// Says goodbye; the engine closes the socket when the turn ends.
    pub(super) fn goodbye(&mut self, socket: SocketId, code: GoodbyeCode, text: &str) {
        if let Some(connection) = self.connections.get_mut(&socket)
            && connection.phase != Phase::Closing
        {
            connection.phase = Phase::Closing;
            self.outbox
                .last_frame(socket, |out| encode::goodbye(out, code, text));
            self.forget(socket);
        }
    }

    /// A connection is gone: what is under way for it finishes unheard.
    pub(super) fn forget(&mut self, socket: SocketId) {
        self.connections.remove(&socket);
        for state in self.slots.iter_mut().flatten() {
            if state
                .attached
                .is_some_and(|(attached, _, _)| attached == socket)
            {
                state.attached = None;
            }
        }
    }

    /// Takes a finished request out of its connection's admission.
    pub(super) fn admission_end(&mut self, socket: Option<SocketId>, bytes: u64) {
        let Some(socket) = socket else { return };
        let Some(connection) = self.connections.get_mut(&socket) else {
            return;
        };
        connection.end(bytes);
        if connection.paused && connection.admits(&self.settings.admission) {
            connection.paused = false;
            self.resumed.push(socket);
        }
    }

    /// Whether an initiator has renewed its lease on the replica within the lease's length.
    pub(super) fn is_attached(&self, now: Time, slot: ReplicaSlot) -> bool {
        let state = self.slots.get(slot.0 as usize).and_then(Option::as_ref);
        let attached = state.and_then(|state| state.attached);
        let connection = attached.and_then(|(socket, _, _)| self.connections.get(&socket));
        let lease = std::time::Duration::from_millis(u64::from(self.settings.lease_ms));
        connection
            .and_then(|c| c.renewed_at)
            .is_some_and(|at| now.since(at) <= lease)
    }
}

impl SlotState {
    /// The newest durable sequence of an epoch's writes.
    pub(super) fn durable_in(&self, epoch: Epoch) -> Sequence {
        if self.durable.epoch == epoch.number {
            self.durable.sequence
        } else {
            Sequence(0)
        }
    }
}
