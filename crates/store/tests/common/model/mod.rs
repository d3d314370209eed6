//! Random operations on a store, and a plain map that says what may be there afterwards.

mod check;

use std::collections::BTreeMap;

use ashlar_replication::configuration::{MemberState, ReplicaState};
use ashlar_replication::message::{Content as ContentOf, CopyStep, ReadError, Refusal, TornBlocks};
use ashlar_replication::values::{EpochNumber, Pass, Position};
use ashlar_store::fake::{FakeDevice, Order, Random};
use ashlar_store::{Outcome, ReplicaSlot, StoreError};

use super::{Data, Rig, open_options, position, range, spec, state, volume};

const EXTENTS: u64 = 6;
const SIZE_BLOCKS: u64 = EXTENTS * 256 - 100;

/// A block: its position, and the seed of its content (0: zeros).
type Value = (Position, u64);

/// What a mutation does.
#[derive(Clone, Debug)]
struct Op {
    token: u64,
    blocks: BTreeMap<u64, Value>,
    /// `last` afterwards where the mutation is a write.
    last: Option<Position>,
    /// The state afterwards where the mutation sets it; its `last` counts if `sets_last`.
    state: Option<(MemberState, bool)>,
    large: bool,
    durable: bool,
}

/// A replica and everything that was done to it.
pub struct Model {
    number: u8,
    nonce: u64,
    slot: ReplicaSlot,
    /// What was there before the first of `ops`.
    base: BTreeMap<u64, Value>,
    base_state: MemberState,
    ops: Vec<Op>,
    epoch: u32,
    sequence: u64,
}

impl Model {
    fn now(&self, block: u64) -> Value {
        let newest = self.ops.iter().rev().find_map(|op| op.blocks.get(&block));
        newest
            .or(self.base.get(&block))
            .copied()
            .unwrap_or((Position::ZERO, 0))
    }

    /// What was done to a block since `base`, with its place in `ops`.
    fn history(&self, block: u64) -> impl Iterator<Item = (usize, &Op)> {
        self.ops
            .iter()
            .enumerate()
            .filter(move |(_, op)| op.blocks.contains_key(&block))
    }

    fn state(&self) -> MemberState {
        let mut state = self.base_state.clone();
        for op in &self.ops {
            apply_state(&mut state, op);
        }
        state
    }

    /// Forgets history that is durable and can no longer be undone.
    fn compact(&mut self) {
        let durable = self.ops.iter().take_while(|op| op.durable).count();
        for op in self.ops.drain(..durable) {
            apply_state(&mut self.base_state, &op);
            self.base.extend(op.blocks);
        }
    }
}

fn apply_state(state: &mut MemberState, op: &Op) {
    if let Some(last) = op.last {
        state.last = last;
    }
    if let Some((new, sets_last)) = &op.state {
        let last = state.last;
        *state = new.clone();
        if !sets_last {
            state.last = last;
        }
    }
}

pub struct Run {
    pub rig: Rig,
    pub models: Vec<Model>,
    pub random: Random,
    next_number: u8,
    seed_counter: u64,
    /// Deletes under way: token and model.
    deletes: Vec<(u64, Model)>,
    reads: BTreeMap<u64, u32>,
}

impl Run {
    pub fn new(seed: u64, journal_separate: bool) -> Run {
        let journal = journal_separate.then_some(8 << 20);
        let mut dev = FakeDevice::new(20 << 20, journal, seed);
        if seed % 2 == 1 {
            dev.set_order(Order::Random);
        }
        let mut run = Run {
            rig: Rig::on(dev, open_options()),
            models: Vec::new(),
            random: Random(seed),
            next_number: 1,
            seed_counter: 1,
            deletes: Vec::new(),
            reads: BTreeMap::new(),
        };
        run.create();
        run
    }

