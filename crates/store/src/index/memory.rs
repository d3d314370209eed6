//! An index that lives in memory: for tests, and for tools that open a store without one.

use std::collections::BTreeMap;
use std::io;

use super::{Index, IndexBatch, IndexChange, IndexKey, IndexValue};

/// Applies batches at once and keeps them as long as it lives.
#[derive(Clone, Debug, Default)]
pub struct MemoryIndex {
    entries: BTreeMap<IndexKey, IndexValue>,
    covers: Option<u64>,
}

impl MemoryIndex {
    /// An empty index: the store is scanned.
    pub fn new() -> MemoryIndex {
        MemoryIndex::default()
    }
}

impl Index for MemoryIndex {
    fn load(&mut self, visit: &mut dyn FnMut(IndexKey, IndexValue)) -> io::Result<Option<u64>> {
        self.entries
            .iter()
            .for_each(|(key, value)| visit(*key, *value));
        Ok(self.covers)
    }

    fn apply(&mut self, batch: IndexBatch) {
        if batch.clear {
            self.entries.clear();
        }
        for change in batch.changes {
            match change {
                IndexChange::Put(key, value) => {
                    self.entries.insert(key, value);
                }
                IndexChange::Remove(key) => {
                    self.entries.remove(&key);
                }
                IndexChange::RemoveReplica { replica, nonce } => {
                    self.entries
                        .retain(|key, _| (key.replica, key.nonce) != (replica, nonce));
                }
            }
        }
        self.covers = Some(batch.covers);
    }

    fn covered(&mut self) -> io::Result<u64> {
        Ok(self.covers.unwrap_or(0))
    }
}
