//! What other threads ask for: attach, detach, status.

use std::time::Duration;

use ashlar_engine::Engine;
use ashlar_replication::initiator;

use super::core::{Announcement, Completion, Core};
use crate::front_end::{IoError, VolumeHandle};
use crate::handle::{AttachError, Command, Reply};
use crate::spec::{MemberSpec, VolumeSpec};
use crate::status::AttachmentStatus;
use crate::volume::{self, Detaching, Volume};

impl Core {
    /// Carries out a command.
    pub(super) fn command(&mut self, engine: &mut Engine, command: Command) {
        match command {
            Command::Attach(_, reply) if self.stopping => reply(Err(AttachError::Stopped)),
            Command::Attach(spec, reply) => reply(self.attach(engine, *spec)),
            Command::WaitOpen(id, reply) => match self.volumes.by_id(id) {
                None => reply(None),
                Some(handle) => self.wait_open(handle, reply),
            },
            Command::Detach(id, drain, reply) => match self.volumes.by_id(id) {
                None => reply(false),
                Some(handle) => self.detach(engine, handle, drain, Some(reply)),
            },
            Command::List(reply) => reply(self.list()),
            Command::Metrics(reply) => {
                let mut metrics = self.metrics.clone();
                metrics.connections = self.connections.counters();
                (metrics.connections_up, metrics.connections_wanted) = self.connections.count();
                reply(Box::new(metrics));
            }
            Command::Stop(drain) => {
                self.stopping = true;
                for handle in self.volumes.handles() {
                    self.detach(engine, handle, drain, None);
                }
            }
        }
    }

    fn list(&self) -> Vec<AttachmentStatus> {
        let trouble = |id| self.connections.trouble(id);
        self.volumes
            .iter()
            .map(|(_, volume)| volume::status(volume, trouble))
            .collect()
    }

    fn attach(&mut self, engine: &mut Engine, spec: VolumeSpec) -> Result<(), AttachError> {
        spec.check()?;
        let taken = |other: &Volume| other.spec.id != spec.id && other.spec.name == spec.name;
        if self.volumes.iter().any(|(_, other)| taken(other)) {
            return Err(AttachError::NameTaken(spec.name));
        }
        let Some(handle) = self.volumes.by_id(spec.id) else {
            let begun = self.begin(engine, spec);
            return if begun {
                Ok(())
            } else {
                Err(AttachError::TooMany)
            };
        };
        let Some(volume) = self.volumes.get_mut(handle) else {
            return Err(AttachError::Stopped);
        };
        if volume.detaching.is_some() {
            return Err(AttachError::Detaching);
        }
        if volume.over.is_some() {
            // Asking again is the decision that this initiator is the rightful one (C7).
            self.detach(engine, handle, Duration::ZERO, None);
            let begun = self.begin(engine, spec);
            return if begun {
                Ok(())
            } else {
                Err(AttachError::TooMany)
            };
        }
        if !volume.spec.is_same_attachment(&spec) {
            return Err(AttachError::Different);
        }
        let attached = volume.spec.size_bytes;
        if spec.size_bytes < attached {
            return Err(AttachError::Shrinks { attached });
        }
        for member in &spec.members {
            self.move_member(engine, handle, member);
        }
        if spec.size_bytes > attached {
            self.grow(handle, spec.size_bytes);
        }
        Ok(())
    }

