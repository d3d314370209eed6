//! What everybody together has promised to clients so far, and the invariants I1–I5 over it.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_replication::configuration::{Configuration, Generation};
use ashlar_replication::message::{Content, ReadData};
use ashlar_replication::values::{
    Block, BlockRange, Epoch, EpochNumber, MemberId, Position, Sequence,
};

use super::node::disk::MIXES;
use super::node::{Node, Payload};

/// An invariant that does not hold: its name, and what was seen.
pub type Violation = String;
type Positions = BTreeMap<Block, Position>;
type Key = (EpochNumber, u64);
type Writes = BTreeMap<Sequence, (BlockRange, Content<Payload>)>;

fn key(epoch: Epoch) -> Key {
    (epoch.number, epoch.nonce)
}

/// An open attachment.
pub(super) struct Attached<'a> {
    pub(super) epoch: Epoch,
    pub(super) committed: &'a Configuration,
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Per block the newest position that was acknowledged, or returned by a read, in any epoch.
    pub(super) acknowledged: Positions,
    writes: BTreeMap<Key, Writes>,
    contents: BTreeMap<(Block, Position), u64>,
    bases: BTreeMap<Key, Positions>,
    opened: Vec<Epoch>,
    stored_by: BTreeMap<(EpochNumber, Generation), (Configuration, BTreeSet<MemberId>)>,
    committed: Option<Configuration>,
    /// Torn writes whose block was given a content anew (B2).
    given_up: BTreeSet<(Block, Position)>,
    torn_contents: BTreeMap<u64, (Block, Position)>,
    /// Every write of a block that was acknowledged.
    all_acknowledged: BTreeSet<(Block, Position)>,
}

impl Ledger {
    pub(super) fn acknowledged_at(&self, block: Block) -> Position {
        self.acknowledged.get(&block).copied().unwrap_or_default()
    }

    /// An initiator sends a write.
    pub(super) fn sent(
        &mut self,
        epoch: Epoch,
        sequence: Sequence,
        range: BlockRange,
        content: &Content<Payload>,
    ) {
        let writes = self.writes.entry(key(epoch)).or_default();
        writes.insert(sequence, (range, content.clone()));
    }

    /// A write is acknowledged; W2 lets that be one of an epoch that is fenced already.
    pub(super) fn acknowledge(
        &mut self,
        epoch: Epoch,
        sequence: Sequence,
    ) -> Result<(), Violation> {
        let write = self.writes.get(&key(epoch)).and_then(|w| w.get(&sequence));
        let Some((range, _)) = write else {
            return Err(format!(
                "{epoch:?} {sequence:?} is acknowledged and was sent to nobody"
            ));
        };
        let position = Position {
            epoch: epoch.number,
            sequence,
        };
        for block in range.blocks() {
            if self.given_up.contains(&(block, position)) {
                return Err(format!(
                    "B2: {block:?} at {position:?} was given up and is acknowledged"
                ));
            }
            for newer in self.opened.iter().filter(|o| o.number > epoch.number) {
                let base = self.bases.get(&key(*newer));
                let held = base
                    .and_then(|b| b.get(&block))
                    .copied()
                    .unwrap_or_default();
                if held < position {
                    return Err(format!(
                        "I1: the base of {newer:?} has {block:?} at {held:?}, {position:?} is acknowledged later"
                    ));
                }
            }
            self.all_acknowledged.insert((block, position));
            let newest = self.acknowledged.entry(block).or_default();
            *newest = position.max(*newest);
        }
        Ok(())
    }

    /// E1 in that epoch.
    pub(super) fn opened(&mut self, epoch: Epoch) -> Result<(), Violation> {
        let Some(base) = self.bases.get(&key(epoch)) else {
            return Err(format!("{epoch:?} opened and nobody started in it"));
        };
        // Its commit may be known late: a newer epoch may be open already, which it cannot know of.
        let older = self
            .acknowledged
            .iter()
            .filter(|(_, p)| p.epoch < epoch.number);
        for (block, position) in older {
            let held = base.get(block).copied().unwrap_or_default();
            if held < *position {
                return Err(format!(
                    "I1: the base of {epoch:?} has {block:?} at {held:?}, not {position:?}"
                ));
            }
        }
        self.opened.push(epoch);
        Ok(())
    }

