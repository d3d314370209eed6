//! When each volume wants to be called. A volume's time mostly moves into the future, so an entry may
//! be early; it is looked at again then. That keeps the heap out of the way of requests.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ashlar_replication::values::Time;

use crate::front_end::VolumeHandle;

#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Time, VolumeHandle)>>,
}

impl Timers {
    /// Makes sure that there is an entry for the volume at `time` or earlier. `armed` is the volume's
    /// earliest entry.
    pub(super) fn arm(&mut self, volume: VolumeHandle, time: Time, armed: &mut Time) {
        if time < *armed {
            *armed = time;
            self.heap.push(Reverse((time, volume)));
        }
    }

    /// The earliest entry.
    pub(super) fn next(&self) -> Time {
        self.heap
            .peek()
            .map_or(Time::NEVER, |Reverse((time, _))| *time)
    }

    /// Takes an entry that is due. Its volume has to be armed again.
    pub(super) fn take_due(&mut self, now: Time) -> Option<(Time, VolumeHandle)> {
        if self.next() > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_moves_away_adds_no_entry() {
        let mut timers = Timers::default();
        let mut armed = Time::NEVER;
        for time in 10..1000 {
            timers.arm(VolumeHandle(1), Time(time), &mut armed);
        }
        assert_eq!(timers.heap.len(), 1);
        timers.arm(VolumeHandle(1), Time(5), &mut armed);
        assert_eq!((timers.next(), armed), (Time(5), Time(5)));
        assert_eq!(timers.take_due(Time(4)), None);
        assert_eq!(timers.take_due(Time(7)), Some((Time(5), VolumeHandle(1))));
        assert_eq!(timers.next(), Time(10));
    }
}
