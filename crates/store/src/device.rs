//! What a store needs of the medium under it.

use std::io;

use ashlar_engine::IoBuf;
pub use ashlar_engine::Persist;

/// Which of the store's two places an operation is for.
///
/// A store without a journal device of its own uses [`Part::Blocks`] for everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Superblocks, headers and extents, and the journal unless it has its own device.
    Blocks,
    /// The separate journal device.
    Journal,
}

/// Size and granularity of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes that can be addressed.
    pub size_bytes: u64,
    /// The smallest unit that can be read or written. The store refuses more than 4096.
    pub logical_block_bytes: u32,
}

/// The medium of a store: one object for both parts, owned by the shard's thread.
///
/// Assumptions: a write is durable after it completed with [`Persist::Durable`], or when a sync that
/// was submitted after its completion completed. Until then any part of it (in units of the
/// logical block) may be there or not after a crash, in any order. A logical block is
/// written whole or not at all, or else reads back as an error or as bytes that fail a CRC-32C.
///
/// Operations that were started by `read`, `write` and `sync` complete through
/// [`crate::Store::device_completed`], in any order, not from within the call. The blocking ones are used
/// by format, open, recovery and inspection only.
pub trait Device {
    /// Size and granularity; None for [`Part::Journal`] where the journal has no device of its own.
    fn geometry(&self, part: Part) -> Option<Geometry>;

    /// Fills `buf` from `offset`. Offset, length and memory of `buf` are aligned to 4096.
    fn read_blocking(&mut self, part: Part, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes all of `buf` at `offset`, not yet durably.
    fn write_blocking(&mut self, part: Part, offset: u64, buf: &[u8]) -> io::Result<()>;
    /// Makes everything that was written durable.
    fn sync_blocking(&mut self, part: Part) -> io::Result<()>;

    /// Starts to read `len` bytes into `buf[..len]`.
    fn read(&mut self, part: Part, token: u64, offset: u64, buf: IoBuf, len: usize);
    /// Starts to write `buf[..len]`.
    fn write(
        &mut self,
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
        persist: Persist,
    );
    /// Starts to make everything durable whose write has completed.
    fn sync(&mut self, part: Part, token: u64);

    /// A buffer of exactly `len` bytes with any content, aligned for the device.
    fn buffer(&mut self, len: usize) -> IoBuf;
    /// Gives a buffer back for reuse.
    fn recycle(&mut self, buf: IoBuf);
}
