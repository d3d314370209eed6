//! B2: blocks of the source that a crash left torn. A copy of exactly that position repairs it; where no
//! member of S has one, what the block holds is given to all of S at position (e, 0), in the same
//! step as A5 and before anything else of the epoch.
//!
//! Why (e, 0) and not a write after opening: the members of S then hold the same block when the epoch starts, so
//! the epoch needs no further write to be whole. A write after opening would leave S unequal if the initiator died
//! first, and nothing would tell the next one (docs/decisions/0007).

use crate::faults::{Fault, is_broken};
use crate::initiator::{Effects, Initiator};
use crate::message::{BlockPosition, ReadData, Request, TornBlocks};
use crate::values::{BlockRange, Position};

use super::equalise::Task;

fn only(torn: BlockPosition) -> BlockRange {
    BlockRange {
        start: torn.block,
        count: 1,
    }
}

impl<P: Clone> Initiator<P> {
    pub(super) fn torn_of(&self, n: usize) -> &[BlockPosition] {
        let answer = self.peers[n].answer.as_ref();
        answer.map(|a| a.torn.as_slice()).unwrap_or_default()
    }

    pub(super) fn repair_torn(&mut self, effects: &mut Effects<P>) {
        let source = self.attach.set[0];
        for torn in self.torn_of(source).to_vec() {
            let whole = |n: &usize| !self.torn_of(*n).iter().any(|t| t.block == torn.block);
            let others = self.attach.set[1..].iter().copied();
            let others: Vec<_> = others.filter(whole).collect();
            self.ask_for_torn(torn, others, effects);
        }
    }

    pub(super) fn ask_for_torn(
        &mut self,
        torn: BlockPosition,
        mut others: Vec<usize>,
        effects: &mut Effects<P>,
    ) {
        let range = only(torn);
        if let Some(n) = others.pop() {
            let task = Task::TornRead { n, torn, others };
            self.task(n, task, effects, |id| Request::Read {
                id,
                range,
                torn: TornBlocks::Refuse,
            });
            return;
        }
        // Nobody has it whole.
        let source = self.attach.set[0];
        let task = Task::TornContent { torn };
        self.task(source, task, effects, |id| Request::Read {
            id,
            range,
            torn: TornBlocks::Serve,
        });
    }

    /// Another member was asked for its copy of a torn block of the source.
    pub(super) fn torn_read(
        &mut self,
        torn: BlockPosition,
        others: Vec<usize>,
        data: Option<ReadData<P>>,
        effects: &mut Effects<P>,
    ) {
        match data {
            Some(data) if data.positions == [torn.position] => {
                let source = self.attach.set[0];
                self.task(source, Task::Write(source), effects, |id| Request::Repair {
                    id,
                    block: torn.block,
                    position: torn.position,
                    content: data.content,
                });
            }
            _ => self.ask_for_torn(torn, others, effects),
        }
    }

    /// The source told what a torn block holds.
    pub(super) fn torn_content(
        &mut self,
        torn: BlockPosition,
        data: Option<ReadData<P>>,
        effects: &mut Effects<P>,
    ) {
        let Some(ReadData { content, .. }) = data else {
            self.attach.failed = true;
            return;
        };
        let position = if is_broken(Fault::KeepTorn) {
            torn.position
        } else {
            Position::start_of(self.epoch.number)
        };
        self.attach.equalise.made_equal(torn.block);
        for n in self.attach.set.clone() {
            let content = content.clone();
            self.task(n, Task::Write(n), effects, |id| Request::Equalise {
                id,
                range: only(torn),
                positions: vec![position],
                content,
            });
        }
    }
}
