//! The index in sled, written by a thread of its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ashlar_replication::values::{DeviceId, ExtentIndex};

use super::{Index, IndexBatch, IndexChange, IndexKey, IndexValue};

/// Bytes that sled may cache: entries are read once, at open.
const CACHE_BYTES: u64 = 8 << 20;
/// Entries start with this byte, [`META`] with another.
const ENTRY: u8 = b'e';
/// What the index covers, and of which device it is.
const META: &[u8] = b"meta";
const KEY_BYTES: usize = 1 + 4 + 8 + 8;
const VALUE_BYTES: usize = 4 + 8 + 8 + 1;

/// The index of a store in a folder. sled's `flush()` is no fsync, so the files are synced here before a
/// batch counts as durable.
///
/// A panic inside sled while it opens would come again at every start. A marker file, which exists while
/// it opens, shows that it happened: the next start throws the database away and rebuilds it.
pub struct SledIndex {
    folder: PathBuf,
    device: DeviceId,
    shared: Arc<Shared>,
    wake: Option<Box<dyn Fn() + Send>>,
    batches: Option<Sender<IndexBatch>>,
    thread: Option<JoinHandle<()>>,
}

/// What all entries come to: an index that lost one, or got one back, must not be believed, because what it
/// does not name reads as zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Summary {
    count: u64,
    sum: u64,
}

impl Summary {
    fn of(key: &[u8], value: &[u8]) -> u64 {
        let low = crc32c::crc32c_append(crc32c::crc32c(key), value);
        let high = crc32c::crc32c_append(crc32c::crc32c(value), key);
        u64::from(high) << 32 | u64::from(low)
    }

    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.count = self.count.wrapping_add(1);
        self.sum = self.sum.wrapping_add(Summary::of(key, value));
    }

    fn remove(&mut self, key: &[u8], value: &[u8]) {
        self.count = self.count.wrapping_sub(1);
        self.sum = self.sum.wrapping_sub(Summary::of(key, value));
    }
}

#[derive(Default)]
struct Shared {
    covered: AtomicU64,
    failed: AtomicBool,
}

impl SledIndex {
    /// The index in `folder` of the store on `device`. `wake` is called on the index's thread when a batch has become
    /// durable or the index has failed.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn new(
        folder: &Path,
        device: DeviceId,
        wake: Box<dyn Fn() + Send>,
    ) -> io::Result<SledIndex> {
        std::fs::create_dir_all(folder)?;
        Ok(SledIndex {
            folder: folder.to_owned(),
            device,
            shared: Arc::default(),
            wake: Some(wake),
            batches: None,
            thread: None,
        })
    }

    fn start(&mut self, db: Option<sled::Db>, content: Summary) {
        let (sender, receiver) = channel();
        let worker = Worker {
            folder: self.folder.clone(),
            device: self.device,
            shared: Arc::clone(&self.shared),
            db,
            content,
        };
        let wake = self.wake.take().expect("the index is loaded once");
        let thread = std::thread::Builder::new()
            .name("ashlar-index".into())
            .spawn(move || worker.run(&receiver, &*wake));
        match thread {
            Ok(thread) => (self.thread, self.batches) = (Some(thread), Some(sender)),
            Err(_) => self.shared.failed.store(true, Ordering::Release),
        }
    }
}

impl Index for SledIndex {
    fn load(&mut self, visit: &mut dyn FnMut(IndexKey, IndexValue)) -> io::Result<Option<u64>> {
        let loaded = open(&self.folder).and_then(|db| {
            let found = read(&db, self.device, visit)?;
            Ok((db, found))
        });
        let (db, content, result) = match loaded {
            Ok((db, Some((covers, content)))) => (Some(db), content, Ok(Some(covers))),
            Ok((_, None)) => (None, Summary::default(), Ok(None)),
            Err(error) => (None, Summary::default(), Err(error)),
        };
        if let Ok(Some(covered)) = result {
            self.shared.covered.store(covered, Ordering::Release);
        }
        self.start(db, content);
        result
    }

