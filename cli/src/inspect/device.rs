//! A store's medium that can only be read.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::Context as _;
use ashlar_engine::IoBuf;
use ashlar_store::{Device, Geometry, Index, IndexBatch, IndexKey, IndexValue, Part, Persist};

/// Files opened for reading. Nothing that is done to it reaches them.
pub struct ReadOnlyDevice {
    blocks: File,
    journal: Option<File>,
    blocks_bytes: u64,
    journal_bytes: u64,
    done: VecDeque<Done>,
}

/// A completed operation.
pub struct Done {
    /// The store's.
    pub token: u64,
    /// How it ended.
    pub result: io::Result<usize>,
    /// Its buffer.
    pub buf: Option<IoBuf>,
}

/// A file or block device and its size.
fn open(path: &Path) -> anyhow::Result<(File, u64)> {
    let attempt = || -> io::Result<(File, u64)> {
        let mut file = File::open(path)?;
        // The length of a block device is not in its metadata.
        let bytes = file.seek(SeekFrom::End(0))?;
        Ok((file, bytes))
    };
    attempt().with_context(|| format!("opening {}", path.display()))
}

impl ReadOnlyDevice {
    /// Opens `blocks` and, where it has its own place, the journal.
    ///
    /// # Errors
    /// When one cannot be opened.
    pub fn open(blocks: &Path, journal: Option<&Path>) -> anyhow::Result<ReadOnlyDevice> {
        let (blocks, blocks_bytes) = open(blocks)?;
        let (journal, journal_bytes) = match journal.map(open).transpose()? {
            Some((file, bytes)) => (Some(file), bytes),
            None => (None, 0),
        };
        Ok(ReadOnlyDevice {
            blocks,
            journal,
            blocks_bytes,
            journal_bytes,
            done: VecDeque::new(),
        })
    }

    /// The next completed operation.
    pub fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    fn refuse<T>() -> io::Result<T> {
        Err(io::Error::new(
            io::ErrorKind::ReadOnlyFilesystem,
            "the store is only inspected",
        ))
    }
}

impl Device for ReadOnlyDevice {
    fn geometry(&self, part: Part) -> Option<Geometry> {
        let size_bytes = match part {
            Part::Blocks => self.blocks_bytes,
            Part::Journal => self.journal.as_ref().map(|_| self.journal_bytes)?,
        };
        Some(Geometry {
            size_bytes,
            logical_block_bytes: 512,
        })
    }

    fn read_blocking(&mut self, part: Part, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match (part, &self.journal) {
            (Part::Journal, Some(journal)) => journal.read_exact_at(buf, offset),
            _ => self.blocks.read_exact_at(buf, offset),
        }
    }

    fn write_blocking(&mut self, _: Part, _: u64, _: &[u8]) -> io::Result<()> {
        ReadOnlyDevice::refuse()
    }

    fn sync_blocking(&mut self, _: Part) -> io::Result<()> {
        ReadOnlyDevice::refuse()
    }

    fn read(&mut self, part: Part, token: u64, offset: u64, mut buf: IoBuf, len: usize) {
        let result = self
            .read_blocking(part, offset, &mut buf[..len])
            .map(|()| len);
        self.done.push_back(Done {
            token,
            result,
            buf: Some(buf),
        });
    }

    fn write(&mut self, _: Part, token: u64, _: u64, buf: IoBuf, _: usize, _: Persist) {
        let result = ReadOnlyDevice::refuse();
        self.done.push_back(Done {
            token,
            result,
            buf: Some(buf),
        });
    }

    fn sync(&mut self, _: Part, token: u64) {
        self.done.push_back(Done {
            token,
            result: ReadOnlyDevice::refuse(),
            buf: None,
        });
    }

    fn buffer(&mut self, len: usize) -> IoBuf {
        IoBuf::new(len)
    }

    fn recycle(&mut self, _: IoBuf) {}
}

/// An index that holds nothing, so that the store goes by what the headers say.
pub struct NoIndex;

impl Index for NoIndex {
    fn load(&mut self, _: &mut dyn FnMut(IndexKey, IndexValue)) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn apply(&mut self, _: IndexBatch) {}

    fn covered(&mut self) -> io::Result<u64> {
        Ok(0)
    }
}
