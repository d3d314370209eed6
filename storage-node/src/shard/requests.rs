//! From a request to the store: admission, the scheduler, the member's rules.

use ashlar_engine::SocketId;
use ashlar_replica::{Answer, Attachment, Decision, decide, refusal_of, submit};
use ashlar_replication::message::{Content, Refusal, Reply, Request, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, EXTENT_BLOCKS, Sequence, Time};
use ashlar_store::{ReplicaSlot, StoreError};
use ashlar_wire::{BlockData, GoodbyeCode, encode};

use crate::scheduler::{ClassId, Cost};
use crate::shard::connection::Asker;
use crate::shard::core::Core;
use crate::shard::pending::{Owed, Pending};
use crate::shard::queued::{Queued, Work};

/// Why a request was not started.
enum Rejected {
    Refused(Refusal),
    /// The frame's checksums were right and its data's is not: whatever did that, the connection is of
    /// no use.
    Corrupt,
}

impl From<Refusal> for Rejected {
    fn from(refusal: Refusal) -> Rejected {
        Rejected::Refused(refusal)
    }
}

impl From<StoreError> for Rejected {
    fn from(error: StoreError) -> Rejected {
        match error {
            StoreError::Checksum => Rejected::Corrupt,
            other => Rejected::Refused(refusal_of(other)),
        }
    }
}

/// Bytes that a request moves to or from the device.
fn bytes_of<P>(request: &Request<P>) -> u64 {
    let blocks = match request {
        Request::Write {
            range,
            content: Content::Data(_),
            ..
        }
        | Request::Copy {
            range,
            content: Content::Data(_),
            ..
        }
        | Request::Equalise {
            range,
            content: Content::Data(_),
            ..
        }
        | Request::Read { range, .. } => range.count,
        Request::Repair { .. } => 1,
        // Header pages of the extents that are looked at; most are in memory.
        Request::Compare { .. } | Request::Digests { .. } | Request::ListAbove { .. } => 1,
        _ => 0,
    };
    u64::from(blocks.min(EXTENT_BLOCKS)) * BLOCK_BYTES as u64
}

impl Core {
    pub(super) fn count_refusal(&mut self, refusal: Refusal) {
        let counters = &mut self.metrics.counters;
        match refusal {
            Refusal::Fenced { .. } => counters.fenced_requests += 1,
            _ => counters.refusals += 1,
        }
    }

    pub(super) fn refuse(&mut self, socket: SocketId, handle: u32, id: RequestId, why: Refusal) {
        self.count_refusal(why);
        let reply = Reply::<()>::Refused { id, refusal: why };
        self.outbox
            .frame(socket, |out| encode::reply(out, handle, &reply));
    }

    pub(super) fn refuse_write(
        &mut self,
        socket: SocketId,
        handle: u32,
        sequence: Sequence,
        refusal: Refusal,
    ) {
        self.count_refusal(refusal);
        let reply = Reply::<()>::WriteRefused { sequence, refusal };
        self.outbox
            .frame(socket, |out| encode::reply(out, handle, &reply));
    }

    pub(super) fn refuse_read(
        &mut self,
        socket: SocketId,
        handle: u32,
        id: RequestId,
        why: Refusal,
    ) {
        self.count_refusal(why);
        self.outbox.frame(socket, |out| {
            encode::read_failed(out, handle, id, why.into())
        });
    }

    fn refuse_request<P>(
        &mut self,
        socket: SocketId,
        handle: u32,
        request: &Request<P>,
        refusal: Refusal,
    ) {
        match request {
            Request::Write { sequence, .. } => {
                self.refuse_write(socket, handle, *sequence, refusal);
            }
            Request::Read { id, .. } => self.refuse_read(socket, handle, *id, refusal),
            request => self.refuse(socket, handle, request.id(), refusal),
        }
    }

    /// Passes a request to the store at once, or queues it where the device is busy.
    pub(super) fn request(
        &mut self,
        now: Time,
        socket: SocketId,
        handle: u32,
        request: Request<BlockData<'_>>,
    ) {
        let bytes = bytes_of(&request);
        let Some(connection) = self.connections.get_mut(&socket) else {
            return;
        };
        let Some(attachment) = connection.attachment(handle).copied() else {
            self.metrics.counters.unknown_handles += 1;
            self.refuse_request(socket, handle, &request, Refusal::UnknownReplica);
            return;
        };
        connection.begin(bytes);
        self.admitted_bytes += bytes;
        let asker = Asker {
            socket,
            handle,
            attachment,
        };
        let Some(class) = self.class_of(attachment.slot, &request) else {
            self.start(now, asker, &request, Cost(0));
            return;
        };
        let cost = Cost::of_bytes(bytes);
        if self.must_wait(&request) || !self.scheduler.admit(now, class, cost) {
            let queued = Box::new(Queued::new(asker, now, request));
            self.scheduler.enqueue(class, cost, Work::Request(queued));
        } else {
            self.start(now, asker, &request, cost);
        }
    }

