//! What is given to the kernel and comes back with an event: a kind, and the key of an entry.

use crate::slab::Key;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Whatever comes back does not matter.
    Ignored,
    /// Readiness of a socket (epoll).
    Socket,
    Receive,
    Send,
    Connect,
    Listener,
    Waker,
    /// A file operation, or the sync at the end of a linked one.
    File,
    /// The write at the start of a linked one.
    LinkedWrite,
}

const KINDS: [Kind; 9] = [
    Kind::Ignored,
    Kind::Socket,
    Kind::Receive,
    Kind::Send,
    Kind::Connect,
    Kind::Listener,
    Kind::Waker,
    Kind::File,
    Kind::LinkedWrite,
];

const KIND_SHIFT: u32 = 56;
const INDEX_SHIFT: u32 = 32;
const INDEX_MASK: u32 = (1 << (KIND_SHIFT - INDEX_SHIFT)) - 1;

/// The key of things of which there is only one.
pub(crate) const NO_KEY: Key = Key {
    index: 0,
    generation: 0,
};

pub(crate) fn pack(kind: Kind, key: Key) -> u64 {
    (kind as u64) << KIND_SHIFT | u64::from(key.index) << INDEX_SHIFT | u64::from(key.generation)
}

pub(crate) fn unpack(data: u64) -> (Kind, Key) {
    let kind = KINDS
        .get((data >> KIND_SHIFT) as usize)
        .copied()
        .unwrap_or(Kind::Ignored);
    let index = (data >> INDEX_SHIFT) as u32 & INDEX_MASK;
    (
        kind,
        Key {
            index,
            generation: data as u32,
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_comes_back_as_it_was() {
        for kind in KINDS {
            let key = Key {
                index: INDEX_MASK,
                generation: u32::MAX,
            };
            assert_eq!(unpack(pack(kind, key)), (kind, key));
            assert_eq!(unpack(pack(kind, NO_KEY)), (kind, NO_KEY));
        }
    }
}
