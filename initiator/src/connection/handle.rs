//! Handles of attachments on a connection.

/// Links that a connection can have at a time.
pub(super) const LINKS_MAX: usize = 1 << SLOT_BITS;
/// Slots in the low bits: a million volumes on one connection. The rest counts uses of the slot, so that
/// a handle comes back only after 4096 fences of the same slot.
const SLOT_BITS: u32 = 20;

/// The handle of the `use_count`-th use of a slot.
pub(super) fn pack(slot: u32, use_count: u32) -> u32 {
    (use_count << SLOT_BITS) | slot
}

/// The slot of a handle.
pub(super) fn slot(handle: u32) -> usize {
    (handle & ((1 << SLOT_BITS) - 1)) as usize
}

/// The handle for the next use of the slot that `handle` belongs to.
pub(super) fn next(handle: u32) -> u32 {
    handle.wrapping_add(1 << SLOT_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_handle_has_the_same_slot_and_another_value() {
        let mut handle = pack(77, 0);
        for _ in 0..4095 {
            let following = next(handle);
            assert!(slot(following) == 77 && following != handle);
            handle = following;
        }
        assert_eq!(next(handle), pack(77, 0));
        assert_eq!(slot(pack(LINKS_MAX as u32 - 1, 3)), LINKS_MAX - 1);
    }
}
