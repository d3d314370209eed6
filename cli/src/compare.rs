//! `ashlar replicas compare`: are all copies equal, block by block, while I/O goes on?

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use ashlar_control_api::storage_node::{DescribeBlocksRequest, DescribeBlocksResponse};
use ashlar_replication::values::{EXTENT_BLOCKS, EXTENT_BYTES, Position};
use clap::Subcommand;
use indicatif::ProgressBar;
use serde::Serialize;
use tonic::Streaming;

use crate::context::Context;
use crate::control;
use crate::output::{self, Outcome};
use crate::state::{MemberRecord, VolumeRecord};

/// How often blocks that differ are looked at again before they count as different although they
/// still move: a block that is written all the time is equal at some of so many looks.
const ROUNDS_MAX: u32 = 60;
/// Looks at which a block must differ in exactly the same way: then no write is in flight to it.
const STILL_ROUNDS: u32 = 6;
/// Between two looks: longer than a replica in the stream lags behind.
const PAUSE: Duration = Duration::from_millis(250);
/// The most differing blocks that are named in the output.
const NAMED_MAX: usize = 20;

/// `ashlar replicas …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compares all replicas of a volume without stopping its I/O. Exit code 1 when they differ.
    Compare {
        /// The volume's name.
        name: String,
        /// Read every block on every replica and check it against its checksum, too.
        #[arg(long)]
        verify_data: bool,
    },
}

/// The output of `replicas compare`.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The volume's name.
    pub volume: String,
    /// Whether all replicas hold the same, and no block is bad.
    pub equal: bool,
    /// Replicas compared.
    pub replicas: usize,
    /// Blocks of the volume.
    pub blocks_total: u64,
    /// Blocks that at least one replica holds a write of.
    pub blocks_written: u64,
    /// Blocks that were looked at again because a write was in flight.
    pub blocks_moving: u64,
    /// Blocks that differ and stay so.
    pub blocks_different: u64,
    /// Blocks whose data does not match its checksum (with --verify-data).
    pub blocks_bad: u64,
    /// The first of the differing and bad blocks.
    pub differences: Vec<Difference>,
}

/// A block that differs.
#[derive(Debug, Serialize)]
pub struct Difference {
    /// Its index in the volume.
    pub block: u64,
    /// What each replica holds.
    pub replicas: Vec<BlockOnReplica>,
}

/// A block on one replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockOnReplica {
    /// UUID of the device.
    pub device_id: String,
    /// Position of its last write, "EPOCH.SEQUENCE".
    pub position: String,
    /// CRC-32C of its data.
    pub crc: u32,
    /// Whether the data does not match the checksum.
    pub bad: bool,
}

/// Position, checksum and badness of the blocks of one extent on one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Extent {
    positions: Vec<u64>,
    crcs: Vec<u32>,
    bad: BTreeSet<u32>,
}

/// CRC-32C of a block of zeros, which is what a block nobody wrote counts as.
const ZERO_BLOCK_CRC: u32 = 0x98f9_4189;

impl Extent {
    fn empty() -> Extent {
        let blocks = EXTENT_BLOCKS as usize;
        Extent {
            positions: vec![0; blocks],
            crcs: vec![ZERO_BLOCK_CRC; blocks],
            bad: BTreeSet::new(),
        }
    }

    fn read(message: DescribeBlocksResponse) -> anyhow::Result<Extent> {
        let blocks = EXTENT_BLOCKS as usize;
        ensure!(
            message.positions.len() == blocks && message.crcs.len() == blocks,
            "a description of an extent with {} positions and {} checksums",
            message.positions.len(),
            message.crcs.len()
        );
        let bad = message.bad_blocks.into_iter().collect();
        Ok(Extent {
            positions: message.positions,
            crcs: message.crcs,
            bad,
        })
    }

    fn block(&self, within: u32) -> (u64, u32) {
        (self.positions[within as usize], self.crcs[within as usize])
    }
}

/// What one look at an extent says about its blocks, one value per replica.
#[derive(Debug, Default)]
struct Look {
    written: u64,
    different: Vec<u32>,
    bad: Vec<u32>,
}

fn look(extents: &[Extent]) -> Look {
    let mut look = Look::default();
    for within in 0..EXTENT_BLOCKS {
        let first = extents[0].block(within);
        look.written += u64::from(extents.iter().any(|e| e.block(within).0 != 0));
        if extents.iter().any(|e| e.block(within) != first) {
            look.different.push(within);
        }
        if extents.iter().any(|e| e.bad.contains(&within)) {
            look.bad.push(within);
        }
    }
    look
}

