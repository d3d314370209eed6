//! What quickstart prints in the end.

use serde::Serialize;

use crate::output;
use crate::units::{count_text, duration_text, micros_text};
use std::time::Duration;

/// The JSON document of `ashlar quickstart -o json`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Whether every step held.
    pub passed: bool,
    /// Why it ended early.
    pub error: Option<String>,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// What was measured.
    pub figures: Figures,
    /// What is still running (with --keep).
    pub kept: Option<Kept>,
}

/// One step.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// What was done.
    pub name: String,
    /// Whether it came out as it must.
    pub held: bool,
    /// How long it took.
    pub seconds: f64,
    /// What came out.
    pub detail: String,
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// "io_uring" or "portable".
    pub engine: String,
    /// Copying the image to the volume, in 10⁶ bytes per second.
    pub copy_mb_per_s: f64,
    /// 4 KiB writes at depth 1 through NBD: median latency.
    pub write_p50_us: f64,
    /// Their 99th percentile.
    pub write_p99_us: f64,
    /// Writes per second at depth 1.
    pub write_iops: f64,
    /// The longest time without an acknowledged write around the death of a node.
    pub longest_stall_ms: f64,
    /// Writes acknowledged while the node was away.
    pub writes_while_down: u64,
    /// From the node's start to all three replicas in sync.
    pub resync_seconds: f64,
    /// Blocks that were copied to it.
    pub resync_blocks: u64,
    /// Blocks compared on all replicas.
    pub blocks_compared: u64,
}

/// What is still running.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// Where NBD clients connect.
    pub nbd_uris: Vec<String>,
    /// URLs of the nodes' and the initiator's metrics.
    pub metrics: Vec<String>,
    /// The state directory for `ashlar --state`.
    pub state: String,
}

/// The report for people.
pub fn text(report: &Report) -> String {
    let f = &report.figures;
    let mut text = String::new();
    if let Some(error) = &report.error {
        text.push_str(&format!("\nended early: {error}\n"));
    }
    if report.passed {
        let mut table = output::table(["result", ""]);
        let mut row = |what: &str, value: String| {
            table.add_row([what.to_owned(), value]);
        };
        row(
            "4 KiB write, depth 1, three replicas, p50",
            micros_text(f.write_p50_us),
        );
        row("  p99", micros_text(f.write_p99_us));
        row("  per second", count_text(f.write_iops as u64));
        row(
            "longest stall when a node was killed",
            format!("{:.1} ms", f.longest_stall_ms),
        );
        row("writes while it was down", count_text(f.writes_while_down));
        row(
            "back in sync after",
            duration_text(Duration::from_secs_f64(f.resync_seconds)),
        );
        row(
            "blocks equal on three replicas",
            count_text(f.blocks_compared),
        );
        row("engine", f.engine.clone());
        text.push_str(&format!("\n{table}\n"));
    }
    match &report.kept {
        Some(kept) => text.push_str(&kept_text(kept)),
        None if report.passed => text.push_str(NEXT),
        None => text.push_str("\nNOT every step held.\n"),
    }
    text
}

const NEXT: &str = "
Try next:
  ashlar quickstart --keep                        leave it running and use the volume
  ashlar bench randwrite --size 4k --depth 1      latency beside what sockets and device alone do
  ashlar bench randwrite --store disk --depth 16  the same on this machine's disk
";

fn kept_text(kept: &Kept) -> String {
    let mut text = String::from("\nIt is still running:\n");
    for uri in &kept.nbd_uris {
        text.push_str(&format!("  volume   {uri}\n"));
    }
    for url in &kept.metrics {
        text.push_str(&format!("  metrics  {url}\n"));
    }
    let uri = kept.nbd_uris.first().map_or("", String::as_str);
    let state = &kept.state;
    text.push_str(&format!(
        "\nTry next:\n  nbdinfo '{uri}'\n  ashlar --state {state} volume status quickstart\n  \
         ashlar --state {state} replicas compare quickstart\n  \
         ashlar quickstart --stop    ends it\n"
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_the_documented_shape() {
        let step = Step {
            name: "a".into(),
            held: true,
            seconds: 0.1,
            detail: "b".into(),
        };
        let report = Report {
            steps: vec![step],
            ..Report::default()
        };
        let json = serde_json::to_value(report).unwrap();
        let keys =
            |v: &serde_json::Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&json), ["error", "figures", "kept", "passed", "steps"]);
        assert_eq!(
            keys(&json["steps"][0]),
            ["detail", "held", "name", "seconds"]
        );
        assert_eq!(
            keys(&json["figures"]),
            [
                "blocks_compared",
                "copy_mb_per_s",
                "engine",
                "longest_stall_ms",
                "resync_blocks",
                "resync_seconds",
                "write_iops",
                "write_p50_us",
                "write_p99_us",
                "writes_while_down",
            ]
        );
    }

    #[test]
    fn the_end_says_what_to_try_next_or_that_something_failed() {
        let mut report = Report::default();
        assert!(text(&report).contains("NOT every step"));
        report.passed = true;
        assert!(text(&report).contains("ashlar bench randwrite"));
        let nbd_uris = vec!["nbd+unix:///quickstart?socket=/x".to_owned()];
        report.kept = Some(Kept {
            nbd_uris,
            metrics: vec!["http://a".into()],
            state: "/s".into(),
        });
        let text = text(&report);
        for part in [
            "nbdinfo 'nbd+unix",
            "metrics  http://a",
            "--state /s volume",
            "--stop",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
