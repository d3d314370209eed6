//! `ashlar quickstart`: a three-replica volume on this machine, with a node killed on the way.

mod evidence;
mod report;
mod steps;
mod writer;

use std::path::PathBuf;

use crate::context::Context;
use crate::local::Engine;
use crate::output::{self, Outcome};
use crate::scratch::{Leftovers, Scratch, remove_leftovers};
use report::Report;

/// Arguments of `ashlar quickstart`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Leave it running and print where to connect.
    #[arg(long, conflicts_with = "stop")]
    pub keep: bool,
    /// End what an earlier --keep left running, and remove it.
    #[arg(long)]
    pub stop: bool,
    /// Where the stores lie, for the time it runs [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Engine of the data path [default: io_uring where it is allowed].
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
}

/// Runs the command. Exit code 0 only if every step held.
///
/// # Errors
/// When the temporary directory cannot be made.
pub fn run(context: &Context, args: &Args) -> anyhow::Result<Outcome> {
    let parent = std::path::absolute(args.dir.clone().unwrap_or_else(std::env::temp_dir))?;
    if args.stop {
        let removed = remove_leftovers(&parent, Leftovers::CrashedAndKept);
        let document = serde_json::json!({ "removed": removed });
        output::print(context.format, &document, |_| match removed {
            0 => "nothing was left running".to_owned(),
            n => format!("ended and removed {n}"),
        })?;
        return Ok(Outcome::Good);
    }
    let scratch = Scratch::new(&parent)?;
    scratch.remove_on_signal()?;
    let mut report = Report::default();
    let result = steps::run(args, &scratch, &mut report, &mut |line| {
        output::progress_line(context.format, line)
    });
    scratch.give_way_to_signal();
    if let Err(error) = &result {
        report.error = Some(format!("{error:#}"));
    }
    report.passed = result.is_ok() && report.steps.iter().all(|step| step.held);
    if report.passed && args.keep {
        report.kept = result.ok();
        scratch.keep()?;
    }
    let printed = output::print(context.format, &report, report::text);
    // After the result, because freeing the files' space takes seconds on some devices.
    scratch.remove();
    printed?;
    Ok(if report.passed {
        Outcome::Good
    } else {
        Outcome::Bad
    })
}
