//! The output queue of a socket.
//!
//! Two batches take turns: one is built by the caller while the other is with the kernel, so that
//! nothing the kernel reads from ever moves. Both keep their memory.

use std::ptr;

use crate::shared::SharedBytes;

/// Pieces of one gathering send. The kernel allows 1024; more than this gains nothing.
const PIECES_MAX: usize = 256;
/// A batch that grew beyond this gives its memory back when it is done.
const KEPT_BYTES_MAX: usize = 1 << 20;

enum Part {
    Copied { start: usize, end: usize },
    Shared(SharedBytes),
}

#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    parts: Vec<Part>,
    total: usize,
}

impl Batch {
    fn piece(&self, part: usize) -> &[u8] {
        match &self.parts[part] {
            Part::Copied { start, end } => &self.bytes[*start..*end],
            Part::Shared(bytes) => bytes,
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES_MAX);
        self.parts.clear();
        self.total = 0;
    }
}

pub(crate) struct OutputQueue {
    building: Batch,
    sending: Batch,
    /// Of `sending`: the first part that is not with the kernel's socket buffer yet…
    part: usize,
    /// …and how much of it is.
    part_sent: usize,
    sending_left: usize,
    pieces: Vec<libc::iovec>,
    message: libc::msghdr,
}

impl OutputQueue {
    pub(crate) fn new() -> OutputQueue {
        OutputQueue {
            building: Batch::default(),
            sending: Batch::default(),
            part: 0,
            part_sent: 0,
            sending_left: 0,
            pieces: Vec::new(),
            // SAFETY: a msghdr of zeros is a message without anything.
            message: unsafe { std::mem::zeroed() },
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let batch = &mut self.building;
        let start = batch.bytes.len();
        batch.bytes.extend_from_slice(bytes);
        batch.total += bytes.len();
        match batch.parts.last_mut() {
            Some(Part::Copied { end, .. }) => *end = batch.bytes.len(),
            _ => batch.parts.push(Part::Copied {
                start,
                end: batch.bytes.len(),
            }),
        }
    }

    pub(crate) fn push_shared(&mut self, bytes: SharedBytes) {
        if !bytes.is_empty() {
            self.building.total += bytes.len();
            self.building.parts.push(Part::Shared(bytes));
        }
    }

    /// Bytes that the kernel has not taken.
    pub(crate) fn len(&self) -> usize {
        self.building.total + self.sending_left
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The message to send next and its length in bytes; None when the queue is empty. It stays
    /// valid, where it is, until [`OutputQueue::sent`].
    ///
    /// Must not be called while the kernel holds an earlier message.
    pub(crate) fn message(&mut self) -> Option<(*const libc::msghdr, usize)> {
        if self.sending_left == 0 {
            if self.building.total == 0 {
                return None;
            }
            std::mem::swap(&mut self.building, &mut self.sending);
            self.sending_left = self.sending.total;
            (self.part, self.part_sent) = (0, 0);
        }
        self.pieces.clear();
        let mut skip = self.part_sent;
        let mut bytes = 0;
        for part in self.part..self.sending.parts.len().min(self.part + PIECES_MAX) {
            let piece = &self.sending.piece(part)[skip..];
            skip = 0;
            bytes += piece.len();
            self.pieces.push(libc::iovec {
                iov_base: piece.as_ptr().cast_mut().cast(),
                iov_len: piece.len(),
            });
        }
        self.message.msg_iov = self.pieces.as_mut_ptr();
        self.message.msg_iovlen = self.pieces.len() as _;
        Some((ptr::from_ref(&self.message), bytes))
    }

    /// The kernel took `bytes` of the message.
    pub(crate) fn sent(&mut self, mut bytes: usize) {
        assert!(
            bytes <= self.sending_left,
            "the kernel sent more than it was given"
        );
        self.sending_left -= bytes;
        if self.sending_left == 0 {
            self.sending.clear();
            return;
        }
        while bytes > 0 {
            let left = self.sending.piece(self.part).len() - self.part_sent;
            if bytes < left {
                self.part_sent += bytes;
                return;
            }
            bytes -= left;
            if let Part::Shared(payload) = &mut self.sending.parts[self.part] {
                // Early, so that a slow peer does not hold the payload of what it has got.
                *payload = SharedBytes::empty();
            }
            self.part += 1;
            self.part_sent = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a kernel would see that takes `step` bytes at a time.
    fn drain(queue: &mut OutputQueue, step: usize) -> Vec<u8> {
        let mut seen = Vec::new();
        while let Some((message, bytes)) = queue.message() {
            let mut gathered = Vec::new();
            // SAFETY: the message and its pieces are valid until `sent`.
            unsafe {
                for index in 0..(*message).msg_iovlen {
                    let piece = *(*message).msg_iov.add(index);
                    gathered.extend_from_slice(std::slice::from_raw_parts(
                        piece.iov_base.cast::<u8>(),
                        piece.iov_len,
                    ));
                }
            }
            assert_eq!(gathered.len(), bytes);
            gathered.truncate(step);
            queue.sent(gathered.len());
            seen.extend(gathered);
        }
        seen
    }

    #[test]
    fn bytes_leave_in_order_whatever_the_kernel_takes_at_once() {
        for step in [1, 3, 7, 1000, 100_000] {
            let mut queue = OutputQueue::new();
            let mut expected = Vec::new();
            for round in 0..600u32 {
                let small = round.to_le_bytes();
                queue.push(&small);
                queue.push(&small[..2]);
                expected.extend_from_slice(&small);
                expected.extend_from_slice(&small[..2]);
                if round % 2 == 0 {
                    queue.push_shared(SharedBytes::copy_of(&[round as u8; 50]));
                    expected.extend_from_slice(&[round as u8; 50]);
                }
            }
            assert_eq!(queue.len(), expected.len());
            assert_eq!(drain(&mut queue, step), expected);
            assert!(queue.is_empty());
        }
    }

    #[test]
    fn what_is_queued_during_a_send_follows_it() {
        let mut queue = OutputQueue::new();
        queue.push(b"first");
        assert_eq!(queue.message().unwrap().1, 5);
        queue.push(b"second");
        queue.sent(2);
        assert_eq!(queue.len(), 9);
        assert_eq!(drain(&mut queue, 100), b"rstsecond");
    }
}
