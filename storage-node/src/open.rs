//! From a directory to a running shard: claim, format where that was asked for, open, listen.

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use anyhow::{Context as _, anyhow};
use ashlar_engine::{Address, Engine, Options};
use ashlar_replication::values::DeviceId;
use ashlar_store::{
    FileDevice, FormatOptions, OpenError, OpenOptions, SledIndex, Store, Zeroed, directory,
};

use crate::device::EngineDevice;
use crate::options::{NodeOptions, StoreOptions};
use crate::shard::{Shard, ShardHandle, ShardSettings};

/// A shard that serves.
pub struct Running {
    /// Its mailbox.
    pub handle: ShardHandle,
    /// Its thread.
    pub thread: JoinHandle<anyhow::Result<()>>,
    /// Its device.
    pub device: DeviceId,
    /// Where its store lies.
    pub path: String,
    /// Where it listens.
    pub addresses: Vec<Address>,
}

struct Started {
    handle: ShardHandle,
    device: DeviceId,
    addresses: Vec<Address>,
}

/// Starts the thread of a store and waits until it listens.
///
/// # Errors
/// Whatever keeps the store from opening, with its directory.
pub fn start(store: &StoreOptions, node: &NodeOptions, id: [u8; 16]) -> anyhow::Result<Running> {
    let (sender, receiver) = sync_channel(1);
    let (options, node) = (store.clone(), node.clone());
    let work = move || -> anyhow::Result<()> {
        match open(&options, &node, id) {
            Ok((shard, started, _locks)) => {
                let _ = sender.send(Ok(started));
                let ended = shard.run();
                if let Err(error) = &ended {
                    tracing::error!(%error, store = %options.directory.display(), "the shard ended");
                }
                ended.context("the shard ended")
            }
            Err(error) => {
                let _ = sender.send(Err(error));
                Ok(())
            }
        }
    };
    let thread = std::thread::Builder::new()
        .name("ashlar-shard".into())
        .spawn(work)?;
    let path = store.directory.display().to_string();
    let started = receiver
        .recv()
        .map_err(|_| anyhow!("the shard ended at its start"))?;
    let Started {
        handle,
        device,
        addresses,
    } = started.with_context(|| format!("store {path}"))?;
    Ok(Running {
        handle,
        thread,
        device,
        path,
        addresses,
    })
}

fn open(
    options: &StoreOptions,
    node: &NodeOptions,
    id: [u8; 16],
) -> anyhow::Result<(Shard, Started, directory::ClaimLocks)> {
    if let Some(cpu) = options.cpu {
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("--cpu {cpu}"))?;
    }
    let engine_options = Options {
        kind: node.engine,
        busy_poll: node.busy_poll,
        ..Options::default()
    };
    let mut engine = Engine::new(engine_options)?;
    if let Some(notice) = engine.notice() {
        tracing::warn!("{notice}");
    }
    let claim = claim(options)?;
    let mut files = FileDevice::new(claim.blocks, claim.journal);
    let journal_bytes = options.journal_bytes.filter(|_| !claim.journal_made);
    let device = identify(&mut files, options, claim.made, journal_bytes)?;
    let (blocks, journal) = files.into_files();
    let mut medium = EngineDevice::new(&mut engine, blocks, journal)?;
    let waker = engine.waker();
    let wake = Box::new(move || waker.wake());
    let index = SledIndex::new(&claim.meta, device, wake)?;
    let store = Store::open(&mut medium, Box::new(index), OpenOptions::default())?;
    let settings = ShardSettings {
        node: id,
        ..node.shard.clone()
    };
    let (mut shard, handle) = Shard::new(engine, store, medium, settings);
    let mut addresses = Vec::new();
    for address in &options.listen {
        let actual = shard
            .listen(address)
            .with_context(|| format!("listening on {address}"))?;
        addresses.push(actual);
    }
    Ok((
        shard,
        Started {
            handle,
            device,
            addresses,
        },
        claim.locks,
    ))
}

struct Claimed {
    blocks: ashlar_engine::OpenedFile,
    journal: Option<ashlar_engine::OpenedFile>,
    meta: std::path::PathBuf,
    locks: directory::ClaimLocks,
    /// Whether the file was made just now.
    made: bool,
    /// Whether the journal's file was made just now: all of it is used then.
    journal_made: bool,
}

fn claim(options: &StoreOptions) -> anyhow::Result<Claimed> {
    let directory = &options.directory;
    let existed = std::fs::symlink_metadata(directory::blocks_path(directory)).is_ok();
    if !existed && options.format_bytes.is_none() {
        anyhow::bail!(
            "there is no store; --format-size SIZE makes one, or link `blocks` to a block device"
        );
    }
    if options.format_bytes.is_some() {
        directory::prepare(directory, options.format_bytes)?;
    }
    let mut journal_made = false;
    if let (Some(journal), Some(bytes)) = (&options.journal, options.journal_bytes)
        && !Path::new(journal).exists()
    {
        directory::make_file(journal, bytes)?;
        journal_made = true;
    }
    let claim = directory::claim(directory, options.journal.as_deref())?;
    let directory::Claim {
        blocks,
        journal,
        meta,
        locks,
    } = claim;
    Ok(Claimed {
        blocks,
        journal,
        meta,
        locks,
        made: !existed,
        journal_made,
    })
}

/// Whose device this is; a new store is laid out only where nothing at all was found.
fn identify(
    files: &mut FileDevice,
    options: &StoreOptions,
    made: bool,
    journal_bytes: Option<u64>,
) -> anyhow::Result<DeviceId> {
    match Store::identify(files) {
        Err(OpenError::NotAStore { found: None }) if options.format_bytes.is_some() => {
            let device = DeviceId(*uuid::Uuid::new_v4().as_bytes());
            let mut format = FormatOptions::new(device);
            format.journal_bytes = journal_bytes;
            format.zeroed = if made { Zeroed::Yes } else { Zeroed::No };
            Store::format(files, format)?;
            tracing::info!(%device, store = %options.directory.display(), "made a new store");
            Ok(device)
        }
        other => Ok(other?),
    }
}
