//! The receive buffer of a socket: one contiguous piece that the kernel writes into directly.

use std::cell::RefCell;

use crate::buffer::{IoBuf, Pool};

/// Turns in a row that must do with the initial size before a grown buffer is given back.
const SHRINK_AFTER_TURNS: u32 = 256;

pub(crate) struct ReceiveBuffer {
    buf: IoBuf,
    start: usize,
    end: usize,
    /// Bytes that the next report needs; 0: any.
    need: usize,
    initial_bytes: usize,
    small_turns: u32,
}

impl ReceiveBuffer {
    pub(crate) fn new(initial_bytes: usize) -> ReceiveBuffer {
        ReceiveBuffer {
            buf: IoBuf::empty(),
            start: 0,
            end: 0,
            need: 0,
            initial_bytes,
            small_turns: 0,
        }
    }

    pub(crate) fn input(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// # Panics
    /// When `bytes` is more than the input holds.
    pub(crate) fn consume(&mut self, bytes: usize) {
        assert!(
            bytes <= self.end - self.start,
            "{bytes} consumed of {}",
            self.end - self.start
        );
        self.start += bytes;
    }

    /// True if nothing can be received until input is consumed or a larger need is set.
    pub(crate) fn is_full(&self) -> bool {
        let len = self.end - self.start;
        len > 0 && len >= self.buf.len().max(self.need)
    }

    pub(crate) fn set_need(&mut self, bytes: usize) {
        self.need = bytes;
    }

    /// True, once, if the input holds what the next report needs.
    pub(crate) fn report(&mut self) -> bool {
        let len = self.end - self.start;
        let enough = len > 0 && len >= self.need;
        if enough {
            self.need = 0;
        }
        enough
    }

    /// The kernel wrote `bytes` into the room that [`ReceiveBuffer::room`] gave.
    pub(crate) fn received(&mut self, bytes: usize) {
        assert!(
            bytes <= self.buf.len() - self.end,
            "the kernel received more than there was room"
        );
        self.end += bytes;
        if self.end - self.start > self.initial_bytes {
            self.small_turns = 0;
        }
    }

    /// Room for the kernel to write into; zero when the input must be consumed first. Moves the
    /// input, so the kernel must not hold an earlier room.
    pub(crate) fn room(&mut self, pool: &RefCell<Pool>) -> (*mut u8, usize) {
        let len = self.end - self.start;
        let wanted = self.need.max(self.initial_bytes);
        if len == 0 {
            (self.start, self.end) = (0, 0);
            self.shrink_when_idle(wanted, pool);
        }
        if self.buf.len() < wanted {
            let mut larger = pool.borrow_mut().take(wanted);
            larger[..len].copy_from_slice(&self.buf[self.start..self.end]);
            pool.borrow_mut()
                .put(std::mem::replace(&mut self.buf, larger));
            (self.start, self.end) = (0, len);
        } else if self.start > 0 && self.wants_compaction() {
            self.buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, len);
        }
        let room = self.buf.len() - self.end;
        // SAFETY: `end` ≤ `len` of the buffer, so the pointer stays within its memory.
        (unsafe { self.buf.as_mut_ptr().add(self.end) }, room)
    }

    /// Compact when the frame to come does not fit behind the input, or when the tail got short
    /// and little has to be moved.
    fn wants_compaction(&self) -> bool {
        let len = self.end - self.start;
        let tail = self.buf.len() - self.end;
        let short = self.need > self.buf.len() - self.start;
        short || tail == 0 || (tail < self.buf.len() / 2 && len <= self.buf.len() / 4)
    }

    fn shrink_when_idle(&mut self, wanted: usize, pool: &RefCell<Pool>) {
        if self.buf.len() <= self.initial_bytes || wanted > self.initial_bytes {
            return;
        }
        self.small_turns += 1;
        if self.small_turns >= SHRINK_AFTER_TURNS {
            self.small_turns = 0;
            self.release(pool);
        }
    }

    /// Gives the memory back. The kernel must not hold a room.
    pub(crate) fn release(&mut self, pool: &RefCell<Pool>) {
        pool.borrow_mut()
            .put(std::mem::replace(&mut self.buf, IoBuf::empty()));
        (self.start, self.end) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(buffer: &mut ReceiveBuffer, pool: &RefCell<Pool>, bytes: &[u8]) {
        let (memory, room) = buffer.room(pool);
        assert!(room >= bytes.len());
        // SAFETY: `room` bytes may be written at `memory`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len()) };
        buffer.received(bytes.len());
    }

    #[test]
    fn unconsumed_bytes_survive_growing_and_compaction() {
        let pool = RefCell::new(Pool::new(1 << 20));
        let mut buffer = ReceiveBuffer::new(4096);
        fill(&mut buffer, &pool, &[7; 4000]);
        buffer.consume(3990);
        fill(&mut buffer, &pool, &[8; 4000]);
        assert_eq!(buffer.input()[..10], [7; 10]);
        assert_eq!(buffer.input()[10..], [8; 4000]);
        buffer.set_need(100_000);
        assert!(!buffer.report());
        fill(&mut buffer, &pool, &[9; 95_990]);
        assert!(buffer.report());
        assert_eq!(buffer.input().len(), 100_000);
        assert_eq!(buffer.input()[9], 7);
        assert_eq!(buffer.input()[4010..], [9; 95_990]);
    }

    #[test]
    fn a_full_buffer_has_no_room_until_consumed() {
        let pool = RefCell::new(Pool::new(1 << 20));
        let mut buffer = ReceiveBuffer::new(4096);
        fill(&mut buffer, &pool, &[1; 4096]);
        assert_eq!(buffer.room(&pool).1, 0);
        buffer.consume(1);
        assert_eq!(buffer.room(&pool).1, 1);
    }

    #[test]
    fn a_grown_buffer_is_given_back_after_many_small_turns() {
        let pool = RefCell::new(Pool::new(1 << 20));
        let mut buffer = ReceiveBuffer::new(4096);
        buffer.set_need(100_000);
        fill(&mut buffer, &pool, &[1; 100_000]);
        assert!(buffer.report());
        buffer.consume(100_000);
        for _ in 0..=SHRINK_AFTER_TURNS {
            fill(&mut buffer, &pool, &[2; 100]);
            buffer.consume(100);
        }
        assert_eq!(buffer.buf.len(), 4096);
    }
}
