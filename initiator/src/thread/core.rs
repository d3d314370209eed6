//! The volumes of a thread with their connections: events in, frames and completions out.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ashlar_engine::{Engine, Event};
use ashlar_replication::initiator::{self, Effect, MemberCondition, OverReason};
use ashlar_replication::values::{BLOCK_BYTES, Epoch, Time};
use ashlar_wire::Payload;

use super::ThreadOptions;
use super::table::Table;
use super::timers::Timers;
use crate::byte_io::{BlockRequest, Outcome};
use crate::connection::{ConnectionOptions, Connections, LinkSpec, Notice, NoticeKind, Peer};
use crate::front_end::{ByteRequest, FrontEndId, IoError, Owned, Ticket, VolumeHandle, Volumes};
use crate::metrics::{Operation, ThreadMetrics};
use crate::random;
use crate::spec::{MemberSpec, VolumeSpec};
use crate::volume::{self, End, MemberLink, RequestInFlight, Volume};

/// A request that has ended, for its front end.
pub(super) struct Completion {
    pub(super) front_end: FrontEndId,
    pub(super) volume: VolumeHandle,
    pub(super) ticket: Ticket,
    pub(super) result: Result<Outcome, IoError>,
}

/// What front ends are to be told about a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Announcement {
    Attached(VolumeHandle),
    Resized(VolumeHandle),
    Detached(VolumeHandle),
}

type ReplicationEvent = initiator::Event<Payload>;

/// See the module's documentation.
pub(super) struct Core {
    pub(super) volumes: Table,
    pub(super) connections: Connections,
    pub(super) owners: HashMap<Owned, FrontEndId>,
    pub(super) completions: VecDeque<Completion>,
    pub(super) announcements: VecDeque<Announcement>,
    pub(super) timers: Timers,
    pub(super) metrics: ThreadMetrics,
    /// Of the volume that is being worked on; empty in between.
    effects: VecDeque<Effect<Payload>>,
    pub(super) lease: Duration,
    /// The thread ends once no volume is left.
    pub(super) stopping: bool,
}

impl Core {
    pub(super) fn new(options: &ThreadOptions) -> Core {
        let connections = ConnectionOptions {
            initiator: options.identity,
            lease: options.lease,
        };
        Core {
            volumes: Table::default(),
            connections: Connections::new(connections),
            owners: HashMap::new(),
            completions: VecDeque::new(),
            announcements: VecDeque::new(),
            timers: Timers::default(),
            metrics: ThreadMetrics::default(),
            effects: VecDeque::new(),
            lease: options.lease,
            stopping: false,
        }
    }

