//! From the store back to the sockets: answers to what is durable or read.

use ashlar_replication::message::{Refusal, Reply, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, BlockRange, Epoch, ExtentIndex, Time};
use ashlar_replication::{message::TornBlocks, values::Block};
use ashlar_store::{Completion, Outcome, ReadOutcome, StoreError};
use ashlar_wire::proof::{Subject, VolumeKey};
use ashlar_wire::{Promise, TORN_MAX, encode};

use crate::scheduler::Cost;
use crate::shard::commands::{CommandError, Describe, Waiting};
use crate::shard::connection::Phase;
use crate::shard::core::Core;
use crate::shard::pending::{Answer, Pending};
use crate::shard::requests::refusal_of;

impl Core {
    /// Answers everything that the store has finished.
    pub(super) fn complete(&mut self, now: Time) {
        while let Some(Completion { token, outcome }) = self.store.next_completion() {
            let Some(pending) = self.pending.remove(token) else {
                continue;
            };
            self.scheduler.finished(pending.cost);
            self.admission_end(pending.socket, pending.bytes);
            self.answer(now, pending, outcome);
        }
    }

    fn answer(&mut self, now: Time, pending: Pending, outcome: Outcome) {
        let counters = &mut self.metrics.counters;
        match (&pending.answer, outcome) {
            (Answer::Write(position), Outcome::Done(Ok(()))) => {
                counters.writes += 1;
                counters.write_bytes += pending.bytes;
                self.metrics
                    .write_journal
                    .record(now.since(pending.started));
                // Completions of a replica come in the order of its writes: the last one covers all.
                let position = *position;
                if let Some(slot) = self.slot(pending.slot) {
                    slot.durable = slot.durable.max(position);
                }
                self.owe_applied(pending.slot);
            }
            (Answer::Write(position), Outcome::Done(Err(error))) => {
                counters.refusals += 1;
                let (sequence, refusal) = (position.sequence, refusal_of(error));
                let reply = Reply::<()>::WriteRefused { sequence, refusal };
                self.reply(&pending, &reply);
            }
            (Answer::Done(id), Outcome::Done(Ok(()))) => {
                self.reply(&pending, &Reply::<()>::Done { id: *id });
            }
            (Answer::Resync(id, last), Outcome::Done(Ok(()))) => {
                let (id, last) = (*id, *last);
                if let Some(slot) = self.slot(pending.slot) {
                    slot.durable = slot.durable.max(last);
                }
                self.reply(&pending, &Reply::<()>::Done { id });
            }
            (Answer::Fence(epoch), Outcome::Done(result)) => {
                let epoch = *epoch;
                self.promised(&pending, epoch, result);
            }
            (Answer::Read(id), Outcome::Read(Ok(read))) => {
                counters.reads += 1;
                counters.read_bytes += pending.bytes;
                self.metrics.read_device.record(now.since(pending.started));
                let id = *id;
                self.data(&pending, id, read);
            }
            (Answer::Read(id), Outcome::Read(Err(error))) => {
                counters.read_errors += 1;
                let id = *id;
                if let Some(socket) = pending.socket {
                    let handle = pending.handle;
                    self.outbox
                        .frame(socket, |out| encode::read_failed(out, handle, id, error));
                }
            }
            (Answer::Copy(id), Outcome::Copied(Ok(changed))) => {
                counters.copied_blocks += pending.bytes / BLOCK_BYTES as u64;
                let reply = Reply::<()>::Copied { id: *id, changed };
                self.reply(&pending, &reply);
            }
            (Answer::Positions(id), Outcome::Positions(Ok(list))) => {
                let last = self.store.replica(pending.slot).map(|r| r.state.last);
                let reply = Reply::<()>::Positions {
                    id: *id,
                    positions: list.positions,
                    next: list.next,
                    last: last.unwrap_or_default(),
                };
                self.reply(&pending, &reply);
            }
            (Answer::Digests(id), Outcome::Digests(Ok(digests))) => {
                self.reply(&pending, &Reply::<()>::Digests { id: *id, digests });
            }
            (Answer::Control(_), outcome) => self.control_answer(pending, outcome),
            (
                Answer::Done(id)
                | Answer::Resync(id, _)
                | Answer::Copy(id)
                | Answer::Positions(id)
                | Answer::Digests(id),
                Outcome::Done(Err(error))
                | Outcome::Copied(Err(error))
                | Outcome::Positions(Err(error))
                | Outcome::Digests(Err(error)),
            ) => {
                let id = *id;
                self.refused(&pending, id, refusal_of(error));
            }
            (Answer::Write(_) | Answer::Done(_) | Answer::Resync(..) | Answer::Read(_), _)
            | (Answer::Copy(_) | Answer::Positions(_) | Answer::Digests(_), _)
            | (Answer::Fence(_), _) => unreachable!("the store answers each call with its outcome"),
        }
    }

