//! How long a poll spins before it sleeps.
//!
//! Spinning saves the wake-up when the next event is near, and only burns power, or takes the core
//! from the very thread that would produce the event, when it is not. So it must have paid lately.

use std::time::Duration;

use ashlar_replication::values::Time;

/// Hits in a row after which spinning counts as proven. A single one can be luck: a thread that
/// spins on the core of its peer is interrupted now and then, and then finds something.
const HITS_TO_PROVE: u32 = 16;
/// Misses until spinning stops once it was proven; before, the first one stops it.
const MISSES_MAX: u32 = 3;
/// Short sleeps after which it is tried again; doubles with each failed trial up to the maximum.
const REST_MIN: u32 = 16;
const REST_MAX: u32 = 4096;

pub(crate) struct Spin {
    limit: Duration,
    hits: u32,
    /// Misses to go until spinning stops.
    credit: u32,
    /// Short sleeps to go until spinning is tried again.
    rest: u32,
    rest_next: u32,
}

impl Spin {
    pub(crate) fn new(limit: Duration) -> Spin {
        Spin {
            limit,
            hits: 0,
            credit: 1,
            rest: 0,
            rest_next: REST_MIN,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        !self.limit.is_zero()
    }

    /// When a poll that starts now should stop spinning.
    pub(crate) fn until(&self, now: Time) -> Time {
        if self.limit.is_zero() || self.rest > 0 {
            now
        } else {
            now + self.limit
        }
    }

    /// Something happened while spinning.
    pub(crate) fn hit(&mut self) {
        self.hits += 1;
        if self.hits >= HITS_TO_PROVE {
            self.hits = 0;
            self.credit = MISSES_MAX;
            self.rest_next = REST_MIN;
        }
    }

    /// Something happened after sleeping. `waited` says how long after the start of the poll; it
    /// is only asked when spinning is on.
    pub(crate) fn slept(&mut self, spun: bool, waited: impl FnOnce() -> Duration) {
        if self.limit.is_zero() {
            return;
        }
        if spun {
            self.hits = 0;
            self.credit -= 1;
            if self.credit == 0 {
                self.credit = 1;
                self.rest = self.rest_next;
                self.rest_next = (self.rest_next * 2).min(REST_MAX);
            }
        } else if waited() < self.limit {
            // It would have been a hit, if this core had nothing better to do.
            self.rest -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(50);

    fn spins(spin: &Spin) -> bool {
        spin.until(Time(1)) > Time(1)
    }

    #[test]
    fn zero_never_spins() {
        assert!(!spins(&Spin::new(Duration::ZERO)));
    }

    #[test]
    fn an_idle_engine_stops_spinning_and_starts_again_when_events_come_quickly() {
        let mut spin = Spin::new(LIMIT);
        for _ in 0..HITS_TO_PROVE {
            spin.hit();
        }
        for _ in 0..MISSES_MAX {
            assert!(spins(&spin));
            spin.slept(true, || Duration::from_secs(1));
        }
        for _ in 0..1000 {
            assert!(!spins(&spin));
            spin.slept(false, || Duration::from_secs(1));
        }
        for _ in 0..REST_MIN {
            assert!(!spins(&spin));
            spin.slept(false, || Duration::from_micros(10));
        }
        assert!(spins(&spin));
    }

    #[test]
    fn lucky_hits_do_not_prove_spinning() {
        let mut spin = Spin::new(LIMIT);
        let mut spun = 0;
        for round in 0..10_000 {
            let spinning = spins(&spin);
            spun += u32::from(spinning);
            if spinning && round % 3 == 0 {
                spin.hit();
            } else {
                spin.slept(spinning, || Duration::from_micros(10));
            }
        }
        assert!(spun < 100, "{spun}");
    }

    #[test]
    fn trials_become_rare_when_spinning_only_delays_the_event() {
        let mut spin = Spin::new(LIMIT);
        let mut spun = 0;
        for _ in 0..10_000 {
            let spinning = spins(&spin);
            spun += u32::from(spinning);
            spin.slept(spinning, || Duration::from_micros(10));
        }
        assert!(spun < 50, "{spun}");
    }
}
