//! Random schedules of a plain test run.

use std::panic::catch_unwind;

use super::chaos::{Media, Summary, run};

/// Schedules of a plain test run; a few seconds of an unoptimised build.
const SCHEDULES: u64 = 1_500;

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Schedules on the real store; each takes some ten times as long.
const STORE_SCHEDULES: u64 = 300;
/// Seeds that once found something in the store, the storage node's code, or these checks.
const STORE_SEEDS: &[u64] = &[
    0,
    7,
    13,
    17,
    93,
    126,
    129,
    145,
    210,
    239,
    270,
    624,
    1209,
    1505,
    2006293,
    161062696488532,
    161062696491939,
];

fn play(seeds: impl IntoIterator<Item = u64>, media: Media) -> Summary {
    let mut sum = Summary::default();
    for seed in seeds {
        match catch_unwind(|| run(seed, media)) {
            Ok(Ok(summary)) => sum.add(&summary),
            Ok(Err(violation)) => panic!("seed {seed} on {media:?}: {violation}"),
            Err(_) => panic!("seed {seed} on {media:?} panicked"),
        }
    }
    sum
}

#[test]
fn random_schedules_keep_every_invariant_and_come_right_in_the_end() {
    let first = number("ASHLAR_FIRST").unwrap_or(0);
    let count = number("ASHLAR_SCHEDULES").unwrap_or(SCHEDULES);
    let sum = play(first..first + count, Media::Model);
    println!("{count} schedules: {sum:?}");
    // The schedules must not be empty of what they are about.
    assert!(sum.acks > count * 20 && sum.reads > count * 5 && sum.hosts > count);
    assert!(sum.changes > count / 20);
}

#[test]
fn schedules_on_the_real_store_keep_every_invariant_too() {
    let count = number("ASHLAR_SCHEDULES").unwrap_or(STORE_SCHEDULES);
    let sum = play(10_000..10_000 + count, Media::Store);
    println!("{count} schedules: {sum:?}");
    assert!(sum.acks > count * 20 && sum.reads > count * 5 && sum.hosts > count);
    assert!(sum.changes > count / 20);
}

#[test]
fn seeds_that_once_found_something_stay_right() {
    play(STORE_SEEDS.iter().copied(), Media::Store);
}

#[test]
fn a_seed_is_the_same_schedule_every_time() {
    for media in [Media::Model, Media::Store] {
        assert_eq!(run(3, media), run(3, media), "{media:?}");
    }
}
