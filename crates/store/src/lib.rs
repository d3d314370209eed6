//! The store of a device: journal, extents, volume headers, index (docs/disk-format.md).
//!
//! A [`Store`] has no thread, clock or file of its own. It is handed a [`Device`] with each call,
//! starts operations on it, and is told when they have completed; what it has finished comes out of
//! [`Store::next_completion`].

mod api;
mod device;
pub mod directory;
mod error;
#[cfg(any(test, feature = "test-support"))]
pub mod fake;
pub mod faults;
mod file_device;
mod format;
mod index;
mod journal;
mod memory;
pub mod signature;
mod store;

pub use api::{
    Blocks, Completion, Content, Counters, ExtentSummary, Outcome, PositionList, ReadOutcome,
    Replica, ReplicaSlot, ReplicaSpec, Summary, Usage,
};
pub use device::{Device, Geometry, Part, Persist};
pub use error::{FormatError, OpenError, StoreError};
pub use file_device::{FileCompleted, FileDevice};
pub use index::{Index, IndexBatch, IndexChange, IndexKey, IndexValue, MemoryIndex, SledIndex};
pub use store::{Existing, FormatOptions, OpenOptions, Store, Zeroed};
