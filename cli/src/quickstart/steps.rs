//! The steps of quickstart.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::attach::{self, AttachmentStatus};
use crate::compare;
use crate::control;
use crate::image::{self, Image};
use crate::local::{LocalCluster, LocalOptions};
use crate::nbd::NbdClient;
use crate::node;
use crate::output;
use crate::pinning::{Pinning, Policy};
use crate::process::Lifetime;
use crate::quickstart::Args;
use crate::quickstart::evidence;
use crate::quickstart::report::{Kept, Report, Step};
use crate::quickstart::writer::{Region, Writer};
use crate::scratch::Scratch;
use crate::state::{Ack, VolumeRecord};
use crate::units::{Size, count_text, duration_text, micros_text};
use crate::volume::create::{self, VolumePlan};

const VOLUME_BYTES: u64 = 64 << 20;
const IMAGE_BYTES: u64 = 32 << 20;
/// The volume, the journal and the headers. No more, because every byte is freed again at the end.
const STORE_BYTES: u64 = 96 << 20;
/// The node that is killed.
const VICTIM: usize = 1;
/// How long latency is measured, and how long the node is away.
const CALM: Duration = Duration::from_secs(2);
const DOWN: Duration = Duration::from_secs(2);
/// A resync that takes longer than this has failed: 64 MiB take well under a second.
const RESYNC_TIMEOUT: Duration = Duration::from_secs(60);
/// A longer stall than this is a failure: nothing has to wait for a dead node.
const STALL_MAX: Duration = Duration::from_millis(500);
const ATTACH_TIMEOUT: Duration = Duration::from_secs(20);

struct Run<'a> {
    report: &'a mut Report,
    say: &'a mut dyn FnMut(&str),
}

impl Run<'_> {
    /// Runs one step and says how it came out. Later steps build on it, so a failure ends the run.
    fn step<T>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Report) -> anyhow::Result<(T, String)>,
    ) -> anyhow::Result<T> {
        let start = Instant::now();
        let result = work(self.report);
        let seconds = start.elapsed().as_secs_f64();
        let number = self.report.steps.len() + 1;
        let (held, detail) = match &result {
            Ok((_, detail)) => (true, detail.clone()),
            Err(error) => (false, format!("{error:#}")),
        };
        let mark = if held { "✓" } else { "✗" };
        (self.say)(&format!(
            "{mark} {number}. {name} ({seconds:.1} s)\n     {detail}"
        ));
        self.report.steps.push(Step {
            name: name.into(),
            held,
            seconds,
            detail,
        });
        Ok(result?.0)
    }
}

/// Runs all steps; returns what is running in the end.
///
/// # Errors
/// When a step did not hold.
pub fn run(
    args: &Args,
    scratch: &Scratch,
    report: &mut Report,
    say: &mut dyn FnMut(&str),
) -> anyhow::Result<Kept> {
    let mut run = Run { report, say };
    let mut cluster = run.step(
        "three storage nodes and an initiator, on loopback",
        |report| start(args, scratch, report),
    )?;
    let (volume, attachment) = run.step("a volume with three replicas, attached", |_| {
        make_volume(&cluster)
    })?;
    let uri = attachment
        .nbd_uris
        .first()
        .context("the initiator serves no NBD")?;
    let mut client = NbdClient::connect(uri)?;
    let image = run.step("a real filesystem, written through NBD", |report| {
        put_image(scratch, &mut client, report)
    })?;
    // The image keeps the start of the volume, the writer the rest.
    let region = Region {
        offset: IMAGE_BYTES,
        bytes: VOLUME_BYTES - IMAGE_BYTES,
    };
    let mut writer = Writer::start(uri, region)?;
    run.step("4 KiB writes, one at a time", |report| {
        measure(&mut writer, report)
    })?;
    run.step("a node killed with SIGKILL while writes go on", |report| {
        kill(&mut cluster, &mut writer, report)
    })?;
    run.step(
        "the node started again and brought up to date, while writes go on",
        |report| resync(&mut cluster, &mut writer, &volume, report),
    )?;
    run.step("no write failed", |_| {
        writer.stop()?;
        cluster.check_running()?;
        Ok((
            (),
            "the writer got an acknowledgement for everything".into(),
        ))
    })?;
    run.step(
        "all replicas compared, block by block, data against checksums",
        |report| compare_replicas(&volume, report),
    )?;
    run.step("the image read back", |_| {
        read_image(scratch, &mut client, &image)
    })?;
    Ok(kept(&cluster, &attachment))
}

