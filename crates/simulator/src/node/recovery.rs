//! What a store may hold after a crash, given what it had answered before.

use std::collections::BTreeMap;

use ashlar_replication::configuration::MemberState;
use ashlar_replication::message::Request;
use ashlar_replication::values::{Block, Position};

use super::{Node, Queued, Stored};
use crate::ledger::{Ledger, Violation};

/// The positions that a request gives to blocks.
fn positions_of(queued: &Queued) -> Vec<(Block, Position)> {
    match &queued.request {
        Request::Write {
            sequence, range, ..
        } => {
            let position = Position {
                epoch: queued.epoch.number,
                sequence: *sequence,
            };
            range.blocks().map(|block| (block, position)).collect()
        }
        Request::Copy { range, steps, .. } => {
            let positions = steps.iter().map(|step| step.position);
            range.blocks().zip(positions).collect()
        }
        Request::Equalise {
            range, positions, ..
        } => range.blocks().zip(positions.iter().copied()).collect(),
        Request::Repair {
            block, position, ..
        } => vec![(*block, *position)],
        _ => Vec::new(),
    }
}

impl Node {
    /// A member that holds the same and nothing else.
    fn model(&self) -> Node {
        let mut model = Node::new(self.state.clone());
        model.blocks = self.blocks.clone();
        model
    }

    /// Takes over what the store holds after a crash: everything that was answered, and some of what was under
    /// way, by crashes since the last durable step.
    pub(crate) fn recovered(
        &mut self,
        cut_short: &[Vec<Queued>],
        state: MemberState,
        blocks: BTreeMap<Block, Stored>,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let mut reason = String::new();
        for under_way in cut_short {
            match self.explain(under_way, &state, &blocks) {
                Ok(kept) => {
                    for queued in kept {
                        self.carry_out(queued);
                        ledger.member_changed(self)?;
                    }
                    self.state = state;
                    self.blocks = blocks;
                    return Ok(());
                }
                Err(why) => reason = why,
            }
        }
        Err(format!(
            "after a crash {:?} does not hold what it had answered: {reason}; answered {:?}; under way {cut_short:?}",
            self.state.id, self.state
        ))
    }

    /// What of the requests under way became durable, so that the store holds this.
    fn explain<'a>(
        &self,
        under_way: &'a [Queued],
        state: &MemberState,
        blocks: &BTreeMap<Block, Stored>,
    ) -> Result<Vec<&'a Queued>, Violation> {
        let mut reason = String::new();
        let all = under_way.len();
        let begins = |queued: &Queued| matches!(queued.request, Request::BeginResync { .. });
        let stream = under_way.iter().rposition(begins);
        for count in 0..=all {
            // Blocks in place that were cut short do not count, and with a write no later one until a resync begins
            // a stream of its own; changes of state are in the journal on their own.
            let cuts = (0..=count)
                .rev()
                .flat_map(|from| (from..=count).rev().map(move |to| from..to));
            for cut in cuts {
                let (mut kept, mut lost) = (Vec::new(), Vec::new());
                for (at, queued) in under_way.iter().enumerate() {
                    // The newest stream may have been cut short as well, where `last` says.
                    let is_after_last = stream.is_some_and(|begin| at > begin)
                        && matches!(&queued.request, Request::Write { sequence, .. }
                            if *sequence > state.last.sequence);
                    let is_cut = cut.contains(&at) || is_after_last;
                    if at >= count || (is_cut && !positions_of(queued).is_empty()) {
                        lost.push(queued);
                    } else {
                        kept.push(queued);
                    }
                }
                let mut model = self.model();
                for queued in &kept {
                    model.carry_out(queued);
                }
                match fits(&model, &lost, state, blocks) {
                    Ok(()) => return Ok(kept),
                    Err(why) => reason = why,
                }
            }
        }
        Err(reason)
    }
}

fn fits(
    model: &Node,
    lost: &[&Queued],
    state: &MemberState,
    blocks: &BTreeMap<Block, Stored>,
) -> Result<(), Violation> {
    // The stream of a resync that had just begun may go back to before a write in place that was cut short.
    let cut_short = lost.iter().any(|queued| match &queued.request {
        Request::Write { sequence, .. } => {
            queued.epoch.number == state.last.epoch && *sequence == state.last.sequence.next()
        }
        _ => false,
    });
    let last = if cut_short && state.last < model.state.last {
        state.last
    } else {
        model.state.last
    };
    let right = MemberState {
        last,
        ..model.state.clone()
    };
    if right != *state {
        return Err(format!("{state:?}, not {:?}", model.state));
    }
    for block in blocks.keys().chain(model.blocks.keys()) {
        let (found, right) = (blocks.get(block), model.blocks.get(block));
        if found == right {
            continue;
        }
        let position = found.map_or(Position::ZERO, |stored| stored.position);
        let is_under_way = lost.iter().any(|queued| {
            let written = positions_of(queued);
            written.contains(&(*block, position))
        });
        if !is_under_way {
            return Err(format!("{block:?} is {found:?}, not {right:?}"));
        }
    }
    Ok(())
}