/// Runs the command.
///
/// # Errors
/// When a replica cannot be read.
pub fn run(context: &Context, command: Command) -> anyhow::Result<Outcome> {
    let Command::Compare { name, verify_data } = command;
    let volume = context.state.volume(&name)?;
    let comparison = compare(&volume, verify_data)?;
    output::print(context.format, &comparison, report)?;
    Ok(if comparison.equal {
        Outcome::Good
    } else {
        Outcome::Bad
    })
}

/// Compares the data members of `volume`.
///
/// # Errors
/// When one of them cannot be read.
pub fn compare(volume: &VolumeRecord, verify_data: bool) -> anyhow::Result<Comparison> {
    let extents = volume.size_bytes.div_ceil(EXTENT_BYTES);
    let bar = output::progress_bar(extents, "comparing");
    let result = control::block_on(compare_all(volume, verify_data, &bar));
    bar.finish_and_clear();
    result
}

async fn compare_all(
    volume: &VolumeRecord,
    verify_data: bool,
    bar: &ProgressBar,
) -> anyhow::Result<Comparison> {
    let members: Vec<_> = volume.data_members().cloned().collect();
    let mut comparison = Comparison {
        volume: volume.name.clone(),
        equal: true,
        replicas: members.len(),
        blocks_total: volume.size_bytes.div_ceil(4096),
        blocks_written: 0,
        blocks_moving: 0,
        blocks_different: 0,
        blocks_bad: 0,
        differences: Vec::new(),
    };
    let mut streams = Vec::new();
    for member in &members {
        streams.push(Extents::open(volume, member, (0, 0), verify_data).await?);
    }
    // Extents where something differs at the first look: looked at again below.
    let mut suspects: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    while let Some(index) = streams
        .iter()
        .filter_map(|s| s.next.as_ref().map(|n| n.0))
        .min()
    {
        let mut row = Vec::with_capacity(streams.len());
        for stream in &mut streams {
            row.push(stream.take(index).await?);
        }
        let look = look(&row);
        comparison.blocks_written += look.written;
        for within in &look.bad {
            comparison.blocks_bad += 1;
            note(&mut comparison, index, *within, &members, &row);
        }
        if !look.different.is_empty() {
            comparison.blocks_moving += look.different.len() as u64;
            suspects.insert(index, look.different);
        }
        bar.set_position(index + 1);
    }
    look_again(volume, &members, suspects, &mut comparison).await?;
    comparison.equal = comparison.blocks_different == 0 && comparison.blocks_bad == 0;
    Ok(comparison)
}

/// Looks at the suspects until they agree, or differ in the same way [`STILL_ROUNDS`] times.
async fn look_again(
    volume: &VolumeRecord,
    members: &[MemberRecord],
    mut suspects: BTreeMap<u64, Vec<u32>>,
    comparison: &mut Comparison,
) -> anyhow::Result<()> {
    type Values = Vec<(u64, u32)>;
    let mut seen: BTreeMap<(u64, u32), (Values, u32)> = BTreeMap::new();
    for round in 0..ROUNDS_MAX {
        if suspects.is_empty() {
            break;
        }
        tokio::time::sleep(PAUSE).await;
        for (index, blocks) in std::mem::take(&mut suspects) {
            let row = read_extent(volume, members, index).await?;
            let mut still = Vec::new();
            for within in blocks {
                let values: Values = row.iter().map(|e| e.block(within)).collect();
                if values.iter().all(|v| *v == values[0]) {
                    continue;
                }
                let entry = seen.entry((index, within)).or_insert((values.clone(), 0));
                entry.1 = if entry.0 == values { entry.1 + 1 } else { 1 };
                entry.0 = values;
                if entry.1 >= STILL_ROUNDS || round + 1 == ROUNDS_MAX {
                    comparison.blocks_different += 1;
                    note(comparison, index, within, members, &row);
                } else {
                    still.push(within);
                }
            }
            if !still.is_empty() {
                suspects.insert(index, still);
            }
        }
    }
    comparison.blocks_moving -= comparison.blocks_different;
    Ok(())
}

async fn read_extent(
    volume: &VolumeRecord,
    members: &[MemberRecord],
    index: u64,
) -> anyhow::Result<Vec<Extent>> {
    let mut row = Vec::with_capacity(members.len());
    for member in members {
        row.push(
            Extents::open(volume, member, (index, 1), false)
                .await?
                .take(index)
                .await?,
        );
    }
    Ok(row)
}