fn start(
    args: &Args,
    scratch: &Scratch,
    report: &mut Report,
) -> anyhow::Result<(LocalCluster, String)> {
    let spinner = output::spinner("starting");
    let options = LocalOptions {
        store_bytes: STORE_BYTES,
        engine: args.engine,
        busy_poll: Duration::ZERO,
        pinning: Pinning::new(Policy::None),
        lifetime: if args.keep {
            Lifetime::Detached
        } else {
            Lifetime::WithParent
        },
    };
    let mut cluster = LocalCluster::start(3, scratch.path(), scratch, options)?;
    cluster.start_initiator()?;
    spinner.finish_and_clear();
    let address = cluster
        .node_addresses()
        .into_iter()
        .next()
        .context("no node")?;
    let status = control::block_on(node::status(&address))?;
    let engine = status.devices.first().map_or("", |d| d.engine.as_str());
    report.figures.engine = engine.to_owned();
    let detail = format!(
        "stores of {} in {}, engine {engine}",
        Size(STORE_BYTES),
        scratch.path().display()
    );
    Ok((cluster, detail))
}

fn make_volume(
    cluster: &LocalCluster,
) -> anyhow::Result<((VolumeRecord, AttachmentStatus), String)> {
    let plan = VolumePlan {
        name: "quickstart".into(),
        size_bytes: VOLUME_BYTES,
        replicas: 3,
        witnesses: 0,
        ack: Ack::Majority,
    };
    let volume = create::create(&cluster.state, &cluster.node_addresses(), &plan)?;
    let attachment = attach::attach_volume(cluster.initiator_address()?, &volume, ATTACH_TIMEOUT)?;
    let uri = attachment.nbd_uris.first().map_or("", String::as_str);
    let detail = format!("{} at {uri}", Size(VOLUME_BYTES));
    Ok(((volume, attachment), detail))
}

fn put_image(
    scratch: &Scratch,
    client: &mut NbdClient,
    report: &mut Report,
) -> anyhow::Result<(Image, String)> {
    let image = image::make(scratch.path(), IMAGE_BYTES)?;
    let bar = output::progress_bar(IMAGE_BYTES, "copying");
    let start = Instant::now();
    let written = evidence::copy_in(client, &image.path, &bar)?;
    bar.finish_and_clear();
    let rate = written as f64 / start.elapsed().as_secs_f64() / 1e6;
    report.figures.copy_mb_per_s = (rate * 10.0).round() / 10.0;
    let detail = format!("{}: {} at {rate:.0} MB/s", image.origin, Size(written));
    Ok((image, detail))
}

fn measure(writer: &mut Writer, report: &mut Report) -> anyhow::Result<((), String)> {
    // What a first write does once is not the latency of a write.
    std::thread::sleep(Duration::from_millis(200));
    writer.lap()?;
    std::thread::sleep(CALM);
    let lap = writer.lap()?;
    ensure!(
        lap.writes > 0,
        "no write was acknowledged within {}",
        duration_text(CALM)
    );
    let (s, figures) = (&lap.summary, &mut report.figures);
    figures.write_p50_us = s.p50_us;
    figures.write_p99_us = s.p99_us;
    figures.write_iops = s.iops;
    let detail = format!(
        "p50 {}, p99 {}, {} per second",
        micros_text(s.p50_us),
        micros_text(s.p99_us),
        count_text(s.iops as u64)
    );
    Ok(((), detail))
}