    fn reply(&mut self, pending: &Pending, reply: &Reply<()>) {
        if let Some(socket) = pending.socket
            && self.connections.contains_key(&socket)
        {
            self.outbox
                .frame(socket, |out| encode::reply(out, pending.handle, reply));
        }
    }

    fn refused(&mut self, pending: &Pending, id: RequestId, refusal: Refusal) {
        self.metrics.counters.refusals += 1;
        self.reply(pending, &Reply::<()>::Refused { id, refusal });
    }

    fn data(&mut self, pending: &Pending, id: RequestId, mut read: ReadOutcome) {
        let handle = pending.handle;
        let socket = pending
            .socket
            .filter(|socket| self.connections.contains_key(socket));
        if let Some(socket) = socket {
            let positions = &read.positions;
            match read.buf.take() {
                Some(buf) => {
                    let crcs = &read.crcs;
                    self.outbox.frame_with_data(socket, buf, |out| {
                        encode::data(out, handle, id, positions, Some(crcs));
                    });
                }
                None => {
                    self.outbox
                        .frame(socket, |out| encode::data(out, handle, id, positions, None));
                }
            }
        }
        self.store.recycle(&mut self.device, read);
    }

    fn promised(&mut self, pending: &Pending, epoch: Epoch, result: Result<(), StoreError>) {
        let Some(socket) = pending.socket else { return };
        let Some(connection) = self.connections.get(&socket) else {
            return;
        };
        let Phase::Open(challenges) = connection.phase else {
            return;
        };
        let handle = pending.handle;
        let replica = self.store.replica(pending.slot);
        let refusal = match (result, replica) {
            (Err(error), _) => Some(refusal_of(error)),
            (_, None) => Some(Refusal::UnknownReplica),
            (_, Some(replica)) if replica.torn.len() > TORN_MAX => Some(Refusal::DeviceClosed),
            (_, Some(replica)) if replica.state.promised != epoch => Some(Refusal::Fenced {
                promised: replica.state.promised.number,
            }),
            _ => None,
        };
        if let Some(refusal) = refusal {
            self.metrics.counters.refusals += 1;
            self.outbox
                .frame(socket, |out| encode::fence_refused(out, handle, refusal));
            return;
        }
        let Some(replica) = replica else { return };
        self.metrics.counters.fences += 1;
        let subject = Subject {
            volume: replica.volume,
            member: replica.state.id,
            epoch,
            handle,
        };
        let mut state = replica.state.clone();
        if state.last.epoch == epoch.number
            && let Some(Some(slot)) = self.slots.get(pending.slot.0 as usize)
        {
            // Of its own writes the initiator is told what is durable, not what is on its way.
            state.last.sequence = state.last.sequence.min(slot.durable_in(epoch));
        }
        let promise = Promise {
            epoch,
            state,
            size_blocks: replica.size_blocks,
            torn: replica.torn.clone(),
        };
        let key = VolumeKey(replica.key);
        self.outbox.frame(socket, |out| {
            encode::promised(out, &key, &challenges, &subject, &promise);
        });
    }

