//! Page-aligned buffers, and the pool that they are taken from.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::shared::Node;
use std::rc::Rc;

/// The smallest alignment, also where pages are smaller: devices have blocks of up to 4 KiB.
const ALIGNMENT_MIN: usize = 4096;

/// Alignment in bytes of every [`IoBuf`]: the system's page size, at least 4096.
pub fn buffer_alignment() -> usize {
    static ALIGNMENT: OnceLock<usize> = OnceLock::new();
    *ALIGNMENT.get_or_init(|| rustix::param::page_size().max(ALIGNMENT_MIN))
}

/// An owned, page-aligned buffer for direct I/O. Dereferences to its bytes.
///
/// The content of a fresh buffer is zeros; one from a pool holds whatever its last user left.
pub struct IoBuf {
    memory: NonNull<u8>,
    capacity: usize,
    len: usize,
}

// SAFETY: the buffer is the only owner of its memory, which is plain bytes.
unsafe impl Send for IoBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// A buffer of `len` zero bytes that belongs to no pool.
    pub fn new(len: usize) -> IoBuf {
        let alignment = buffer_alignment();
        let capacity = len
            .max(1)
            .checked_next_multiple_of(alignment)
            .expect("buffer too large");
        let layout = Layout::from_size_align(capacity, alignment).expect("buffer too large");
        // SAFETY: the size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(memory) = NonNull::new(memory) else {
            handle_alloc_error(layout)
        };
        IoBuf {
            memory,
            capacity,
            len,
        }
    }

    /// A buffer with a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> IoBuf {
        let mut buf = IoBuf::new(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A buffer without memory, to leave behind where one is taken away.
    pub fn empty() -> IoBuf {
        IoBuf {
            memory: NonNull::dangling(),
            capacity: 0,
            len: 0,
        }
    }

    /// Bytes that the buffer can be resized to without new memory.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes the buffer `len` bytes long. Bytes that appear are whatever the memory held.
    ///
    /// # Panics
    /// When `len` is above [`IoBuf::capacity`].
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity,
            "{len} bytes in a buffer of {}",
            self.capacity
        );
        self.len = len;
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory.as_ptr()
    }
}

impl Drop for IoBuf {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: allocated in `new` with this very layout.
            unsafe {
                let layout = Layout::from_size_align_unchecked(self.capacity, buffer_alignment());
                dealloc(self.memory.as_ptr(), layout);
            }
        }
    }
}

impl Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` ≤ `capacity` initialised bytes (zeros at least) that we own.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.len) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.len) }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} of {} bytes)", self.len, self.capacity)
    }
}

/// Size classes are powers of two from 4 KiB (or one page) to 4 MiB; larger buffers are not kept.
const CLASS_BYTES_MIN: usize = 4096;
const CLASSES: usize = 11;

/// Buffers that wait to be used again, by size class. Never holds more than a given amount.
pub(crate) struct Pool {
    classes: [Vec<IoBuf>; CLASSES],
    kept_bytes: usize,
    kept_bytes_max: usize,
    /// Reference counters of shared buffers, without memory; see [`crate::SharedBytes`].
    pub(crate) nodes: Vec<Rc<Node>>,
}

/// Counters kept for reuse; beyond that they are freed. One is as small as a few words.
pub(crate) const NODES_MAX: usize = 4096;

impl Pool {
    pub(crate) fn new(kept_bytes_max: usize) -> Pool {
        Pool {
            classes: std::array::from_fn(|_| Vec::new()),
            kept_bytes: 0,
            kept_bytes_max,
            nodes: Vec::new(),
        }
    }

    /// The class whose buffers hold at least `len` bytes, if there is one.
    fn class_for(len: usize) -> Option<usize> {
        let size = len
            .max(CLASS_BYTES_MIN.max(buffer_alignment()))
            .checked_next_power_of_two()?;
        let class = (size / CLASS_BYTES_MIN).trailing_zeros() as usize;
        (class < CLASSES).then_some(class)
    }

    pub(crate) fn take(&mut self, len: usize) -> IoBuf {
        let Some(class) = Pool::class_for(len) else {
            return IoBuf::new(len);
        };
        let mut buf = match self.classes[class].pop() {
            Some(buf) => {
                self.kept_bytes -= buf.capacity;
                buf
            }
            None => IoBuf::new(CLASS_BYTES_MIN << class),
        };
        buf.set_len(len);
        buf
    }

    pub(crate) fn put(&mut self, buf: IoBuf) {
        let fits = self.kept_bytes + buf.capacity <= self.kept_bytes_max;
        let class = Pool::class_for(buf.capacity);
        // Only exact members of a class: a smaller one would break the promise of `take`.
        if let Some(class) = class.filter(|c| fits && CLASS_BYTES_MIN << c == buf.capacity) {
            self.kept_bytes += buf.capacity;
            self.classes[class].push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero_when_fresh() {
        let buf = IoBuf::new(5000);
        assert_eq!(buf.as_ptr() as usize % buffer_alignment(), 0);
        assert_eq!(buf.len(), 5000);
        assert!(buf.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_recycled_buffer_is_used_again_for_any_length_of_its_class() {
        let mut pool = Pool::new(1 << 20);
        let first = pool.take(60_000);
        let memory = first.as_ptr();
        pool.put(first);
        let second = pool.take(40_000);
        assert_eq!(second.as_ptr(), memory);
        assert_eq!(second.len(), 40_000);
    }

    #[test]
    fn the_pool_keeps_no_more_than_its_limit_and_no_odd_sizes() {
        let mut pool = Pool::new(64 << 10);
        let (one, two) = (pool.take(64 << 10), pool.take(64 << 10));
        pool.put(one);
        pool.put(two);
        assert_eq!(pool.kept_bytes, 64 << 10);
        pool.take(64 << 10);
        pool.put(IoBuf::new(12 << 10));
        pool.put(IoBuf::empty());
        assert_eq!(pool.kept_bytes, 0);
    }

    #[test]
    fn buffers_above_the_largest_class_are_given_but_not_kept() {
        let mut pool = Pool::new(1 << 30);
        let large = pool.take(5 << 20);
        assert_eq!(large.len(), 5 << 20);
        pool.put(large);
        assert_eq!(pool.kept_bytes, 0);
    }
}