    /// I2, and the content of a read.
    pub(super) fn read(
        &mut self,
        range: BlockRange,
        at_least: &[Position],
        data: &ReadData<Payload>,
    ) -> Result<(), Violation> {
        for (index, block) in range.blocks().enumerate() {
            let position = data.positions[index];
            if position < at_least[index] {
                let needed = at_least[index];
                return Err(format!(
                    "I2: a read of {block:?} returned {position:?}, {needed:?} was acknowledged before"
                ));
            }
            let content = match &data.content {
                Content::Data(data) => data[index],
                Content::Zeros => 0,
            };
            let right = self.contents.get(&(block, position)).copied().unwrap_or(0);
            if content != right {
                return Err(format!(
                    "a read of {block:?} at {position:?} returned {content}, not {right}"
                ));
            }
            // W3: data once read cannot vanish.
            let newest = self.acknowledged.entry(block).or_default();
            *newest = position.max(*newest);
        }
        Ok(())
    }

    /// Looks at a member after a durable step.
    pub(super) fn member_changed(&mut self, node: &mut Node) -> Result<(), Violation> {
        self.note_contents(node)?;
        for (epoch, start) in core::mem::take(&mut node.started) {
            self.note_base(node, epoch, &start)?;
        }
        if let Some(configuration) = &node.state.configuration {
            let stored = self
                .stored_by
                .entry(configuration.order())
                .or_insert_with(|| (configuration.clone(), BTreeSet::new()));
            if stored.0 != *configuration {
                return Err(format!(
                    "two configurations of one order: {configuration:?} and {:?}",
                    stored.0
                ));
            }
            stored.1.insert(node.state.id);
            let newest = self.committed.as_ref().map(Configuration::order);
            let is_newer = newest.is_none_or(|order| order < configuration.order());
            if is_newer && configuration.is_quorum(|id| stored.1.contains(&id)) {
                self.committed = Some(configuration.clone());
            }
        }
        Ok(())
    }

    /// I5.
    fn note_contents(&mut self, node: &Node) -> Result<(), Violation> {
        for (block, stored) in &node.blocks {
            let place = (*block, stored.position);
            if stored.torn {
                self.torn_contents.insert(stored.content, place);
                continue;
            }
            if stored.content >= MIXES && !self.torn_contents.contains_key(&stored.content) {
                return Err(format!(
                    "{place:?} is a mix of contents on {:?}",
                    node.state.id
                ));
            }
            if let Some(torn) = self.torn_contents.get(&stored.content) {
                self.given_up.insert(*torn);
                if self.all_acknowledged.contains(torn) {
                    return Err(format!("B2: {torn:?} is acknowledged and was given up"));
                }
            }
            let right = *self.contents.entry(place).or_insert(stored.content);
            if stored.content != right {
                return Err(format!(
                    "I5: {place:?} is {} on {:?} and {right} elsewhere",
                    stored.content, node.state.id
                ));
            }
        }
        Ok(())
    }

    /// I3 for the start: all of the start list have the same base.
    fn note_base(
        &mut self,
        node: &Node,
        epoch: Epoch,
        start: &[MemberId],
    ) -> Result<(), Violation> {
        if let Some((block, _)) = node.blocks.iter().find(|(_, s)| s.torn) {
            return Err(format!(
                "B2: {block:?} is torn on {:?} when {epoch:?} starts",
                node.state.id
            ));
        }
        let blocks: Positions = node.blocks.iter().map(|(b, s)| (*b, s.position)).collect();
        let base = self
            .bases
            .entry(key(epoch))
            .or_insert_with(|| blocks.clone());
        if *base != blocks {
            return Err(format!(
                "I3: {:?} of {start:?} starts {epoch:?} with {blocks:?}, not {base:?}",
                node.state.id
            ));
        }
        Ok(())
    }

