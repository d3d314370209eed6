//! Which bytes of a volume or file the next operation touches, and with what.

use std::ops::{Deref, DerefMut};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Writes in ascending order.
    Write,
    /// Reads in ascending order.
    Read,
    /// Writes all over the working set.
    #[value(name = "randwrite")]
    RandWrite,
    /// Reads all over the working set.
    #[value(name = "randread")]
    RandRead,
}

impl Mode {
    /// Whether it changes data.
    pub fn is_write(self) -> bool {
        matches!(self, Mode::Write | Mode::RandWrite)
    }

    fn is_random(self) -> bool {
        matches!(self, Mode::RandRead | Mode::RandWrite)
    }

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Write => "write",
            Mode::Read => "read",
            Mode::RandWrite => "randwrite",
            Mode::RandRead => "randread",
        }
    }
}

/// Offsets of the operations of one load.
#[derive(Clone, Debug)]
pub struct Offsets {
    mode: Mode,
    request_bytes: u64,
    slots: u64,
    next: u64,
    random: u64,
}

impl Offsets {
    /// Over `span_bytes`, in requests of `request_bytes`. `seed` tells loads apart.
    ///
    /// # Panics
    /// When not even one request fits.
    pub fn new(mode: Mode, span_bytes: u64, request_bytes: u64, seed: u64) -> Offsets {
        let slots = span_bytes / request_bytes;
        assert!(
            slots > 0,
            "a request of {request_bytes} bytes does not fit into {span_bytes}"
        );
        Offsets {
            mode,
            request_bytes,
            slots,
            next: 0,
            random: seed,
        }
    }

    /// The next offset.
    pub fn next_offset(&mut self) -> u64 {
        let slot = if self.mode.is_random() {
            // splitmix64; the high bits of a widening multiplication spread it over the slots.
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.random;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            ((u128::from(z) * u128::from(self.slots)) >> 64) as u64
        } else {
            let slot = self.next;
            self.next = (self.next + 1) % self.slots;
            slot
        };
        slot * self.request_bytes
    }
}

/// Alignment that direct I/O needs everywhere: the largest page size.
const ALIGNMENT: usize = 65536;

/// Memory that direct I/O accepts.
#[derive(Debug)]
pub struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// `len` zeros.
    pub fn zeros(len: usize) -> AlignedBuffer {
        let memory = vec![0; len + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        AlignedBuffer { memory, start, len }
    }

    /// `len` bytes that do not compress and are no block of zeros.
    pub fn noise(len: usize, seed: u64) -> AlignedBuffer {
        let mut buffer = AlignedBuffer::zeros(len);
        let mut offsets = Offsets::new(Mode::RandRead, 1 << 56, 1, seed);
        for chunk in buffer.chunks_mut(7) {
            let bytes = offsets.next_offset().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
        buffer
    }

    /// Makes the content of every 4 KiB differ from that of earlier operations, at little cost.
    pub fn stamp(&mut self, operation: u64) {
        for block in self.chunks_mut(4096) {
            let len = block.len().min(8);
            block[..len].copy_from_slice(&operation.to_le_bytes()[..len]);
        }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_offsets_cover_the_span_and_start_again() {
        let mut offsets = Offsets::new(Mode::Write, 10_000, 4096, 1);
        assert_eq!([(); 3].map(|()| offsets.next_offset()), [0, 4096, 0]);
    }

    #[test]
    fn random_offsets_are_aligned_in_range_and_reach_everything() {
        let mut offsets = Offsets::new(Mode::RandRead, 64 * 512, 512, 7);
        let mut seen = [false; 64];
        for _ in 0..2000 {
            let offset = offsets.next_offset();
            assert_eq!(offset % 512, 0);
            seen[(offset / 512) as usize] = true;
        }
        assert!(seen.iter().all(|s| *s));
    }

    #[test]
    fn buffers_are_aligned_and_every_block_of_them_changes() {
        let mut buffer = AlignedBuffer::noise(8192, 3);
        assert_eq!(buffer.as_ptr().align_offset(ALIGNMENT), 0);
        let before = buffer.to_vec();
        buffer.stamp(1);
        assert_ne!(buffer[..4096], before[..4096]);
        assert_ne!(buffer[4096..], before[4096..]);
    }
}
