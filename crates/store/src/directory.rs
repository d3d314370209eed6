//! A store as a directory: `blocks` (a file, or a link to a block device) and `meta/`; the exclusive claim on it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use ashlar_engine::{Access, Durability, OpenedFile, open_direct, probe_durability};
use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags};

use crate::{FormatError, OpenError};

/// A store's files, open and claimed: nobody else can claim them while this lives.
#[derive(Debug)]
pub struct Claim {
    /// For [`crate::Part::Blocks`].
    pub blocks: OpenedFile,
    /// For [`crate::Part::Journal`].
    pub journal: Option<OpenedFile>,
    /// The index's folder.
    pub meta: PathBuf,
    /// Keep it as long as the files are used: it holds the locks.
    pub locks: ClaimLocks,
}

/// What holds a claim. The claim ends when it is dropped.
#[derive(Debug)]
pub struct ClaimLocks {
    _held: Vec<OwnedFd>,
}

/// Path of the blocks of the store in `directory`.
pub fn blocks_path(directory: &Path) -> PathBuf {
    directory.join("blocks")
}

/// Path of the index of the store in `directory`.
pub fn meta_path(directory: &Path) -> PathBuf {
    directory.join("meta")
}

/// Makes the directory and its `blocks` file of `size_bytes` where there is none. An existing file or link is left
/// alone. The file's space is reserved, except in memory-backed filesystems, where that would use
/// the memory at once.
///
/// # Errors
/// Those of the filesystem; [`FormatError::Options`] without a size where one is needed.
pub fn prepare(directory: &Path, size_bytes: Option<u64>) -> Result<(), FormatError> {
    std::fs::create_dir_all(directory)?;
    let path = blocks_path(directory);
    if std::fs::symlink_metadata(&path).is_ok() {
        return Ok(());
    }
    let size_bytes = size_bytes.ok_or_else(|| {
        FormatError::Options(format!(
            "{} does not exist, and no size was given",
            path.display()
        ))
    })?;
    make_file(&path, size_bytes)?;
    std::fs::File::open(directory)?.sync_all()?;
    Ok(())
}

/// Makes a file of `size_bytes` with its space reserved, unless it exists.
///
/// # Errors
/// Those of the filesystem.
pub fn make_file(path: &Path, size_bytes: u64) -> io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    let reserve = || -> io::Result<()> {
        if probe_durability(fd.as_fd())? != Durability::Inline {
            match rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, size_bytes) {
                Err(rustix::io::Errno::OPNOTSUPP) => {}
                done => return Ok(done?),
            }
        }
        Ok(rustix::fs::ftruncate(&fd, size_bytes)?)
    };
    let reserved = reserve();
    if reserved.is_err() {
        // Half a file would be taken for a store's the next time.
        let _ = std::fs::remove_file(path);
    }
    reserved
}

/// Claims and opens the store in `directory`, with its journal device or file if it has one.
///
/// # Errors
/// [`OpenError::InUse`] names who holds it where that can be found out.
pub fn claim(directory: &Path, journal: Option<&Path>) -> Result<Claim, OpenError> {
    let path = blocks_path(directory);
    let mut held = vec![lock(&path)?];
    let blocks = open_direct(&path, Access::ReadWrite)?;
    let journal = match journal {
        Some(journal) => {
            held.push(lock(journal)?);
            Some(open_direct(journal, Access::ReadWrite)?)
        }
        None => None,
    };
    Ok(Claim {
        blocks,
        journal,
        meta: meta_path(directory),
        locks: ClaimLocks { _held: held },
    })
}

/// Takes the exclusive lock of a file or block device. A block device is opened exclusively too, which keeps
/// mounts and other users that ask for it away.
fn lock(path: &Path) -> Result<OwnedFd, OpenError> {
    let in_use = |holder| OpenError::InUse {
        path: path.display().to_string(),
        holder,
    };
    let named = |error: io::Error| {
        OpenError::Io(io::Error::new(
            error.kind(),
            format!("{}: {error}", path.display()),
        ))
    };
    let stat = rustix::fs::stat(path).map_err(|e| named(e.into()))?;
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    let exclusive = if is_device {
        OFlags::EXCL
    } else {
        OFlags::empty()
    };
    let flags = OFlags::RDWR | OFlags::CLOEXEC | exclusive;
    let fd = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::BUSY) => return Err(in_use(None)),
        Err(error) => return Err(named(error.into())),
    };
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(fd),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(in_use(holder(stat.st_dev, stat.st_ino))),
        Err(error) => Err(named(error.into())),
    }
}

/// Who holds a lock on an inode, from /proc/locks.
fn holder(device: u64, inode: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let wanted = format!("{major:02x}:{minor:02x}:{inode}");
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let pid = locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let at = fields.iter().position(|field| *field == wanted)?;
        fields.get(at.checked_sub(1)?)?.parse::<u32>().ok()
    })?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let name = name
        .map(|name| format!(" ({})", name.trim_end()))
        .unwrap_or_default();
    Some(format!("process {pid}{name}"))
}