fn kill(
    cluster: &mut LocalCluster,
    writer: &mut Writer,
    report: &mut Report,
) -> anyhow::Result<((), String)> {
    writer.lap()?;
    cluster.nodes[VICTIM].process.kill()?;
    std::thread::sleep(DOWN);
    let lap = writer.lap()?;
    report.figures.longest_stall_ms = (lap.longest_stall.as_secs_f64() * 1e5).round() / 100.0;
    report.figures.writes_while_down = lap.writes;
    ensure!(
        lap.longest_stall <= STALL_MAX,
        "writes stalled for {}",
        duration_text(lap.longest_stall)
    );
    let detail = format!(
        "longest stall {}, {} writes acknowledged since",
        duration_text(lap.longest_stall),
        count_text(lap.writes)
    );
    Ok(((), detail))
}

fn resync(
    cluster: &mut LocalCluster,
    writer: &mut Writer,
    volume: &VolumeRecord,
    report: &mut Report,
) -> anyhow::Result<((), String)> {
    let start = Instant::now();
    cluster.restart_node(VICTIM)?;
    let initiator = cluster.initiator_address()?.to_owned();
    let bar = output::progress_bar(1, "resync");
    let mut blocks = 0;
    loop {
        let attachments = control::block_on(attach::attachments(&initiator))?;
        let mine = attachments.iter().find(|a| a.volume_id == volume.id);
        let members = &mine.context("the volume is not attached any more")?.members;
        for member in members.iter().filter(|m| m.resync_blocks_total > 0) {
            bar.set_length(member.resync_blocks_total);
            bar.set_position(member.resync_blocks_done);
            blocks = blocks.max(member.resync_blocks_total);
        }
        if members.len() == 3 && members.iter().all(|m| m.state == "in-sync") {
            break;
        }
        if start.elapsed() > RESYNC_TIMEOUT {
            let states: Vec<_> = members.iter().map(|m| m.state.as_str()).collect();
            bail!(
                "not in sync after {}: {}",
                duration_text(RESYNC_TIMEOUT),
                states.join(", ")
            );
        }
        // A look at another process; nothing is measured by it but the time to being in sync.
        std::thread::sleep(Duration::from_millis(20));
    }
    bar.finish_and_clear();
    let took = start.elapsed();
    let lap = writer.lap()?;
    report.figures.resync_seconds = (took.as_secs_f64() * 1e3).round() / 1e3;
    report.figures.resync_blocks = blocks;
    let detail = format!(
        "all three in sync {} after its start, {} writes meanwhile, longest stall {}",
        duration_text(took),
        count_text(lap.writes),
        duration_text(lap.longest_stall)
    );
    Ok(((), detail))
}

fn compare_replicas(volume: &VolumeRecord, report: &mut Report) -> anyhow::Result<((), String)> {
    let comparison = compare::compare(volume, true)?;
    report.figures.blocks_compared = comparison.blocks_written;
    ensure!(
        comparison.equal,
        "{} blocks differ, {} are bad",
        comparison.blocks_different,
        comparison.blocks_bad
    );
    let detail = format!(
        "{} written blocks are equal",
        count_text(comparison.blocks_written)
    );
    Ok(((), detail))
}

fn read_image(
    scratch: &Scratch,
    client: &mut NbdClient,
    image: &Image,
) -> anyhow::Result<((), String)> {
    let copy = scratch.path().join("image-back");
    let bar = output::progress_bar(IMAGE_BYTES, "reading");
    let result = evidence::read_back(client, &image.path, &copy, &bar);
    bar.finish_and_clear();
    result?;
    let checked = if image.is_ext4 {
        image::check(&copy)?
    } else {
        None
    };
    ensure!(
        checked != Some(false),
        "the image is unchanged, but e2fsck finds faults in it"
    );
    let detail = match checked {
        Some(_) => "unchanged, and e2fsck finds it clean",
        None => "unchanged",
    };
    Ok(((), detail.into()))
}

fn kept(cluster: &LocalCluster, attachment: &AttachmentStatus) -> Kept {
    let nodes = cluster.nodes.iter().map(|node| &node.addresses.metrics);
    let initiator = cluster
        .initiator
        .iter()
        .filter_map(|i| i.addresses.metrics.as_ref());
    Kept {
        nbd_uris: attachment.nbd_uris.clone(),
        metrics: nodes
            .chain(initiator)
            .map(|at| format!("http://{at}/metrics"))
            .collect(),
        state: cluster.state.path().display().to_string(),
    }
}
