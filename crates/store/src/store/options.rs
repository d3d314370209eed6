//! Settings of format and open.

use ashlar_replication::values::DeviceId;

/// How a device is laid out.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// Identity of the device; fresh for every format.
    pub device: DeviceId,
    /// Bytes of the journal; None: a 256th of the device, 16 MiB to 128 MiB.
    ///
    /// The upper bound of the default keeps recovery short: it holds the newest version of every block
    /// in the journal in memory.
    pub journal_bytes: Option<u64>,
    /// Replicas that the device can hold; None: one per 4 MiB, 64 to 16384.
    pub replicas_max: Option<u32>,
    /// What to do with a store of ours that is there already.
    pub existing: Existing,
    /// Whether the device is known to read as zeros.
    pub zeroed: Zeroed,
}

impl FormatOptions {
    /// Defaults for a device of that identity.
    pub fn new(device: DeviceId) -> FormatOptions {
        FormatOptions {
            device,
            journal_bytes: None,
            replicas_max: None,
            existing: Existing::Keep,
            zeroed: Zeroed::No,
        }
    }
}

/// What format does with an Ashlar store that it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Refuse.
    Keep,
    /// Lay it out anew; everything on it is gone.
    Destroy,
}

/// Whether the header areas have to be overwritten. The journal always is: writing to a part of a file
/// that was only allocated costs tens of microseconds each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroed {
    /// A file that was just made.
    Yes,
    /// Anything else.
    No,
}

/// Limits of an open store.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Bytes of data in memory that wait to be written home, before the store reports pressure.
    pub dirty_bytes_max: usize,
    /// Extent headers in memory (about 4.5 KiB each) that are kept for reuse.
    pub headers_max: usize,
    /// Writes of up to this many bytes go through the journal, larger ones are announced in it.
    pub journaled_bytes_max: usize,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            dirty_bytes_max: 32 << 20,
            headers_max: 4096,
            journaled_bytes_max: 64 << 10,
        }
    }
}
