//! `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus::proto::{self, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder as _, TextEncoder};

use crate::metrics::{BUCKETS_NS, Histogram, ShardMetrics};
use crate::service::{Device, ask};
use crate::shard::commands::Command;

/// The routes of a node.
pub fn router(devices: Arc<[Device]>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(devices)
}

/// Ready when every shard answers and no device is closed.
async fn ready(State(devices): State<Arc<[Device]>>) -> (StatusCode, String) {
    let mut text = String::new();
    let mut ready = true;
    for device in devices.iter() {
        let state = match ask(&device.shard, Command::Device).await {
            Ok(info) if !info.closed => "open".to_owned(),
            Ok(_) => "closed after an error".to_owned(),
            Err(error) => error.to_string(),
        };
        ready &= state == "open";
        text.push_str(&format!("device {} {state}\n", device.id));
    }
    (
        if ready {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        },
        text,
    )
}

async fn metrics(State(devices): State<Arc<[Device]>>) -> axum::response::Response {
    let mut families = Families::default();
    for device in devices.iter() {
        if let Ok(metrics) = ask(&device.shard, Command::Metrics).await {
            families.add(&device.id.to_string(), &metrics);
        }
    }
    let mut out = Vec::new();
    let encoder = TextEncoder::new();
    match encoder.encode(&families.0, &mut out) {
        Ok(()) => (
            [(header::CONTENT_TYPE, encoder.format_type().to_owned())],
            out,
        )
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Families in the order of their first appearance.
#[derive(Default)]
struct Families(Vec<MetricFamily>);

impl Families {
    fn metric(&mut self, name: String, help: &str, kind: MetricType, device: &str) -> &mut Metric {
        let found = self.0.iter().position(|family| family.name() == name);
        let index = found.unwrap_or_else(|| {
            let mut family = MetricFamily::default();
            family.set_name(name);
            family.set_help(help.to_owned());
            family.set_field_type(kind);
            self.0.push(family);
            self.0.len() - 1
        });
        let mut label = LabelPair::default();
        label.set_name("device".to_owned());
        label.set_value(device.to_owned());
        let mut metric = Metric::default();
        metric.set_label(vec![label]);
        let metrics = self.0[index].mut_metric();
        metrics.push(metric);
        let last = metrics.len() - 1;
        &mut metrics[last]
    }

    fn add(&mut self, device: &str, shard: &ShardMetrics) {
        for (name, help, value) in shard.counters.all() {
            let name = format!("ashlar_device_{name}_total");
            let mut counter = proto::Counter::default();
            counter.set_value(value as f64);
            self.metric(name, &help, MetricType::COUNTER, device)
                .set_counter(counter);
        }
        for (name, help, value) in &shard.gauges {
            let name = format!("ashlar_device_{name}");
            let mut gauge = proto::Gauge::default();
            gauge.set_value(*value);
            self.metric(name, help, MetricType::GAUGE, device)
                .set_gauge(gauge);
        }
        let histograms = [
            (
                "write_journal",
                "Time of a write from its arrival until it was durable.",
                &shard.write_journal,
            ),
            (
                "read",
                "Time of a read from its arrival until its data was there.",
                &shard.read_device,
            ),
            (
                "queue",
                "Time in the scheduler's queue, of requests that had to wait.",
                &shard.queue,
            ),
        ];
        for (name, help, histogram) in histograms {
            let name = format!("ashlar_device_{name}_seconds");
            self.metric(name, help, MetricType::HISTOGRAM, device)
                .set_histogram(to_proto(histogram));
        }
    }
}

fn to_proto(histogram: &Histogram) -> proto::Histogram {
    let mut cumulative = 0;
    let bucket = |(bound, count): (&u64, &u64)| {
        cumulative += count;
        let mut bucket = proto::Bucket::default();
        bucket.set_upper_bound(*bound as f64 / 1e9);
        bucket.set_cumulative_count(cumulative);
        bucket
    };
    let buckets = BUCKETS_NS
        .iter()
        .zip(&histogram.counts)
        .map(bucket)
        .collect();
    let mut out = proto::Histogram::default();
    out.set_bucket(buckets);
    out.set_sample_count(histogram.count());
    out.set_sample_sum(histogram.sum_ns as f64 / 1e9);
    out
}
