//! A member on the real store, over a device in memory that loses what a power cut loses.
//!
//! The in-memory model next to it says what must be durable: each answer of the store is given to the model
//! as a durable step, and after a crash the store must hold what the model holds, or that and a part of what
//! was under way.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ashlar_replica::{
    Answer, BlockSource, Decision, Finished, Promised, decide, promise, refusal_of, submit,
};
use ashlar_replication::configuration::{Ack, MemberState};
use ashlar_replication::message::{
    Content, ReadData, ReadError, Refusal, Reply, Request, TornBlocks,
};
use ashlar_replication::values::{
    BLOCK_BYTES, Block, BlockRange, DeviceId, EXTENT_BLOCKS, Epoch, Position, VolumeId,
};
use ashlar_store::fake::{FakeDevice, FakeIndex, Loss, Order};
use ashlar_store::{
    Blocks, Completion, Existing, FormatOptions, OpenOptions, Outcome, Part, ReplicaSlot,
    ReplicaSpec, Store, Zeroed,
};
use zerocopy::little_endian::U32;

use super::{Payload, Queued, SIZE_BLOCKS, Stored};
use crate::ledger::Violation;
use crate::random::Random;

const VOLUME: VolumeId = VolumeId([1; 16]);
const KEY: [u8; 32] = [2; 32];
/// Room for every extent of the volume and a few more.
const DEVICE_BYTES: u64 = 10 << 20;
const JOURNAL_BYTES: u64 = 3 << 20;
/// Ids from here on are contents that no client wrote: blocks that a crash left as a mix.
pub(crate) const MIXES: u64 = 1 << 63;

/// The bytes of mixes by their id, of all members of a world: an initiator may write one again (B2).
pub(crate) type Mixes = Rc<RefCell<BTreeMap<u64, Vec<u8>>>>;

/// Content ids as the bytes of blocks: each block is its id again and again.
pub(crate) struct Bytes {
    data: Vec<u8>,
    crcs: Vec<U32>,
}

impl Bytes {
    fn of(ids: &[u64], mixes: &Mixes) -> Bytes {
        let mut data = Vec::with_capacity(ids.len() * BLOCK_BYTES);
        for id in ids {
            if *id >= MIXES {
                data.extend_from_slice(&mixes.borrow()[id]);
                continue;
            }
            let word = id.to_le_bytes();
            (0..BLOCK_BYTES / 8).for_each(|_| data.extend_from_slice(&word));
        }
        let crc = |block: &[u8]| U32::new(crc32c::crc32c(block));
        let crcs = data.chunks(BLOCK_BYTES).map(crc).collect();
        Bytes { data, crcs }
    }
}

impl BlockSource for Bytes {
    fn blocks(&self) -> Blocks<'_> {
        Blocks {
            data: &self.data,
            crcs: &self.crcs,
        }
    }
}

/// The id of a block's content.
fn content_id(block: &[u8], mixes: &Mixes) -> u64 {
    let (words, _) = block.as_chunks::<8>();
    let first = words.first().copied().unwrap_or_default();
    if words.iter().all(|word| *word == first) {
        return u64::from_le_bytes(first);
    }
    // FNV-1a: the same bytes have the same id on every member.
    let hash = block.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let id = MIXES | hash;
    mixes
        .borrow_mut()
        .entry(id)
        .or_insert_with(|| block.to_vec());
    id
}

/// What the store has finished: the request, and the answer to it.
pub(crate) struct Done {
    pub(crate) queued: Queued,
    pub(crate) reply: Reply<Payload>,
    /// It changed the member, durably.
    pub(crate) is_step: bool,
}