    fn control_answer(&mut self, pending: Pending, outcome: Outcome) {
        let Answer::Control(waiting) = pending.answer else {
            return;
        };
        match (*waiting, outcome) {
            (Waiting::Create(slot, answer), Outcome::Done(result)) => {
                let _ = answer.send(result.map_err(Into::into).and_then(|()| self.info(slot)));
            }
            (Waiting::Grow(slot, answer), Outcome::Done(result)) => {
                let _ = answer.send(result.map_err(Into::into).and_then(|()| self.info(slot)));
            }
            (Waiting::Delete(answer) | Waiting::SetEvicted(answer), Outcome::Done(result)) => {
                let _ = answer.send(result.map_err(Into::into));
            }
            (Waiting::Extents(answer), Outcome::Digests(result)) => {
                let extents =
                    |list: Vec<(ExtentIndex, u64)>| list.into_iter().map(|e| e.0).collect();
                let _ = answer.send(result.map(extents).map_err(Into::into));
            }
            (Waiting::Describe(describe), Outcome::Read(result)) => {
                self.described(describe, result);
            }
            _ => unreachable!("the store answers each call with its outcome"),
        }
    }

    /// A read for [`crate::shard::commands::Command::Describe`] is done: the whole extent, or the next
    /// block once the extent as a whole could not be read.
    fn described(
        &mut self,
        mut describe: Describe,
        result: Result<ReadOutcome, ashlar_replication::message::ReadError>,
    ) {
        let next = match (result, describe.block) {
            (Ok(read), block) => {
                let first = block.unwrap_or(0) as usize;
                for (n, (position, crc)) in read.positions.iter().zip(&read.crcs).enumerate() {
                    describe.found.positions[first + n] = position.pack();
                    describe.found.crcs[first + n] = *crc;
                }
                self.store.recycle(&mut self.device, read);
                block.map(|block| block + 1)
            }
            (Err(_), None) => Some(0),
            (Err(error), Some(block)) => {
                use ashlar_replication::message::ReadError;
                describe.found.bad_blocks.push(block);
                if let ReadError::Checksum { position, .. } | ReadError::Torn { position, .. } =
                    error
                {
                    describe.found.positions[block as usize] = position.pack();
                }
                Some(block + 1)
            }
        };
        match next {
            Some(block) if block < describe.blocks => {
                describe.block = Some(block);
                self.describe_step(describe);
            }
            _ => {
                let _ = describe.answer.send(Ok(describe.found));
            }
        }
    }

    /// Starts the next read of a [`Describe`].
    pub(super) fn describe_step(&mut self, describe: Describe) {
        let slot = describe.slot;
        let first = describe.found.extent.first_block();
        let range = match describe.block {
            None => BlockRange {
                start: first,
                count: describe.blocks,
            },
            Some(block) => BlockRange {
                start: Block(first.0 + u64::from(block)),
                count: 1,
            },
        };
        let answer = Answer::Control(Box::new(Waiting::Describe(describe)));
        let token = self.begin_control(slot, answer);
        let (store, device) = (&mut self.store, &mut self.device);
        if let Err(error) = store.read(device, token, slot, range, TornBlocks::Refuse) {
            self.fail_control(token, error.into());
        }
    }

    /// Keeps a command that waits for the store.
    pub(super) fn begin_control(&mut self, slot: ashlar_store::ReplicaSlot, answer: Answer) -> u64 {
        self.pending.insert(Pending {
            socket: None,
            handle: 0,
            slot,
            cost: Cost(0),
            bytes: 0,
            started: Time(0),
            answer,
        })
    }

    /// The store refused to begin a command.
    pub(super) fn fail_control(&mut self, token: u64, error: CommandError) {
        let Some(Pending {
            answer: Answer::Control(waiting),
            ..
        }) = self.pending.remove(token)
        else {
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