    /// I3: a member in sync is the base and a prefix of the epoch's writes.
    pub(super) fn check_in_sync(
        &self,
        node: &Node,
        attached: &Attached<'_>,
    ) -> Result<(), Violation> {
        let Attached { epoch, committed } = attached;
        if node.state.promised != *epoch || !committed.in_sync.contains(&node.state.id) {
            return Ok(());
        }
        let mut expected = self.bases.get(&key(*epoch)).cloned().unwrap_or_default();
        let last = node.state.last;
        let mut upto = Sequence(0);
        if last.epoch == epoch.number {
            upto = last.sequence;
            let writes = self.writes.get(&key(*epoch));
            for sequence in 1..=last.sequence.0 {
                let write = writes.and_then(|w| w.get(&Sequence(sequence)));
                let Some((range, _)) = write else {
                    return Err(format!(
                        "{:?} holds write {sequence} that nobody sent",
                        node.state.id
                    ));
                };
                let position = Position {
                    epoch: epoch.number,
                    sequence: Sequence(sequence),
                };
                expected.extend(range.blocks().map(|b| (b, position)));
            }
        }
        for block in node.blocks.keys().chain(expected.keys()) {
            let held = node.position(*block);
            let right = expected.get(block).copied().unwrap_or_default();
            let is_torn = node.blocks.get(block).is_some_and(|s| s.torn);
            // What was under way in a crash is not counted as held; the stream brings it again.
            let may_be_whole = node.disk.is_some();
            let under_way =
                (is_torn || may_be_whole) && held.epoch == epoch.number && held.sequence > upto;
            if held != right && !under_way {
                return Err(format!(
                    "I3: {:?} is in sync in {epoch:?}, last {last:?}, and has {block:?} at {held:?}, not {right:?}",
                    node.state.id
                ));
            }
        }
        Ok(())
    }

    /// I4: over every set of members an attach would find everything that is acknowledged.
    pub(super) fn check_recoverable(&self, nodes: &[Node]) -> Result<(), Violation> {
        let nodes: Vec<&Node> = nodes.iter().filter(|n| !n.gone).collect();
        for set in 1..1_u32 << nodes.len() {
            let members: Vec<&Node> = (0..nodes.len())
                .filter(|n| set & (1 << n) != 0)
                .map(|n| nodes[n])
                .collect();
            let configurations = members
                .iter()
                .filter_map(|n| n.state.configuration.as_ref());
            let Some(best) = configurations.max_by_key(|c| c.order()) else {
                continue;
            };
            self.check_set(&members, best)?;
            self.check_committed_is_reachable(&members, best)?;
        }
        Ok(())
    }

    fn check_set(&self, members: &[&Node], best: &Configuration) -> Result<(), Violation> {
        let has = |id| members.iter().any(|n| n.state.id == id);
        let in_sync = members
            .iter()
            .filter(|n| best.in_sync.contains(&n.state.id));
        let needed = best.recovery_quorum();
        if !best.is_quorum(has) || in_sync.clone().count() < needed {
            return Ok(());
        }
        let complete: Vec<_> = in_sync.filter(|n| n.state.state.is_complete()).collect();
        if complete.len() < needed {
            return Err(format!(
                "I4: too few of {best:?} are complete among {:?}",
                ids(members)
            ));
        }
        let highest = complete.iter().map(|n| n.state.last).max();
        for node in complete.iter().filter(|n| Some(n.state.last) == highest) {
            for (block, position) in &self.acknowledged {
                let held = node.position(*block);
                if held < *position {
                    return Err(format!(
                        "I4: over {:?} the source {:?} has {block:?} at {held:?}, not {position:?}",
                        ids(members),
                        node.state.id
                    ));
                }
            }
        }
        Ok(())
    }

    /// I4, second half: three members only. While they change, an attach needs a majority of both sets.
    fn check_committed_is_reachable(
        &self,
        members: &[&Node],
        best: &Configuration,
    ) -> Result<(), Violation> {
        let Some(committed) = &self.committed else {
            return Ok(());
        };
        let is_joint = !committed.previous.is_empty() || !best.previous.is_empty();
        if committed.members.len() != 3 || is_joint || best.members != committed.members {
            return Ok(());
        }
        let has = |id| members.iter().any(|n| n.state.id == id);
        let complete_of = |c: &Configuration| {
            let complete =
                |n: &&&Node| c.in_sync.contains(&n.state.id) && n.state.state.is_complete();
            members.iter().filter(complete).count()
        };
        if !committed.is_majority(has) || complete_of(committed) < committed.recovery_quorum() {
            return Ok(());
        }
        if best.is_quorum(has) && complete_of(best) >= best.recovery_quorum() {
            return Ok(());
        }
        Err(format!(
            "I4: over {:?} the configuration {best:?} hides {committed:?}",
            ids(members)
        ))
    }
}

fn ids(members: &[&Node]) -> Vec<u64> {
    members.iter().map(|n| n.state.id.nonce).collect()
}