    fn create(&mut self) {
        let number = self.next_number;
        self.next_number += 1;
        let nonce = u64::from(number) + 1000;
        let token = self.rig.token();
        let spec = spec(number, nonce, SIZE_BLOCKS);
        let Ok(slot) = self
            .rig
            .store
            .create_replica(&mut self.rig.dev, token, spec)
        else {
            return;
        };
        let created = Op {
            token,
            blocks: BTreeMap::new(),
            last: None,
            state: Some((state(nonce), true)),
            large: false,
            durable: false,
        };
        self.models.push(Model {
            number,
            nonce,
            slot,
            base: BTreeMap::new(),
            base_state: state(nonce),
            ops: vec![created],
            epoch: 1,
            sequence: 0,
        });
    }

    fn seeds(&mut self, count: u32) -> Vec<u64> {
        (0..count)
            .map(|_| {
                self.seed_counter += 1;
                self.seed_counter
            })
            .collect()
    }

    fn random_range(&mut self) -> (u64, u32) {
        let extent = self.random.below(EXTENTS);
        let room = (SIZE_BLOCKS - extent * 256).min(256) as u32;
        let count = match self.random.below(10) {
            0..=4 => 1 + self.random.below(4) as u32,
            5..=6 => 1 + self.random.below(16) as u32,
            7..=8 => 17 + self.random.below(100) as u32,
            _ => room,
        }
        .min(room);
        let first = self.random.below(u64::from(room - count) + 1);
        (extent * 256 + first, count)
    }

    /// One random action.
    pub fn act(&mut self) {
        if self.models.is_empty() {
            self.create();
            return;
        }
        let which = self.random.below(self.models.len() as u64) as usize;
        match self.random.below(100) {
            0..=39 => self.write(which),
            40..=44 => self.zero(which),
            45..=51 => self.copy(which),
            52..=57 => self.equalise(which),
            58..=62 => self.change_state(which),
            63..=70 => self.read(which),
            71..=72 if self.models.len() < 3 => self.create(),
            73 if self.models.len() > 1 => self.delete(which),
            74..=78 => self.rig.store.start_home_write(&mut self.rig.dev),
            79..=82 => {
                self.rig.index.advance();
            }
            _ => {
                for _ in 0..=self.random.below(12) {
                    self.rig.step();
                }
            }
        }
        self.take_done();
    }

    /// Takes completions into the models.
    pub fn take_done(&mut self) {
        self.rig.store.check_invariants();
        self.rig.collect();
        for (token, outcome) in std::mem::take(&mut self.rig.done) {
            if let Some(i) = self.deletes.iter().position(|(t, _)| *t == token) {
                assert!(matches!(outcome, Outcome::Done(Ok(()))), "{outcome:?}");
                self.deletes.remove(i);
                continue;
            }
            if let Some(count) = self.reads.remove(&token) {
                Run::check_read(count, outcome);
                continue;
            }
            match outcome {
                Outcome::Done(Ok(())) | Outcome::Copied(Ok(_)) => {}
                other => panic!("token {token} ended with {other:?}"),
            }
            for model in &mut self.models {
                if let Some(op) = model.ops.iter_mut().find(|op| op.token == token) {
                    op.durable = true;
                }
                model.compact();
            }
        }
    }

    fn push(&mut self, which: usize, op: Op) {
        self.models[which].ops.push(op);
    }

    fn write(&mut self, which: usize) {
        let (start, count) = self.random_range();
        let seeds = self.seeds(count);
        self.write_seeds(which, start, &seeds);
    }

    fn zero(&mut self, which: usize) {
        let (start, count) = self.random_range();
        let whole = self.random.below(2) == 0;
        let (start, count) = if whole {
            (start / 256 * 256, 256)
        } else {
            (start, count)
        };
        if start + u64::from(count) <= SIZE_BLOCKS {
            self.write_seeds(which, start, &vec![0; count as usize]);
        }
    }

