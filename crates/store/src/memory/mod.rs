//! What an open store keeps in memory.

pub(crate) mod bits;
pub(crate) mod extents;
pub(crate) mod pages;
pub(crate) mod slots;
pub(crate) mod table;
