//! Schedules with a plot: orders of events that random schedules meet too seldom.

use core::time::Duration;

use ashlar_replication::configuration::Ack;
use ashlar_replication::faults::{Fault, break_rule};
use ashlar_replication::initiator::{Options, Phase};
use ashlar_replication::values::{EpochNumber, Position};

use super::ledger::Violation;
use super::world::{MS, Shape, World};

/// Each plot is played with so many seeds; its clients and delays differ.
const SEEDS: u64 = 40;
const STEP: u64 = 20_000;
const PATIENCE: u64 = 2_000 * MS;

/// Begins the report of a schedule whose delays did not let the plot go on.
const STOPS: &str = "the plot stops";

type Plot = fn(u64) -> Result<(), Violation>;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// Three members in sync and nobody who drops them.
fn world(seed: u64) -> World {
    let long = Duration::from_secs(100);
    let options = Options {
        min_in_sync: Some(1),
        lease: Duration::from_millis(400),
        clock_drift_ppm: 2_000,
        attach_wait: Duration::from_millis(5),
        down_grace: long,
        read_timeout: Duration::from_millis(20),
        ..Options::default()
    };
    let shape = Shape {
        data: 3,
        witnesses: 0,
        ack: Ack::Majority,
    };
    World::new(seed, shape, options)
}

impl World {
    fn part(&mut self, host: usize, node: usize) {
        self.cut_until.insert((host, node), u64::MAX);
        for connection in 0..self.connections.len() {
            let state = &self.connections[connection];
            if state.host == host && state.node == node && state.open {
                self.cut(connection);
            }
        }
    }

    /// A new initiator that does not reach one member.
    fn host_without(&mut self, node: usize) -> Result<usize, Violation> {
        let host = self.start_host()?;
        self.part(host, node);
        Ok(host)
    }

    fn wait_for(&mut self, what: &str, is_so: impl Fn(&World) -> bool) -> Result<(), Violation> {
        let end = self.now + PATIENCE;
        while !is_so(self) {
            if self.now > end {
                return Err(format!("{STOPS}: {what}"));
            }
            self.run_until(self.now + STEP)?;
        }
        Ok(())
    }

    fn wait_for_phase(&mut self, host: usize, phase: Phase) -> Result<(), Violation> {
        let what = format!("host {host} does not come to {phase:?}");
        self.wait_for(&what, |w| w.hosts[host].initiator.phase() == phase)
    }

    fn last(&self, node: usize) -> Position {
        self.nodes[node].state.last
    }
}

/// A holds writes that nobody else has. Another line begins without A, at B only; then C is made equal to
/// A. Whoever finds B and C then has two lines that part below the lowest `last` of both.
fn part_the_lines(world: &mut World) -> Result<(), Violation> {
    let first = world.start_host()?;
    world.wait_for_phase(first, Phase::Open)?;
    world.run_until(world.now + 100 * MS)?;
    world.part(first, B);
    world.part(first, C);
    world.run_until(world.now + 50 * MS)?;
    world.kill_host(first);

    let second = world.host_without(A)?;
    world.wait_for_phase(second, Phase::WaitingLease)?;
    world.part(second, C);
    let has_stored = |w: &World| {
        let configuration = w.nodes[B].state.configuration.as_ref();
        configuration.is_some_and(|c| c.epoch > EpochNumber(1))
    };
    world.wait_for("B does not store the second configuration", has_stored)?;
    world.kill_host(second);
    if world.last(A) <= world.last(C) {
        return Err(format!("{STOPS}: A holds nothing of its own"));
    }

    let third = world.host_without(B)?;
    world.wait_for_phase(third, Phase::WaitingLease)?;
    world.kill_host(third);
    if world.last(A) != world.last(C) || world.last(B) < world.last(C) {
        return Err(format!("{STOPS}: C was not made equal to A"));
    }
    Ok(())
}

fn play_out(world: &mut World, host: usize) -> Result<(), Violation> {
    world.wait_for_phase(host, Phase::Open)?;
    world.run_until(world.now + 100 * MS)
}

/// B and C are found.
fn lines_that_part_below_last(seed: u64) -> Result<(), Violation> {
    let mut world = world(seed);
    part_the_lines(&mut world)?;
    let host = world.host_without(A)?;
    play_out(&mut world, host)
}

/// Before that, C is rolled back from A's line half way, and is then found together with A: its `last`
/// says that it is where A is.
fn a_rollback_that_ends_half_way(seed: u64) -> Result<(), Violation> {
    let mut world = world(seed);
    part_the_lines(&mut world)?;
    let before = world.nodes[C].blocks.clone();
    let host = world.host_without(A)?;
    let is_touched = |w: &World| w.nodes[C].blocks != before;
    world.wait_for("C is not rolled back", is_touched)?;
    world.kill_host(host);
    let host = world.host_without(B)?;
    play_out(&mut world, host)
}

/// Plays the plot with every seed, as far as its delays let it come; most get to the end.
fn play(plot: Plot) -> Result<(), Violation> {
    let mut played = 0;
    for seed in 0..SEEDS {
        match plot(seed) {
            Ok(()) => played += 1,
            Err(stop) if stop.starts_with(STOPS) => {}
            Err(violation) => return Err(format!("seed {seed}: {violation}")),
        }
    }
    assert!(
        played > SEEDS / 2,
        "only {played} of {SEEDS} get to the end"
    );
    Ok(())
}

fn is_kept_and_found_broken(plot: Plot, fault: Fault) {
    play(plot).unwrap_or_else(|violation| panic!("{violation}"));
    break_rule(Some(fault));
    let broken = play(plot);
    break_rule(None);
    assert!(broken.is_err(), "{fault:?} was not found");
}

#[test]
fn members_on_lines_that_part_below_last_are_made_equal() {
    is_kept_and_found_broken(lines_that_part_below_last, Fault::ListAboveLast);
}

#[test]
fn members_are_made_equal_after_a_rollback_that_ended_half_way() {
    is_kept_and_found_broken(a_rollback_that_ends_half_way, Fault::ListAboveLast);
}
