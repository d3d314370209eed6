//! `ashlar-simulate`: schedules on the simulated clock, network and disks, from seeds.

use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_simulator::{Media, Summary, Violation, run};
use clap::Parser;

/// Runs the protocol and the store of several nodes, initiators and clients in one process, on a simulated clock,
/// network and disks. Each seed is a schedule of its own; one that fails can be replayed exactly.
#[derive(Debug, Parser)]
#[command(name = "ashlar-simulate", version)]
struct Args {
    /// Runs this one seed and prints every happening.
    #[arg(long)]
    seed: Option<u64>,
    /// The first seed; without it a random one, so that every run sees new schedules.
    #[arg(long)]
    first: Option<u64>,
    /// How many seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Goes on with new seeds for so many seconds instead.
    #[arg(long)]
    seconds: Option<u64>,
    /// What members keep their blocks in.
    #[arg(long, value_enum, default_value_t = Keep::Store)]
    media: Keep,
    /// Threads; as many as there are cores by default.
    #[arg(long)]
    threads: Option<NonZero<usize>>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Keep {
    /// A map: the protocol alone.
    Model,
    /// The real store on a device in memory.
    Store,
}

impl From<Keep> for Media {
    fn from(keep: Keep) -> Media {
        match keep {
            Keep::Model => Media::Model,
            Keep::Store => Media::Store,
        }
    }
}

fn run_caught(seed: u64, media: Media) -> Result<Summary, Violation> {
    match catch_unwind(AssertUnwindSafe(|| run(seed, media))) {
        Ok(result) => result,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(format!("panicked: {}", text.unwrap_or_default()))
        }
    }
}

struct Totals {
    summary: Summary,
    seeds: u64,
    failed: Vec<(u64, Violation)>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let media = Media::from(args.media);
    if let Some(seed) = args.seed {
        return match run_caught(seed, media) {
            Ok(summary) => {
                println!("seed {seed}: {summary:?}");
                ExitCode::SUCCESS
            }
            Err(violation) => {
                println!("seed {seed}: {violation}");
                ExitCode::FAILURE
            }
        };
    }
    let first = args.first.unwrap_or_else(random_seed);
    let cores = std::thread::available_parallelism();
    let threads = args.threads.or(cores.ok()).map_or(1, NonZero::get);
    let next = AtomicU64::new(0);
    let start = Instant::now();
    let totals = Mutex::new(Totals {
        summary: Summary::default(),
        seeds: 0,
        failed: Vec::new(),
    });
    let limit = args.seconds.map(Duration::from_secs);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let is_over = match limit {
                        Some(limit) => start.elapsed() >= limit,
                        None => number >= args.seeds,
                    };
                    if is_over {
                        return;
                    }
                    let seed = first.wrapping_add(number);
                    let result = run_caught(seed, media);
                    let mut totals = totals.lock().expect("no thread panics with the lock");
                    totals.seeds += 1;
                    match result {
                        Ok(summary) => totals.summary.add(&summary),
                        Err(violation) => {
                            println!("seed {seed}: {violation}");
                            totals.failed.push((seed, violation));
                        }
                    }
                }
            });
        }
    });
    let Totals {
        summary,
        seeds,
        failed,
    } = totals.into_inner().expect("no thread panics with the lock");
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{seeds} seeds from {first} in {seconds:.1} s on {threads} threads: {:.0} seeds/s, {:.0} events/s per core; {summary:?}",
        seeds as f64 / seconds / threads as f64,
        summary.happenings as f64 / seconds / threads as f64,
    );
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    let list: Vec<_> = failed.iter().map(|(seed, _)| seed.to_string()).collect();
    println!(
        "{} failed; replay with --seed: {}",
        failed.len(),
        list.join(" ")
    );
    ExitCode::FAILURE
}

fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    // A fixed start is better than none.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes) >> 16
}