fn note(
    comparison: &mut Comparison,
    index: u64,
    within: u32,
    members: &[MemberRecord],
    row: &[Extent],
) {
    if comparison.differences.len() >= NAMED_MAX {
        return;
    }
    let replicas = members.iter().zip(row).map(|(member, extent)| {
        let (position, crc) = extent.block(within);
        let position = Position::unpack(position);
        BlockOnReplica {
            device_id: member.device_id.clone(),
            position: format!("{}.{}", position.epoch.0, position.sequence.0),
            crc,
            bad: extent.bad.contains(&within),
        }
    });
    let block = index * u64::from(EXTENT_BLOCKS) + u64::from(within);
    comparison.differences.push(Difference {
        block,
        replicas: replicas.collect(),
    });
}

/// The stream of one replica's extents, with the next one read ahead.
struct Extents {
    stream: Streaming<DescribeBlocksResponse>,
    next: Option<(u64, Extent)>,
    what: String,
}

impl Extents {
    async fn open(
        volume: &VolumeRecord,
        member: &MemberRecord,
        (first_extent, extent_count): (u64, u64),
        verify_data: bool,
    ) -> anyhow::Result<Extents> {
        let what = format!("reading the replica on {}", member.control);
        let request = DescribeBlocksRequest {
            volume_id: volume.id.clone(),
            device_id: member.device_id.clone(),
            first_extent,
            extent_count,
            verify_data,
        };
        let mut node = control::node(&member.control).await?;
        let stream = control::answer(&what, node.describe_blocks(request).await)?;
        let mut extents = Extents {
            stream,
            next: None,
            what,
        };
        extents.advance().await?;
        Ok(extents)
    }

    async fn advance(&mut self) -> anyhow::Result<()> {
        let message = self
            .stream
            .message()
            .await
            .map_err(|status| control::refused(&self.what, &status))?;
        let last = self.next.take().map(|(index, _)| index);
        if let Some(message) = message {
            let index = message.extent;
            ensure!(
                last.is_none_or(|last| last < index),
                "{}: extents out of order",
                self.what
            );
            self.next = Some((
                index,
                Extent::read(message).with_context(|| self.what.clone())?,
            ));
        }
        Ok(())
    }

    /// The extent `index`, which is not before the next one; those left out hold nothing.
    async fn take(&mut self, index: u64) -> anyhow::Result<Extent> {
        if self.next.as_ref().is_none_or(|(next, _)| *next != index) {
            return Ok(Extent::empty());
        }
        let extent = self
            .next
            .clone()
            .map_or_else(Extent::empty, |(_, extent)| extent);
        self.advance().await?;
        Ok(extent)
    }
}

fn report(c: &Comparison) -> String {
    let mut text = format!(
        "{}: {} replicas are {}; {} of {} blocks written, {} were moving, {} differ, {} are bad\n",
        c.volume,
        c.replicas,
        if c.equal { "equal" } else { "NOT equal" },
        c.blocks_written,
        c.blocks_total,
        c.blocks_moving,
        c.blocks_different,
        c.blocks_bad
    );
    if !c.differences.is_empty() {
        let mut table = output::table(["block", "device", "position", "CRC-32C", "data"]);
        for difference in &c.differences {
            for replica in &difference.replicas {
                table.add_row([
                    difference.block.to_string(),
                    replica.device_id.clone(),
                    replica.position.clone(),
                    format!("{:08x}", replica.crc),
                    if replica.bad { "does not match" } else { "" }.into(),
                ]);
            }
        }
        text.push_str(&table.to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_differs_in_position_or_checksum_is_seen_and_an_absent_extent_is_zeros() {
        let mut a = Extent::empty();
        let b = Extent::empty();
        assert!(look(&[a.clone(), b.clone()]).different.is_empty());
        a.positions[3] = 9;
        a.crcs[200] = 1;
        a.bad.insert(7);
        let look = look(&[b, a]);
        assert_eq!(
            (look.written, look.different, look.bad),
            (1, vec![3, 200], vec![7])
        );
    }

    #[test]
    fn a_description_of_the_wrong_length_is_refused() {
        let message = DescribeBlocksResponse {
            extent: 0,
            ..Default::default()
        };
        assert!(Extent::read(message).is_err());
    }
}
