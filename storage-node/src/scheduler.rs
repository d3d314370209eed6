//! One queue per device: mClock (Gulati et al., OSDI 2010) with a reservation, a weight and a limit
//! per class. Pure: time is passed in.
//!
//! An idle device passes a request straight through ([`Scheduler::admit`]); only what has to wait is
//! queued. There is one queue per device because budgets split over several queues leave a client at
//! depth 1 with a fraction of its share.

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_replication::values::Time;

/// Cost of an operation in bytes of device time: real bytes, plus what any operation costs by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(pub u64);

impl Cost {
    /// What an operation costs beside its bytes: on the flash drives that this was weighed on, the time
    /// of an operation without data is about that of moving 16 KiB.
    pub const OPERATION: u64 = 16 << 10;

    /// The cost of an operation that moves so many bytes.
    pub fn of_bytes(bytes: u64) -> Cost {
        Cost(Cost::OPERATION + bytes)
    }
}

/// Reservation, weight and limit of a class; rates in [`Cost`] per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// Served first up to this rate; 0: none.
    pub reservation: f64,
    /// Share of what is left.
    pub weight: f64,
    /// Never above this rate; infinite: no limit.
    pub limit: f64,
}

impl Default for Shares {
    fn default() -> Shares {
        Shares {
            reservation: 0.0,
            weight: 1.0,
            limit: f64::INFINITY,
        }
    }
}

/// A class of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

/// What a class looks like now.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassDump {
    /// Which class.
    pub class: ClassId,
    /// Its shares.
    pub shares: Shares,
    /// Requests that wait.
    pub depth: usize,
    /// The cost of them.
    pub queued: Cost,
    /// When its reservation is due, in seconds from now; negative: overdue.
    pub reservation_tag: f64,
    /// Its weight tag, relative to the smallest active one.
    pub weight_tag: f64,
    /// When its limit allows the next request, in seconds from now.
    pub limit_tag: f64,
}

struct Class<T> {
    shares: Shares,
    queue: VecDeque<(Cost, T)>,
    queued: Cost,
    /// Seconds on the scheduler's clock.
    reservation_tag: f64,
    limit_tag: f64,
    /// Virtual time.
    weight_tag: f64,
    in_use: bool,
}

/// The queue of a device.
pub struct Scheduler<T> {
    classes: Vec<Class<T>>,
    /// Classes with requests that wait.
    active: Vec<u32>,
    in_flight: Cost,
    in_flight_max: Cost,
    virtual_time: f64,
}

fn seconds(now: Time) -> f64 {
    now.0 as f64 / 1e9
}

/// How far a class that was idle may have saved up, in seconds: enough to absorb the jitter of one
/// wake-up, too little for a burst that others would feel.
const BURST_SECONDS: f64 = 0.002;

impl<T> Scheduler<T> {
    /// A scheduler that keeps at most `in_flight_max` on the device.
    pub fn new(in_flight_max: Cost) -> Scheduler<T> {
        Scheduler {
            classes: Vec::new(),
            active: Vec::new(),
            in_flight: Cost(0),
            in_flight_max,
            virtual_time: 0.0,
        }
    }

    /// Adds a class; ids of removed classes are used again.
    pub fn add_class(&mut self, shares: Shares) -> ClassId {
        let class = Class {
            shares,
            queue: VecDeque::new(),
            queued: Cost(0),
            reservation_tag: 0.0,
            limit_tag: 0.0,
            weight_tag: self.virtual_time,
            in_use: true,
        };
        match self
            .classes
            .iter()
            .position(|c| !c.in_use && c.queue.is_empty())
        {
            Some(free) => {
                self.classes[free] = class;
                ClassId(free as u32)
            }
            None => {
                self.classes.push(class);
                ClassId(self.classes.len() as u32 - 1)
            }
        }
    }

    /// Removes a class; what still waits in it is served first.
    pub fn remove_class(&mut self, class: ClassId) {
        self.classes[class.0 as usize].in_use = false;
    }

    /// Changes the shares of a class; takes effect with the next request.
    pub fn set_shares(&mut self, class: ClassId, shares: Shares) {
        let class = &mut self.classes[class.0 as usize];
        class.shares = shares;
        class.limit_tag = 0.0;
        class.reservation_tag = 0.0;
    }

    /// Whether a request of this class may start at once, without being queued. Charges it if so.
    pub fn admit(&mut self, now: Time, class: ClassId, cost: Cost) -> bool {
        let free = self.active.is_empty() && self.has_room();
        let allowed = self.classes[class.0 as usize].limit_tag <= seconds(now);
        if free && allowed {
            self.charge(now, class, cost);
        }
        free && allowed
    }

