//! What `ashlar bench` prints in the end.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::bench::pattern::Mode;
use crate::bench::runner::Outcome;
use crate::bench::statistics::{Summary, round};
use crate::output;
use crate::state::Ack;
use crate::units::{Size, count_text, micros_text};

/// The JSON document of `ashlar bench -o json`. docs/bench.md describes the fields.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// "write", "read", "randwrite" or "randread".
    pub mode: Mode,
    /// Bytes in a request.
    pub size_bytes: u64,
    /// Requests in flight per volume.
    pub depth: usize,
    /// Copies of the volume.
    pub replicas: usize,
    /// Volumes loaded at once.
    pub volumes: usize,
    /// "ram", "disk" or the directory; the volume's name for an existing one.
    pub store: String,
    /// "library" or "nbd".
    pub front_end: &'static str,
    /// What the nodes say they use: "io_uring" or "portable".
    pub engine: String,
    /// "majority" or "all".
    pub ack: Ack,
    /// Which CPUs client and replicas ran on.
    pub pinning: String,
    /// How long processes spun before they slept, in microseconds.
    pub busy_poll_us: u64,
    /// Rates and latencies of the volume.
    #[serde(flatten)]
    pub summary: Summary,
    /// Operations that failed. They are in no other figure.
    pub errors: u64,
    /// CPU time per operation of each process, in microseconds.
    pub cpu_us_per_operation: BTreeMap<String, f64>,
    /// Bytes that all devices together wrote per byte that the client wrote; `null` for reads.
    pub device_bytes_per_client_byte: Option<f64>,
    /// The floor at the same depth: plain sockets to as many processes, no protocol.
    pub floor: Option<Baseline>,
    /// The floor at depth 1, where the depth is another.
    pub floor_depth_1: Option<Baseline>,
    /// The device alone, one process.
    pub raw: Option<Baseline>,
    /// `p50_us` over the floor's.
    pub p50_over_floor: Option<f64>,
}

/// A baseline in the report.
#[derive(Clone, Debug, Serialize)]
pub struct Baseline {
    /// Rates and latencies.
    #[serde(flatten)]
    pub summary: Summary,
    /// CPU time per operation of each process, in microseconds.
    pub cpu_us_per_operation: BTreeMap<String, f64>,
}

impl From<Outcome> for Baseline {
    fn from(outcome: Outcome) -> Baseline {
        Baseline {
            summary: outcome.summary,
            cpu_us_per_operation: outcome.cpu_us_per_operation,
        }
    }
}

/// `p50_us` over the floor's.
pub fn ratio(summary: &Summary, floor: Option<&Baseline>) -> Option<f64> {
    let floor = floor?.summary.p50_us;
    (floor > 0.0).then(|| round(summary.p50_us / floor, 2))
}