    /// None: a change of state, which costs one small journal record and is not scheduled. It may
    /// overtake writes that wait: the rules hold for every order of arrival.
    fn class_of<P>(&self, slot: ReplicaSlot, request: &Request<P>) -> Option<ClassId> {
        match request {
            Request::Write { .. } | Request::Read { .. } => self
                .slots
                .get(slot.0 as usize)?
                .as_ref()
                .map(|state| state.class),
            Request::Copy { .. }
            | Request::Equalise { .. }
            | Request::Repair { .. }
            | Request::Compare { .. }
            | Request::Digests { .. }
            | Request::ListAbove { .. } => Some(self.resync_class),
            _ => None,
        }
    }

    /// Whether the store has to write home before it takes more.
    fn must_wait<P>(&self, request: &Request<P>) -> bool {
        let mutates = !matches!(
            request,
            Request::Read { .. }
                | Request::Compare { .. }
                | Request::Digests { .. }
                | Request::ListAbove { .. }
        );
        mutates && self.is_congested()
    }

    /// Whether what waits in the scheduler has to wait for home writes. A closed device refuses all.
    pub(super) fn is_congested(&self) -> bool {
        self.store.is_under_pressure() && !self.store.is_closed()
    }

    /// Starts what waited, as far as the device and the limits allow.
    pub(super) fn start_queued(&mut self, now: Time) {
        while !self.is_congested()
            && let Some((_, cost, work)) = self.scheduler.dispatch(now)
        {
            match work {
                Work::Request(queued) => {
                    self.metrics.queue.record(now.since(queued.since));
                    self.start(now, queued.asker, &queued.request(), cost);
                }
                Work::HomeWrite => self.home_write(cost),
                Work::Describe(describe) => self.describe_start(*describe, cost),
            }
        }
    }

    /// Applies the member's rules and hands the request to the store.
    fn start(&mut self, now: Time, asker: Asker, request: &Request<BlockData<'_>>, cost: Cost) {
        let (socket, bytes) = (asker.socket, bytes_of(request));
        let started = if self.is_attached(&asker) {
            self.try_start(now, asker, request, cost, bytes)
        } else {
            // It waited, and its connection or attachment is gone: nobody listens to an answer.
            self.scheduler.finished(cost);
            self.admission_end(socket, bytes);
            return;
        };
        let Err(rejected) = started else { return };
        self.scheduler.finished(cost);
        self.admission_end(socket, bytes);
        match rejected {
            Rejected::Refused(refusal) => {
                self.refuse_request(socket, asker.handle, request, refusal);
            }
            Rejected::Corrupt => {
                self.metrics.counters.data_checksum_errors += 1;
                let text = "block data does not match its checksum";
                self.goodbye(socket, GoodbyeCode::Protocol, text);
            }
        }
    }

    /// Keeps what is to be answered; returns the token for the store.
    pub(super) fn begin(
        &mut self,
        started: Time,
        asker: Asker,
        cost: Cost,
        bytes: u64,
        answer: Answer,
    ) -> u64 {
        self.pending.insert(Pending {
            asker: Some(asker),
            slot: asker.attachment.slot,
            cost,
            bytes,
            started,
            owed: Owed::Member(answer),
        })
    }

    fn try_start(
        &mut self,
        now: Time,
        asker: Asker,
        request: &Request<BlockData<'_>>,
        cost: Cost,
        bytes: u64,
    ) -> Result<(), Rejected> {
        let Attachment { slot, epoch, .. } = asker.attachment;
        let replica = asker.attachment.replica(&self.store);
        let replica = replica.ok_or(Refusal::UnknownReplica)?;
        let decision = decide(replica, epoch, request)?;
        let Decision::Step(step, answer) = decision else {
            self.owe_applied(slot);
            self.scheduler.finished(cost);
            self.admission_end(asker.socket, bytes);
            return Ok(());
        };
        if matches!(request, Request::StoreConfig { .. }) {
            self.metrics.counters.configurations += 1;
        }
        let token = self.begin(now, asker, cost, bytes, answer);
        let (store, device) = (&mut self.store, &mut self.device);
        let submitted = submit(store, device, token, slot, epoch, request, step);
        submitted.map_err(|error| {
            self.pending.remove(token);
            error.into()
        })
    }
}
