//! Random schedules of a plain test run.

use std::panic::catch_unwind;

use super::chaos::{Media, Summary, run};

/// Schedules of a plain test run; a few seconds of an unoptimised build.
const SCHEDULES: u64 = 1_500;

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_schedules_keep_every_invariant_and_come_right_in_the_end() {
    if let Some(seed) = number("ASHLAR_SEED") {
        run(seed, Media::Model).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        return;
    }
    let first = number("ASHLAR_FIRST").unwrap_or(0);
    let count = number("ASHLAR_SCHEDULES").unwrap_or(SCHEDULES);
    let mut sum = Summary::default();
    for seed in first..first + count {
        let result = catch_unwind(|| run(seed, Media::Model));
        let summary = match result {
            Ok(Ok(summary)) => summary,
            Ok(Err(violation)) => panic!("seed {seed}: {violation}"),
            Err(_) => panic!("seed {seed} panicked"),
        };
        if number("ASHLAR_VERBOSE").is_some() {
            println!("seed {seed}: {summary:?}");
        }
        sum.happenings += summary.happenings;
        sum.acks += summary.acks;
        sum.reads += summary.reads;
        sum.hosts += summary.hosts;
    }
    println!("{count} schedules: {sum:?}");
    // The schedules must not be empty of what they are about.
    assert!(sum.acks > count * 20 && sum.reads > count * 5 && sum.hosts > count);
}