    fn has_room(&self) -> bool {
        // One request is always let through, so that one larger than the maximum is not stuck.
        self.in_flight < self.in_flight_max
    }

    fn charge(&mut self, now: Time, class: ClassId, cost: Cost) {
        let now = seconds(now);
        self.in_flight.0 += cost.0;
        let c = &mut self.classes[class.0 as usize];
        let amount = cost.0 as f64;
        if c.shares.reservation > 0.0 {
            let from = c.reservation_tag.max(now - BURST_SECONDS);
            c.reservation_tag = from + amount / c.shares.reservation;
        }
        c.limit_tag = c.limit_tag.max(now - BURST_SECONDS) + amount / c.shares.limit;
        c.weight_tag = c.weight_tag.max(self.virtual_time) + amount / c.shares.weight;
    }

    /// Queues a request that was not admitted.
    pub fn enqueue(&mut self, class: ClassId, cost: Cost, item: T) {
        let c = &mut self.classes[class.0 as usize];
        if c.queue.is_empty() {
            c.weight_tag = c.weight_tag.max(self.virtual_time);
            self.active.push(class.0);
        }
        c.queue.push_back((cost, item));
        c.queued.0 += cost.0;
    }

    /// Whether requests of the class wait: later ones have to queue behind them.
    pub fn is_queued(&self, class: ClassId) -> bool {
        !self.classes[class.0 as usize].queue.is_empty()
    }

    /// Whether anything waits.
    pub fn has_waiting(&self) -> bool {
        !self.active.is_empty()
    }

    /// The next request to start, if the device has room and a class may go.
    pub fn dispatch(&mut self, now: Time) -> Option<(ClassId, Cost, T)> {
        if self.active.is_empty() || !self.has_room() {
            return None;
        }
        let at = seconds(now);
        let due = |c: &Class<T>| c.shares.reservation > 0.0 && c.reservation_tag <= at;
        let reserved = self.best(|c| due(c).then_some(c.reservation_tag));
        let chosen = match reserved {
            Some(chosen) => chosen,
            None => {
                let chosen = self.best(|c| (c.limit_tag <= at).then_some(c.weight_tag))?;
                let tag = self.classes[self.active[chosen] as usize].weight_tag;
                self.virtual_time = self.virtual_time.max(tag);
                chosen
            }
        };
        let id = ClassId(self.active[chosen]);
        let class = &mut self.classes[id.0 as usize];
        let (cost, item) = class.queue.pop_front()?;
        class.queued.0 -= cost.0;
        if class.queue.is_empty() {
            self.active.swap_remove(chosen);
        }
        self.charge(now, id, cost);
        Some((id, cost, item))
    }

    /// Index in `active` of the class with the smallest key.
    fn best(&self, key: impl Fn(&Class<T>) -> Option<f64>) -> Option<usize> {
        let keys = self.active.iter().enumerate();
        keys.filter_map(|(n, class)| Some((n, key(&self.classes[*class as usize])?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(n, _)| n)
    }

    /// A request that was admitted or dispatched has left the device.
    pub fn finished(&mut self, cost: Cost) {
        self.in_flight.0 = self.in_flight.0.saturating_sub(cost.0);
        if self.active.is_empty() && self.in_flight.0 == 0 {
            // Nothing competes: weight tags start level again.
            self.virtual_time = self.classes.iter().fold(0.0, |t, c| t.max(c.weight_tag));
        }
    }

    /// When to call [`Scheduler::dispatch`] again though nothing finishes: a limit or reservation
    /// becomes due.
    pub fn next_time(&self) -> Time {
        if !self.has_room() {
            return Time::NEVER;
        }
        let when = |class: &u32| {
            let c = &self.classes[*class as usize];
            let reserved = c.shares.reservation > 0.0;
            if reserved {
                c.limit_tag.min(c.reservation_tag)
            } else {
                c.limit_tag
            }
        };
        let earliest = self.active.iter().map(when).min_by(f64::total_cmp);
        earliest.map_or(Time::NEVER, |s| {
            Time(0) + Duration::from_secs_f64(s.max(0.0))
        })
    }

    /// The state of every class.
    pub fn dump(&self, now: Time) -> Vec<ClassDump> {
        let at = seconds(now);
        let classes = self.classes.iter().enumerate().filter(|(_, c)| c.in_use);
        let dump = |(n, c): (usize, &Class<T>)| ClassDump {
            class: ClassId(n as u32),
            shares: c.shares,
            depth: c.queue.len(),
            queued: c.queued,
            reservation_tag: c.reservation_tag - at,
            weight_tag: c.weight_tag - self.virtual_time,
            limit_tag: c.limit_tag - at,
        };
        classes.map(dump).collect()
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
