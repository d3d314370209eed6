//! Random operations against a plain map, with and without crashes.

mod common;

use ashlar_store::fake::{Loss, Random};
use common::model::{IndexLoss, Run};

#[test]
fn random_operations_end_as_the_model_says() {
    for seed in 0..20 {
        let mut run = Run::new(seed, seed % 3 == 0);
        for round in 0..6 {
            for _ in 0..60 {
                run.act();
            }
            run.verify();
            if round % 2 == 1 {
                run.reopen();
                run.verify();
            }
        }
    }
}

fn crash_run(seed: u64) {
    let mut run = Run::new(seed, seed % 5 == 4);
    let mut random = Random(seed ^ 0xdead);
    for _ in 0..8 {
        let stop = random.below(60);
        run.rig.dev.stop_after(stop);
        for _ in 0..300 {
            run.act();
            if run.rig.dev.is_stopped() {
                break;
            }
        }
        let loss = match random.below(4) {
            0 => Loss::All,
            1 => Loss::Nothing,
            2 => Loss::Writes,
            _ => Loss::Sectors,
        };
        let index = if random.below(4) == 0 {
            IndexLoss::All
        } else {
            IndexLoss::Nothing
        };
        run.crash(loss, index)
            .expect("the store opens after a crash");
    }
    run.rig.dev.stop_after(u64::MAX / 2);
    run.verify();
}

#[test]
fn after_random_crashes_everything_completed_is_there_and_nothing_else_is_invented() {
    let seeds: u64 = std::env::var("ASHLAR_SEEDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(40);
    let first: u64 = std::env::var("ASHLAR_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(0);
    for seed in first..first + seeds {
        let result = std::panic::catch_unwind(|| crash_run(seed));
        assert!(
            result.is_ok(),
            "seed {seed}: run again with ASHLAR_SEED={seed} ASHLAR_SEEDS=1"
        );
    }
}

/// The same operations each time, cut short after `mutations` writes and syncs.
fn cut_short(seed: u64, mutations: Option<u64>, loss: Loss, index: IndexLoss) -> u64 {
    let mut run = Run::new(seed, false);
    // Something at home, in the journal and in the index to begin with.
    for _ in 0..25 {
        run.act();
    }
    run.verify();
    let before = run.rig.dev.mutations();
    if let Some(mutations) = mutations {
        run.rig.dev.stop_after(mutations);
    }
    for i in 0..60 {
        run.act();
        if i % 7 == 0 {
            run.rig.store.start_home_write(&mut run.rig.dev);
        }
        if run.rig.dev.is_stopped() {
            break;
        }
    }
    if mutations.is_some() {
        run.crash(loss, index)
            .expect("the store opens after a crash");
        run.verify();
        return 0;
    }
    run.rig.settle();
    run.rig.dev.mutations() - before
}

#[test]
fn a_crash_at_any_write_or_sync_loses_nothing_that_was_completed() {
    for seed in [3, 8] {
        let count = cut_short(seed, None, Loss::All, IndexLoss::Nothing);
        assert!(count > 30, "the test does something: {count}");
        for mutations in 0..count {
            let third = if mutations % 2 == 0 {
                Loss::Nothing
            } else {
                Loss::Writes
            };
            for loss in [Loss::All, Loss::Sectors, third] {
                let index = if mutations % 5 == 0 {
                    IndexLoss::All
                } else {
                    IndexLoss::Nothing
                };
                cut_short(seed, Some(mutations), loss, index);
            }
        }
    }
}