pub(crate) struct Disk {
    device: FakeDevice,
    index: FakeIndex,
    options: OpenOptions,
    store: Store,
    slot: ReplicaSlot,
    durable: Position,
    token: u64,
    pending: BTreeMap<u64, (Queued, Answer)>,
    /// Requests that wait for home writes.
    waiting: VecDeque<Queued>,
    done: Vec<Done>,
    /// What the store has failed or a crash has cut short, in order: any part of it may be there.
    unanswered: Vec<Queued>,
    /// What earlier crashes cut short, since which nothing has become durable: a record that was torn then and is
    /// torn again while it is overwritten can be whole by that, where both have sectors in common.
    cut_short: Vec<Vec<Queued>>,
    seen_operations: u64,
    writes_index: bool,
    mixes: Mixes,
    /// Bits that were flipped, by block.
    spoiled: BTreeMap<Block, (u64, u8)>,
}

/// A formatted device. Formatting takes longer than many a schedule, so it is done once.
fn formatted(id: DeviceId, journal: Option<u64>) -> FakeDevice {
    thread_local! {
        static FORMATTED: RefCell<BTreeMap<(DeviceId, bool), FakeDevice>> =
            const { RefCell::new(BTreeMap::new()) };
    }
    let format = || {
        let mut device = FakeDevice::new(DEVICE_BYTES, journal, 0);
        let options = FormatOptions {
            device: id,
            journal_bytes: Some(JOURNAL_BYTES),
            replicas_max: Some(4),
            existing: Existing::Keep,
            zeroed: Zeroed::Yes,
        };
        Store::format(&mut device, options).expect("a blank device is formatted");
        device
    };
    FORMATTED.with_borrow_mut(|formatted| {
        let key = (id, journal.is_some());
        formatted.entry(key).or_insert_with(format).image()
    })
}

impl Disk {
    /// A formatted device with one replica in `state`.
    pub(crate) fn new(random: &mut Random, state: &MemberState, mixes: &Mixes) -> Disk {
        let journal = random.one_in(4).then_some(JOURNAL_BYTES + (1 << 20));
        let mut device = formatted(state.id.device, journal).reseeded(random.next());
        device.set_order(Order::Random);
        let options = OpenOptions {
            dirty_bytes_max: 64 << random.between(10, 13),
            headers_max: 16,
            journaled_bytes_max: 4096 << random.below(5),
        };
        let index = FakeIndex::new();
        let mut store =
            Store::open(&mut device, Box::new(index.clone()), options).expect("a new store opens");
        let spec = ReplicaSpec {
            volume: VOLUME,
            state: state.clone(),
            size_blocks: SIZE_BLOCKS,
            key: KEY,
            ack: Ack::Majority,
        };
        let slot = store
            .create_replica(&mut device, 0, spec)
            .expect("there is room for a replica");
        let mut disk = Disk {
            device,
            index,
            options,
            store,
            slot,
            durable: state.last,
            token: 0,
            pending: BTreeMap::new(),
            waiting: VecDeque::new(),
            done: Vec::new(),
            unanswered: Vec::new(),
            cut_short: Vec::new(),
            seen_operations: 0,
            writes_index: false,
            mixes: mixes.clone(),
            spoiled: BTreeMap::new(),
        };
        disk.drive();
        while disk.store.next_completion().is_some() {}
        disk
    }

    /// Whether the device was closed after a failed write or sync.
    pub(crate) fn is_closed(&self) -> bool {
        self.store.is_closed()
    }

    /// The promised epoch, as far as it was submitted.
    pub(crate) fn promised(&self) -> Epoch {
        let replica = self.store.replica(self.slot);
        replica.map_or(Epoch::default(), |r| r.state.promised)
    }

    /// The `nth` device operation from now on fails.
    pub(crate) fn fail_at(&mut self, nth: u64) {
        self.device.fail_at(nth);
    }

    /// Brings everything home. Rot of a block whose write in place the journal still announces looks like a write that
    /// was cut short.
    pub(crate) fn settle(&mut self) {
        for _ in 0..8 {
            self.store.start_home_write(&mut self.device);
            self.drive();
            self.index.advance();
        }
    }

    /// Flips a bit of a block's only copy on the device; false when it lies elsewhere too.
    pub(crate) fn spoil(&mut self, block: Block, random: &mut Random) -> bool {
        let place = self.store.place_of(self.slot, block);
        let Some(place) = place.filter(|_| self.store.is_settled()) else {
            return false;
        };
        if self.spoiled.contains_key(&block) {
            return false;
        }
        let byte = place + random.below(BLOCK_BYTES as u64);
        let mask = 1 << random.below(8);
        self.device.flip(Part::Blocks, byte, mask);
        self.spoiled.insert(block, (byte, mask));
        true
    }

