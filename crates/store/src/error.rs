//! Errors, split by what the caller does next.

use std::io;

/// Why an operation of an open store was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// No free extent. Nothing was changed; reads and overwrites go on.
    #[error("the device is full: no free extent")]
    DeviceFull,
    /// A write or a sync failed. Nothing is served until the store is opened again.
    #[error("the device is closed after a failed write or sync; open the store again")]
    Closed,
    /// No such replica.
    #[error("the store holds no such replica")]
    UnknownReplica,
    /// The volume has a replica here already.
    #[error("the store already holds a replica of that volume")]
    AlreadyExists,
    /// No free volume header.
    #[error("the store has no room for another replica: all volume headers are in use")]
    ReplicasFull,
    /// A range, a list or a size that does not fit.
    #[error("the range lies outside the volume or crosses an extent, or lists do not match it")]
    BadRange,
    /// A block does not match the CRC-32C that came with it.
    #[error("a block does not match the checksum that came with it")]
    Checksum,
    /// Repair: the block's recorded position is another one.
    #[error("the block's position is not the expected one")]
    PositionChanged,
    /// A witness has no blocks.
    #[error("a witness holds no blocks")]
    Witness,
    /// The extent's header cannot be read.
    #[error("the header of the extent is damaged")]
    HeaderDamaged,
    /// The index pointed to a slot that holds something else. Open again without the index.
    #[error("the index does not match the device; delete the store's meta folder and open again")]
    IndexWrong,
}

/// Why a store was not formatted.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// There is something on it.
    #[error("the device is not empty: it holds {0}; nothing was written")]
    Foreign(String),
    /// Too small for headers, journal and one extent.
    #[error("the device is too small: {size_bytes} bytes, at least {needed_bytes} are needed")]
    TooSmall {
        /// What there is.
        size_bytes: u64,
        /// What is needed at least.
        needed_bytes: u64,
    },
    /// An option is outside its limits.
    #[error("{0}")]
    Options(String),
    /// The device failed.
    #[error("the device failed while it was formatted")]
    Io(#[from] io::Error),
}

/// Why a store was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No superblock of ours.
    #[error("there is no Ashlar store on the device{}", found.as_ref().map(|f| format!("; it holds {f}")).unwrap_or_default())]
    NotAStore {
        /// What is there instead.
        found: Option<String>,
    },
    /// Both superblocks are ours and damaged.
    #[error("both superblocks are damaged")]
    SuperblockDamaged,
    /// Written by a later release.
    #[error(
        "the store has format version {found}, which is newer than what this release reads (up to {supported}); \
         use the release that wrote it, or a later one"
    )]
    NewerVersion {
        /// On the device.
        found: u32,
        /// What this release understands.
        supported: u32,
    },
    /// The file or device is smaller than the store.
    #[error("the device is truncated: {size_bytes} bytes, the store needs {needed_bytes}")]
    Truncated {
        /// What there is.
        size_bytes: u64,
        /// What the superblock says.
        needed_bytes: u64,
    },
    /// The journal device is missing, or it belongs to another store.
    #[error("{0}")]
    JournalDevice(String),
    /// A record that was durable cannot be read: opening would lose acknowledged writes.
    #[error("the journal is damaged at record {sequence}: {reason}")]
    JournalDamaged {
        /// The first record that cannot be read.
        sequence: u64,
        /// What was found.
        reason: &'static str,
    },
    /// A header pair cannot be read, and nothing tells what it held.
    #[error("{what} {number} is damaged: {reason}")]
    HeaderDamaged {
        /// Which kind of header.
        what: &'static str,
        /// Its slot.
        number: u32,
        /// What was found.
        reason: &'static str,
    },
    /// Another process holds the store.
    #[error("the store {path} is in use{}", holder.as_ref().map(|h| format!(" by {h}")).unwrap_or_default())]
    InUse {
        /// What was to be claimed.
        path: String,
        /// Who holds it, where that can be found out.
        holder: Option<String>,
    },
    /// The medium does not fit.
    #[error("{0}")]
    Geometry(String),
    /// The device failed.
    #[error("the device failed while the store was opened")]
    Io(#[from] io::Error),
}