    /// A write; seeds of 0 throughout are zeros.
    fn write_seeds(&mut self, which: usize, start: u64, seeds: &[u64]) {
        let token = self.rig.token();
        let model = &mut self.models[which];
        let p = position(model.epoch, model.sequence + 1);
        let data = Data::of(seeds);
        let zeros = seeds.iter().all(|s| *s == 0);
        let content = if zeros {
            ContentOf::Zeros
        } else {
            data.content()
        };
        let range = range(start, seeds.len() as u32);
        let result = self
            .rig
            .store
            .write(&mut self.rig.dev, token, model.slot, p, range, content);
        match result {
            Ok(()) => {}
            Err(StoreError::DeviceFull) => return,
            Err(error) => panic!("a write was refused: {error}"),
        }
        model.sequence += 1;
        let blocks = seeds
            .iter()
            .enumerate()
            .map(|(i, seed)| (start + i as u64, (p, *seed)))
            .collect();
        let large = !zeros && seeds.len() > 16;
        self.push(
            which,
            Op {
                token,
                blocks,
                last: Some(p),
                state: None,
                large,
                durable: false,
            },
        );
    }

    fn copy(&mut self, which: usize) {
        let (start, count) = self.random_range();
        let seeds = self.seeds(count);
        let token = self.rig.token();
        let lie = self.random.below(3);
        let model = &mut self.models[which];
        // Of an older epoch, so that a later write never leaves it in place (M4).
        let mut blocks = BTreeMap::new();
        let mut steps = Vec::new();
        for (i, seed) in seeds.iter().enumerate() {
            let block = start + i as u64;
            let now = model.now(block).0;
            let new = position(0, (1 << 30) + seed);
            if lie == 0 && i % 5 == 2 {
                let wrong = position(77, 1);
                steps.push(CopyStep {
                    expected: wrong,
                    position: new,
                });
            } else {
                steps.push(CopyStep {
                    expected: now,
                    position: new,
                });
                blocks.insert(block, (new, *seed));
            }
        }
        let partial = blocks.len() < seeds.len();
        let data = Data::of(&seeds);
        let range = range(start, count);
        let slot = model.slot;
        let dev = &mut self.rig.dev;
        match self
            .rig
            .store
            .copy(dev, token, slot, range, &steps, data.content())
        {
            Ok(()) => {}
            Err(StoreError::DeviceFull) => return,
            Err(error) => panic!("a copy was refused: {error}"),
        }
        let large = !partial && seeds.len() > 16;
        self.push(
            which,
            Op {
                token,
                blocks,
                last: None,
                state: None,
                large,
                durable: false,
            },
        );
        // A copy whose header is cold is decided later: let it be decided now.
        if !self.rig.dev.is_stopped() {
            self.rig.settle();
            if let Some(Outcome::Copied(Err(StoreError::DeviceFull))) = self.rig.done.get(&token) {
                self.rig.done.remove(&token);
                self.models[which].ops.retain(|op| op.token != token);
            }
        }
    }

    fn equalise(&mut self, which: usize) {
        let (start, count) = self.random_range();
        let same = self.random.below(2) == 0;
        let zeros = self.random.below(2) == 0;
        let seeds = if zeros {
            vec![0; count as usize]
        } else {
            self.seeds(count)
        };
        self.seed_counter += 1;
        let one = self.seed_counter;
        let token = self.rig.token();
        let model = &mut self.models[which];
        let positions: Vec<Position> = (0..u64::from(count))
            .map(|i| position(0, (1 << 34) + one * 1024 + if same { 0 } else { i }))
            .collect();
        let data = Data::of(&seeds);
        let content = if zeros {
            ContentOf::Zeros
        } else {
            data.content()
        };
        let range = range(start, count);
        let dev = &mut self.rig.dev;
        match self
            .rig
            .store
            .equalise(dev, token, model.slot, range, &positions, content)
        {
            Ok(()) => {}
            Err(StoreError::DeviceFull) => return,
            Err(error) => panic!("an equalise was refused: {error}"),
        }
        let blocks = (start..).zip(positions.into_iter().zip(seeds)).collect();
        let large = !zeros && count > 16;
        self.push(
            which,
            Op {
                token,
                blocks,
                last: None,
                state: None,
                large,
                durable: false,
            },
        );
    }

