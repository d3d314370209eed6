//! `ashlar bench`: what a volume does, beside what the sockets and the device do without it.

pub mod args;
mod baseline_file;
mod floor;
pub mod floor_replica;
mod floor_wire;
mod generator;
mod library_load;
mod nbd_load;
mod pattern;
mod raw;
mod report;
mod runner;
mod statistics;
mod target;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};

pub use args::Args;
pub use pattern::Offsets;
pub use statistics::{Recorder, Summary};

use crate::context::Context;
use crate::output::{self, Outcome};
use crate::pinning::{Pinning, pin_this_thread};
use crate::scratch::Scratch;
use crate::state::Ack;
use args::Store;
use floor::{Floor, FloorAt, FloorPlan};
use raw::Raw;
use report::{Baseline, Report};
use runner::Participant;
use target::Target;

/// Slices: long enough that starting and draining one is noise, short enough that ten loads in turn
/// see the same machine.
const SLICE: Duration = Duration::from_millis(200);
const BASELINE_SLICE: Duration = Duration::from_millis(100);

/// Runs the command.
///
/// # Errors
/// When something does not start or an operation fails.
pub fn run(context: &Context, args: &Args) -> anyhow::Result<Outcome> {
    args.check()?;
    args.confirm_overwrite()?;
    let scratch = Scratch::new(&folder_of(&args.store)?)?;
    scratch.remove_on_signal()?;
    let pinning = Pinning::new(args.pin);
    pin_this_thread(pinning.client()).context("pinning the client")?;
    let result = measure(context, args, &scratch, &pinning);
    scratch.give_way_to_signal();
    let printed = match &result {
        Ok(report) => output::print(context.format, report, report::text),
        Err(_) => Ok(()),
    };
    // After the result, because freeing the files' space takes seconds on some devices.
    scratch.remove();
    let report = result?;
    printed?;
    Ok(if report.errors == 0 {
        Outcome::Good
    } else {
        Outcome::Bad
    })
}

/// Where the stores and the files of the baselines lie.
fn folder_of(store: &Store) -> anyhow::Result<PathBuf> {
    let folder = match store {
        Store::Ram => PathBuf::from("/dev/shm"),
        Store::Disk => std::env::temp_dir(),
        Store::Folder(path) => path.clone(),
    };
    ensure!(
        folder.is_dir(),
        "{} is no directory; use --store DIR",
        folder.display()
    );
    Ok(std::path::absolute(folder)?)
}

fn measure(
    context: &Context,
    args: &Args,
    scratch: &Scratch,
    pinning: &Pinning,
) -> anyhow::Result<Report> {
    let mut target = Target::start(context, args, scratch, pinning)?;
    let mut floor = match args.no_baselines {
        true => None,
        false => Some(start_floor(args, &target, scratch, pinning)?),
    };
    let mut floor_1 = match args.no_baselines || args.depth * args.volumes == 1 {
        true => None,
        false => Some(start_floor(args, &target, scratch, pinning)?),
    };
    let depth = args.depth * args.volumes;
    let raw = match args.no_baselines {
        true => None,
        false => Some(Raw::new(
            scratch.path(),
            args.mode,
            args.volume_size.0,
            args.bytes(),
            depth,
        )?),
    };
    let bytes = args.size.0;
    let (before, processes) = (target.written()?, target.processes());
    let mut participants = vec![Participant::new(
        "ashlar",
        target.load(),
        SLICE,
        processes,
        bytes,
    )];
    let own = ("client".to_owned(), std::process::id());
    let floor_at = |floor: &mut Option<Floor>| {
        floor
            .as_ref()
            .map(|f| [vec![own.clone()], f.processes()].concat())
            .unwrap_or_default()
    };
    let (processes, processes_1) = (floor_at(&mut floor), floor_at(&mut floor_1));
    if let Some(floor) = &mut floor {
        let load = Box::new(FloorAt { floor, depth });
        participants.push(Participant::new(
            "floor",
            load,
            BASELINE_SLICE,
            processes,
            bytes,
        ));
    }
    if let Some(floor) = &mut floor_1 {
        let load = Box::new(FloorAt { floor, depth: 1 });
        participants.push(Participant::new(
            "floor@1",
            load,
            BASELINE_SLICE,
            processes_1,
            bytes,
        ));
    }
    if let Some(raw) = raw {
        let load = Box::new(raw);
        participants.push(Participant::new(
            "raw",
            load,
            BASELINE_SLICE,
            vec![own],
            bytes,
        ));
    }
    let format = context.format;
    runner::run(
        &mut participants,
        Duration::from_secs(args.seconds),
        |line| output::progress_line(format, line),
    )?;
    let mut outcomes: Vec<_> = participants
        .iter_mut()
        .map(|p| (p.label, p.outcome()))
        .collect();
    drop(participants);
    let (_, measured) = outcomes.remove(0);
    let mut baseline = |label: &str| {
        let at = outcomes.iter().position(|(l, _)| *l == label)?;
        Some(Baseline::from(outcomes.remove(at).1))
    };
    let floor = baseline("floor");
    target.check_running()?;
    let after = target.written()?;
    let device_bytes = after.device.saturating_sub(before.device) as f64;
    let client_bytes =
        after.client.saturating_sub(before.client) as f64 / target.replicas().max(1) as f64;
    Ok(Report {
        mode: args.mode,
        size_bytes: bytes,
        depth: args.depth,
        replicas: target.replicas(),
        volumes: args.volumes,
        store: target.store_name(args),
        front_end: if args.nbd { "nbd" } else { "library" },
        engine: target.engine()?,
        ack: target.ack(),
        pinning: pinning.describe(target.replicas()),
        busy_poll_us: args.busy_poll_us,
        p50_over_floor: report::ratio(&measured.summary, floor.as_ref()),
        summary: measured.summary,
        errors: measured.errors,
        cpu_us_per_operation: measured.cpu_us_per_operation,
        device_bytes_per_client_byte: (args.mode.is_write() && client_bytes > 0.0)
            .then(|| statistics::round(device_bytes / client_bytes, 3)),
        floor,
        floor_depth_1: baseline("floor@1"),
        raw: baseline("raw"),
    })
}

fn start_floor(
    args: &Args,
    target: &Target,
    scratch: &Scratch,
    pinning: &Pinning,
) -> anyhow::Result<Floor> {
    let replicas = target.replicas();
    let plan = FloorPlan {
        mode: args.mode,
        span_bytes: args.volume_size.0,
        request_bytes: args.bytes(),
        replicas,
        quorum: match target.ack() {
            Ack::Majority => replicas / 2 + 1,
            Ack::All => replicas,
        },
        busy_poll: Duration::from_micros(args.busy_poll_us),
    };
    let folder = unique_folder(scratch.path())?;
    Floor::start(plan, &folder, pinning, scratch)
}

/// A new folder for the files of one floor.
fn unique_folder(parent: &Path) -> anyhow::Result<PathBuf> {
    let folder = (1..)
        .map(|i| parent.join(format!("floor-{i}")))
        .find(|path| !path.exists())
        .context("no name is left")?;
    std::fs::create_dir(&folder)?;
    Ok(folder)
}

/// Bytes that do not compress, the same for the same seed.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    pattern::AlignedBuffer::noise(len, seed).to_vec()
}

/// Random writes, for loads outside this module.
pub const RANDWRITE: pattern::Mode = pattern::Mode::RandWrite;
