//! Frames that are about the connection: handshake, fencing, renewals, and everything malformed.

use ashlar_engine::SocketId;
use ashlar_replica::{Answer, Attachment, Promised, refusal_of};
use ashlar_replication::member;
use ashlar_replication::message::{Refusal, RequestId};
use ashlar_replication::values::{Sequence, Time};
use ashlar_wire::proof::{Challenges, VolumeKey, verify_fence};
use ashlar_wire::{
    BadFrame, Fence, Frame, GoodbyeCode, Hello, Kind, VERSION, Welcome, WireError, encode,
};

use crate::scheduler::Cost;
use crate::shard::connection::{Asker, HANDLES_MAX, Phase};
use crate::shard::core::Core;

impl Core {
    /// Handles a frame. The frame lies in the engine's receive buffer until this returns.
    pub(super) fn frame(&mut self, now: Time, socket: SocketId, frame: Frame<'_>) {
        let Some(connection) = self.connections.get_mut(&socket) else {
            return;
        };
        match (connection.phase, frame) {
            (Phase::Closing, _) => {}
            (Phase::Open(_), Frame::Request { handle, request }) => {
                self.request(now, socket, handle, request);
            }
            (Phase::Open(_), Frame::Renew { echo }) => {
                connection.renewed_at = Some(now);
                self.outbox.frame(socket, |out| encode::renewed(out, echo));
            }
            (Phase::Greeting, Frame::Hello(hello)) => self.hello(socket, &hello),
            (Phase::Open(challenges), Frame::Fence(fence)) => {
                self.fence(now, socket, &challenges, &fence);
            }
            (Phase::Open(_), Frame::Release { handle }) => self.release(socket, handle),
            (_, Frame::Goodbye { .. }) => self.hang_up(socket),
            _ => {
                self.metrics.counters.misplaced_frames += 1;
                let text = "a frame that has no place here";
                self.goodbye(socket, GoodbyeCode::Protocol, text);
            }
        }
    }

    /// The start of the next frame is not known any more.
    pub(super) fn framing_lost(&mut self, socket: SocketId, error: WireError) {
        let counters = &mut self.metrics.counters;
        match error {
            WireError::Magic => counters.wrong_magic += 1,
            WireError::HeaderChecksum | WireError::BodyChecksum => {
                counters.frame_checksum_errors += 1;
            }
            WireError::Limit { .. } => counters.oversized_frames += 1,
            WireError::Kind(_) => counters.unknown_kinds += 1,
            WireError::Body { .. } => counters.malformed_frames += 1,
        }
        self.goodbye(socket, GoodbyeCode::Protocol, &error.to_string());
    }

    /// A whole frame whose content is wrong: a request is refused by its number.
    pub(super) fn bad_frame(&mut self, socket: SocketId, bad: BadFrame) {
        self.metrics.counters.malformed_frames += 1;
        let open = self
            .connections
            .get(&socket)
            .is_some_and(|c| matches!(c.phase, Phase::Open(_)));
        let is_request = (Kind::Write as u16..Kind::Refused as u16).contains(&(bad.kind as u16));
        if !open || !is_request {
            self.goodbye(socket, GoodbyeCode::Protocol, &bad.error.to_string());
            return;
        }
        let (handle, refusal) = (bad.handle, Refusal::BadRequest);
        match bad.kind {
            // A number that is no sequence is given back as the request's id.
            Kind::Write if bad.request <= Sequence::MAX.0 => {
                self.refuse_write(socket, handle, Sequence(bad.request), refusal);
            }
            Kind::Read => self.refuse_read(socket, handle, RequestId(bad.request), refusal),
            _ => self.refuse(socket, handle, RequestId(bad.request), refusal),
        }
    }

    fn hello(&mut self, socket: SocketId, hello: &Hello) {
        if hello.version_min > VERSION || hello.version_max < VERSION {
            self.metrics.counters.version_mismatches += 1;
            let text = format!(
                "this node speaks version {VERSION}, the initiator {} to {}",
                hello.version_min, hello.version_max
            );
            self.goodbye(socket, GoodbyeCode::Version, &text);
            return;
        }
        let mut nonce = [0; 16];
        if getrandom::fill(&mut nonce).is_err() {
            // Without a fresh challenge a recorded proof could be used again.
            let text = "the system has no random numbers";
            self.goodbye(socket, GoodbyeCode::ShuttingDown, text);
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
        if let Err(refusal) = self.try_fence(now, socket, challenges, fence) {
            self.count_refusal(refusal);
            let handle = fence.subject.handle;
            self.outbox
                .frame(socket, |out| encode::fence_refused(out, handle, refusal));
        }
    }

    fn try_fence(
        &mut self,
        now: Time,
        socket: SocketId,
        challenges: &Challenges,
        fence: &Fence,
    ) -> Result<(), Refusal> {
        let subject = &fence.subject;
        let slot = self.store.lookup(subject.volume);
        let slot = slot.ok_or(Refusal::UnknownReplica)?;
        let replica = self.store.replica(slot).ok_or(Refusal::UnknownReplica)?;
        if !verify_fence(&VolumeKey(replica.key), challenges, subject, &fence.proof) {
            self.metrics.counters.unauthenticated_fences += 1;
            return Err(Refusal::Unauthenticated);
        }
        let Some(connection) = self.connections.get_mut(&socket) else {
            return Ok(());
        };
        connection.proven = true;
        if replica.state.id != subject.member {
            return Err(Refusal::UnknownReplica);
        }
        // A handle that means another volume already could make one answer count for the other.
        let other = connection.attachment(subject.handle);
        if subject.handle >= HANDLES_MAX || other.is_some_and(|a| a.volume != subject.volume) {
            return Err(Refusal::BadRequest);
        }
        let state = member::fence(&replica.state, subject.epoch)?;
        let promised = Promised {
            state: state.clone(),
            torn: replica.torn.clone(),
        };
        let attachment = Attachment {
            slot,
            volume: subject.volume,
            nonce: subject.member.nonce,
            epoch: subject.epoch,
        };
        connection.set_attachment(subject.handle, Some(attachment));
        // Whoever attaches is alive: the first renewal may come as late as a good part of a lease.
        connection.renewed_at = Some(now);
        // Counted out when its state is durable, like every other request.
        connection.begin(0);
        let asker = Asker {
            socket,
            handle: subject.handle,
            attachment,
        };
        // L3: before anything else is sent on the old attachment's connection.
        self.supersede(asker);
        let answer = Answer::Fence(Box::new(promised));
        let token = self.begin(now, asker, Cost::default(), 0, answer);
        // Written also when nothing changes: an equal promise may still be on its way to the device.
        let submitted = self.store.set_state(&mut self.device, token, slot, state);
        submitted.map_err(|error| {
            self.pending.remove(token);
            self.admission_end(socket, 0);
            refusal_of(error)
        })
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
                .is_some_and(|a| (a.socket, a.handle) == (socket, handle))
        {
            state.attached = None;
        }
    }
}
