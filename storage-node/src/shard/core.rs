//! What a shard consists of besides its engine: store, device, connections, scheduler.

use std::collections::HashMap;
use std::time::Duration;

use ashlar_engine::SocketId;
use ashlar_replication::values::{DeviceId, Epoch, Position, Sequence, Time};
use ashlar_store::{ReplicaSlot, Store};
use ashlar_wire::{GoodbyeCode, encode};

use crate::device::EngineDevice;
use crate::metrics::ShardMetrics;
use crate::scheduler::{ClassId, Cost, Scheduler, Shares};
use crate::shard::connection::{Admission, Asker, Connection, Phase};
use crate::shard::outbox::Outbox;
use crate::shard::pending::PendingTable;
use crate::shard::queued::Work;

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
            // Several windows of a volume on a connection, which many volumes share. What all of them
            // may have here at a time keeps the process within 128 MiB beside the store's memory.
            admission: Admission {
                operations_max: 8192,
                bytes_max: 24 << 20,
                backlog_bytes_max: 4 << 20,
                total_bytes_max: 48 << 20,
            },
            connections_max: 1024,
            lease_ms: 3000,
            // Some milliseconds of a fast device: enough to keep it busy, so little that a request which
            // is put in front does not wait long behind what was handed over already.
            in_flight_max: Cost(16 << 20),
        }
    }
}

/// Silence after which the place of a connection is given to another when there is none left; far
/// beyond the time between two renewals of a lease.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// The same for a connection that has not begun to speak.
const GREETING_MAX: Duration = Duration::from_secs(5);

/// Who is attached to a replica, and what it may be told.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotState {
    /// The newest attachment.
    pub(super) attached: Option<Asker>,
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
    pub(super) scheduler: Scheduler<Work>,
    /// The next home write waits in the scheduler.
    pub(super) home_write_queued: bool,
    pub(super) resync_class: ClassId,
    pub(super) home_class: ClassId,
    pub(super) scrub_class: ClassId,
    pub(super) outbox: Outbox,
    /// Bytes that all connections have under way.
    pub(super) admitted_bytes: u64,
    /// Connections that were paused because all of them together have too much under way.
    pub(super) held: Vec<SocketId>,
    /// Connections whose admission has room again.
    pub(super) resumed: Vec<SocketId>,
    /// Connections whose peer said goodbye.
    pub(super) ended: Vec<SocketId>,
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
            home_write_queued: false,
            resync_class,
            home_class,
            scrub_class,
            outbox: Outbox::default(),
            admitted_bytes: 0,
            held: Vec::new(),
            resumed: Vec::new(),
            ended: Vec::new(),
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
            let Some(Asker {
                socket,
                handle,
                attachment,
            }) = state.attached
            else {
                continue;
            };
            let sequence = state.durable_in(attachment.epoch);
            if sequence == Sequence(0) {
                continue;
            }
            let reply = ashlar_replication::message::Reply::<()>::Applied { sequence };
            self.outbox
                .frame(socket, |out| encode::reply(out, handle, &reply));
        }
    }

    /// A new epoch was asked for and accepted: the older attachment hears of it before any renewal.
    pub(super) fn supersede(&mut self, new: Asker) {
        let Some(state) = self.slot(new.attachment.slot) else {
            return;
        };
        let old = state.attached.replace(new);
        if let Some(old) = old
            && old.attachment.epoch != new.attachment.epoch
        {
            let promised = new.attachment.epoch.number;
            self.outbox.frame(old.socket, |out| {
                encode::fenced(out, old.handle, promised);
            });
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

    /// The peer said goodbye.
    pub(super) fn hang_up(&mut self, socket: SocketId) {
        self.forget(socket);
        self.ended.push(socket);
    }

    /// A connection is gone: what is under way for it finishes unheard.
    pub(super) fn forget(&mut self, socket: SocketId) {
        self.connections.remove(&socket);
        for state in self.slots.iter_mut().flatten() {
            if state.attached.is_some_and(|a| a.socket == socket) {
                state.attached = None;
            }
        }
    }

    /// Whether all connections together have as much under way as is allowed.
    pub(super) fn is_full(&self) -> bool {
        self.admitted_bytes >= self.settings.admission.total_bytes_max
    }

    /// Takes a finished request out of the admission.
    pub(super) fn admission_end(&mut self, socket: SocketId, bytes: u64) {
        self.admitted_bytes -= bytes;
        if let Some(connection) = self.connections.get_mut(&socket) {
            connection.end(bytes);
            self.resume_if_admitted(socket);
        }
    }

    /// Goes on with a paused connection that has room again.
    pub(super) fn resume_if_admitted(&mut self, socket: SocketId) {
        let full = self.is_full();
        let Some(connection) = self.connections.get_mut(&socket) else {
            return;
        };
        if !connection.paused || !connection.admits(&self.settings.admission) {
            return;
        }
        if !full {
            connection.paused = false;
            self.resumed.push(socket);
        } else if !connection.held {
            connection.held = true;
            self.held.push(socket);
        }
    }

    /// Goes on with the connections that waited for others.
    pub(super) fn resume_held(&mut self) {
        if self.held.is_empty() || self.is_full() {
            return;
        }
        let mut held = std::mem::take(&mut self.held);
        for socket in held.drain(..) {
            if let Some(connection) = self.connections.get_mut(&socket) {
                connection.held = false;
                self.resume_if_admitted(socket);
            }
        }
        self.held = held;
    }

    /// Makes room for a new connection: one that has been silent for so long that its initiator is
    /// either gone or will connect again when it needs to. Attached ones renew their lease.
    pub(super) fn evict_silent_connection(&mut self, now: Time) {
        let silence = |connection: &Connection| match connection.phase {
            Phase::Open(_) => SILENCE_MAX,
            Phase::Greeting | Phase::Closing => GREETING_MAX,
        };
        let silent = self
            .connections
            .iter()
            .filter(|(_, connection)| now.since(connection.active_at) > silence(connection));
        let oldest = silent.min_by_key(|(_, connection)| connection.active_at);
        if let Some((socket, _)) = oldest {
            let (socket, text) = (*socket, "silent, and its place is needed");
            self.goodbye(socket, GoodbyeCode::Busy, text);
        }
    }

    /// Whether the attachment that asked is still the one that its handle stands for.
    pub(super) fn is_attached(&self, asker: &Asker) -> bool {
        let connection = self.connections.get(&asker.socket);
        connection.and_then(|c| c.attachment(asker.handle)) == Some(&asker.attachment)
    }

    /// Whether an initiator has renewed its lease on the replica within the lease's length.
    pub(super) fn is_leased(&self, now: Time, slot: ReplicaSlot) -> bool {
        let state = self.slots.get(slot.0 as usize).and_then(Option::as_ref);
        let attached = state.and_then(|state| state.attached);
        let connection = attached.and_then(|asker| self.connections.get(&asker.socket));
        let lease = Duration::from_millis(u64::from(self.settings.lease_ms));
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
