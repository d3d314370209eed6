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

    /// Takes over what the store holds after a crash: everything that was answered, and of what was under
    /// way a part from its front; blocks that were written in place may be further.
    pub(crate) fn recovered(
        &mut self,
        under_way: &[Queued],
        state: MemberState,
        blocks: BTreeMap<Block, Stored>,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let mut model = self.model();
        let mut reason = String::new();
        for count in 0..=under_way.len() {
            if count > 0 {
                model.carry_out(&under_way[count - 1]);
            }
            match fits(&model, &under_way[count..], &state, &blocks) {
                Ok(()) => {
                    for queued in &under_way[..count] {
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
            "after a crash {:?} does not hold what it had answered: {reason}; under way {under_way:?}",
            self.state.id
        ))
    }
}

fn fits(
    model: &Node,
    rest: &[Queued],
    state: &MemberState,
    blocks: &BTreeMap<Block, Stored>,
) -> Result<(), Violation> {
    if model.state != *state {
        return Err(format!("{state:?}, not {:?}", model.state));
    }
    for block in blocks.keys().chain(model.blocks.keys()) {
        let (found, right) = (blocks.get(block), model.blocks.get(block));
        if found == right {
            continue;
        }
        let position = found.map_or(Position::ZERO, |stored| stored.position);
        let is_under_way = rest.iter().any(|queued| {
            let written = positions_of(queued);
            written.contains(&(*block, position))
        });
        if !is_under_way {
            return Err(format!("{block:?} is {found:?}, not {right:?}"));
        }
    }
    Ok(())
}
