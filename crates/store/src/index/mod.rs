//! The index: which slot holds which extent. Only a copy of what the headers on the device say;
//! see docs/decisions/0001-sled-is-only-an-index.md.

mod memory;
mod on_sled;

use std::io;

use ashlar_replication::values::ExtentIndex;

pub use memory::MemoryIndex;
pub use on_sled::SledIndex;

/// What an entry of the index is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IndexKey {
    /// Slot of the volume header.
    pub replica: u32,
    /// The replica's nonce, so that entries of a deleted replica cannot pass for those of a new one.
    pub nonce: u64,
    /// Which extent.
    pub extent: ExtentIndex,
}

/// What the index says of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexValue {
    /// Where the extent lies.
    pub slot: u32,
    /// The highest position of its blocks, packed.
    pub position_max: u64,
    /// The log sequence number of its newest header.
    pub lsn: u64,
    /// Whether a block of it is torn.
    pub torn: bool,
}

/// A change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexChange {
    /// Insert or replace.
    Put(IndexKey, IndexValue),
    /// Remove an extent.
    Remove(IndexKey),
    /// Remove all extents of a replica.
    RemoveReplica {
        /// Slot of its volume header.
        replica: u32,
        /// Its nonce.
        nonce: u64,
    },
}

/// Changes that are applied together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexBatch {
    /// In this order.
    pub changes: Vec<IndexChange>,
    /// The index covers every record of the journal below this log sequence number afterwards.
    pub covers: u64,
    /// Forget everything that was in the index before.
    pub clear: bool,
}

/// The map from extents to slots. Batches are applied in order, each wholly or not at all as far as
/// [`Index::load`] can see, off the shard's thread.
pub trait Index {
    /// Visits every entry and returns what the last durable batch covered; None when the index is
    /// empty, incomplete or of another store. Called once, before any `apply`.
    ///
    /// # Errors
    /// When the index cannot be read; the store then rebuilds it.
    fn load(&mut self, visit: &mut dyn FnMut(IndexKey, IndexValue)) -> io::Result<Option<u64>>;

    /// Starts to apply a batch.
    fn apply(&mut self, batch: IndexBatch);

    /// What the index durably covers by now. A failed index reports its error for ever; the store goes
    /// on without it and rebuilds it at the next open.
    fn covered(&mut self) -> io::Result<u64>;
}
