//! From the store back to the sockets: answers to what is durable or read.

use ashlar_replica::{Answer, Finished, Promised, promise};
use ashlar_replication::message::{Refusal, Reply, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, ExtentIndex, Time};
use ashlar_store::{Completion, Outcome, ReadOutcome};
use ashlar_wire::proof::{Subject, VolumeKey};
use ashlar_wire::{Promise, encode};

use crate::shard::commands::Waiting;
use crate::shard::connection::{Asker, Phase};
use crate::shard::core::Core;
use crate::shard::pending::{Owed, Pending};

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
        let Owed::Member(answer) = &pending.owed else {
            return self.control_answer(now, pending, outcome);
        };
        let finished = answer.clone().finish(&self.store, pending.slot, outcome);
        self.count(now, &pending, &finished);
        match finished {
            Finished::Applied(position) => {
                // Completions of a replica come in the order of its writes: the last one covers all.
                if let Some(slot) = self.slot(pending.slot) {
                    slot.durable = slot.durable.max(position);
                }
                self.owe_applied(pending.slot);
            }
            Finished::Resync(id, last) => {
                // Also back: what was durable before belongs to another pass.
                if let Some(slot) = self.slot(pending.slot) {
                    slot.durable = last;
                }
                self.reply(&pending, &Reply::Done { id });
            }
            Finished::Reply(reply) => self.reply(&pending, &reply),
            Finished::Refused(reply, refusal) => {
                self.count_refusal(refusal);
                self.reply(&pending, &reply);
            }
            Finished::Fence(promised, result) => self.promised(&pending, *promised, result),
            Finished::Data(id, read) => self.data(&pending, id, read),
            Finished::ReadFailed(id, error) => {
                if let Some(Asker { socket, handle, .. }) = self.asker(&pending) {
                    self.outbox
                        .frame(socket, |out| encode::read_failed(out, handle, id, error));
                }
            }
        }
    }

    fn count(&mut self, now: Time, pending: &Pending, finished: &Finished) {
        let Owed::Member(answer) = &pending.owed else {
            return;
        };
        let metrics = &mut self.metrics;
        let (counters, bytes) = (&mut metrics.counters, pending.bytes);
        let blocks = bytes / BLOCK_BYTES as u64;
        match (answer, finished) {
            (Answer::Write(_), Finished::Applied(_)) => {
                counters.writes += 1;
                counters.write_bytes += bytes;
                metrics.write_journal.record(now.since(pending.started));
            }
            (Answer::Read(_), Finished::Data(..)) => {
                counters.reads += 1;
                counters.read_bytes += bytes;
                metrics.read_device.record(now.since(pending.started));
            }
            (Answer::Read(_), _) => counters.read_errors += 1,
            (Answer::Copy(_), Finished::Reply(_)) => counters.copied_blocks += blocks,
            (Answer::Equalise(_), Finished::Reply(_)) => counters.equalised_blocks += blocks,
            (Answer::Repair(_), Finished::Reply(_)) => counters.repaired_blocks += 1,
            _ => {}
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

    fn promised(&mut self, pending: &Pending, promised: Promised, result: Result<(), Refusal>) {
        let epoch = promised.state.promised;
        let Some(Asker { socket, handle, .. }) = pending.asker else {
            return;
        };
        let Some(connection) = self.connections.get(&socket) else {
            return;
        };
        let Phase::Open(challenges) = connection.phase else {
            return;
        };
        let slot = self.slots.get(pending.slot.0 as usize);
        let durable = slot.and_then(|slot| Some(slot.as_ref()?.durable));
        let replica = self.store.replica(pending.slot);
        let promised = result.and_then(|()| {
            let replica = replica.ok_or(Refusal::UnknownReplica)?;
            let promised = promise(replica, promised, durable.unwrap_or_default())?;
            Ok((replica, promised))
        });
        let (replica, promised) = match promised {
            Ok(promised) => promised,
            Err(refusal) => {
                self.count_refusal(refusal);
                self.outbox
                    .frame(socket, |out| encode::fence_refused(out, handle, refusal));
                return;
            }
        };
        self.metrics.counters.fences += 1;
        let subject = Subject {
            volume: replica.volume,
            member: replica.state.id,
            epoch,
            handle,
        };
        let promise = Promise {
            epoch,
            state: promised.state,
            size_blocks: replica.size_blocks,
            torn: promised.torn,
        };
        let key = VolumeKey(replica.key);
        self.outbox.frame(socket, |out| {
            encode::promised(out, &key, &challenges, &subject, &promise);
        });
    }

    fn control_answer(&mut self, now: Time, pending: Pending, outcome: Outcome) {
        let Owed::Control(waiting) = pending.owed else {
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
