//! From a frame to the store: handshake, fencing, the member's rules, admission, the scheduler.

use ashlar_engine::SocketId;
use ashlar_replication::member;
use ashlar_replication::message::{Content, Refusal, Reply, Request, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, EXTENT_BLOCKS, Position, Sequence, Time};
use ashlar_store::{Blocks, ReplicaSlot, StoreError};
use ashlar_wire::proof::{Challenges, VolumeKey, verify_fence};
use ashlar_wire::{
    BadFrame, BlockData, Fence, Frame, GoodbyeCode, Hello, POSITIONS_MAX, VERSION, Welcome, encode,
};

use crate::scheduler::{ClassId, Cost};
use crate::shard::connection::{Attachment, HANDLES_MAX, Phase};
use crate::shard::core::Core;
use crate::shard::pending::{Answer, Pending};
use crate::shard::queued::Queued;

/// What a refused store call is called on the wire.
pub(super) fn refusal_of(error: StoreError) -> Refusal {
    match error {
        StoreError::DeviceFull | StoreError::ReplicasFull => Refusal::DeviceFull,
        StoreError::UnknownReplica => Refusal::UnknownReplica,
        StoreError::Witness => Refusal::Witness,
        StoreError::BadRange | StoreError::Checksum | StoreError::PositionChanged => {
            Refusal::BadRequest
        }
        StoreError::Closed
        | StoreError::HeaderDamaged
        | StoreError::IndexWrong
        | StoreError::AlreadyExists => Refusal::DeviceClosed,
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
    /// Handles a frame. The frame lies in the engine's receive buffer until this returns.
    pub(super) fn frame(&mut self, now: Time, socket: SocketId, frame: Frame<'_>) {
        let Some(connection) = self.connections.get_mut(&socket) else {
            return;
        };
        match (connection.phase, frame) {
            (Phase::Closing, _) => {}
            (Phase::Greeting, Frame::Hello(hello)) => self.hello(socket, &hello),
            (Phase::Open(challenges), Frame::Fence(fence)) => {
                self.fence(now, socket, &challenges, &fence);
            }
            (Phase::Open(_), Frame::Request { handle, request }) => {
                self.request(now, socket, handle, request);
            }
            (Phase::Open(_), Frame::Renew { echo }) => {
                connection.renewed_at = Some(now);
                self.outbox.frame(socket, |out| encode::renewed(out, echo));
            }
            (Phase::Open(_), Frame::Release { handle }) => self.release(socket, handle),
            (_, Frame::Goodbye { .. }) => self.forget(socket),
            _ => {
                self.metrics.counters.protocol_errors += 1;
                self.goodbye(
                    socket,
                    GoodbyeCode::Protocol,
                    "a frame that has no place here",
                );
            }
        }
    }

    /// A whole frame whose content is wrong.
    pub(super) fn bad_frame(&mut self, socket: SocketId, bad: BadFrame) {
        self.metrics.counters.malformed_requests += 1;
        let known = self
            .connections
            .get(&socket)
            .is_some_and(|c| matches!(c.phase, Phase::Open(_)));
        if known && bad.kind as u16 >= 32 && (bad.kind as u16) < 64 {
            self.refuse(
                socket,
                bad.handle,
                RequestId(bad.request),
                Refusal::BadRequest,
            );
        } else {
            self.metrics.counters.protocol_errors += 1;
            self.goodbye(socket, GoodbyeCode::Protocol, "a malformed frame");
        }
    }

    fn hello(&mut self, socket: SocketId, hello: &Hello) {
        if hello.version_min > VERSION || hello.version_max < VERSION {
            let text = format!(
                "this node speaks version {VERSION}, the initiator {} to {}",
                hello.version_min, hello.version_max
            );
            self.goodbye(socket, GoodbyeCode::Version, &text);
            return;
        }
        let mut nonce = [0; 16];
        if getrandom::fill(&mut nonce).is_err() {
            self.goodbye(
                socket,
                GoodbyeCode::ShuttingDown,
                "the system has no random numbers",
            );
            return;
        }
        let welcome = Welcome {
            version: VERSION,
            features: 0,
            nonce,
            node: self.settings.node,
            device: self.device_id,
            operations_max: self.settings.admission.operations_max,
            bytes_max: self.settings.admission.bytes_max,
            lease_ms: self.settings.lease_ms,
        };
        if let Some(connection) = self.connections.get_mut(&socket) {
            connection.phase = Phase::Open(Challenges {
                client: hello.nonce,
                server: nonce,
            });
        }
        self.outbox
            .frame(socket, |out| encode::welcome(out, &welcome));
    }

    /// M1, with the proof of the volume's key.
    fn fence(&mut self, now: Time, socket: SocketId, challenges: &Challenges, fence: &Fence) {
        let subject = &fence.subject;
        let refuse = |core: &mut Core, refusal| {
            core.metrics.counters.refusals += 1;
            core.outbox.frame(socket, |out| {
                encode::fence_refused(out, subject.handle, refusal)
            });
        };
        if subject.handle >= HANDLES_MAX {
            return refuse(self, Refusal::BadRequest);
        }
        let slot = self.store.lookup(subject.volume);
        let replica = slot.and_then(|slot| self.store.replica(slot));
        let (Some(slot), Some(replica)) = (slot, replica) else {
            return refuse(self, Refusal::UnknownReplica);
        };
        if !verify_fence(&VolumeKey(replica.key), challenges, subject, &fence.proof) {
            self.metrics.counters.unauthenticated_fences += 1;
            return refuse(self, Refusal::Unauthenticated);
        }
        if replica.state.id != subject.member {
            return refuse(self, Refusal::UnknownReplica);
        }
        let state = match member::fence(&replica.state, subject.epoch) {
            Ok(state) => state,
            Err(refusal) => return refuse(self, refusal),
        };
        let attachment = Attachment {
            slot,
            volume: subject.volume,
            epoch: subject.epoch,
        };
        if let Some(connection) = self.connections.get_mut(&socket) {
            connection.set_attachment(subject.handle, Some(attachment));
            // Counted out when its state is durable, like every other request.
            connection.begin(0);
        }
        // L3: before anything else is sent on the old attachment's connection.
        self.supersede(slot, (socket, subject.handle, subject.epoch));
        let answer = Answer::Fence(subject.epoch);
        let token = self.begin(
            now,
            socket,
            subject.handle,
            slot,
            Cost::default(),
            0,
            answer,
        );
        // Written also when nothing changes: an equal promise may still be on its way to the device.
        if let Err(error) = self.store.set_state(&mut self.device, token, slot, state) {
            self.abandon(token);
            self.admission_end(Some(socket), 0);
            refuse(self, refusal_of(error));
        }
    }

    fn release(&mut self, socket: SocketId, handle: u32) {
        let Some(connection) = self.connections.get_mut(&socket) else {
            return;
        };
        let Some(attachment) = connection.attachment(handle).copied() else {
            return;
        };
        connection.set_attachment(handle, None);
        if let Some(state) = self.slot(attachment.slot)
            && state
                .attached
                .is_some_and(|(s, h, _)| (s, h) == (socket, handle))
        {
            state.attached = None;
        }
    }

    pub(super) fn refuse(
        &mut self,
        socket: SocketId,
        handle: u32,
        id: RequestId,
        refusal: Refusal,
    ) {
        if let Refusal::Fenced { .. } = refusal {
            self.metrics.counters.fenced_requests += 1;
        } else {
            self.metrics.counters.refusals += 1;
        }
        let reply = Reply::<()>::Refused { id, refusal };
        self.outbox
            .frame(socket, |out| encode::reply(out, handle, &reply));
    }

    fn refuse_request<P>(
        &mut self,
        socket: SocketId,
        handle: u32,
        request: &Request<P>,
        refusal: Refusal,
    ) {
        let id = match request {
            Request::Write { sequence, .. } => {
                self.metrics.counters.refusals += 1;
                let reply = Reply::<()>::WriteRefused {
                    sequence: *sequence,
                    refusal,
                };
                self.outbox
                    .frame(socket, |out| encode::reply(out, handle, &reply));
                return;
            }
            Request::Read { id, .. } => {
                self.metrics.counters.refusals += 1;
                let error = refusal.into();
                self.outbox
                    .frame(socket, |out| encode::read_failed(out, handle, *id, error));
                return;
            }
            Request::Fence { .. } => RequestId(0),
            Request::StoreConfig { id, .. }
            | Request::BeginResync { id, .. }
            | Request::Copy { id, .. }
            | Request::MarkComplete { id, .. }
            | Request::Equalise { id, .. }
            | Request::SetLast { id, .. }
            | Request::Compare { id, .. }
            | Request::Digests { id, .. }
            | Request::ListAbove { id, .. }
            | Request::Repair { id, .. } => *id,
        };
        self.refuse(socket, handle, id, refusal);
    }

    /// Passes a request to the store at once, or queues it where the device is busy.
    fn request(
        &mut self,
        now: Time,
        socket: SocketId,
        handle: u32,
        request: Request<BlockData<'_>>,
    ) {
        let attachment = self
            .connections
            .get(&socket)
            .and_then(|c| c.attachment(handle))
            .copied();
        let Some(attachment) = attachment else {
            self.refuse_request(socket, handle, &request, Refusal::UnknownReplica);
            return;
        };
        let corrupt = match &request {
            Request::Write {
                content: Content::Data(blocks),
                ..
            }
            | Request::Copy {
                content: Content::Data(blocks),
                ..
            }
            | Request::Equalise {
                content: Content::Data(blocks),
                ..
            }
            | Request::Repair {
                content: Content::Data(blocks),
                ..
            } => blocks.first_bad_block().is_some(),
            _ => false,
        };
        if corrupt {
            // The header was right and the data is not: whatever did that, this connection is of no use.
            self.metrics.counters.wire_checksum_errors += 1;
            self.goodbye(
                socket,
                GoodbyeCode::Protocol,
                "block data does not match its checksum",
            );
            return;
        }
        let class = self.class_of(attachment.slot, &request);
        let bytes = bytes_of(&request);
        let cost = Cost::of_bytes(bytes);
        if let Some(connection) = self.connections.get_mut(&socket) {
            connection.begin(bytes);
        }
        match class {
            Some(class) if self.must_wait(&request) || !self.scheduler.admit(now, class, cost) => {
                let queued = Queued::new(socket, handle, now, request);
                self.scheduler.enqueue(class, cost, queued);
            }
            Some(_) => self.start(now, socket, handle, &request, cost),
            None => self.start(now, socket, handle, &request, Cost(0)),
        }
    }

    /// None: a change of state, which is not scheduled.
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
        mutates && self.store.is_under_pressure()
    }

    /// Starts requests that waited, as far as the device and the limits allow.
    pub(super) fn start_queued(&mut self, now: Time) {
        while !self.store.is_under_pressure()
            && let Some((_, cost, queued)) = self.scheduler.dispatch(now)
        {
            self.metrics.queue.record(now.since(queued.since));
            if self.connections.contains_key(&queued.socket) {
                self.start(now, queued.socket, queued.handle, &queued.request(), cost);
            } else {
                self.scheduler.finished(cost);
            }
        }
    }

    /// Applies the member's rules and hands the request to the store.
    fn start(
        &mut self,
        now: Time,
        socket: SocketId,
        handle: u32,
        request: &Request<BlockData<'_>>,
        cost: Cost,
    ) {
        let bytes = bytes_of(request);
        let result = self.try_start(now, socket, handle, request, cost, bytes);
        if let Err(refusal) = result {
            self.scheduler.finished(cost);
            self.admission_end(Some(socket), bytes);
            self.refuse_request(socket, handle, request, refusal);
        }
    }

    /// Keeps what is to be answered; returns the token for the store.
    #[allow(
        clippy::too_many_arguments,
        reason = "the fields of Pending, in its order"
    )]
    pub(super) fn begin(
        &mut self,
        started: Time,
        socket: SocketId,
        handle: u32,
        slot: ReplicaSlot,
        cost: Cost,
        bytes: u64,
        answer: Answer,
    ) -> u64 {
        let socket = Some(socket);
        self.pending.insert(Pending {
            socket,
            handle,
            slot,
            cost,
            bytes,
            started,
            answer,
        })
    }

    /// The store refused to begin.
    pub(super) fn abandon(&mut self, token: u64) {
        self.pending.remove(token);
    }

    fn try_start(
        &mut self,
        now: Time,
        socket: SocketId,
        handle: u32,
        request: &Request<BlockData<'_>>,
        cost: Cost,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let connection = self
            .connections
            .get(&socket)
            .ok_or(Refusal::UnknownReplica)?;
        let attachment = *connection
            .attachment(handle)
            .ok_or(Refusal::UnknownReplica)?;
        let (slot, epoch) = (attachment.slot, attachment.epoch);
        let replica = self
            .store
            .replica(slot)
            .filter(|r| r.volume == attachment.volume);
        let replica = replica.ok_or(Refusal::UnknownReplica)?;
        let state = &replica.state;
        let changes_blocks = matches!(
            request,
            Request::Write { .. } | Request::BeginResync { .. } | Request::Copy { .. }
        );
        if replica.evicted && changes_blocks {
            return Err(Refusal::Evicted);
        }
        let position = |sequence: Sequence| Position {
            epoch: epoch.number,
            sequence,
        };
        // What the request changes in the member's state, and what is to be answered.
        let (change, answer) = match request {
            Request::Write { sequence, .. } => {
                match member::check_write(state, epoch, *sequence)? {
                    member::WriteDecision::Apply => (None, Answer::Write(position(*sequence))),
                    member::WriteDecision::AlreadyApplied => {
                        self.owe_applied(slot);
                        self.scheduler.finished(cost);
                        self.admission_end(Some(socket), bytes);
                        return Ok(());
                    }
                }
            }
            Request::StoreConfig {
                id,
                configuration,
                start,
            } => {
                let next = member::store_config(state, epoch, configuration, start)?;
                (Some(next), Answer::Done(*id))
            }
            Request::BeginResync { id, pass, sequence } => {
                let next = member::begin_resync(state, epoch, *pass, *sequence)?;
                (Some(next), Answer::Resync(*id, position(*sequence)))
            }
            Request::MarkComplete { id, pass } => (
                Some(member::mark_complete(state, epoch, *pass)?),
                Answer::Done(*id),
            ),
            Request::SetLast { id, position } => (
                Some(member::set_last(state, epoch, *position)?),
                Answer::Done(*id),
            ),
            Request::Copy { id, pass, .. } => {
                member::check_copy(state, epoch, *pass)?;
                (None, Answer::Copy(*id))
            }
            Request::Equalise { id, .. } => {
                member::check_equalise(state, epoch)?;
                (None, Answer::Done(*id))
            }
            Request::Repair { id, .. } => {
                member::check_repair(state, epoch)?;
                (None, Answer::Done(*id))
            }
            Request::Read { id, .. } => {
                member::check_read(state, epoch)?;
                (None, Answer::Read(*id))
            }
            Request::Compare { id, .. } | Request::ListAbove { id, .. } => {
                member::check_compare(state, epoch)?;
                (None, Answer::Positions(*id))
            }
            Request::Digests { id, .. } => {
                member::check_compare(state, epoch)?;
                (None, Answer::Digests(*id))
            }
            Request::Fence { .. } => return Err(Refusal::BadRequest),
        };
        let token = self.begin(now, socket, handle, slot, cost, bytes, answer);
        let (store, device) = (&mut self.store, &mut self.device);
        let started = match (change, request) {
            (Some(next), _) => {
                if matches!(request, Request::StoreConfig { .. }) {
                    self.metrics.counters.configurations += 1;
                }
                store.set_state(device, token, slot, next)
            }
            (
                None,
                Request::Write {
                    sequence,
                    range,
                    content,
                },
            ) => store.write(
                device,
                token,
                slot,
                position(*sequence),
                *range,
                blocks(content),
            ),
            (
                None,
                Request::Copy {
                    range,
                    steps,
                    content,
                    ..
                },
            ) => store.copy(device, token, slot, *range, steps, blocks(content)),
            (
                None,
                Request::Equalise {
                    range,
                    positions,
                    content,
                    ..
                },
            ) => store.equalise(device, token, slot, *range, positions, blocks(content)),
            (
                None,
                Request::Repair {
                    block,
                    position,
                    content,
                    ..
                },
            ) => store.repair(device, token, slot, *block, *position, blocks(content)),
            (None, Request::Read { range, torn, .. }) => {
                store.read(device, token, slot, *range, *torn)
            }
            (None, Request::Compare { extent, .. }) => {
                store.extent_positions(device, token, slot, *extent)
            }
            (None, Request::Digests { from, count, .. }) => {
                store.digests(device, token, slot, *from, *count)
            }
            (None, Request::ListAbove { floor, from, .. }) => {
                // The store ends a list at an extent's border: it may add one extent less a block.
                let limit = POSITIONS_MAX - EXTENT_BLOCKS as usize;
                store.list_above(device, token, slot, *floor, *from, limit)
            }
            (None, _) => Ok(()),
        };
        started.map_err(|error| {
            self.abandon(token);
            refusal_of(error)
        })
    }
}

fn blocks<'a>(content: &Content<BlockData<'a>>) -> ashlar_store::Content<'a> {
    match content {
        Content::Zeros => Content::Zeros,
        Content::Data(data) => Content::Data(Blocks {
            data: data.data,
            crcs: data.crcs,
        }),
    }
}
