//! The structures on the device, byte by byte in docs/disk-format.md: pure encoding and decoding.

pub(crate) mod checkpoint_page;
pub(crate) mod extent_header;
pub(crate) mod hole_page;
pub(crate) mod layout;
pub(crate) mod page;
pub(crate) mod superblock;
pub(crate) mod volume_header;

#[cfg(test)]
mod tests;