    /// Flips the bits back of those blocks that are still `bad`.
    pub(crate) fn heal(&mut self, bad: impl Fn(Block) -> bool) {
        for (block, (byte, mask)) in std::mem::take(&mut self.spoiled) {
            if bad(block) {
                self.device.flip(Part::Blocks, byte, mask);
            }
        }
    }

    /// Nothing fails any more.
    pub(crate) fn mend(&mut self) {
        self.device.fail_at(u64::MAX / 2);
    }

    /// Device operations that were started since this was last asked.
    pub(crate) fn new_operations(&mut self) -> u64 {
        let (reads, writes, syncs) = self.device.started;
        let all = reads + writes + syncs;
        all - std::mem::replace(&mut self.seen_operations, all)
    }

    /// Takes a request. What changes blocks is started by the next [`Disk::turn`] that has room for it.
    pub(crate) fn request(&mut self, queued: Queued) {
        let changes_blocks = matches!(
            queued.request,
            Request::Write { .. }
                | Request::Copy { .. }
                | Request::Equalise { .. }
                | Request::Repair { .. }
        );
        if changes_blocks {
            self.waiting.push_back(queued);
        } else {
            self.start(queued);
        }
    }

    /// One device operation completes.
    pub(crate) fn complete_one(&mut self) {
        if let Some(done) = self.device.complete_one() {
            self.store
                .device_completed(&mut self.device, done.token, done.result, done.buf);
        }
    }

    /// Whether a write to the index is under way that was not told of yet.
    pub(crate) fn begins_index_write(&mut self) -> bool {
        let begins = self.index.is_waiting() && !self.writes_index;
        self.writes_index |= begins;
        begins
    }

    /// A write to the index becomes durable.
    pub(crate) fn advance_index(&mut self) {
        self.writes_index = false;
        self.index.advance();
    }

    /// Starts what can be started, and returns what is finished.
    pub(crate) fn turn(&mut self, writes_home: bool) -> Vec<Done> {
        if writes_home || self.store.home_write_cost().is_some() {
            self.store.start_home_write(&mut self.device);
        }
        loop {
            while (!self.store.is_under_pressure() || self.store.is_closed())
                && let Some(queued) = self.waiting.pop_front()
            {
                self.start(queued);
            }
            self.store.submit(&mut self.device);
            let mut any = false;
            while let Some(Completion { token, outcome }) = self.store.next_completion() {
                any = true;
                if let Some((queued, answer)) = self.pending.remove(&token) {
                    self.finish(queued, answer, outcome);
                }
            }
            if !any {
                return std::mem::take(&mut self.done);
            }
        }
    }

    fn refuse(&mut self, queued: Queued, refusal: Refusal) {
        let reply = match &queued.request {
            Request::Write { sequence, .. } => Reply::WriteRefused {
                sequence: *sequence,
                refusal,
            },
            Request::Read { id, .. } => Reply::Data {
                id: *id,
                result: Err(refusal.into()),
            },
            request => Reply::Refused {
                id: request.id(),
                refusal,
            },
        };
        self.done.push(Done {
            queued,
            reply,
            is_step: false,
        });
    }

    fn start(&mut self, queued: Queued) {
        let Some(replica) = self.store.replica(self.slot) else {
            return self.refuse(queued, Refusal::UnknownReplica);
        };
        let decision = match decide(replica, queued.epoch, &queued.request) {
            Ok(decision) => decision,
            Err(refusal) => return self.refuse(queued, refusal),
        };
        let Decision::Step(step, answer) = decision else {
            let durable = self.durable;
            if durable.epoch == queued.epoch.number && durable.sequence.0 > 0 {
                self.done.push(Done {
                    queued,
                    reply: Reply::Applied {
                        sequence: durable.sequence,
                    },
                    is_step: false,
                });
            }
            return;
        };
        self.token += 1;
        let request = bytes_of(&queued.request, &self.mixes);
        let (store, device) = (&mut self.store, &mut self.device);
        let epoch = queued.epoch;
        match submit(store, device, self.token, self.slot, epoch, &request, step) {
            Ok(()) => drop(self.pending.insert(self.token, (queued, answer))),
            Err(error) => self.refuse(queued, refusal_of(error)),
        }
    }