    /// Hands an event to a volume's replication and carries out what follows.
    pub(super) fn feed(
        &mut self,
        engine: &mut Engine,
        handle: VolumeHandle,
        event: ReplicationEvent,
    ) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        volume
            .replication
            .handle(engine.now(), event, &mut self.effects);
        self.settle(engine, handle);
    }

    /// Carries out effects and byte requests until nothing follows any more.
    fn settle(&mut self, engine: &mut Engine, handle: VolumeHandle) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        loop {
            while let Some(effect) = self.effects.pop_front() {
                match effect {
                    Effect::Send { member, request } => {
                        if let Some(MemberLink {
                            connection, link, ..
                        }) = volume.link(member)
                        {
                            self.connections.send(engine, connection, link, &request);
                        }
                    }
                    Effect::WriteDone { ticket, result } => {
                        let result = result.map_err(volume::io_error);
                        volume.bytes.write_done(ticket, result, engine);
                    }
                    Effect::ReadDone { ticket, result } => {
                        let result = result.map_err(volume::io_error);
                        volume.bytes.read_done(ticket, result, engine);
                    }
                    Effect::Opened { epoch } => {
                        opened(handle, volume, epoch, &mut self.announcements);
                        answer_waiters(volume, &self.connections);
                        if volume.over.is_some() {
                            leave(engine, volume, &mut self.connections);
                        }
                    }
                    Effect::Over { reason } => {
                        over(volume, reason, &mut self.metrics);
                        answer_waiters(volume, &self.connections);
                        leave(engine, volume, &mut self.connections);
                    }
                    Effect::Reconnect { member } => {
                        if let Some(MemberLink {
                            connection, link, ..
                        }) = volume.link(member)
                        {
                            self.connections.reconnect(engine, connection, link);
                        }
                    }
                    Effect::Connect { member } => {
                        tracing::warn!(volume = %volume.spec.id, device = %member.device,
                            "a configuration names a member that is not among the volume's");
                    }
                    Effect::MembersChanged { removed } => {
                        tracing::info!(volume = %volume.spec.id, ?removed, "the members changed");
                    }
                    Effect::MembersChangeRefused { reason } => {
                        tracing::warn!(volume = %volume.spec.id, %reason, "the members do not change");
                    }
                    Effect::MemberChanged { member, condition } => {
                        if volume.note_condition(member, condition) {
                            tracing::info!(volume = %volume.spec.id, name = volume.spec.name,
                                device = %member.device, ?condition, "a member changed");
                        }
                        if let (Some(link), MemberCondition::Resyncing) =
                            (volume.link(member), condition)
                        {
                            self.connections.member_left(engine, link.connection);
                        }
                    }
                }
            }
            while let Some(request) = volume.bytes.next_block_request() {
                let event = match request {
                    BlockRequest::Write {
                        ticket,
                        range,
                        content,
                    } => initiator::Event::Write {
                        ticket,
                        range,
                        content,
                    },
                    BlockRequest::Read { ticket, range } => {
                        initiator::Event::Read { ticket, range }
                    }
                };
                volume
                    .replication
                    .handle(engine.now(), event, &mut self.effects);
            }
            if self.effects.is_empty() {
                break;
            }
        }
        while let Some((ticket, result)) = volume.bytes.next_completion() {
            let Some(request) = volume.requests.remove(ticket) else {
                continue;
            };
            count(
                volume,
                &mut self.metrics,
                &request,
                result.is_ok(),
                engine.now(),
            );
            let RequestInFlight {
                front_end, ticket, ..
            } = request;
            self.completions.push_back(Completion {
                front_end,
                volume: handle,
                ticket,
                result,
            });
        }
        let next = volume.next_timer();
        self.timers.arm(handle, next, &mut volume.armed);
    }

    /// Begins to attach a volume that is not there yet. False: there are too many.
    pub(super) fn begin(&mut self, engine: &mut Engine, spec: VolumeSpec) -> bool {
        let Some(handle) = self.volumes.next_handle() else {
            return false;
        };
        let members = spec.members.clone();
        self.volumes.insert(handle, Volume::new(spec, self.lease));
        let mut up = Vec::new();
        for member in &members {
            match self.link(handle, member) {
                Some(true) => up.push(member.member.id),
                Some(false) => {}
                None => {
                    self.force_detach(engine, handle);
                    return false;
                }
            }
        }
        let seed = random::number();
        self.feed(engine, handle, initiator::Event::Attach { seed });
        for member in up {
            self.feed(engine, handle, initiator::Event::Up { member });
        }
        true
    }

    /// Puts a member of a volume on the connection to its device; says whether that is up already. None:
    /// there are too many volumes on it.
    pub(super) fn link(&mut self, handle: VolumeHandle, spec: &MemberSpec) -> Option<bool> {
        let volume = self.volumes.get_mut(handle)?;
        let member = spec.member.id;
        let peer = Peer {
            device: member.device,
            address: spec.address.clone(),
        };
        let link = LinkSpec {
            volume: handle,
            volume_id: volume.spec.id,
            member,
            key: volume.spec.key,
        };
        let (connection, link, is_up) = self.connections.insert(peer, link)?;
        volume.links.push(MemberLink {
            member,
            connection,
            link,
            condition: None,
        });
        Some(is_up)
    }

    /// Hands what happened on connections to the volumes.
    pub(super) fn deliver_notices(&mut self, engine: &mut Engine) {
        while let Some(Notice {
            volume,
            member,
            kind,
        }) = self.connections.next_notice()
        {
            let event = match kind {
                NoticeKind::Up => initiator::Event::Up { member },
                NoticeKind::Down => initiator::Event::Down { member },
                NoticeKind::Reply(reply) => initiator::Event::Reply { member, reply },
                NoticeKind::Renewed { sent_at } => initiator::Event::Renewed { member, sent_at },
                NoticeKind::Fenced { promised } => initiator::Event::Fenced { member, promised },
            };
            self.feed(engine, volume, event);
        }
    }

    /// An event of a connection; false if it is not one.
    pub(super) fn socket_event(&mut self, engine: &mut Engine, event: &Event) -> bool {
        let ours = self.connections.socket_event(engine, event);
        if ours {
            // At once, so that a reply is acknowledged before the next socket is looked at.
            self.deliver_notices(engine);
        }
        ours
    }

    /// Does what is due.
    pub(super) fn run_timers(&mut self, engine: &mut Engine) {
        self.connections.timers(engine);
        self.deliver_notices(engine);
        let now = engine.now();
        while let Some((time, handle)) = self.timers.take_due(now) {
            let Some(volume) = self.volumes.get_mut(handle) else {
                continue;
            };
            if volume.armed == time {
                volume.armed = Time::NEVER;
            }
            if volume.detaching.as_ref().is_some_and(|d| d.deadline <= now) {
                self.force_detach(engine, handle);
            } else if volume.next_timer() <= now {
                self.feed(engine, handle, initiator::Event::Timer);
            } else {
                let next = volume.next_timer();
                self.timers.arm(handle, next, &mut volume.armed);
            }
        }
    }

    /// A front end has seen the end of a request.
    pub(super) fn finished(
        &mut self,
        engine: &mut Engine,
        handle: VolumeHandle,
        result: Result<Outcome, IoError>,
    ) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        if let Ok(outcome) = result {
            volume.bytes.recycle(outcome);
        }
        if volume.detaching.is_some() {
            self.continue_detach(engine, handle);
        }
    }

    /// When [`Core::run_timers`] has something to do.
    pub(super) fn next_timer(&self) -> Time {
        self.connections.next_timer().min(self.timers.next())
    }
}