/// The report for people.
pub fn text(report: &Report) -> String {
    let mut table = output::table([
        "",
        "IOPS",
        "MB/s",
        "mean",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "max",
        "operations",
    ]);
    let mut row = |name: &str, s: &Summary| {
        table.add_row([
            name.to_owned(),
            count_text(s.iops.round() as u64),
            format!("{:.1}", s.mb_per_s),
            micros_text(s.mean_us),
            micros_text(s.p50_us),
            micros_text(s.p90_us),
            micros_text(s.p99_us),
            micros_text(s.p99_9_us),
            micros_text(s.max_us),
            count_text(s.operations),
        ]);
    };
    row("ashlar", &report.summary);
    for (name, baseline) in [
        ("floor", &report.floor),
        ("floor, depth 1", &report.floor_depth_1),
        ("raw device", &report.raw),
    ] {
        if let Some(baseline) = baseline {
            row(name, &baseline.summary);
        }
    }
    output::align_numbers(&mut table);
    let mut text = format!(
        "{} {} depth {} × {} volume{}, {} replica{}, ack {}, {} through {}, {}\n{}{}\n{table}\n",
        report.mode.name(),
        Size(report.size_bytes),
        report.depth,
        report.volumes,
        if report.volumes == 1 { "" } else { "s" },
        report.replicas,
        if report.replicas == 1 { "" } else { "s" },
        format!("{:?}", report.ack).to_lowercase(),
        report.store,
        report.front_end,
        report.engine,
        report.pinning,
        if report.busy_poll_us > 0 {
            format!(", busy-polling up to {} µs", report.busy_poll_us)
        } else {
            String::new()
        },
    );
    let cpu = |cpu: &BTreeMap<String, f64>| {
        let parts: Vec<_> = cpu
            .iter()
            .map(|(name, us)| format!("{name} {us:.1}"))
            .collect();
        parts.join(", ")
    };
    text.push_str(&format!(
        "CPU µs per operation: {}\n",
        cpu(&report.cpu_us_per_operation)
    ));
    if let Some(floor) = &report.floor {
        text.push_str(&format!(
            "  of the floor: {}\n",
            cpu(&floor.cpu_us_per_operation)
        ));
    }
    if let Some(bytes) = report.device_bytes_per_client_byte {
        text.push_str(&format!(
            "bytes written to devices per byte written: {bytes:.2}\n"
        ));
    }
    if report.errors > 0 {
        text.push_str(&format!(
            "{} operations FAILED\n",
            count_text(report.errors)
        ));
    }
    if let Some(ratio) = report.p50_over_floor {
        text.push_str(&format!("p50 is {ratio:.2} × the floor\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let summary = Summary {
            operations: 9,
            iops: 1234.5,
            p50_us: 50.0,
            ..Summary::default()
        };
        let cpu: BTreeMap<_, _> = [("client".to_owned(), 3.25)].into();
        let baseline = Baseline {
            summary: Summary {
                p50_us: 40.0,
                ..summary.clone()
            },
            cpu_us_per_operation: cpu.clone(),
        };
        Report {
            mode: Mode::RandWrite,
            size_bytes: 4096,
            depth: 1,
            replicas: 3,
            volumes: 1,
            store: "ram".into(),
            front_end: "library",
            engine: "io_uring".into(),
            ack: Ack::Majority,
            pinning: "not pinned, 2 CPUs".into(),
            busy_poll_us: 0,
            p50_over_floor: ratio(&summary, Some(&baseline)),
            summary,
            errors: 0,
            cpu_us_per_operation: cpu,
            device_bytes_per_client_byte: Some(3.1),
            floor: Some(baseline.clone()),
            floor_depth_1: None,
            raw: Some(baseline),
        }
    }

    #[test]
    fn the_json_has_the_documented_fields_and_the_document_names_them_all() {
        let document = include_str!("../../../docs/bench.md");
        let json = serde_json::to_value(report()).unwrap();
        let top: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        let expected = [
            "ack",
            "busy_poll_us",
            "cpu_us_per_operation",
            "depth",
            "device_bytes_per_client_byte",
            "engine",
            "errors",
            "floor",
            "floor_depth_1",
            "front_end",
            "iops",
            "max_us",
            "mb_per_s",
            "mean_us",
            "mode",
            "operations",
            "p50_over_floor",
            "p50_us",
            "p90_us",
            "p99_9_us",
            "p99_us",
            "pinning",
            "raw",
            "replicas",
            "seconds",
            "size_bytes",
            "store",
            "volumes",
        ];
        assert_eq!(top, expected);
        for name in &top {
            assert!(
                document.contains(&format!("`{name}`")),
                "docs/bench.md lacks {name}"
            );
        }
        for baseline in ["floor", "raw"] {
            for name in json[baseline].as_object().unwrap().keys() {
                assert!(
                    top.contains(name),
                    "{baseline}.{name} is the same field as {name}"
                );
            }
        }
        assert_eq!(json["p50_over_floor"], 1.25);
        assert_eq!(json["mode"], "randwrite");
        assert_eq!(json["floor_depth_1"], serde_json::Value::Null);
    }

    #[test]
    fn the_table_names_all_rows_and_the_distance_to_the_floor() {
        let text = text(&report());
        for part in [
            "ashlar",
            "floor",
            "raw device",
            "1.25 × the floor",
            "client 3.2",
            "1,23",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
