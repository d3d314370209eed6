//! What may be there after a crash.

use std::collections::BTreeMap;

use ashlar_replication::configuration::MemberState;
use ashlar_replication::message::{ReadError, TornBlocks};
use ashlar_replication::values::Position;
use ashlar_store::fake::Loss;
use ashlar_store::{OpenError, ReadOutcome};

use super::{IndexLoss, Model, Op, Run, SIZE_BLOCKS, Value, apply_state};
use crate::common::{Data, Rig, block_content, position, range, volume};

impl Run {
    /// Crashes, opens again, and checks what is there. The store that comes out is what is true
    /// from then on.
    pub fn crash(&mut self, loss: Loss, index: IndexLoss) -> Result<(), OpenError> {
        self.take_done();
        self.rig.dev.crash(loss);
        self.rig.index.crash();
        if index == IndexLoss::All {
            self.rig.index.delete();
        }
        let (dev, index) = (self.rig.dev.image(), self.rig.index.image());
        self.rig = Rig::open(dev, index, self.rig.options)?;
        self.reads.clear();
        self.rig.store.check_invariants();
        self.check_recovered();
        Ok(())
    }

    fn check_recovered(&mut self) {
        for (_, mut model) in std::mem::take(&mut self.deletes) {
            // Deleted or not; while it is there it is as it was.
            if let Some(slot) = self.rig.store.lookup(volume(model.number)) {
                assert_eq!(slot, model.slot);
                self.recover_model(&mut model);
                self.models.push(model);
            }
        }
        let mut models = std::mem::take(&mut self.models);
        models.retain_mut(|model| {
            let created = model
                .ops
                .first()
                .is_none_or(|op| op.durable || op.state.is_none());
            let found = self.rig.store.lookup(volume(model.number));
            match found {
                Some(slot) => {
                    assert_eq!(slot, model.slot);
                    self.recover_model(model);
                    true
                }
                None => {
                    let never = !created && model.base.is_empty();
                    assert!(never, "a replica that was made is gone");
                    false
                }
            }
        });
        self.models = models;
    }

    fn recover_model(&mut self, model: &mut Model) {
        let slot = model.slot;
        let replica = self.rig.store.replica(slot).expect("it is there").clone();
        self.check_state(model, &replica.state);
        let last = replica.state.last;
        let mut found = BTreeMap::new();
        for block in 0..SIZE_BLOCKS {
            let (value, holds) = self.read_block(model, block);
            // I3, as far as a member can see it: `last` counts only what the blocks hold.
            for (i, op) in model.history(block) {
                let counted = op.last.is_some_and(|p| p.epoch == last.epoch && p <= last);
                assert!(
                    !counted || holds.is_some_and(|holds| holds >= i),
                    "last {last:?} counts {op:?}, and block {block} holds {holds:?} {value:?}"
                );
            }
            if let Some(value) = value {
                found.insert(block, value);
            }
        }
        model.base = found;
        model.base_state = replica.state.clone();
        model.ops.clear();
        // Positions stay unique: a write that was lost may have left blocks behind.
        model.sequence += 1000;
        self.untear(model);
    }

    /// Reads a block: its value, and up to which operation it holds what was done to it.
    fn read_block(&mut self, model: &Model, block: u64) -> (Option<Value>, Option<usize>) {
        let result = self.rig.read(model.slot, block, 1);
        let torn = &self.rig.store.replica(model.slot).unwrap().torn;
        let listed = torn.iter().find(|t| t.block.0 == block);
        let durable = model
            .history(block)
            .filter(|(_, op)| op.durable)
            .last()
            .map(|(i, _)| i);
        match result {
            Ok(outcome) => {
                assert!(listed.is_none(), "a readable block is listed as torn");
                let newest = model
                    .history(block)
                    .filter(|(_, op)| is_value(&outcome, op.blocks[&block]))
                    .last();
                let Some((i, op)) = newest else {
                    let base = model
                        .base
                        .get(&block)
                        .copied()
                        .unwrap_or((Position::ZERO, 0));
                    let positions = &outcome.positions;
                    assert!(
                        is_value(&outcome, base),
                        "block {block}: {positions:?}, not {base:?}"
                    );
                    assert!(durable.is_none(), "block {block} lost a durable write");
                    return (Some(base), None);
                };
                assert!(durable.is_none_or(|d| i >= d), "block {block} went back");
                (Some(op.blocks[&block]), Some(i))
            }
            Err(ReadError::Torn { position, .. }) => {
                assert_eq!(listed.expect("a torn block is listed").position, position);
                let tore = |op: &Op| op.large && !op.durable && op.blocks[&block].0 == position;
                let found = model.history(block).filter(|(_, op)| tore(op)).last();
                let (i, _) = found.expect("only a large write that was under way tears");
                assert!(durable.is_none_or(|d| i > d));
                // What was there before counts as held: the tear says which write took it.
                (None, i.checked_sub(1))
            }
            Err(error) => {
                let history: Vec<_> = model.history(block).collect();
                panic!("block {block} cannot be read: {error}; history {history:?}")
            }
        }
    }

    /// Torn blocks are written again, as an initiator would.
    fn untear(&mut self, model: &mut Model) {
        let torn = self.rig.store.replica(model.slot).unwrap().torn.clone();
        for block in torn {
            let served = self
                .rig
                .read_with(model.slot, block.block.0, 1, TornBlocks::Serve);
            let outcome = served.expect("a torn block is served on request");
            let crc = crc32c::crc32c(outcome.buf.as_deref().expect("it has content"));
            assert_eq!(outcome.crcs[0], crc);
            self.seed_counter += 1;
            let seed = self.seed_counter;
            let token = self.rig.token();
            let data = Data::of(&[seed]);
            let p = position(0, (1 << 36) + seed);
            let range = range(block.block.0, 1);
            let dev = &mut self.rig.dev;
            self.rig
                .store
                .equalise(dev, token, model.slot, range, &[p], data.content())
                .expect("accepted");
            self.rig.settle();
            self.rig.expect_done(token);
            model.base.insert(block.block.0, (p, seed));
        }
        assert!(self.rig.store.replica(model.slot).unwrap().torn.is_empty());
    }

    fn check_state(&self, model: &Model, found: &MemberState) {
        let mut state = model.base_state.clone();
        let mut allowed = vec![state.clone()];
        for op in &model.ops {
            apply_state(&mut state, op);
            if op.durable {
                allowed.clear();
            }
            allowed.push(state.clone());
        }
        let without_last = |s: &MemberState| MemberState {
            last: Position::ZERO,
            ..s.clone()
        };
        // `last` may stay behind the rest: a large write that was lost holds it back.
        let rest = allowed
            .iter()
            .any(|s| without_last(s) == without_last(found));
        assert!(
            rest,
            "the state is none that was submitted: {found:?}, allowed {allowed:?}"
        );
        let lasts: Vec<Position> = allowed.iter().map(|s| s.last).collect();
        assert!(
            lasts.contains(&found.last),
            "last {:?}, allowed {lasts:?}",
            found.last
        );
    }
}

/// Whether a read of one block returned that value.
fn is_value(outcome: &ReadOutcome, (position, seed): Value) -> bool {
    let content = block_content(seed);
    let same = match &outcome.buf {
        Some(buf) => buf[..] == content[..],
        None => seed == 0,
    };
    same && outcome.positions[0] == position
}
