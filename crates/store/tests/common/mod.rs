//! A store on a fake device, and a plain map that says what it must hold.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod model;

use std::collections::BTreeMap;

use ashlar_replication::configuration::{Ack, MemberState, ReplicaState, Role};
use ashlar_replication::message::{Content as ContentOf, CopyStep, ReadError, TornBlocks};
use ashlar_replication::values::{
    Block, BlockRange, DeviceId, Epoch, EpochNumber, ExtentIndex, MemberId, Pass, Position,
    Sequence, VolumeId,
};
use ashlar_store::fake::{FakeDevice, FakeIndex};
use ashlar_store::{
    Blocks, Completion, Content, Existing, FormatOptions, OpenError, OpenOptions, Outcome,
    PositionList, ReadOutcome, ReplicaSlot, ReplicaSpec, Store, StoreError, Zeroed,
};
use zerocopy::little_endian::U32;

pub const DEVICE: DeviceId = DeviceId([7; 16]);
pub const MIB: u64 = 1 << 20;

pub fn position(epoch: u32, sequence: u64) -> Position {
    Position {
        epoch: EpochNumber(epoch),
        sequence: Sequence(sequence),
    }
}

pub fn range(start: u64, count: u32) -> BlockRange {
    BlockRange {
        start: Block(start),
        count,
    }
}

pub fn volume(number: u8) -> VolumeId {
    VolumeId([number; 16])
}

pub fn state(nonce: u64) -> MemberState {
    MemberState {
        id: MemberId {
            device: DEVICE,
            nonce,
        },
        role: Role::Data,
        promised: Epoch::default(),
        configuration: None,
        state: ReplicaState::Complete,
        last_pass: (EpochNumber(0), Pass(0)),
        last: Position::ZERO,
    }
}

pub fn spec(number: u8, nonce: u64, size_blocks: u64) -> ReplicaSpec {
    ReplicaSpec {
        volume: volume(number),
        state: state(nonce),
        size_blocks,
        key: [number; 32],
        ack: Ack::Majority,
    }
}

/// Content of a block that tells where it comes from; 0 is a block of zeros.
pub fn block_content(seed: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(4096);
    let mut value = seed;
    for _ in 0..512 {
        out.extend_from_slice(&value.to_le_bytes());
        value = if seed == 0 {
            0
        } else {
            value.wrapping_mul(0x5851_f42d_4c95_7f2d) + 1
        };
    }
    out
}

/// Owned content with its checksums.
pub struct Data {
    pub data: Vec<u8>,
    pub crcs: Vec<U32>,
}

impl Data {
    pub fn of(seeds: &[u64]) -> Data {
        let data: Vec<u8> = seeds.iter().flat_map(|seed| block_content(*seed)).collect();
        let crcs = data
            .chunks(4096)
            .map(|b| U32::new(crc32c::crc32c(b)))
            .collect();
        Data { data, crcs }
    }

    pub fn content(&self) -> Content<'_> {
        ContentOf::Data(Blocks {
            data: &self.data,
            crcs: &self.crcs,
        })
    }
}

pub fn format_options() -> FormatOptions {
    FormatOptions {
        device: DEVICE,
        journal_bytes: Some(3 * MIB),
        replicas_max: Some(16),
        existing: Existing::Keep,
        zeroed: Zeroed::Yes,
    }
}

/// Small limits, so that eviction and pressure happen.
pub fn open_options() -> OpenOptions {
    OpenOptions {
        dirty_bytes_max: 1 << 20,
        headers_max: 16,
        journaled_bytes_max: 64 << 10,
    }
}

pub struct Rig {
    pub dev: FakeDevice,
    pub index: FakeIndex,
    pub store: Store,
    pub options: OpenOptions,
    pub done: BTreeMap<u64, Outcome>,
    next_token: u64,
}

impl Rig {
    pub fn new(size_bytes: u64) -> Rig {
        Rig::on(FakeDevice::new(size_bytes, None, 1), open_options())
    }

    pub fn on(mut dev: FakeDevice, options: OpenOptions) -> Rig {
        Store::format(&mut dev, format_options()).expect("a blank device is formatted");
        Rig::open(dev, FakeIndex::new(), options).expect("a new store opens")
    }

    pub fn open(
        mut dev: FakeDevice,
        index: FakeIndex,
        options: OpenOptions,
    ) -> Result<Rig, OpenError> {
        let store = Store::open(&mut dev, Box::new(index.clone()), options)?;
        Ok(Rig {
            dev,
            index,
            store,
            options,
            done: BTreeMap::new(),
            next_token: 1,
        })
    }

    pub fn reopen(self) -> Rig {
        let options = self.options;
        Rig::open(self.dev, self.index, options).expect("the store opens again")
    }

