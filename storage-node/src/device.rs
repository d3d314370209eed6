//! The store's device over the engine: operations are collected while a turn's frames are handled
//! and handed to the engine at its end, so that frames can be read in place from its buffers.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use ashlar_engine::{Engine, FileId, FileOptions, IoBuf, OpenedFile};
use ashlar_store::{Device, Geometry, Part, Persist};

/// Buffers kept for reuse, per size class.
const POOL_BUFFERS_MAX: usize = 64;
/// Bytes kept for reuse in all.
const POOL_BYTES_MAX: usize = 8 << 20;

enum Operation {
    Read {
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
    },
    Write {
        part: Part,
        token: u64,
        offset: u64,
        buf: IoBuf,
        len: usize,
        persist: Persist,
    },
    Sync {
        part: Part,
        token: u64,
    },
}

/// One file or block device: the engine's handle, and a descriptor for blocking access at open.
struct Medium {
    file: FileId,
    fd: OwnedFd,
    geometry: Geometry,
}

/// The medium of a store on an engine.
pub struct EngineDevice {
    blocks: Medium,
    journal: Option<Medium>,
    operations: Vec<Operation>,
    pool: Vec<IoBuf>,
    pool_bytes: usize,
    /// Bytes written to the device since the start.
    pub bytes_written: u64,
    /// Bytes read from the device since the start.
    pub bytes_read: u64,
}

impl EngineDevice {
    /// Hands opened files to the engine.
    ///
    /// # Errors
    /// When a descriptor cannot be duplicated.
    pub fn new(
        engine: &mut Engine,
        blocks: OpenedFile,
        journal: Option<OpenedFile>,
    ) -> io::Result<EngineDevice> {
        let mut medium = |opened: OpenedFile| -> io::Result<Medium> {
            let geometry = Geometry {
                size_bytes: opened.size_bytes,
                logical_block_bytes: opened.logical_block_bytes,
            };
            let fd = opened.fd.try_clone()?;
            let options = FileOptions {
                durability: opened.durability,
            };
            Ok(Medium {
                file: engine.open_file(opened.fd, options),
                fd,
                geometry,
            })
        };
        let blocks = medium(blocks)?;
        let journal = journal.map(medium).transpose()?;
        Ok(EngineDevice {
            blocks,
            journal,
            operations: Vec::with_capacity(64),
            pool: Vec::with_capacity(POOL_BUFFERS_MAX),
            pool_bytes: 0,
            bytes_written: 0,
            bytes_read: 0,
        })
    }

    fn medium(&self, part: Part) -> &Medium {
        match part {
            Part::Blocks => &self.blocks,
            // A store without a journal device never asks for it.
            Part::Journal => self.journal.as_ref().unwrap_or(&self.blocks),
        }
    }

    /// Starts what was collected.
    pub fn flush(&mut self, engine: &mut Engine) {
        let mut operations = core::mem::take(&mut self.operations);
        for operation in operations.drain(..) {
            match operation {
                Operation::Read {
                    part,
                    token,
                    offset,
                    buf,
                    len,
                } => {
                    self.bytes_read += len as u64;
                    engine.read(self.medium(part).file, token, offset, buf, len);
                }
                Operation::Write {
                    part,
                    token,
                    offset,
                    buf,
                    len,
                    persist,
                } => {
                    self.bytes_written += len as u64;
                    engine.write(self.medium(part).file, token, offset, buf, len, persist);
                }
                Operation::Sync { part, token } => engine.sync(self.medium(part).file, token),
            }
        }
        self.operations = operations;
    }
}

impl Device for EngineDevice {
    fn geometry(&self, part: Part) -> Option<Geometry> {
        match part {
            Part::Blocks => Some(self.blocks.geometry),
            Part::Journal => self.journal.as_ref().map(|journal| journal.geometry),
        }
    }

    fn read_blocking(&mut self, part: Part, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            match rustix::io::pread(self.medium(part).fd.as_fd(), &mut buf[done..], at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    fn write_blocking(&mut self, part: Part, offset: u64, buf: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            match rustix::io::pwrite(self.medium(part).fd.as_fd(), &buf[done..], at)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => done += written,
            }
        }
        Ok(())
    }

    fn sync_blocking(&mut self, part: Part) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(self.medium(part).fd.as_fd())?)
    }

    fn read(&mut self, part: Part, token: u64, offset: u64, buf: IoBuf, len: usize) {
        self.operations.push(Operation::Read {
            part,
            token,
            offset,
            buf,
            len,
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
        self.operations.push(Operation::Write {
            part,
            token,
            offset,
            buf,
            len,
            persist,
        });
    }

    fn sync(&mut self, part: Part, token: u64) {
        self.operations.push(Operation::Sync { part, token });
    }

    fn buffer(&mut self, len: usize) -> IoBuf {
        // The smallest that fits, and not one of many times the size.
        let fits = |b: &IoBuf| b.capacity() >= len && b.capacity() <= len.max(4096) * 4;
        let best = self.pool.iter().enumerate().filter(|(_, b)| fits(b));
        match best.min_by_key(|(_, b)| b.capacity()).map(|(n, _)| n) {
            Some(n) => {
                let mut buf = self.pool.swap_remove(n);
                self.pool_bytes -= buf.capacity();
                buf.set_len(len);
                buf
            }
            None => IoBuf::new(len),
        }
    }

    fn recycle(&mut self, buf: IoBuf) {
        let bytes = buf.capacity();
        if self.pool.len() < POOL_BUFFERS_MAX && self.pool_bytes + bytes <= POOL_BYTES_MAX {
            self.pool_bytes += bytes;
            self.pool.push(buf);
        }
    }
}
