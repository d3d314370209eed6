//! When to connect again.

use std::time::Duration;

use ashlar_replication::values::Time;

use crate::random::Jitter;

/// The first wait, after one attempt that was made at once.
const FIRST: Duration = Duration::from_millis(10);
/// The longest wait: I/O has to go on within a second of a node's return.
const LONGEST: Duration = Duration::from_millis(500);
/// A connection that lived this long was good: the next loss starts from the beginning.
const GOOD: Duration = Duration::from_secs(1);

/// Waits between attempts: none, then 10 ms, doubling to 500 ms.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    /// Attempts since the last good connection.
    attempts: u32,
    jitter: Jitter,
}

impl Backoff {
    pub(crate) fn new(seed: u64) -> Backoff {
        Backoff {
            attempts: 0,
            jitter: Jitter::new(seed),
        }
    }

    /// A connection that was up since `since` has ended. Short ones do not count as good, else a
    /// peer that closes every connection would be called without a pause.
    pub(crate) fn was_up(&mut self, since: Time, now: Time) {
        if now.since(since) >= GOOD {
            self.attempts = 0;
        }
    }

    /// When to try again after a failure now.
    pub(crate) fn next(&mut self, now: Time) -> Time {
        let attempt = self.attempts;
        self.attempts = attempt.saturating_add(1);
        if attempt == 0 {
            return now;
        }
        let wait = FIRST
            .saturating_mul(1 << (attempt - 1).min(10))
            .min(LONGEST);
        now + self.jitter.shorten(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(backoff: &mut Backoff, count: usize) -> Vec<Duration> {
        (0..count)
            .map(|_| backoff.next(Time(0)).since(Time(0)))
            .collect()
    }

    #[test]
    fn the_first_attempt_is_made_at_once_and_the_wait_ends_at_half_a_second() {
        let waits = waits(&mut Backoff::new(1), 40);
        assert_eq!(waits[0], Duration::ZERO);
        assert!(waits[1] <= FIRST && waits[1] >= FIRST * 3 / 4);
        assert!(waits[2] > waits[1]);
        assert!(waits.iter().all(|wait| *wait <= LONGEST));
        assert!(waits[39] >= LONGEST * 3 / 4);
    }

    #[test]
    fn a_connection_that_ends_soon_does_not_reset_the_wait() {
        let mut backoff = Backoff::new(1);
        waits(&mut backoff, 10);
        backoff.was_up(Time(0), Time(0) + GOOD - Duration::from_millis(1));
        assert!(waits(&mut backoff, 1)[0] > Duration::ZERO);
        backoff.was_up(Time(0), Time(0) + GOOD);
        assert_eq!(waits(&mut backoff, 1)[0], Duration::ZERO);
    }
}
