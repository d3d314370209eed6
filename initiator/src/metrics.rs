//! Counters and latency histograms of a thread: plain numbers that only the thread itself changes,
//! handed over as a copy when somebody asks.

use std::time::Duration;

use crate::connection::ConnectionCounters;
use crate::front_end::ByteRequest;

/// Upper bounds of the buckets of a [`Histogram`], in microseconds. From below a loopback round trip
/// to a stall that somebody will ask about.
pub const BUCKETS_US: [u64; 24] = [
    10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 750, 1_000, 2_000, 3_000, 5_000, 10_000,
    20_000, 50_000, 100_000, 500_000, 1_000_000, 10_000_000,
];

/// Latencies in fixed buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Not cumulative; the last bucket is for what is above all bounds.
    pub buckets: [u64; BUCKETS_US.len() + 1],
    /// Sum of all latencies.
    pub sum: Duration,
}

impl Histogram {
    /// Adds a latency.
    pub fn record(&mut self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.buckets[BUCKETS_US.partition_point(|bound| *bound < micros)] += 1;
        self.sum += latency;
    }

    /// Number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Adds what another one holds.
    pub fn merge(&mut self, other: &Histogram) {
        self.buckets
            .iter_mut()
            .zip(other.buckets)
            .for_each(|(to, from)| *to += from);
        self.sum += other.sum;
    }
}

/// Kinds of byte requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Reads.
    Read,
    /// Writes of data.
    Write,
    /// Discards and writes of zeroes.
    Zero,
    /// Flushes.
    Flush,
    /// Questions about allocation.
    Allocation,
}

impl Operation {
    /// All of them, in the order of their numbers.
    pub const ALL: [Operation; 5] = [
        Operation::Read,
        Operation::Write,
        Operation::Zero,
        Operation::Flush,
        Operation::Allocation,
    ];

    /// As metrics and logs name it.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Zero => "zero",
            Operation::Flush => "flush",
            Operation::Allocation => "allocation",
        }
    }

    /// The kind of a request, and its bytes.
    pub fn of(request: &ByteRequest<'_>) -> (Operation, u64) {
        match request {
            ByteRequest::Read { len, .. } => (Operation::Read, u64::from(*len)),
            ByteRequest::Write { data, .. } => (Operation::Write, data.len() as u64),
            ByteRequest::WriteShared { data, .. } => (Operation::Write, data.len() as u64),
            ByteRequest::Zero { len, .. } => (Operation::Zero, *len),
            ByteRequest::Flush => (Operation::Flush, 0),
            ByteRequest::Allocation { len, .. } => (Operation::Allocation, *len),
        }
    }
}

/// What became of the requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCounters {
    /// Ended well.
    pub completed: u64,
    /// Ended in an error.
    pub failed: u64,
    /// Bytes of those that ended well.
    pub bytes: u64,
}

/// Counters of one volume, by [`Operation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeCounters {
    /// In the order of [`Operation::ALL`].
    pub operations: [OperationCounters; 5],
    /// Requests under way.
    pub in_flight: u64,
}

/// Everything a thread counts.
#[derive(Clone, Debug, Default)]
pub struct ThreadMetrics {
    /// Latencies from a front end's request to its completion, in the order of [`Operation::ALL`].
    pub latency: [Histogram; 5],
    /// Of the connections to members.
    pub connections: ConnectionCounters,
    /// Connections that are up.
    pub connections_up: usize,
    /// Connections that volumes need.
    pub connections_wanted: usize,
    /// Turns of the thread's loop.
    pub turns: u64,
    /// Attachments that another initiator ended.
    pub fenced: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_counts_in_the_bucket_whose_bound_it_does_not_exceed() {
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_micros(10));
        histogram.record(Duration::from_micros(11));
        histogram.record(Duration::from_secs(3600));
        assert_eq!(histogram.buckets[0], 1);
        assert_eq!(histogram.buckets[1], 1);
        assert_eq!(histogram.buckets[BUCKETS_US.len()], 1);
        let mut both = histogram.clone();
        both.merge(&histogram);
        assert_eq!(both.count(), 6);
    }

    #[test]
    fn operations_are_found_at_their_number() {
        for (i, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, i);
        }
    }
}
