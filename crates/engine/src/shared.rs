//! Bytes that several owners on one thread share without copying.

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, Range};
use std::rc::{Rc, Weak};

use crate::buffer::{IoBuf, NODES_MAX, Pool};

/// The counted owner of a shared buffer. Nodes go back to the pool together with their memory, so
/// that sharing a buffer allocates nothing in steady state.
pub(crate) struct Node {
    buf: IoBuf,
    pool: Weak<RefCell<Pool>>,
}

/// A part of an [`IoBuf`] that is cheap to clone; for payloads. Dereferences to its bytes.
///
/// When the last clone is dropped the buffer goes back to the engine's pool if it came through
/// [`crate::Engine::share`].
#[derive(Clone)]
pub struct SharedBytes {
    /// None: no bytes.
    node: Option<Rc<Node>>,
    start: usize,
    end: usize,
}

/// The argument of [`crate::Engine::send_shared`].
pub type SharedSlice = SharedBytes;

impl SharedBytes {
    /// Shares `buf`, which is freed with the last clone.
    pub fn new(buf: IoBuf) -> SharedBytes {
        let (start, end) = (0, buf.len());
        SharedBytes {
            node: Some(Rc::new(Node {
                buf,
                pool: Weak::new(),
            })),
            start,
            end,
        }
    }

    /// Shares a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> SharedBytes {
        SharedBytes::new(IoBuf::copy_of(bytes))
    }

    /// No bytes.
    pub fn empty() -> SharedBytes {
        SharedBytes {
            node: None,
            start: 0,
            end: 0,
        }
    }

    pub(crate) fn pooled(buf: IoBuf, pool: &Rc<RefCell<Pool>>) -> SharedBytes {
        let (start, end) = (0, buf.len());
        let reused = pool.borrow_mut().nodes.pop();
        let node = match reused {
            Some(mut node) => {
                Rc::get_mut(&mut node)
                    .expect("a node in the pool has one owner")
                    .buf = buf;
                node
            }
            None => Rc::new(Node {
                buf,
                pool: Rc::downgrade(pool),
            }),
        };
        SharedBytes {
            node: Some(node),
            start,
            end,
        }
    }

    /// The bytes at `range`, counted from the start of this slice, as another owner.
    ///
    /// # Panics
    /// When `range` is not within the slice.
    pub fn slice(&self, range: Range<usize>) -> SharedBytes {
        let within = range.start <= range.end && range.end <= self.len();
        assert!(within, "{range:?} of {} bytes", self.len());
        SharedBytes {
            node: self.node.clone(),
            start: self.start + range.start,
            end: self.start + range.end,
        }
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        let Some(mut node) = self.node.take() else {
            return;
        };
        // Only the last owner gets the node; with others the count just goes down.
        let Some(inner) = Rc::get_mut(&mut node) else {
            return;
        };
        let Some(pool) = inner.pool.upgrade() else {
            return;
        };
        let buf = std::mem::replace(&mut inner.buf, IoBuf::empty());
        let mut pool = pool.borrow_mut();
        pool.put(buf);
        if pool.nodes.len() < NODES_MAX {
            pool.nodes.push(node);
        }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.node {
            Some(node) => &node.buf[self.start..self.end],
            None => &[],
        }
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Default for SharedBytes {
    fn default() -> SharedBytes {
        SharedBytes::empty()
    }
}

impl PartialEq for SharedBytes {
    fn eq(&self, other: &SharedBytes) -> bool {
        **self == **other
    }
}
impl Eq for SharedBytes {}

impl From<IoBuf> for SharedBytes {
    fn from(buf: IoBuf) -> SharedBytes {
        SharedBytes::new(buf)
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_slices_count_from_their_own_start() {
        let bytes = SharedBytes::copy_of(b"0123456789");
        let middle = bytes.slice(2..8);
        assert_eq!(&*middle, b"234567");
        assert_eq!(&*middle.slice(1..3), b"34");
        assert_eq!(&*SharedBytes::empty().slice(0..0), b"");
    }

    #[test]
    fn the_buffer_returns_to_the_pool_with_the_last_owner_and_its_node_is_used_again() {
        let pool = Rc::new(RefCell::new(Pool::new(1 << 20)));
        let buf = pool.borrow_mut().take(4096);
        let memory = buf.as_ptr();
        let first = SharedBytes::pooled(buf, &pool);
        let second = first.slice(0..10);
        drop(first);
        assert_eq!(pool.borrow().nodes.len(), 0);
        drop(second);
        assert_eq!(pool.borrow().nodes.len(), 1);
        let again = pool.borrow_mut().take(4096);
        assert_eq!(again.as_ptr(), memory);
        drop(SharedBytes::pooled(again, &pool));
        assert_eq!(pool.borrow().nodes.len(), 1);
    }

    #[test]
    fn bytes_outlive_their_pool() {
        let pool = Rc::new(RefCell::new(Pool::new(1 << 20)));
        let bytes = SharedBytes::pooled(IoBuf::copy_of(b"kept"), &pool);
        drop(pool);
        assert_eq!(&*bytes, b"kept");
    }
}