    pub fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token - 1
    }

    pub fn collect(&mut self) {
        while let Some(Completion { token, outcome }) = self.store.next_completion() {
            assert!(
                self.done.insert(token, outcome).is_none(),
                "token {token} is reported twice"
            );
        }
    }

    /// One device operation; false when there is none.
    pub fn step(&mut self) -> bool {
        self.store.submit(&mut self.dev);
        let Some(completed) = self.dev.complete_one() else {
            self.collect();
            return false;
        };
        self.store.device_completed(
            &mut self.dev,
            completed.token,
            completed.result,
            completed.buf,
        );
        self.collect();
        true
    }

    /// Until nothing is under way.
    pub fn settle(&mut self) {
        loop {
            while self.step() {}
            if !self.index.advance() {
                self.store.submit(&mut self.dev);
                if !self.dev.is_busy() || self.dev.is_stopped() {
                    break;
                }
            }
        }
        self.collect();
    }

    /// Until everything is at home and the tail has moved.
    pub fn flush(&mut self) {
        self.settle();
        for _ in 0..200 {
            if !self.store.has_dirty() {
                break;
            }
            self.store.start_home_write(&mut self.dev);
            self.settle();
        }
        assert!(!self.store.has_dirty(), "home writes come to an end");
    }

    pub fn create(&mut self, number: u8, size_blocks: u64) -> ReplicaSlot {
        let token = self.token();
        let spec = spec(number, u64::from(number), size_blocks);
        let slot = self
            .store
            .create_replica(&mut self.dev, token, spec)
            .expect("room for it");
        self.settle();
        self.expect_done(token);
        slot
    }

    pub fn expect_done(&mut self, token: u64) {
        match self.done.remove(&token) {
            Some(Outcome::Done(Ok(()))) => {}
            other => panic!("expected done, found {other:?}"),
        }
    }

    pub fn done(&mut self, token: u64) -> Result<(), StoreError> {
        match self.done.remove(&token) {
            Some(Outcome::Done(result)) => result,
            other => panic!("expected done, found {other:?}"),
        }
    }

    pub fn write(&mut self, slot: ReplicaSlot, p: Position, start: u64, seeds: &[u64]) {
        let token = self.token();
        let data = Data::of(seeds);
        let range = range(start, seeds.len() as u32);
        self.store
            .write(&mut self.dev, token, slot, p, range, data.content())
            .expect("the write is accepted");
        self.settle();
        self.expect_done(token);
    }

    pub fn zero(&mut self, slot: ReplicaSlot, p: Position, start: u64, count: u32) {
        let token = self.token();
        self.store
            .write(
                &mut self.dev,
                token,
                slot,
                p,
                range(start, count),
                ContentOf::Zeros,
            )
            .expect("the write is accepted");
        self.settle();
        self.expect_done(token);
    }

    pub fn read(
        &mut self,
        slot: ReplicaSlot,
        start: u64,
        count: u32,
    ) -> Result<ReadOutcome, ReadError> {
        self.read_with(slot, start, count, TornBlocks::Refuse)
    }

    pub fn read_with(
        &mut self,
        slot: ReplicaSlot,
        start: u64,
        count: u32,
        torn: TornBlocks,
    ) -> Result<ReadOutcome, ReadError> {
        let token = self.token();
        self.store
            .read(&mut self.dev, token, slot, range(start, count), torn)
            .expect("the read is accepted");
        self.settle();
        match self.done.remove(&token) {
            Some(Outcome::Read(result)) => result,
            other => panic!("expected a read, found {other:?}"),
        }
    }

    pub fn expect_blocks(&mut self, slot: ReplicaSlot, start: u64, expected: &[(Position, u64)]) {
        let outcome = self
            .read(slot, start, expected.len() as u32)
            .expect("the blocks are good");
        for (i, (position, seed)) in expected.iter().enumerate() {
            let content = block_content(*seed);
            assert_eq!(
                outcome.positions[i],
                *position,
                "position of block {}",
                start + i as u64
            );
            assert_eq!(outcome.crcs[i], crc32c::crc32c(&content));
            match &outcome.buf {
                Some(buf) => assert!(buf[i * 4096..(i + 1) * 4096] == content[..]),
                None => assert_eq!(*seed, 0, "block {} reads as zeros", start + i as u64),
            }
        }
    }

    pub fn copy(
        &mut self,
        slot: ReplicaSlot,
        start: u64,
        steps: &[CopyStep],
        content: Content<'_>,
    ) -> Vec<(u64, Position)> {
        let token = self.token();
        let range = range(start, steps.len() as u32);
        self.store
            .copy(&mut self.dev, token, slot, range, steps, content)
            .expect("accepted");
        self.settle();
        match self.done.remove(&token) {
            Some(Outcome::Copied(Ok(changed))) => changed
                .into_iter()
                .map(|c| (c.block.0, c.position))
                .collect(),
            other => panic!("expected a copy, found {other:?}"),
        }
    }

    pub fn positions(&mut self, slot: ReplicaSlot, extent: u64) -> PositionList {
        let token = self.token();
        self.store
            .extent_positions(&mut self.dev, token, slot, ExtentIndex(extent))
            .expect("accepted");
        self.settle();
        self.position_list(token)
    }

    pub fn list_above(&mut self, slot: ReplicaSlot, floor: Position, from: u64) -> PositionList {
        let token = self.token();
        self.store
            .list_above(&mut self.dev, token, slot, floor, Block(from), 100)
            .expect("accepted");
        self.settle();
        self.position_list(token)
    }

    fn position_list(&mut self, token: u64) -> PositionList {
        match self.done.remove(&token) {
            Some(Outcome::Positions(Ok(list))) => list,
            other => panic!("expected positions, found {other:?}"),
        }
    }

    pub fn digests(&mut self, slot: ReplicaSlot, from: u64, count: u32) -> Vec<(u64, u64)> {
        let token = self.token();
        self.store
            .digests(&mut self.dev, token, slot, ExtentIndex(from), count)
            .expect("accepted");
        self.settle();
        match self.done.remove(&token) {
            Some(Outcome::Digests(Ok(list))) => list.into_iter().map(|(e, d)| (e.0, d)).collect(),
            other => panic!("expected digests, found {other:?}"),
        }
    }
}
