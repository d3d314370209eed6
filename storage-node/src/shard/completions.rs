//! From the store back to the sockets: answers to what is durable or read.

use ashlar_replication::message::{Refusal, Reply, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, Epoch, ExtentIndex, Time};
use ashlar_store::{Completion, Outcome, ReadOutcome, StoreError};
use ashlar_wire::proof::{Subject, VolumeKey};
use ashlar_wire::{Promise, TORN_MAX, encode};

use crate::shard::commands::Waiting;
use crate::shard::connection::{Asker, Phase};
use crate::shard::core::Core;
use crate::shard::pending::{Answer, Pending};
use crate::shard::requests::refusal_of;

impl Core {
    /// Answers everything that the store has finished; false when that was nothing.
    pub(super) fn complete(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some(Completion { token, outcome }) = self.store.next_completion() {
            let Some(pending) = self.pending.remove(token) else {
                continue;
            };
            self.scheduler.finished(pending.cost);
            if let Some(asker) = &pending.asker {
                self.admission_end(asker.socket, pending.bytes);
            }
            self.answer(now, pending, outcome);
            any = true;
        }
        any
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
                let (sequence, refusal) = (position.sequence, refusal_of(error));
                let reply = Reply::<()>::WriteRefused { sequence, refusal };
                self.count_refusal(refusal);
                self.reply(&pending, &reply);
            }
            (Answer::Done(id), Outcome::Done(Ok(()))) => {
                self.reply(&pending, &Reply::<()>::Done { id: *id });
            }
            (Answer::Resync(id, last), Outcome::Done(Ok(()))) => {
                let (id, last) = (*id, *last);
                // Also back: what was durable before belongs to another pass.
                if let Some(slot) = self.slot(pending.slot) {
                    slot.durable = last;
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
                if let Some(Asker { socket, handle, .. }) = self.asker(&pending) {
                    self.outbox
                        .frame(socket, |out| encode::read_failed(out, handle, id, error));
                }
            }
            (Answer::Copy(id), Outcome::Copied(Ok(changed))) => {
                counters.copied_blocks += pending.bytes / BLOCK_BYTES as u64;
                let reply = Reply::<()>::Copied { id: *id, changed };
                self.reply(&pending, &reply);
            }
            (Answer::Equalise(id), Outcome::Done(Ok(()))) => {
                counters.equalised_blocks += pending.bytes / BLOCK_BYTES as u64;
                self.reply(&pending, &Reply::<()>::Done { id: *id });
            }
            (Answer::Repair(id), Outcome::Done(Ok(()))) => {
                counters.repaired_blocks += 1;
                self.reply(&pending, &Reply::<()>::Done { id: *id });
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
            (Answer::Control(_), outcome) => self.control_answer(now, pending, outcome),
            (
                Answer::Done(id)
                | Answer::Resync(id, _)
                | Answer::Copy(id)
                | Answer::Equalise(id)
                | Answer::Repair(id)
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
            | (Answer::Copy(_) | Answer::Equalise(_) | Answer::Repair(_), _)
            | (Answer::Positions(_) | Answer::Digests(_) | Answer::Fence(_), _) => {
                unreachable!("the store answers each call with its outcome")
            }
        }
    }

    /// Who asked, if an answer would still find the attachment.
    fn asker(&self, pending: &Pending) -> Option<Asker> {
        pending.asker.filter(|asker| self.is_attached(asker))
    }

    fn reply(&mut self, pending: &Pending, reply: &Reply<()>) {
        if let Some(Asker { socket, handle, .. }) = self.asker(pending) {
            self.outbox
                .frame(socket, |out| encode::reply(out, handle, reply));
        }
    }

    fn refused(&mut self, pending: &Pending, id: RequestId, refusal: Refusal) {
        self.count_refusal(refusal);
        self.reply(pending, &Reply::<()>::Refused { id, refusal });
    }

    fn data(&mut self, pending: &Pending, id: RequestId, mut read: ReadOutcome) {
        if let Some(Asker { socket, handle, .. }) = self.asker(pending) {
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
        let Some(Asker { socket, handle, .. }) = pending.asker else {
            return;
        };
        let Some(connection) = self.connections.get(&socket) else {
            return;
        };
        let Phase::Open(challenges) = connection.phase else {
            return;
        };
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
            self.count_refusal(refusal);
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

    fn control_answer(&mut self, now: Time, pending: Pending, outcome: Outcome) {
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
                self.described(now, describe, result);
            }
            _ => unreachable!("the store answers each call with its outcome"),
        }
    }
}
