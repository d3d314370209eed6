//! Counters of threads and volumes as Prometheus metrics.

use std::sync::Arc;

use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram as HistogramProto, LabelPair, Metric, MetricFamily,
    MetricType,
};

use super::attachments::ThreadIndex;
use crate::metrics::{BUCKETS_US, Histogram, Operation, ThreadMetrics};
use crate::nbd::NbdCounters;
use crate::status::{AttachmentState, AttachmentStatus, MemberState};

/// Series per volume are bounded by this many volumes, the first by name; the threads' histograms
/// cover all.
const VOLUMES_MAX: usize = 1000;

/// All metrics of a daemon.
pub fn all(
    threads: &[ThreadMetrics],
    volumes: &[(ThreadIndex, AttachmentStatus)],
    nbd: &[Arc<NbdCounters>],
) -> Vec<MetricFamily> {
    let mut families = Families::default();
    for (index, thread) in threads.iter().enumerate() {
        families.add_thread(&index.to_string(), thread);
    }
    let count = volumes.len() as f64;
    families.gauge(
        "ashlar_initiator_volumes",
        "Volumes that are attached.",
        &[],
        count,
    );
    for (_, volume) in volumes.iter().take(VOLUMES_MAX) {
        families.add_volume(volume);
    }
    for (index, counters) in nbd.iter().enumerate() {
        let index = index.to_string();
        for (name, value) in counters.all() {
            let help = format!("NBD server: {}.", name.replace('_', " "));
            let name = format!("ashlar_nbd_{name}_total");
            families.counter(&name, &help, &[("thread", &index)], value);
        }
    }
    families.0
}

/// Families in the order of their first appearance.
#[derive(Default)]
struct Families(Vec<MetricFamily>);

type Labels<'a> = [(&'static str, &'a str)];

impl Families {
    fn metric(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        labels: &Labels<'_>,
        fill: impl FnOnce(&mut Metric),
    ) {
        let found = self.0.iter().position(|family| family.name() == name);
        let index = found.unwrap_or_else(|| {
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(help.to_owned());
            family.set_field_type(kind);
            self.0.push(family);
            self.0.len() - 1
        });
        let label = |(name, value): &(&str, &str)| {
            let mut label = LabelPair::default();
            label.set_name((*name).to_owned());
            label.set_value((*value).to_owned());
            label
        };
        let mut metric = Metric::default();
        metric.set_label(labels.iter().map(label).collect());
        fill(&mut metric);
        self.0[index].mut_metric().push(metric);
    }

    fn counter(&mut self, name: &str, help: &str, labels: &Labels<'_>, value: u64) {
        let mut counter = Counter::default();
        counter.set_value(value as f64);
        self.metric(name, help, MetricType::COUNTER, labels, |metric| {
            metric.set_counter(counter)
        });
    }

