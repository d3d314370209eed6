//! An index whose batches become durable when a test says so.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use crate::index::{Index, IndexBatch, IndexKey, IndexValue, MemoryIndex};

#[derive(Default)]
struct FakeIndexState {
    applied: MemoryIndex,
    waiting: VecDeque<IndexBatch>,
    failed: bool,
}

/// A handle to an index that survives crashes of the store. Batches become durable by
/// [`FakeIndex::advance`].
#[derive(Clone, Default)]
pub struct FakeIndex(Rc<RefCell<FakeIndexState>>);

impl FakeIndex {
    /// An empty index.
    pub fn new() -> FakeIndex {
        FakeIndex::default()
    }

    /// Makes the oldest batch that waits durable; false when none does.
    pub fn advance(&self) -> bool {
        let mut state = self.0.borrow_mut();
        match state.waiting.pop_front() {
            Some(batch) => {
                state.applied.apply(batch);
                true
            }
            None => false,
        }
    }

    /// Whether a batch waits to become durable.
    pub fn is_waiting(&self) -> bool {
        !self.0.borrow().waiting.is_empty()
    }

    /// The power goes: batches that wait are lost.
    pub fn crash(&self) {
        let mut state = self.0.borrow_mut();
        state.waiting.clear();
        state.failed = false;
    }

    /// As if its folder had been deleted.
    pub fn delete(&self) {
        *self.0.borrow_mut() = FakeIndexState::default();
    }

    /// Makes every later use fail.
    pub fn fail(&self) {
        self.0.borrow_mut().failed = true;
    }

    /// A copy of what is durable, as an index of its own.
    pub fn image(&self) -> FakeIndex {
        let applied = self.0.borrow().applied.clone();
        FakeIndex(Rc::new(RefCell::new(FakeIndexState {
            applied,
            ..FakeIndexState::default()
        })))
    }

    /// Changes every entry: what a damaged index may say.
    pub fn corrupt(&self, change: impl Fn(IndexKey, IndexValue) -> Option<(IndexKey, IndexValue)>) {
        let mut state = self.0.borrow_mut();
        let mut entries = Vec::new();
        let covers = state
            .applied
            .load(&mut |key, value| entries.push((key, value)));
        let changes = entries
            .into_iter()
            .filter_map(|(key, value)| change(key, value))
            .map(|(key, value)| crate::index::IndexChange::Put(key, value))
            .collect();
        let covers = covers.ok().flatten().unwrap_or(0);
        state.applied.apply(IndexBatch {
            changes,
            covers,
            clear: true,
        });
    }
}

impl Index for FakeIndex {
    fn load(&mut self, visit: &mut dyn FnMut(IndexKey, IndexValue)) -> io::Result<Option<u64>> {
        let mut state = self.0.borrow_mut();
        if state.failed {
            return Err(io::Error::other("injected failure"));
        }
        state.applied.load(visit)
    }

    fn apply(&mut self, batch: IndexBatch) {
        self.0.borrow_mut().waiting.push_back(batch);
    }

    fn covered(&mut self) -> io::Result<u64> {
        let mut state = self.0.borrow_mut();
        if state.failed {
            return Err(io::Error::other("injected failure"));
        }
        state.applied.covered()
    }
}