    fn apply(&mut self, batch: IndexBatch) {
        if let Some(batches) = &self.batches
            && batches.send(batch).is_err()
        {
            self.shared.failed.store(true, Ordering::Release);
        }
    }

    fn covered(&mut self) -> io::Result<u64> {
        if self.shared.failed.load(Ordering::Acquire) {
            return Err(io::Error::other(
                "the index has failed; it is rebuilt at the next open",
            ));
        }
        Ok(self.shared.covered.load(Ordering::Acquire))
    }
}

impl Drop for SledIndex {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has failed the index already, which is all that it means.
            let _ = thread.join();
        }
    }
}

struct Worker {
    folder: PathBuf,
    device: DeviceId,
    shared: Arc<Shared>,
    db: Option<sled::Db>,
    content: Summary,
}

impl Worker {
    fn run(mut self, batches: &Receiver<IndexBatch>, wake: &dyn Fn()) {
        while let Ok(batch) = batches.recv() {
            let covers = batch.covers;
            if self.shared.failed.load(Ordering::Acquire) {
                continue;
            }
            match self.apply(batch) {
                Ok(()) => self.shared.covered.store(covers, Ordering::Release),
                Err(_) => self.shared.failed.store(true, Ordering::Release),
            }
            wake();
        }
    }

    fn apply(&mut self, batch: IndexBatch) -> io::Result<()> {
        if batch.clear || self.db.is_none() {
            self.db = None;
            remove(&self.folder)?;
            if !batch.clear {
                // Without what was in it the index is not complete: leave it empty.
                return Err(io::Error::other("there is no database"));
            }
            self.db = Some(open(&self.folder)?);
            self.content = Summary::default();
        }
        let db = self.db.as_ref().expect("opened above");
        let mut changes: BTreeMap<Vec<u8>, Option<[u8; VALUE_BYTES]>> = BTreeMap::new();
        for change in &batch.changes {
            match change {
                IndexChange::Put(key, value) => {
                    changes.insert(encode_key(key).to_vec(), Some(encode_value(value)));
                }
                IndexChange::Remove(key) => {
                    changes.insert(encode_key(key).to_vec(), None);
                }
                IndexChange::RemoveReplica { replica, nonce } => {
                    let extent = ExtentIndex(0);
                    let key = encode_key(&IndexKey {
                        replica: *replica,
                        nonce: *nonce,
                        extent,
                    });
                    let prefix = &key[..KEY_BYTES - 8];
                    for (key, value) in changes.range_mut(prefix.to_vec()..) {
                        if !key.starts_with(prefix) {
                            break;
                        }
                        *value = None;
                    }
                    for found in db.scan_prefix(prefix).keys() {
                        changes.insert(found.map_err(to_io)?.to_vec(), None);
                    }
                }
            }
        }
        let mut out = sled::Batch::default();
        for (key, value) in &changes {
            if let Some(old) = db.get(key).map_err(to_io)? {
                self.content.remove(key, &old);
            }
            match value {
                Some(value) => {
                    self.content.add(key, value);
                    out.insert(&key[..], &value[..]);
                }
                None => out.remove(&key[..]),
            }
        }
        let mut meta = batch.covers.to_le_bytes().to_vec();
        meta.extend_from_slice(&self.device.0);
        meta.extend_from_slice(&self.content.count.to_le_bytes());
        meta.extend_from_slice(&self.content.sum.to_le_bytes());
        out.insert(META, meta);
        db.apply_batch(out).map_err(to_io)?;
        db.flush().map_err(to_io)?;
        sync_all(&database(&self.folder))
    }
}

fn to_io(error: sled::Error) -> io::Error {
    match error {
        sled::Error::Io(error) => error,
        other => io::Error::other(other),
    }
}

fn database(folder: &Path) -> PathBuf {
    folder.join("index")
}

