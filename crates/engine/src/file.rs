//! Files and devices: how to open them, and how their writes become durable.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

use crate::buffer::IoBuf;
use crate::core::Core;
use crate::event::Event;
use crate::slab::Key;

/// How a durable write is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Durability {
    /// Memory-backed file (tmpfs): executed on the calling thread, since it never waits, and
    /// io_uring would hand it to a worker thread. Reads too.
    Inline,
    /// File on a disk filesystem: a write linked with fdatasync. Not O_DSYNC: through io_uring on
    /// ext4 it stalled for whole ticks of 4 ms when the CPUs were busy.
    Linked,
    /// Block device: one write that bypasses or flushes the device's cache (RWF_DSYNC).
    Fua,
}

/// Whether a write must survive a loss of power when it is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Persist {
    /// It may be lost until a later sync or durable write of the same file.
    Cached,
    /// It is on stable storage when it is reported.
    Durable,
}

/// Settings of [`crate::Engine::open_file`].
#[derive(Clone, Copy, Debug)]
pub struct FileOptions {
    /// How durable writes are carried out.
    pub durability: Durability,
}

/// Whether a file is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads only.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// A file or device that was opened by [`open_direct`], and what was found out about it.
#[derive(Debug)]
pub struct OpenedFile {
    /// The descriptor.
    pub fd: OwnedFd,
    /// How durable writes should be carried out.
    pub durability: Durability,
    /// True if I/O bypasses the page cache, so that offsets, lengths and buffers must be aligned.
    pub direct: bool,
    /// Alignment in bytes that offsets and lengths need.
    pub logical_block_bytes: u32,
    /// Bytes in the file or device.
    pub size_bytes: u64,
}

/// Filesystems whose files live in memory: tmpfs, ramfs.
const MEMORY_FILESYSTEMS: [i64; 2] = [0x0102_1994, 0x8584_58f6];
/// Assumed where the system cannot say (kernels before 6.1).
const ALIGNMENT_BYTES: u32 = 4096;

/// Opens an existing file or block device, past the page cache where the filesystem allows.
///
/// # Errors
/// Those of opening and looking at it; [`io::ErrorKind::InvalidInput`] when it is neither a
/// regular file nor a block device.
pub fn open_direct(path: &Path, access: Access) -> io::Result<OpenedFile> {
    let mode = match access {
        Access::ReadOnly => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
    };
    let flags = mode | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty())?;
    let durability = probe_durability(fd.as_fd())?;
    if durability == Durability::Inline {
        return describe(fd, durability, false);
    }
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Ok(direct) => describe(direct, durability, true),
        Err(rustix::io::Errno::INVAL) => describe(fd, durability, false),
        Err(error) => Err(error.into()),
    }
}

/// How durable writes to an open file should be carried out.
///
/// # Errors
/// Those of looking at it; [`io::ErrorKind::InvalidInput`] when it is neither a regular file nor a
/// block device.
pub fn probe_durability(fd: BorrowedFd<'_>) -> io::Result<Durability> {
    let mode = rustix::fs::fstat(fd)?.st_mode;
    match FileType::from_raw_mode(mode) {
        FileType::BlockDevice => Ok(Durability::Fua),
        FileType::RegularFile => {
            let magic = rustix::fs::fstatfs(fd)?.f_type as i64;
            let in_memory = MEMORY_FILESYSTEMS.contains(&magic);
            Ok(if in_memory {
                Durability::Inline
            } else {
                Durability::Linked
            })
        }
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "neither a regular file nor a block device",
        )),
    }
}

fn describe(fd: OwnedFd, durability: Durability, direct: bool) -> io::Result<OpenedFile> {
    let (logical_block_bytes, size_bytes) = if durability == Durability::Fua {
        let size_bytes = rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0))?;
        (rustix::fs::ioctl_blksszget(&fd)?, size_bytes)
    } else {
        let alignment = if direct {
            direct_alignment(fd.as_fd())
        } else {
            1
        };
        (alignment, rustix::fs::fstat(&fd)?.st_size as u64)
    };
    Ok(OpenedFile {
        fd,
        durability,
        direct,
        logical_block_bytes,
        size_bytes,
    })
}