    fn finish(&mut self, queued: Queued, answer: Answer, outcome: Outcome) {
        let failed = match &outcome {
            Outcome::Done(result) => result.is_err(),
            Outcome::Copied(result) => result.is_err(),
            _ => false,
        };
        if failed && self.store.is_closed() {
            self.unanswered.push(queued.clone());
        }
        let mutates = !matches!(
            answer,
            Answer::Read(_) | Answer::Positions(_) | Answer::Digests(_)
        );
        // A copy of blocks that have all changed is answered at once: it comes before no write and changes nothing.
        let copies_nothing = match (&queued.request, &outcome) {
            (Request::Copy { range, .. }, Outcome::Copied(Ok(changed))) => {
                changed.len() == range.count as usize
            }
            _ => false,
        };
        let mut is_step = mutates && !failed && !copies_nothing;
        if is_step {
            self.cut_short.clear();
        }
        let reply = match answer.finish(&self.store, self.slot, outcome) {
            Finished::Applied(position) => {
                self.durable = self.durable.max(position);
                Reply::Applied {
                    sequence: self.durable.sequence,
                }
            }
            Finished::Resync(id, last) => {
                self.durable = last;
                Reply::Done { id }
            }
            Finished::Reply(reply) | Finished::Refused(reply, _) => {
                reply.map_content(|_| unreachable!("data comes as Finished::Data"))
            }
            Finished::ReadFailed(id, error) => Reply::Data {
                id,
                result: Err(error),
            },
            Finished::Data(id, read) => {
                let content = match &read.buf {
                    Some(buf) => {
                        let id = |block| content_id(block, &self.mixes);
                        Content::Data(buf.chunks(BLOCK_BYTES).map(id).collect())
                    }
                    None => Content::Zeros,
                };
                let positions = read.positions.clone();
                self.store.recycle(&mut self.device, read);
                Reply::Data {
                    id,
                    result: Ok(ReadData { positions, content }),
                }
            }
            Finished::Fence(promised, result) => match self.promised_state(*promised, result) {
                Ok(reply) => reply,
                Err(refusal) => {
                    // Superseded, but durable all the same.
                    is_step = result.is_ok();
                    Reply::Refused {
                        id: queued.request.id(),
                        refusal,
                    }
                }
            },
        };
        self.done.push(Done {
            queued,
            reply,
            is_step,
        });
    }

    fn promised_state(
        &self,
        promised: Promised,
        result: Result<(), Refusal>,
    ) -> Result<Reply<Payload>, Refusal> {
        result?;
        let epoch = promised.state.promised;
        let replica = self.store.replica(self.slot);
        let replica = replica.ok_or(Refusal::UnknownReplica)?;
        let Promised { state, torn } = promise(replica, promised, self.durable)?;
        Ok(Reply::Promised {
            epoch,
            state,
            size_blocks: replica.size_blocks,
            torn,
        })
    }

    /// The power goes, or the process dies; then the store opens again. Returns what was under way, in order, by
    /// crashes since the last durable step, this one first.
    pub(crate) fn crash(&mut self, random: &mut Random) -> Result<Vec<Vec<Queued>>, Violation> {
        let loss = *random.pick(&[Loss::All, Loss::Nothing, Loss::Sectors, Loss::Writes]);
        self.device.crash(loss);
        self.index.crash();
        if random.one_in(12) {
            self.index.delete();
        }
        let mut unanswered = std::mem::take(&mut self.unanswered);
        let pending = std::mem::take(&mut self.pending);
        unanswered.extend(pending.into_values().map(|(queued, _)| queued));
        self.waiting.clear();
        self.done.clear();
        self.store.abandon(&mut self.device);
        self.store = Store::open(&mut self.device, Box::new(self.index.clone()), self.options)
            .map_err(|error| format!("after {loss:?} the store does not open: {error}"))?;
        self.store.check_invariants();
        let found = self.store.lookup(VOLUME);
        self.slot = found.ok_or("the replica is gone after a crash")?;
        self.durable = self.state().last;
        self.seen_operations = 0;
        self.writes_index = false;
        self.device.started = (0, 0, 0);
        self.cut_short.insert(0, unanswered);
        Ok(self.cut_short.clone())
    }

