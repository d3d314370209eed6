//! The file that a baseline reads and writes: direct where the filesystem allows it, zeroed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use crate::bench::pattern::AlignedBuffer;

/// `O_DIRECT`, in the form that `OpenOptionsExt::custom_flags` wants.
fn direct_flag() -> i32 {
    rustix::fs::OFlags::DIRECT.bits() as i32
}

/// Makes a file of `size_bytes` whose every byte was written: an allocation inside a measured
/// write would cost the filesystem's own journal a commit.
///
/// # Errors
/// When it cannot be made.
pub fn create(path: &Path, size_bytes: u64) -> io::Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    let chunk = AlignedBuffer::noise(1 << 20, size_bytes);
    let mut offset = 0;
    while offset < size_bytes {
        let len = (size_bytes - offset).min(chunk.len() as u64);
        file.write_all_at(&chunk[..len as usize], offset)?;
        offset += len;
    }
    file.sync_all()?;
    open(path)
}

/// Opens it for direct I/O; where the filesystem knows none, without.
///
/// # Errors
/// When it cannot be opened.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    match options.clone().custom_flags(direct_flag()).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => options.open(path),
        result => result,
    }
}