    fn gauge(&mut self, name: &str, help: &str, labels: &Labels<'_>, value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        self.metric(name, help, MetricType::GAUGE, labels, |metric| {
            metric.set_gauge(gauge)
        });
    }

    fn add_thread(&mut self, thread: &str, metrics: &ThreadMetrics) {
        for (operation, histogram) in Operation::ALL.into_iter().zip(&metrics.latency) {
            let histogram = to_proto(histogram);
            let labels = [("thread", thread), ("operation", operation.name())];
            let name = "ashlar_initiator_request_seconds";
            let help = "Time from a front end's request to its completion.";
            self.metric(name, help, MetricType::HISTOGRAM, &labels, |metric| {
                metric.set_histogram(histogram);
            });
        }
        let labels = [("thread", thread)];
        let c = &metrics.connections;
        let counters = [
            (
                "connections_established",
                "Connections to devices made.",
                c.established,
            ),
            (
                "connections_lost",
                "Connections to devices lost, and failed attempts.",
                c.lost,
            ),
            (
                "connections_cut_off",
                "Nodes cut off because they did not read.",
                c.cut_off,
            ),
            (
                "malformed_frames",
                "Frames from nodes that were wrong.",
                c.malformed,
            ),
            (
                "checksum_mismatches",
                "Data received that did not match.",
                c.checksum_mismatches,
            ),
            (
                "bad_proofs",
                "Members that did not prove to know the key.",
                c.bad_proofs,
            ),
            ("sent_bytes", "Bytes sent to nodes.", c.bytes_sent),
            (
                "received_bytes",
                "Bytes received from nodes.",
                c.bytes_received,
            ),
            ("turns", "Turns of the thread's loop.", metrics.turns),
            (
                "fenced",
                "Attachments that another initiator ended.",
                metrics.fenced,
            ),
        ];
        for (name, help, value) in counters {
            self.counter(
                &format!("ashlar_initiator_{name}_total"),
                help,
                &labels,
                value,
            );
        }
        let up = metrics.connections_up as f64;
        let wanted = metrics.connections_wanted as f64;
        let help = "Connections to devices that are up.";
        self.gauge("ashlar_initiator_connections_up", help, &labels, up);
        let help = "Connections to devices that volumes need.";
        self.gauge("ashlar_initiator_connections_wanted", help, &labels, wanted);
    }

    fn add_volume(&mut self, volume: &AttachmentStatus) {
        let name = volume.name.as_str();
        for (operation, counters) in Operation::ALL.into_iter().zip(volume.counters.operations) {
            for (result, value) in [("ok", counters.completed), ("error", counters.failed)] {
                let labels = [
                    ("volume", name),
                    ("operation", operation.name()),
                    ("result", result),
                ];
                let help = "Requests of front ends that ended.";
                self.counter("ashlar_volume_requests_total", help, &labels, value);
            }
            let labels = [("volume", name), ("operation", operation.name())];
            let help = "Bytes of requests that ended well.";
            self.counter("ashlar_volume_bytes_total", help, &labels, counters.bytes);
        }
        let labels = [("volume", name)];
        let in_flight = volume.counters.in_flight as f64;
        self.gauge(
            "ashlar_volume_requests_in_flight",
            "Requests under way.",
            &labels,
            in_flight,
        );
        let open = f64::from(volume.state == AttachmentState::Open);
        self.gauge("ashlar_volume_open", "1 while I/O goes on.", &labels, open);
        let epoch = volume.epoch.map_or(0, |epoch| epoch.0);
        let help = "Epoch of the attachment.";
        self.gauge("ashlar_volume_epoch", help, &labels, f64::from(epoch));
        for member in &volume.members {
            let device = member.member.id.device.to_string();
            let labels = [("volume", name), ("device", device.as_str())];
            let in_sync = f64::from(member.state == MemberState::InSync);
            let help = "1 while the replica is in sync.";
            self.gauge("ashlar_replica_in_sync", help, &labels, in_sync);
            let lag = member.lag_writes as f64;
            let help = "Writes that the replica has not answered.";
            self.gauge("ashlar_replica_lag_writes", help, &labels, lag);
            let left = member
                .resync_blocks_total
                .saturating_sub(member.resync_blocks_done) as f64;
            let help = "Blocks that a resync has yet to look at.";
            self.gauge("ashlar_replica_resync_blocks_left", help, &labels, left);
        }
    }
}

fn to_proto(histogram: &Histogram) -> HistogramProto {
    let mut cumulative = 0;
    let bucket = |(bound, count): (&u64, &u64)| {
        cumulative += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound as f64 / 1e6);
        bucket.set_cumulative_count(cumulative);
        bucket
    };
    let buckets = BUCKETS_US
        .iter()
        .zip(&histogram.buckets)
        .map(bucket)
        .collect();
    let mut out = HistogramProto::default();
    out.set_bucket(buckets);
    out.set_sample_count(histogram.count());
    out.set_sample_sum(histogram.sum.as_secs_f64());
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::{Encoder as _, TextEncoder};
    use std::time::Duration;

    #[test]
    fn a_scrape_has_cumulative_buckets_in_seconds() {
        let mut thread = ThreadMetrics::default();
        thread.latency[Operation::Write as usize].record(Duration::from_micros(12));
        thread.latency[Operation::Write as usize].record(Duration::from_micros(70));
        let mut out = Vec::new();
        TextEncoder::new()
            .encode(&all(&[thread], &[], &[]), &mut out)
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        let line = |le: &str| {
            let name = "ashlar_initiator_request_seconds_bucket";
            format!("{name}{{thread=\"0\",operation=\"write\",le=\"{le}\"}}")
        };
        for (bound, count) in [("0.00001", 0), ("0.000015", 1), ("0.00008", 2), ("+Inf", 2)] {
            assert!(
                text.contains(&format!("{} {count}\n", line(bound))),
                "{bound}: {text}"
            );
        }
        assert!(text.contains("ashlar_initiator_volumes 0\n"));
    }
}
