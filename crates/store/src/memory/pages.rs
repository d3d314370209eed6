//! Blocks of data in memory, in chunks that are kept for reuse.

use ashlar_replication::values::BLOCK_BYTES;

/// No page.
pub(crate) const NONE: u32 = u32::MAX;
const CHUNK_PAGES: usize = 64;

/// A pool of 4 KiB pages. Grows by chunks, never shrinks: its size is bounded by the limit that the
/// store reports pressure at, plus what the shard admits beyond it.
#[derive(Default)]
pub(crate) struct Pages {
    chunks: Vec<Box<[u8]>>,
    free: Vec<u32>,
}

impl Pages {
    /// A page with a copy of `data`.
    pub(crate) fn store(&mut self, data: &[u8]) -> u32 {
        let page = match self.free.pop() {
            Some(page) => page,
            None => self.grow(),
        };
        self.get_mut(page).copy_from_slice(data);
        page
    }

    fn grow(&mut self) -> u32 {
        let first = (self.chunks.len() * CHUNK_PAGES) as u32;
        self.chunks
            .push(vec![0; CHUNK_PAGES * BLOCK_BYTES].into_boxed_slice());
        self.free.reserve(self.chunks.len() * CHUNK_PAGES);
        self.free
            .extend((first + 1..first + CHUNK_PAGES as u32).rev());
        first
    }

    pub(crate) fn free(&mut self, page: u32) {
        if page != NONE {
            self.free.push(page);
        }
    }

    pub(crate) fn get(&self, page: u32) -> &[u8] {
        let at = page as usize % CHUNK_PAGES * BLOCK_BYTES;
        &self.chunks[page as usize / CHUNK_PAGES][at..at + BLOCK_BYTES]
    }

    fn get_mut(&mut self, page: u32) -> &mut [u8] {
        let at = page as usize % CHUNK_PAGES * BLOCK_BYTES;
        &mut self.chunks[page as usize / CHUNK_PAGES][at..at + BLOCK_BYTES]
    }

    /// Bytes of the pages that are in use.
    pub(crate) fn used_bytes(&self) -> usize {
        (self.chunks.len() * CHUNK_PAGES - self.free.len()) * BLOCK_BYTES
    }
}