    fn change_state(&mut self, which: usize) {
        let token = self.rig.token();
        let kind = self.random.below(3);
        let model = &mut self.models[which];
        let mut new = model.state();
        let mut sets_last = false;
        match kind {
            0 => {
                new.promised.number.0 += 1;
                new.promised.nonce = token;
            }
            1 => {
                new.promised.number.0 += 1;
                model.epoch = new.promised.number.0.max(model.epoch + 1);
                model.sequence = 0;
                new.last = position(model.epoch, 0);
                sets_last = true;
            }
            _ => {
                new.last_pass = (EpochNumber(model.epoch), Pass(token as u32));
                new.state = match new.state {
                    ReplicaState::Complete => ReplicaState::Resyncing {
                        epoch: EpochNumber(model.epoch),
                        pass: Pass(token as u32),
                    },
                    ReplicaState::Resyncing { .. } => ReplicaState::Complete,
                };
            }
        }
        let dev = &mut self.rig.dev;
        self.rig
            .store
            .set_state(dev, token, model.slot, new.clone())
            .expect("accepted");
        let state = Some((new, sets_last));
        let op = Op {
            token,
            blocks: BTreeMap::new(),
            last: None,
            state,
            large: false,
            durable: false,
        };
        self.push(which, op);
    }

    fn read(&mut self, which: usize) {
        let (start, count) = self.random_range();
        let token = self.rig.token();
        let model = &self.models[which];
        let range = range(start, count);
        let torn = TornBlocks::Refuse;
        self.rig
            .store
            .read(&mut self.rig.dev, token, model.slot, range, torn)
            .expect("accepted");
        self.reads.insert(token, count);
    }

    /// A read under load returns something whose checksum is right. Exactly what was submitted last is
    /// checked where nothing is under way, in [`Run::verify`].
    fn check_read(count: u32, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Read(Ok(outcome)) => outcome,
            Outcome::Read(Err(ReadError::Refused(Refusal::UnknownReplica))) => return,
            other => panic!("a read failed: {other:?}"),
        };
        for i in 0..count as usize {
            let content = match &outcome.buf {
                Some(buf) => &buf[i * 4096..(i + 1) * 4096],
                None => &[0; 4096][..],
            };
            assert_eq!(outcome.crcs[i], crc32c::crc32c(content));
        }
    }

    fn delete(&mut self, which: usize) {
        let token = self.rig.token();
        let model = self.models.remove(which);
        self.rig
            .store
            .delete_replica(&mut self.rig.dev, token, model.slot)
            .expect("accepted");
        self.deletes.push((token, model));
    }

    /// Without a crash: everything submitted must be there exactly.
    pub fn verify(&mut self) {
        self.rig.settle();
        self.take_done();
        assert!(self.deletes.is_empty());
        for i in 0..self.models.len() {
            assert!(
                self.models[i].ops.is_empty(),
                "everything is reported as durable"
            );
            let slot = self.models[i].slot;
            assert_eq!(
                self.rig.store.lookup(volume(self.models[i].number)),
                Some(slot)
            );
            assert_eq!(
                self.rig.store.replica(slot).unwrap().state,
                self.models[i].state()
            );
            for extent in 0..EXTENTS {
                let count = (SIZE_BLOCKS - extent * 256).min(256);
                let want: Vec<Value> = (0..count)
                    .map(|b| self.models[i].now(extent * 256 + b))
                    .collect();
                self.rig.expect_blocks(slot, extent * 256, &want);
                let listed = self.rig.positions(slot, extent);
                let want = want.iter().filter(|(p, _)| *p != Position::ZERO).count();
                assert_eq!(listed.positions.len(), want);
            }
        }
    }

    /// Opens again without a crash.
    pub fn reopen(&mut self) {
        self.rig.settle();
        self.take_done();
        let (dev, index) = (self.rig.dev.image(), self.rig.index.image());
        self.rig = Rig::open(dev, index, self.rig.options).expect("it opens again");
        self.rig.dev.set_order(Order::Random);
    }
}

/// What a crash does to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexLoss {
    Nothing,
    All,
}
