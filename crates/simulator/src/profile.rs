//! What a schedule is like: its members, settings and how often each kind of trouble comes.

use core::time::Duration;

use ashlar_replication::configuration::Ack;
use ashlar_replication::initiator::Options;

use super::random::Random;

/// A millisecond in nanoseconds.
pub(super) const MS: u64 = 1_000_000;

/// What kinds of members there are, and what a write needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) data: usize,
    pub(super) witnesses: usize,
    pub(super) ack: Ack,
}

/// What can go wrong, in the order of [`Profile::weights`].
const KINDS: usize = 13;

/// What a schedule is like.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    pub(super) shape: Shape,
    pub(super) options: Options,
    pub(super) length: u64,
    /// How often each kind of trouble comes, relative to the others.
    pub(super) weights: [u64; KINDS],
    /// Time between two troubles.
    pub(super) pause: u64,
    pub(super) may_be_full: bool,
    /// Initiators are taken over from at the worst moments.
    pub(super) takeovers: bool,
    /// One attach in so many dies at each of its steps.
    pub(super) attach_deaths: u64,
}

const SHAPES: [Shape; 9] = [
    shape(3, 0, Ack::Majority),
    shape(3, 0, Ack::Majority),
    shape(3, 0, Ack::Majority),
    shape(2, 1, Ack::Majority),
    shape(2, 1, Ack::Majority),
    shape(3, 2, Ack::Majority),
    shape(3, 0, Ack::All),
    shape(2, 0, Ack::Majority),
    shape(1, 0, Ack::Majority),
];

const fn shape(data: usize, witnesses: usize, ack: Ack) -> Shape {
    Shape {
        data,
        witnesses,
        ack,
    }
}

impl Profile {
    pub(super) fn of(random: &mut Random) -> Profile {
        let shape = *random.pick(&SHAPES);
        let may_be_full = random.one_in(6);
        let mut weights = [0; KINDS];
        for weight in &mut weights[..12] {
            *weight = random.below(4) * random.below(4);
        }
        // Only in schedules of their own: full devices; the same for evicted ones.
        weights[8] = if may_be_full { 6 } else { 0 };
        weights[9] *= u64::from(random.one_in(4));
        weights[0] += 1;
        let ms = Duration::from_millis;
        let options = Options {
            min_in_sync: random.one_in(2).then_some(1),
            lease: ms(random.between(40, 160)),
            clock_drift_ppm: 2_000,
            attach_wait: ms(random.between(0, 20)),
            equalise_wait: ms(300),
            down_grace: ms(random.between(5, 60)),
            lag_writes_max: random.between(3, 24),
            lag_bytes_max: random.between(16, 256) << 10,
            window_writes_max: random.between(1, 10) as usize,
            window_bytes_max: random.between(8, 128) << 10,
            resync_extents_max: random.between(1, 3) as usize,
            read_timeout: ms(random.between(3, 60)),
            io_timeout: random.one_in(3).then(|| ms(random.between(50, 300))),
        };
        let mut profile = Profile {
            shape,
            options,
            length: random.between(300, 900) * MS,
            weights,
            pause: random.between(3, 30) * MS,
            may_be_full,
            takeovers: random.one_in(3),
            attach_deaths: *random.pick(&[0, 0, 2, 4, 8]),
        };
        // Drawn last: schedules without an administrator are as they were.
        if random.one_in(3) {
            profile.weights[12] = random.between(2, 24);
        }
        profile
    }

    /// Troubles that are switches of the model alone: full devices, evicted members, spoiled blocks.
    pub(super) fn without_switches(&mut self) {
        self.may_be_full = false;
        for kind in [8, 9] {
            self.weights[kind] = 0;
        }
    }
}
