//! Latencies and rates: collected while a load runs, summed up afterwards.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies above this are counted as this: a minute without an answer.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// Collects latencies of operations. Recording allocates nothing.
#[derive(Clone, Debug)]
pub struct Recorder {
    total: Histogram<u64>,
    interval: Histogram<u64>,
    busy: Duration,
    interval_busy: Duration,
    request_bytes: u64,
    errors: u64,
}

/// Rates and latencies of a load. Part of the JSON output of `ashlar bench`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Operations completed.
    pub operations: u64,
    /// Seconds in which the load ran, without the slices of the other loads.
    pub seconds: f64,
    /// Operations per second.
    pub iops: f64,
    /// Payload bandwidth in 10⁶ bytes per second.
    pub mb_per_s: f64,
    /// Mean latency in microseconds, from handing the request over to its completion.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p99_9_us: f64,
    /// The slowest operation.
    pub max_us: f64,
}

fn histogram() -> Histogram<u64> {
    // Three digits from a nanosecond to a minute fit into 300 KiB.
    let mut histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)
        .unwrap_or_else(|error| panic!("the bounds are valid constants: {error}"));
    histogram.auto(false);
    histogram
}

impl Recorder {
    /// For requests of `request_bytes`.
    pub fn new(request_bytes: u64) -> Recorder {
        Recorder {
            total: histogram(),
            interval: histogram(),
            busy: Duration::ZERO,
            interval_busy: Duration::ZERO,
            request_bytes,
            errors: 0,
        }
    }

    /// One operation failed.
    pub fn failed(&mut self) {
        self.errors += 1;
    }

    /// Operations that failed.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// One operation completed after `latency`.
    pub fn record(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.interval
            .saturating_record(nanos.clamp(1, LATENCY_NS_MAX));
    }

    /// One operation that began at `start` completes now; returns now.
    pub fn record_since(&mut self, start: Instant) -> Instant {
        let now = Instant::now();
        self.record(now.saturating_duration_since(start));
        now
    }

    /// The load ran for `duration` to its last completion.
    pub fn ran(&mut self, duration: Duration) {
        self.interval_busy += duration;
    }

    /// Adds what another recorder collected; the time is the caller's.
    pub fn merge_latencies(&mut self, other: &Recorder) {
        for histogram in [&other.total, &other.interval] {
            // Both have the same bounds.
            let _ = self.interval.add(histogram);
        }
        self.errors += other.errors;
    }

    /// Adds what another recorder collected, and its time.
    pub fn merge(&mut self, other: &Recorder) {
        self.merge_latencies(other);
        self.interval_busy += other.busy + other.interval_busy;
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.total.reset();
        self.interval.reset();
        self.busy = Duration::ZERO;
        self.interval_busy = Duration::ZERO;
        self.errors = 0;
    }

    /// What was collected since the last call.
    pub fn take_interval(&mut self) -> Summary {
        let summary = summary(&self.interval, self.interval_busy, self.request_bytes);
        // Both have the same bounds.
        let _ = self.total.add(&self.interval);
        self.interval.reset();
        self.busy += self.interval_busy;
        self.interval_busy = Duration::ZERO;
        summary
    }

    /// What was collected in all.
    pub fn summary(&mut self) -> Summary {
        self.take_interval();
        summary(&self.total, self.busy, self.request_bytes)
    }
}

fn summary(histogram: &Histogram<u64>, busy: Duration, request_bytes: u64) -> Summary {
    let operations = histogram.len();
    if operations == 0 {
        return Summary {
            seconds: busy.as_secs_f64(),
            ..Summary::default()
        };
    }
    let micros = |nanos: u64| round(nanos as f64 / 1e3, 2);
    let seconds = busy.as_secs_f64();
    let per_second = |count: u64| {
        if seconds > 0.0 {
            count as f64 / seconds
        } else {
            0.0
        }
    };
    Summary {
        operations,
        seconds: round(seconds, 3),
        iops: round(per_second(operations), 1),
        mb_per_s: round(per_second(operations * request_bytes) / 1e6, 2),
        mean_us: round(histogram.mean() / 1e3, 2),
        p50_us: micros(histogram.value_at_quantile(0.5)),
        p90_us: micros(histogram.value_at_quantile(0.9)),
        p99_us: micros(histogram.value_at_quantile(0.99)),
        p99_9_us: micros(histogram.value_at_quantile(0.999)),
        max_us: micros(histogram.max()),
    }
}

/// Rounds to `digits` behind the point: more would claim a precision that is not there.
pub fn round(value: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (value * factor).round() / factor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_rates_follow_from_what_was_recorded() {
        let mut recorder = Recorder::new(4096);
        for micros in 1..=1000 {
            recorder.record(Duration::from_micros(micros));
        }
        recorder.ran(Duration::from_millis(500));
        let s = recorder.summary();
        assert_eq!((s.operations, s.iops, s.mb_per_s), (1000, 2000.0, 8.19));
        for (got, want) in [(s.p50_us, 500.0), (s.p90_us, 900.0), (s.p99_us, 990.0)] {
            assert!((got - want).abs() / want < 0.002, "{got} {want}");
        }
        assert!((s.max_us - 1000.0).abs() < 1.0 && (s.mean_us - 500.5).abs() < 0.5);
    }

    #[test]
    fn intervals_add_up_to_the_total_and_extreme_values_are_kept_in_bounds() {
        let mut recorder = Recorder::new(1);
        recorder.record(Duration::ZERO);
        recorder.ran(Duration::from_secs(1));
        assert_eq!(recorder.take_interval().operations, 1);
        recorder.record(Duration::from_secs(3600));
        recorder.ran(Duration::from_secs(1));
        assert_eq!(recorder.take_interval().operations, 1);
        assert_eq!(recorder.take_interval(), Summary::default());
        let s = recorder.summary();
        assert_eq!((s.operations, s.seconds, s.iops), (2, 2.0, 1.0));
        assert!(s.max_us > 59e6 && s.max_us < 61e6);
    }

    #[test]
    fn merged_recorders_hold_what_both_saw() {
        let mut a = Recorder::new(1);
        let mut b = Recorder::new(1);
        a.record(Duration::from_micros(1));
        b.record(Duration::from_micros(3));
        b.ran(Duration::from_secs(2));
        a.merge(&b);
        let s = a.summary();
        assert_eq!((s.operations, s.mean_us, s.seconds), (2, 2.0, 2.0));
    }
}
