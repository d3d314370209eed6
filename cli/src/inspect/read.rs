//! Opens a store without writing to it and reads what it holds.

use anyhow::{Context as _, bail};
use ashlar_replication::message::TornBlocks;
use ashlar_replication::values::{BlockRange, EXTENT_BLOCKS, ExtentIndex};
use ashlar_store::{Completion, Device as _, OpenOptions, Outcome, Part, ReplicaSlot, Store};

use super::device::{NoIndex, ReadOnlyDevice};
use super::{InspectArgs, InspectedReplica, Inspection};
use crate::output;

/// The most bad blocks that are named.
const NAMED_MAX: usize = 100;
/// Extents that one question for digests covers.
const DIGESTS: u32 = 4096;
/// A node that runs may write a header while it is read; it is whole at the next try.
const TRIES: usize = 3;

/// Reads the store that `args` names.
///
/// # Errors
/// When there is none, or it cannot be read.
pub fn inspect(args: &InspectArgs) -> anyhow::Result<Inspection> {
    let blocks = args.store.join("blocks");
    if !blocks.exists() {
        bail!(
            "{} is no store: it has no file or link called blocks",
            args.store.display()
        );
    }
    let mut dev = ReadOnlyDevice::open(&blocks, args.journal.as_deref())?;
    let mut tries = 0;
    let mut store = loop {
        tries += 1;
        match Store::open(&mut dev, Box::new(NoIndex), OpenOptions::default()) {
            Ok(store) => break store,
            Err(_) if tries < TRIES => {}
            Err(error) => {
                return Err(error).with_context(|| format!("opening {}", args.store.display()));
            }
        }
    };
    let usage = store.usage();
    let slots: Vec<_> = store.replicas().map(|(slot, _)| slot).collect();
    let mut replicas = Vec::new();
    for slot in slots {
        let Some(replica) = store.replica(slot) else {
            continue;
        };
        let size_blocks = replica.size_blocks;
        let mut inspected = InspectedReplica::new(replica);
        if args.verify && inspected.role == "data" {
            let (checked, bad) = Reader {
                store: &mut store,
                dev: &mut dev,
            }
            .verify(slot, size_blocks)
            .with_context(|| format!("reading volume {}", inspected.volume_id))?;
            inspected.blocks_checked = Some(checked);
            inspected.bad_blocks = Some(bad);
        }
        replicas.push(inspected);
    }
    Ok(Inspection {
        path: args.store.display().to_string(),
        device_id: store.device_id().to_string(),
        size_bytes: dev.geometry(Part::Blocks).map_or(0, |g| g.size_bytes),
        extents_total: usage.extents,
        extents_free: usage.extents_free,
        journal_bytes: usage.journal_bytes,
        journal_used_bytes: usage.journal_used_bytes,
        replicas,
    })
}

struct Reader<'a> {
    store: &'a mut Store,
    dev: &'a mut ReadOnlyDevice,
}

impl Reader<'_> {
    /// Brings what was started to its end.
    fn finish(&mut self) -> anyhow::Result<Outcome> {
        loop {
            if let Some(Completion { outcome, .. }) = self.store.next_completion() {
                return Ok(outcome);
            }
            self.store.submit(self.dev);
            let done = self
                .dev
                .next_done()
                .context("the store waits for nothing")?;
            self.store
                .device_completed(self.dev, done.token, done.result, done.buf);
        }
    }

    /// Reads every block of a replica: how many, and which of them are bad.
    fn verify(&mut self, slot: ReplicaSlot, size_blocks: u64) -> anyhow::Result<(u64, Vec<u64>)> {
        let extents = size_blocks.div_ceil(u64::from(EXTENT_BLOCKS));
        let bar = output::progress_bar(extents, "checking");
        let (mut checked, mut bad) = (0, Vec::new());
        for from in (0..extents).step_by(DIGESTS as usize) {
            let count = u32::try_from((extents - from).min(DIGESTS.into()))?;
            self.store
                .digests(self.dev, 0, slot, ExtentIndex(from), count)?;
            let Outcome::Digests(held) = self.finish()? else {
                bail!("an answer of another kind")
            };
            for (extent, _) in held? {
                let start = extent.first_block();
                let count = (size_blocks - start.0).min(EXTENT_BLOCKS.into());
                let range = BlockRange {
                    start,
                    count: u32::try_from(count)?,
                };
                checked += count;
                if !self.is_good(slot, range)? {
                    for block in range.blocks() {
                        if !self.is_good(
                            slot,
                            BlockRange {
                                start: block,
                                count: 1,
                            },
                        )? && bad.len() < NAMED_MAX
                        {
                            bad.push(block.0);
                        }
                    }
                }
                bar.set_position(extent.0);
            }
        }
        bar.finish_and_clear();
        Ok((checked, bad))
    }

    fn is_good(&mut self, slot: ReplicaSlot, range: BlockRange) -> anyhow::Result<bool> {
        self.store
            .read(self.dev, 0, slot, range, TornBlocks::Refuse)?;
        match self.finish()? {
            Outcome::Read(Ok(outcome)) => {
                self.store.recycle(self.dev, outcome);
                Ok(true)
            }
            Outcome::Read(Err(_)) => Ok(false),
            _ => bail!("an answer of another kind"),
        }
    }
}
