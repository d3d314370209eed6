//! Counters and histograms of a shard: plain numbers of its thread, copied out when scraped.

use std::time::Duration;

/// Upper bounds of the latency buckets in nanoseconds, 5 µs to 10 s; the last one is infinite.
///
/// Three buckets an octave at the low end, where a device write lies, then doubling.
pub const BUCKETS_NS: [u64; 26] = [
    5_000,
    7_500,
    10_000,
    15_000,
    20_000,
    30_000,
    40_000,
    60_000,
    80_000,
    120_000,
    160_000,
    240_000,
    320_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    10_000_000_000,
];

/// A latency histogram with fixed buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// One per bound, and one for what is above all bounds. Not cumulative.
    pub counts: [u64; BUCKETS_NS.len() + 1],
    /// Sum of all values in nanoseconds.
    pub sum_ns: u64,
}

impl Histogram {
    /// Counts a value.
    pub fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.counts[BUCKETS_NS.partition_point(|bound| *bound < ns)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// How many values were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $help:literal])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[doc = $help])* pub $field: u64,)* }

        impl $name {
            /// (name, help, value) of every counter.
            pub fn all(&self) -> Vec<(&'static str, String, u64)> {
                vec![$((stringify!($field), [$($help),*].concat().trim().to_owned(), self.$field)),*]
            }
        }
    };
}

counters! {
    /// What a shard counts.
    ShardCounters {
        /// Connections accepted.
        connections,
        /// Connections refused because there were too many.
        connections_refused,
        /// Connections closed because of bytes that are not of this protocol.
        wrong_magic,
        /// Connections closed because of a wrong header or body checksum.
        frame_checksum_errors,
        /// Connections closed because of block data that does not match its checksum.
        data_checksum_errors,
        /// Connections closed because of a frame above the limits.
        oversized_frames,
        /// Connections closed because of a frame of an unknown kind.
        unknown_kinds,
        /// Connections closed because of a frame that has no place where it came.
        misplaced_frames,
        /// Connections closed because there is no common version.
        version_mismatches,
        /// Whole frames whose content is wrong; requests among them were refused.
        malformed_frames,
        /// Requests refused because nothing is attached with their handle.
        unknown_handles,
        /// Fences refused because the proof of the volume's key does not verify.
        unauthenticated_fences,
        /// Fences promised.
        fences,
        /// Requests refused because a newer epoch was promised.
        fenced_requests,
        /// Other refusals.
        refusals,
        /// Writes applied durably.
        writes,
        /// Bytes of block data in them.
        write_bytes,
        /// Reads served.
        reads,
        /// Bytes of block data in them.
        read_bytes,
        /// Reads that failed.
        read_errors,
        /// Blocks of data copied by a resync.
        copied_blocks,
        /// Blocks of data written to make replicas equal at an attach.
        equalised_blocks,
        /// Blocks repaired.
        repaired_blocks,
        /// Configurations stored.
        configurations,
        /// Times that a connection was paused because it had too much under way.
        admission_pauses,
        /// Times that a connection was paused because its peer did not take its answers.
        backlog_pauses,
        /// Turns of the shard's loop.
        turns,
    }
}

/// Everything that a scrape takes from a shard.
#[derive(Clone, Debug, Default)]
pub struct ShardMetrics {
    /// Counters.
    pub counters: ShardCounters,
    /// From the frame's arrival at the store until the write was durable.
    pub write_journal: Histogram,
    /// From the frame's arrival at the store until the data was there.
    pub read_device: Histogram,
    /// Time in the scheduler's queue, of requests that had to wait.
    pub queue: Histogram,
    /// Gauges, filled in at the scrape: (name, help, value).
    pub gauges: Vec<(&'static str, &'static str, f64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_fall_into_the_bucket_whose_bound_they_do_not_exceed() {
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_micros(5));
        histogram.record(Duration::from_nanos(5_001));
        histogram.record(Duration::from_secs(100));
        assert_eq!(histogram.counts[0], 1);
        assert_eq!(histogram.counts[1], 1);
        assert_eq!(histogram.counts[BUCKETS_NS.len()], 1);
        assert_eq!(histogram.count(), 3);
    }
}