fn direct_alignment(fd: BorrowedFd<'_>) -> u32 {
    // SAFETY: statx of zeros is valid, and the empty path with AT_EMPTY_PATH means `fd`.
    let stat = unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        let path = c"".as_ptr();
        let mask = libc::STATX_DIOALIGN;
        let done = libc::statx(fd.as_raw_fd(), path, libc::AT_EMPTY_PATH, mask, &mut stat);
        if done != 0 || stat.stx_mask & mask == 0 {
            return ALIGNMENT_BYTES;
        }
        stat
    };
    if stat.stx_dio_offset_align == 0 {
        ALIGNMENT_BYTES
    } else {
        stat.stx_dio_offset_align
    }
}

/// A file that an engine holds.
pub(crate) struct File {
    pub(crate) fd: OwnedFd,
    pub(crate) durability: Durability,
    /// Operations that use the descriptor; it is closed with the last one.
    pub(crate) operations: usize,
    pub(crate) closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Read,
    Write(Persist),
    Sync,
}

/// A read, write or sync on its way.
pub(crate) struct Operation {
    pub(crate) token: u64,
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) buf: Option<IoBuf>,
    pub(crate) len: usize,
    /// Bytes done by earlier attempts.
    pub(crate) done: usize,
}

impl Operation {
    /// The part of the buffer that is left to do. Empty for a sync.
    pub(crate) fn rest(&mut self) -> (*mut u8, usize, u64) {
        match &mut self.buf {
            // SAFETY: `done` ≤ `len` ≤ the buffer's length.
            Some(buf) => unsafe {
                let memory = buf.as_mut_ptr().add(self.done);
                (memory, self.len - self.done, self.offset + self.done as u64)
            },
            None => (std::ptr::null_mut(), 0, 0),
        }
    }

    /// Takes the result of an attempt. Some: nothing is left to do but report this.
    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> Option<io::Result<usize>> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
            Err(error) => Some(Err(error)),
            Ok(0) if self.done < self.len => Some(Err(match self.action {
                Action::Read => io::ErrorKind::UnexpectedEof.into(),
                _ => io::ErrorKind::WriteZero.into(),
            })),
            Ok(bytes) => {
                self.done += bytes;
                (self.done >= self.len).then_some(Ok(self.done))
            }
        }
    }

    /// Carries the operation out on this thread.
    pub(crate) fn run(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        if self.action == Action::Sync {
            return rustix::io::retry_on_intr(|| rustix::fs::fdatasync(fd))
                .map(|()| 0)
                .map_err(Into::into);
        }
        loop {
            let (memory, len, offset) = self.rest();
            // SAFETY: `rest` is a part of the buffer that this operation owns.
            let result = unsafe { attempt(fd, self.action, memory, len, offset) };
            if let Some(result) = self.advance(result) {
                return result;
            }
        }
    }
}

/// One system call.
///
/// # Safety
/// `len` bytes at `memory` are valid for reads, and for a read action for writes.
unsafe fn attempt(
    fd: BorrowedFd<'_>,
    action: Action,
    memory: *mut u8,
    len: usize,
    offset: u64,
) -> io::Result<usize> {
    let piece = libc::iovec {
        iov_base: memory.cast(),
        iov_len: len,
    };
    let (fd, offset) = (fd.as_raw_fd(), offset as libc::off64_t);
    // SAFETY: the caller vouches for the memory.
    let done = unsafe {
        match action {
            Action::Write(Persist::Durable) => {
                libc::pwritev2(fd, &piece, 1, offset, libc::RWF_DSYNC)
            }
            Action::Write(Persist::Cached) => libc::pwrite64(fd, memory.cast(), len, offset),
            _ => libc::pread64(fd, memory.cast(), len, offset),
        }
    };
    if done < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(done as usize)
    }
}

/// Reports the result of an operation.
pub(crate) fn finish(core: &mut Core, file: Key, operation: Operation, result: io::Result<usize>) {
    let Operation { token, buf, .. } = operation;
    core.ready.push_back(Event::File { token, result, buf });
    if let Some(entry) = core.files.get_mut(file) {
        entry.operations -= 1;
        if entry.closed && entry.operations == 0 {
            core.files.remove(file);
        }
    }
}