    /// The member's state as it was submitted; durable when nothing is under way.
    pub(crate) fn state(&self) -> MemberState {
        let replica = self.store.replica(self.slot).expect("the replica is there");
        replica.state.clone()
    }

    /// Completes what is under way on the device.
    pub(crate) fn drive(&mut self) {
        loop {
            self.store.submit(&mut self.device);
            let Some(done) = self.device.complete_one() else {
                return;
            };
            self.store
                .device_completed(&mut self.device, done.token, done.result, done.buf);
        }
    }

    /// Every block that has a position. Nothing else may be under way.
    pub(crate) fn blocks(
        &mut self,
        model: &BTreeMap<Block, Stored>,
    ) -> Result<BTreeMap<Block, Stored>, Violation> {
        let replica = self.store.replica(self.slot).expect("the replica is there");
        let torn: Vec<Block> = replica.torn.iter().map(|t| t.block).collect();
        let mut blocks = BTreeMap::new();
        for extent in 0..SIZE_BLOCKS / u64::from(EXTENT_BLOCKS) {
            let extent = ashlar_replication::values::ExtentIndex(extent);
            let positions =
                self.ask(|store, device, slot| store.extent_positions(device, 0, slot, extent))?;
            let Outcome::Positions(Ok(list)) = positions else {
                return Err(format!("positions of {extent:?}: {positions:?}"));
            };
            for entry in list.positions {
                let range = BlockRange {
                    start: entry.block,
                    count: 1,
                };
                let read = self.ask(|store, device, slot| {
                    store.read(device, 0, slot, range, TornBlocks::Serve)
                })?;
                let mut stored = Stored {
                    position: entry.position,
                    content: 0,
                    torn: torn.contains(&entry.block),
                    bad: false,
                };
                match read {
                    Outcome::Read(Ok(read)) => {
                        let mixes = &self.mixes;
                        stored.content = read.buf.as_ref().map_or(0, |buf| content_id(buf, mixes));
                        self.store.recycle(&mut self.device, read);
                    }
                    // Whether it may be bad, and what it should hold, is for the model to say.
                    Outcome::Read(Err(ReadError::Checksum { .. })) => stored.bad = true,
                    other => return Err(format!("{:?} cannot be read: {other:?}", entry.block)),
                }
                if let Some(spoiled) = model.get(&entry.block).filter(|model| model.bad)
                    && spoiled.position == stored.position
                {
                    // The journal may have had a good copy.
                    let content = stored.bad || stored.content == spoiled.content;
                    stored = if content { *spoiled } else { stored };
                }
                blocks.insert(entry.block, stored);
            }
        }
        Ok(blocks)
    }

    fn ask(
        &mut self,
        call: impl FnOnce(
            &mut Store,
            &mut FakeDevice,
            ReplicaSlot,
        ) -> Result<(), ashlar_store::StoreError>,
    ) -> Result<Outcome, Violation> {
        call(&mut self.store, &mut self.device, self.slot).map_err(|error| error.to_string())?;
        self.drive();
        let completion = self.store.next_completion();
        Ok(completion.ok_or("a read does not end")?.outcome)
    }
}

fn bytes_of(request: &Request<Payload>, mixes: &Mixes) -> Request<Bytes> {
    request.clone().map_content(|content| match content {
        Content::Zeros => Content::Zeros,
        Content::Data(ids) => Content::Data(Bytes::of(&ids, mixes)),
    })
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.store.abandon(&mut self.device);
    }
}