/// Opens the database, after throwing away one that the process did not survive the last time.
fn open(folder: &Path) -> io::Result<sled::Db> {
    let marker = folder.join("opening");
    if marker.exists() {
        remove(folder)?;
    }
    File::create(&marker)?;
    let db = sled::Config::new()
        .path(database(folder))
        .cache_capacity(CACHE_BYTES)
        .flush_every_ms(None)
        .mode(sled::Mode::LowSpace)
        .open()
        .map_err(to_io);
    std::fs::remove_file(&marker)?;
    db
}

fn remove(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(database(folder)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// fsyncs every file and folder below `path`.
fn sync_all(path: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_all(&entry.path())?;
        } else {
            match File::open(entry.path()) {
                // sled removes what it has replaced meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                file => file?.sync_all()?,
            }
        }
    }
    File::open(path)?.sync_all()
}

fn read(
    db: &sled::Db,
    device: DeviceId,
    visit: &mut dyn FnMut(IndexKey, IndexValue),
) -> io::Result<Option<(u64, Summary)>> {
    let Some(meta) = db.get(META).map_err(to_io)? else {
        return Ok(None);
    };
    let Some((covers, of)) = meta.split_first_chunk::<8>() else {
        return Ok(None);
    };
    let Some((of, rest)) = of.split_first_chunk::<16>() else {
        return Ok(None);
    };
    if *of != device.0 {
        return Ok(None);
    }
    let mut found = Summary::default();
    for item in db.scan_prefix([ENTRY]) {
        let (key, value) = item.map_err(to_io)?;
        found.add(&key, &value);
        let entry = decode_key(&key).zip(decode_value(&value));
        let (key, value) = entry.ok_or_else(|| io::Error::other("an entry has another size"))?;
        visit(key, value);
    }
    let expected: Vec<u8> = found
        .count
        .to_le_bytes()
        .into_iter()
        .chain(found.sum.to_le_bytes())
        .collect();
    if rest != expected {
        return Err(io::Error::other(
            "entries are missing, or there are too many",
        ));
    }
    Ok(Some((u64::from_le_bytes(*covers), found)))
}

/// Big-endian, so that entries of a replica lie together in the order of extents.
fn encode_key(key: &IndexKey) -> [u8; KEY_BYTES] {
    let mut out = [ENTRY; KEY_BYTES];
    out[1..5].copy_from_slice(&key.replica.to_be_bytes());
    out[5..13].copy_from_slice(&key.nonce.to_be_bytes());
    out[13..].copy_from_slice(&key.extent.0.to_be_bytes());
    out
}

fn decode_key(bytes: &[u8]) -> Option<IndexKey> {
    let bytes: &[u8; KEY_BYTES] = bytes.try_into().ok()?;
    let [_, a, b, c, d, rest @ ..] = *bytes;
    let (nonce, extent) = rest.split_first_chunk::<8>()?;
    Some(IndexKey {
        replica: u32::from_be_bytes([a, b, c, d]),
        nonce: u64::from_be_bytes(*nonce),
        extent: ExtentIndex(u64::from_be_bytes(extent.try_into().ok()?)),
    })
}

fn encode_value(value: &IndexValue) -> [u8; VALUE_BYTES] {
    let mut out = [0; VALUE_BYTES];
    out[..4].copy_from_slice(&value.slot.to_le_bytes());
    out[4..12].copy_from_slice(&value.position_max.to_le_bytes());
    out[12..20].copy_from_slice(&value.lsn.to_le_bytes());
    out[20] = u8::from(value.torn);
    out
}

fn decode_value(bytes: &[u8]) -> Option<IndexValue> {
    let (slot, rest) = bytes.split_first_chunk::<4>()?;
    let (position_max, rest) = rest.split_first_chunk::<8>()?;
    let (lsn, rest) = rest.split_first_chunk::<8>()?;
    let [torn] = *rest else { return None };
    Some(IndexValue {
        slot: u32::from_le_bytes(*slot),
        position_max: u64::from_le_bytes(*position_max),
        lsn: u64::from_le_bytes(*lsn),
        torn: torn != 0,
    })
}

#[cfg(test)]
#[path = "on_sled_tests.rs"]
mod tests;