    /// Looks for a member at its new address, if that is another one.
    fn move_member(&mut self, engine: &mut Engine, handle: VolumeHandle, moved: &MemberSpec) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        let id = moved.member.id;
        let known = volume.spec.members.iter_mut().find(|m| m.member.id == id);
        let Some(known) = known.filter(|known| known.address != moved.address) else {
            return;
        };
        known.address = moved.address.clone();
        let Some(at) = volume.links.iter().position(|link| link.member == id) else {
            return;
        };
        let old = volume.links.swap_remove(at);
        self.connections.remove(engine, old.connection, old.link);
        self.feed(engine, handle, initiator::Event::Down { member: id });
        // Too many volumes on that connection: the member stays down.
        if self.link(handle, moved) == Some(true) {
            self.feed(engine, handle, initiator::Event::Up { member: id });
        }
    }

    /// The replicas have grown already: the control plane does that first.
    fn grow(&mut self, handle: VolumeHandle, size_bytes: u64) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        volume.spec.size_bytes = size_bytes;
        volume.replication.grow(volume.spec.size_blocks());
        volume.bytes.grow(size_bytes);
        if volume.announced {
            self.announcements.push_back(Announcement::Resized(handle));
        }
    }

    fn wait_open(
        &mut self,
        handle: VolumeHandle,
        reply: Reply<Option<Result<AttachmentStatus, AttachError>>>,
    ) {
        let trouble = |id| self.connections.trouble(id);
        let Some(volume) = self.volumes.get(handle) else {
            return reply(None);
        };
        if let Some(error) = volume.attach_error() {
            reply(Some(Err(error)));
        } else if volume.announced {
            let status = volume::status(volume, trouble);
            reply(Some(Ok(status)));
        } else if let Some(volume) = self.volumes.get_mut(handle) {
            volume.waiters.push(reply);
        }
    }

    /// Takes no more requests; ends the attachment when those under way are finished.
    pub(super) fn detach(
        &mut self,
        engine: &mut Engine,
        handle: VolumeHandle,
        drain: Duration,
        reply: Option<Reply<bool>>,
    ) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        let deadline = engine.now() + drain;
        if let Some(detaching) = &mut volume.detaching {
            detaching.deadline = detaching.deadline.min(deadline);
            detaching.replies.extend(reply);
        } else {
            let replies = reply.into_iter().collect();
            volume.detaching = Some(Detaching { deadline, replies });
            if volume.announced {
                self.announcements.push_back(Announcement::Detached(handle));
            }
            for waiter in volume.waiters.drain(..) {
                waiter(Some(Err(AttachError::Detaching)));
            }
        }
        self.continue_detach(engine, handle);
        if drain.is_zero() {
            self.force_detach(engine, handle);
        }
    }

    /// Goes on with detaches whose requests have finished. Called when completions were delivered.
    pub(super) fn continue_detach(&mut self, engine: &mut Engine, handle: VolumeHandle) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        if volume.detaching.is_none() || volume.requests.len() > 0 {
            let next = volume.next_timer();
            self.timers.arm(handle, next, &mut volume.armed);
            return;
        }
        if volume.over.is_none() {
            self.feed(engine, handle, initiator::Event::Detach);
        }
        if self
            .volumes
            .get(handle)
            .is_some_and(|volume| volume.over.is_some())
        {
            self.remove(engine, handle);
        }
    }

    /// The time of a detach is over: what is under way fails.
    pub(super) fn force_detach(&mut self, engine: &mut Engine, handle: VolumeHandle) {
        let Some(volume) = self.volumes.get_mut(handle) else {
            return;
        };
        for ticket in volume.requests.tickets() {
            let Some(request) = volume.requests.remove(ticket) else {
                continue;
            };
            volume.counters.operations[request.operation as usize].failed += 1;
            self.completions.push_back(Completion {
                front_end: request.front_end,
                volume: handle,
                ticket: request.ticket,
                result: Err(IoError::NotAttached),
            });
        }
        self.remove(engine, handle);
    }

    fn remove(&mut self, engine: &mut Engine, handle: VolumeHandle) {
        let Some(volume) = self.volumes.remove(handle) else {
            return;
        };
        for link in &volume.links {
            self.connections.remove(engine, link.connection, link.link);
        }
        for reply in volume
            .detaching
            .into_iter()
            .flat_map(|detaching| detaching.replies)
        {
            reply(true);
        }
    }
}
