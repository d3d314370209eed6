//! Runs loads in turn, in short slices, so that a machine that drifts slows all of them alike.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::bench::statistics::{Recorder, Summary, round};
use crate::process::cpu_time;

/// Something that can run for a while and record what it did.
pub trait Load {
    /// Runs for `duration`, ends with nothing in flight, and records latencies and time in `recorder`.
    ///
    /// # Errors
    /// When an operation fails; the measurement is worthless then.
    fn run(&mut self, duration: Duration, recorder: &mut Recorder) -> anyhow::Result<()>;
}

/// A load in a measurement.
pub struct Participant<'a> {
    /// For the line a second.
    pub label: &'static str,
    /// What runs.
    pub load: Box<dyn Load + 'a>,
    /// How long one of its slices is.
    pub slice: Duration,
    /// Processes whose CPU time counts for it.
    pub processes: Vec<(String, u32)>,
    /// What it did.
    pub recorder: Recorder,
    cpu: BTreeMap<String, Duration>,
}

/// What a participant did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Rates and latencies.
    pub summary: Summary,
    /// Operations that failed.
    pub errors: u64,
    /// CPU time per operation of each process, in microseconds.
    pub cpu_us_per_operation: BTreeMap<String, f64>,
}

impl<'a> Participant<'a> {
    /// A load that has not run yet.
    pub fn new(
        label: &'static str,
        load: Box<dyn Load + 'a>,
        slice: Duration,
        processes: Vec<(String, u32)>,
        request_bytes: u64,
    ) -> Participant<'a> {
        let recorder = Recorder::new(request_bytes);
        Participant {
            label,
            load,
            slice,
            processes,
            recorder,
            cpu: BTreeMap::new(),
        }
    }

    fn run_slice(&mut self, duration: Duration) -> anyhow::Result<()> {
        let times = |processes: &[(String, u32)]| -> Vec<Duration> {
            processes
                .iter()
                .map(|(_, pid)| cpu_time(*pid).unwrap_or_default())
                .collect()
        };
        let before = times(&self.processes);
        self.load.run(duration, &mut self.recorder)?;
        let after = times(&self.processes);
        for (((name, _), before), after) in self.processes.iter().zip(before).zip(after) {
            *self.cpu.entry(name.clone()).or_default() += after.saturating_sub(before);
        }
        Ok(())
    }

    /// What it did in all.
    pub fn outcome(&mut self) -> Outcome {
        let summary = self.recorder.summary();
        let operations = summary.operations.max(1) as f64;
        let per_operation = self.cpu.iter().map(|(name, time)| {
            (
                name.clone(),
                round(time.as_secs_f64() * 1e6 / operations, 2),
            )
        });
        Outcome {
            errors: self.recorder.errors(),
            cpu_us_per_operation: per_operation.collect(),
            summary,
        }
    }
}

/// Before the measurement: caches, branch predictors and lazily made state settle.
const WARM_UP: Duration = Duration::from_millis(200);

/// Runs all participants in turn until the first one has run for `total`.
///
/// `line` gets a line about the last second, about once a second.
///
/// # Errors
/// When a load fails.
pub fn run(
    participants: &mut [Participant<'_>],
    total: Duration,
    mut line: impl FnMut(&str),
) -> anyhow::Result<()> {
    for participant in participants.iter_mut() {
        participant
            .load
            .run(WARM_UP.min(total), &mut participant.recorder)?;
        participant.recorder.clear();
    }
    let begin = Instant::now();
    let mut last_line = begin;
    let mut measured = Duration::ZERO;
    while measured < total {
        for (i, participant) in participants.iter_mut().enumerate() {
            let slice = participant
                .slice
                .min(total - measured)
                .max(Duration::from_millis(1));
            participant.run_slice(if i == 0 { slice } else { participant.slice })?;
        }
        measured += participants.first().map_or(total, |p| p.slice);
        if last_line.elapsed() >= Duration::from_secs(1) || measured >= total {
            last_line = Instant::now();
            let parts: Vec<_> = participants
                .iter_mut()
                .map(|p| describe(p.label, &p.recorder.take_interval()))
                .collect();
            line(&format!(
                "{:4.0} s  {}",
                begin.elapsed().as_secs_f64(),
                parts.join("  │  ")
            ));
        }
    }
    Ok(())
}

fn describe(label: &str, summary: &Summary) -> String {
    format!(
        "{label} {:>8.0} IOPS {:>7.1} MB/s p50 {:>5.0} µs p99 {:>5.0} µs",
        summary.iops, summary.mb_per_s, summary.p50_us, summary.p99_us
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counting<'a>(&'a mut u32);

    impl Load for Counting<'_> {
        fn run(&mut self, duration: Duration, recorder: &mut Recorder) -> anyhow::Result<()> {
            *self.0 += 1;
            recorder.record(Duration::from_micros(10));
            recorder.ran(duration);
            Ok(())
        }
    }

    #[test]
    fn all_loads_run_in_turn_and_the_warm_up_is_not_counted() {
        let (mut a, mut b) = (0, 0);
        let slice = Duration::from_millis(10);
        let mut participants = [
            Participant::new("a", Box::new(Counting(&mut a)), slice, vec![], 4096),
            Participant::new("b", Box::new(Counting(&mut b)), slice / 2, vec![], 4096),
        ];
        let mut lines = Vec::new();
        run(&mut participants, slice * 3, |line| {
            lines.push(line.to_owned())
        })
        .unwrap();
        let [a_did, b_did] = &mut participants;
        let (a_did, b_did) = (a_did.outcome().summary, b_did.outcome().summary);
        assert_eq!((a_did.operations, a_did.seconds), (3, 0.03));
        assert_eq!((b_did.operations, b_did.seconds), (3, 0.015));
        assert!(lines.last().unwrap().contains("a ") && lines.last().unwrap().contains("│  b"));
        drop(participants);
        assert_eq!((a, b), (4, 4));
    }
}