fn opened(
    handle: VolumeHandle,
    volume: &mut Volume,
    epoch: Epoch,
    announcements: &mut VecDeque<Announcement>,
) {
    let (found, wanted) = (volume.replication.size_blocks(), volume.spec.size_blocks());
    if found < wanted {
        let bytes = found * BLOCK_BYTES as u64;
        tracing::warn!(volume = %volume.spec.id, name = volume.spec.name,
            "the replicas have only {bytes} bytes of {}", volume.spec.size_bytes);
        volume.over = Some(End::TooSmall(bytes));
        return;
    }
    tracing::info!(volume = %volume.spec.id, name = volume.spec.name, epoch = epoch.number.0,
        "attached");
    volume.announced = true;
    announcements.push_back(Announcement::Attached(handle));
}

fn over(volume: &mut Volume, reason: OverReason, metrics: &mut ThreadMetrics) {
    if reason == OverReason::Detached {
        tracing::info!(volume = %volume.spec.id, name = volume.spec.name, "detached");
    } else {
        tracing::warn!(volume = %volume.spec.id, name = volume.spec.name, %reason,
            "the attachment is over");
    }
    metrics.fenced += u64::from(matches!(reason, OverReason::Fenced { .. }));
    volume.over.get_or_insert(End::Replication(reason));
}

/// The volume needs its members no more, and no lease.
fn leave(engine: &mut Engine, volume: &mut Volume, connections: &mut Connections) {
    for link in std::mem::take(&mut volume.links) {
        connections.remove(engine, link.connection, link.link);
    }
}

/// Tells those who wait for I/O to open what has become of it.
fn answer_waiters(volume: &mut Volume, connections: &Connections) {
    if volume.waiters.is_empty() {
        return;
    }
    let status = volume::status(volume, |id| connections.trouble(id));
    let outcome = volume.attach_error().map_or(Ok(status), Err);
    for waiter in volume.waiters.drain(..) {
        waiter(Some(outcome.clone()));
    }
}

fn count(
    volume: &mut Volume,
    metrics: &mut ThreadMetrics,
    request: &RequestInFlight,
    good: bool,
    now: Time,
) {
    let counters = &mut volume.counters.operations[request.operation as usize];
    if good {
        counters.completed += 1;
        counters.bytes += request.bytes;
        metrics.latency[request.operation as usize].record(now.since(request.started));
    } else {
        counters.failed += 1;
    }
}

impl Volumes for Core {
    fn submit(
        &mut self,
        engine: &mut Engine,
        front_end: FrontEndId,
        handle: VolumeHandle,
        ticket: Ticket,
        request: ByteRequest<'_>,
    ) -> Result<(), IoError> {
        let volume = self.volumes.get_mut(handle).ok_or(IoError::NotAttached)?;
        if let Some(error) = volume.refusal() {
            return Err(error);
        }
        if !volume.can_accept() {
            return Err(IoError::Busy);
        }
        let (operation, bytes) = Operation::of(&request);
        let started = engine.now();
        let in_flight = RequestInFlight {
            front_end,
            ticket,
            operation,
            bytes,
            started,
        };
        let ticket = volume.requests.insert(in_flight);
        if let Err(error) = volume.bytes.submit(ticket, request, engine) {
            volume.requests.remove(ticket);
            return Err(error);
        }
        self.settle(engine, handle);
        Ok(())
    }

    fn can_accept(&self, volume: VolumeHandle) -> bool {
        // A volume that is gone refuses at once.
        self.volumes.get(volume).is_none_or(Volume::can_accept)
    }

    fn own(&mut self, front_end: FrontEndId, owned: Owned) {
        self.owners.insert(owned, front_end);
    }

    fn disown(&mut self, owned: Owned) {
        self.owners.remove(&owned);
    }
}
