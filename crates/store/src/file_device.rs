//! A device over files that does everything at once: for tools and tests.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use ashlar_engine::{IoBuf, OpenedFile};

use crate::device::{Device, Geometry, Part, Persist};

/// A completed operation, to be handed to [`crate::Store::device_completed`].
#[derive(Debug)]
pub struct FileCompleted {
    /// Of the operation.
    pub token: u64,
    /// Its result.
    pub result: io::Result<usize>,
    /// What it was given.
    pub buf: Option<IoBuf>,
}

/// Operations are carried out within the call that starts them; their completions wait in
/// [`FileDevice::next_completed`].
#[derive(Debug)]
pub struct FileDevice {
    blocks: OpenedFile,
    journal: Option<OpenedFile>,
    completed: VecDeque<FileCompleted>,
}

impl FileDevice {
    /// A device over opened files.
    pub fn new(blocks: OpenedFile, journal: Option<OpenedFile>) -> FileDevice {
        FileDevice {
            blocks,
            journal,
            completed: VecDeque::new(),
        }
    }

    /// The files again.
    pub fn into_files(self) -> (OpenedFile, Option<OpenedFile>) {
        (self.blocks, self.journal)
    }

    /// The next completed operation.
    pub fn next_completed(&mut self) -> Option<FileCompleted> {
        self.completed.pop_front()
    }

    fn file(&self, part: Part) -> io::Result<&OpenedFile> {
        match part {
            Part::Blocks => Ok(&self.blocks),
            Part::Journal => self
                .journal
                .as_ref()
                .ok_or_else(|| io::Error::other("the store has no journal device")),
        }
    }
}

impl Device for FileDevice {
    fn geometry(&self, part: Part) -> Option<Geometry> {
        let file = self.file(part).ok()?;
        Some(Geometry {
            size_bytes: file.size_bytes,
            logical_block_bytes: file.logical_block_bytes,
        })
    }

    fn read_blocking(&mut self, part: Part, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let fd = self.file(part)?.fd.as_fd();
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::pread(fd, &mut buf[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => done += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_blocking(&mut self, part: Part, offset: u64, buf: &[u8]) -> io::Result<()> {
        let fd = self.file(part)?.fd.as_fd();
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::pwrite(fd, &buf[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => done += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn sync_blocking(&mut self, part: Part) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(self.file(part)?.fd.as_fd())?)
    }

    fn read(&mut self, part: Part, token: u64, offset: u64, mut buf: IoBuf, len: usize) {
        let result = self
            .read_blocking(part, offset, &mut buf[..len])
            .map(|()| len);
        self.completed.push_back(FileCompleted {
            token,
            result,
            buf: Some(buf),
        });
    }

    fn write(
        &mut self,
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
        persist: Persist,
    ) {
        let mut result = self.write_blocking(part, offset, &buf[..len]).map(|()| len);
        if persist == Persist::Durable {
            result = result.and_then(|len| self.sync_blocking(part).map(|()| len));
        }
        self.completed.push_back(FileCompleted {
            token,
            result,
            buf: Some(buf),
        });
    }

    fn sync(&mut self, part: Part, token: u64) {
        let result = self.sync_blocking(part).map(|()| 0);
        self.completed.push_back(FileCompleted {
            token,
            result,
            buf: None,
        });
    }

    fn buffer(&mut self, len: usize) -> IoBuf {
        IoBuf::new(len)
    }

    fn recycle(&mut self, _buf: IoBuf) {}
}
